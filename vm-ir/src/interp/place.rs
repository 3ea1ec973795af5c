//! Loads, stores and atomics.

use super::error::RunErrorKind;
use super::exec::{Machine, Result};
use super::memory::Bytes;
use crate::format::signed;
use crate::limits::WARP;
use crate::module::{Op, Place, index_count};
use crate::op::{Opcode, Shape};
use crate::semantics::eval;
use crate::types::{Scalar, Type};
use crate::valid::Trust;

impl Machine<'_> {
    fn indices(&self, op: &Op, thread: u32) -> Vec<i64> {
        let count = index_count(self.kernel, op);
        let indices = op.operands[..count].iter().map(|v| signed(self.ty(*v).scalar(), self.get(*v, thread)));
        // A pixel begins at its first lane.
        let surface = op.place.and_then(|place| self.kernel.surface(place));
        indices.chain(surface.map(|_| 0)).collect()
    }

    /// The element that a lane of an access is at; `None` if the access is to be skipped.
    fn element(
        &mut self,
        place: Place,
        indices: &[i64],
        lane: u8,
        lanes: u8,
        thread: u32,
    ) -> Result<Option<usize>> {
        let trust = if self.kernel.surface(place).is_some() { Trust::Guest } else { self.trust };
        let element = self.memory(place, thread).and_then(|m| m.element(indices, lane, lanes, trust));
        match (element, trust) {
            (None, Trust::Trusted) => Err(RunErrorKind::OutOfBounds {
                place: self.kernel.place_name(place).to_owned(),
                indices: indices.to_vec(),
                thread: self.thread(thread),
            }),
            (element, _) => Ok(element.map(|e| e as usize)),
        }
    }

    /// The first byte of an access by bytes; `None` if it is to be skipped.
    fn bytes(&mut self, op: &Op, place: Place, size: u32, thread: u32) -> Result<Option<usize>> {
        let trust = self.trust;
        let indices = self.indices(op, thread);
        let index = indices.first().copied().unwrap_or(0);
        let memory = self.memory(place, thread);
        let found = memory.map_or(Bytes::Outside, |m| m.bytes(index, size.into(), trust));
        let name = |machine: &Self| machine.kernel.place_name(place).to_owned();
        match (found, trust) {
            (Bytes::At(first), _) => Ok(Some(first)),
            (_, Trust::Guest) => Ok(None),
            (Bytes::Outside, Trust::Trusted) => {
                Err(RunErrorKind::OutOfBounds { place: name(self), indices, thread: self.thread(thread) })
            }
            (Bytes::Misaligned, Trust::Trusted) => {
                Err(RunErrorKind::Misaligned { place: name(self), index, size, thread: self.thread(thread) })
            }
        }
    }

    /// Reads one lane, which lies from a byte on, byte by byte.
    fn read_bytes(
        &mut self,
        place: Place,
        first: usize,
        size: u32,
        thread: u32,
        atomic: bool,
    ) -> Result<u64> {
        let mut bits = 0;
        for byte in 0..size as usize {
            bits |= self.read(place, first + byte, thread, atomic)? << (8 * byte);
        }
        Ok(bits)
    }

    /// Writes one lane, byte by byte.
    fn write_bytes(
        &mut self,
        place: Place,
        first: usize,
        (size, bits): (u32, u64),
        thread: u32,
        atomic: bool,
    ) -> Result<()> {
        let bytes = bits.to_le_bytes().into_iter().take(size as usize);
        bytes
            .enumerate()
            .try_for_each(|(byte, bits)| self.write(place, first + byte, bits.into(), thread, atomic))
    }

    /// `load` and `store` by bytes.
    fn access_bytes(&mut self, op: &Op, place: Place, ty: Type, active: &[u32]) -> Result<()> {
        let size = ty.scalar().bytes();
        for &thread in active {
            let first = self.bytes(op, place, ty.bytes(), thread)?;
            let lanes =
                first.map(|first| (0..usize::from(ty.lanes())).map(move |lane| first + lane * size as usize));
            match (op.result(), op.operands.last().copied()) {
                (Some(result), _) => {
                    let mut bits = vec![0; usize::from(ty.lanes())];
                    for (slot, at) in bits.iter_mut().zip(lanes.into_iter().flatten()) {
                        *slot = self.read_bytes(place, at, size, thread, false)?;
                    }
                    self.set(result, thread, &bits);
                }
                (None, Some(value)) => {
                    let bits = self.lanes(value, thread).to_vec();
                    for (bits, at) in bits.into_iter().zip(lanes.into_iter().flatten()) {
                        self.write_bytes(place, at, (size, bits), thread, false)?;
                    }
                }
                (None, None) => {}
            }
        }
        Ok(())
    }

    pub(super) fn read(&mut self, place: Place, element: usize, thread: u32, atomic: bool) -> Result<u64> {
        let (stamp, races, trust) = (self.stamp(place, thread, atomic), self.limits.races, self.trust);
        let tile = self.kernel.tile.is_some();
        let Some(memory) = self.memory(place, thread) else { return Ok(0) };
        let (bits, kind) = (memory.tensor.bits(element), (memory.tensor.element, memory.shared));
        let uninitialised = memory.shared && trust == Trust::Trusted && !memory.shadow.written(element);
        let race = if races { memory.shadow.read(element, stamp) } else { None };
        let place = || self.kernel.place_name(place).to_owned();
        if uninitialised {
            let thread = self.thread(thread);
            return Err(RunErrorKind::Uninitialised { place: place(), element: element as u64, thread });
        }
        match race {
            None => Ok(bits),
            Some(other) => Err(RunErrorKind::Race {
                remedy: stamp.remedy(&other, kind, tile),
                place: place(),
                element: element as u64,
                first: super::error::Thread { block: other.block, thread: other.thread },
                second: self.thread(thread),
            }),
        }
    }

    pub(super) fn write(
        &mut self,
        place: Place,
        element: usize,
        bits: u64,
        thread: u32,
        atomic: bool,
    ) -> Result<()> {
        self.write_to(thread, place, element, bits, thread, atomic)
    }

    /// Writes to what another thread has, or its block.
    fn write_to(
        &mut self,
        owner: u32,
        place: Place,
        element: usize,
        bits: u64,
        thread: u32,
        atomic: bool,
    ) -> Result<()> {
        let (stamp, races) = (self.stamp(place, thread, atomic), self.limits.races);
        let tile = self.kernel.tile.is_some();
        let Some(memory) = self.memory(place, owner) else { return Ok(()) };
        memory.tensor.set_bits(element, bits);
        let kind = (memory.tensor.element, memory.shared);
        match memory.shadow.write(element, stamp) {
            Some(other) if races => Err(RunErrorKind::Race {
                remedy: stamp.remedy(&other, kind, tile),
                place: self.kernel.place_name(place).to_owned(),
                element: element as u64,
                first: super::error::Thread { block: other.block, thread: other.thread },
                second: self.thread(thread),
            }),
            _ => Ok(()),
        }
    }

    /// `load` and `store`. Of a vector that is partly out of bounds, the lanes within are read or written.
    pub(super) fn access(&mut self, op: &Op, active: &[u32]) -> Result<()> {
        let Some(place) = op.place else { return Ok(()) };
        let Some(value) = op.result().or(op.operands.last().copied()) else { return Ok(()) };
        if let Some(ty) = self.kernel.by_bytes(op) {
            return self.access_bytes(op, place, ty, active);
        }
        let lanes = self.ty(value).lanes();
        for &thread in active {
            let indices = self.indices(op, thread);
            let mut bits = self.lanes(value, thread).to_vec();
            for lane in 0..lanes {
                let element = self.element(place, &indices, lane, lanes, thread)?;
                let slot = &mut bits[usize::from(lane)];
                match (op.code.shape(), element) {
                    (Shape::Load, Some(element)) => *slot = self.read(place, element, thread, false)?,
                    (Shape::Load, None) => *slot = 0,
                    (_, Some(element)) => self.write(place, element, *slot, thread, false)?,
                    (_, None) => {}
                }
            }
            if let Some(result) = op.result() {
                self.set(result, thread, &bits);
            }
        }
        Ok(())
    }

    /// Barrier, one load for all, barrier.
    pub(super) fn load_uniform(&mut self, op: &Op, active: &[u32]) -> Result<()> {
        let (Some(place), Some(result), Some(first)) = (op.place, op.result(), active.first()) else {
            return Ok(());
        };
        self.block_barrier();
        let indices = self.indices(op, *first);
        let bits = match self.element(place, &indices, 0, 1, *first)? {
            Some(element) => self.read(place, element, *first, false)?,
            None => 0,
        };
        for thread in active {
            self.set(result, *thread, &[bits]);
        }
        self.block_barrier();
        Ok(())
    }

    /// What the first thread of each warp has, into the array of every block; then a barrier of the cluster.
    pub(super) fn gather(&mut self, op: &Op, active: &[u32]) -> Result<()> {
        let (Some(place), Some(value)) = (op.place, op.operands.first()) else { return Ok(()) };
        for thread in active.iter().copied().filter(|thread| thread.is_multiple_of(WARP)) {
            let lanes = self.lanes(*value, thread).to_vec();
            let first = (thread / WARP) as usize * lanes.len();
            for rank in 0..self.kernel.cluster() {
                for (lane, bits) in lanes.iter().enumerate() {
                    self.write_to(rank * self.kernel.threads(), place, first + lane, *bits, thread, false)?;
                }
            }
        }
        self.cluster_barrier();
        Ok(())
    }

    /// One thread after the other. A guest's atomic out of bounds does nothing and gives 0.
    pub(super) fn atomic(&mut self, op: &Op, active: &[u32]) -> Result<()> {
        let Some(place) = op.place else { return Ok(()) };
        let by_bytes = self.kernel.by_bytes(op).map(Type::scalar);
        let element = self.kernel.place(place).map_or(Scalar::I32, |(_, element)| element);
        let scalar = by_bytes.unwrap_or(element);
        let skip = index_count(self.kernel, op);
        for &thread in active {
            let found = match by_bytes {
                Some(scalar) => self.bytes(op, place, scalar.bytes(), thread)?,
                None => self.element(place, &self.indices(op, thread), 0, 1, thread)?,
            };
            let mut old = 0;
            if let Some(at) = found {
                let args: Vec<u64> = op.operands[skip..].iter().map(|v| self.get(*v, thread)).collect();
                if op.code != Opcode::AtomicStore {
                    old = match by_bytes {
                        Some(scalar) => self.read_bytes(place, at, scalar.bytes(), thread, true)?,
                        None => self.read(place, at, thread, true)?,
                    };
                }
                let new = match op.code {
                    Opcode::AtomicLoad => None,
                    Opcode::AtomicStore | Opcode::AtomicExchange => Some(args[0]),
                    Opcode::AtomicCas => (old == args[0]).then_some(args[1]),
                    code => code.combines().and_then(|code| eval(code, scalar, scalar, &[old, args[0]])),
                };
                match (new, by_bytes) {
                    (Some(new), Some(scalar)) => {
                        self.write_bytes(place, at, (scalar.bytes(), new), thread, true)?;
                    }
                    (Some(new), None) => self.write(place, at, new, thread, true)?,
                    (None, _) => {}
                }
            }
            if let Some(result) = op.result() {
                self.set(result, thread, &[old]);
            }
        }
        Ok(())
    }
}
