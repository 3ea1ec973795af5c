//! How much a thread does at most, so that whoever launches a guest's kernel can tell one that would never end from one
//! that will: nothing stops what is not watched.
//!
//! Work is counted in weighted operations: about what a thread's share of a processor does in the time of one addition, as
//! if nothing were ever at hand. It is a bound, not an estimate.
//!
//! | operation | weight of each lane |
//! | --- | --- |
//! | on numbers; control flow | 1, in f64 4 |
//! | conversion | 8 |
//! | division, remainder, a mathematical function | 64 |
//! | load, store | of a view 16, of a shared array 8 |
//! | atomic | of a view 1024, of a shared array 256 |
//! | fence, gathering in a cluster | 1024 |
//! | barrier, and whatever else threads do together | 64 |
//! | to begin | 8, and 2048 for the block |
//!
//! Of an `if` or a `switch` all regions count: threads of a warp that part go one behind the other. A loop counts as often
//! as its rounds at most; one that is watched counts one round, in which a launch that is to be stopped is.

use crate::range::Ranges;
use vm_ir::module::{Op, Place, Region};
use vm_ir::op::{Group, Opcode, Shape};
use vm_ir::{Kernel, Scalar};

/// A guest's loops of at most so many rounds, nested ones multiplied, are not watched.
pub(crate) const SHORT: u64 = 4096;

/// Weighted operations of a thread, about, after which it looks at the stop word again in loops whose rounds are long.
pub(crate) const LOOK: u64 = 1 << 20;

const BEGIN: u64 = 8;
const BEGIN_BLOCK: u64 = 2048;
const SHARED_ACCESS: u64 = 8;

/// The most weighted operations of a thread. Of what is no guest's no loop is watched; then it is [`u64::MAX`] for a loop
/// without a bound.
pub(crate) fn of(kernel: &Kernel, ranges: &Ranges, guest: bool) -> u64 {
    let threads: u64 = kernel.block().iter().map(|size| u64::from(*size)).product();
    let shared: u64 = kernel.shared().iter().map(|array| array.bytes()).sum();
    // A guest's shared memory is zeroed, word by word at worst.
    let block = BEGIN_BLOCK.saturating_add(SHARED_ACCESS.saturating_mul(shared / 4));
    let count = Count { kernel, ranges, guest };
    let body = count.region(kernel.body(), 1);
    body.saturating_add(BEGIN).saturating_add(block.div_ceil(threads.max(1)))
}

/// What a round of a guest's loop takes from [`LOOK`], if `threads` take it one behind the other; `None` of short rounds, where
/// [`SHORT`] of them take no more than that.
pub(crate) fn of_round(kernel: &Kernel, ranges: &Ranges, op: &Op, threads: u64) -> Option<i64> {
    let round = Count { kernel, ranges, guest: true }.regions(op, 1).saturating_mul(threads);
    (round > LOOK / SHORT).then(|| round.min(LOOK) as i64)
}

struct Count<'a> {
    kernel: &'a Kernel,
    ranges: &'a Ranges,
    guest: bool,
}

impl Count<'_> {
    /// A region once. `rounds` is those of the loops around it that are not watched.
    fn region(&self, region: &Region, rounds: u64) -> u64 {
        region.ops.iter().fold(0, |sum, op| sum.saturating_add(self.op(op, rounds)))
    }

    fn regions(&self, op: &Op, rounds: u64) -> u64 {
        op.regions.iter().fold(1, |sum, region| sum.saturating_add(self.region(region, rounds)))
    }

    fn op(&self, op: &Op, rounds: u64) -> u64 {
        match op.code.shape() {
            Shape::If => self.regions(op, rounds),
            Shape::Switch => self.regions(op, rounds).saturating_add(op.regions.len() as u64),
            Shape::While if self.guest => self.regions(op, 1),
            Shape::While => u64::MAX,
            Shape::For => {
                let own = self.ranges.loop_of(op).map_or(u64::MAX, |known| known.rounds);
                let all = own.saturating_mul(rounds);
                match self.guest && all > SHORT {
                    // It may be written out, without a watch.
                    true if own <= op.unroll() => own.saturating_mul(self.regions(op, 1)),
                    true => self.regions(op, 1),
                    false => own.saturating_mul(self.regions(op, all)).saturating_add(1),
                }
            }
            _ => self.plain(op),
        }
    }

    fn plain(&self, op: &Op) -> u64 {
        let value = op.result().or(op.operands.last().copied()).map(|value| self.kernel.type_of(value));
        let lanes = value.map_or(1, |ty| u64::from(ty.lanes()));
        let shared = matches!(op.place, Some(Place::Shared(_)));
        let info = op.code.info();
        let weight = match (info.group, op.code) {
            (_, Opcode::Fence | Opcode::ClusterGather) => 1024,
            (_, Opcode::DivS | Opcode::DivU | Opcode::RemS | Opcode::RemU) => 64,
            _ if info.error.is_some() => 64,
            (_, Opcode::Extent) => 1,
            (_, Opcode::LoadUniform) | (Group::Threads | Group::Trusted, _) => 64,
            (Group::Memory, _) if shared => SHARED_ACCESS,
            (Group::Memory, _) => 16,
            (Group::Atomics, _) if shared => 256,
            (Group::Atomics, _) => 1024,
            (Group::Convert, _) => 8,
            _ if value.is_some_and(|ty| ty.scalar() == Scalar::F64) => 4,
            _ => 1,
        };
        weight * lanes
    }
}

#[cfg(test)]
mod tests {
    use vm_ir::{Trust, text, validate};

    use super::*;

