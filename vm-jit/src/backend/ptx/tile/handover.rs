//! What one role tells the others: that a stage is full or empty, whether the launch is cancelled, and numbers that were loaded.

use super::layout::{self, Layout, SIGNALS, WORDS};
use super::{Ring, Role};
use crate::backend::ptx::asm::{Arg, Class, Reg, def, ins, when};
use crate::backend::ptx::writer::{Cancel, Writer, class_of, memory_type};
use vm_ir::Kernel;
use vm_ir::module::Op;
use vm_ir::tile::Tile;

/// What a ring of stages has in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ringed {
    /// Tiles of the channel with this number.
    Tiles(usize),
    /// The cancel flag, as one role read it.
    Signals,
    /// Numbers that were loaded.
    Words,
    /// By group: what comes from a view to its fragment.
    Arrivals,
    /// What the blocks of a cluster give each other of sums.
    Given,
}

/// The barriers of a ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Barriers {
    #[cfg_attr(not(test), expect(dead_code, reason = "the model of tests tells rings apart by it"))]
    pub(super) of: Ringed,
    /// Where those of full stages are; those of empty ones are behind.
    pub(super) at: u32,
    pub(super) stages: u32,
    /// How many arrive before a stage is full, and before it is empty; 0 where nobody waits for that.
    pub(super) full: u32,
    pub(super) empty: u32,
}

/// Who computes in a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Team {
    pub(super) warps: u32,
    pub(super) threads: u32,
}

/// The barriers of a block's rings.
pub(super) fn barriers(
    kernel: &Kernel,
    tile: &Tile,
    layout: &Layout,
    cancellable: bool,
    Team { warps, threads }: Team,
) -> Vec<Barriers> {
    let cluster = kernel.cluster();
    let mut rings = Vec::new();
    for (number, channel) in tile.channels.iter().enumerate() {
        rings.push(Barriers {
            of: Ringed::Tiles(number),
            at: layout.barriers[number],
            stages: channel.stages,
            full: if layout.sent[number] { threads } else { 1 },
            empty: warps * layout::share(kernel, channel),
        });
    }
    // The first block's flag is for the cluster, and so is its empty stage.
    let listeners = warps * cluster + cluster - 1;
    let others = [
        (cancellable, Ringed::Signals, layout.signals, SIGNALS, listeners),
        (layout.words > 0, Ringed::Words, layout.words, WORDS, warps),
        (layout.arrivals > 0, Ringed::Arrivals, layout.arrivals, tile.groups, 0),
        (layout.given_buffers > 0, Ringed::Given, layout.given_barriers, layout.given_buffers, 0),
    ];
    let there = others.into_iter().filter(|(there, ..)| *there);
    rings.extend(there.map(|(_, of, at, stages, empty)| Barriers { of, at, stages, full: 1, empty }));
    rings
}

impl<'k> Writer<'k> {
    /// Waits for a phase of a barrier.
    pub(super) fn wait(&mut self, barrier: Reg, offset: i64, parity: Reg) {
        let name = match self.is_sync() {
            true => self.wait_name(),
            false => "mbarrier.try_wait.parity.shared::cta.b64",
        };
        self.wait_by(name, barrier, offset, parity);
    }

    /// Waits for a phase of a barrier, and sees what other blocks of the cluster stored before they arrived there. That costs
    /// hundreds of cycles; stages that the accelerator fills don't need it.
    fn wait_for_stores(&mut self, barrier: Reg, offset: i64, parity: Reg) {
        match self.kernel.cluster() {
            _ if self.is_sync() => self.wait(barrier, offset, parity),
            1 => self.wait(barrier, offset, parity),
            _ => {
                let name = "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64";
                self.wait_by(name, barrier, offset, parity);
            }
        }
    }

    fn wait_by(&mut self, name: &str, barrier: Reg, offset: i64, parity: Reg) {
        let head = self.asm.new_label();
        self.asm.place(head);
        let over = self.asm.new_reg(Class::Pred);
        ins!(self, name, over, Arg::At(barrier, offset), parity);
        when!(self, over, false, "bra", Arg::Label(head));
    }

    /// The next stage of a ring.
    pub(super) fn advance(&mut self, stage: Reg, parity: Option<Reg>, stages: u32) {
        ins!(self, "add.u32", stage, stage, 1);
        let over = def!(self, Pred, "setp.eq.u32", stage, i64::from(stages));
        when!(self, over, true, "mov.b32", stage, 0);
        if let Some(parity) = parity {
            when!(self, over, true, "xor.b32", parity, parity, 1);
        }
    }

    /// The address of a barrier, or a word, in a block of the cluster.
    fn in_block(&mut self, at: Reg, offset: i64, rank: impl Into<Arg<'static>>) -> Reg {
        let own = def!(self, B32, "add.u32", at, offset);
        def!(self, B32, "mapa.shared::cluster.u32", own, rank.into())
    }

    /// Releases a stage in the block with this rank, whose accelerator fills it again.
    pub(super) fn release_in(&mut self, at: Reg, offset: i64, rank: Reg, when: Reg) {
        let remote = self.in_block(at, offset, rank);
        when!(self, when, true, "mbarrier.arrive.shared::cluster.b64", "_", Arg::At(remote, 0));
    }

