//! Boxes of views: what of them is there, and copies of it.

use super::{ALIGN, Array, Form, Stage};
use crate::backend::cpu::lanes::{clif, loose, own};
use crate::backend::cpu::writer::Writer;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{AtomicRmwOp, InstBuilder, Value as Ssa, types};
use vm_ir::Scalar;
use vm_ir::module::{Op, Place};
use vm_ir::op::{Opcode, Shape, Turn};
use vm_ir::tile::column_step;

/// Bytes from row to row up to which the panels of a right factor are taken where they are: rows that are farther apart would share the
/// same few sets of a cache.
const NEAR: u32 = 256;

/// A box of a view.
struct Window {
    /// Where the first element that is there is. Nothing may be read of a box that has none.
    first: Ssa,
    /// Bytes from row to row.
    stride: Ssa,
    /// From which to which row, and column, of the box it is there.
    rows: [Ssa; 2],
    columns: [Ssa; 2],
}

/// Rows of bytes in memory: the address of the first, and the bytes from row to row.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) at: Ssa,
    pub(super) stride: Ssa,
}

impl Writer<'_, '_> {
    /// The box of `rows` rows and `columns` columns that an op names; `aligned` is whether its column is rounded down to a
    /// multiple of 16 bytes.
    fn window(&mut self, op: &Op, place: Place, [rows, columns]: [u32; 2], aligned: bool) -> Option<Window> {
        let Place::View(number) = place else { return None };
        let view = self.views.get(usize::from(number))?.clone()?;
        let element = self.kernel.place(place)?.1;
        let mut indices = self.box_indices(op, view.extents.len());
        let mut column = indices.pop()?;
        if aligned {
            column = self.b.ins().band_imm_s(column, -i64::from(column_step(element)));
        }
        let row = indices.pop();
        let zero = self.long(0);
        // The matrix: its other indices must all be in bounds.
        let (mut first, mut inside) = (view.base, None);
        for (dimension, index) in indices.into_iter().enumerate() {
            let extent = self.extent_value(view.extents[dimension]);
            let within = self.b.ins().icmp(IntCC::UnsignedLessThan, index, extent);
            inside = Some(match inside {
                None => within,
                Some(inside) => self.b.ins().band(inside, within),
            });
            // What is not there is not guessed at either.
            let index = self.b.ins().select(within, index, zero);
            let by = self.b.ins().imul(index, view.strides[dimension]);
            first = self.b.ins().iadd(first, by);
        }
        // Where a box that begins at `index` is there, and the first index that is: all of it drawn in to where nothing
        // overflows first.
        let clip = |this: &mut Self, index: Ssa, extent: Ssa, size: u32| {
            let size = this.long(size);
            let before = this.b.ins().ineg(size);
            let index = this.b.ins().smax(index, before);
            let index = this.b.ins().smin(index, extent);
            let lack = this.b.ins().ineg(index);
            let from = this.b.ins().smax(lack, zero);
            let left = this.b.ins().isub(extent, index);
            let to = this.b.ins().smin(left, size);
            let start = this.b.ins().smax(index, zero);
            let [from, to] = [from, to].map(|end| match inside {
                None => end,
                Some(inside) => this.b.ins().select(inside, end, zero),
            });
            ([from, to], start)
        };
        let last = self.extent_value(*view.extents.last()?);
        let (columns, start) = clip(self, column, last, columns);
        let by = self.b.ins().imul_imm_s(start, i64::from(element.bytes()));
        first = self.b.ins().iadd(first, by);
        let (rows, stride) = match row {
            Some(row) => {
                let dimension = view.extents.len() - 2;
                let extent = self.extent_value(view.extents[dimension]);
                let (rows, start) = clip(self, row, extent, rows);
                let stride = view.strides[dimension];
                let by = self.b.ins().imul(start, stride);
                first = self.b.ins().iadd(first, by);
                (rows, stride)
            }
            None => {
                let one = self.long(1);
                ([zero, one], zero)
            }
        };
        Some(Window { first, stride, rows, columns })
    }

