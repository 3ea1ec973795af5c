//! Tile kernels on Hopper (sm_90a): the Tensor Memory Accelerator copies boxes of views, `wgmma` multiplies.
//!
//! A block is a group of warps for each of the kernel's, which hold the fragments, and one before them, of which one thread
//! runs the program for its fetches. All of them run the same control flow on the same scalars ([`vm_ir::tile`]); a stage is
//! handed over by a pair of `mbarrier`s, full and empty.
//!
//! * `layout`: shared memory, and what is rejected.
//! * `order`: which stores must come one after the other.
//! * `waits`: what is waited for before an op.
//! * `fragment`: fragments in registers, and the ops on them.
//! * `copy`: fetches, stores and stages.
//! * `global`: what goes between fragments and views by way of registers.
//! * `handover`: what one role tells the others.
//! * `product`: `mma`.
//! * `model` (of tests): all ways in which roles and blocks may take turns at what they hand over.
//! * `share`: sums of which the blocks of a cluster have parts.
//! * `way`: whether a kernel goes this way.
//! * `sync`: all of it for other architectures, and for views of which no tensor map can be made.
//!
//! # Cancellation
//!
//! Roles must leave together. At a poll point the thread that fetches reads the cancel flag and hands what it read to the others
//! as it hands over a stage; all of them leave there or none. What was fetched before has then arrived, as the others have waited
//! for it, so nothing is under way when the block ends. In a cluster it is the first block's that reads the flag, for all.
//!
//! # Clusters
//!
//! Each block brings its share of the rows of a multicast stage to all of them. So a stage is empty when all blocks have released
//! it, each warp for every block, and no block ends before all are done with each other.

mod copy;
mod fragment;
mod global;
mod handover;
mod layout;
#[cfg(test)]
mod model;
mod order;
mod product;
mod share;
mod sync;
mod waits;
mod way;

use super::asm::{Arg, Label, Reg, def, ins, when};
use super::writer::Writer;
use crate::artifact::{self, Entry, Products};
use crate::backend::place::{channel_number, fragment_number};
use fragment::Spread;
use handover::{Barriers, Team};
use layout::{GROUP, Layout};
use std::fmt::Write as _;
use sync::MmaSync;
use vm_abi::{ParamLayout, Swizzle};
use vm_ir::Kernel;
use vm_ir::module::{Op, Place, Region};
use vm_ir::op::Shape;
use vm_ir::tile::Tile;
use waits::Waits;
pub(super) use way::Way;

/// The name of shared memory in a tile kernel.
const SHARED: &str = "tile_shared";
/// Bytes that addresses and strides of a view with a tensor map are multiples of.
const MAP_PROMISE: u32 = 16;
/// Its declaration.
pub(super) const DECLARATION: &str = ".extern .shared .align 1024 .b8 tile_shared[];\n";

/// Registers of fragments that leave a thread most of its own.
const FEW: u32 = 64;
/// Registers of a sum beside which 128, those of two blocks, have room for what an instruction needs (ptxas 13.0 takes 30).
const MOST_OF_HALF: u32 = 96;
/// More registers than a thread has.
const MANY: u32 = 255;
/// Bytes of shared memory that the driver takes for itself of each block.
const RESERVED: u64 = 1024;

/// What a group of warps does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Fetches.
    Fetch,
    /// All else.
    Compute,
}

/// A ring of stages as a role sees it.
#[derive(Clone, Copy, Debug)]
struct Ring {
    /// The next stage that is fetched, and the parity by which it is waited for.
    next: Reg,
    parity: Reg,
    /// The address of the newest stage.
    newest: Reg,
    /// The oldest stage that is not released.
    oldest: Reg,
}

