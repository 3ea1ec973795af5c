//! Where threads, warps and blocks are, and how large views: ids and extents.

use super::lanes::Repr;
use super::writer::{Extent, Threads, Writer};
use cranelift_codegen::ir::{InstBuilder, Value as Ssa, types};
use vm_ir::limits::WARP;
use vm_ir::module::{Op, Place};
use vm_ir::op::{Axis, Opcode};

impl Writer<'_, '_> {
    /// Where a thread is in its block.
    pub(super) fn place(&mut self, index: Ssa) -> Threads {
        let [x, y, z] = self.kernel.block();
        let flat = self.in_block(index);
        let flat = self.b.ins().ireduce(types::I32, flat);
        let zero = self.b.ins().iconst(types::I32, 0);
        let mut rest = flat;
        let mut at = [zero; 3];
        for (i, size) in [x, y, z].into_iter().enumerate() {
            let last = [x, y, z][i + 1..].iter().all(|d| *d == 1);
            let a_row = i == 0 && size as usize == self.width;
            at[i] = match size {
                _ if a_row => zero,
                _ if last => rest,
                size if size.is_power_of_two() => self.b.ins().band_imm_s(rest, i64::from(size) - 1),
                size => self.b.ins().urem_imm_s(rest, i64::from(size)),
            };
            if last {
                break;
            }
            rest = match size.is_power_of_two() {
                true => self.b.ins().ushr_imm_s(rest, i64::from(size.trailing_zeros())),
                false => self.b.ins().udiv_imm_s(rest, i64::from(size)),
            };
        }
        Threads { index, at }
    }

    /// The number in its block of what has this number in the cluster, a thread.
    fn in_block(&mut self, index: Ssa) -> Ssa {
        match self.cluster() {
            1 => index,
            _ => self.b.ins().urem_imm_s(index, i64::from(self.kernel.threads())),
        }
    }

    /// The number in its cluster of the block at hand; `None` where blocks are by themselves.
    pub(super) fn rank(&mut self) -> Option<Ssa> {
        let index = self.thread_index().filter(|_| self.cluster() > 1)?;
        Some(self.b.ins().udiv_imm_s(index, i64::from(self.kernel.threads())))
    }

    /// The number of the block at hand along an axis.
    fn block_at(&mut self, axis: usize) -> Ssa {
        let first = self.block[axis];
        match self.rank().filter(|_| axis == Axis::X as usize) {
            Some(rank) => {
                let rank = self.b.ins().ireduce(types::I32, rank);
                self.b.ins().iadd(first, rank)
            }
            None => first,
        }
    }

    /// The first thread at hand; of a warp, its first.
    pub(super) fn thread_index(&mut self) -> Option<Ssa> {
        match (self.threads, self.warp) {
            (Some(threads), _) => Some(threads.index),
            (None, Some(warp)) => Some(self.b.ins().imul_imm_s(warp, i64::from(WARP))),
            (None, None) => None,
        }
    }

    pub(super) fn warp_index(&mut self) -> Option<Ssa> {
        match (self.warp, self.threads) {
            (Some(warp), _) => Some(warp),
            (None, Some(threads)) => Some(self.b.ins().ushr_imm_s(threads.index, 5)),
            (None, None) => None,
        }
    }

    pub(super) fn id(&mut self, op: &Op) {
        let Some(result) = op.result() else { return };
        let axis = op.axis() as usize;
        let block = self.kernel.block();
        let wide = op.code == Opcode::GlobalId;
        let mut stride = 0;
        let (mut low, mut high) = (0, i64::from(i32::MAX));
        let one = match op.code {
            Opcode::BlockId => self.block_at(axis),
            Opcode::ClusterRank if self.kernel.tile().is_some() => {
                self.b.ins().urem_imm_s(self.block[0], i64::from(self.kernel.cluster()))
            }
            Opcode::ClusterRank => match self.rank() {
                Some(rank) => self.b.ins().ireduce(types::I32, rank),
                None => self.b.ins().iconst(types::I32, 0),
            },
            Opcode::ClusterId => self.b.ins().udiv_imm_s(self.block[0], i64::from(self.kernel.cluster())),
            Opcode::BlockDim => self.b.ins().iconst(types::I32, i64::from(block[axis])),
            Opcode::GridDim => self.grid[axis],
            Opcode::ThreadId | Opcode::GlobalId => {
                let at = match self.threads {
                    Some(threads) if block[axis] > 1 => threads.at[axis],
                    _ => self.b.ins().iconst(types::I32, 0),
                };
                if axis == Axis::X as usize && block[0] > 1 {
                    stride = 1;
                }
                high = i64::from(block[axis]) - 1;
                if wide {
                    high = 1 << 42;
                    let wide = self.b.ins().uextend(types::I64, at);
                    let number = self.block_at(axis);
                    let number = self.b.ins().uextend(types::I64, number);
                    let first = self.b.ins().imul_imm_s(number, i64::from(block[axis]));
                    self.b.ins().iadd(first, wide)
                } else {
                    at
                }
            }
            // The first of a warp.
            Opcode::LaneId if self.width == WARP as usize => {
                (stride, high) = (1, 31);
                self.b.ins().iconst(types::I32, 0)
            }
            Opcode::LocalIndex | Opcode::LaneId => {
                let index = self.thread_index();
                let index = match index {
                    Some(index) => {
                        let index = self.in_block(index);
                        self.b.ins().ireduce(types::I32, index)
                    }
                    None => self.b.ins().iconst(types::I32, 0),
                };
                stride = 1;
                if op.code == Opcode::LaneId {
                    high = 31;
                    self.b.ins().band_imm_s(index, 31)
                } else {
                    high = i64::from(self.kernel.threads());
                    index
                }
            }
            Opcode::WarpId => {
                low = 0;
                match self.warp_index() {
                    Some(index) => {
                        let index = match self.kernel.cluster() {
                            1 => index,
                            _ => self.b.ins().urem_imm_s(index, i64::from(self.kernel.threads() / WARP)),
                        };
                        self.b.ins().ireduce(types::I32, index)
                    }
                    None => self.b.ins().iconst(types::I32, 0),
                }
            }
            // The one left is `extent`.
            _ => {
                let dimension = op.immediates.first().map_or(0, |d| *d as usize);
                let extent = op.place.and_then(|place| self.extent(place, dimension));
                match extent {
                    Some(Extent::Given(extent)) => extent,
                    Some(Extent::Fixed(extent)) => self.b.ins().iconst(types::I64, extent as i64),
                    None => self.b.ins().iconst(types::I64, 0),
                }
            }
        };
        let repr = match stride {
            1 if self.width > 1 => Repr::Affine { base: one, stride, low, high },
            _ => Repr::Splat(one),
        };
        self.set(result, repr);
    }

    pub(super) fn extent(&self, place: Place, dimension: usize) -> Option<Extent> {
        match place {
            Place::View(i) => self.views.get(usize::from(i))?.as_ref()?.extents.get(dimension).copied(),
            Place::Shared(_) | Place::Local(_) | Place::Channel(_) | Place::Fragment(_) => None,
        }
    }
}
