//! Fragments to and from memory: boxes of views, element by element where they reach out of those, and stages.

use super::super::writer::{Val, Writer, float, int};
use super::boxes::{Box2, FAR, Range};
use super::layout::Kept;
use super::{SLAB, channel_number, fragment_number};
use crate::backend::place::{Access, corner_and_rows};
use crate::backend::stage::PIECE;
use vm_ir::Scalar;
use vm_ir::module::{Op, Place};
use vm_ir::op::Turn;
use vm_ir::tile::Fragment;

/// A fragment that goes to a view, or comes from it.
struct Transfer<'k> {
    access: Access,
    fragment: &'k Fragment,
    kept: Kept,
    /// What the view's rows are aligned to.
    align: u32,
    registers: Vec<Val>,
    of_view: Box2,
}

impl<'k> Writer<'k> {
    /// `get` and `put`.
    pub(super) fn transfer(&mut self, op: &'k Op, view: Place) {
        let kernel = self.kernel;
        let (Place::View(number), Some(&[place])) = (view, op.others.first_chunk::<1>()) else { return };
        let (Some(fragment), Some(view)) = (kernel.fragment(place), kernel.view(number)) else { return };
        let Some(own) = fragment_number(place) else { return };
        let access = Access::of(op);
        // Threads see what others of the block have stored, and store behind them.
        if view.access.writes() {
            self.barrier();
        }
        let line = fragment.is_line();
        let (indices, count) = corner_and_rows(op);
        let Some(mut of_view) = self.clipped(op, indices, !line, line) else { return };
        if let Some(count) = count {
            self.keep_rows(&mut of_view, fragment, count);
        }
        if !line && access != Access::Load {
            // Nothing is put of a box that begins below zero.
            for index in indices {
                let wide = self.wide(*index);
                let below = self.def(format_args!("icmp slt i64 {wide}, 0"));
                let end = of_view.columns.end;
                of_view.columns.end = self.def(format_args!("select i1 {below}, i32 0, i32 {end}"));
            }
        }
        let Some((kept, registers)) = self.registers(own) else { return };
        let mut transfer = Transfer { access, fragment, kept, align: view.align, registers, of_view };
        match (line, op.attr() == Some(Turn::Transposed)) {
            (true, _) => self.transfer_line(&mut transfer),
            (_, true) => self.transfer_turned(&mut transfer),
            _ => self.transfer_matrix(&mut transfer),
        }
        if access == Access::Load {
            self.set_registers(own, &transfer.registers);
        }
    }

    /// Leaves out the rows of a box from number `count` on.
    fn keep_rows(&mut self, of_view: &mut Box2, fragment: &Fragment, count: vm_ir::Value) {
        let wide = self.wide(count);
        let kept = self.call("i64", "llvm.smax.i64", &[("i64", wide), ("i64", Val::Bits(0))]);
        let kept = self.call("i64", "llvm.smin.i64", &[("i64", kept), ("i64", Val::Bits(FAR as u64))]);
        let kept = self.def(format_args!("trunc i64 {kept} to i32"));
        let mut least = |end: Val| self.call("i32", "llvm.umin.i32", &[("i32", end), ("i32", kept)]);
        match (&mut of_view.rows, fragment.columns) {
            (Some(rows), _) => rows.end = least(rows.end),
            (None, None) => of_view.columns.end = least(of_view.columns.end),
            (None, Some(_)) => {
                let some = self.def(format_args!("icmp ne i32 {kept}, 0"));
                let end = of_view.columns.end;
                of_view.columns.end = self.def(format_args!("select i1 {some}, i32 {end}, i32 0"));
            }
        }
    }

    /// A range cut to what the fragment has.
    fn cut(&mut self, range: Range, extent: u32) -> Range {
        let end = self.call("i32", "llvm.umin.i32", &[("i32", range.end), ("i32", extent.into())]);
        Range { end, ..range }
    }

