//! The worker's side of copies between the host and the device, by way of two halves of pinned memory.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use bytemuck::Pod;

use super::buffer::View;
use super::checked::Checker;
use super::session::{EventOf, Session};
use crate::accelerator::{Accelerator, Queue};
use crate::error::{Error, Result};
use crate::memory::{Memory, MemoryKind, Region};

/// Bytes of each of the two pinned buffers that reads and writes go through.
pub(super) const STAGING_BYTES: u64 = 4 << 20;

pub(super) struct Staging<A: Accelerator> {
    halves: [(Memory, EventOf<A>); 2],
    next: Cell<usize>,
}

/// What a session's copies between the host and the device go through, once there was one.
pub(super) struct Transfers<A: Accelerator> {
    staging: RefCell<Option<Rc<Staging<A>>>>,
    pub(super) checker: RefCell<Option<Rc<Checker<A>>>>,
}

impl<A: Accelerator> Default for Transfers<A> {
    fn default() -> Self {
        Self { staging: RefCell::new(None), checker: RefCell::new(None) }
    }
}

impl<A: Accelerator> Session<A> {
    /// Copies host values into a view of the same length. They are the caller's again when this returns.
    ///
    /// # Errors
    /// [`Error::Lengths`], [`Error::Deadline`], [`Error::Capturing`], [`Error::Corrupted`]; the device's.
    pub fn write<'a, T: Pod>(&self, target: impl Into<View<'a, A>>, values: &[T]) -> Result<()> {
        let target = self.region(target.into())?;
        self.write_region(target, bytemuck::cast_slice(values))
    }

    pub(super) fn write_region(&self, target: Region<'_>, bytes: &[u8]) -> Result<()> {
        self.not_capturing("a write from the host")?;
        if target.bytes() != bytes.len() as u64 {
            return Err(Error::Lengths {
                source_bytes: bytes.len() as u64,
                destination_bytes: target.bytes(),
            });
        }
        if target.kind().host_visible() {
            self.wait(self.timeout())?;
            return target.write_host(bytes);
        }
        if let Some(checker) = self.checker() {
            return self.write_checked(&checker, target, bytes);
        }
        let staging = self.staging()?;
        for (index, chunk) in bytes.chunks(STAGING_BYTES as usize).enumerate() {
            let (memory, event) = staging.take();
            self.note(self.queue().wait(event, self.timeout()))?;
            let half = memory.region().slice(0, chunk.len() as u64)?;
            half.write_host(chunk)?;
            let part = target.slice(index as u64 * STAGING_BYTES, chunk.len() as u64)?;
            self.copy_region(part, half)?;
            self.note(self.queue().record(event))?;
        }
        Ok(())
    }

    /// Copies a view into host values of the same length, after the work so far. A session of the caller's own reports what an
    /// earlier launch failed with, too.
    ///
    /// # Errors
    /// [`Error::Lengths`], [`Error::Deadline`], [`Error::Capturing`], [`Error::Corrupted`]; the device's.
    pub fn read<'a, T: Pod>(&self, source: impl Into<View<'a, A>>, values: &mut [T]) -> Result<()> {
        let source = self.region(source.into())?;
        self.read_region(source, bytemuck::cast_slice_mut(values))?;
        if self.shared.threaded { Ok(()) } else { self.shared.take_deferred() }
    }

    pub(super) fn read_region(&self, source: Region<'_>, bytes: &mut [u8]) -> Result<()> {
        self.not_capturing("a read by the host")?;
        if source.bytes() != bytes.len() as u64 {
            return Err(Error::Lengths {
                source_bytes: source.bytes(),
                destination_bytes: bytes.len() as u64,
            });
        }
        if source.kind().host_visible() {
            self.wait(self.timeout())?;
            return source.read_host(bytes);
        }
        if let Some(checker) = self.checker() {
            return self.read_checked(&checker, source, bytes);
        }
        // While one half is being read out, the device fills the other.
        let staging = self.staging()?;
        let mut filled: Option<(&Memory, &EventOf<A>, &mut [u8])> = None;
        for (index, chunk) in bytes.chunks_mut(STAGING_BYTES as usize).enumerate() {
            let (memory, event) = staging.take();
            self.note(self.queue().wait(event, self.timeout()))?;
            let half = memory.region().slice(0, chunk.len() as u64)?;
            let part = source.slice(index as u64 * STAGING_BYTES, chunk.len() as u64)?;
            self.copy_region(half, part)?;
            self.note(self.queue().record(event))?;
            if let Some(before) = filled.replace((memory, event, chunk)) {
                self.read_out(before)?;
            }
        }
        filled.map_or(Ok(()), |last| self.read_out(last))
    }

    fn read_out(&self, (memory, event, chunk): (&Memory, &EventOf<A>, &mut [u8])) -> Result<()> {
        self.note(self.queue().wait(event, self.timeout()))?;
        memory.region().slice(0, chunk.len() as u64)?.read_host(chunk)
    }

    pub(super) fn staging(&self) -> Result<Rc<Staging<A>>> {
        if let Some(staging) = self.transfers.staging.borrow().as_ref() {
            return Ok(Rc::clone(staging));
        }
        let half = || -> Result<(Memory, EventOf<A>)> {
            let event = self.queue().event(false)?;
            Ok((self.queue().allocate(MemoryKind::Pinned, STAGING_BYTES)?, event))
        };
        let staging =
            Rc::new(Staging { halves: [self.note(half())?, self.note(half())?], next: Cell::new(0) });
        *self.transfers.staging.borrow_mut() = Some(Rc::clone(&staging));
        Ok(staging)
    }
}

impl<A: Accelerator> Staging<A> {
    /// Both halves, for who waits for what he does with them.
    pub(super) fn halves(&self) -> [Region<'static>; 2] {
        [&self.halves[0], &self.halves[1]].map(|(memory, _)| memory.detached())
    }

    /// The half that was used longest ago.
    fn take(&self) -> (&Memory, &EventOf<A>) {
        let index = self.next.replace(self.next.get() ^ 1);
        let (memory, event) = &self.halves[index];
        (memory, event)
    }
}