    /// Is all of a box there?
    fn is_whole(&mut self, window: &Window, [rows, columns]: [u32; 2]) -> Ssa {
        let mut lacks = Vec::new();
        for ([from, to], size) in [(window.rows, rows), (window.columns, columns)] {
            let size = self.long(size);
            lacks.push(from);
            lacks.push(self.b.ins().isub(size, to));
        }
        let lack = lacks.into_iter().reduce(|a, b| self.b.ins().bor(a, b));
        let lack = lack.unwrap_or(window.first);
        self.b.ins().icmp_imm_s(IntCC::Equal, lack, 0)
    }

    /// Zeroes bytes from an aligned address on, up to the next multiple of the alignment.
    pub(super) fn zero(&mut self, at: Ssa, bytes: u64) {
        let zero = self.b.ins().iconst(types::I32, 0);
        let zeros = self.b.ins().splat(types::I32X4, zero);
        let end = self.long(bytes.next_multiple_of(ALIGN) as i64);
        self.counted(end, ALIGN as i64, |this, by| {
            let to = this.b.ins().iadd(at, by);
            for offset in (0..ALIGN as i32).step_by(16) {
                this.b.ins().store(own(), zeros, to, offset);
            }
        });
    }

    /// Copies rows of `bytes` bytes, which are whole elements of `size` bytes.
    pub(super) fn copy_rows(&mut self, from: Rows, to: Rows, rows: Ssa, bytes: Ssa, size: u32) {
        let zero = self.long(0);
        let whole = self.b.ins().band_imm_s(bytes, -64);
        let vectors = self.b.ins().band_imm_s(bytes, -16);
        self.until(zero, rows, 1, |this, row| {
            let [from, to] = [from, to].map(|rows| {
                let by = this.b.ins().imul(row, rows.stride);
                this.b.ins().iadd(rows.at, by)
            });
            let copy = |this: &mut Self, at: Ssa, vectors: i32| {
                let [from, to] = [from, to].map(|begin| this.b.ins().iadd(begin, at));
                let all: Vec<Ssa> =
                    (0..vectors).map(|i| this.b.ins().load(types::I8X16, loose(), from, 16 * i)).collect();
                for (i, one) in all.into_iter().enumerate() {
                    this.b.ins().store(loose(), one, to, 16 * i as i32);
                }
            };
            this.until(zero, whole, 64, |this, at| copy(this, at, 4));
            this.until(whole, vectors, 16, |this, at| copy(this, at, 1));
            this.until(vectors, bytes, i64::from(size), |this, at| {
                let [from, to] = [from, to].map(|begin| this.b.ins().iadd(begin, at));
                let ty = types::Type::int(8 * size as u16).unwrap_or(types::I8);
                let one = this.b.ins().load(ty, own(), from, 0);
                this.b.ins().store(own(), one, to, 0);
            });
        });
    }

    /// What of a box is there, into rows of an array.
    fn copy_window(&mut self, window: &Window, to: Rows, size: u32) {
        let [(row, rows), (column, columns)] = [window.rows, window.columns].map(|[from, to]| {
            let count = self.b.ins().isub(to, from);
            (from, count)
        });
        let by = self.b.ins().imul(row, to.stride);
        let at = self.b.ins().iadd(to.at, by);
        let by = self.b.ins().imul_imm_s(column, i64::from(size));
        let at = self.b.ins().iadd(at, by);
        let bytes = self.b.ins().imul_imm_s(columns, i64::from(size));
        let from = Rows { at: window.first, stride: window.stride };
        self.copy_rows(from, Rows { at, ..to }, rows, bytes, size);
    }

