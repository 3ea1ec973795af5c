//! Tile kernels where there is no `wgmma`, or no tensor map can be made of their views: `mma.sync`, `ldmatrix` and `cp.async`.
//!
//! The warps of a block hold the fragments, 16 rows at a time. With `mbarrier`s (from sm_80 on) there are four more, which run the
//! program for its fetches: it copies with `cp.async`, and each of its threads arrives at the full barrier of a stage when what it
//! copied is there. Without, all warps copy by way of registers, with a barrier of the block before and behind.
//!
//! * `stage`: shared memory.
//! * `boxes`: boxes of views, clipped, and copies of them into stages.
//! * `product`: `mma` with tensor cores; `cores`: without.
//! * `memory`: fragments from and to views and stages.

mod boxes;
mod cores;
mod memory;
mod product;
mod stage;

use super::fragment::Spread;
use super::layout::{GROUP, SIGNALS};
use super::{Role, SHARED, Tiles, channel_number, way};
use crate::artifact::{self, Entry, Instruction, Note};
use crate::backend::ptx::Options;
use crate::backend::ptx::arch::Feature;
use crate::backend::ptx::asm::{Arg, Class, Reg, def, ins, when};
use crate::backend::ptx::writer::{Cancel, Writer, class_of};
use product::Kind;
use stage::{ALIGN, Layout};
use vm_ir::module::{Op, Place};
use vm_ir::op::{Opcode, Shape};
use vm_ir::tile::{Fragment, Tile};
use vm_ir::{Kernel, Scalar};

/// Threads that fetch, where others compute: registers are allotted to four warps at a time.
const FETCHING: u32 = 128;
/// Registers that are enough for one of them.
const FETCHING_REGISTERS: u32 = 96;
/// Rows that a warp has of an instruction's sum.
const SLAB: u32 = 16;

/// What only this way has of the state of a tile kernel.
pub(super) struct MmaSync {
    layout: Layout,
    /// Threads that compute; others fetch if there are `mbarrier`s.
    computing: u32,
    fetches_apart: bool,
    /// The thread's number in the block, in its warp and in eight threads; the bits above that number.
    index: Reg,
    lane: Reg,
    in_eight: Reg,
    bits: [Reg; 2],
    /// The number of its four threads in the warp, and its own in those.
    quad: Reg,
    in_quad: Reg,
}

/// How fragments lie: rows are divided among all warps, and columns too where that means fewer loads from stages.
fn spread(kernel: &Kernel, tile: &Tile) -> Spread {
    let warps = tile.groups * 4;
    let whole = Spread { down: warps, across: 1, slab: SLAB };
    let mut by_rows = product::fragments_multiply(kernel);
    let mut largest = None;
    kernel.for_each_op(&mut |op| {
        by_rows |= matches!(op.code.shape(), Shape::Rows | Shape::Share);
        if let (Shape::Mma, Some(sum)) = (op.code.shape(), op.place.and_then(|place| kernel.fragment(place)))
        {
            let dims = [sum.rows, sum.columns.unwrap_or(1)];
            largest = largest.max(Some((dims[0] * dims[1], dims)));
        }
    });
    let Some((_, [rows, columns])) = largest.filter(|_| !by_rows) else { return whole };
    let fits = |spread: &Spread| {
        tile.fragments.iter().filter_map(|f| f.columns).all(|c| c.is_multiple_of(16 * spread.across))
    };
    let all = (1..=warps).filter(|across| warps.is_multiple_of(*across));
    let all = all.map(|across| Spread { down: warps / across, across, slab: SLAB });
    // What is computed, then what is loaded: all of a factor by each of the other's parts.
    let cost = |spread: &Spread| {
        let computed = spread.rows(rows) * spread.down * spread.columns(columns) * spread.across;
        (computed, spread.across * rows + spread.down * columns)
    };
    all.filter(|spread| spread.across == 1 || fits(spread)).min_by_key(cost).unwrap_or(whole)
}

