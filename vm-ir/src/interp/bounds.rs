//! Accesses out of bounds, counted by op.

use super::observe::{Observer, State};
use crate::format::signed;
use crate::module::{Op, index_count};
use crate::op::PlaceRule;
use std::collections::HashMap;
use std::fmt;

/// An op that reached beyond its view or shared array, in a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutOfBounds {
    /// The op's name.
    pub op: &'static str,
    /// Its line; 0 if unknown.
    pub line: u32,
    /// The view or the array, without `@`.
    pub place: String,
    /// The extents of the place, in elements.
    pub extents: Vec<u64>,
    /// The first indices that are not all within.
    pub first: Vec<i64>,
    /// Lanes of the access, or bytes of one by bytes: it reaches from the last index over so many elements.
    pub lanes: u8,
    /// Accesses of a thread that were not wholly within. A vector counts once.
    pub count: u64,
}

impl fmt::Display for OutOfBounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OutOfBounds { op, line, place, extents, first, lanes, count } = self;
        if *line > 0 {
            write!(f, "line {line}, ")?;
        }
        let times = if *count == 1 { "time" } else { "times" };
        write!(f, "{op}: @{place}, which has extents {extents:?}, at {first:?}")?;
        if *lanes > 1 {
            write!(f, " and {} behind", lanes - 1)?;
        }
        write!(f, ": out of bounds {count} {times}")
    }
}

/// Counts the accesses out of bounds of a run, to be given to [`observe`](super::observe). In a guest's module they are no
/// error: such a load gives 0, such a store does nothing, and an index into a shared array is clamped. What tile kernels
/// move by boxes is not counted: boxes reach beyond views by design.
#[derive(Debug, Default)]
pub struct BoundsCounter {
    found: HashMap<*const Op, OutOfBounds>,
}

impl BoundsCounter {
    /// What was found, in the order of the lines.
    pub fn found(self) -> Vec<OutOfBounds> {
        let mut found: Vec<_> = self.found.into_values().collect();
        found.sort_by(|a, b| (a.line, &a.place, a.op, &a.first).cmp(&(b.line, &b.place, b.op, &b.first)));
        found
    }
}

impl Observer for BoundsCounter {
    fn op(&mut self, op: &Op, threads: &[u32], state: &State<'_>) {
        let Some(place) = op.place else { return };
        if !matches!(op.code.shape().place(), PlaceRule::Any | PlaceRule::Shared) {
            return;
        }
        let kernel = state.kernel();
        let Some(value) = op.result().or(op.operands.last().copied()) else { return };
        let extents = state.extents(place);
        // Bytes, of an access by those, which must be at a multiple of so many.
        let (lanes, multiple) = match kernel.by_bytes(op).map(|ty| ty.bytes() as u8) {
            Some(bytes) => (bytes, i64::from(bytes)),
            None if kernel.surface(place).is_some() => (1, 1),
            None => (kernel.type_of(value).lanes(), 1),
        };
        let indices = &op.operands[..index_count(kernel, op).min(op.operands.len())];
        for &thread in threads {
            let index = |value| signed(kernel.type_of(value).scalar(), state.lanes(value, thread)[0]);
            let within = |(at, (value, extent)): (usize, (&crate::Value, &u64))| {
                let behind = if at + 1 == indices.len() { i64::from(lanes) - 1 } else { 0 };
                let first = index(*value);
                let last = first.checked_add(behind).and_then(|last| u64::try_from(last).ok());
                first >= 0 && first % multiple == 0 && last.is_some_and(|last| last < *extent)
            };
            if indices.iter().zip(extents).enumerate().all(within) {
                continue;
            }
            let entry = self.found.entry(std::ptr::from_ref(op)).or_insert_with(|| OutOfBounds {
                op: op.code.mnemonic(),
                line: op.line.0,
                place: kernel.place_name(place).to_owned(),
                extents: extents.to_vec(),
                first: indices.iter().map(|value| index(*value)).collect(),
                lanes,
                count: 0,
            });
            entry.count += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interp::{Argument, Launch, Limits, Tensor, observe};
    use crate::types::Scalar;
    use crate::valid::{Trust, validate};

    #[test]
    fn accesses_out_of_bounds_are_counted_and_named() {
        let check = |body: &str, expect: &[&str]| {
            let source = format!(
                "vir 1\nkernel @k(@x: view<f32, [?, ?], readwrite>) at 0x0 block(4) {{\n  shared @s: i32[3]\n  %t = thread_id.x : i32\n{body}\n}}\n"
            );
            let module =
                crate::text::parse(&source).unwrap_or_else(|error| panic!("{}", error.render(&source)));
            let module = validate(module, Trust::Guest).unwrap();
            let arguments = vec![Argument::Tensor(Tensor::zeros(Scalar::F32, &[2, 6]))];
            let mut launch = Launch { kernel: "k".into(), grid: [2, 1, 1], arguments };
            let mut counter = BoundsCounter::default();
            let limits = Limits { races: false, ..Limits::default() };
            observe(&module, &mut launch, &limits, &mut counter).unwrap();
            let found: Vec<_> = counter.found().iter().map(ToString::to_string).collect();
            assert_eq!(found, expect, "{body}");
        };
        check("  %a = load @x[1, %t] : f32", &[]);
        check(
            "  %a = load @x[%t, 5] : f32\n  store @x[%t, -1], %a",
            &[
                "line 5, load: @x, which has extents [2, 6], at [2, 5]: out of bounds 4 times",
                "line 6, store: @x, which has extents [2, 6], at [0, -1]: out of bounds 8 times",
            ],
        );
        // A vector that reaches over the end, and an index that is clamped.
        check(
            "  %a = load @x[0, %t] : vec4<f32>\n  atomic.add.block @s[%t], 1",
            &[
                "line 5, load: @x, which has extents [2, 6], at [0, 3] and 3 behind: out of bounds 2 times",
                "line 6, atomic.add: @s, which has extents [3], at [3]: out of bounds 2 times",
            ],
        );
        check(
            "  %b = block_id.x : i32\n  %first = eq %b, 0 : bool\n  if %first {\n    %i = mul %t, 3 : i32\n    %z = load @x[0, %i] : f32\n  }",
            &["line 9, load: @x, which has extents [2, 6], at [0, 6]: out of bounds 2 times"],
        );
        check(
            "  store @x[0, 9223372036854775807], 1\n  %v = load @x[0, 9223372036854775807] : vec2<f32>",
            &[
                "line 5, store: @x, which has extents [2, 6], at [0, 9223372036854775807]: out of bounds 8 times",
                "line 6, load: @x, which has extents [2, 6], at [0, 9223372036854775807] and 1 behind: out of bounds 8 times",
            ],
        );
    }
}