/// The state of a tile kernel that is being written.
pub(super) struct Tiles<'k> {
    tile: &'k Tile,
    layout: Layout,
    waits: Waits,
    /// By parameter: whether groups wait for each other before they put something there.
    put_orders: Vec<order::PutOrder>,
    /// The parameters of the tensor maps: their offsets in the block of parameters.
    maps: Vec<u32>,
    role: Role,
    /// The address of shared memory.
    base: Reg,
    /// The generic address of the parameters.
    parameters: Reg,
    /// The number of the group, of the thread in it, and of the thread in its warp.
    group: Reg,
    thread: Reg,
    lane: Reg,
    /// The number of the block in its cluster, of several.
    rank: Reg,
    /// Is it the group's first thread? And its warp's?
    leads: Reg,
    leads_warp: Reg,
    /// How fragments lie; the number of the thread's part of their rows, and of their columns where those are divided.
    spread: Spread,
    part: Reg,
    part_across: Option<Reg>,
    /// The first row that a thread has of each slab, in its part.
    row: Reg,
    /// By channel.
    rings: Vec<Ring>,
    /// How the roles tell each other of a cancelled launch, and of numbers that were loaded.
    signals: Option<Ring>,
    words: Option<Ring>,
    /// What the blocks of a cluster give each other.
    given: Option<Ring>,
    /// The parity of what comes from a view to a group's fragment.
    arrival: Reg,
    /// By fragment, if it is a sum that is set to zero: not zero if it is to be zero and its registers are not, since the
    /// next product may begin anew as well.
    fresh: Vec<Option<Reg>>,
    /// By fragment: its registers; elements of 16 bits are two in one.
    fragments: Vec<Vec<Reg>>,
    /// Where what is computed is kept before waits, a predicate of which the assembler does not know that it never holds.
    detour: Option<Reg>,
    /// Was anything computed of fragments since the last product began, or the last wait?
    computed: bool,
    /// Where a role ends.
    end: Label,
    /// What there is without `wgmma`.
    sync: Option<Box<MmaSync>>,
}

impl<'k> Tiles<'k> {
    /// Nothing in registers yet.
    fn new(tile: &'k Tile, layout: Layout, waits: Waits, end: Label) -> Tiles<'k> {
        Tiles {
            tile,
            layout,
            waits,
            put_orders: Vec::new(),
            maps: Vec::new(),
            role: Role::Compute,
            base: Reg::NONE,
            parameters: Reg::NONE,
            group: Reg::NONE,
            thread: Reg::NONE,
            lane: Reg::NONE,
            rank: Reg::NONE,
            leads: Reg::NONE,
            leads_warp: Reg::NONE,
            spread: Spread::from(tile.groups),
            part: Reg::NONE,
            part_across: None,
            row: Reg::NONE,
            rings: Vec::new(),
            signals: None,
            words: None,
            given: None,
            arrival: Reg::NONE,
            fresh: Vec::new(),
            fragments: Vec::new(),
            detour: None,
            computed: false,
            end,
            sync: None,
        }
    }
}

impl<'k> Writer<'k> {
    fn tiles(&self) -> Option<&Tiles<'k>> {
        self.tiles.as_deref()
    }

    /// Writes a tile kernel.
    pub(super) fn tile_kernel(&mut self, tile: &'k Tile, text: &mut String) -> Entry {
        let kernel = self.kernel;
        let layout = match Way::of(self.options, kernel, tile) {
            Way::Wgmma(layout) => layout,
            // What goes neither way was rejected.
            Way::Sync(why) | Way::Neither(why) => return self.sync_kernel(tile, &why, text),
        };
        let params = artifact::layout(kernel, &maps(&layout), self.plan.cancellable());
        self.prologue(&params);
        self.begin_tiles(tile, layout, &params);
        let threads = GROUP * (tile.groups + 1);
        let to_fetch = self.asm.new_label();
        let (group, end) = self.tiles().map_or((Reg::NONE, to_fetch), |tiles| (tiles.group, tiles.end));
        let fetches = def!(self, Pred, "setp.eq.u32", group, 0);
        when!(self, fetches, true, "bra.uni", Arg::Label(to_fetch));
        // What one role leaves in registers that both count with is set anew for the other.
        self.role(Role::Compute, tile);
        self.asm.place(to_fetch);
        self.role(Role::Fetch, tile);
        self.asm.place(end);
        let releases = self.plan.cancellable() || tile.channels.iter().any(|channel| channel.multicast);
        if kernel.cluster() > 1 && releases {
            // Others may still release stages here, and have brought tiles here. Of sums each block waits for all that it is given.
            ins!(self, "barrier.cluster.arrive.release");
            ins!(self, "barrier.cluster.wait.acquire");
        }
        ins!(self, "ret");

        let bytes = self.tiles().map_or(0, |tiles| tiles.layout.bytes);
        let resident = self.resident();
        let products = way::products(self.options, kernel, None);
        self.entry(text, params, [threads, bytes, resident], kernel.cluster() > 1, products)
    }