    fn transfer_matrix(&mut self, transfer: &mut Transfer<'k>) {
        let (fragment, kept, of_view) = (transfer.fragment, transfer.kept, transfer.of_view);
        let (Some(rows), stride) = (of_view.rows, of_view.stride) else { return };
        let Some(spread) = self.tiles().map(|tiles| tiles.spread) else { return };
        let columns = fragment.columns.unwrap_or(0);
        let [top, left] = self.corner(fragment);
        let size = kept.element.bytes();
        let (rows, of_columns) = (self.cut(rows, fragment.rows), self.cut(of_view.columns, columns));
        let bytes = self.op32("mul", left, size);
        let bytes = self.def(format_args!("zext i32 {bytes} to i64"));
        let start = self.further(of_view.base, bytes);
        let start = self.row_address(start, stride, top);
        let (mut whole, end, mut loaded) = (None, self.label(), Vec::new());
        if spread.is_even(fragment.rows, columns) {
            let (inside, edge) = (self.label(), self.label());
            let below = self.op32("or", rows.skip, of_columns.skip);
            let mut all = self.def(format_args!("icmp eq i32 {below}, 0"));
            for (range, extent) in [(rows, fragment.rows), (of_columns, columns)] {
                let there = self.def(format_args!("icmp eq i32 {}, {extent}", range.end));
                all = self.both(all, there);
            }
            self.br_if(all, inside, edge);
            self.place(inside);
            for slab in 0..kept.slabs {
                let at = self.down(start, stride, SLAB * slab);
                for block in 0..kept.blocks {
                    let at = self.further(at, Val::from(block * SLAB * size));
                    let own = transfer.registers[(slab * kept.blocks + block) as usize];
                    loaded.extend(self.unit(transfer, at, own));
                }
            }
            whole = Some(self.at);
            self.br(end);
            self.place(edge);
        }
        let mut at_edge = Vec::new();
        for slab in 0..kept.slabs {
            let row = self.op32("add", top, SLAB * slab);
            let there = self.is_in(rows, row);
            let at = self.down(start, stride, SLAB * slab);
            for block in 0..kept.blocks {
                if self.is_too_long() {
                    break;
                }
                let first = self.op32("add", left, SLAB * block);
                let at = self.further(at, Val::from(block * SLAB * size));
                let own = transfer.registers[(slab * kept.blocks + block) as usize];
                let first_in = self.def(format_args!("icmp slt i32 {first}, {}", of_columns.end));
                let some = self.both(there, first_in);
                at_edge.extend(self.some_of_unit(transfer, some, (first, of_columns), at, own));
            }
        }
        let edge = self.at;
        if let Some(whole) = whole {
            self.br(end);
            self.place(end);
            if transfer.access == Access::Load {
                let pairs = loaded.iter().zip(&at_edge);
                at_edge = pairs
                    .map(|(a, b)| self.def(format_args!("phi {} [ {a}, {whole} ], [ {b}, {edge} ]", kept.ty)))
                    .collect();
            }
        }
        if transfer.access == Access::Load && at_edge.len() == transfer.registers.len() {
            transfer.registers = at_edge;
        }
    }

    /// An address so many rows further down.
    fn down(&mut self, at: Val, stride: Val, rows: u32) -> Val {
        if rows == 0 {
            return at;
        }
        let down = self.def(format_args!("mul i64 {stride}, {rows}"));
        self.further(at, down)
    }

    /// A register's elements, which all lie in the view; gives what is loaded.
    fn unit(&mut self, transfer: &Transfer<'_>, at: Val, own: Val) -> Option<Val> {
        let (kept, ty) = (transfer.kept, transfer.kept.ty);
        let size = kept.element.bytes();
        let align = transfer.align.max(size).min((kept.width * size).min(PIECE));
        match transfer.access {
            Access::Load => Some(self.def(format_args!("load {ty}, ptr addrspace(1) {at}, align {align}"))),
            Access::Store => {
                self.line(format_args!("store {ty} {own}, ptr addrspace(1) {at}, align {align}"));
                None
            }
            Access::Add => {
                for (i, element) in (0..).zip(self.unpacked(kept, own)) {
                    let at = self.further(at, Val::from(i * size));
                    self.access_element(Access::Add, kept.element, at, element);
                }
                None
            }
        }
    }

