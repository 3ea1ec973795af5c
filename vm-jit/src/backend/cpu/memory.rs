//! Views and shared arrays.
//!
//! A guest's access to a view that may be out of bounds is [redirected](super::redirect). Of several elements in a row that may
//! be partly out of bounds, each is checked by itself, behind a branch. What is checked is in the
//! [`SafetyPlan`](crate::safety::SafetyPlan).

use super::lanes::{Repr, clif, loose, own};
use super::redirect::{Direction, WIDEST_ROW};
use super::writer::{Extent, Writer};
use crate::safety::{Access, Last};
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{InstBuilder, MemFlagsData, Value as Ssa, types};
use vm_ir::Scalar;
use vm_ir::limits::WARP;
use vm_ir::module::{Op, Place};

/// A row of elements. Exactly the elements that were checked when it was made are loaded or stored.
pub(super) struct Row {
    pub(super) address: Ssa,
    scalar: Scalar,
    elements: usize,
    /// How many of the elements may be there at all.
    count: usize,
    pub(super) bounds: Bounds,
}

impl Row {
    /// Returns the bytes of all elements.
    pub(super) fn bytes(&self) -> u64 {
        self.elements as u64 * u64::from(self.scalar.bytes())
    }
}

pub(super) enum Bounds {
    /// All are in bounds.
    In,
    /// All are if this holds, and none else.
    If(Ssa),
    /// Each is if the first holds and the index and its number in the row, in units of which elements have so many, are below
    /// the extent; all are if the last holds.
    Each { outer: Option<Ssa>, index: Ssa, extent: Ssa, unit: i64, all: Ssa },
}

impl Writer<'_, '_> {
    pub(super) fn wide(&mut self, index: Ssa) -> Ssa {
        if self.type_of(index) == types::I64 { index } else { self.b.ins().sextend(types::I64, index) }
    }

    pub(super) fn extent_value(&mut self, extent: Extent) -> Ssa {
        match extent {
            Extent::Given(extent) => extent,
            Extent::Fixed(extent) => self.b.ins().iconst(types::I64, extent as i64),
        }
    }

    /// Where so many elements in a row are, and whether they are in bounds.
    pub(super) fn row(
        &mut self,
        op: &Op,
        place: Place,
        known: &Access,
        indices: &[Ssa],
        elements: (Scalar, usize),
    ) -> Option<Row> {
        let mut indices: Vec<Ssa> = indices.iter().map(|index| self.wide(*index)).collect();
        if self.kernel.surface(place).is_some() {
            // That of the lanes.
            indices.push(self.b.ins().iconst(types::I64, 0));
        }
        match place {
            Place::View(_) => self.view_row(op, place, known, &indices, elements),
            Place::Shared(array) => self.shared_row(usize::from(array), known, &indices, elements),
            // Local arrays are parts of shared ones here.
            Place::Local(_) | Place::Channel(_) | Place::Fragment(_) => None,
        }
    }