    /// From the view where all of the box is there, else by way of an array with zeros around what is.
    pub(super) fn fetch(&mut self, op: &Op, view: Place) {
        let Some(stage) = op.others.first().and_then(|place| self.stage(*place)) else { return };
        let Some(window) = self.window(op, view, stage.dims, true) else { return };
        let [rows, columns] = stage.dims;
        let size = stage.element.bytes();
        let [whole, part, end, on] = [0; 4].map(|_| self.b.create_block());
        let [at, stride] = [0; 2].map(|_| self.b.append_block_param(end, types::I64));
        let is_whole = self.is_whole(&window, stage.dims);
        self.b.ins().brif(is_whole, whole, &[], part, &[]);
        self.b.seal_block(whole);
        self.b.seal_block(part);
        self.b.switch_to_block(whole);
        let there = [window.first.into(), window.stride.into()];
        match stage.told {
            // Rows that are as near to each other as in a copy, or nearly, are multiplied where they are.
            Some(told) => {
                let most = if stage.form == Form::Rows { 8 * columns } else { NEAR };
                let near =
                    self.b.ins().icmp_imm_u(IntCC::UnsignedLessThanOrEqual, window.stride, i64::from(most));
                let stays = self.b.create_block();
                self.b.ins().brif(near, stays, &[], end, &there);
                self.b.seal_block(stays);
                self.b.switch_to_block(stays);
                let across = self.long(4 * self.tiles.panel);
                self.tell(told, [window.first, window.stride, across]);
                self.b.ins().jump(on, &[]);
            }
            None => {
                self.b.ins().jump(end, &there);
            }
        }
        self.b.switch_to_block(part);
        let clipped = self.tile_address(self.tiles.clipped);
        self.zero(clipped, u64::from(rows) * u64::from(columns * size));
        let clipped = Rows { at: clipped, stride: self.long(columns * size) };
        self.copy_window(&window, clipped, size);
        self.b.ins().jump(end, &[clipped.at.into(), clipped.stride.into()]);
        self.b.seal_block(end);
        self.b.switch_to_block(end);
        self.stage_of(Rows { at, stride }, &stage);
        self.b.ins().jump(on, &[]);
        self.b.seal_block(on);
        self.b.switch_to_block(on);
    }

    /// Packs a stage.
    pub(super) fn stage_of(&mut self, from: Rows, stage: &Stage) {
        let to = self.tile_address(stage.at);
        self.pack(from, stage.element, stage.dims, stage.form, to);
        if let Some(told) = stage.told {
            let [down, across] = self.packed_steps(stage).map(|step| self.long(step));
            self.tell(told, [to, down, across]);
        }
    }

    /// Bytes from row to row of a packed stage, and from panel to panel.
    pub(super) fn packed_steps(&self, stage: &Stage) -> [u32; 2] {
        let (row, [rows, columns]) = (4 * self.tiles.panel, stage.dims);
        match stage.form {
            Form::Rows => [4 * columns, 0],
            Form::Panels => [row, row * rows],
            Form::Turned => [row, row * columns],
        }
    }

    fn tell(&mut self, told: u32, all: [Ssa; 3]) {
        let at = self.tile_address(told);
        for (i, one) in (0..).zip(all) {
            self.b.ins().store(own(), one, at, 8 * i);
        }
    }

    /// Where a stage's elements are, and the bytes from row to row and from panel to panel.
    pub(super) fn stage_place(&mut self, stage: &Stage) -> [Ssa; 3] {
        match stage.told {
            Some(told) => {
                let at = self.tile_address(told);
                [0, 8, 16].map(|offset| self.b.ins().load(types::I64, own(), at, offset))
            }
            None => {
                let at = self.tile_address(stage.at);
                let [down, across] = self.packed_steps(stage).map(|step| self.long(step));
                [at, down, across]
            }
        }
    }

    /// What a fragment holds, packed as a stage.
    pub(super) fn send(&mut self, op: &Op, place: Place) {
        let stage = op.others.first().and_then(|place| self.stage(*place));
        let (Some(array), Some(stage)) = (self.array(place), stage) else { return };
        let from = self.rows_of(&array);
        self.stage_of(from, &stage);
    }

