//! Everything that range analysis assumes about a launch: the facts about parameters, grid and threads with which it begins. Code
//! does not check an index that is proved from them, so a launch that violates an assumption would let a guest access memory
//! outside of its views.
//!
//! A kernel cannot write to anything that is assumed. Parameters are read from a block that the launch owns. Block numbers are in
//! registers of a GPU, or on the stack of a CPU thread ([`cpu`](crate::backend::cpu)). Constants are in the code.
//!
//! | [`Assumption`] | holds for every launch | enforced by |
//! | --- | --- | --- |
//! | `Grid` | 1 to [`MAX_GRID`] blocks along each axis | `vm_accel::Grid::check`, and each queue by `Grid::check_compiled` |
//! | `Clusters` | a multiple of the kernel's cluster along x | the same |
//! | `Block` | the block size that the kernel declares | queues, which pass the artifact's block size; on a CPU the code's loops |
//! | `Warp` | warps of 32 threads, in order | the code, which takes lane numbers modulo 32 |
//! | `Extents` | 0 to [`MAX_EXTENT`] elements | `vm_accel::Extents::resolve`, when arguments are packed |
//! | `FixedExtents` | the declared number of elements | the same |
//! | `Multiples` | a multiple of the declared number | the same |
//! | `NamedExtents` | extents of one name are equal | `vm_accel::Arguments::new` |
//! | `ScalarRanges` | a value in the declared range | the same, and `Arguments::update` |
//! | `Alignment` | addresses and strides are multiples of the view's alignment | the same; for strides `Extents::resolve` |
//! | `Memory` | every element of a view, by its extents and strides, is in memory that the launch may use | `Extents::resolve`, by checked sums |
//! | `Apart` | a view that is written overlaps neither itself nor another view | `Arguments::new` |
//!
//! The conformance suite of `vm_accel` violates each assumption that a launch can violate, on every kind of accelerator. The tests
//! of the paravirtual worker do so as a guest.

use super::{Below, Fact};
use vm_abi::MAX_GRID;
use vm_ir::limits::{MAX_EXTENT, MAX_GRID_X, MAX_GRID_YZ, WARP};
use vm_ir::module::{Op, ParamKind};
use vm_ir::op::Opcode;
use vm_ir::view::Dim;
use vm_ir::{Kernel, Value};

const _: () = assert!(MAX_GRID[0] == MAX_GRID_X && MAX_GRID[1] == MAX_GRID_YZ && MAX_GRID[2] == MAX_GRID_YZ);

/// An assumption about every launch. The table in [the module](self) describes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::VariantArray)]
#[expect(missing_docs)]
pub enum Assumption {
    Grid,
    Clusters,
    Block,
    Warp,
    Extents,
    FixedExtents,
    Multiples,
    NamedExtents,
    ScalarRanges,
    Alignment,
    Memory,
    Apart,
}

impl Assumption {
    /// All assumptions.
    pub const ALL: &[Assumption] = <Assumption as strum::VariantArray>::VARIANTS;
}

/// Returns the facts about scalar parameters that have a range.
pub(super) fn of_parameters(kernel: &Kernel) -> impl Iterator<Item = (Value, Fact)> {
    kernel.params().iter().filter_map(|param| match param.kind {
        ParamKind::Scalar { value, range: Some((low, high)) } => {
            Some((value, Fact::between(i128::from(low), i128::from(high))))
        }
        _ => None,
    })
}

/// Returns the fact about an extent. `view` and `dimension` are the first extent of its name.
pub(super) fn of_extent(dim: Dim, (view, dimension): (u16, u8)) -> Fact {
    match dim {
        Dim::Fixed(extent) => Fact::between(i128::from(extent), i128::from(extent)),
        Dim::Any { multiple } => Fact {
            low: 0,
            high: i128::from(MAX_EXTENT),
            shift: multiple.trailing_zeros(),
            below: vec![Below { view, dimension, offset: 0 }],
        },
    }
}

/// Returns the fact about the result of an op that gives a thread's position or the size of its block, cluster or grid.
pub(super) fn of_place(kernel: &Kernel, op: &Op) -> Option<Fact> {
    let axis = op.axis() as usize;
    let size = i128::from(kernel.block()[axis]);
    let threads = i128::from(kernel.threads());
    let (grid, cluster) = (i128::from(MAX_GRID[axis]), i128::from(kernel.cluster()));
    Some(match op.code {
        Opcode::ThreadId => Fact::between(0, size - 1),
        Opcode::BlockId => Fact::between(0, grid - 1),
        Opcode::ClusterRank => Fact::between(0, cluster - 1),
        Opcode::ClusterId => Fact::between(0, grid / cluster - 1),
        Opcode::BlockDim => Fact::between(size, size),
        Opcode::GridDim => Fact::between(1, grid),
        Opcode::GlobalId => Fact::between(0, grid * size - 1),
        Opcode::LocalIndex => Fact::between(0, threads - 1),
        Opcode::LaneId => Fact::between(0, threads.min(i128::from(WARP)) - 1),
        Opcode::WarpId => Fact::between(0, (threads - 1) / i128::from(WARP)),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_names_every_assumption() {
        let text = include_str!("assumed.rs");
        let rows = text.lines().filter_map(|line| line.strip_prefix("//! | `")?.split_once('`'));
        let named: Vec<String> = rows.map(|(name, _)| name.to_owned()).collect();
        let all: Vec<String> = Assumption::ALL.iter().map(|one| format!("{one:?}")).collect();
        assert_eq!(named, all);
    }
}