/// Why the target does not take a tile kernel this way.
pub(super) fn rejects(options: &Options, kernel: &Kernel, tile: &Tile) -> Vec<Note> {
    let mut found = Vec::new();
    let mut need = |line: u32, holds: bool, what: &dyn Fn() -> String| {
        if !holds {
            found.push(Note { line, what: what() });
        }
    };
    for fragment in &tile.fragments {
        let held = fragment.element.bytes() <= 4 && fragment.element != Scalar::Bool;
        need(fragment.line.0, held, &|| {
            format!("@{} is of {}; fragments have elements of up to 32 bits", fragment.name, fragment.element)
        });
    }
    kernel.for_each_op(&mut |op| {
        let left = op.others.first().and_then(|place| kernel.fragment(*place));
        let multiplies = matches!(op.code, Opcode::Mma | Opcode::Product);
        // Those beyond the last column are zeros, in whole pairs of registers.
        let narrow = left.filter(|left| multiplies && left.element.bytes() == 1);
        let narrow = narrow.filter(|left| left.columns.is_some_and(|columns| !columns.is_multiple_of(8)));
        // All threads have the whole of a row, and no block of a product.
        let sum = op.place.and_then(|place| kernel.fragment(place));
        let rows = |fragment: &Fragment| fragment.is_row();
        let row = if multiplies { sum.filter(|f| rows(f)).or(left.filter(|f| rows(f))) } else { None };
        let shares =
            op.code.shape() == Shape::Share && left.map(|all| all.columns) != sum.map(|part| part.columns);
        let uneven =
            sum.filter(|part| shares && part.columns.is_some_and(|columns| !columns.is_multiple_of(8)));
        need(op.line.0, uneven.is_none(), &|| {
            let name = uneven.map_or("", |part| &part.name);
            format!("@{name} is a share of columns, of which there are no multiple of 8")
        });
        let row = row.or(left.filter(|left| op.code.shape() == Shape::Rows && rows(left)));
        need(op.line.0, row.is_none(), &|| {
            let name = row.map_or("", |fragment| &fragment.name);
            format!("@{name} has one row; products and sums of rows take two or more")
        });
        need(op.line.0, narrow.is_none(), &|| {
            let name = narrow.map_or("", |fragment| &fragment.name);
            format!("@{name} is a factor of 8 bits in registers, whose columns are no multiple of 8; make them one, or send it to a channel")
        });
    });
    let (needed, available) = (u64::from(Layout::of(tile).bytes), options.arch.shared_bytes());
    need(kernel.line().0, needed <= available, &|| {
        let arch = options.arch;
        format!(
            "its stages and barriers take {needed} bytes of shared memory, a block of {arch} has {available}; make its tiles smaller, or their stages fewer"
        )
    });
    found
}

/// What computes a product.
pub(super) fn instruction(options: &Options, kernel: &Kernel, op: &Op) -> Option<Instruction> {
    let &[a, b] = &op.others[..] else { return None };
    let [(_, a), (_, b)] = [kernel.place(a)?, kernel.place(b)?];
    Some(match Kind::of(options, a, b) {
        Kind::Cores => Instruction::Cores,
        _ => Instruction::MmaSync,
    })
}

impl<'k> Writer<'k> {
    fn mma_state(&self) -> Option<&MmaSync> {
        self.tiles.as_ref()?.sync.as_deref()
    }

    /// Writes a tile kernel.
    pub(super) fn sync_kernel(&mut self, tile: &'k Tile, instead: &[Note], text: &mut String) -> Entry {
        let params = artifact::layout(self.kernel, &[], self.plan.cancellable());
        self.prologue(&params);
        self.begin_sync(tile);
        let computing = GROUP * tile.groups;
        let apart = self.mma_state().is_some_and(|sync| sync.fetches_apart);
        let threads = computing + if apart { FETCHING } else { 0 };
        if apart {
            let to_fetch = self.asm.new_label();
            let index = self.mma_state().map_or(Reg::NONE, |sync| sync.index);
            let warp = def!(self, B32, "shr.u32", index, 5);
            let warp = def!(self, B32, "shfl.sync.idx.b32", warp, 0, 31, -1);
            let fetches = def!(self, Pred, "setp.ge.u32", warp, i64::from(computing / 32));
            when!(self, fetches, true, "bra.uni", Arg::Label(to_fetch));
            self.sync_role(Role::Compute, tile);
            self.asm.place(to_fetch);
            self.sync_role(Role::Fetch, tile);
        } else {
            self.sync_role(Role::Compute, tile);
        }
        if let Some(end) = self.tiles.as_ref().map(|tiles| tiles.end) {
            self.asm.place(end);
        }
        ins!(self, "ret");

        let bytes = self.mma_state().map_or(0, |sync| sync.layout.bytes);
        let products = way::products(self.options, self.kernel, Some(instead));
        self.entry(text, params, [threads, bytes, 1], false, products)
    }