    fn view_row(
        &mut self,
        op: &Op,
        place: Place,
        known: &Access,
        indices: &[Ssa],
        (scalar, count): (Scalar, usize),
    ) -> Option<Row> {
        let Place::View(number) = place else { return None };
        let view = self.views.get(usize::from(number))?.clone()?;
        let size = self.kernel.place(place)?.1.bytes();
        let mut address = view.base;
        for (index, stride) in indices.iter().zip(&view.strides) {
            let by = self.b.ins().imul(*index, *stride);
            address = self.b.ins().iadd(address, by);
        }
        let last = *indices.last()?;
        let by = self.b.ins().imul_imm_s(last, i64::from(size));
        let address = self.b.ins().iadd(address, by);
        let mut outer = None;
        for (dimension, index) in indices.iter().enumerate().take(indices.len() - 1) {
            if !known.checks(dimension) {
                continue;
            }
            let extent = self.extent_value(view.extents[dimension]);
            let within = self.b.ins().icmp(IntCC::UnsignedLessThan, *index, extent);
            outer = Some(match outer {
                None => within,
                Some(outer) => self.b.ins().band(outer, within),
            });
        }
        // By bytes, values lie at multiples of their size or none does, and in what of the view are whole multiples.
        let (bytes, unit) = match (known.bytes, self.kernel.by_bytes(op)) {
            (Some(bytes), Some(ty)) => (i64::from(bytes), i64::from(ty.scalar().bytes())),
            _ => (1, 1),
        };
        if let Last::Bytes { aligned: true, .. } = known.last {
            let rest = self.b.ins().band_imm_s(last, bytes - 1);
            outer = Some(self.b.ins().icmp_imm_s(IntCC::Equal, rest, 0));
        }
        let and = |w: &mut Self, one: Ssa| match outer {
            None => one,
            Some(outer) => w.b.ins().band(outer, one),
        };
        let bounds = match known.last {
            Last::Unchecked(_) | Last::Bytes { within: false, .. } => outer.map_or(Bounds::In, Bounds::If),
            Last::Bytes { .. } => {
                let extent = self.extent_value(*view.extents.last()?);
                let extent = self.b.ins().band_imm_s(extent, -bytes);
                let row = count as i64 * unit;
                if row <= bytes {
                    let within = self.b.ins().icmp(IntCC::UnsignedLessThan, last, extent);
                    Bounds::If(and(self, within))
                } else {
                    let limit = self.b.ins().iadd_imm_s(extent, 1 - row);
                    let zero = self.b.ins().iconst(types::I64, 0);
                    let limit = self.b.ins().smax(limit, zero);
                    let all = self.b.ins().icmp(IntCC::UnsignedLessThan, last, limit);
                    let all = and(self, all);
                    Bounds::Each { outer, index: last, extent, unit, all }
                }
            }
            // Of one thread's lanes, all or none may be known to be in; of neighbouring threads' it is not.
            Last::Lanes | Last::First if count > 1 && (self.width > 1 || known.last == Last::Lanes) => {
                // The last index at which all fit, plus one; none if the row is too short.
                let extent = self.extent_value(*view.extents.last()?);
                let limit = self.b.ins().iadd_imm_s(extent, 1 - count as i64);
                let zero = self.b.ins().iconst(types::I64, 0);
                let limit = self.b.ins().smax(limit, zero);
                let all = self.b.ins().icmp(IntCC::UnsignedLessThan, last, limit);
                let all = and(self, all);
                Bounds::Each { outer, index: last, extent, unit, all }
            }
            _ => {
                let extent = self.extent_value(*view.extents.last()?);
                let within = self.b.ins().icmp(IntCC::UnsignedLessThan, last, extent);
                Bounds::If(and(self, within))
            }
        };
        Some(Row { address, scalar, elements: count, count, bounds })
    }

    fn shared_row(
        &mut self,
        array: usize,
        known: &Access,
        indices: &[Ssa],
        (scalar, elements): (Scalar, usize),
    ) -> Option<Row> {
        let declared = self.kernel.shared().get(array)?;
        let (size, dims) = (i64::from(declared.element.bytes()), declared.dims.clone());
        let last = dims.len() - 1;
        let mut element: Option<Ssa> = None;
        for (dimension, extent) in dims.iter().enumerate() {
            let in_row = dimension == last;
            let clamped = if in_row { known.last.is_checked() } else { known.checks(dimension) };
            let mut index = indices[dimension];
            if clamped {
                let room = if in_row { known.bytes.unwrap_or(elements as u32) } else { 1 };
                let greatest = self.b.ins().iconst(types::I64, i64::from(extent - room.min(*extent)));
                index = self.b.ins().umin(index, greatest);
                if let Some(bytes) = known.bytes {
                    index = self.b.ins().band_imm_s(index, -i64::from(bytes));
                }
            }
            element = Some(match element {
                None => index,
                Some(outer) => {
                    let row = self.b.ins().imul_imm_s(outer, i64::from(*extent));
                    self.b.ins().iadd(row, index)
                }
            });
        }
        let by = self.b.ins().imul_imm_s(element?, size);
        let by = self.b.ins().iadd_imm_s(by, i64::from(self.plan.shared[array]));
        let arrays = self.arrays();
        let address = self.b.ins().iadd(arrays, by);
        let count = if known.last.is_checked() { elements.min(dims[last] as usize) } else { elements };
        Some(Row { address, scalar, elements, count, bounds: Bounds::In })
    }

    /// Where the shared arrays of the block at hand begin.
    fn arrays(&mut self) -> Ssa {
        match self.rank() {
            Some(rank) => {
                let by = self.b.ins().imul_imm_s(rank, i64::from(self.plan.block_bytes));
                self.b.ins().iadd(self.scratch, by)
            }
            None => self.scratch,
        }
    }

