//! Clusters: blocks that run at the same time on multiprocessors next to each other, and write into each other's
//! shared memory.
//!
//! In an all-gather, lane `r` of each warp stores into block `r`, and the store itself counts down the bytes that a barrier in
//! that block's shared memory waits for (`st.async`). So nobody fences, which waits for all of a thread's memory, and a
//! block may end when its last gather is over: what was on its way to it is there. There are two such barriers, by
//! the parity of the phase: who is one gather ahead of another block is not two ahead. Elements of less than four bytes are stored
//! plainly, before a barrier of the whole cluster.
//!
//! Before the first gather all blocks must have begun. They say so where they come by together for the first time, and
//! ask just before the gather.

use super::asm::{Arg, Reg, def, ins, when};
use super::memory::Address;
use super::writer::Writer;
use std::collections::HashSet;
use vm_ir::Kernel;
use vm_ir::module::{Op, Place, Region};
use vm_ir::op::{Opcode, Shape};
use vm_ir::valid::Uniformity;

/// The barriers of the gathers.
pub(super) const BARRIERS: &str = "gathers";
/// Bytes of these.
pub(super) const BARRIER_BYTES: u32 = 16;

/// Where the blocks of a cluster make sure that all have begun.
#[derive(Clone, Debug, Default)]
pub(super) struct ClusterBarriers {
    /// Before these ops they say so.
    arrive: HashSet<*const Op>,
    /// Before these they wait for the others.
    wait: HashSet<*const Op>,
}

impl ClusterBarriers {
    pub(super) fn is_empty(&self) -> bool {
        self.wait.is_empty()
    }
}

/// Does a region gather anything?
pub(super) fn gathers(region: &Region) -> bool {
    region.ops.iter().any(op_gathers)
}

/// Is all of every shared array gathered before anything else is done with it? Then nobody sees what was there before.
pub(super) fn gathered_first(kernel: &Kernel) -> bool {
    let Uses { all, gathered } = Uses::of(kernel.body());
    all & !gathered == 0
}

/// Shared arrays, a bit for each.
#[derive(Clone, Copy, Default)]
struct Uses {
    /// Those that a region or an op uses.
    all: u64,
    /// Of these, those that a gather is the first to use, on the only way to all uses.
    gathered: u64,
}

impl Uses {
    fn of(region: &Region) -> Uses {
        let mut uses = Uses::default();
        // What was in regions of an op so far: the gather there is on the way to nothing behind that op.
        let mut inside = 0;
        for op in &region.ops {
            let own = Uses::of_op(op);
            uses.gathered &= !(own.all & inside);
            uses.gathered |= own.gathered & !uses.all;
            if !op.regions.is_empty() {
                inside |= own.all & !uses.all;
            }
            uses.all |= own.all;
        }
        uses
    }

    fn of_op(op: &Op) -> Uses {
        let mut uses = Uses::default();
        if let Some(Place::Shared(array)) = op.place {
            uses.all = 1 << (u32::from(array) % u64::BITS);
            uses.gathered = if op.code == Opcode::ClusterGather { uses.all } else { 0 };
        }
        for region in &op.regions {
            let own = Uses::of(region);
            uses.gathered = (uses.gathered | own.gathered) & !(uses.all & own.all);
            uses.all |= own.all;
        }
        uses
    }
}

const _: () = assert!(vm_ir::limits::MAX_SHARED_ARRAYS <= u64::BITS as usize);

fn op_gathers(op: &Op) -> bool {
    op.code == Opcode::ClusterGather || op.regions.iter().any(gathers)
}