    /// What all threads do before they part.
    fn begin_sync(&mut self, tile: &'k Tile) {
        let layout = Layout::of(tile);
        let spread = spread(self.kernel, tile);
        let fetches_apart = self.has(Feature::Mbarrier) && self.has(Feature::CpAsync);
        let name = def!(self, B32, "mov.u32", SHARED);
        let up = def!(self, B32, "add.u32", name, i64::from(ALIGN - 1));
        let base = def!(self, B32, "and.b32", up, -i64::from(ALIGN));
        let index = def!(self, B32, "mov.u32", "%tid.x");
        let lane = def!(self, B32, "and.b32", index, 31);
        let leads_warp = def!(self, Pred, "setp.eq.u32", lane, 0);
        let quad = def!(self, B32, "shr.u32", lane, 2);
        let in_quad = def!(self, B32, "and.b32", lane, 3);
        let in_eight = def!(self, B32, "and.b32", lane, 7);
        let bits = [3, 4].map(|bit: i64| def!(self, B32, "bfe.u32", lane, bit, 1));
        let warp = def!(self, B32, "shr.u32", index, 5);
        let warp = def!(self, B32, "shfl.sync.idx.b32", warp, 0, 31, -1);
        let (part, part_across) = match spread.across {
            1 => (warp, None),
            across => (
                def!(self, B32, "div.u32", warp, i64::from(across)),
                Some(def!(self, B32, "rem.u32", warp, i64::from(across))),
            ),
        };
        let first = def!(self, Pred, "setp.eq.u32", index, 0);
        if fetches_apart {
            let releases = 4 * i64::from(tile.groups);
            let mut init = |at: u32, count: i64| {
                when!(self, first, true, "mbarrier.init.shared.b64", Arg::At(base, i64::from(at)), count);
            };
            for (channel, at) in tile.channels.iter().zip(&layout.barriers) {
                for stage in 0..channel.stages {
                    init(at + 8 * stage, FETCHING.into());
                    init(at + 8 * (stage + channel.stages), releases);
                }
            }
            for signal in 0..SIGNALS {
                init(layout.signals + 8 * signal, 1);
                init(layout.signals + 8 * (signal + SIGNALS), releases);
            }
            ins!(self, "bar.sync", 0);
        }
        let end = self.asm.new_label();
        let sync = MmaSync {
            layout,
            computing: GROUP * tile.groups,
            fetches_apart,
            index,
            lane,
            in_eight,
            bits,
            quad,
            in_quad,
        };
        self.tiles = Some(Box::new(Tiles {
            base,
            lane,
            leads: first,
            leads_warp,
            row: quad,
            spread,
            part,
            part_across,
            sync: Some(Box::new(sync)),
            ..Tiles::new(tile, super::Layout::default(), super::Waits::default(), end)
        }));
    }

    /// Writes the program as a role runs it.
    fn sync_role(&mut self, role: Role, tile: &'k Tile) {
        let rings = tile.channels.iter().map(|_| self.ring(role)).collect();
        let signals = self.mma_state().is_some_and(|sync| sync.fetches_apart).then(|| self.ring(role));
        let Some(spread) = self.tiles.as_ref().map(|tiles| tiles.spread) else { return };
        self.share_registers(role, tile.groups);
        if let (Role::Fetch, Some((index, computing))) =
            (role, self.mma_state().map(|sync| (sync.index, sync.computing)))
        {
            let first = def!(self, Pred, "setp.eq.u32", index, i64::from(computing));
            if let Some(tiles) = &mut self.tiles {
                tiles.leads = first;
            }
        }
        let fragments = match role {
            Role::Fetch => vec![Vec::new(); tile.fragments.len()],
            Role::Compute => tile.fragments.iter().map(|f| self.zeroed(f, spread)).collect(),
        };
        if let Some(tiles) = &mut self.tiles {
            (tiles.role, tiles.rings, tiles.signals, tiles.fragments) = (role, rings, signals, fragments);
        }
        self.program(Self::leave_sync);
    }

    /// Gives registers of the warps that fetch to those that compute, where a thread of the block has fewer than an instruction can name.
    fn share_registers(&mut self, role: Role, groups: u32) {
        let apart = self.mma_state().is_some_and(|sync| sync.fetches_apart);
        if !apart || groups < 2 || !self.has(Feature::SetMaxNReg) {
            return;
        }
        // What ptxas gives each thread, of which there are 64 Ki.
        let each = (65_536 / (GROUP * groups + FETCHING)).min(255) / 8 * 8;
        let fetching = FETCHING_REGISTERS.min(each);
        let computing = each + (each - fetching) * FETCHING / (GROUP * groups) / 8 * 8;
        match role {
            Role::Fetch => ins!(self, "setmaxnreg.dec.sync.aligned.u32", i64::from(fetching)),
            Role::Compute => ins!(self, "setmaxnreg.inc.sync.aligned.u32", i64::from(computing)),
        }
    }

