//! Fragments to and from memory: boxes of views, element by element where they reach out of those, and stages.

use super::super::channel_number;
use super::super::fragment::{Cell, Spread, elements};
use super::boxes::{Box2, FAR, Range};
use crate::backend::place::{Access, corner_and_rows};
use crate::backend::ptx::asm::{Arg, Class, Reg, def, ins, when};
use crate::backend::ptx::writer::{Writer, class_of};
use vm_ir::Scalar;
use vm_ir::module::{Op, Place};
use vm_ir::op::Turn;
use vm_ir::tile::Fragment;

/// A range of a box as a thread sees it, counted from the thread's first row or column: what lies in the view ends at `end`, and does
/// not begin before `begin` where that is not surely below all.
#[derive(Clone, Copy)]
struct Own {
    begin: Option<Reg>,
    end: Reg,
}

/// What a thread has of a fragment, two elements that lie side by side at a time, or one of a column: its number, and where it lies.
fn cells(fragment: &Fragment, spread: Spread) -> Vec<(usize, Cell)> {
    let width = if fragment.columns.is_some() { 2 } else { 1 };
    let all = (0..elements(fragment, spread) as usize).step_by(width);
    all.map(|at| (at, Cell::of(fragment, spread, at))).collect()
}

impl<'k> Writer<'k> {
    /// The elements of a cell; of a column one, twice.
    fn elements_of(&mut self, fragment: &Fragment, regs: &[Reg], at: usize) -> [Reg; 2] {
        match fragment.columns {
            Some(_) => self.two(regs, fragment.element, at),
            None => [self.one(regs, fragment.element, at); 2],
        }
    }

    /// Sets the elements of a cell.
    fn set_elements(&mut self, fragment: &Fragment, regs: &[Reg], at: usize, new: [Reg; 2]) {
        match (class_of(fragment.element), fragment.columns) {
            (Class::B16, Some(_)) => ins!(self, "mov.b32", regs[at / 2], Arg::List(&new)),
            (Class::B16, None) => ins!(self, "mov.b32", regs[at], Arg::List(&new)),
            (_, Some(_)) => new.into_iter().zip(&regs[at..]).for_each(|(from, to)| self.mov(*to, from)),
            (_, None) => self.mov(regs[at], new[0]),
        }
    }