    /// Writes a tile kernel's text around what its threads do, and gives its entry: of so many threads, bytes of shared memory, and blocks that are to
    /// be on a multiprocessor at a time. `clusters`: do its blocks run in clusters?
    fn entry(
        &mut self,
        text: &mut String,
        params: ParamLayout,
        [threads, shared, resident]: [u32; 3],
        clusters: bool,
        products: Products,
    ) -> Entry {
        let kernel = self.kernel;
        let symbol = format!("vir_{}", kernel.name());
        let _ = writeln!(text, "\n// @{} at {}", kernel.name(), kernel.guest_address());
        way::comments(text, &products);
        let _ = write!(text, ".visible .entry {symbol}(");
        let _ = write!(text, "\n\t.param .align {} .b8 args[{}]\n", params.align(), params.bytes.max(8));
        let _ = writeln!(text, ")\n.reqntid {threads}, 1, 1\n.minnctapersm {resident}");
        if clusters {
            let _ = writeln!(text, ".explicitcluster\n.reqnctapercluster {}, 1, 1", kernel.cluster());
        }
        text.push_str("{\n");
        self.asm.declarations(text);
        self.asm.write(text);
        text.push_str("}\n");
        Entry {
            kernel: kernel.name().to_owned(),
            symbol,
            block: [threads, 1, 1],
            cluster: kernel.cluster(),
            params,
            static_shared: 0,
            dynamic_shared: shared,
            work: self.plan.bound(),
            products: Some(products),
        }
    }

