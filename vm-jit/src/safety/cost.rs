//! What ops cost: weighted operations, about what a thread's share of a processor does in the time of one addition, as if
//! nothing were ever at hand. They add up to a bound, not an estimate.
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
//! Of an `if` or a `switch` all regions count: threads of a warp that part go one behind the other.

use vm_ir::module::{Op, Place};
use vm_ir::op::{Group, Opcode, Shape};
use vm_ir::{Kernel, Scalar};

/// Whose costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Costs {
    /// A GPU's, by way of PTX.
    Ptx,
    /// A processor's.
    Cpu,
}

/// A loop beside its body, and each iteration.
pub(super) const LOOP: u64 = 1;
const BEGIN: u64 = 8;
const BEGIN_BLOCK: u64 = 2048;
const SHARED_ACCESS: u64 = 8;

/// What a thread's share is of what a block takes to begin.
pub(super) fn begin(kernel: &Kernel, _: Costs) -> u64 {
    let threads: u64 = kernel.block().iter().map(|size| u64::from(*size)).product();
    let shared: u64 = kernel.shared().iter().map(|array| array.bytes()).sum();
    // A guest's shared memory is zeroed, word by word at worst.
    let block = BEGIN_BLOCK.saturating_add(SHARED_ACCESS.saturating_mul(shared / 4));
    BEGIN.saturating_add(block.div_ceil(threads.max(1)))
}

/// What an op costs, without what it has inside.
pub(super) fn of(kernel: &Kernel, op: &Op, _: Costs) -> u64 {
    match op.code.shape() {
        Shape::If | Shape::For | Shape::While => return LOOP,
        Shape::Switch => return LOOP + op.regions.len() as u64,
        _ => {}
    }
    let value = op.result().or(op.operands.last().copied()).map(|value| kernel.type_of(value));
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
