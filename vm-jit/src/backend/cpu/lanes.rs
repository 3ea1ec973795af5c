//! Values as the machine has them: one number for all elements, a number for each, or vectors of 16 bytes.
//!
//! A value of the IR stands for some elements: the lanes of a vector, or, where neighbouring threads are run together,
//! an element for each of them. An op on elements does not ask which of the two it is.

use super::isa::Architecture;
use super::plan::{Level, Room};
use super::writer::Writer;
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{InstBuilder, MemFlagsData, Type, Value as Ssa, types};
use vm_ir::{Scalar, Value};

/// Bytes of a vector of the machine.
pub(super) const VECTOR: usize = 16;

/// The elements of a value. Of bools, a number is 0 or 1 in a byte, and a vector is a mask.
#[derive(Clone, Debug)]
pub(super) enum Repr {
    /// The same in every element.
    Splat(Ssa),
    /// `base`, and `stride` more in each element than in the one before; integers only. No element overflows, and all
    /// are from `low` to `high`.
    Affine { base: Ssa, stride: i64, low: i64, high: i64 },
    /// One by one.
    Each(Vec<Ssa>),
    /// In vectors.
    Chunks(Vec<Ssa>),
}

/// How an element lies in a register.
pub(super) fn clif(scalar: Scalar) -> Type {
    match scalar {
        Scalar::F32 | Scalar::Tf32 => types::F32,
        Scalar::F64 => types::F64,
        _ => match scalar.bytes() {
            1 => types::I8,
            2 => types::I16,
            4 => types::I32,
            _ => types::I64,
        },
    }
}

/// The vector type of elements that go in vectors.
pub(super) fn vector(scalar: Scalar) -> Option<Type> {
    Some(match scalar {
        Scalar::I32 => types::I32X4,
        Scalar::I64 => types::I64X2,
        Scalar::F32 => types::F32X4,
        Scalar::F64 => types::F64X2,
        _ => return None,
    })
}

/// The vector type of the integers as wide as the type's.
pub(super) fn mask_type(bytes: u32) -> Type {
    if bytes == 8 { types::I64X2 } else { types::I32X4 }
}

/// Memory that is surely there and aligned to its elements.
pub(super) fn own() -> MemFlagsData {
    MemFlagsData::trusted()
}

/// Memory that is surely there.
pub(super) fn loose() -> MemFlagsData {
    MemFlagsData::new().with_notrap()
}

impl Writer<'_, '_> {
    /// How many elements a value has here.
    pub(super) fn elements(&self, value: Value) -> usize {
        usize::from(self.kernel.type_of(value).lanes()) * self.width
    }

    pub(super) fn scalar(&self, value: Value) -> Scalar {
        self.kernel.type_of(value).scalar()
    }

    /// Does this number of elements of the scalar go in vectors?
    pub(super) fn in_vectors(scalar: Scalar, elements: usize) -> bool {
        vector(scalar).is_some() && elements * scalar.bytes() as usize >= VECTOR
    }

    /// May they be vectors of elements of two bytes? Those are loaded, stored, widened and narrowed only; what else is done with them is
    /// done one by one.
    pub(super) fn in_halves(scalar: Scalar, elements: usize) -> bool {
        scalar.bytes() == 2 && elements.is_multiple_of(8)
    }

    /// The value as it is at hand, or from memory.
    pub(super) fn repr(&mut self, value: Value) -> Repr {
        let level = self.plan.scopes[self.scope].level;
        if level == Level::Thread || self.plan.visible(value, self.scope) {
            let repr = self.env[value.index()].clone().unwrap_or_else(|| Repr::Each(Vec::new()));
            return self.tiled(repr, value);
        }
        self.load_slot(value)
    }

    /// Defines a value here, and puts it into memory if others want it from there.
    pub(super) fn set(&mut self, value: Value, repr: Repr) {
        let repr = match repr {
            Repr::Each(one) if one.len() == 1 => Repr::Splat(one[0]),
            // It may be uniform in a warp.
            other => self.tiled(other, value),
        };
        if self.plan.slots[value.index()].is_some() && self.plan.visible(value, self.scope) {
            self.store_slot(value, &repr);
        }
        self.env[value.index()] = Some(repr);
    }

