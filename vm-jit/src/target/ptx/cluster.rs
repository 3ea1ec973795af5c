//! Clusters: blocks that run at the same time on multiprocessors next to each other, and write into each other's
//! shared memory.
//!
//! A gather is a store by lane `r` of each warp into block `r`, then a barrier of the cluster: whoever is past it sees
//! what all have stored, and nobody's stores are on their way any more, so a block may end. Before the first gather all
//! blocks must have begun. They say so where they come by together for the first time, and ask just before the gather,
//! so that what a kernel loads first is on its way in between.

use super::asm::{Reg, def, ins};
use super::memory::Address;
use super::writer::Writer;
use vm_ir::module::{Op, Place, Region};
use vm_ir::op::{Opcode, Shape};
use vm_ir::valid::Uniformity;

/// Where the blocks of a cluster make sure that all have begun.
#[derive(Clone, Copy, Debug)]
pub(super) struct Meeting {
    /// Before this op they say so.
    pub(super) arrive: *const Op,
    /// Before this one they wait for the others.
    pub(super) wait: *const Op,
}

/// Does a region gather anything?
pub(super) fn gathers(region: &Region) -> bool {
    region.ops.iter().any(op_gathers)
}

fn op_gathers(op: &Op) -> bool {
    op.code == Opcode::ClusterGather || op.regions.iter().any(gathers)
}

impl Writer<'_> {
    /// The places at which the blocks of a cluster meet before a gather: one on every way to it.
    pub(super) fn meetings(&self, region: &Region) -> Vec<Meeting> {
        let mut due = region.ops.iter().filter(|op| op_gathers(op));
        let (Some(op), more) = (due.next(), due.next()) else { return Vec::new() };
        let alike = |op: &Op| self.facts.uniformity(op.operands[0]) == Uniformity::Block;
        if more.is_none() && op.code.shape() == Shape::If && alike(op) {
            return op.regions.iter().flat_map(|region| self.meetings(region)).collect();
        }
        // Not before a block's own memory is zeroed, lest that wipes out what others gave.
        let zeroed = region.ops.iter().find(|op| self.zero_at.contains(&std::ptr::from_ref(*op)));
        vec![Meeting { arrive: zeroed.unwrap_or(&region.ops[0]), wait: op }]
    }

    /// What the blocks do to meet, if it is before this op.
    pub(super) fn meet(&mut self, op: &Op) {
        let here = std::ptr::from_ref(op);
        if self.meetings.iter().any(|meeting| meeting.arrive == here) {
            ins!(self, "barrier.cluster.arrive.aligned");
        }
        if self.meetings.iter().any(|meeting| meeting.wait == here) {
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
        let (base, space) = if blocks > 1 {
            let rank = self.cluster_rank();
            let warps = i64::from(self.kernel.cluster_warps() / blocks);
            let slot = def!(self, B32, "mad.lo.u32", rank, warps, warp);
            let own = def!(self, B32, "mad.lo.u32", slot, i64::from(size), start);
            // Lanes that give nothing name a block too.
            let to = def!(self, B32, "and.b32", lane, i64::from(blocks - 1));
            (def!(self, B32, "mapa.shared::cluster.u32", own, to), "shared::cluster")
        } else {
            (def!(self, B32, "mad.lo.u32", warp, i64::from(size), start), "shared")
        };
        let offset = i64::from(self.shared_offsets[usize::from(array)]);
        let align = 16.min(1 << size.trailing_zeros());
        let address = Address { base, offset, space, align };
        self.put(scalar, &regs, &address, &format!("st.{space}"), Some(gives), None);
        if blocks > 1 {
            ins!(self, "barrier.cluster.arrive.aligned");
            ins!(self, "barrier.cluster.wait.aligned");
        } else {
            ins!(self, "bar.sync", 0);
        }
    }

    /// The block's number in its cluster.
    pub(super) fn cluster_rank(&mut self) -> Reg {
        match self.kernel.cluster() {
            1 => self.number(vm_ir::Scalar::I32, 0),
            _ => def!(self, B32, "mov.u32", "%cluster_ctarank"),
        }
    }

    /// The cluster's number along x.
    pub(super) fn cluster_id(&mut self) -> Reg {
        let name = if self.kernel.cluster() == 1 { "%ctaid.x" } else { "%clusterid.x" };
        def!(self, B32, "mov.u32", name)
    }
}