    /// Ends the role with nothing of it under way.
    fn leave_sync(&mut self) {
        let Some(tiles) = &self.tiles else { return };
        let (role, end) = (tiles.role, tiles.end);
        if role == Role::Fetch {
            ins!(self, "cp.async.wait_all");
        }
        ins!(self, "bra", Arg::Label(end));
    }

    /// Waits for all threads that compute.
    pub(super) fn sync_barrier(&mut self) {
        let Some(threads) = self.mma_state().map(|sync| sync.computing) else { return };
        // Barrier 0 is that of the block.
        ins!(self, "bar.sync", 1, i64::from(threads));
    }

    pub(super) fn sync_op(&mut self, op: &'k Op, place: Place, role: Role) {
        match (op.code.shape(), role) {
            (Shape::Fetch, _) => self.fetch_sync(op, role),
            (_, Role::Fetch) => {}
            (Shape::Release, _) => self.release_sync(place),
            (Shape::Fill, _) => self.fill_fragment(op, place),
            (Shape::Mma, _) => self.mma_sync(op, place),
            (Shape::Map, _) => self.map(op, place),
            (Shape::Rows, _) => self.rows(op, place),
            (Shape::Share, _) => self.share_sync(op, place),
            (Shape::Put | Shape::PutRows | Shape::Get, _) => self.transfer(op, place),
            (Shape::Send, _) => self.send_sync(op, place),
            _ => {}
        }
    }

    /// The next stage of a channel: one role fills it, the other waits until it is full; or all fill it.
    fn fetch_sync(&mut self, op: &'k Op, role: Role) {
        let Some(&[place]) = op.others.first_chunk::<1>() else { return };
        let (Some(channel), Some(number)) = (self.kernel.channel(place), channel_number(place)) else {
            return;
        };
        let Some(tiles) = &self.tiles else { return };
        let (base, ring) = (tiles.base, tiles.rings[number]);
        let Some(sync) = &tiles.sync else { return };
        let ((first, stage), index) = (sync.layout.stages[number], sync.index);
        let (apart, computing, barriers) = (sync.fetches_apart, sync.computing, sync.layout.barriers[number]);
        let [full, empty] = [barriers, barriers + 8 * channel.stages].map(i64::from);
        let to = def!(self, B32, "mad.lo.u32", ring.next, i64::from(stage.bytes()), base);
        let to = def!(self, B32, "add.u32", to, i64::from(first));
        match (apart, role) {
            (false, _) => {
                // What it held before has been read.
                self.sync_barrier();
                self.copy_box(op, stage, to, (index, computing), None);
                self.sync_barrier();
                self.mov(ring.newest, to);
            }
            (true, Role::Fetch) => {
                let barrier = def!(self, B32, "mad.lo.u32", ring.next, 8, base);
                self.wait(barrier, empty, ring.parity);
                let own = def!(self, B32, "sub.u32", index, i64::from(computing));
                self.copy_box(op, stage, to, (own, FETCHING), Some((barrier, full)));
            }
            (true, Role::Compute) => {
                let barrier = def!(self, B32, "mad.lo.u32", ring.next, 8, base);
                self.wait(barrier, full, ring.parity);
                self.mov(ring.newest, to);
            }
        }
        self.advance(ring.next, Some(ring.parity), channel.stages);
    }

    /// The oldest stage of a channel is empty, as far as this warp is concerned.
    fn release_sync(&mut self, place: Place) {
        let (Some(channel), Some(number)) = (self.kernel.channel(place), channel_number(place)) else {
            return;
        };
        let Some(tiles) = &self.tiles else { return };
        let (base, ring, leads_warp) = (tiles.base, tiles.rings[number], tiles.leads_warp);
        let Some(sync) = &tiles.sync else { return };
        // What is sent to is handed over by barriers of all that compute.
        if !sync.fetches_apart || is_sent_to(self.kernel, place) {
            return;
        }
        let empty = i64::from(sync.layout.barriers[number] + 8 * channel.stages);
        let barrier = def!(self, B32, "mad.lo.u32", ring.oldest, 8, base);
        ins!(self, "bar.warp.sync", -1);
        when!(self, leads_warp, true, "mbarrier.arrive.shared.b64", "_", Arg::At(barrier, empty));
        self.advance(ring.oldest, None, channel.stages);
    }