    /// Those of a register's elements that lie in the view, if `some` do: columns from `first` on.
    fn some_of_unit(
        &mut self,
        transfer: &Transfer<'_>,
        some: Val,
        (first, columns): (Val, Range),
        at: Val,
        own: Val,
    ) -> Option<Val> {
        let (access, kept) = (transfer.access, transfer.kept);
        let (ty, size) = (int(kept.element), kept.element.bytes());
        let types: &[&str] = if access == Access::Load { &[kept.ty] } else { &[] };
        let loaded = self.only_if(some, types, |writer| {
            let elements = match access {
                Access::Load => vec![Val::Zero; kept.width as usize],
                _ => writer.unpacked(kept, own),
            };
            let mut loaded = Vec::new();
            for (i, element) in (0..).zip(elements) {
                let column = writer.op32("add", first, i);
                let there = writer.is_in(columns, column);
                let types: &[&str] = if access == Access::Load { &[ty] } else { &[] };
                loaded.extend(writer.only_if(there, types, |writer| {
                    let at = writer.further(at, Val::from(i * size));
                    writer.access_element(access, kept.element, at, element).into_iter().collect()
                }));
            }
            match access {
                Access::Load => vec![writer.repacked(kept, &loaded)],
                _ => Vec::new(),
            }
        });
        loaded.first().copied()
    }

    /// A matrix, stored transposed.
    fn transfer_turned(&mut self, transfer: &mut Transfer<'k>) {
        let (fragment, kept, of_view) = (transfer.fragment, transfer.kept, transfer.of_view);
        let (Some(rows), stride) = (of_view.rows, of_view.stride) else { return };
        let [top, left] = self.corner(fragment);
        let size = kept.element.bytes();
        let (rows, columns) =
            (self.cut(rows, fragment.columns.unwrap_or(0)), self.cut(of_view.columns, fragment.rows));
        let right = self.op32("mul", top, size);
        let right = self.def(format_args!("zext i32 {right} to i64"));
        let start = self.further(of_view.base, right);
        for slab in 0..kept.slabs {
            let column = self.op32("add", top, SLAB * slab);
            let beside = self.is_in(columns, column);
            let start = self.further(start, Val::from(slab * SLAB * size));
            for block in 0..kept.blocks {
                if self.is_too_long() {
                    return;
                }
                let own = transfer.registers[(slab * kept.blocks + block) as usize];
                for (i, element) in (0..).zip(self.unpacked(kept, own)) {
                    let row = self.op32("add", left, SLAB * block + i);
                    let there = self.is_in(rows, row);
                    let there = self.both(there, beside);
                    self.only_if(there, &[], |writer| {
                        let at = writer.row_address(start, stride, row);
                        writer.access_element(transfer.access, kept.element, at, element);
                        Vec::new()
                    });
                }
            }
        }
    }

    /// A column or a row, along the last dimension. Of those who have an element, one stores it.
    fn transfer_line(&mut self, transfer: &mut Transfer<'k>) {
        let (fragment, kept, of_view) = (transfer.fragment, transfer.kept, transfer.of_view);
        let Some(tiles) = self.tiles() else { return };
        let (part, across, own_row, quarter) = (tiles.part, tiles.part_across, tiles.row, tiles.quarter);
        let [top, left] = self.corner(fragment);
        let (first, others) = match fragment.is_row() {
            true => (left, vec![part, own_row]),
            false if fragment.rows == 1 => (Val::Bits(0), vec![part, across, own_row, quarter]),
            false => (top, vec![across, quarter]),
        };
        let columns = self.cut(of_view.columns, fragment.len() as u32);
        let mine = others.into_iter().fold(Val::Bits(0), |any, other| self.op32("or", any, other));
        let mine = self.def(format_args!("icmp eq i32 {mine}, 0"));
        let size = kept.element.bytes();
        let ty = int(kept.element);
        for at in 0..transfer.registers.len() {
            let own = transfer.registers[at];
            let further = SLAB * at as u32;
            let mut loaded = Vec::new();
            for (i, element) in (0..).zip(self.unpacked(kept, own)) {
                let number = self.op32("add", first, further + i);
                let mut there = self.is_in(columns, number);
                let types: &[&str] = match transfer.access {
                    Access::Load => &[ty],
                    _ => {
                        there = self.both(there, mine);
                        &[]
                    }
                };
                loaded.extend(self.only_if(there, types, |writer| {
                    let bytes = writer.op32("mul", number, size);
                    let bytes = writer.def(format_args!("zext i32 {bytes} to i64"));
                    let at = writer.further(of_view.base, bytes);
                    writer.access_element(transfer.access, kept.element, at, element).into_iter().collect()
                }));
            }
            if transfer.access == Access::Load {
                transfer.registers[at] = self.repacked(kept, &loaded);
            }
        }
    }

