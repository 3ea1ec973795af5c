//! `fetch`: all threads copy a box of a view into the next stage, transposed where products want it so.

use super::super::writer::{Val, Writer, int};
use super::boxes::{Box2, Range};
use super::channel_number;
use super::layout::{Kept, words};
use crate::backend::stage::{PIECE, Stage};
use vm_ir::Scalar;
use vm_ir::module::{Op, Place};

/// Pieces that are loaded before the first is stored.
const BATCH: usize = 16;
/// Words that are loaded before the first is stored, of what is transposed.
const WORDS_AT_ONCE: u32 = 64;
/// A piece in registers.
const WORDS: &str = "<4 x i32>";

/// What is copied, and where to.
#[derive(Clone, Copy)]
struct Copy {
    stage: Stage,
    element: Scalar,
    /// Does the tile lie transposed in it?
    turned: bool,
    /// The offset of the stage in shared memory.
    to: Val,
    /// What the view's rows are aligned to.
    align: u32,
    base: Val,
    stride: Val,
    rows: Range,
    /// In bytes.
    columns: Range,
    index: Val,
    threads: u32,
}

impl Copy {
    /// The rows and columns of the stage, as the view has them.
    fn tile(&self) -> [u32; 2] {
        let dims = [self.stage.rows, self.stage.columns()];
        if self.turned { [dims[1], dims[0]] } else { dims }
    }
}