    /// Where a value is kept for the thread, the warp or the block at hand: its address and an offset.
    fn slot(&mut self, value: Value) -> Option<(Ssa, i32, Room)> {
        let slot = self.plan.slots[value.index()]?;
        let size = i64::from(super::plan::bytes_of(self.kernel, value));
        let index = match slot.room {
            Room::Block => None,
            Room::Warp => self.warp_index(),
            Room::Thread => self.thread_index(),
        };
        let base = match index {
            None => self.scratch,
            Some(index) => {
                let at = self.b.ins().imul_imm_s(index, size);
                self.b.ins().iadd(self.scratch, at)
            }
        };
        Some((base, slot.offset, slot.room))
    }

    pub(super) fn store_slot(&mut self, value: Value, repr: &Repr) {
        let Some((base, offset, room)) = self.slot(value) else { return };
        let scalar = self.scalar(value);
        let lanes = usize::from(self.kernel.type_of(value).lanes());
        match room {
            // Where threads are run together, all of them have the same.
            Room::Block | Room::Warp if self.width > 1 => {
                let elements = self.elements(value);
                let first = self.each_of(repr, scalar, elements)[..lanes].to_vec();
                self.store_elements(own(), base, offset, scalar, &Repr::Each(first), lanes);
            }
            Room::Block | Room::Warp => self.store_elements(own(), base, offset, scalar, repr, lanes),
            Room::Thread => {
                let elements = self.elements(value);
                self.store_elements(own(), base, offset, scalar, repr, elements);
            }
        }
    }

    pub(super) fn load_slot(&mut self, value: Value) -> Repr {
        let Some((base, offset, room)) = self.slot(value) else { return Repr::Each(Vec::new()) };
        let scalar = self.scalar(value);
        match room {
            Room::Block | Room::Warp => {
                let lanes = usize::from(self.kernel.type_of(value).lanes());
                let repr = self.load_elements(own(), base, offset, scalar, lanes);
                self.tiled(repr, value)
            }
            Room::Thread => {
                let elements = self.elements(value);
                self.load_elements(own(), base, offset, scalar, elements)
            }
        }
    }

    /// Elements that lie behind one another in memory.
    pub(super) fn load_elements(
        &mut self,
        flags: MemFlagsData,
        base: Ssa,
        offset: i32,
        scalar: Scalar,
        elements: usize,
    ) -> Repr {
        let size = scalar.bytes() as i32;
        if let Some(ty) = vector(scalar).filter(|_| Self::in_vectors(scalar, elements)) {
            let flags = loose_of(flags);
            let count = elements * size as usize / VECTOR;
            let all =
                (0..count as i32).map(|i| self.b.ins().load(ty, flags, base, offset + i * VECTOR as i32));
            return Repr::Chunks(all.collect());
        }
        if Self::in_halves(scalar, elements) {
            let flags = loose_of(flags);
            let offsets = (0..elements as i32 / 8).map(|i| offset + i * VECTOR as i32);
            let all = offsets.map(|at| self.b.ins().load(types::I16X8, flags, base, at));
            return Repr::Chunks(all.collect());
        }
        let ty = clif(scalar);
        let all: Vec<Ssa> =
            (0..elements as i32).map(|i| self.b.ins().load(ty, flags, base, offset + i * size)).collect();
        if all.len() == 1 { Repr::Splat(all[0]) } else { Repr::Each(all) }
    }

    pub(super) fn store_elements(
        &mut self,
        flags: MemFlagsData,
        base: Ssa,
        offset: i32,
        scalar: Scalar,
        repr: &Repr,
        elements: usize,
    ) {
        if Self::in_vectors(scalar, elements) {
            let flags = loose_of(flags);
            for (i, chunk) in self.chunks_of(repr, scalar, elements).into_iter().enumerate() {
                self.b.ins().store(flags, chunk, base, offset + (i * VECTOR) as i32);
            }
            return;
        }
        if let Repr::Chunks(chunks) = repr
            && Self::in_halves(scalar, elements)
        {
            for (i, chunk) in chunks.iter().enumerate() {
                self.b.ins().store(loose_of(flags), *chunk, base, offset + (i * VECTOR) as i32);
            }
            return;
        }
        for (i, one) in self.each_of(repr, scalar, elements).into_iter().enumerate() {
            self.b.ins().store(flags, one, base, offset + i as i32 * scalar.bytes() as i32);
        }
    }

    /// Its elements one by one.
    pub(super) fn each(&mut self, value: Value) -> Vec<Ssa> {
        let repr = self.repr(value);
        let (scalar, elements) = (self.scalar(value), self.elements(value));
        self.each_of(&repr, scalar, elements)
    }