    /// `get` and `put`.
    pub(super) fn transfer(&mut self, op: &'k Op, view: Place) {
        let kernel = self.kernel;
        let (Place::View(number), Some(&[place])) = (view, op.others.first_chunk::<1>()) else { return };
        let (Some(fragment), Some(view)) = (kernel.fragment(place), kernel.view(number)) else { return };
        let access = Access::of(op);
        // Threads see what others of the block have stored, and store behind them.
        if access != Access::Load || view.access.writes() {
            self.sync_barrier();
        }
        let regs = self.fragment_regs(place);
        let line = fragment.is_line();
        let stored = !line && access != Access::Load;
        let (indices, count) = corner_and_rows(op);
        let Some(mut of_view) = self.clipped(op, indices, !line, line) else { return };
        if let Some(count) = count {
            self.keep_rows(&mut of_view, fragment, count);
        }
        if stored {
            // Nothing is stored of a box that begins below zero.
            let inside = self.begins_inside(indices);
            of_view.columns.end = def!(self, B32, "selp.b32", of_view.columns.end, 0, inside);
        }
        if line {
            return self.transfer_line(access, fragment, &regs, of_view);
        }
        if op.attr() == Some(Turn::Transposed) {
            return self.transfer_turned(access, fragment, &regs, of_view);
        }
        let (Some(rows), Some(stride)) = (of_view.rows, of_view.stride) else { return };
        let [top, left] = self.corner(fragment);
        let size = fragment.element.bytes();
        let columns = fragment.columns.unwrap_or(0);
        let own_rows = self.own(rows, fragment.rows, top, stored);
        let own_columns = self.own(of_view.columns, columns, left, stored);
        let right = def!(self, B64, "mul.wide.u32", left, i64::from(size));
        let start = def!(self, B64, "add.s64", of_view.base, right);
        let Some(spread) = self.tiles.as_ref().map(|tiles| tiles.spread) else { return };
        // Row by row.
        let mut cells: Vec<(u32, Vec<(usize, Cell)>)> = Vec::new();
        for (number, cell) in self::cells(fragment, spread) {
            let down = cell.slab * spread.slab + 8 * cell.half;
            match cells.iter_mut().find(|(other, _)| *other == down) {
                Some((_, cells)) => cells.push((number, cell)),
                None => cells.push((down, vec![(number, cell)])),
            }
        }
        let end = self.asm.new_label();
        // Pairs are copied at once where all of the box is in the view, and they are aligned.
        let even = spread.rows(fragment.rows) * spread.down == fragment.rows
            && spread.columns(columns) * spread.across == columns;
        let packs = size == 4 || class_of(fragment.element) == Class::B16;
        if access != Access::Add && even && packs && view.align >= 2 * size {
            let edge = self.asm.new_label();
            let below = def!(self, B32, "or.b32", rows.skip, of_view.columns.skip);
            let inside = def!(self, Pred, "setp.eq.u32", below, 0);
            let high = def!(self, Pred, "setp.ge.and.u32", rows.end, i64::from(fragment.rows), inside);
            let whole = def!(self, Pred, "setp.ge.and.u32", of_view.columns.end, i64::from(columns), high);
            when!(self, whole, false, "bra", Arg::Label(edge));
            for (down, cells) in &cells {
                let at = self.row_address(start, stride, top, *down);
                for (number, cell) in cells {
                    let to = Arg::At(at, i64::from(8 * cell.eight * size));
                    let own = if size == 2 { &regs[*number / 2..][..1] } else { &regs[*number..][..2] };
                    match (access, own) {
                        (Access::Load, [one]) => ins!(self, "ld.global.b32", *one, to),
                        (Access::Load, two) => ins!(self, "ld.global.v2.b32", Arg::List(two), to),
                        (_, [one]) => ins!(self, "st.global.b32", to, *one),
                        (_, two) => ins!(self, "st.global.v2.b32", to, Arg::List(two)),
                    }
                }
            }
            ins!(self, "bra", Arg::Label(end));
            self.asm.place(edge);
        }
        for (down, cells) in &cells {
            let at = self.row_address(start, stride, top, *down);
            let there = self.inside(own_rows, *down, None);
            for (number, cell) in cells {
                let mut elements = match access {
                    Access::Load => [Reg::NONE; 2],
                    _ => self.elements_of(fragment, &regs, *number),
                };
                for (i, element) in elements.iter_mut().enumerate() {
                    let further = 8 * cell.eight + i as u32;
                    let there = self.inside(own_columns, further, Some(there));
                    let at = Arg::At(at, i64::from(further * size));
                    self.access_element(access, fragment.element, element, at, there);
                }
                if access == Access::Load {
                    self.set_elements(fragment, &regs, *number, elements);
                }
            }
        }
        self.asm.place(end);
    }

    /// A matrix, stored transposed.
    fn transfer_turned(&mut self, access: Access, fragment: &Fragment, regs: &[Reg], of_view: Box2) {
        let (Some(rows), Some(stride)) = (of_view.rows, of_view.stride) else { return };
        let Some(spread) = self.tiles.as_ref().map(|tiles| tiles.spread) else { return };
        let [top, left] = self.corner(fragment);
        let size = fragment.element.bytes();
        let own_rows = self.own(rows, fragment.columns.unwrap_or(0), left, true);
        let own_columns = self.own(of_view.columns, fragment.rows, top, true);
        let right = def!(self, B64, "mul.wide.u32", top, i64::from(size));
        let start = def!(self, B64, "add.s64", of_view.base, right);
        let mut row: Option<(u32, Reg, Reg)> = None;
        let mut cells = cells(fragment, spread);
        cells.sort_by_key(|(_, cell)| cell.eight);
        for i in 0..2u32 {
            for (number, cell) in &cells {
                let down = 8 * cell.eight + i;
                let (at, there) = match row {
                    Some((other, at, there)) if other == down => (at, there),
                    _ => {
                        let at = self.row_address(start, stride, left, down);
                        let there = self.inside(own_rows, down, None);
                        row = Some((down, at, there));
                        (at, there)
                    }
                };
                let mut element = self.elements_of(fragment, regs, *number)[i as usize];
                let further = cell.slab * spread.slab + 8 * cell.half;
                let there = self.inside(own_columns, further, Some(there));
                let at = Arg::At(at, i64::from(further * size));
                self.access_element(access, fragment.element, &mut element, at, there);
            }
        }
    }

    /// Leaves out the rows of a box from number `count` on.
    fn keep_rows(&mut self, of_view: &mut Box2, fragment: &Fragment, count: vm_ir::Value) {
        let wide = self.wide(count);
        let kept = def!(self, B64, "max.s64", wide, 0);
        let kept = def!(self, B64, "min.s64", kept, FAR);
        let kept = def!(self, B32, "cvt.u32.u64", kept);
        let (some, columns) = (def!(self, Pred, "setp.gt.u32", kept, 0), &mut of_view.columns);
        match (&mut of_view.rows, fragment.columns) {
            (Some(rows), _) => rows.end = def!(self, B32, "min.u32", rows.end, kept),
            (None, None) => columns.end = def!(self, B32, "min.u32", columns.end, kept),
            (None, Some(_)) => columns.end = def!(self, B32, "selp.b32", columns.end, 0, some),
        }
    }