    /// What the warp at hand gives to the arrays of all blocks of the cluster.
    pub(super) fn cluster_gather(&mut self, op: &Op) {
        let (Some(Place::Shared(array)), Some(value)) = (op.place, op.operands.first().copied()) else {
            return;
        };
        let (all, size) = (self.each(value), self.scalar(value).bytes());
        let Some(warp) = self.warp_index() else { return };
        let by = self.b.ins().imul_imm_s(warp, i64::from(size) * all.len() as i64);
        let at = self.b.ins().iadd(self.scratch, by);
        for block in 0..self.kernel.cluster() {
            let start = block * self.plan.block_bytes + self.plan.shared[usize::from(array)];
            for (lane, one) in (0..).zip(&all) {
                let offset = self.offset(u64::from(start) + lane * u64::from(size));
                self.b.ins().store(own(), *one, at, offset);
            }
        }
    }

    /// Where an element is if not all are in bounds.
    fn one_of_row(&mut self, row: &Row, number: Ssa, direction: Direction) -> Ssa {
        let Bounds::Each { outer, index, extent, unit, .. } = row.bounds else { return row.address };
        let by = self.b.ins().imul_imm_s(number, unit);
        let at = self.b.ins().iadd(index, by);
        let within = self.b.ins().icmp(IntCC::UnsignedLessThan, at, extent);
        let within = match outer {
            None => within,
            Some(outer) => self.b.ins().band(outer, within),
        };
        let size = row.scalar.bytes();
        let by = self.b.ins().imul_imm_s(number, i64::from(size));
        let address = self.b.ins().iadd(row.address, by);
        self.redirect_out_of_bounds(address, within, direction, size.into())
    }

    /// Goes through the elements of a row one by one, of which some may be out of bounds: `one` is given the address of each, and
    /// that of its place in scratch memory without the offset at which those begin.
    ///
    /// A loop, as it is seldom run: written out, its addresses would be computed ahead, and take the registers of what is run often.
    fn each_of_row(&mut self, row: &Row, direction: Direction, one: impl FnOnce(&mut Self, Ssa, Ssa)) {
        let count = self.b.ins().iconst(types::I64, row.elements as i64);
        self.counted(count, 1, |w, number| {
            if let Some(head) = w.b.current_block() {
                w.b.set_cold_block(head);
            }
            let address = w.one_of_row(row, number, direction);
            let by = w.b.ins().imul_imm_s(number, i64::from(row.scalar.bytes()));
            let place = w.b.ins().iadd(w.scratch, by);
            one(w, address, place);
        });
        if let Some(behind) = self.b.current_block() {
            self.b.set_cold_block(behind);
        }
    }

    /// Scratch memory for the elements of a row: its offset.
    fn row_at(&mut self, row: &Row) -> i32 {
        let (before, at) = (self.spill_at, self.spill_at.next_multiple_of(16));
        self.spill_at = at;
        let at = self.spill(row.bytes());
        self.spill_at = before;
        at
    }

    fn load_row(&mut self, row: &Row) -> Repr {
        let &Row { scalar, elements, .. } = row;
        let flags = self.flags(elements);
        let scratch = self.scratch;
        match row.bounds {
            Bounds::In if row.count < elements => {
                let zero = self.number(scalar, 0);
                let some = self.load_each(row.address, scalar, row.count);
                let all = some.into_iter().chain(std::iter::repeat(zero)).take(elements).collect();
                Repr::Each(all)
            }
            Bounds::In => self.load_elements(flags, row.address, 0, scalar, elements),
            Bounds::If(within) => {
                let address = self.redirect_out_of_bounds(row.address, within, Direction::Load, row.bytes());
                self.load_elements(flags, address, 0, scalar, elements)
            }
            Bounds::Each { all, .. } => {
                let (whole, parts, end) =
                    (self.b.create_block(), self.b.create_block(), self.b.create_block());
                let vectors = Self::in_vectors(scalar, elements);
                let halves = Self::in_halves(scalar, elements);
                let form = |w: &mut Self, repr: &Repr| match repr {
                    Repr::Chunks(chunks) if halves => chunks.clone(),
                    _ if vectors => w.chunks_of(repr, scalar, elements),
                    _ => w.each_of(repr, scalar, elements),
                };
                self.b.ins().brif(all, whole, &[], parts, &[]);
                self.b.seal_block(whole);
                self.b.seal_block(parts);
                self.b.switch_to_block(whole);
                let repr = self.load_elements(flags, row.address, 0, scalar, elements);
                let found = form(self, &repr);
                let found_types: Vec<_> = found.iter().map(|one| self.type_of(*one)).collect();
                for ty in found_types {
                    self.b.append_block_param(end, ty);
                }
                let args: Vec<_> = found.into_iter().map(Into::into).collect();
                self.b.ins().jump(end, &args);
                self.b.set_cold_block(parts);
                self.b.switch_to_block(parts);
                let at = self.row_at(row);
                self.each_of_row(row, Direction::Load, |w, address, place| {
                    let one = w.b.ins().load(clif(scalar), own(), address, 0);
                    w.b.ins().store(own(), one, place, at);
                });
                let repr = self.load_elements(own(), scratch, at, scalar, elements);
                let found = form(self, &repr);
                let args: Vec<_> = found.into_iter().map(Into::into).collect();
                self.b.ins().jump(end, &args);
                self.b.seal_block(end);
                self.b.switch_to_block(end);
                let all = self.b.block_params(end).to_vec();
                if vectors || halves { Repr::Chunks(all) } else { Repr::Each(all) }
            }
        }
    }