    /// Its first element: all there is to know of a number that is uniform.
    pub(super) fn first(&mut self, value: Value) -> Ssa {
        match self.repr(value) {
            Repr::Splat(one) => one,
            Repr::Affine { base, .. } => base,
            other => {
                let (scalar, elements) = (self.scalar(value), self.elements(value));
                self.each_of(&other, scalar, elements)[0]
            }
        }
    }

    pub(super) fn each_of(&mut self, repr: &Repr, scalar: Scalar, elements: usize) -> Vec<Ssa> {
        match repr {
            Repr::Splat(one) => vec![*one; elements],
            Repr::Each(all) => all.clone(),
            Repr::Affine { base, stride, .. } => (0..elements as i64)
                .map(|i| if i == 0 { *base } else { self.b.ins().iadd_imm_s(*base, i * stride) })
                .collect(),
            Repr::Chunks(chunks) => {
                let mut all = Vec::with_capacity(elements);
                for chunk in chunks {
                    let lanes = self.b.func.dfg.value_type(*chunk).lane_count() as u8;
                    for lane in 0..lanes {
                        let one = self.b.ins().extractlane(*chunk, lane);
                        all.push(match scalar {
                            Scalar::Bool => self.b.ins().icmp_imm_s(IntCC::NotEqual, one, 0),
                            _ => one,
                        });
                    }
                }
                all
            }
        }
    }

    /// A vector of these, lane 0 first.
    pub(super) fn gather(&mut self, ty: Type, all: &[Ssa]) -> Ssa {
        if all.iter().all(|one| *one == all[0]) {
            return self.b.ins().splat(ty, all[0]);
        }
        let mut vector = self.b.ins().scalar_to_vector(ty, all[0]);
        for (lane, one) in all.iter().enumerate().skip(1) {
            vector = self.b.ins().insertlane(vector, *one, lane as u8);
        }
        vector
    }

    /// Its elements in vectors; of a scalar that goes in vectors.
    pub(super) fn chunks_of(&mut self, repr: &Repr, scalar: Scalar, elements: usize) -> Vec<Ssa> {
        let Some(ty) = vector(scalar) else { return Vec::new() };
        let per = VECTOR / scalar.bytes() as usize;
        match repr {
            Repr::Chunks(chunks) => chunks.clone(),
            Repr::Splat(one) => {
                let chunk = self.b.ins().splat(ty, *one);
                vec![chunk; elements / per]
            }
            Repr::Each(all) => all.chunks(per).map(|some| self.gather(ty, some)).collect(),
            Repr::Affine { base, stride, .. } => (0..elements / per)
                .map(|i| {
                    let all = self.b.ins().splat(ty, *base);
                    let bytes: Vec<u8> = (0..per)
                        .flat_map(|lane| {
                            let by = (i * per + lane) as i64 * stride;
                            by.to_le_bytes().into_iter().take(scalar.bytes() as usize)
                        })
                        .collect();
                    let data = self.b.func.dfg.constants.insert(bytes.into());
                    let steps = self.b.ins().vconst(ty, data);
                    self.b.ins().iadd(all, steps)
                })
                .collect(),
        }
    }

    /// Bools as masks of `bytes` bytes.
    pub(super) fn masks_of(&mut self, repr: &Repr, bytes: u32, elements: usize) -> Vec<Ssa> {
        let ty = mask_type(bytes);
        let per = VECTOR / bytes as usize;
        match repr {
            Repr::Chunks(chunks) if self.b.func.dfg.value_type(chunks[0]) == ty => chunks.clone(),
            Repr::Chunks(chunks) if bytes == 8 => {
                let mut all = Vec::new();
                for chunk in chunks {
                    all.push(self.b.ins().swiden_low(*chunk));
                    all.push(self.b.ins().swiden_high(*chunk));
                }
                all
            }
            Repr::Chunks(chunks) => chunks.chunks(2).map(|pair| self.low_halves(pair[0], pair[1])).collect(),
            _ => {
                let all = self.each_of(repr, Scalar::Bool, elements);
                let lane = ty.lane_type();
                let mut known: Option<(Ssa, Ssa)> = None;
                let wide: Vec<Ssa> = all
                    .into_iter()
                    .map(|one| match known {
                        Some((from, to)) if from == one => to,
                        _ => {
                            let wide = self.b.ins().uextend(lane, one);
                            let mask = self.b.ins().ineg(wide);
                            known = Some((one, mask));
                            mask
                        }
                    })
                    .collect();
                wide.chunks(per).map(|some| self.gather(ty, some)).collect()
            }
        }
    }