    /// The address of a thread's first element in a row.
    fn row_address(&mut self, start: Reg, stride: Reg, top: Reg, down: u32) -> Reg {
        let row = def!(self, B32, "add.u32", top, i64::from(down));
        let row = def!(self, B64, "cvt.u64.u32", row);
        def!(self, B64, "mad.lo.s64", row, stride, start)
    }

    /// A range as a thread sees it whose first is `first`, of a fragment of `extent`. `surely`: the box does not begin below zero.
    fn own(&mut self, range: Range, extent: u32, first: Reg, surely: bool) -> Own {
        let end = def!(self, B32, "min.u32", range.end, i64::from(extent));
        let begin = (!surely).then(|| def!(self, B32, "sub.s32", range.skip, first));
        Own { begin, end: def!(self, B32, "sub.s32", end, first) }
    }

    /// Is what lies so much further than the thread's first in the view, and what else holds?
    fn inside(&mut self, own: Own, further: u32, with: Option<Reg>) -> Reg {
        let further = i64::from(further);
        let before = match with {
            Some(with) => def!(self, Pred, "setp.gt.and.s32", own.end, further, with),
            None => def!(self, Pred, "setp.gt.s32", own.end, further),
        };
        match own.begin {
            Some(begin) => def!(self, Pred, "setp.le.and.s32", begin, further, before),
            None => before,
        }
    }

    /// A column or a row, along the last dimension. Of those who have an element, one stores it.
    fn transfer_line(&mut self, access: Access, fragment: &Fragment, regs: &[Reg], of_view: Box2) {
        let Some(tiles) = &self.tiles else { return };
        let (spread, part, part_across) = (tiles.spread, tiles.part, tiles.part_across);
        let Some((quad, in_quad)) = tiles.sync.as_ref().map(|sync| (sync.quad, sync.in_quad)) else { return };
        let [top, left] = self.corner(fragment);
        let (first, others) = match fragment.is_row() {
            true => (left, vec![part, quad]),
            false => (top, [Some(in_quad), part_across].into_iter().flatten().collect()),
        };
        let mut own = self.own(of_view.columns, fragment.len() as u32, first, false);
        if access != Access::Load {
            let mut any = others[0];
            for other in &others[1..] {
                any = def!(self, B32, "or.b32", any, *other);
            }
            let one = def!(self, Pred, "setp.eq.u32", any, 0);
            own.end = def!(self, B32, "selp.b32", own.end, i64::from(i32::MIN), one);
        }
        let size = fragment.element.bytes();
        let right = def!(self, B64, "mul.wide.u32", first, i64::from(size));
        let start = def!(self, B64, "add.s64", of_view.base, right);
        for (number, cell) in cells(fragment, spread) {
            let further = match fragment.is_row() {
                true => 8 * cell.eight,
                false => cell.slab * spread.slab + 8 * cell.half,
            };
            let mut elements = match access {
                Access::Load => [Reg::NONE; 2],
                _ => self.elements_of(fragment, regs, number),
            };
            let count = if fragment.is_row() { 2 } else { 1 };
            for (i, element) in elements.iter_mut().enumerate().take(count) {
                let further = further + i as u32;
                let there = self.inside(own, further, None);
                let at = Arg::At(start, i64::from(further * size));
                self.access_element(access, fragment.element, element, at, there);
            }
            if access == Access::Load {
                let elements = if count == 1 { [elements[0]; 2] } else { elements };
                self.set_elements(fragment, regs, number, elements);
            }
        }
    }

    /// An element in memory, if it is there.
    fn access_element(&mut self, access: Access, ty: Scalar, element: &mut Reg, at: Arg<'_>, there: Reg) {
        let width = match ty.bytes() {
            1 => "u8",
            2 => "b16",
            _ => "b32",
        };
        let width = if ty == Scalar::I16 { "u16" } else { width };
        let name = match access {
            Access::Load => {
                *element = match class_of(ty) {
                    Class::B16 => def!(self, B16, "mov.b16", 0),
                    _ => def!(self, B32, "mov.b32", 0),
                };
                let name = format!("ld.global.{width}");
                when!(self, there, true, &*name, *element, at);
                return;
            }
            Access::Store => format!("st.global.{width}"),
            Access::Add if ty == Scalar::F32 => "red.relaxed.gpu.global.add.f32".to_owned(),
            Access::Add => "red.relaxed.gpu.global.add.u32".to_owned(),
        };
        when!(self, there, true, &*name, at, *element);
    }