impl Writer<'_> {
    /// Adds the barriers of the cluster before a gather: one on every way to it.
    pub(super) fn cluster_barriers(&self, region: &Region, cluster_barriers: &mut ClusterBarriers) {
        let mut due = region.ops.iter().filter(|op| op_gathers(op));
        let (Some(op), more) = (due.next(), due.next()) else { return };
        let uniform = |op: &Op| self.facts.steady(op.operands[0]) == Uniformity::Block;
        if more.is_none() && op.code.shape() == Shape::If && uniform(op) {
            op.regions.iter().for_each(|region| self.cluster_barriers(region, cluster_barriers));
            return;
        }
        // Not before a block's own memory is zeroed, lest that wipes out what others gave.
        let zeroed = region.ops.iter().find(|op| self.zero_at.contains(&std::ptr::from_ref(*op)));
        cluster_barriers.arrive.insert(zeroed.unwrap_or(&region.ops[0]));
        cluster_barriers.wait.insert(op);
    }

    /// The part of a barrier of the cluster that is before this op, if one is.
    pub(super) fn cluster_barrier(&mut self, op: &Op) {
        let here = std::ptr::from_ref(op);
        if self.cluster_barriers.arrive.contains(&here) {
            let index = self.local_index();
            let first = def!(self, Pred, "setp.eq.u32", index, 0);
            for at in [0, 8] {
                when!(self, first, true, "mbarrier.init.shared.b64", Arg::AtName(BARRIERS, at), 1);
            }
            when!(self, first, true, "fence.mbarrier_init.release.cluster");
            // What others give must not be zeroed after.
            let order = if self.zeroes { "" } else { ".relaxed" };
            ins!(self, &format!("barrier.cluster.arrive{order}.aligned"));
        }
        if self.cluster_barriers.wait.contains(&here) {
            ins!(self, "barrier.cluster.wait.aligned");
        }
    }

    /// What each warp has, into the array of every block; then a barrier.
    pub(super) fn gather(&mut self, op: &Op) {
        let (Some(Place::Shared(array)), Some(value)) = (op.place, op.operands.first().copied()) else {
            return;
        };
        let (scalar, regs) = (self.ty(value).scalar(), self.all(value));
        let size = scalar.bytes() * regs.len() as u32;
        let blocks = self.kernel.cluster();
        let index = self.local_index();
        let lane = def!(self, B32, "and.b32", index, 31);
        let warp = def!(self, B32, "shr.u32", index, 5);
        let gives = def!(self, Pred, "setp.lt.u32", lane, i64::from(blocks));
        let start = self.shared.unwrap_or(Reg::NONE);
        let offset = i64::from(self.shared_offsets[usize::from(array)]);
        let align = 16.min(1 << size.trailing_zeros());
        if blocks == 1 {
            let base = def!(self, B32, "mad.lo.u32", warp, i64::from(size), start);
            let address = Address { base, offset, space: "shared", align };
            self.put(scalar, &regs, &address, ("st.shared", None), Some(gives), None);
            ins!(self, "bar.sync", 0);
            return;
        }
        let rank = self.cluster_rank();
        let warps = i64::from(self.kernel.cluster_warps());
        let slot = def!(self, B32, "mad.lo.u32", rank, warps / i64::from(blocks), warp);
        let own = def!(self, B32, "mad.lo.u32", slot, i64::from(size), start);
        // Lanes that give nothing name a block too.
        let to = def!(self, B32, "and.b32", lane, i64::from(blocks - 1));
        let base = def!(self, B32, "mapa.shared::cluster.u32", own, to);
        let address = Address { base, offset, space: "shared::cluster", align };
        if !size.is_multiple_of(4) {
            self.put(scalar, &regs, &address, ("st.shared::cluster", None), Some(gives), None);
            ins!(self, "barrier.cluster.arrive.aligned");
            ins!(self, "barrier.cluster.wait.aligned");
            return;
        }
        let Some(phase) = self.phase else { return };
        let both = def!(self, B32, "mov.u32", BARRIERS);
        let odd = def!(self, B32, "and.b32", phase, 1);
        let barrier = def!(self, B32, "mad.lo.u32", odd, 8, both);
        let parity = def!(self, B32, "bfe.u32", phase, 1, 1);
        let there = def!(self, B32, "mapa.shared::cluster.u32", barrier, to);
        let first = def!(self, Pred, "setp.eq.u32", index, 0);
        let bytes = warps * i64::from(size);
        let expect = "mbarrier.arrive.expect_tx.shared.b64";
        when!(self, first, true, expect, "_", Arg::At(barrier, 0), bytes);
        let store = "st.async.shared::cluster.mbarrier::complete_tx::bytes";
        self.put(scalar, &regs, &address, (store, Some(there)), Some(gives), None);
        // Among the threads of the block it is a barrier like any other.
        ins!(self, "bar.sync", 0);
        let head = self.asm.new_label();
        self.asm.place(head);
        let over = def!(self, Pred, "mbarrier.try_wait.parity.shared.b64", Arg::At(barrier, 0), parity);
        when!(self, over, false, "bra", Arg::Label(head));
        ins!(self, "add.s32", phase, phase, 1);
    }

    /// The block's number in its cluster.
    pub(super) fn cluster_rank(&mut self) -> Reg {
        match self.kernel.cluster() {
            1 => self.number(vm_ir::Scalar::I32, 0),
            blocks if self.is_sync() => {
                let block = def!(self, B32, "mov.u32", "%ctaid.x");
                def!(self, B32, "rem.u32", block, i64::from(blocks))
            }
            _ => def!(self, B32, "mov.u32", "%cluster_ctarank"),
        }
    }

    /// The cluster's number along x.
    pub(super) fn cluster_id(&mut self) -> Reg {
        if self.is_sync() {
            let block = def!(self, B32, "mov.u32", "%ctaid.x");
            return def!(self, B32, "div.u32", block, i64::from(self.kernel.cluster()));
        }
        let name = if self.kernel.cluster() == 1 { "%ctaid.x" } else { "%clusterid.x" };
        def!(self, B32, "mov.u32", name)
    }
}