    /// Arrives at a barrier of the block with this rank, which then sees what was stored there before.
    fn arrive_in(&mut self, at: Reg, offset: i64, rank: impl Into<Arg<'static>>, when: Option<Reg>) {
        let remote = self.in_block(at, offset, rank);
        let args = [Arg::Name("_"), Arg::At(remote, 0)];
        self.asm.ins(when.map(|p| (p, true)), "mbarrier.arrive.release.cluster.shared::cluster.b64", &args);
    }

    /// Reads the cancel flag in the one role, hands it to the other, and leaves with both if it is set.
    pub(in crate::backend::ptx) fn poll_together(&mut self, cancel: Cancel) {
        if self.is_sync() {
            return self.poll_sync(cancel);
        }
        let Some(tiles) = &self.tiles else { return };
        let Some(ring) = tiles.signals else { return };
        let (base, role, signals, leads_warp, rank) =
            (tiles.base, tiles.role, tiles.layout.signals, tiles.leads_warp, tiles.rank);
        let barrier = def!(self, B32, "mad.lo.u32", ring.next, 8, base);
        let [full, empty, word] = [signals, signals + 8 * SIGNALS, signals + 16 * SIGNALS].map(i64::from);
        let flag = self.asm.new_reg(Class::B32);
        match (role, self.kernel.cluster()) {
            (Role::Fetch, 1) => {
                self.wait_for_stores(barrier, empty, ring.parity);
                ins!(self, "ld.relaxed.sys.global.b32", flag, Arg::At(cancel.flag, 0));
                ins!(self, "st.shared.b32", Arg::At(barrier, word), flag);
                ins!(self, "mbarrier.arrive.shared::cta.b64", "_", Arg::At(barrier, full));
            }
            // The first block reads it for all, the others are told as those that compute are.
            (Role::Fetch, blocks) => {
                let (listen, told) = (self.asm.new_label(), self.asm.new_label());
                let others = def!(self, Pred, "setp.ne.u32", rank, 0);
                when!(self, others, true, "bra", Arg::Label(listen));
                self.wait_for_stores(barrier, empty, ring.parity);
                ins!(self, "ld.relaxed.sys.global.b32", flag, Arg::At(cancel.flag, 0));
                for block in 0..i64::from(blocks) {
                    let there = self.in_block(barrier, word, block);
                    ins!(self, "st.shared::cluster.b32", Arg::At(there, 0), flag);
                    self.arrive_in(barrier, full, block, None);
                }
                ins!(self, "bra", Arg::Label(told));
                self.asm.place(listen);
                let parity = def!(self, B32, "xor.b32", ring.parity, 1);
                self.wait_for_stores(barrier, full, parity);
                ins!(self, "ld.shared.b32", flag, Arg::At(barrier, word));
                self.arrive_in(barrier, empty, 0, None);
                self.asm.place(told);
            }
            (Role::Compute, blocks) => {
                self.wait_for_stores(barrier, full, ring.parity);
                ins!(self, "ld.shared.b32", flag, Arg::At(barrier, word));
                ins!(self, "bar.warp.sync", -1);
                match blocks {
                    1 => {
                        let at = Arg::At(barrier, empty);
                        when!(self, leads_warp, true, "mbarrier.arrive.shared::cta.b64", "_", at);
                    }
                    _ => self.arrive_in(barrier, empty, 0, Some(leads_warp)),
                }
            }
        }
        self.advance(ring.next, Some(ring.parity), SIGNALS);
        let cancelled = def!(self, Pred, "setp.ne.u32", flag, 0);
        when!(self, cancelled, true, "bra.uni", Arg::Label(cancel.leave));
    }

    /// A number from memory, which one thread loads for all.
    pub(in crate::backend::ptx) fn tile_load(&mut self, op: &'k Op) {
        if self.is_sync() {
            return self.load_sync(op);
        }
        let Some(tiles) = &self.tiles else { return };
        let (Some(Ring { next, parity, .. }), Some(result)) = (tiles.words, op.result()) else { return };
        let (base, role, words, leads_warp) = (tiles.base, tiles.role, tiles.layout.words, tiles.leads_warp);
        let scalar = self.ty(result).scalar();
        let ty = memory_type(scalar);
        let barrier = def!(self, B32, "mad.lo.u32", next, 8, base);
        let [full, empty, word] = [words, words + 8 * WORDS, words + 16 * WORDS].map(i64::from);
        match role {
            Role::Fetch => {
                self.load(op);
                let loaded = self.get(result, 0);
                self.wait(barrier, empty, parity);
                ins!(self, &format!("st.shared.{ty}"), Arg::At(barrier, word), loaded);
                ins!(self, "mbarrier.arrive.shared::cta.b64", "_", Arg::At(barrier, full));
            }
            Role::Compute => {
                self.wait(barrier, full, parity);
                let loaded = self.asm.new_reg(class_of(scalar));
                ins!(self, &format!("ld.shared.{ty}"), loaded, Arg::At(barrier, word));
                self.set(result, 0, loaded);
                ins!(self, "bar.warp.sync", -1);
                let at = Arg::At(barrier, empty);
                when!(self, leads_warp, true, "mbarrier.arrive.shared::cta.b64", "_", at);
            }
        }
        self.advance(next, Some(parity), WORDS);
    }
}