    /// What all threads do before they part.
    fn begin_tiles(&mut self, tile: &'k Tile, layout: Layout, params: &ParamLayout) {
        let name = def!(self, B32, "mov.u32", SHARED);
        let up = def!(self, B32, "add.u32", name, i64::from(layout::ALIGN - 1));
        let base = def!(self, B32, "and.b32", up, -i64::from(layout::ALIGN));
        let here = def!(self, B64, "mov.b64", "args");
        let parameters = def!(self, B64, "cvta.param.u64", here);
        let index = def!(self, B32, "mov.u32", "%tid.x");
        let first = def!(self, Pred, "setp.eq.u32", index, 0);
        // Read as early as possible.
        let maps = params.maps.iter().map(|map| map.offset).collect();
        for map in &params.maps {
            let at = Arg::At(parameters, i64::from(map.offset));
            when!(self, first, true, "prefetch.tensormap", at);
        }
        let warp = def!(self, B32, "shr.u32", index, 5);
        // Uniform in the warp, which the assembler can't know.
        let warp_uniform = def!(self, B32, "shfl.sync.idx.b32", warp, 0, 31, -1);
        let group = def!(self, B32, "shr.u32", warp_uniform, 2);
        let thread = def!(self, B32, "and.b32", index, i64::from(GROUP - 1));
        let leads = def!(self, Pred, "setp.eq.u32", thread, 0);
        let lane = def!(self, B32, "and.b32", index, 31);
        let leads_warp = def!(self, Pred, "setp.eq.u32", lane, 0);
        let quad = def!(self, B32, "shr.u32", lane, 2);
        let in_group = def!(self, B32, "and.b32", warp_uniform, 3);
        let row = def!(self, B32, "mad.lo.u32", in_group, 16, quad);
        let cluster = self.kernel.cluster();
        let (warps, threads) = (4 * tile.groups, GROUP * tile.groups);
        let computing = Team { warps, threads };
        let rings = handover::barriers(self.kernel, tile, &layout, self.plan.cancellable(), computing);
        // One thread makes them all: an address that differs between threads is one that they go through one by one.
        let made = self.asm.new_label();
        when!(self, first, false, "bra", Arg::Label(made));
        for Barriers { at, stages, full, empty, .. } in rings {
            for (first_of, count) in [(at, full), (at + 8 * stages, empty)] {
                for stage in (0..stages).filter(|_| count > 0) {
                    let barrier = Arg::At(base, i64::from(first_of + 8 * stage));
                    ins!(self, "mbarrier.init.shared::cta.b64", barrier, i64::from(count));
                }
            }
        }
        ins!(self, "fence.mbarrier_init.release.cluster");
        self.asm.place(made);
        // What comes next takes whole warps.
        ins!(self, "bar.warp.sync", -1);
        let rank = match cluster {
            1 => {
                // Who fetches waits for nobody: what it needs its first thread has made.
                let block = i64::from(threads + GROUP);
                let fetches = def!(self, Pred, "setp.eq.u32", group, 0);
                when!(self, fetches, true, "bar.arrive", 0, block);
                when!(self, fetches, false, "bar.sync", 0, block);
                Reg::NONE
            }
            _ => {
                // The fence has released the barriers; a release of all memory takes hundreds of cycles.
                ins!(self, "barrier.cluster.arrive.relaxed.aligned");
                ins!(self, "barrier.cluster.wait.aligned");
                def!(self, B32, "mov.u32", "%cluster_ctarank")
            }
        };
        let end = self.asm.new_label();
        self.tiles = Some(Box::new(Tiles {
            maps,
            base,
            parameters,
            group,
            thread,
            lane,
            rank,
            leads,
            leads_warp,
            row,
            put_orders: order::put_orders(self.kernel),
            ..Tiles::new(tile, layout, Waits::of(self.kernel), end)
        }));
    }

    /// Registers of all fragments in a thread.
    fn held_registers(&self, tile: &Tile) -> u32 {
        let held = tile.fragments.iter().map(|f| fragment::elements(f, tile.groups) * f.element.bytes() / 4);
        held.sum()
    }

    /// Blocks of a kernel of one group that a multiprocessor has at a time: two, if that is how much shared memory there is, and an
    /// instruction finds its sum in half of the registers.
    fn resident(&self) -> u32 {
        let Some(tiles) = self.tiles() else { return 1 };
        let room = self.options.arch.shared_bytes() / 2 - RESERVED;
        let words = |f| fragment::elements(f, 1) * f.element.bytes() / 4;
        let narrow = tiles.tile.fragments.iter().all(|fragment| words(fragment) <= MOST_OF_HALF);
        if tiles.tile.groups == 1 && narrow && u64::from(tiles.layout.bytes) <= room { 2 } else { 1 }
    }

