//! What goes between fragments and views by way of registers: boxes that are loaded, columns and rows that are stored.

use super::fragment::{Cell, elements};
use super::layout::{self, SLAB};
use crate::backend::ptx::asm::{Arg, Class, Label, Reg, def, ins, when};
use crate::backend::ptx::writer::{Writer, class_of, memory_type};
use vm_ir::module::{Op, Place};
use vm_ir::op::{Opcode, Turn};
use vm_ir::tile::Fragment;

/// More than any index in a view, and far from an overflow when a fragment's extent is added.
const FAR: i64 = 1 << 41;
const _: () = assert!(vm_ir::limits::MAX_EXTENT < FAR as u64);

/// The part of a view that a box lies in, as far as it is the same for all its rows.
struct Start {
    /// The address of the matrix, or of the row.
    base: Reg,
    /// Are the indices of all dimensions before in bounds?
    inside: Option<Reg>,
}

impl<'k> Writer<'k> {
    /// Where a box begins, behind the indices of all dimensions but the last `own`.
    fn start(&mut self, indices: &[vm_ir::Value], view: Place, own: usize) -> Start {
        let Some(view) = self.view(view).cloned() else { return Start { base: Reg::NONE, inside: None } };
        let (mut base, mut inside) = (view.base, None);
        for (i, index) in indices.iter().enumerate().take(indices.len().saturating_sub(own)) {
            let index = self.wide(*index);
            inside = Some(self.within(index, view.extents[i].into(), inside));
            base = def!(self, B64, "mad.lo.s64", index, view.strides[i], base);
        }
        Start { base, inside }
    }

    /// An index as a number to which a fragment's extent can be added.
    fn near(&mut self, index: vm_ir::Value) -> Reg {
        let wide = self.wide(index);
        let least = def!(self, B64, "max.s64", wide, -FAR);
        def!(self, B64, "min.s64", least, FAR)
    }

    /// How far an extent is from an index, in a number of 32 bits that is right as far as a fragment reaches.
    fn room(&mut self, extent: Arg, index: Reg) -> Reg {
        let room = self.asm.new_reg(Class::B64);
        match extent {
            Arg::Int(extent) => {
                let extent = def!(self, B64, "mov.b64", extent);
                ins!(self, "sub.s64", room, extent, index);
            }
            extent => ins!(self, "sub.s64", room, extent, index),
        }
        def!(self, B32, "cvt.sat.s32.s64", room)
    }

    /// Are the columns from `first` on, `offset` behind where a box begins, in bounds: not before `before`, and before `room`?
    fn in_row(&mut self, before: Reg, room: Reg, offset: i64, with: Option<Reg>) -> Reg {
        let behind = match with {
            Some(with) => def!(self, Pred, "setp.gt.and.s32", room, offset, with),
            None => def!(self, Pred, "setp.gt.s32", room, offset),
        };
        def!(self, Pred, "setp.le.and.s32", before, offset, behind)
    }

