//! Loads, stores and atomics.

use super::error::RunErrorKind;
use super::exec::{Machine, Result};
use crate::format::signed;
use crate::limits::WARP;
use crate::module::{Op, Place, index_count};
use crate::op::{Opcode, Shape};
use crate::semantics::eval;
use crate::types::Scalar;
use crate::valid::Trust;

impl Machine<'_> {
    fn indices(&self, op: &Op, thread: u32) -> Vec<i64> {
        let count = index_count(self.kernel, op);
        op.operands[..count].iter().map(|v| signed(self.ty(*v).scalar(), self.get(*v, thread))).collect()
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
        let trust = self.trust;
        let rank = self.rank(thread);
        let element = self.memory(place, rank).and_then(|m| m.element(indices, lane, lanes, trust));
        match (element, trust) {
            (None, Trust::Trusted) => Err(RunErrorKind::OutOfBounds {
                place: self.kernel.place_name(place).to_owned(),
                indices: indices.to_vec(),
                thread: self.thread(thread),
            }),
            (element, _) => Ok(element.map(|e| e as usize)),
        }
    }

    pub(super) fn read(&mut self, place: Place, element: usize, thread: u32, atomic: bool) -> Result<u64> {
        let (stamp, races, trust) = (self.stamp(place, thread, atomic), self.limits.races, self.trust);
        let (rank, tile) = (self.rank(thread), self.kernel.tile.is_some());
        let Some(memory) = self.memory(place, rank) else { return Ok(0) };
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
        self.write_to(self.rank(thread), place, element, bits, thread, atomic)
    }

    /// Writes in the block with this number in the cluster.
    fn write_to(
        &mut self,
        rank: u32,
        place: Place,
        element: usize,
        bits: u64,
        thread: u32,
        atomic: bool,
    ) -> Result<()> {
        let (stamp, races) = (self.stamp(place, thread, atomic), self.limits.races);
        let tile = self.kernel.tile.is_some();
        let Some(memory) = self.memory(place, rank) else { return Ok(()) };
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
                    self.write_to(rank, place, first + lane, *bits, thread, false)?;
                }
            }
        }
        self.cluster_barrier();
        Ok(())
    }

    /// One thread after the other. A guest's atomic out of bounds does nothing and gives 0.
    pub(super) fn atomic(&mut self, op: &Op, active: &[u32]) -> Result<()> {
        let Some(place) = op.place else { return Ok(()) };
        let scalar = self.kernel.place(place).map_or(Scalar::I32, |(_, element)| element);
        let skip = index_count(self.kernel, op);
        for &thread in active {
            let indices = self.indices(op, thread);
            let mut old = 0;
            if let Some(element) = self.element(place, &indices, 0, 1, thread)? {
                let args: Vec<u64> = op.operands[skip..].iter().map(|v| self.get(*v, thread)).collect();
                if op.code != Opcode::AtomicStore {
                    old = self.read(place, element, thread, true)?;
                }
                let new = match op.code {
                    Opcode::AtomicLoad => None,
                    Opcode::AtomicStore | Opcode::AtomicExchange => Some(args[0]),
                    Opcode::AtomicCas => (old == args[0]).then_some(args[1]),
                    code => code.combines().and_then(|code| eval(code, scalar, scalar, &[old, args[0]])),
                };
                if let Some(new) = new {
                    self.write(place, element, new, thread, true)?;
                }
            }
            if let Some(result) = op.result() {
                self.set(result, thread, &[old]);
            }
        }
        Ok(())
    }
}
