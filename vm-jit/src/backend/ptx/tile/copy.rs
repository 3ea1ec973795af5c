//! Copies between views and shared memory, and the stages that they fill.

use super::fragment::half_register;
use super::layout::{self, BoxOf, GROUP, ROW, SLAB};
use super::order::PutOrder;
use super::{Role, channel_number, fragment_number};
use crate::backend::place::corner_and_rows;
use crate::backend::ptx::asm::{Arg, Class, Reg, def, ins, when};
use crate::backend::ptx::writer::Writer;
use std::ops::Range;
use vm_ir::Value;
use vm_ir::module::{Op, Place};
use vm_ir::op::Opcode;
use vm_ir::tile::Fragment;

/// Bytes at whose multiples columns are copied.
const COLUMN: u32 = 16;

/// Boxes in shared memory: the first one's address, how far apart they are, how many columns each has, and how many there are.
#[derive(Clone, Copy)]
struct Staged {
    start: Reg,
    offset: u32,
    next_box: u32,
    columns: u32,
    boxes: u32,
}

impl<'k> Writer<'k> {
    /// The tensor map of a box: its generic address.
    fn map_of(&mut self, wanted: BoxOf) -> Reg {
        let Some(tiles) = &self.tiles else { return Reg::NONE };
        let number = tiles.layout.boxes.iter().position(|b| *b == wanted);
        let offset = number.and_then(|number| tiles.maps.get(number)).copied().unwrap_or(0);
        let parameters = tiles.parameters;
        def!(self, B64, "add.s64", parameters, i64::from(offset))
    }

    /// The indices of a box as coordinates, the last first; `down` is added to the row. An index that is out of the range of
    /// coordinates becomes the nearest, which is out of every view as far as a box reaches. The accelerator takes no column but at
    /// a multiple of 16 bytes: it ends the kernel (seen on an H200).
    fn coordinates(&mut self, view: Place, indices: &[Value], down: Option<Reg>) -> Vec<Reg> {
        let last = indices.len().saturating_sub(1);
        let element = self.kernel.place(view).map(|(_, element)| element);
        let step = element.map_or(1, vm_ir::tile::column_step);
        let coordinate = |(i, index): (usize, &Value)| {
            let index = self.get(*index, 0);
            let narrow = match index.class {
                Class::B64 => def!(self, B32, "cvt.sat.s32.s64", index),
                _ => index,
            };
            match down.filter(|_| i + 1 == last) {
                Some(down) => def!(self, B32, "add.sat.s32", narrow, down),
                None if i == last => def!(self, B32, "and.b32", narrow, -i64::from(step)),
                None => narrow,
            }
        };
        let mut coordinates: Vec<Reg> = indices.iter().enumerate().map(coordinate).collect();
        coordinates.reverse();
        coordinates
    }

    /// The column of the box beside one of whole rows. Far out of the view too it is a multiple of 16 bytes.
    fn beside(&mut self, column: Reg, columns: u32) -> Reg {
        let next = def!(self, B32, "add.sat.s32", column, i64::from(columns));
        def!(self, B32, "and.b32", next, -i64::from(columns * COLUMN / layout::ROW))
    }

    /// Does no index of a box lie below zero? The accelerator ends a kernel that stores such a box (seen on an H200).
    pub(super) fn begins_inside(&mut self, indices: &[Value]) -> Reg {
        let mut below = self.number(vm_ir::Scalar::I64, 0);
        for index in indices {
            let wide = self.wide(*index);
            below = def!(self, B64, "or.b64", below, wide);
        }
        def!(self, Pred, "setp.ge.s64", below, 0)
    }

