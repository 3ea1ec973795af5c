//! Tile kernels: all waves of a block run the one program, on scalars that are uniform, and have parts of its fragments.
//!
//! * `layout`: which lanes have what of a fragment, how it lies in registers, and where stages lie in shared memory (LDS).
//! * `held`: how many registers fragments take at a time; `barriers`: where waves wait for each other.
//! * `boxes`: boxes of views, clipped; `copy` brings them into stages, `memory` fragments from and to views and stages.
//! * `factor`: what instructions multiply, from stages and fragments; `product`: `mma`, by MFMA or WMMA; `cores`: without.
//! * `fragment`: ops on fragments alone.
//!
//! # Products
//!
//! A product is computed transposed, its right factor first: so a lane has one row of a sum, and columns in it that lie side by side,
//! which is also how it has a left factor. What is computed of a sum is multiplied where it is.
//!
//! # Cancellation
//!
//! Waves of a block must leave together, as they meet at barriers. At a poll point the first thread reads the cancel flag, and all take
//! what it has read.

mod barriers;
mod boxes;
mod copy;
mod cores;
mod factor;
mod fragment;
mod held;
mod layout;
mod memory;
mod product;

use super::Chip;
use super::writer::{Val, Writer, int};
use crate::backend::place::{channel_number, fragment_number};
use crate::reject::RejectKind;
use barriers::Barriers;
use layout::{Kept, Layout, SLAB, Spread};
use product::Multiplier;
use vm_ir::module::Op;
use vm_ir::op::{Opcode, Shape};
use vm_ir::tile::{Fragment, Tile};
use vm_ir::{Kernel, Scalar};

/// Threads of a group.
const GROUP: u32 = 128;
/// What fences and barriers that are about shared memory alone name.
const LOCAL: &str = "!1 = !{!\"amdgpu-synchronize-as\", !\"local\"}\n";

/// The state of a tile kernel that is being written.
pub(super) struct Tiles<'k> {
    tile: &'k Tile,
    layout: Layout,
    barriers: Barriers,
    spread: Spread,
    /// The thread's number in its block.
    index: Val,
    /// The number of the wave's part of rows, and of columns: uniform.
    part: Val,
    part_across: Val,
    /// The lane's row of sixteen, and which columns of sixteen it has.
    row: Val,
    quarter: Val,
    /// Which column of sixteen it takes of a right factor.
    column: Val,
    /// By the distances at which lanes exchange: where the other's word is.
    others: Vec<(u32, Val)>,
    /// By channel: numbers in the state of the next stage, and of the offset of the newest.
    rings: Vec<[usize; 2]>,
    /// By fragment: its shape, and the number in the state of the first of its registers.
    fragments: Vec<(Kept, usize)>,
}

impl Tiles<'_> {
    pub(super) fn shared_bytes(&self) -> u32 {
        self.layout.bytes
    }
}

/// The threads of a tile kernel's block.
pub(super) fn block(kernel: &Kernel, _: Chip) -> Option<[u32; 3]> {
    kernel.tile().map(|tile| [GROUP * tile.groups, 1, 1])
}