    /// The block's share of the columns of a fragment.
    pub(super) fn share(&mut self, op: &Op, place: Place) {
        let from = op.others.first().and_then(|place| self.array(*place));
        let (Some(part), Some(sum)) = (self.array(place), from) else { return };
        let [to, mut from] = [&part, &sum].map(|array| self.rows_of(array));
        let size = part.element.bytes();
        if part.columns != sum.columns {
            let rank = self.b.ins().urem_imm_s(self.block[0], i64::from(self.kernel.cluster()));
            let rank = self.b.ins().uextend(types::I64, rank);
            let right = self.b.ins().imul_imm_s(rank, i64::from(part.columns * size));
            from.at = self.b.ins().iadd(from.at, right);
        }
        let (rows, bytes) = (self.long(part.rows), self.long(part.columns * size));
        self.copy_rows(from, to, rows, bytes, size);
    }

    fn rows_of(&mut self, array: &Array) -> Rows {
        Rows { at: self.tile_address(array.at), stride: self.long(array.stride()) }
    }

    /// A box into a fragment, with zeros around what is there.
    pub(super) fn get_box(&mut self, op: &Op, view: Place) {
        let Some(place) = op.others.first().copied() else { return };
        let (Some(array), Some(fragment)) = (self.array(place), self.kernel.fragment(place)) else { return };
        let dims = [array.rows, array.columns];
        let Some(window) = self.window(op, view, dims, !fragment.is_line()) else { return };
        let to = self.rows_of(&array);
        let is_whole = self.is_whole(&window, dims);
        let [part, on] = [0; 2].map(|_| self.b.create_block());
        self.b.ins().brif(is_whole, on, &[], part, &[]);
        self.b.seal_block(part);
        self.b.switch_to_block(part);
        self.zero(to.at, array.bytes());
        self.b.ins().jump(on, &[]);
        self.b.seal_block(on);
        self.b.switch_to_block(on);
        self.copy_window(&window, to, array.element.bytes());
    }

    /// The indices where a box of a view of this rank begins.
    fn box_indices(&mut self, op: &Op, rank: usize) -> Vec<Ssa> {
        let indices: Vec<Ssa> = op.operands.iter().take(rank).map(|v| self.first(*v)).collect();
        indices.into_iter().map(|index| self.wide(index)).collect()
    }

    /// A fragment into a box, or some of its rows. Nothing of a matrix that begins below zero.
    pub(super) fn put(&mut self, op: &Op, view: Place) {
        let Some(place) = op.others.first().copied() else { return };
        let (Some(array), Some(fragment)) = (self.array(place), self.kernel.fragment(place)) else { return };
        let (is_line, is_row) = (fragment.is_line(), fragment.is_row());
        let turned = op.attr() == Some(Turn::Transposed);
        let dims = if turned { [array.columns, array.rows] } else { [array.rows, array.columns] };
        let Some(mut window) = self.window(op, view, dims, !is_line) else { return };
        let zero = self.long(0);
        if let (Shape::PutRows, Some(count)) = (op.code.shape(), op.operands.last()) {
            let count = self.first(*count);
            let count = self.wide(count);
            match (is_row, array.is_column) {
                (true, _) => {
                    let some = self.b.ins().icmp_imm_s(IntCC::SignedGreaterThan, count, 0);
                    window.rows[1] = self.b.ins().select(some, window.rows[1], window.rows[0]);
                }
                (_, true) => window.columns[1] = self.drawn_in(window.columns, count),
                _ => window.rows[1] = self.drawn_in(window.rows, count),
            }
        }
        let [(row, mut rows), (column, columns)] = [window.rows, window.columns].map(|[from, to]| {
            let count = self.b.ins().isub(to, from);
            (from, count)
        });
        if !is_line {
            let rank = self.kernel.place(view).map_or(0, |(rank, _)| rank);
            let indices = self.box_indices(op, rank);
            let signs = indices.into_iter().reduce(|a, b| self.b.ins().bor(a, b)).unwrap_or(rows);
            let begins = self.b.ins().icmp_imm_s(IntCC::SignedGreaterThanOrEqual, signs, 0);
            rows = self.b.ins().select(begins, rows, zero);
        }
        let size = array.element.bytes();
        let from = self.rows_of(&array);
        if turned {
            let corner = [column, row];
            return self.put_turned(op, from, corner, &window, [rows, columns], array.element);
        }
        let by = self.b.ins().imul(row, from.stride);
        let at = self.b.ins().iadd(from.at, by);
        let by = self.b.ins().imul_imm_s(column, i64::from(size));
        let at = self.b.ins().iadd(at, by);
        let bytes = self.b.ins().imul_imm_s(columns, i64::from(size));
        let (from, to) = (Rows { at, ..from }, Rows { at: window.first, stride: window.stride });
        match op.code == Opcode::PutAdd {
            true => self.add_rows(from, to, rows, bytes, array.element),
            false => self.copy_rows(from, to, rows, bytes, size),
        }
    }