    /// The next stage of a channel: one role has it filled, the others wait until it is full.
    pub(super) fn fetch(&mut self, op: &'k Op, view: Place) {
        let kernel = self.kernel;
        let (Place::View(parameter), Some(place)) = (view, op.others.first().copied()) else { return };
        let (Some(channel), Some(number)) = (kernel.channel(place), channel_number(place)) else { return };
        let Some(tiles) = &self.tiles else { return };
        let (role, base, ring, rank) = (tiles.role, tiles.base, tiles.rings[number], tiles.rank);
        let (first, barriers) = (tiles.layout.channels[number], tiles.layout.barriers[number]);
        let bytes = i64::from(layout::stage_bytes(channel));
        let barrier = def!(self, B32, "mad.lo.u32", ring.next, 8, base);
        let [full, empty] = [barriers, barriers + 8 * channel.stages].map(i64::from);
        let stage = def!(self, B32, "mad.lo.u32", ring.next, bytes, base);
        match role {
            Role::Compute => {
                self.wait(barrier, full, ring.parity);
                ins!(self, "add.u32", ring.newest, stage, i64::from(first));
            }
            Role::Fetch => {
                self.wait(barrier, empty, ring.parity);
                let expect = "mbarrier.arrive.expect_tx.shared::cta.b64";
                // What comes is what the stage has, not what it takes.
                ins!(self, expect, "_", Arg::At(barrier, full), channel.stage_bytes() as i64);
                let wanted = layout::fetched(kernel, parameter, channel, 0);
                let mut map = self.map_of(wanted);
                let [rows, columns] = wanted.dims;
                let (blocks, mut stage) = (layout::share(kernel, channel), stage);
                let down = (blocks > 1).then(|| def!(self, B32, "mul.lo.u32", rank, i64::from(rows)));
                if down.is_some() {
                    stage = def!(self, B32, "mad.lo.u32", rank, i64::from(rows * ROW), stage);
                }
                let all = (blocks > 1).then(|| def!(self, B16, "mov.b16", (1i64 << blocks) - 1));
                let mut at = self.coordinates(view, &op.operands, down);
                let of_full = def!(self, B32, "add.u32", barrier, full);
                for i in 0..layout::boxes(channel) {
                    if i > 0 {
                        at[0] = self.beside(at[0], columns);
                    }
                    let own = layout::fetched(kernel, parameter, channel, i);
                    if own != wanted {
                        map = self.map_of(own);
                    }
                    let to = Arg::At(stage, i64::from(first + i * channel.dims[0] * ROW));
                    let dimensions = at.len();
                    let copy = format!(
                        "cp.async.bulk.tensor.{dimensions}d.shared::cluster.global.mbarrier::complete_tx::bytes"
                    );
                    let (from, full) = (Arg::Tensor(map, &at), Arg::At(of_full, 0));
                    match all {
                        Some(all) => ins!(self, &format!("{copy}.multicast::cluster"), to, from, full, all),
                        None => ins!(self, &copy, to, from, full),
                    }
                }
            }
        }
        self.advance(ring.next, Some(ring.parity), channel.stages);
    }

    /// The oldest stage of a channel is empty, as far as this warp is concerned.
    pub(super) fn release(&mut self, place: Place) {
        let (Some(channel), Some(number)) = (self.kernel.channel(place), channel_number(place)) else {
            return;
        };
        let Some(tiles) = &self.tiles else { return };
        let (base, ring, leads_warp, lane) = (tiles.base, tiles.rings[number], tiles.leads_warp, tiles.lane);
        let empty = i64::from(tiles.layout.barriers[number] + 8 * channel.stages);
        let barrier = def!(self, B32, "mad.lo.u32", ring.oldest, 8, base);
        match layout::share(self.kernel, channel) {
            1 => {
                let at = Arg::At(barrier, empty);
                when!(self, leads_warp, true, "mbarrier.arrive.shared::cta.b64", "_", at);
            }
            // To each block of the cluster, as its share is brought by each.
            blocks => {
                let own = def!(self, Pred, "setp.lt.u32", lane, i64::from(blocks));
                self.release_in(barrier, empty, lane, own);
            }
        }
        self.advance(ring.oldest, None, channel.stages);
    }

    /// Waits for all threads that compute.
    pub(super) fn compute_barrier(&mut self) {
        let Some(groups) = self.tiles.as_ref().map(|tiles| tiles.tile.groups) else { return };
        if groups == 1 {
            return self.group_barrier();
        }
        ins!(self, "bar.sync", i64::from(groups + 1), i64::from(groups * GROUP));
    }

    /// Waits for all threads of the group.
    fn group_barrier(&mut self) {
        let Some(group) = self.tiles.as_ref().map(|tiles| tiles.group) else { return };
        // Barrier 0 is that of the block; groups are counted from 1.
        ins!(self, "bar.sync", group, i64::from(GROUP));
    }