    /// An element in memory; gives what is loaded.
    fn access_element(&mut self, access: Access, scalar: Scalar, at: Val, element: Val) -> Option<Val> {
        let (ty, size) = (int(scalar), scalar.bytes());
        let at = format!("ptr addrspace(1) {at}");
        match access {
            Access::Load => return Some(self.def(format_args!("load {ty}, {at}, align {size}"))),
            Access::Store => self.line(format_args!("store {ty} {element}, {at}, align {size}")),
            Access::Add if scalar.is_float() => {
                let each = float(scalar);
                let value = self.def(format_args!("bitcast {ty} {element} to {each}"));
                self.def(format_args!(
                    "atomicrmw fadd {at}, {each} {value} syncscope(\"agent\") monotonic, align {size}"
                ));
            }
            Access::Add => {
                self.def(format_args!(
                    "atomicrmw add {at}, {ty} {element} syncscope(\"agent\") monotonic, align {size}"
                ));
            }
        }
        None
    }

    /// A fragment into the next stage of a channel.
    pub(super) fn send(&mut self, op: &'k Op, place: Place) {
        let Some(&[to]) = op.others.first_chunk::<1>() else { return };
        let (Some(fragment), Some(own)) = (self.kernel.fragment(place), fragment_number(place)) else {
            return;
        };
        let Some(number) = channel_number(to) else { return };
        let to = self.advance(number);
        let Some(tiles) = self.tiles() else { return };
        let (stage, spread, index) = (tiles.layout.stages[number].1, tiles.spread, tiles.index);
        let threads = self.block_threads();
        let Some((kept, registers)) = self.registers(own) else { return };
        let columns = fragment.columns.unwrap_or(0);
        if [fragment.rows, columns] != [stage.rows, stage.columns()] {
            let first = self.op32("mul", index, PIECE);
            let first = self.op32("add", first, to);
            let first = self.in_shared(first);
            let pieces = stage.bytes() / PIECE;
            for n in 0..pieces.div_ceil(threads) {
                let left = pieces - n * threads;
                let there = self.def(format_args!("icmp ult i32 {index}, {left}"));
                self.only_if(there, &[], |writer| {
                    let bytes = n * threads * PIECE;
                    let at =
                        writer.def(format_args!("getelementptr i8, ptr addrspace(3) {first}, i32 {bytes}"));
                    let piece = Val::Zero;
                    writer
                        .line(format_args!("store <4 x i32> {piece}, ptr addrspace(3) {at}, align {PIECE}"));
                    Vec::new()
                });
            }
            self.local_barrier();
        }
        let [top, left] = self.corner(fragment);
        let (ty, size) = (int(kept.element), stage.size);
        let even = spread.is_even(fragment.rows, columns);
        let align = (kept.width * size).min(PIECE);
        for slab in 0..kept.slabs {
            let row = self.op32("add", top, SLAB * slab);
            for block in 0..kept.blocks {
                if self.is_too_long() {
                    return;
                }
                let value = registers[(slab * kept.blocks + block) as usize];
                let first = self.op32("add", left, SLAB * block);
                if even && kept.width * size <= PIECE {
                    let byte = self.op32("mul", first, size);
                    let at = self.address_in(stage, to, row, byte);
                    self.line(format_args!(
                        "store {} {value}, ptr addrspace(3) {at}, align {align}",
                        kept.ty
                    ));
                    continue;
                }
                let below = self.def(format_args!("icmp ult i32 {row}, {}", fragment.rows));
                for (i, element) in (0..).zip(self.unpacked(kept, value)) {
                    let column = self.op32("add", first, i);
                    let there = self.def(format_args!("icmp ult i32 {column}, {columns}"));
                    let there = self.both(there, below);
                    self.only_if(there, &[], |writer| {
                        let byte = writer.op32("mul", column, size);
                        let at = writer.address_in(stage, to, row, byte);
                        writer
                            .line(format_args!("store {ty} {element}, ptr addrspace(3) {at}, align {size}"));
                        Vec::new()
                    });
                }
            }
        }
    }
}
