//! Which lanes have what of a fragment, how it lies in registers, and where stages lie in shared memory.
//!
//! A wave has slabs of 16 rows, each in blocks of 16 columns; of a block a lane has neighbouring columns of one row: four with waves of
//! 64 lanes, eight with those of 32. Those are a register of LLVM, a vector of words. Of a column, a lane has the number of its row in
//! each slab; of a row, its columns of each block.

use super::super::writer::{Val, Writer, int};
use super::{GROUP, channel_number, needs_rows};
use crate::backend::stage::Stage;
use std::ops::Range;
use vm_ir::module::Op;
use vm_ir::op::{Left, Right, Shape};
use vm_ir::tile::{Fragment, Tile};
use vm_ir::{Kernel, Scalar};

/// Rows of a slab, and columns of a block.
pub(super) const SLAB: u32 = 16;

/// How fragments are spread over the waves of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spread {
    /// Parts among which rows are divided, and columns.
    pub(super) down: u32,
    pub(super) across: u32,
    /// Columns of a block that a lane has.
    pub(super) width: u32,
}

impl Spread {
    /// Rows are divided among all waves, and columns too where that means fewer loads from stages.
    pub(super) fn of(kernel: &Kernel, tile: &Tile, wave: u32) -> Spread {
        let waves = GROUP / wave * tile.groups;
        let spread = |across: u32| Spread { down: waves / across, across, width: SLAB * SLAB / wave };
        let mut largest = None;
        kernel.for_each_op(&mut |op| {
            if let (Shape::Mma, Some(sum)) =
                (op.code.shape(), op.place.and_then(|place| kernel.fragment(place)))
            {
                let dims = [sum.rows, sum.columns.unwrap_or(1)];
                largest = largest.max(Some((dims[0] * dims[1], dims)));
            }
        });
        let Some((_, [rows, columns])) = largest.filter(|_| !needs_rows(kernel)) else { return spread(1) };
        let fits = |spread: &Spread| {
            let mut all = tile.fragments.iter().filter_map(|f| f.columns);
            spread.across == 1 || all.all(|columns| columns.is_multiple_of(SLAB * spread.across))
        };
        // What is computed, then what is loaded: all of a factor by each of the other's parts.
        let cost = |spread: &Spread| {
            let computed = spread.rows(rows) * spread.down * spread.columns(columns) * spread.across;
            (computed, spread.across * rows + spread.down * columns)
        };
        let all = (1..=waves).filter(|across| waves.is_multiple_of(*across)).map(spread);
        all.filter(fits).min_by_key(cost).unwrap_or(spread(1))
    }

    /// Rows of a part, and columns; more than there are where they can't be divided evenly.
    pub(super) fn rows(self, rows: u32) -> u32 {
        rows.div_ceil(self.down).next_multiple_of(SLAB)
    }

    pub(super) fn columns(self, columns: u32) -> u32 {
        columns.div_ceil(self.across).next_multiple_of(SLAB)
    }

    /// Do the parts have just these rows and columns?
    pub(super) fn is_even(self, rows: u32, columns: u32) -> bool {
        self.rows(rows) * self.down == rows && self.columns(columns) * self.across == columns
    }
}

/// How a lane has a fragment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kept {
    pub(super) element: Scalar,
    /// LLVM's type of a register, and the elements in it.
    pub(super) ty: &'static str,
    pub(super) width: u32,
    pub(super) slabs: u32,
    /// Blocks in a slab; of a column one.
    pub(super) blocks: u32,
}

impl Kept {
    pub(super) fn of(fragment: &Fragment, spread: Spread) -> Kept {
        let slabs = if fragment.rows == 1 { 1 } else { spread.rows(fragment.rows) / SLAB };
        let element = fragment.element;
        let Some(columns) = fragment.columns else {
            return Kept { element, ty: int(element), width: 1, slabs, blocks: 1 };
        };
        let width = spread.width;
        Kept {
            element,
            ty: words(element.bytes() * width / 4),
            width,
            slabs,
            blocks: spread.columns(columns) / SLAB,
        }
    }

    pub(super) fn count(&self) -> usize {
        (self.slabs * self.blocks) as usize
    }

    /// Registers of 32 bits that it takes.
    pub(super) fn words(&self) -> u32 {
        self.slabs * self.blocks * (self.width * self.element.bytes()).div_ceil(4)
    }
}

/// The type of so many words.
pub(super) fn words(count: u32) -> &'static str {
    match count {
        1 => "i32",
        2 => "<2 x i32>",
        4 => "<4 x i32>",
        _ => "<8 x i32>",
    }
}

/// Which of the places that an op names, its own first, it writes of channels and fragments.
pub(super) fn written(op: &Op) -> Range<usize> {
    match op.code.shape() {
        Shape::Fetch | Shape::Send | Shape::Get => 1..2,
        Shape::Mma | Shape::Rows | Shape::Share | Shape::Fill => 0..1,
        Shape::Map => 0..op.immediates.first().map_or(1, |count| *count as usize),
        _ => 0..0,
    }
}

/// Offsets in bytes in shared memory.
#[derive(Debug)]
pub(super) struct Layout {
    /// By channel: of the first stage, and how stages lie.
    pub(super) stages: Vec<(u32, Stage)>,
    /// By channel: do tiles lie transposed, since what is added up lies one below the other in each factor that it is?
    pub(super) turned: Vec<bool>,
    /// Of what the first thread tells the others.
    pub(super) word: u32,
    pub(super) bytes: u32,
}