    /// Does for each element that a thread has of a fragment what is given its number, its address and whether it is in bounds.
    fn each_element(
        &mut self,
        op: &'k Op,
        view: Place,
        fragment: &Fragment,
        mut act: impl FnMut(&mut Self, usize, Arg<'static>, Reg),
    ) {
        let Some(tiles) = &self.tiles else { return };
        let (groups, group, row, thread) = (tiles.tile.groups, tiles.group, tiles.row, tiles.thread);
        let Some(extents) = self.view(view).map(|view| view.extents.clone()) else { return };
        let (indices, count) = op.operands.split_at(extents.len().min(op.operands.len()));
        let (Some(last), size) = (indices.len().checked_sub(1), fragment.element.bytes()) else { return };
        let own_dimensions = if fragment.is_line() { 1 } else { 2 };
        let Start { base, inside } = self.start(indices, view, own_dimensions);
        let own = def!(self, B32, "sub.u32", group, 1);
        let top = def!(self, B32, "mad.lo.u32", own, i64::from(fragment.rows / groups), row);
        let top = def!(self, B64, "cvt.u64.u32", top);
        let pair = def!(self, B32, "and.b32", thread, 3);
        let left = def!(self, B32, "shl.b32", pair, 1);
        let left = def!(self, B64, "cvt.u64.u32", left);
        let turned = op.attr() == Some(Turn::Transposed);
        // The thread's first along the last dimension, and along the one before.
        let (along, down) = if fragment.columns.is_none() || turned { (top, left) } else { (left, top) };
        let mut begin = self.near(indices[last]);
        // Copies are of columns at multiples of 16 bytes.
        if !fragment.is_line() {
            let step = vm_ir::tile::column_step(fragment.element);
            begin = def!(self, B64, "and.b64", begin, -i64::from(step));
        }
        let first = def!(self, B64, "add.s64", begin, along);
        let room = self.room(extents[last].into(), first);
        let before = def!(self, B64, "neg.s64", first);
        let before = def!(self, B32, "cvt.sat.s32.s64", before);
        // How many rows there are behind the thread's first one.
        let rows = count.first().map(|count| {
            let count = self.near(*count);
            let behind = def!(self, B64, "sub.s64", count, top);
            def!(self, B32, "cvt.sat.s32.s64", behind)
        });
        let counted = |writer: &mut Self, down: i64, inside: Option<Reg>| match (rows, inside) {
            (None, inside) => inside,
            (Some(rows), None) => Some(def!(writer, Pred, "setp.gt.s32", rows, down)),
            (Some(rows), Some(inside)) => Some(def!(writer, Pred, "setp.gt.and.s32", rows, down, inside)),
        };
        let count = elements(fragment, groups) as usize;
        if fragment.is_line() {
            let base = def!(self, B64, "mad.lo.s64", first, i64::from(size), base);
            for at in 0..count {
                let cell = Cell::of(fragment, groups, at);
                let offset = match fragment.columns {
                    None => i64::from(cell.slab * SLAB + 8 * cell.half),
                    Some(_) => i64::from(8 * cell.eight) + (at % 2) as i64,
                };
                let inside = counted(self, if fragment.is_row() { 0 } else { offset }, inside);
                let inside = self.in_row(before, room, offset, inside);
                act(self, at, Arg::At(base, offset * i64::from(size)), inside);
            }
            return;
        }
        let stride = self.view(view).and_then(|view| view.strides.last().copied()).unwrap_or(Reg::NONE);
        let begin = self.near(indices[last - 1]);
        let top_in_view = def!(self, B64, "add.s64", begin, down);
        let base = def!(self, B64, "mad.lo.s64", first, i64::from(size), base);
        let mut of_row = None;
        let mut order: Vec<usize> = (0..count).collect();
        // Row by row.
        let place_of = |at: usize| {
            let cell = Cell::of(fragment, groups, at);
            let place = [cell.slab * SLAB + 8 * cell.half, 8 * cell.eight + at as u32 % 2];
            if turned { [place[1], place[0]] } else { place }
        };
        let row_of = |at: &usize| place_of(*at)[0];
        order.sort_by_key(row_of);
        for at in order {
            let down = row_of(&at);
            let (base, inside) = match of_row {
                Some((row, base, inside)) if row == down => (base, inside),
                _ => {
                    let row = def!(self, B64, "add.s64", top_in_view, i64::from(down));
                    let inside = counted(self, i64::from(down), inside);
                    let inside = self.within(row, extents[last - 1].into(), inside);
                    let base = def!(self, B64, "mad.lo.s64", row, stride, base);
                    of_row = Some((down, base, inside));
                    (base, inside)
                }
            };
            let offset = i64::from(place_of(at)[1]);
            let inside = self.in_row(before, room, offset, Some(inside));
            act(self, at, Arg::At(base, offset * i64::from(size)), inside);
        }
    }

    /// A box of a view into a fragment.
    pub(super) fn get_tile(&mut self, op: &'k Op, view: Place) {
        let kernel = self.kernel;
        let (Place::View(parameter), Some(place)) = (view, op.others.first().copied()) else { return };
        let (Some(fragment), Some(tiles)) = (kernel.fragment(place), &self.tiles) else { return };
        let leads = tiles.leads;
        let regs = self.fragment_regs(place);
        if kernel.view(parameter).is_some_and(|view| view.access.writes()) {
            // What was put before is in memory, and seen by all.
            when!(self, leads, true, "cp.async.bulk.wait_group", 0);
            when!(self, leads, true, "fence.proxy.async.global");
            self.compute_barrier();
        }
        if layout::is_copied(op, fragment) {
            return self.get_box(op, view);
        }
        let done = self.asm.new_label();
        if fragment.is_row() && fragment.element.bytes() == 4 {
            self.get_whole_row(op, view, fragment, &regs, done);
        }
        let load = format!("ld.global.{}", memory_type(fragment.element));
        let mut low = None;
        self.each_element(op, view, fragment, |writer, at, from, inside| {
            let name = ["mov.pred", "mov.b16", "mov.b32", "mov.b64"];
            let class = class_of(fragment.element);
            let to = if class == Class::B16 { writer.asm.new_reg(class) } else { regs[at] };
            ins!(writer, name[class as usize], to, 0);
            when!(writer, inside, true, &load, to, from);
            match (class, low.take()) {
                (Class::B16, Some(low)) => ins!(writer, "mov.b32", regs[at / 2], Arg::List(&[low, to])),
                (Class::B16, None) => low = Some(to),
                _ => {}
            }
        });
        self.asm.place(done);
    }

    /// Loads a row of which all is in bounds two by two, if that is so and it begins at a multiple of eight bytes, and goes on
    /// at `done`.
    fn get_whole_row(&mut self, op: &Op, view: Place, fragment: &Fragment, regs: &[Reg], done: Label) {
        let Some(extents) = self.view(view).map(|view| view.extents.clone()) else { return };
        let (Some(last), Some(thread)) =
            (op.operands.len().checked_sub(1), self.tiles.as_ref().map(|tiles| tiles.thread))
        else {
            return;
        };
        let below = self.asm.new_label();
        let Start { base, inside } = self.start(&op.operands, view, 1);
        let begin = self.near(op.operands[last]);
        let room = self.room(extents[last].into(), begin);
        let mut whole = def!(self, Pred, "setp.ge.s64", begin, 0);
        if let Some(inside) = inside {
            whole = def!(self, Pred, "and.pred", whole, inside);
        }
        let whole =
            def!(self, Pred, "setp.ge.and.s32", room, i64::from(fragment.columns.unwrap_or(0)), whole);
        let first = def!(self, B64, "mad.lo.s64", begin, 4, base);
        let odd = def!(self, B64, "and.b64", first, 7);
        let whole = def!(self, Pred, "setp.eq.and.s64", odd, 0, whole);
        when!(self, whole, false, "bra", Arg::Label(below));
        let pair = def!(self, B32, "and.b32", thread, 3);
        let own = def!(self, B64, "mad.wide.u32", pair, 8, first);
        for (number, two) in regs.chunks_exact(2).enumerate() {
            ins!(self, "ld.global.v2.b32", Arg::List(two), Arg::At(own, 32 * number as i64));
        }
        ins!(self, "bra", Arg::Label(done));
        self.asm.place(below);
    }

    /// A fragment into a view: as a copy of shared memory where that is possible, else by the threads that have it.
    pub(super) fn put_tile(&mut self, op: &'k Op, view: Place) {
        let Some(fragment) = op.others.first().and_then(|place| self.kernel.fragment(*place)) else { return };
        match layout::is_copied(op, fragment) {
            true => self.put_box(op, view),
            false => self.put_elements(op, fragment, view),
        }
    }

    /// A fragment into a view, element by element: of the threads that have the same, one stores it.
    fn put_elements(&mut self, op: &'k Op, fragment: &'k Fragment, view: Place) {
        let Some(place) = op.others.first().copied() else { return };
        let Some(tiles) = &self.tiles else { return };
        let (group, thread, leads) = (tiles.group, tiles.thread, tiles.leads);
        let regs = self.fragment_regs(place);
        when!(self, leads, true, "cp.async.bulk.wait_group", 0);
        self.compute_barrier();
        let stores = match fragment.columns {
            None => {
                let pair = def!(self, B32, "and.b32", thread, 3);
                def!(self, Pred, "setp.eq.u32", pair, 0)
            }
            Some(_) if fragment.is_row() => {
                let first = def!(self, Pred, "setp.eq.u32", group, 1);
                def!(self, Pred, "setp.lt.and.u32", thread, 4, first)
            }
            // As a copy: nothing of what begins at a negative index.
            Some(_) => {
                let dimensions = self.view(view).map_or(0, |view| view.extents.len());
                self.begins_inside(&op.operands[..dimensions.min(op.operands.len())])
            }
        };
        let ty = memory_type(fragment.element);
        let sum = if fragment.element == vm_ir::Scalar::F32 { "f32" } else { "u32" };
        let name = match op.code {
            Opcode::PutAdd => format!("red.relaxed.gpu.global.add.{sum}"),
            _ => format!("st.global.{ty}"),
        };
        self.each_element(op, view, fragment, |writer, at, to, inside| {
            let value = match class_of(fragment.element) {
                Class::B16 => writer.two(&regs, fragment.element, at & !1)[at % 2],
                _ => regs[at],
            };
            let stores = def!(writer, Pred, "and.pred", inside, stores);
            when!(writer, stores, true, &name, to, value);
        });
        // The next store may be another thread's, or the accelerator's.
        ins!(self, "fence.proxy.async.global");
        self.compute_barrier();
    }
}