    fn work(trust: Trust, block: &str, params: &str, body: &str) -> u64 {
        let text = format!("vir 1\nkernel @k({params}) at 0x0 block({block}) {{\n{body}\n}}");
        let module =
            validate(text::parse(&text).unwrap(), trust).unwrap_or_else(|error| panic!("{text}: {error}"));
        let kernel = &module.kernels()[0];
        of(kernel, &Ranges::of(kernel), trust == Trust::Guest)
    }

    const REST: u64 = BEGIN + BEGIN_BLOCK / 32;
    const PARAMS: &str = "@x: view<f32, [?], readwrite>, @n: view<i32, [?], readwrite>, %v: f32, %i: i64, %j: i32, \
                          %few: i32 in [0, 100]";

    const ENDLESS: &str = "while {\n%u = lt.s %j, %j : bool\nyield %u\n} do {\n}";

    /// What the body takes beside what every thread does.
    fn check(body: &str, expect: u64) {
        assert_eq!(work(Trust::Guest, "32", PARAMS, body), expect + REST, "{body}");
    }

    /// A loop up to a bound, which is defined before, around a body. It takes 2 beside its rounds.
    fn around(name: &str, bound: &str, body: &str) -> String {
        format!(
            "%{name}0 = const 0 : i32\n%{name}1 = const 1 : i32\n\
             for %{name}: i32 = %{name}0 to {bound} step %{name}1 {{\n{body}\n}}"
        )
    }

    #[test]
    fn operations_are_weighed() {
        check("", 0);
        check("%a = add %v, %v : f32", 1);
        check("%a = div %v, %v : f32\n%b = exp.fast %v : f32\n%c = div.s %j, %j : i32", 3 * 64);
        check("%a = fpconv %v : f64\n%b = add %a, %a : f64", 8 + 4);
        check("%a = load @x[%i] : f32\nstore @x[%i], %a", 2 * 16);
        check("%a = load @x[%i] : vec4<f32>\n%b = add %a, %a : vec4<f32>", 4 * 16 + 4);
        check("%a = atomic.add.device @n[%i], %j : i32", 1024);
        check("barrier.block\n%a = warp.add %v : f32", 2 * 64);
        // Both sides of a branch: a warp may take both.
        check(
            "%a = lt.s %j, %j : bool\nif %a {\nstore @x[%i], %v\n} else {\nstore @x[%i], %v\n}",
            1 + 1 + 2 * 16,
        );
    }

    #[test]
    fn long_rounds_are_looked_at_sooner() {
        let check = |body: &str, threads: u64, expect: Option<i64>| {
            let text = format!("vir 1\nkernel @k({PARAMS}) at 0x0 block(32) {{\n{body}\n}}");
            let module = validate(text::parse(&text).unwrap(), Trust::Guest).unwrap();
            let kernel = &module.kernels()[0];
            let mut found = None;
            kernel.for_each_op(&mut |op| {
                if matches!(op.code.shape(), Shape::For | Shape::While) && found.is_none() {
                    found = Some(of_round(kernel, &Ranges::of(kernel), op, threads));
                }
            });
            assert_eq!(found, Some(expect), "{body}");
        };
        let long = "%a = atomic.add.device @n[%i], %j : i32";
        check(&around("c", "%j", "%a = div %v, %v : f32"), 1, None);
        check(&around("c", "%j", "%a = div %v, %v : f32"), 32, Some(32 * 65));
        check(&around("c", "%j", long), 1, Some(1025));
        // A round with a short loop inside, and one that is as much as all the work between two looks.
        check(&around("c", "%j", &around("d", "%few", long)), 1, Some(1 + 2 + 100 * 1025 + 1));
        check(&around("c", "%j", &around("d", "%few", long)), 16, Some(LOOK as i64));
    }

    #[test]
    fn loops_count_their_rounds_until_they_are_watched() {
        let body = "%a = load @x[%i] : f32\n%b = add %a, %a : f32";
        // The body's, and one for the round.
        let each = 16 + 1 + 1;
        let to = |bound: u64| format!("%end = const {bound} : i32\n{}", around("c", "%end", body));
        check(&to(0), 3 + 1);
        check(&to(10), 3 + 10 * each + 1);
        check(&to(4096), 3 + 4096 * each + 1);
        check(&to(4097), 3 + each);
        check(&around("c", "%few", body), 2 + 100 * each + 1);
        check(&around("c", "%j", body), 2 + each);
        // Together they are long, so the inner one is watched.
        let nested = around("c", "%few", &around("d", "%few", body));
        check(&nested, 2 + 100 * (1 + 2 + each) + 1);
        // What is written out is not.
        let unrolled = nested.replace("step %d1 {", "step %d1 unroll 128 {");
        check(&unrolled, 2 + 100 * (1 + 2 + 100 * each) + 1);
        check(ENDLESS, 1 + 1);
    }

    #[test]
    fn what_nothing_watches_has_no_bound() {
        let body = around("c", "%j", "%a = add %v, %v : f32");
        assert_eq!(work(Trust::Trusted, "32", PARAMS, &body), (i32::MAX as u64) * 2 + 2 + 1 + REST);
        assert_eq!(work(Trust::Trusted, "32", PARAMS, ENDLESS), u64::MAX);
    }

    #[test]
    fn a_block_is_not_for_nothing() {
        assert_eq!(work(Trust::Guest, "1", "", ""), BEGIN + BEGIN_BLOCK);
        assert_eq!(work(Trust::Guest, "1024", "", ""), BEGIN + 2);
        assert_eq!(work(Trust::Guest, "1", "", "shared @s: f32[1024]"), BEGIN + BEGIN_BLOCK + 8 * 1024);
    }
}