impl Layout {
    pub(super) fn of(kernel: &Kernel, tile: &Tile) -> Layout {
        let (mut at, mut stages) = (0u32, Vec::new());
        let mut turned = vec![None; tile.channels.len()];
        kernel.for_each_op(&mut |op| {
            let turns = |factor: usize| match factor {
                0 => op.attr() == Some(Left::Transposed),
                _ => op.attr() != Some(Right::Transposed),
            };
            for (factor, place) in op.others.iter().enumerate() {
                let Some(number) = channel_number(*place) else { continue };
                let turns = match op.code.shape() {
                    Shape::Mma => turns(factor),
                    Shape::Send => false,
                    _ => continue,
                };
                turned[number] = Some(turned[number].unwrap_or(true) && turns);
            }
        });
        let turned: Vec<bool> = turned.into_iter().map(|turned| turned.unwrap_or(false)).collect();
        for (channel, turned) in tile.channels.iter().zip(&turned) {
            let [rows, columns] = channel.dims;
            let dims = if *turned { [columns, rows] } else { [rows, columns] };
            let stage = Stage::of_size(channel.element.bytes(), dims);
            stages.push((at, stage));
            at = at.saturating_add(stage.bytes().saturating_mul(channel.stages));
        }
        Layout { stages, turned, word: at, bytes: at.saturating_add(8) }
    }
}

impl Writer<'_> {
    /// The elements of a register.
    pub(super) fn unpacked(&mut self, kept: Kept, value: Val) -> Vec<Val> {
        let (element, width) = (int(kept.element), kept.width);
        if width == 1 {
            return vec![value];
        }
        if value == Val::Zero {
            return vec![Val::Bits(0); width as usize];
        }
        if kept.element.bytes() == 1 {
            let words = self.words_of(width / 4, value);
            let byte = |at: u32| {
                let word = self.op32("lshr", words[at as usize / 4], at % 4 * 8);
                self.def(format_args!("trunc i32 {word} to i8"))
            };
            return (0..width).map(byte).collect();
        }
        let all = format!("<{width} x {element}>");
        let value = self.def(format_args!("bitcast {} {value} to {all}", kept.ty));
        (0..width).map(|at| self.def(format_args!("extractelement {all} {value}, i32 {at}"))).collect()
    }

    /// A register of these elements.
    pub(super) fn repacked(&mut self, kept: Kept, elements: &[Val]) -> Val {
        let (element, width) = (int(kept.element), kept.width);
        if let [one] = elements {
            return *one;
        }
        if kept.element.bytes() == 1 {
            let mut words = Vec::new();
            for four in elements.chunks(4) {
                let mut word = Val::Bits(0);
                for (at, byte) in (0u32..).zip(four) {
                    let byte = self.def(format_args!("zext i8 {byte} to i32"));
                    let byte = self.op32("shl", byte, 8 * at);
                    word = self.op32("or", word, byte);
                }
                words.push(word);
            }
            return self.of_words(&words);
        }
        let all = format!("<{width} x {element}>");
        let value = self.vector(&all, element, elements);
        self.def(format_args!("bitcast {all} {value} to {}", kept.ty))
    }

    /// A vector of these.
    pub(super) fn vector(&mut self, all: &str, each: &str, elements: &[Val]) -> Val {
        let mut value = "poison".to_owned();
        let mut last = Val::Zero;
        for (at, element) in elements.iter().enumerate() {
            last = self.def(format_args!("insertelement {all} {value}, {each} {element}, i32 {at}"));
            value = last.to_string();
        }
        last
    }

    /// The words of a register of so many.
    pub(super) fn words_of(&mut self, count: u32, value: Val) -> Vec<Val> {
        match (count, value) {
            (_, Val::Zero) => vec![Val::Bits(0); count as usize],
            (1, value) => vec![value],
            _ => {
                let all = words(count);
                (0..count)
                    .map(|at| self.def(format_args!("extractelement {all} {value}, i32 {at}")))
                    .collect()
            }
        }
    }

    /// A register of these words.
    pub(super) fn of_words(&mut self, all: &[Val]) -> Val {
        match all {
            [one] => *one,
            _ => self.vector(words(all.len() as u32), "i32", all),
        }
    }

    /// The registers of a fragment.
    pub(super) fn registers(&self, number: usize) -> Option<(Kept, Vec<Val>)> {
        let (kept, first) = *self.tiles.as_deref()?.fragments.get(number)?;
        Some((kept, self.state.now[first..first + kept.count()].to_vec()))
    }

    pub(super) fn set_registers(&mut self, number: usize, values: &[Val]) {
        let Some((_, first)) = self.tiles.as_deref().map(|tiles| tiles.fragments[number]) else { return };
        self.state.now[first..first + values.len()].copy_from_slice(values);
    }

    /// The first row of a fragment that the lane has, and its first column.
    pub(super) fn corner(&mut self, fragment: &Fragment) -> [Val; 2] {
        let Some(tiles) = self.tiles.as_deref() else { return [Val::Zero; 2] };
        let (spread, part, across) = (tiles.spread, tiles.part, tiles.part_across);
        let (row, quarter) = (tiles.row, tiles.quarter);
        let top = match fragment.rows {
            1 => Val::Bits(0),
            rows => {
                let first = self.op32("mul", part, spread.rows(rows));
                self.op32("add", first, row)
            }
        };
        let Some(columns) = fragment.columns else { return [top, Val::Bits(0)] };
        let first = self.op32("mul", across, spread.columns(columns));
        let own = self.op32("mul", quarter, spread.width);
        [top, self.op32("add", first, own)]
    }
}