/// Why a chip does not take a tile kernel.
pub(super) fn rejects(chip: Chip, kernel: &Kernel, tile: &Tile) -> Vec<(u32, RejectKind)> {
    let mut found = Vec::new();
    let mut need = |line: u32, holds: bool, what: &dyn Fn() -> String| {
        if !holds {
            found.push((line, RejectKind::Tile { what: what() }));
        }
    };
    for fragment in &tile.fragments {
        need(fragment.line.0, fragment.element.bytes() <= 4, &|| {
            format!("@{} is of {}; fragments have elements of up to 32 bits", fragment.name, fragment.element)
        });
    }
    kernel.for_each_op(&mut |op| {
        let left = op.others.first().and_then(|place| kernel.fragment(*place));
        let own = op.place.and_then(|place| kernel.fragment(place));
        if op.code.shape() == Shape::Mma {
            let row = own.filter(|f| f.is_row()).or(left.filter(|f| f.is_row()));
            need(op.line.0, row.is_none(), &|| {
                let name = row.map_or("", |fragment| &fragment.name);
                format!("@{name} has one row; products take two or more")
            });
        }
        if let (Shape::Share, Some(own), Some(left)) = (op.code.shape(), own, left) {
            let whole = |f: &Fragment| f.columns.is_some_and(|columns| columns.is_multiple_of(SLAB));
            need(op.line.0, own.columns == left.columns || whole(own), &|| {
                format!("@{} is a share of columns, of which there are no multiple of {SLAB}", own.name)
            });
        }
    });
    let (held, threads) =
        (held::held(kernel, tile, Spread::of(kernel, tile, chip.wave())), GROUP * tile.groups);
    let available = chip.registers(threads);
    need(kernel.line().0, held <= available, &|| {
        format!(
            "its fragments take {held} registers of 32 bits at a time, a thread of {chip} has {available} in blocks of {threads}; make its tiles smaller"
        )
    });
    let (needed, available) = (u64::from(Layout::of(kernel, tile).bytes), chip.shared_bytes());
    need(kernel.line().0, needed <= available, &|| {
        format!(
            "its stages take {needed} bytes of shared memory, a block of {chip} has {available}; make its tiles smaller, or their stages fewer"
        )
    });
    found
}