impl Writer<'_> {
    pub(super) fn fetch(&mut self, op: &Op) {
        let (Some(&[place]), Some(Place::View(view))) = (op.others.first_chunk::<1>(), op.place) else {
            return;
        };
        let (Some(channel), Some(number)) = (self.kernel.channel(place), channel_number(place)) else {
            return;
        };
        let (element, dims) = (channel.element, channel.dims);
        let align =
            self.kernel.view(view).map_or(1, |view| view.align.min(PIECE)).max(element.bytes().min(PIECE));
        let Some(Box2 { base, stride, rows: Some(rows), columns }) =
            self.clipped(op, &op.operands, true, false)
        else {
            return;
        };
        let to = self.advance(number);
        let Some(tiles) = self.tiles() else { return };
        let ((_, stage), turned, index) =
            (tiles.layout.stages[number], tiles.layout.turned[number], tiles.index);
        let threads = self.block_threads();
        // What the tile does not have lies outside, too.
        let within = |writer: &mut Self, range: Range, extent: u32, size: u32| {
            let end = writer.call("i32", "llvm.umin.i32", &[("i32", range.end), ("i32", extent.into())]);
            Range { skip: writer.op32("mul", range.skip, size), end: writer.op32("mul", end, size) }
        };
        let rows = within(self, rows, dims[0], 1);
        let columns = within(self, columns, dims[1], stage.size);
        let copy = Copy { stage, element, turned, to, align, base, stride, rows, columns, index, threads };
        if copy.tile() != dims {
            return self.copy_edge(copy);
        }
        // Nothing is to be asked of each piece where all of the box is in the view.
        let some = self.op32("or", rows.skip, columns.skip);
        let mut whole = self.def(format_args!("icmp eq i32 {some}, 0"));
        for (range, extent) in [(rows, dims[0]), (columns, dims[1] * stage.size)] {
            let all = self.def(format_args!("icmp eq i32 {}, {extent}", range.end));
            whole = self.both(whole, all);
        }
        let (inside, edge, end) = (self.label(), self.label(), self.label());
        self.br_if(whole, inside, edge);
        self.place(inside);
        match turned {
            true => self.copy_turned(copy),
            false => self.copy_whole(copy),
        }
        self.br(end);
        self.place(edge);
        self.copy_edge(copy);
        self.br(end);
        self.place(end);
    }

    /// Copies a box that lies in its view: a thread has the same piece of every so many rows.
    fn copy_whole(&mut self, copy: Copy) {
        let Copy { stage, base, stride, to, index, threads, .. } = copy;
        let step = threads / stage.pieces;
        let row = self.op32("lshr", index, stage.pieces.trailing_zeros());
        let piece = self.op32("and", index, stage.pieces - 1);
        let byte = self.op32("mul", piece, PIECE);
        let first = self.row_address(base, stride, row);
        let wide = self.def(format_args!("zext i32 {byte} to i64"));
        let first = self.further(first, wide);
        // `step` is a multiple of eight, after which pieces lie as before.
        let place = self.address_in(Stage { slabs: 1, ..stage }, to, row, byte);
        let mut parts = Vec::new();
        for n in 0..stage.rows / step {
            let down = self.def(format_args!("mul i64 {stride}, {}", n * step));
            let from = self.further(first, down);
            parts.extend((0..stage.slabs).map(|slab| (from, n * step, slab)));
        }
        self.copy_parts(copy, place, &parts);
        let (done, left) = (stage.rows / step * step, stage.rows % step);
        if left > 0 {
            let some = self.def(format_args!("icmp ult i32 {row}, {left}"));
            self.only_if(some, &[], |writer| {
                let down = writer.def(format_args!("mul i64 {stride}, {done}"));
                let from = writer.further(first, down);
                let parts: Vec<_> = (0..stage.slabs).map(|slab| (from, done, slab)).collect();
                writer.copy_parts(copy, place, &parts);
                Vec::new()
            });
        }
    }

    /// Copies the thread's pieces of so many rows further down, and of slabs.
    fn copy_parts(&mut self, copy: Copy, place: Val, parts: &[(Val, u32, u32)]) {
        let Copy { stage, align, .. } = copy;
        for batch in parts.chunks(BATCH) {
            let mut loaded = Vec::new();
            for (from, _, slab) in batch {
                let from = self.further(*from, Val::Bits((slab * stage.pitch()).into()));
                loaded.push(self.def(format_args!("load {WORDS}, ptr addrspace(1) {from}, align {align}")));
            }
            for ((_, down, slab), piece) in batch.iter().zip(loaded) {
                let piece = self.rounded(copy.element, piece);
                let at = down * stage.pitch() + slab * stage.slab_bytes();
                let to = self.def(format_args!("getelementptr i8, ptr addrspace(3) {place}, i32 {at}"));
                self.line(format_args!("store {WORDS} {piece}, ptr addrspace(3) {to}, align {PIECE}"));
            }
        }
    }

    /// Copies a box that lies in its view so that its columns become rows: a thread takes a piece of each of some rows, and stores for
    /// each of its columns what it has of that.
    fn copy_turned(&mut self, copy: Copy) {
        let Copy { stage, align, base, stride, to, index, threads, .. } = copy;
        let [rows, columns] = copy.tile();
        let (size, in_row) = (stage.size, columns * stage.size / PIECE);
        // As many rows as make a piece, or fewer, so that all threads have some.
        let fewest = if size == 2 { 2 } else { 4 };
        let mut down = if size == 2 { 8 } else { 4 };
        while down > fewest && rows / down * in_row < threads {
            down /= 2;
        }
        let tasks = rows / down * in_row;
        let at_once = (WORDS_AT_ONCE / (4 * down)).max(1);
        for first in (0..tasks.div_ceil(threads)).step_by(at_once as usize) {
            let numbers: Vec<u32> =
                (first..tasks.div_ceil(threads)).take(at_once as usize).map(|n| n * threads).collect();
            let partly = numbers.last().is_some_and(|last| last + threads > tasks);
            let (whole, last) = numbers.split_at(numbers.len() - usize::from(partly));
            let task = |writer: &mut Self, further: &u32| {
                let number = writer.op32("add", index, *further);
                let above = writer.op32("udiv", number, in_row);
                let before = writer.op32("mul", above, in_row);
                let piece = writer.op32("sub", number, before);
                let row = writer.op32("mul", above, down);
                let at = writer.row_address(base, stride, row);
                let byte = writer.op32("mul", piece, PIECE);
                let wide = writer.def(format_args!("zext i32 {byte} to i64"));
                let mut at = writer.further(at, wide);
                let mut loaded = Vec::new();
                for n in 0..down {
                    if n > 0 {
                        at = writer.further(at, stride);
                    }
                    let piece =
                        writer.def(format_args!("load {WORDS}, ptr addrspace(1) {at}, align {align}"));
                    loaded.push(piece);
                }
                (piece, row, loaded)
            };
            let store = |writer: &mut Self, (piece, row, loaded): (Val, Val, Vec<Val>)| {
                let mut all = Vec::new();
                for piece in loaded {
                    let piece = writer.rounded(copy.element, piece);
                    all.push(writer.words_of(4, piece));
                }
                let byte = writer.op32("mul", row, size);
                let first = writer.op32("mul", piece, PIECE / size);
                for (n, column) in (0..).zip(writer.transposed(size, &all)) {
                    let row = writer.op32("add", first, n);
                    let at = writer.address_in(stage, to, row, byte);
                    let (ty, bytes) = (words(down * size / 4), down * size);
                    let column = writer.of_words(&column);
                    writer.line(format_args!("store {ty} {column}, ptr addrspace(3) {at}, align {bytes}"));
                }
            };
            let loaded: Vec<_> = whole.iter().map(|further| task(self, further)).collect();
            loaded.into_iter().for_each(|loaded| store(self, loaded));
            for further in last {
                let some = self.def(format_args!("icmp ult i32 {index}, {}", tasks - further));
                self.only_if(some, &[], |writer| {
                    let loaded = task(writer, further);
                    store(writer, loaded);
                    Vec::new()
                });
            }
        }
    }

    /// The words of columns, by the four words that there are of each of some rows.
    fn transposed(&mut self, size: u32, rows: &[Vec<Val>]) -> Vec<Vec<Val>> {
        // Bytes of the second word, then of the first, from the lowest on.
        const LOW: u32 = 0x0504_0100;
        const HIGH: u32 = 0x0706_0302;
        let mut permuted = |high: Val, low: Val, order: u32| {
            let args = [("i32", high), ("i32", low), ("i32", order.into())];
            self.call("i32", "llvm.amdgcn.perm", &args)
        };
        let mut columns = Vec::new();
        for word in 0..4 {
            let own: Vec<Val> = rows.iter().map(|row| row[word]).collect();
            match size {
                4 => columns.push(own),
                2 => {
                    for order in [LOW, HIGH] {
                        columns.push(own.chunks(2).map(|two| permuted(two[1], two[0], order)).collect());
                    }
                }
                _ => {
                    for between in [0x0501_0400, 0x0703_0602] {
                        let twos: Vec<Val> =
                            own.chunks(2).map(|two| permuted(two[1], two[0], between)).collect();
                        for order in [LOW, HIGH] {
                            columns.push(twos.chunks(2).map(|two| permuted(two[1], two[0], order)).collect());
                        }
                    }
                }
            }
        }
        columns
    }

    /// Copies a box that reaches out of its view, piece by piece: those that are whole at once, others by element.
    fn copy_edge(&mut self, copy: Copy) {
        let Copy { stage, element, align, base, stride, to, rows, columns, index, threads, .. } = copy;
        let [all_rows, all_columns] = copy.tile();
        let in_row = all_columns * stage.size / PIECE;
        let (head, body, end, from) = (self.label(), self.label(), self.label(), self.at);
        let (next, last) = (self.reserve(), self.label());
        self.br(head);
        self.place(head);
        let number = self.def(format_args!("phi i32 [ {index}, {from} ], [ {next}, {last} ]"));
        let more = self.def(format_args!("icmp ult i32 {number}, {}", all_rows * in_row));
        self.br_if(more, body, end);
        self.place(body);
        let row = self.op32("udiv", number, in_row);
        let before = self.op32("mul", row, in_row);
        let piece_number = self.op32("sub", number, before);
        let byte = self.op32("mul", piece_number, PIECE);
        let there = self.is_in(rows, row);
        let begins = self.is_in(columns, byte);
        let some = self.both(there, begins);
        let upto = self.op32("add", byte, PIECE);
        let ends = self.def(format_args!("icmp sle i32 {upto}, {}", columns.end));
        let at = self.row_address(base, stride, row);
        let wide = self.def(format_args!("zext i32 {byte} to i64"));
        let at = self.further(at, wide);
        let loaded = self.only_if(some, &[WORDS], |writer| {
            let (whole, partly, joined) = (writer.label(), writer.label(), writer.label());
            writer.br_if(ends, whole, partly);
            writer.place(whole);
            let all = writer.def(format_args!("load {WORDS}, ptr addrspace(1) {at}, align {align}"));
            writer.br(joined);
            writer.place(partly);
            let (ty, size) = (int(element), stage.size);
            let mut elements = Vec::new();
            for i in 0..PIECE / size {
                let own = writer.op32("add", byte, i * size);
                let inside = writer.def(format_args!("icmp slt i32 {own}, {}", columns.end));
                let loaded = writer.only_if(inside, &[ty], |writer| {
                    let at = writer.further(at, Val::Bits((i * size).into()));
                    vec![writer.def(format_args!("load {ty}, ptr addrspace(1) {at}, align {size}"))]
                });
                elements.push(loaded[0]);
            }
            let row = format!("<{} x {ty}>", PIECE / size);
            let some = writer.vector(&row, ty, &elements);
            let some = writer.def(format_args!("bitcast {row} {some} to {WORDS}"));
            let arm = writer.at;
            writer.br(joined);
            writer.place(joined);
            vec![writer.def(format_args!("phi {WORDS} [ {all}, {whole} ], [ {some}, {arm} ]"))]
        });
        let piece = self.rounded(element, loaded[0]);
        if copy.turned {
            let (ty, size) = (int(element), stage.size);
            let kept = Kept { element, ty: WORDS, width: PIECE / size, slabs: 1, blocks: 1 };
            let elements = self.unpacked(kept, piece);
            let byte = self.op32("mul", row, size);
            for (i, element) in (0..).zip(elements) {
                let column = self.op32("mul", piece_number, PIECE / size);
                let column = self.op32("add", column, i);
                let place = self.address_in(stage, to, column, byte);
                self.line(format_args!("store {ty} {element}, ptr addrspace(3) {place}, align {size}"));
            }
        } else {
            let place = self.address_in(stage, to, row, byte);
            self.line(format_args!("store {WORDS} {piece}, ptr addrspace(3) {place}, align {PIECE}"));
        }
        self.line(format_args!("{next} = add i32 {number}, {threads}"));
        self.br(last);
        self.place(last);
        self.br(head);
        self.place(end);
    }

    /// A piece as a channel has it: of tf32 rounded to the nearest, ties away from zero.
    fn rounded(&mut self, element: Scalar, piece: Val) -> Val {
        if element != Scalar::Tf32 {
            return piece;
        }
        let splat = |number: u32| format!("<{}>", vec![format!("i32 {number}"); 4].join(", "));
        let (exponent, up, kept) = (splat(0x7f80_0000), splat(1 << 12), splat(!0 << 13));
        let up = self.def(format_args!("add {WORDS} {piece}, {up}"));
        let near = self.def(format_args!("and {WORDS} {up}, {kept}"));
        let high = self.def(format_args!("and {WORDS} {piece}, {exponent}"));
        let finite = self.def(format_args!("icmp ne {WORDS} {high}, {exponent}"));
        self.def(format_args!("select <4 x i1> {finite}, {WORDS} {near}, {WORDS} {piece}"))
    }

    /// The address of what lies in a row of the stage at an offset, so many bytes to the right.
    pub(super) fn address_in(&mut self, stage: Stage, first: Val, row: Val, byte: Val) -> Val {
        let at = self.place_in(stage, row, byte);
        let at = self.op32("add", at, first);
        self.in_shared(at)
    }

    /// The offset in a stage of what lies in a row, so many bytes to the right.
    pub(super) fn place_in(&mut self, stage: Stage, row: Val, byte: Val) -> Val {
        let by = self.op32("lshr", row, stage.shift());
        let by = self.op32("and", by, stage.pieces - 1);
        let by = self.op32("mul", by, PIECE);
        let pitch = stage.pitch();
        let at = if stage.slabs > 1 {
            let slab = self.op32("lshr", byte, pitch.trailing_zeros());
            let low = self.op32("and", byte, pitch - 1);
            let low = self.op32("xor", low, by);
            let slab = self.op32("mul", slab, stage.slab_bytes());
            self.op32("add", slab, low)
        } else {
            self.op32("xor", byte, by)
        };
        let down = self.op32("mul", row, pitch);
        self.op32("add", down, at)
    }
}