    /// Writes the program as a role runs it.
    fn role(&mut self, role: Role, tile: &'k Tile) {
        let Some(end) = self.tiles().map(|tiles| tiles.end) else { return };
        let (fetching, computing) = match tile.groups {
            // Where fragments leave room, who fetches has some for what it computes.
            1 if self.resident() > 1 && self.held_registers(tile) < FEW => (Some(56), Some(200)),
            1 if self.resident() > 1 => (Some(24), Some(232)),
            1 => (None, None),
            // Where fragments have more registers than a thread, most of them live in turns, those that compute need all they get.
            2 if self.held_registers(tile) > MANY => (Some(24), Some(240)),
            2 => (Some(40), Some(232)),
            _ => (Some(32), Some(160)),
        };
        match (role, fetching, computing) {
            (Role::Fetch, Some(registers), _) => ins!(self, "setmaxnreg.dec.sync.aligned.u32", registers),
            (Role::Compute, _, Some(registers)) => ins!(self, "setmaxnreg.inc.sync.aligned.u32", registers),
            _ => {}
        }
        if let (Role::Fetch, Some(leads)) = (role, self.tiles().map(|tiles| tiles.leads)) {
            when!(self, leads, false, "bra", Arg::Label(end));
        }
        let rings = tile.channels.iter().map(|_| self.ring(role)).collect();
        let signals = self.plan.cancellable().then(|| self.ring(role));
        let loads = self.tiles().is_some_and(|tiles| tiles.layout.words > 0);
        let words = loads.then(|| self.ring(role));
        let gives = self.tiles().is_some_and(|tiles| tiles.layout.given_buffers > 0);
        let given = gives.then(|| self.ring(role));
        let arrival = def!(self, B32, "mov.b32", 0);
        let fresh = (0..tile.fragments.len()).map(|number| self.begin_fresh(number, role)).collect();
        let fragments = match role {
            Role::Fetch => vec![Vec::new(); tile.fragments.len()],
            Role::Compute => tile.fragments.iter().map(|f| self.zeroed(f, tile.groups)).collect(),
        };
        let group = self.tiles().map_or(Reg::NONE, |tiles| tiles.group);
        let part = def!(self, B32, "sub.u32", group, 1);
        let detour = self.keeps_before_waits(tile).then(|| {
            let layers = def!(self, B32, "mov.u32", "%nctaid.z");
            def!(self, Pred, "setp.eq.u32", layers, 0xffff)
        });
        if let Some(tiles) = &mut self.tiles {
            (tiles.part, tiles.detour, tiles.computed) = (part, detour, false);
            (tiles.role, tiles.rings, tiles.signals, tiles.words, tiles.given) =
                (role, rings, signals, words, given);
            (tiles.fragments, tiles.fresh, tiles.arrival) = (fragments, fresh, arrival);
        }
        self.program(Self::leave);
    }

    /// Writes the kernel's body as a role runs it, which ends with `leave`.
    fn program(&mut self, leave: fn(&mut Self)) {
        self.begin_polls();
        let body = self.kernel.body();
        self.region(body);
        leave(self);
        if let Some(cancel) = self.cancel {
            // Roles run out of fuel together.
            self.asm.place(cancel.out_of_fuel);
            self.report_out_of_fuel(cancel);
            self.asm.place(cancel.leave);
            leave(self);
        }
    }

    /// Ends the role with nothing of it under way.
    fn leave(&mut self) {
        let Some(tiles) = self.tiles() else { return };
        let (role, end, leads) = (tiles.role, tiles.end, tiles.leads);
        if role == Role::Compute {
            ins!(self, "wgmma.wait_group.sync.aligned", 0);
            when!(self, leads, true, "cp.async.bulk.wait_group.read", 0);
        }
        ins!(self, "bra", Arg::Label(end));
    }

    fn ring(&mut self, role: Role) -> Ring {
        // A stage that was never full is empty: its barrier is in the phase before the first.
        let parity = i64::from(role == Role::Fetch);
        let [next, newest, oldest] = [0; 3].map(|zero: i64| def!(self, B32, "mov.b32", zero));
        Ring { next, parity: def!(self, B32, "mov.b32", parity), newest, oldest }
    }

    /// What comes before an op of a tile kernel: products are waited for.
    pub(super) fn before_op(&mut self, op: &Op) {
        let Some(tiles) = self.tiles().filter(|tiles| tiles.role == Role::Compute) else { return };
        let waits = tiles.waits.before(op);
        let computes = matches!(op.code.shape(), Shape::Map | Shape::Rows);
        if let Some(left) = waits {
            self.keep_before_wait();
            ins!(self, "wgmma.wait_group.sync.aligned", i64::from(left));
        }
        if let Some(tiles) = &mut self.tiles {
            tiles.computed = computes || tiles.computed && waits.is_none() && op.code.shape() != Shape::Mma;
        }
    }