    fn load_each(&mut self, address: Ssa, scalar: Scalar, count: usize) -> Vec<Ssa> {
        let size = scalar.bytes() as i32;
        (0..count as i32).map(|i| self.b.ins().load(clif(scalar), own(), address, i * size)).collect()
    }

    fn flags(&self, elements: usize) -> MemFlagsData {
        if elements == 1 { own() } else { loose() }
    }

    fn store_row(&mut self, row: &Row, repr: &Repr) {
        let &Row { scalar, elements, .. } = row;
        let flags = self.flags(elements);
        match row.bounds {
            Bounds::In if row.count < elements => {
                let all = self.each_of(repr, scalar, elements);
                let some = Repr::Each(all[..row.count].to_vec());
                let size = scalar.bytes() as i32;
                for (i, one) in self.each_of(&some, scalar, row.count).into_iter().enumerate() {
                    self.b.ins().store(own(), one, row.address, i as i32 * size);
                }
            }
            Bounds::In => self.store_elements(flags, row.address, 0, scalar, repr, elements),
            Bounds::If(within) => {
                let address = self.redirect_out_of_bounds(row.address, within, Direction::Store, row.bytes());
                self.store_elements(flags, address, 0, scalar, repr, elements);
            }
            Bounds::Each { all, .. } => {
                let (whole, parts, end) =
                    (self.b.create_block(), self.b.create_block(), self.b.create_block());
                self.b.ins().brif(all, whole, &[], parts, &[]);
                self.b.seal_block(whole);
                self.b.seal_block(parts);
                self.b.switch_to_block(whole);
                self.store_elements(flags, row.address, 0, scalar, repr, elements);
                self.b.ins().jump(end, &[]);
                self.b.set_cold_block(parts);
                self.b.switch_to_block(parts);
                let (scratch, at) = (self.scratch, self.row_at(row));
                self.store_elements(own(), scratch, at, scalar, repr, elements);
                self.each_of_row(row, Direction::Store, |w, address, place| {
                    let one = w.b.ins().load(clif(scalar), own(), place, at);
                    w.b.ins().store(own(), one, address, 0);
                });
                self.b.ins().jump(end, &[]);
                self.b.seal_block(end);
                self.b.switch_to_block(end);
            }
        }
    }

    /// How vectorised threads access `lanes` elements each.
    fn pattern_of(&mut self, op: &Op, rank: usize, lanes: usize) -> Pattern {
        if self.width == 1 {
            return Pattern::Row;
        }
        let all: Vec<Repr> = op.operands[..rank].iter().map(|v| self.repr(*v)).collect();
        let lanes = self.kernel.by_bytes(op).map_or(lanes as u32, |ty| ty.bytes());
        let (last, outer) = (&all[rank - 1], &all[..rank - 1]);
        let uniform = outer.iter().all(|repr| matches!(repr, Repr::Splat(_)));
        let pixels = op.place.is_some_and(|place| self.kernel.surface(place).is_some());
        match last {
            Repr::Affine { stride, .. } if uniform && !pixels && *stride == i64::from(lanes) => Pattern::Row,
            Repr::Splat(_) if uniform => Pattern::Uniform,
            _ => Pattern::Scattered,
        }
    }