    /// Is the mask set in any lane?
    pub(super) fn any_lane(&mut self, mask: Ssa) -> Ssa {
        match self.architecture {
            Architecture::X86_64 => {
                let signs = self.signs(mask);
                self.b.ins().icmp_imm_s(IntCC::NotEqual, signs, 0)
            }
            Architecture::Aarch64 => self.b.ins().vany_true(mask),
        }
    }

    /// Is the mask set in all lanes?
    pub(super) fn all_lanes(&mut self, mask: Ssa) -> Ssa {
        match self.architecture {
            Architecture::X86_64 => {
                let lanes = self.type_of(mask).lane_count();
                let signs = self.signs(mask);
                self.b.ins().icmp_imm_s(IntCC::Equal, signs, (1 << lanes) - 1)
            }
            Architecture::Aarch64 => self.b.ins().vall_true(mask),
        }
    }

    /// The top bits of the lanes: an instruction of x86.
    fn signs(&mut self, mask: Ssa) -> Ssa {
        self.b.ins().vhigh_bits(types::I32, mask)
    }

    /// The low halves of the 64-bit lanes of two vectors.
    pub(super) fn low_halves(&mut self, a: Ssa, b: Ssa) -> Ssa {
        let bytes = |v: Ssa, this: &mut Self| {
            let flags = MemFlagsData::new().with_endianness(cranelift_codegen::ir::Endianness::Little);
            this.b.ins().bitcast(types::I8X16, flags, v)
        };
        let (a, b) = (bytes(a, self), bytes(b, self));
        let picks: Vec<u8> = [0u8, 8, 16, 24].into_iter().flat_map(|at| at..at + 4).collect();
        let mask = self.b.func.dfg.immediates.push(picks.into());
        let packed = self.b.ins().shuffle(a, b, mask);
        let flags = MemFlagsData::new().with_endianness(cranelift_codegen::ir::Endianness::Little);
        self.b.ins().bitcast(types::I32X4, flags, packed)
    }

    /// The types by which a value goes through a join of control flow.
    pub(super) fn joined_types(&self, value: Value) -> Vec<Type> {
        let (scalar, elements) = (self.scalar(value), self.elements(value));
        if self.one_for_all(value) {
            return vec![clif(scalar)];
        }
        if scalar == Scalar::Bool && self.width > 1 {
            return vec![types::I32X4; elements / 4];
        }
        match vector(scalar) {
            Some(ty) if Self::in_vectors(scalar, elements) => {
                vec![ty; elements * scalar.bytes() as usize / VECTOR]
            }
            _ => vec![clif(scalar); elements],
        }
    }

    /// Is it one number for the threads that are run together?
    fn one_for_all(&self, value: Value) -> bool {
        self.elements(value) == 1
            || self.width > 1
                && !self.kernel.type_of(value).is_vector()
                && self.facts.uniformity(value) != vm_ir::valid::Uniformity::Thread
    }

    /// `repr` in the form of [`Writer::joined_types`] of `value`.
    pub(super) fn flatten(&mut self, repr: &Repr, value: Value) -> Vec<Ssa> {
        let (scalar, elements) = (self.scalar(value), self.elements(value));
        if self.one_for_all(value) {
            return match repr {
                Repr::Splat(one) => vec![*one],
                other => vec![self.each_of(other, scalar, elements)[0]],
            };
        }
        if scalar == Scalar::Bool && self.width > 1 {
            return self.masks_of(repr, 4, elements);
        }
        if Self::in_vectors(scalar, elements) {
            return self.chunks_of(repr, scalar, elements);
        }
        self.each_of(repr, scalar, elements)
    }

    /// The other way round.
    pub(super) fn unflatten(&mut self, parts: &[Ssa], value: Value) -> Repr {
        let (scalar, elements) = (self.scalar(value), self.elements(value));
        if self.one_for_all(value) {
            return Repr::Splat(parts[0]);
        }
        let masks = scalar == Scalar::Bool && self.width > 1;
        if masks || Self::in_vectors(scalar, elements) {
            return Repr::Chunks(parts.to_vec());
        }
        Repr::Each(parts.to_vec())
    }
}

fn loose_of(flags: MemFlagsData) -> MemFlagsData {
    if flags == own() { loose() } else { flags }
}

/// Bytes of all values of all threads of a block, or of a cluster.
pub(super) fn bytes_of_kernel(kernel: &vm_ir::Kernel) -> u64 {
    let one = kernel.values().iter().fold(0u64, |sum, v| sum + u64::from(v.ty.bytes().max(16)));
    one.saturating_mul(u64::from(kernel.cluster_threads()))
}