    /// What begins at `corner` of an array, into as many rows and columns of a window, transposed.
    fn put_turned(
        &mut self,
        op: &Op,
        from: Rows,
        corner: [Ssa; 2],
        window: &Window,
        [rows, columns]: [Ssa; 2],
        element: Scalar,
    ) {
        let (zero, size) = (self.long(0), i64::from(element.bytes()));
        let [first_row, first_column] = corner;
        let (to, stride) = (window.first, window.stride);
        self.until(zero, rows, 1, |this, row| {
            let by = this.b.ins().imul(row, stride);
            let to = this.b.ins().iadd(to, by);
            let right = this.b.ins().iadd(first_column, row);
            let right = this.b.ins().imul_imm_s(right, size);
            let from_column = this.b.ins().iadd(from.at, right);
            this.until(zero, columns, 1, |this, column| {
                let down = this.b.ins().iadd(first_row, column);
                let down = this.b.ins().imul(down, from.stride);
                let from = this.b.ins().iadd(from_column, down);
                let by = this.b.ins().imul_imm_s(column, size);
                let to = this.b.ins().iadd(to, by);
                let one = this.b.ins().load(clif(element), own(), from, 0);
                match op.code == Opcode::PutAdd {
                    true => this.add_one(element, to, one),
                    false => {
                        this.b.ins().store(own(), one, to, 0);
                    }
                }
            });
        });
    }

    /// Adds a number to one in memory, atomically.
    fn add_one(&mut self, element: Scalar, to: Ssa, one: Ssa) {
        match element.is_float() {
            true => self.atomic_sum(element, to, one),
            false => self.b.ins().atomic_rmw(types::I32, own(), AtomicRmwOp::Add, to, one),
        };
    }

    /// The end of a range that ends at `most` at the latest, and not before it begins.
    fn drawn_in(&mut self, [from, to]: [Ssa; 2], most: Ssa) -> Ssa {
        let to = self.b.ins().smin(to, most);
        self.b.ins().smax(to, from)
    }

    /// Adds rows to others, each element atomically.
    fn add_rows(&mut self, from: Rows, to: Rows, rows: Ssa, bytes: Ssa, element: Scalar) {
        let zero = self.long(0);
        self.until(zero, rows, 1, |this, row| {
            let [from, to] = [from, to].map(|rows| {
                let by = this.b.ins().imul(row, rows.stride);
                this.b.ins().iadd(rows.at, by)
            });
            this.until(zero, bytes, i64::from(element.bytes()), |this, at| {
                let [from, to] = [from, to].map(|begin| this.b.ins().iadd(begin, at));
                let one = this.b.ins().load(clif(element), own(), from, 0);
                this.add_one(element, to, one);
            });
        });
    }
}