    /// Is what was computed before a wait to be kept there? That takes registers: kernels with factors of 8 bits in registers have them to
    /// spare, but not three groups of one.
    fn keeps_before_waits(&self, tile: &Tile) -> bool {
        let narrow = |place: &Place| self.kernel.fragment(*place).is_some_and(|of| of.element.bytes() == 1);
        let mut multiplies = false;
        self.kernel.for_each_op(&mut |op| {
            multiplies |= op.code.shape() == Shape::Mma && op.others.first().is_some_and(narrow);
        });
        multiplies && tile.groups < 3
    }

    /// Has the assembler keep what was computed before a wait there, where a product runs meanwhile: within a block of code it moves the
    /// wait ahead of all that does not need its product (seen of ptxas 13.0). So the block ends here, by a branch that is never taken.
    fn keep_before_wait(&mut self) {
        let computed = self.tiles().filter(|tiles| tiles.computed);
        let Some(detour) = computed.and_then(|tiles| tiles.detour) else { return };
        let below = self.asm.new_label();
        when!(self, detour, false, "bra.uni", Arg::Label(below));
        ins!(self, "nanosleep.u32", 0);
        self.asm.place(below);
    }

    /// What comes at the end of a region of a tile kernel.
    pub(super) fn end_of_region(&mut self, region: &Region) {
        let Some(tiles) = self.tiles().filter(|tiles| tiles.role == Role::Compute) else { return };
        if let Some(left) = tiles.waits.at_end(region) {
            ins!(self, "wgmma.wait_group.sync.aligned", i64::from(left));
        }
    }

    pub(super) fn tile_op(&mut self, op: &'k Op) {
        let (Some(role), Some(place)) = (self.tiles().map(|tiles| tiles.role), op.place) else { return };
        if self.is_sync() {
            return self.sync_op(op, place, role);
        }
        if role == Role::Compute {
            self.settle_zeros(op);
        }
        match (op.code.shape(), role) {
            (Shape::Fetch, _) => self.fetch(op, place),
            (_, Role::Fetch) => {}
            (Shape::Release, _) => self.release(place),
            (Shape::Fill, _) => self.fill_fragment(op, place),
            (Shape::Mma, _) => self.mma(op, place),
            (Shape::Map, _) => self.map(op, place),
            (Shape::Rows, _) => self.rows(op, place),
            (Shape::Share, _) => self.share(op, place),
            (Shape::Put | Shape::PutRows, _) => self.put_tile(op, place),
            (Shape::Get, _) => self.get_tile(op, place),
            (Shape::Send, _) => self.send(op, place),
            _ => {}
        }
    }

    /// Registers by which a cancellation is polled for, for the role that begins.
    fn begin_polls(&mut self) {
        let Some(guard) = self.guard else { return };
        self.prepare_polls(guard.0, guard.1);
    }
}

/// The tensor maps that a kernel asks its launch for.
fn maps(layout: &Layout) -> Vec<vm_abi::Tile> {
    let map = |wanted: &layout::BoxOf| vm_abi::Tile {
        parameter: wanted.parameter.into(),
        shape: wanted.dims,
        swizzle: Swizzle::Bytes128,
        element: artifact::element(wanted.element),
        writes: wanted.writes,
    };
    layout.boxes.iter().map(map).collect()
}

/// Instructions that an op comes to at most, about; of a `map`, its region too.
pub(super) fn instructions(kernel: &Kernel, op: &Op) -> u64 {
    let groups = kernel.tile().map_or(1, |tile| tile.groups);
    let fragments = op.place.iter().chain(&op.others).filter_map(|place| kernel.fragment(*place));
    let elements = fragments.map(|f| u64::from(fragment::elements(f, groups))).max().unwrap_or(0);
    let of_one = |op: &Op| super::size::instructions(kernel, op, None);
    let each: u64 = op.regions.iter().flat_map(|region| &region.ops).map(of_one).sum();
    // What is shared goes to each block, and comes from each.
    let blocks = if op.code.shape() == Shape::Share { 2 * u64::from(kernel.cluster()) } else { 1 };
    64 + blocks * elements * (4 + each)
}