    /// Writes a group's rows of a matrix into shared memory as boxes of rows of 128 bytes, swizzled; its first row comes at
    /// `start` and `offset`, and each further box of `boxes` `next_box` bytes behind the one before.
    fn write_boxes(
        &mut self,
        fragment: &Fragment,
        regs: &[Reg],
        start: Reg,
        offset: u32,
        next_box: u32,
        boxes: Range<u32>,
    ) {
        self.each_pair(fragment, start, offset, next_box, boxes, |writer, first, at| {
            match fragment.element.bytes() {
                1 => {
                    let (number, half) = half_register(first);
                    let halves = [writer.asm.new_reg(Class::B16), writer.asm.new_reg(Class::B16)];
                    ins!(writer, "mov.b32", Arg::List(&halves), regs[number]);
                    ins!(writer, "st.shared.b16", at, halves[half]);
                }
                2 => ins!(writer, "st.shared.b32", at, regs[first / 2]),
                _ => {
                    let two = [regs[first], regs[first + 1]];
                    ins!(writer, "st.shared.v2.b32", at, Arg::List(&two));
                }
            }
        });
        ins!(self, "fence.proxy.async.shared::cta");
    }

    /// Does something for each pair of elements of a group's rows of boxes, of which it is given the first one's number and where
    /// it is in shared memory.
    fn each_pair(
        &mut self,
        fragment: &Fragment,
        start: Reg,
        offset: u32,
        next_box: u32,
        boxes: Range<u32>,
        mut act: impl FnMut(&mut Self, usize, Arg<'static>),
    ) {
        let Some(tiles) = &self.tiles else { return };
        let (thread, row) = (tiles.thread, tiles.row);
        let rows = fragment.rows / tiles.tile.groups;
        let size = fragment.element.bytes();
        // Sixteen bytes of a row lie where the row's number says: of the eight rows that begin with the thread's, its own
        // is `quad`, as all others are multiples of eight.
        let quad = def!(self, B32, "bfe.u32", thread, 2, 3);
        let pair = def!(self, B32, "and.b32", thread, 3);
        let at = def!(self, B32, "mad.lo.u32", row, i64::from(ROW), start);
        let at = match size {
            1 | 2 => {
                let at = def!(self, B32, "mad.lo.u32", quad, 16, at);
                def!(self, B32, "mad.lo.u32", pair, i64::from(2 * size), at)
            }
            _ => {
                let half = def!(self, B32, "shr.u32", pair, 1);
                let sixteen = def!(self, B32, "xor.b32", half, quad);
                let at = def!(self, B32, "mad.lo.u32", sixteen, 16, at);
                let odd = def!(self, B32, "and.b32", pair, 1);
                def!(self, B32, "mad.lo.u32", odd, 8, at)
            }
        };
        let width = fragment.columns.unwrap_or(0) / 8;
        let of_box = layout::columns(fragment.element) / 8;
        for slab in 0..rows / SLAB {
            for eight in boxes.start * of_box..(boxes.end * of_box).min(width) {
                // Eight elements of a row, two of them here; in two rows.
                let byte = 8 * size * eight;
                let swizzled = def!(self, B32, "xor.b32", at, i64::from(byte % ROW));
                for half in 0..2 {
                    let to = offset + (byte / ROW - boxes.start) * next_box + (slab * SLAB + 8 * half) * ROW;
                    let first = ((slab * width + eight) * 4 + 2 * half) as usize;
                    act(self, first, Arg::At(swizzled, i64::from(to)));
                }
            }
        }
    }

    /// A fragment into the next stage of a channel.
    pub(super) fn send(&mut self, op: &'k Op, place: Place) {
        let kernel = self.kernel;
        let Some(to) = op.others.first().copied() else { return };
        let (Some(fragment), Some(of_fragment)) = (kernel.fragment(place), fragment_number(place)) else {
            return;
        };
        let (Some(channel), Some(number)) = (kernel.channel(to), channel_number(to)) else { return };
        let Some(tiles) = &self.tiles else { return };
        let (base, group, ring, groups) = (tiles.base, tiles.group, tiles.rings[number], tiles.tile.groups);
        let (first, barriers) = (tiles.layout.channels[number], tiles.layout.barriers[number]);
        let regs = tiles.fragments[of_fragment].clone();
        let [full, empty] = [barriers, barriers + 8 * channel.stages].map(i64::from);
        let barrier = def!(self, B32, "mad.lo.u32", ring.next, 8, base);
        let of_empty = def!(self, B32, "xor.b32", ring.parity, 1);
        self.wait(barrier, empty, of_empty);
        let bytes = i64::from(layout::stage_bytes(channel));
        let stage = def!(self, B32, "mad.lo.u32", ring.next, bytes, base);
        let own = def!(self, B32, "sub.u32", group, 1);
        let start = def!(self, B32, "mad.lo.u32", own, i64::from(fragment.rows / groups * ROW), stage);
        let boxes = 0..layout::boxes(channel);
        self.write_boxes(fragment, &regs, start, first, fragment.rows * ROW, boxes);
        ins!(self, "mbarrier.arrive.shared::cta.b64", "_", Arg::At(barrier, full));
        self.wait(barrier, full, ring.parity);
        ins!(self, "add.u32", ring.newest, stage, i64::from(first));
        self.advance(ring.next, Some(ring.parity), channel.stages);
    }

    /// Puts a fragment into a box that begins at the op's indices: a few of its boxes at a time.
    pub(super) fn put_box(&mut self, op: &'k Op, view: Place) {
        let kernel = self.kernel;
        let (Place::View(parameter), Some(place)) = (view, op.others.first().copied()) else { return };
        let (Some(fragment), Some(number)) = (kernel.fragment(place), fragment_number(place)) else { return };
        let Some(tiles) = &self.tiles else { return };
        let (base, group, leads) = (tiles.base, tiles.group, tiles.leads);
        let (groups, staging) = (tiles.tile.groups, tiles.layout.staging);
        let share = tiles.layout.staged / groups;
        let regs = tiles.fragments[number].clone();
        let wanted = layout::copied(parameter, fragment, groups, true);
        let [rows, columns] = wanted.dims;
        let boxes = fragment.columns.unwrap_or(0) / columns;
        let at_once = layout::staged_boxes(fragment);
        let (indices, count) = corner_and_rows(op);

        // What was put before is in memory, lest it comes later than this; and all groups have loaded what they had to.
        let PutOrder { adds, aligned } =
            tiles.put_orders.get(usize::from(parameter)).copied().unwrap_or_default();
        match adds {
            true => when!(self, leads, true, "cp.async.bulk.wait_group.read", 0),
            false => when!(self, leads, true, "cp.async.bulk.wait_group", 0),
        }
        match adds || aligned {
            true => self.group_barrier(),
            false => self.compute_barrier(),
        }
        let own = def!(self, B32, "sub.u32", group, 1);
        let start = def!(self, B32, "mad.lo.u32", own, i64::from(share), base);
        let inside = self.begins_inside(indices);
        let stores = def!(self, Pred, "and.pred", leads, inside);
        let down = def!(self, B32, "mul.lo.u32", own, i64::from(rows));
        let some_rows = count.map(|count| {
            let below = def!(self, B64, "cvt.u64.u32", down);
            let count = self.wide(count);
            let above = def!(self, B64, "max.s64", count, below);
            let own = def!(self, B64, "sub.s64", above, below);
            let own = def!(self, B64, "min.s64", own, i64::from(rows));
            def!(self, B32, "cvt.u32.u64", own)
        });
        let map = self.map_of(wanted);
        let mut at = self.coordinates(view, indices, Some(down));
        for first in (0..boxes).step_by(at_once as usize) {
            if first > 0 {
                when!(self, leads, true, "cp.async.bulk.wait_group.read", 0);
                self.group_barrier();
            }
            let some = first..boxes.min(first + at_once);
            self.write_boxes(fragment, &regs, start, staging, rows * ROW, some.clone());
            self.group_barrier();
            let (leave, done) = (self.asm.new_label(), self.asm.new_label());
            when!(self, stores, false, "bra", Arg::Label(leave));
            let staged =
                Staged { start, offset: staging, next_box: rows * ROW, columns, boxes: some.len() as u32 };
            if let Some(count) = some_rows {
                let single = self.map_of(wanted.row());
                self.store_rows(op.code, single, at.clone(), staged, count);
                let few = def!(self, Pred, "setp.lt.u32", count, i64::from(rows));
                when!(self, few, true, "bra", Arg::Label(done));
            }
            self.store_boxes(op.code, map, &at, staged);
            self.asm.place(done);
            ins!(self, "cp.async.bulk.commit_group");
            self.asm.place(leave);
            for _ in some {
                at[0] = self.beside(at[0], columns);
            }
        }
    }

    /// Has boxes copied from shared memory to where `at` is, one beside the other.
    fn store_boxes(&mut self, code: Opcode, map: Reg, at: &[Reg], staged: Staged) {
        let (dimensions, mut at) = (at.len(), at.to_vec());
        let copy = match code {
            Opcode::PutAdd => {
                format!("cp.reduce.async.bulk.tensor.{dimensions}d.global.shared::cta.add.bulk_group")
            }
            _ => format!("cp.async.bulk.tensor.{dimensions}d.global.shared::cta.bulk_group"),
        };
        for i in 0..staged.boxes {
            if i > 0 {
                at[0] = self.beside(at[0], staged.columns);
            }
            let from = Arg::At(staged.start, i64::from(staged.offset + i * staged.next_box));
            ins!(self, &copy, Arg::Tensor(map, &at), from);
        }
    }

    /// Has the first `count` rows of boxes copied, if those are fewer than all, one by one.
    fn store_rows(&mut self, code: Opcode, map: Reg, mut at: Vec<Reg>, staged: Staged, count: Reg) {
        let (head, behind) = (self.asm.new_label(), self.asm.new_label());
        let all = def!(self, Pred, "setp.ge.u32", count, i64::from(staged.next_box / ROW));
        when!(self, all, true, "bra", Arg::Label(behind));
        let (row, left) = (def!(self, B32, "mov.b32", staged.start), def!(self, B32, "mov.b32", count));
        at[1] = def!(self, B32, "mov.b32", at[1]);
        self.asm.place(head);
        let over = def!(self, Pred, "setp.eq.u32", left, 0);
        when!(self, over, true, "bra", Arg::Label(behind));
        self.store_boxes(code, map, &at, Staged { start: row, ..staged });
        ins!(self, "add.u32", row, row, i64::from(ROW));
        ins!(self, "add.sat.s32", at[1], at[1], 1);
        ins!(self, "sub.u32", left, left, 1);
        ins!(self, "bra", Arg::Label(head));
        self.asm.place(behind);
    }

    /// A box of a view into a fragment, by way of shared memory: a few of its boxes at a time.
    pub(super) fn get_box(&mut self, op: &'k Op, view: Place) {
        let kernel = self.kernel;
        let (Place::View(parameter), Some(place)) = (view, op.others.first().copied()) else { return };
        let (Some(fragment), Some(number)) = (kernel.fragment(place), fragment_number(place)) else { return };
        let Some(tiles) = &self.tiles else { return };
        let (base, group, leads, arrival) = (tiles.base, tiles.group, tiles.leads, tiles.arrival);
        let (groups, staging, arrivals) = (tiles.tile.groups, tiles.layout.staging, tiles.layout.arrivals);
        let share = tiles.layout.staged / groups;
        let regs = tiles.fragments[number].clone();
        let wanted = layout::copied(parameter, fragment, groups, false);
        let [rows, columns] = wanted.dims;
        let boxes = fragment.columns.unwrap_or(0) / columns;
        let at_once = layout::staged_boxes(fragment);
        let own = def!(self, B32, "sub.u32", group, 1);
        let start = def!(self, B32, "mad.lo.u32", own, i64::from(share), base);
        let barrier = def!(self, B32, "mad.lo.u32", own, 8, base);
        let map = self.map_of(wanted);
        let plus = def!(self, B32, "mul.lo.u32", own, i64::from(rows));
        let mut at = self.coordinates(view, &op.operands, Some(plus));
        let copy =
            format!("cp.async.bulk.tensor.{}d.shared::cluster.global.mbarrier::complete_tx::bytes", at.len());
        for first in (0..boxes).step_by(at_once as usize) {
            // What was put before has left.
            when!(self, leads, true, "cp.async.bulk.wait_group.read", 0);
            self.group_barrier();
            let some = first..boxes.min(first + at_once);
            let full = Arg::At(barrier, i64::from(arrivals));
            let bytes = i64::from(some.len() as u32 * rows * ROW);
            when!(self, leads, true, "mbarrier.arrive.expect_tx.shared::cta.b64", "_", full, bytes);
            for i in some.clone() {
                if i > 0 {
                    at[0] = self.beside(at[0], columns);
                }
                let to = Arg::At(start, i64::from(staging + (i - first) * rows * ROW));
                when!(self, leads, true, &copy, to, Arg::Tensor(map, &at), full);
            }
            self.wait(barrier, i64::from(arrivals), arrival);
            ins!(self, "xor.b32", arrival, arrival, 1);
            self.each_pair(fragment, start, staging, rows * ROW, some, |writer, first, at| {
                match fragment.element.bytes() {
                    1 => {
                        let (number, half) = half_register(first);
                        let mut halves = [writer.asm.new_reg(Class::B16), writer.asm.new_reg(Class::B16)];
                        ins!(writer, "mov.b32", Arg::List(&halves), regs[number]);
                        halves[half] = def!(writer, B16, "ld.shared.b16", at);
                        ins!(writer, "mov.b32", regs[number], Arg::List(&halves));
                    }
                    2 => ins!(writer, "ld.shared.b32", regs[first / 2], at),
                    _ => {
                        let two = [regs[first], regs[first + 1]];
                        ins!(writer, "ld.shared.v2.b32", Arg::List(&two), at);
                    }
                }
            });
        }
    }
}
