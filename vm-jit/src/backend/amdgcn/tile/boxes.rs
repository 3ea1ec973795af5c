//! Boxes of views, clipped in 64 bits: what is outside is never touched.

use super::super::writer::{Val, View, Writer};
use vm_ir::Value;
use vm_ir::module::Op;
use vm_ir::tile::column_step;

/// Above every extent of a tile: what lies that far from a box is out of it.
pub(super) const FAR: i64 = 1 << 20;

/// A stretch of a box that lies in a view: from `skip` up to `end`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    pub(super) skip: Val,
    pub(super) end: Val,
}

/// A box of a view.
#[derive(Clone, Copy, Debug)]
pub(super) struct Box2 {
    /// The address at which it begins, which may be outside of the view.
    pub(super) base: Val,
    /// Bytes from a row to the next; zero along the last dimension alone.
    pub(super) stride: Val,
    pub(super) rows: Option<Range>,
    pub(super) columns: Range,
}

impl Writer<'_> {
    /// What lies in a dimension of `extent` of a box that begins at `first`.
    fn range(&mut self, first: Val, extent: Val) -> Range {
        let far = |sign: i64| Val::Bits((sign * FAR) as u64);
        let first = self.call("i64", "llvm.smax.i64", &[("i64", first), ("i64", far(-1))]);
        let mut narrow = |from: Val, to: Val| {
            let wide = self.def(format_args!("sub i64 {from}, {to}"));
            let wide = self.call("i64", "llvm.smax.i64", &[("i64", wide), ("i64", Val::Bits(0))]);
            let wide = self.call("i64", "llvm.smin.i64", &[("i64", wide), ("i64", far(1))]);
            self.def(format_args!("trunc i64 {wide} to i32"))
        };
        Range { skip: narrow(Val::Bits(0), first), end: narrow(extent, first) }
    }

    /// The box of an op's view that begins at these indices. `copied`: is its column rounded down to a multiple of 16 bytes? `line`: does
    /// it lie along the last dimension alone?
    pub(super) fn clipped(&mut self, op: &Op, indices: &[Value], copied: bool, line: bool) -> Option<Box2> {
        let place = op.place?;
        let View { base, extents, strides } = self.view(place)?.clone();
        let (_, element) = self.kernel.place(place)?;
        let last = extents.len().checked_sub(1)?;
        let above = if line { last } else { last.checked_sub(1)? };
        let (mut offset, mut outside, mut ranges) = (Val::Bits(0), None, Vec::new());
        for (i, index) in indices.iter().enumerate() {
            let mut wide = self.wide(*index);
            if i == last && copied {
                let step = Val::Bits(-i64::from(column_step(element)) as u64);
                wide = self.def(format_args!("and i64 {wide}, {step}"));
            }
            let stride = strides.get(i).copied().unwrap_or(Val::Bits(element.bytes().into()));
            let bytes = self.def(format_args!("mul i64 {wide}, {stride}"));
            offset = self.def(format_args!("add i64 {offset}, {bytes}"));
            if i >= above {
                ranges.push(self.range(wide, extents[i]));
                continue;
            }
            // Below zero is far above.
            let out = self.def(format_args!("icmp uge i64 {wide}, {}", extents[i]));
            outside = Some(match outside {
                None => out,
                Some(before) => self.def(format_args!("or i1 {before}, {out}")),
            });
        }
        let mut columns = ranges.pop()?;
        if let Some(outside) = outside {
            columns.end = self.def(format_args!("select i1 {outside}, i32 0, i32 {}", columns.end));
        }
        let base = self.def(format_args!("getelementptr i8, ptr addrspace(1) {base}, i64 {offset}"));
        let stride = strides.get(above).copied().filter(|_| !line).unwrap_or(Val::Bits(0));
        Some(Box2 { base, stride, rows: ranges.pop(), columns })
    }

    /// An address so many bytes further: a number of 64 bits.
    pub(super) fn further(&mut self, base: Val, bytes: Val) -> Val {
        self.def(format_args!("getelementptr i8, ptr addrspace(1) {base}, i64 {bytes}"))
    }

    /// The address of a row of a box.
    pub(super) fn row_address(&mut self, base: Val, stride: Val, row: Val) -> Val {
        let row = self.def(format_args!("zext i32 {row} to i64"));
        let bytes = self.def(format_args!("mul i64 {row}, {stride}"));
        self.further(base, bytes)
    }

    /// Whether both hold.
    pub(super) fn both(&mut self, a: Val, b: Val) -> Val {
        self.def(format_args!("and i1 {a}, {b}"))
    }

    /// Whether the number is in the range.
    pub(super) fn is_in(&mut self, range: Range, number: Val) -> Val {
        let below = self.def(format_args!("icmp slt i32 {number}, {}", range.end));
        let above = self.def(format_args!("icmp sge i32 {number}, {}", range.skip));
        self.both(below, above)
    }
}
