//! What instructions multiply: words that a lane has of a factor, from a stage or a fragment.
//!
//! An instruction adds up products of elements at the same place in lanes of the same number among those that have one row. Which elements
//! of the inner dimension those are is all the same to it, if both factors agree. So a lane takes a *run* that lies side by side, as long as
//! a load may be; of a fragment, the columns that it has. On gfx11 each lane takes all of sixteen.

use super::super::writer::{Val, Writer, int};
use super::layout::{SLAB, words};
use super::{channel_number, fragment_number};
use crate::backend::stage::{PIECE, Stage};
use std::collections::HashMap;
use vm_ir::Scalar;
use vm_ir::module::Place;

/// Which factor it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Left,
    Right,
}

/// How much of the inner dimension lanes take at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    /// Elements side by side that a lane takes.
    pub(super) run: u32,
    /// Lanes that take one such run behind the other; the others the same again.
    pub(super) lanes: u32,
}

impl Step {
    pub(super) fn depth(self) -> u32 {
        self.run * self.lanes
    }
}

/// A factor in a stage.
pub(super) struct Factor {
    pub(super) element: Scalar,
    pub(super) stage: Stage,
    /// The offset of the stage.
    at: Val,
    /// Do the elements that are added up lie side by side in a row?
    pub(super) along: bool,
    /// Which of sixteen rows or columns the lane takes.
    own: Val,
    /// The first of the part's rows (of the left factor) or columns.
    first: Val,
    /// Where sixteen of them begin at most, if parts reach beyond the stage.
    most: Option<u32>,
    /// Addresses by what tells them apart.
    known: HashMap<[u32; 3], Val>,
}

/// Of addresses that are the same for all of what is not added up.
const ANY: u32 = u32::MAX;

impl Factor {
    /// The offset of its stage.
    pub(super) fn offset(&self) -> Val {
        self.at
    }

    /// Which of sixteen rows or columns the lane takes.
    pub(super) fn own(&self) -> Val {
        self.own
    }

    /// How many elements are added up, with those that were added to the stage.
    pub(super) fn inner(&self) -> u32 {
        if self.along { self.stage.columns() } else { self.stage.rows }
    }
}