    /// A number of 32 or 64 bits of the first thread that fetches, or of the first of all, for all threads.
    fn hand_over(&mut self, class: Class, own: impl FnOnce(&mut Self) -> Reg) -> Reg {
        let Some(tiles) = &self.tiles else { return Reg::NONE };
        let (base, role, signals, leads_warp, first) =
            (tiles.base, tiles.role, tiles.signals, tiles.leads_warp, tiles.leads);
        let Some(at) = tiles.sync.as_ref().map(|sync| sync.layout.signals) else { return Reg::NONE };
        let [of_full, of_empty, of_word] = [at, at + 8 * SIGNALS, at + 16 * SIGNALS].map(i64::from);
        let (store, load) = match class {
            Class::B64 => ("st.shared.b64", "ld.shared.b64"),
            _ => ("st.shared.b32", "ld.shared.b32"),
        };
        let new = |writer: &mut Self| match class {
            Class::B64 => writer.asm.new_reg(Class::B64),
            _ => writer.asm.new_reg(Class::B32),
        };
        let Some(ring) = signals else {
            let own = own(self);
            when!(self, first, true, store, Arg::At(base, of_word), own);
            self.sync_barrier();
            let value = new(self);
            ins!(self, load, value, Arg::At(base, of_word));
            self.sync_barrier();
            return value;
        };
        let barrier = def!(self, B32, "mad.lo.u32", ring.next, 8, base);
        let value = new(self);
        match role {
            Role::Fetch => {
                self.wait(barrier, of_empty, ring.parity);
                let own = own(self);
                when!(self, first, true, store, Arg::At(barrier, of_word), own);
                ins!(self, "bar.sync", 2, i64::from(FETCHING));
                // All have what the first has, which memory may have changed since.
                ins!(self, load, value, Arg::At(barrier, of_word));
                ins!(self, "bar.sync", 2, i64::from(FETCHING));
                when!(self, first, true, "mbarrier.arrive.shared.b64", "_", Arg::At(barrier, of_full));
            }
            Role::Compute => {
                self.wait(barrier, of_full, ring.parity);
                ins!(self, load, value, Arg::At(barrier, of_word));
                ins!(self, "bar.warp.sync", -1);
                when!(self, leads_warp, true, "mbarrier.arrive.shared.b64", "_", Arg::At(barrier, of_empty));
            }
        }
        self.advance(ring.next, Some(ring.parity), SIGNALS);
        value
    }

    /// How a barrier is waited for.
    pub(super) fn wait_name(&self) -> &'static str {
        match self.has(Feature::MbarrierTryWait) {
            true => "mbarrier.try_wait.parity.shared.b64",
            false => "mbarrier.test_wait.parity.shared.b64",
        }
    }

    /// Reads the cancel flag in one thread, hands it to all, and leaves with all if it is set.
    pub(super) fn poll_sync(&mut self, cancel: Cancel) {
        let flag = self.hand_over(Class::B32, |writer| {
            def!(writer, B32, "ld.relaxed.sys.global.b32", Arg::At(cancel.flag, 0))
        });
        let cancelled = def!(self, Pred, "setp.ne.u32", flag, 0);
        when!(self, cancelled, true, "bra", Arg::Label(cancel.leave));
    }

    /// A number that is loaded, the same for all threads.
    pub(super) fn load_sync(&mut self, op: &'k Op) {
        let Some(result) = op.result() else { return };
        let ty = self.ty(result).scalar();
        let class = class_of(ty);
        let value = self.hand_over(class, |writer| {
            writer.load(op);
            let own = writer.get(result, 0);
            match class {
                Class::Pred => def!(writer, B32, "selp.b32", 1, 0, own),
                Class::B16 => def!(writer, B32, "mov.b32", Arg::List(&[own, own])),
                _ => own,
            }
        });
        let value = match class {
            Class::Pred => def!(self, Pred, "setp.ne.u32", value, 0),
            Class::B16 => {
                let two = [self.asm.new_reg(Class::B16), self.asm.new_reg(Class::B16)];
                ins!(self, "mov.b32", Arg::List(&two), value);
                two[0]
            }
            _ => value,
        };
        self.set(result, 0, value);
    }

    /// Is it a tile kernel of this way?
    pub(in crate::backend::ptx) fn is_sync(&self) -> bool {
        self.mma_state().is_some()
    }
}

/// Is a channel one that fragments are sent to?
fn is_sent_to(kernel: &Kernel, channel: Place) -> bool {
    let mut found = false;
    kernel.for_each_op(&mut |op| {
        found |= op.code.shape() == Shape::Send && op.others.first() == Some(&channel);
    });
    found
}
