//! The driver's side of a split virtqueue (section 2.7), whose every request takes two descriptors: a batch that the
//! device reads, and room for the reply that it writes.

use core::sync::atomic::{AtomicBool, Ordering};

use crate::error::Error;
use crate::frame::Frame;
use crate::sys::{Shared, barrier};

/// The most batches that can be under way.
pub const OUTSTANDING: usize = 32;

/// Entries of the queue: two for each batch.
pub(crate) const SIZE: u16 = 2 * OUTSTANDING as u16;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// The driver does not want interrupts.
const NO_INTERRUPT: u16 = 1;
/// The device does not want notifications.
const NO_NOTIFY: u16 = 1;

const TABLE: usize = 0;
const AVAILABLE: usize = 2048;
const USED: usize = 3072;
const BYTES: usize = 4096;

/// Memory for a queue: one page that the device reaches. It is meant to be a `static`.
pub struct QueueMemory {
    rings: Shared<BYTES>,
    taken: AtomicBool,
}

impl QueueMemory {
    /// Memory that no queue uses.
    pub const fn new() -> Self {
        Self { rings: Shared::new(), taken: AtomicBool::new(false) }
    }
}

impl Default for QueueMemory {
    fn default() -> Self {
        Self::new()
    }
}

/// A queue, and the frames that are under way.
pub(crate) struct Queue {
    memory: &'static QueueMemory,
    frames: [Option<Frame>; OUTSTANDING],
    next_available: u16,
    next_used: u16,
}

impl Queue {
    /// A queue in memory that no other uses.
    pub(crate) fn new(memory: &'static QueueMemory, interrupts: bool) -> Result<Self, Error> {
        if memory.taken.swap(true, Ordering::AcqRel) {
            return Err(Error::QueueInUse);
        }
        memory.rings.clear();
        if !interrupts {
            memory.rings.write16(AVAILABLE, NO_INTERRUPT);
        }
        Ok(Self { memory, frames: [const { None }; OUTSTANDING], next_available: 0, next_used: 0 })
    }

    /// Where table, available ring and used ring lie.
    pub(crate) fn addresses(&self, physical: u64) -> [u64; 3] {
        [TABLE, AVAILABLE, USED].map(|offset| physical + offset as u64)
    }

    pub(crate) fn address(&self) -> (*const u8, usize) {
        (self.memory.rings.address(), BYTES)
    }

    /// Offers a frame whose parts have these physical addresses and lengths.
    pub(crate) fn offer(
        &mut self,
        frame: Frame,
        request: (u64, u32),
        reply: (u64, u32),
    ) -> Result<u16, (Error, Frame)> {
        let Some(slot) = self.frames.iter().position(Option::is_none) else {
            return Err((Error::QueueFull, frame));
        };
        let head = 2 * slot as u16;
        let rings = &self.memory.rings;
        for (index, (address, len), flags, next) in
            [(head, request, NEXT, head + 1), (head + 1, reply, WRITE, 0)]
        {
            let at = TABLE + 16 * usize::from(index);
            rings.write64(at, address);
            rings.write32(at + 8, len);
            rings.write16(at + 12, flags);
            rings.write16(at + 14, next);
        }
        self.frames[slot] = Some(frame);
        rings.write16(AVAILABLE + 4 + 2 * usize::from(self.next_available % SIZE), head);
        self.next_available = self.next_available.wrapping_add(1);
        // The device sees the descriptors before the index.
        barrier();
        rings.write16(AVAILABLE + 2, self.next_available);
        barrier();
        Ok(slot as u16)
    }

    /// Whether the device wants to be notified of what was offered.
    pub(crate) fn wants_notification(&self) -> bool {
        self.memory.rings.read16(USED) & NO_NOTIFY == 0
    }

