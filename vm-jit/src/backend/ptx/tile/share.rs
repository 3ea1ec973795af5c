//! Sums of which the blocks of a cluster have parts: each runs one iteration of a `for.cluster`, and `share` brings the parts together.
//!
//! A thread gives each block what it has of that block's share by `st.async`, which counts down the bytes that a barrier
//! there waits for; then it adds up what the threads with its number gave, in the order of ranks, so that all launches come to the
//! same. That costs one way between multiprocessors, no fence, and nothing in global memory.
//!
//! Where sums come together more than once there are two buffers, each with a barrier. Who gives for the second time after another
//! block has taken what it was given has been given to by that block in between, after it took: so nothing is
//! overwritten. No block ends before all are done with each other ([`super`]).

use super::Role;
use super::layout::GROUP;
use crate::backend::ptx::asm::{Arg, Reg, def, ins, when};
use crate::backend::ptx::writer::Writer;
use vm_ir::Scalar;
use vm_ir::module::{Op, Place};
use vm_ir::op::Opcode;

impl<'k> Writer<'k> {
    /// The iteration of a `for.cluster` that is this block's, if blocks share them on this target.
    pub(in crate::backend::ptx) fn own_iteration(&mut self, op: &'k Op) -> bool {
        let [body] = &op.regions[..] else { return false };
        if op.code != Opcode::ForCluster || self.is_sync() || self.tiles.is_none() {
            return false;
        }
        let [count] = body.args[..] else { return false };
        let rank = self.cluster_rank();
        let rank = match self.ty(count).scalar().bits() {
            64 => def!(self, B64, "cvt.u64.u32", rank),
            _ => rank,
        };
        self.set(count, 0, rank);
        self.region(body);
        true
    }

    /// A sum is set where it begins: all of it by the first block, since its parts are added up.
    pub(super) fn is_split(&self, place: Place) -> bool {
        let mut shared = false;
        self.kernel.for_each_op(&mut |op| {
            shared |= op.code == Opcode::Share && op.others.first() == Some(&place);
        });
        shared && self.kernel.cluster() > 1 && !self.is_sync()
    }

    /// The block's share of the columns of a sum.
    pub(super) fn share(&mut self, op: &'k Op, place: Place) {
        let Some(&[from]) = op.others.first_chunk::<1>() else { return };
        let kernel = self.kernel;
        let (Some(part), Some(sum)) = (kernel.fragment(place), kernel.fragment(from)) else { return };
        let (own, all) = (self.fragment_regs(place), self.fragment_regs(from));
        let blocks = kernel.cluster();
        let Some(tiles) = &self.tiles else { return };
        let (base, rank, thread, number, groups) =
            (tiles.base, tiles.rank, tiles.thread, tiles.part, tiles.tile.groups);
        let (layout, leads) = (&tiles.layout, tiles.leads);
        let (buffer, bytes, barriers, buffers) =
            (layout.given, layout.given_bytes, layout.given_barriers, layout.given_buffers);
        let Some(ring) = tiles.given.filter(|_| tiles.role == Role::Compute) else {
            return self.share_sync(op, place);
        };
        // Four registers at a time, which a thread has of eight columns and sixteen rows.
        let width = [part, sum].map(|fragment| fragment.columns.unwrap_or(0) as usize / 8);
        let fours: Vec<usize> = (0..own.len() / 4).collect();
        let step = i64::from(16 * GROUP * groups);
        let of_block = step * fours.len() as i64;
        let in_groups = def!(self, B32, "mad.lo.u32", number, i64::from(GROUP), thread);
        let slot = def!(self, B32, "mad.lo.u32", in_groups, 16, base);
        let slot = def!(self, B32, "mad.lo.u32", ring.next, i64::from(bytes), slot);
        let slot = def!(self, B32, "add.u32", slot, i64::from(buffer));
        let barrier = def!(self, B32, "mad.lo.u32", ring.next, 8, base);
        let full = def!(self, B32, "add.u32", barrier, i64::from(barriers));
        let first = def!(self, Pred, "setp.eq.and.u32", number, 0, leads);
        let expected = i64::from(part.len() as u32 * part.element.bytes() * blocks);
        let expect = "mbarrier.arrive.expect_tx.shared::cta.b64";
        when!(self, first, true, expect, "_", Arg::At(full, 0), expected);
        let mine = def!(self, B32, "mad.lo.u32", rank, of_block, slot);
        for block in 0..blocks as usize {
            let to = def!(self, B32, "mapa.shared::cluster.u32", mine, block as i64);
            let there = def!(self, B32, "mapa.shared::cluster.u32", full, block as i64);
            let right = if width[0] == width[1] { 0 } else { block * width[0] };
            for four in &fours {
                let at = 4 * (four / width[0] * width[1] + right + four % width[0]);
                let name = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32";
                let to = Arg::At(to, step * *four as i64);
                ins!(self, name, to, Arg::List(&all[at..at + 4]), Arg::At(there, 0));
            }
        }
        self.wait(full, 0, ring.parity);
        let add = if part.element == Scalar::F32 { "add.rn.f32" } else { "add.u32" };
        for four in &fours {
            let own = &own[4 * four..4 * four + 4];
            for block in 0..i64::from(blocks) {
                let at = Arg::At(slot, block * of_block + step * *four as i64);
                if block == 0 {
                    ins!(self, "ld.shared.v4.b32", Arg::List(own), at);
                    continue;
                }
                let next: [Reg; 4] = std::array::from_fn(|_| self.asm.new_reg(own[0].class));
                ins!(self, "ld.shared.v4.b32", Arg::List(&next), at);
                for (sum, next) in own.iter().zip(next) {
                    ins!(self, add, *sum, *sum, next);
                }
            }
        }
        self.advance(ring.next, Some(ring.parity), buffers);
    }

    /// The same where each block has all of the sum.
    pub(super) fn share_sync(&mut self, op: &'k Op, place: Place) {
        let Some(&[from]) = op.others.first_chunk::<1>() else { return };
        let kernel = self.kernel;
        let (Some(part), Some(sum)) = (kernel.fragment(place), kernel.fragment(from)) else { return };
        let (own, all) = (self.fragment_regs(place), self.fragment_regs(from));
        let width = [part, sum].map(|fragment| 4 * fragment.columns.unwrap_or(0).div_ceil(8) as usize);
        let blocks = if width[0] == width[1] { 1 } else { kernel.cluster() as usize };
        let rank = self.cluster_rank();
        let ranks: Vec<Reg> =
            (1..blocks).map(|block| def!(self, Pred, "setp.eq.u32", rank, block as i64)).collect();
        for (number, to) in own.iter().enumerate() {
            let at = number / width[0] * width[1] + number % width[0];
            self.mov(*to, all[at]);
            for (block, here) in (1..).zip(&ranks) {
                ins!(self, "selp.b32", *to, all[at + block * width[0]], *to, *here);
            }
        }
    }
}