    /// Bytes from one thread's elements to the next one's, where the threads' indices go in steps and none is checked for itself.
    fn bytes_between(
        &mut self,
        op: &Op,
        rank: usize,
        place: Place,
        known: &Access,
        lanes: usize,
    ) -> Option<Between> {
        let mut steps = Vec::with_capacity(rank + 1);
        let pixels = self.kernel.surface(place).is_some();
        for (dimension, value) in op.operands[..rank].iter().enumerate() {
            let checked = match dimension + 1 == rank && !pixels {
                true => known.last.is_checked(),
                false => known.checks(dimension),
            };
            steps.push(match self.repr(*value) {
                // An index of a shared array is clamped for all of them at once.
                Repr::Splat(_) if !checked || lanes == 1 && matches!(place, Place::Shared(_)) => 0,
                Repr::Affine { stride, .. } if !checked => stride,
                _ => return None,
            });
        }
        steps.extend(pixels.then_some(0));
        let size = i64::from(self.kernel.place(place)?.1.bytes());
        match place {
            Place::Shared(array) => {
                let dims = &self.kernel.shared().get(usize::from(array))?.dims;
                let (mut fixed, mut pitch) = (0i64, size);
                for (step, extent) in steps.iter().zip(dims).rev() {
                    fixed = fixed.checked_add(step.checked_mul(pitch)?)?;
                    pitch = pitch.checked_mul(i64::from(*extent))?;
                }
                Between::of(fixed, None)
            }
            Place::View(number) => {
                let strides = self.views.get(usize::from(number))?.as_ref()?.strides.clone();
                let fixed = steps.last()?.checked_mul(size)?;
                let mut given: Option<Ssa> = None;
                for (step, stride) in steps.iter().zip(strides).filter(|(step, _)| **step != 0) {
                    let by = self.b.ins().imul_imm_s(stride, *step);
                    given = Some(match given {
                        None => by,
                        Some(sum) => self.b.ins().iadd(sum, by),
                    });
                }
                Between::of(fixed, given)
            }
            // Local arrays are parts of shared ones here.
            Place::Local(_) | Place::Channel(_) | Place::Fragment(_) => None,
        }
    }

    /// The address and offset of each thread's elements.
    fn addresses(&mut self, first: Ssa, between: Between) -> Vec<(Ssa, i32)> {
        let mut all = Vec::with_capacity(self.width);
        let mut address = first;
        for thread in 0..self.width as i32 {
            if let Some(by) = between.given.filter(|_| thread > 0) {
                address = self.b.ins().iadd(address, by);
            }
            all.push((address, thread * between.fixed));
        }
        all
    }

    /// The first thread's indices.
    fn first_indices(&mut self, op: &Op, rank: usize) -> Vec<Ssa> {
        op.operands[..rank].iter().map(|v| self.first(*v)).collect()
    }

    /// Each thread's indices.
    pub(super) fn each_indices(&mut self, op: &Op, rank: usize) -> Vec<Vec<Ssa>> {
        let all: Vec<Vec<Ssa>> = op.operands[..rank].iter().map(|v| self.each(*v)).collect();
        (0..self.width).map(|thread| all.iter().map(|index| index[thread]).collect()).collect()
    }