impl Writer<'_> {
    /// A factor that is a channel.
    pub(super) fn factor(&mut self, place: Place, along: bool, side: Side, extent: u32) -> Option<Factor> {
        let (channel, number) = (self.kernel.channel(place)?, channel_number(place)?);
        let tiles = self.tiles()?;
        let (spread, stage) = (tiles.spread, tiles.layout.stages[number].1);
        let along = along != tiles.layout.turned[number];
        let (part, parts, each, own) = match side {
            Side::Left => (tiles.part, spread.down, spread.rows(extent), tiles.row),
            Side::Right => (tiles.part_across, spread.across, spread.columns(extent), tiles.column),
        };
        let there = if along { stage.rows } else { stage.columns() };
        let first = self.op32("mul", part, each);
        let at = self.newest(number);
        let most = (parts * each > there).then(|| there - SLAB);
        Some(Factor { element: channel.element, stage, at, along, own, first, most, known: HashMap::new() })
    }

    /// Where sixteen begin of what is not added up.
    pub(super) fn begin_of(&mut self, factor: &Factor, number: u32) -> Val {
        let begin = self.op32("add", factor.first, SLAB * number);
        match factor.most {
            None => begin,
            Some(most) => self.call("i32", "llvm.umin.i32", &[("i32", begin), ("i32", most.into())]),
        }
    }

    /// The words that a lane takes of a step from `inner` on, of the N-th sixteen of what is not added up.
    pub(super) fn run(&mut self, factor: &mut Factor, step: Step, number: u32, inner: u32) -> Vec<Val> {
        match factor.along {
            true => self.run_along(factor, step, number, inner),
            false => self.run_across(factor, step, number, inner),
        }
    }

    /// The lane's place among those that take runs one behind the other.
    fn turn(&self, step: Step) -> Val {
        match step.lanes {
            1 => Val::Bits(0),
            _ => self.tiles().map_or(Val::Zero, |tiles| tiles.quarter),
        }
    }

    fn run_along(&mut self, factor: &mut Factor, step: Step, number: u32, inner: u32) -> Vec<Val> {
        let stage = factor.stage;
        let (pitch, bytes) = (stage.pitch(), step.run * stage.size);
        let mut all = Vec::new();
        for piece in 0..bytes.div_ceil(PIECE) {
            let byte = inner * stage.size + piece * PIECE;
            let (by, slab) = (byte % pitch, byte / pitch);
            let key = [if factor.most.is_some() { number } else { ANY }, by, 0];
            let further = if factor.most.is_some() { 0 } else { SLAB * number * pitch };
            let at = match factor.known.get(&key) {
                Some(at) => *at,
                None => {
                    let turn = self.turn(step);
                    let begin = self.begin_of(factor, if key[0] == ANY { 0 } else { number });
                    let down = self.op32("mul", begin, pitch);
                    let down = self.op32("add", down, factor.at);
                    // The pieces of rows of eight have moved; those that begin further down by sixteens alike.
                    let row = self.place_in(Stage { slabs: 1, ..stage }, factor.own, Val::Bits(0));
                    let bytes = self.op32("mul", turn, bytes);
                    let row = self.op32("xor", row, bytes);
                    let row = self.op32("xor", row, by);
                    let at = self.op32("add", row, down);
                    let at = self.in_shared(at);
                    factor.known.insert(key, at);
                    at
                }
            };
            let count = bytes.min(PIECE) / 4;
            let offset = further + slab * stage.slab_bytes();
            let at = self.def(format_args!("getelementptr i8, ptr addrspace(3) {at}, i32 {offset}"));
            let ty = words(count);
            let loaded = self.def(format_args!("load {ty}, ptr addrspace(3) {at}, align {}", 4 * count));
            all.extend(self.words_of(count, loaded));
        }
        all
    }

    /// The same of elements that lie one below the other.
    fn run_across(&mut self, factor: &mut Factor, step: Step, number: u32, inner: u32) -> Vec<Val> {
        let stage = factor.stage;
        let ty = int(factor.element);
        let mut elements = Vec::new();
        for i in 0..step.run {
            let key = [number, i, 1];
            let at = match factor.known.get(&key) {
                Some(at) => *at,
                None => {
                    let turn = self.turn(step);
                    let row = self.op32("mul", turn, step.run);
                    let row = self.op32("add", row, i);
                    let begin = self.begin_of(factor, number);
                    let column = self.op32("add", begin, factor.own);
                    let byte = self.op32("mul", column, stage.size);
                    let at = self.address_in(stage, factor.at, row, byte);
                    factor.known.insert(key, at);
                    at
                }
            };
            // A multiple of sixteen rows further down pieces lie alike.
            let at = self
                .def(format_args!("getelementptr i8, ptr addrspace(3) {at}, i32 {}", inner * stage.pitch()));
            elements.push(self.def(format_args!("load {ty}, ptr addrspace(3) {at}, align {}", stage.size)));
        }
        let per = (4 / stage.size) as usize;
        let row = format!("<{per} x {ty}>");
        let word = |writer: &mut Self, few: &[Val]| match few {
            [one] => *one,
            few => {
                let word = writer.vector(&row, ty, few);
                writer.def(format_args!("bitcast {row} {word} to i32"))
            }
        };
        elements.chunks(per).map(|few| word(self, few)).collect()
    }

    /// The words of a block of sixteen columns of a left factor that is a fragment: of a slab what the lane has, zeros beyond the last
    /// column. `whole`: does each lane take all of the block?
    pub(super) fn run_of_fragment(&mut self, place: Place, slab: u32, block: u32, whole: bool) -> Vec<Val> {
        let own = fragment_number(place).and_then(|number| self.registers(number));
        let Some(((kept, all), fragment)) = own.zip(self.kernel.fragment(place)) else { return Vec::new() };
        let count = kept.width * kept.element.bytes() / 4;
        let there = fragment.columns.unwrap_or(0);
        let mut register = match block < kept.blocks {
            true => all[(slab * kept.blocks + block) as usize],
            false => Val::Zero,
        };
        if SLAB * (block + 1) > there && register != Val::Zero {
            let [_, left] = self.corner(fragment);
            let ty = int(kept.element);
            let mut elements = self.unpacked(kept, register);
            for (i, element) in (0u32..).zip(&mut elements) {
                let most = there.saturating_sub(SLAB * block + i);
                let inside = self.def(format_args!("icmp ult i32 {left}, {most}"));
                *element = self.def(format_args!("select i1 {inside}, {ty} {element}, {ty} 0"));
            }
            register = self.repacked(kept, &elements);
        }
        let own = self.words_of(count, register);
        if !whole {
            return own;
        }
        let other: Vec<Val> = own.iter().map(|word| self.exchanged_word(*word, SLAB)).collect();
        let quarter = self.tiles().map_or(Val::Zero, |tiles| tiles.quarter);
        let first = self.def(format_args!("icmp eq i32 {quarter}, 0"));
        let mut choose = |a: &[Val], b: &[Val]| -> Vec<Val> {
            let pairs = a.iter().zip(b);
            pairs.map(|(a, b)| self.def(format_args!("select i1 {first}, i32 {a}, i32 {b}"))).collect()
        };
        let mut all = choose(&own, &other);
        all.extend(choose(&other, &own));
        all
    }

    /// Words of f8 as words of f16, which every f8 is.
    pub(super) fn f8_as_half(&mut self, element: Scalar, all: &[Val]) -> Vec<Val> {
        let mut halves = Vec::new();
        for word in all {
            for shift in [0u32, 16] {
                // Two bytes, each the upper of sixteen bits.
                let two = self.op32("lshr", *word, shift);
                let low = self.op32("and", two, 0xffu32);
                let low = self.op32("shl", low, 8u32);
                let high = self.op32("and", two, 0xff00u32);
                let high = self.op32("shl", high, 16u32);
                let two = self.op32("or", low, high);
                halves.push(if element == Scalar::F8E5M2 { two } else { self.e4m3_as_half(two) });
            }
        }
        halves
    }

    /// One more bit of exponent, which counts from 8 more; a magnitude of all ones is no number.
    fn e4m3_as_half(&mut self, two: Val) -> Val {
        let sign = self.op32("and", two, 0x8000_8000u32);
        let magnitude = self.op32("and", two, 0x7f00_7f00u32);
        let moved = self.op32("lshr", magnitude, 1u32);
        let number = self.op32("or", sign, moved);
        let number = self.def(format_args!("bitcast i32 {number} to <2 x half>"));
        let scaled = self.def(format_args!("fmul <2 x half> {number}, <half 256.0, half 256.0>"));
        let scaled = self.def(format_args!("bitcast <2 x half> {scaled} to <2 x i16>"));
        let magnitude = self.def(format_args!("bitcast i32 {magnitude} to <2 x i16>"));
        let none = self.def(format_args!("icmp eq <2 x i16> {magnitude}, <i16 32512, i16 32512>"));
        let nan = "<2 x i16> <i16 32256, i16 32256>";
        let chosen = self.def(format_args!("select <2 x i1> {none}, {nan}, <2 x i16> {scaled}"));
        self.def(format_args!("bitcast <2 x i16> {chosen} to i32"))
    }
}