impl<'k> Writer<'k> {
    /// The state of a tile kernel; where there is none, there is nothing to write.
    fn tiles(&self) -> Option<&Tiles<'k>> {
        self.tiles.as_deref()
    }

    /// What all threads of a tile kernel do first.
    pub(super) fn begin_tiles(&mut self) {
        let Some(tile) = self.kernel.tile() else { return };
        let wave = self.options.chip.wave();
        let spread = Spread::of(self.kernel, tile, wave);
        let index = self.local_index();
        let number = self.op32("lshr", index, wave.trailing_zeros());
        // Uniform in the wave, which LLVM can't know.
        let number = self.call("i32", "llvm.amdgcn.readfirstlane.i32", &[("i32", number)]);
        let part = self.op32("udiv", number, spread.across);
        let part_across = match spread.across {
            1 => Val::Bits(0),
            across => self.op32("urem", number, across),
        };
        let row = self.op32("and", index, SLAB - 1);
        let quarter = self.op32("lshr", index, SLAB.trailing_zeros());
        let quarter = self.op32("and", quarter, wave / SLAB - 1);
        // gfx11 leaves even rows of what is a transposed sum to the first sixteen lanes, odd ones to the others.
        let column = match self.options.chip {
            Chip::Gfx1100 => {
                let odd = self.op32("and", row, 1u32);
                let odd = self.op32("mul", odd, SLAB / 2);
                let half = self.op32("lshr", row, 1u32);
                self.op32("add", half, odd)
            }
            _ => row,
        };
        let lane = self.op32("and", index, wave - 1);
        let mut others = Vec::new();
        if wave == 64 {
            for distance in [16, 32] {
                let other = self.op32("xor", lane, distance);
                others.push((distance, self.op32("shl", other, 2u32)));
            }
        }
        let layout = Layout::of(self.kernel, tile);
        let rings = tile.channels.iter().zip(&layout.stages).map(|(_, (first, _))| {
            let next = self.state.add("i32", Val::Bits(0));
            [next, self.state.add("i32", Val::Bits((*first).into()))]
        });
        let rings = rings.collect();
        let mut fragments = Vec::new();
        for fragment in &tile.fragments {
            let kept = Kept::of(fragment, spread);
            let first = self.state.now.len();
            for _ in 0..kept.count() {
                self.state.add(kept.ty, Val::Zero);
            }
            fragments.push((kept, first));
        }
        let barriers = Barriers::of(self.kernel, tile);
        self.tiles = Some(Box::new(Tiles {
            tile,
            layout,
            barriers,
            spread,
            index,
            part,
            part_across,
            row,
            quarter,
            column,
            others,
            rings,
            fragments,
        }));
    }

    /// What of the state of tiles an op's regions change.
    pub(super) fn changed_tiles(&self, op: &Op) -> Vec<usize> {
        let Some(tiles) = self.tiles() else { return Vec::new() };
        let mut changed = std::collections::BTreeSet::new();
        let mut regions: Vec<_> = op.regions.iter().collect();
        while let Some(region) = regions.pop() {
            for op in &region.ops {
                let written = layout::written(op);
                for place in op.place.iter().chain(&op.others).take(written.end).skip(written.start) {
                    let place = *place;
                    if let Some(number) = channel_number(place) {
                        changed.extend(tiles.rings[number]);
                    }
                    if let Some((kept, first)) = fragment_number(place).map(|at| &tiles.fragments[at]) {
                        changed.extend(*first..first + kept.count());
                    }
                }
                if op.code.shape() != Shape::Map {
                    regions.extend(&op.regions);
                }
            }
        }
        // What has one stage alone does not change.
        changed.retain(|at| {
            let ring = tiles.rings.iter().position(|ring| ring.contains(at));
            ring.is_none_or(|number| tiles.tile.channels[number].stages > 1)
        });
        changed.into_iter().collect()
    }

    pub(super) fn tile_op(&mut self, op: &'k Op) {
        let Some(place) = op.place else { return };
        if self.tiles().is_some_and(|tiles| tiles.barriers.is_before(op)) {
            self.local_barrier();
        }
        match op.code.shape() {
            Shape::Fetch => self.fetch(op),
            Shape::Fill => self.fill(op, place),
            Shape::Mma => self.mma(op, place),
            Shape::Map => self.map(op, place),
            Shape::Rows => self.rows(op, place),
            Shape::Share => self.share(op, place),
            Shape::Put | Shape::PutRows | Shape::Get => self.transfer(op, place),
            Shape::Send => self.send(op, place),
            // `release`: the barriers see to that.
            _ => {}
        }
    }

    /// Waits for all waves, and for what they did in shared memory.
    fn local_barrier(&mut self) {
        self.declared.insert(LOCAL.to_owned());
        self.line("fence syncscope(\"workgroup\") release, !mmra !1");
        self.call_void("llvm.amdgcn.s.barrier");
        self.line("fence syncscope(\"workgroup\") acquire, !mmra !1");
    }

    /// A number of a type of 32 or 64 bits that the first thread has, for all.
    pub(super) fn handed_over(&mut self, ty: &str, own: impl FnOnce(&mut Self) -> Val) -> Val {
        let Some((index, word)) = self.tiles().map(|tiles| (tiles.index, tiles.layout.word)) else {
            return Val::Zero;
        };
        let first = self.def(format_args!("icmp eq i32 {index}, 0"));
        let at = self.in_shared(Val::Bits(word.into()));
        self.only_if(first, &[], |writer| {
            let value = own(writer);
            writer.line(format_args!("store {ty} {value}, ptr addrspace(3) {at}, align 8"));
            Vec::new()
        });
        self.local_barrier();
        let value = self.def(format_args!("load {ty}, ptr addrspace(3) {at}, align 8"));
        let value = self.call(ty, &format!("llvm.amdgcn.readfirstlane.{ty}"), &[(ty, value)]);
        self.local_barrier();
        value
    }

    /// Loads a number, the same for all threads whatever changes it meanwhile.
    pub(super) fn load_for_all(&mut self, op: &'k Op) {
        let Some(result) = op.result() else { return };
        let (ty, wide) = match self.ty(result).scalar() {
            scalar if scalar.bits() == 64 => (int(scalar), "i64"),
            scalar => (int(scalar), "i32"),
        };
        let value = self.handed_over(wide, |writer| {
            writer.load(op);
            let own = writer.get(result, 0);
            if ty == wide { own } else { writer.def(format_args!("zext {ty} {own} to {wide}")) }
        });
        let value = if ty == wide { value } else { self.def(format_args!("trunc {wide} {value} to {ty}")) };
        self.set(result, 0, value);
    }

    /// An address in shared memory.
    fn in_shared(&mut self, offset: Val) -> Val {
        let shared = self.shared.clone();
        self.def(format_args!("getelementptr i8, ptr addrspace(3) {shared}, i32 {offset}"))
    }

    /// An op on numbers of 32 bits, computed here where both are known.
    fn op32(&mut self, name: &str, a: impl Into<Val>, b: impl Into<Val>) -> Val {
        let (a, b) = (a.into(), b.into());
        let known = |value: Val| match value {
            Val::Bits(bits) => Some(bits as u32),
            Val::Zero => Some(0),
            Val::Reg(_) => None,
        };
        match (name, known(a), known(b)) {
            ("add", Some(a), Some(b)) => return a.wrapping_add(b).into(),
            ("mul", Some(a), Some(b)) => return a.wrapping_mul(b).into(),
            ("xor", Some(a), Some(b)) => return (a ^ b).into(),
            ("and", Some(a), Some(b)) => return (a & b).into(),
            ("lshr", Some(a), Some(b)) => return (a >> b).into(),
            ("shl", Some(a), Some(b)) => return (a << b).into(),
            ("udiv", Some(a), Some(b)) => return (a / b.max(1)).into(),
            ("add" | "xor" | "lshr" | "shl" | "sub", _, Some(0)) | ("mul" | "udiv", _, Some(1)) => return a,
            ("add" | "xor", Some(0), _) | ("mul", Some(1), _) => return b,
            ("mul" | "and", _, Some(0)) | ("mul" | "and", Some(0), _) => return Val::Bits(0),
            _ => {}
        }
        self.def(format_args!("{name} i32 {a}, {b}"))
    }

    /// The multiplier for factors of these types.
    fn multiplier(&self, a: Scalar) -> Multiplier {
        Multiplier::of(self.options.chip, a)
    }

    /// The offset of the newest stage of a channel.
    fn newest(&self, number: usize) -> Val {
        self.tiles().map_or(Val::Zero, |tiles| self.state.now[tiles.rings[number][1]])
    }

    /// Makes the next stage of a channel its newest, and gives its offset.
    fn advance(&mut self, number: usize) -> Val {
        let Some(tiles) = self.tiles() else { return Val::Zero };
        let ([next, newest], (first, stage)) = (tiles.rings[number], tiles.layout.stages[number]);
        let stages = tiles.tile.channels[number].stages;
        if stages == 1 {
            return first.into();
        }
        let at = self.state.now[next];
        let offset = self.op32("mul", at, stage.bytes());
        let offset = self.op32("add", offset, first);
        let more = self.op32("add", at, 1u32);
        let last = self.def(format_args!("icmp eq i32 {more}, {stages}"));
        self.state.now[next] = self.def(format_args!("select i1 {last}, i32 0, i32 {more}"));
        self.state.now[newest] = offset;
        offset
    }
}

impl From<u32> for Val {
    fn from(number: u32) -> Val {
        Val::Bits(number.into())
    }
}

/// Is a fragment a factor in the kernel, or are its rows added up? Then it must have them whole in each wave.
fn needs_rows(kernel: &Kernel) -> bool {
    let mut found = false;
    kernel.for_each_op(&mut |op| {
        let of_fragment = op.others.first().is_some_and(|place| fragment_number(*place).is_some());
        found |= match op.code {
            Opcode::Mma | Opcode::Product => of_fragment,
            _ => matches!(op.code.shape(), Shape::Rows | Shape::Share),
        };
    });
    found
}