    /// A fragment into the next stage of a channel.
    pub(super) fn send_sync(&mut self, op: &'k Op, place: Place) {
        let kernel = self.kernel;
        let Some(&[to]) = op.others.first_chunk::<1>() else { return };
        let (Some(fragment), Some(channel)) = (kernel.fragment(place), kernel.channel(to)) else { return };
        let Some(channel_at) = channel_number(to) else { return };
        let regs = self.fragment_regs(place);
        let Some(tiles) = &self.tiles else { return };
        let (spread, ring, base) = (tiles.spread, tiles.rings[channel_at], tiles.base);
        let Some(sync) = &tiles.sync else { return };
        let ((first, stage), index, threads) = (sync.layout.stages[channel_at], sync.index, sync.computing);
        let to = def!(self, B32, "mad.lo.u32", ring.next, i64::from(stage.bytes()), base);
        ins!(self, "add.u32", ring.newest, to, i64::from(first));
        // What it held before has been read.
        self.sync_barrier();
        let columns = fragment.columns.unwrap_or(0);
        let even = fragment.rows == stage.rows && columns == stage.columns();
        if !even {
            let none = def!(self, B32, "mov.b32", 0);
            let at = def!(self, B32, "mad.lo.u32", index, 16, ring.newest);
            for n in 0..stage.bytes().div_ceil(16 * threads) {
                let left = i64::from(stage.bytes() / 16 - n * threads);
                let there = def!(self, Pred, "setp.lt.u32", index, left);
                let to = Arg::At(at, i64::from(n * threads * 16));
                when!(self, there, true, "st.shared.v4.b32", to, Arg::List(&[none; 4]));
            }
            self.sync_barrier();
        }
        let [top, left] = self.corner(fragment);
        let size = stage.size;
        let byte = def!(self, B32, "mul.lo.u32", left, i64::from(size));
        let mut starts: Vec<(u32, Reg)> = Vec::new();
        for (number, cell) in cells(fragment, spread) {
            // Where parts lie beside each other a constant can't be added to where they begin.
            let fixed = spread.across == 1;
            let key = if fixed { 0 } else { cell.eight };
            let start = match starts.iter().find(|(other, _)| *other == key) {
                Some((_, start)) => *start,
                None => {
                    let byte = def!(self, B32, "add.u32", byte, i64::from(8 * key * size));
                    let start = self.offset_in(stage, top, byte);
                    let start = def!(self, B32, "add.u32", start, ring.newest);
                    starts.push((key, start));
                    start
                }
            };
            let down = cell.slab * spread.slab + 8 * cell.half;
            let (by, more) = stage.further(down, if fixed { 8 * cell.eight * size } else { 0 });
            let at = match by {
                0 => start,
                by => def!(self, B32, "xor.b32", start, i64::from(by)),
            };
            let to = |i: u32| Arg::At(at, i64::from(more + i * size));
            // Rows and columns that there are not.
            let beyond = spread.rows(fragment.rows) * spread.down > fragment.rows;
            let row = beyond.then(|| {
                let left = fragment.rows.saturating_sub(down);
                def!(self, Pred, "setp.lt.u32", top, i64::from(left))
            });
            let whole = columns % 8 == 0 && fragment.element != Scalar::I16;
            match size {
                2 if whole => self.asm.ins(
                    row.map(|row| (row, true)),
                    "st.shared.b32",
                    &[to(0), regs[number / 2].into()],
                ),
                4 if whole => {
                    let two = Arg::List(&regs[number..number + 2]);
                    self.asm.ins(row.map(|row| (row, true)), "st.shared.v2.b32", &[to(0), two]);
                }
                _ => {
                    let name = match class_of(fragment.element) {
                        Class::B16 => "st.shared.b16",
                        _ => ["st.shared.u8", "st.shared.u16", "", "st.shared.b32"][size as usize - 1],
                    };
                    for (i, element) in self.elements_of(fragment, &regs, number).into_iter().enumerate() {
                        let right = columns.saturating_sub(8 * cell.eight + i as u32);
                        let there = def!(self, Pred, "setp.lt.u32", left, i64::from(right));
                        let there = match row {
                            Some(row) => def!(self, Pred, "and.pred", there, row),
                            None => there,
                        };
                        when!(self, there, true, name, to(i as u32), element);
                    }
                }
            }
        }
        self.sync_barrier();
        self.advance(ring.next, None, channel.stages);
    }
}