    /// Takes one used frame: its slot, and how many bytes the device wrote.
    pub(crate) fn used(&mut self) -> Result<Option<(u16, Frame, u32)>, Error> {
        let rings = &self.memory.rings;
        if rings.read16(USED + 2) == self.next_used {
            return Ok(None);
        }
        // The ring's entry is read after the index.
        barrier();
        let at = USED + 4 + 8 * usize::from(self.next_used % SIZE);
        let (head, written) = (rings.read32(at), rings.read32(at + 4));
        self.next_used = self.next_used.wrapping_add(1);
        let slot = head as usize / 2;
        match self.frames.get_mut(slot).and_then(Option::take) {
            Some(frame) if head.is_multiple_of(2) => Ok(Some((slot as u16, frame, written))),
            _ => Err(Error::Transport("it used a buffer that it was not given")),
        }
    }

    /// Frames that are under way.
    pub(crate) fn outstanding(&self) -> usize {
        self.frames.iter().flatten().count()
    }

    /// Gives the memory back, once the device was reset and touches it no more.
    pub(crate) fn release(&mut self) {
        self.memory.taken.store(false, Ordering::Release);
    }

    /// Takes a frame back from a device that was reset.
    pub(crate) fn take_back(&mut self) -> Option<Frame> {
        self.frames.iter_mut().find_map(Option::take)
    }
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;
    use std::vec;

    use super::*;

    fn frame() -> Frame {
        Frame::new(Box::leak(vec![0; 64].into()), Box::leak(vec![0; 64].into()))
    }

    fn queue() -> Queue {
        Queue::new(Box::leak(Box::new(QueueMemory::new())), true).unwrap()
    }

    /// Does what a device does: uses a chain.
    fn put_used(queue: &Queue, head: u32, written: u32) {
        let rings = &queue.memory.rings;
        let index = rings.read16(USED + 2);
        let at = USED + 4 + 8 * usize::from(index % SIZE);
        rings.write32(at, head);
        rings.write32(at + 4, written);
        rings.write16(USED + 2, index.wrapping_add(1));
    }

    #[test]
    fn frames_come_back_in_the_order_of_the_device() {
        let mut queue = queue();
        // Round and round, so that the indices wrap.
        for _ in 0..3000 {
            for slot in 0..OUTSTANDING as u16 {
                let offered = queue.offer(frame_of(slot), (0x1000, 64), (0x2000, 64));
                assert_eq!(offered.map_err(|(error, _)| error), Ok(slot));
            }
            assert!(matches!(queue.offer(frame_of(0), (0, 0), (0, 0)), Err((Error::QueueFull, _))));
            assert!(queue.used().unwrap().is_none());
            for slot in (0..OUTSTANDING as u16).rev() {
                put_used(&queue, 2 * u32::from(slot), 16);
                let (came, mut frame, written) = queue.used().unwrap().unwrap();
                assert_eq!((came, written, frame.request().len()), (slot, 16, usize::from(slot)));
            }
            assert_eq!(queue.outstanding(), 0);
        }
        fn frame_of(slot: u16) -> Frame {
            Frame::new(Box::leak(vec![0; slot.into()].into()), &mut [])
        }
    }

    #[test]
    fn a_device_that_uses_what_it_was_not_given_is_found_out() {
        for head in [0, 1, 2 * OUTSTANDING as u32, u32::MAX] {
            let mut queue = queue();
            if head == 1 {
                queue.offer(frame(), (0, 1), (0, 1)).unwrap();
            }
            put_used(&queue, head, 0);
            assert!(queue.used().is_err(), "{head}");
        }
    }

    #[test]
    fn a_page_is_used_once_at_a_time() {
        let memory: &QueueMemory = Box::leak(Box::new(QueueMemory::new()));
        let mut first = Queue::new(memory, false).unwrap();
        assert!(matches!(Queue::new(memory, false), Err(Error::QueueInUse)));
        assert_eq!(memory.rings.read16(AVAILABLE), NO_INTERRUPT);
        first.offer(frame(), (0x1000, 5), (0x2000, 6)).unwrap();
        let at = |offset| memory.rings.read32(TABLE + offset);
        assert_eq!([at(0), at(8), at(12)], [0x1000, 5, 1 << 16 | u32::from(NEXT)]);
        assert_eq!([at(16), at(24), at(28)], [0x2000, 6, u32::from(WRITE)]);
        assert!(first.take_back().is_some() && first.take_back().is_none());
        first.release();
        assert!(Queue::new(memory, false).is_ok());
    }
}