    pub(super) fn load(&mut self, op: &Op) {
        let (Some(place), Some(result)) = (op.place, op.result()) else { return };
        let (Some((rank, _)), scalar) = (self.kernel.place(place), self.scalar(result)) else { return };
        let elements = self.elements(result);
        let lanes = elements / self.width;
        let Some(mut known) = self.safety.access(op).cloned() else { return };
        if self.in_bounds {
            known = known.proven();
        }
        let pattern = self.pattern_of(op, rank, lanes);
        // Of a shared array's row, each thread's index is clamped for itself.
        let clamped = matches!(place, Place::Shared(_)) && known.last.is_checked();
        let repr = match pattern {
            Pattern::Row if self.width == 1 || !clamped => {
                let indices = self.first_indices(op, rank);
                let Some(row) = self.row(op, place, &known, &indices, (scalar, elements)) else { return };
                self.load_row(&row)
            }
            Pattern::Uniform => {
                let indices = self.first_indices(op, rank);
                let Some(row) = self.row(op, place, &known, &indices, (scalar, lanes)) else { return };
                let repr = self.load_row(&row);
                self.tiled(repr, result)
            }
            _ => {
                let vectors = Self::in_vectors(scalar, lanes);
                let mut all = Vec::with_capacity(elements);
                if let Some(between) = self.bytes_between(op, rank, place, &known, lanes) {
                    let indices = self.first_indices(op, rank);
                    let Some(row) = self.row(op, place, &known, &indices, (scalar, lanes)) else { return };
                    let flags = self.flags(lanes);
                    for (address, offset) in self.addresses(row.address, between) {
                        let repr = self.load_elements(flags, address, offset, scalar, lanes);
                        all.extend(match vectors {
                            true => self.chunks_of(&repr, scalar, lanes),
                            false => self.each_of(&repr, scalar, lanes),
                        });
                    }
                    self.set(result, if vectors { Repr::Chunks(all) } else { Repr::Each(all) });
                    return;
                }
                for indices in self.each_indices(op, rank) {
                    let Some(row) = self.row(op, place, &known, &indices, (scalar, lanes)) else { return };
                    let repr = self.load_row(&row);
                    all.extend(match vectors {
                        true => self.chunks_of(&repr, scalar, lanes),
                        false => self.each_of(&repr, scalar, lanes),
                    });
                }
                if vectors { Repr::Chunks(all) } else { Repr::Each(all) }
            }
        };
        self.set(result, repr);
    }

    pub(super) fn store(&mut self, op: &Op) {
        let (Some(place), Some(value)) = (op.place, op.operands.last().copied()) else { return };
        let (Some((rank, _)), scalar) = (self.kernel.place(place), self.scalar(value)) else { return };
        let elements = self.elements(value);
        let lanes = elements / self.width;
        let Some(known) = self.safety.access(op).cloned() else { return };
        let pattern = self.pattern_of(op, rank, lanes);
        let clamped = matches!(place, Place::Shared(_)) && known.last.is_checked();
        if matches!(pattern, Pattern::Row) && (self.width == 1 || !clamped) {
            let indices = self.first_indices(op, rank);
            let Some(row) = self.row(op, place, &known, &indices, (scalar, elements)) else { return };
            let repr = self.repr(value);
            self.store_row(&row, &repr);
            return;
        }
        let repr = self.repr(value);
        let vectors = Self::in_vectors(scalar, lanes);
        let all = match vectors {
            true => self.chunks_of(&repr, scalar, elements),
            false => self.each_of(&repr, scalar, elements),
        };
        let parts = all.chunks(all.len() / self.width);
        let as_repr =
            |part: &[Ssa]| if vectors { Repr::Chunks(part.to_vec()) } else { Repr::Each(part.to_vec()) };
        if let Some(between) = self.bytes_between(op, rank, place, &known, lanes).filter(|_| self.width > 1) {
            let indices = self.first_indices(op, rank);
            let Some(row) = self.row(op, place, &known, &indices, (scalar, lanes)) else { return };
            let flags = self.flags(lanes);
            for ((address, offset), part) in self.addresses(row.address, between).into_iter().zip(parts) {
                self.store_elements(flags, address, offset, scalar, &as_repr(part), lanes);
            }
            return;
        }
        for (indices, part) in self.each_indices(op, rank).into_iter().zip(parts) {
            let Some(row) = self.row(op, place, &known, &indices, (scalar, lanes)) else { return };
            self.store_row(&row, &as_repr(part));
        }
    }
}

/// Bytes from one thread's elements to the next one's.
#[derive(Clone, Copy)]
struct Between {
    fixed: i32,
    /// What is added to that, by strides that the launch gives.
    given: Option<Ssa>,
}

impl Between {
    /// The most bytes between two threads at which the offsets of a warp's rows fit into an `i32`.
    const MOST: i32 = i32::MAX / WARP as i32 - 2 * WIDEST_ROW as i32;

    /// Returns `None` if the offsets of a warp's rows may not fit.
    fn of(fixed: i64, given: Option<Ssa>) -> Option<Between> {
        let fixed = i32::try_from(fixed).ok()?;
        (fixed.unsigned_abs() < Between::MOST.unsigned_abs()).then_some(Between { fixed, given })
    }
}

/// How vectorised threads access memory.
#[derive(Clone, Copy)]
enum Pattern {
    /// One element behind the other.
    Row,
    /// All the same.
    Uniform,
    /// Each somewhere.
    Scattered,
}
