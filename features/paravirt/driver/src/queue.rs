//! The driver's side of a split virtqueue (section 2.7), whose every request takes two descriptors: a batch that the
//! device reads, and room for the reply that it writes.

use core::cell::Cell;
use core::sync::atomic::{AtomicBool, Ordering};

use crate::error::Error;
use crate::frame::Frame;
use crate::sys::{Shared, acquire, barrier, publish};

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
/// Behind which used entry the driver wants an interrupt, and behind which offered one the device wants a notification
/// (sections 2.7.7 and 2.7.10).
const INTERRUPT_BEHIND: usize = AVAILABLE + 4 + 2 * SIZE as usize;
const NOTIFY_BEHIND: usize = USED + 4 + 8 * SIZE as usize;

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
    /// A bit for each slot without a frame.
    free: u32,
    next_available: u16,
    next_used: u16,
    /// Whether both sides say by index what they want to be notified of.
    event_index: bool,
    /// What had been offered when the device was last asked whether it wants to know.
    asked: Cell<u16>,
}

impl Queue {
    /// A queue in memory that no other uses, which wants no interrupts.
    pub(crate) fn new(memory: &'static QueueMemory) -> Result<Self, Error> {
        if memory.taken.swap(true, Ordering::AcqRel) {
            return Err(Error::QueueInUse);
        }
        memory.rings.clear();
        for head in (0..SIZE).step_by(2) {
            for (index, flags, next) in [(head, NEXT, head + 1), (head + 1, WRITE, 0)] {
                let at = TABLE + 16 * usize::from(index);
                memory.rings.write16(at + 12, flags);
                memory.rings.write16(at + 14, next);
            }
        }
        let queue = Self {
            memory,
            frames: [const { None }; OUTSTANDING],
            free: u32::MAX,
            next_available: 0,
            next_used: 0,
            event_index: false,
            asked: Cell::new(0),
        };
        queue.hold_interrupts();
        Ok(queue)
    }

    /// Uses indices to say what the driver wants to be notified of, before the device sees the queue.
    pub(crate) fn use_event_index(&mut self, event_index: bool) {
        self.event_index = event_index;
        if event_index {
            self.memory.rings.write16(AVAILABLE, 0);
            // Behind what is used already: that comes again after 65,536 others.
            self.memory.rings.write16(INTERRUPT_BEHIND, self.next_used.wrapping_sub(1));
        }
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
        let slot = self.free.trailing_zeros() as usize;
        let Some(place) = self.frames.get_mut(slot) else { return Err((Error::QueueFull, frame)) };
        *place = Some(frame);
        self.free &= self.free - 1;
        let head = 2 * slot as u16;
        let rings = &self.memory.rings;
        for (index, (address, len)) in [(head, request), (head + 1, reply)] {
            let at = TABLE + 16 * usize::from(index);
            rings.write64(at, address);
            rings.write32(at + 8, len);
        }
        rings.write16(AVAILABLE + 4 + 2 * usize::from(self.next_available % SIZE), head);
        self.next_available = self.next_available.wrapping_add(1);
        // The device sees the descriptors before the index.
        publish();
        rings.write16(AVAILABLE + 2, self.next_available);
        Ok(slot as u16)
    }

    /// Whether the device wants to be notified of what was offered since this was last asked.
    ///
    /// A device that is about to sleep says that it wants to be, and then looks once more what is offered; a full barrier
    /// stands between on both sides, so one of them sees the other.
    pub(crate) fn wants_notification(&self) -> bool {
        barrier();
        let (offered, asked) = (self.next_available, self.asked.replace(self.next_available));
        if self.event_index {
            passed(self.memory.rings.read16(NOTIFY_BEHIND), asked, offered)
        } else {
            self.memory.rings.read16(USED) & NO_NOTIFY == 0
        }
    }

    /// Wants an interrupt for what is used from here on. Whoever sleeps looks once more whether [something
    /// is](Self::is_used) before: the device does in the other order what the driver does in
    /// [`wants_notification`](Self::wants_notification).
    pub(crate) fn want_interrupt(&self) {
        if self.event_index {
            self.memory.rings.write16(INTERRUPT_BEHIND, self.next_used);
        } else {
            self.memory.rings.write16(AVAILABLE, 0);
        }
        barrier();
    }

    /// Wants no interrupts any more. With indices there is nothing to do: the one that was wanted was wanted once.
    pub(crate) fn hold_interrupts(&self) {
        if !self.event_index {
            self.memory.rings.write16(AVAILABLE, NO_INTERRUPT);
        }
    }

    /// Whether the device has used something.
    pub(crate) fn is_used(&self) -> bool {
        self.memory.rings.read16(USED + 2) != self.next_used
    }

    /// Takes one used frame: its slot, and how many bytes the device wrote.
    pub(crate) fn used(&mut self) -> Result<Option<(u16, Frame, u32)>, Error> {
        let rings = &self.memory.rings;
        if !self.is_used() {
            return Ok(None);
        }
        // The ring's entry, and what it tells of, are read after the index.
        acquire();
        let at = USED + 4 + 8 * usize::from(self.next_used % SIZE);
        let (head, written) = (rings.read32(at), rings.read32(at + 4));
        self.next_used = self.next_used.wrapping_add(1);
        let slot = head as usize / 2;
        match self.frames.get_mut(slot).and_then(Option::take) {
            Some(frame) if head.is_multiple_of(2) => {
                self.free |= 1 << slot;
                Ok(Some((slot as u16, frame, written)))
            }
            _ => Err(Error::Transport("it used a buffer that it was not given")),
        }
    }

    /// Frames that are under way.
    pub(crate) fn outstanding(&self) -> usize {
        self.free.count_zeros() as usize
    }

    /// Gives the memory back, once the device was reset and touches it no more.
    pub(crate) fn release(&mut self) {
        self.memory.taken.store(false, Ordering::Release);
    }

    /// Takes a frame back from a device that was reset.
    pub(crate) fn take_back(&mut self) -> Option<Frame> {
        let (slot, frame) =
            self.frames.iter_mut().enumerate().find_map(|(slot, frame)| Some((slot, frame.take()?)))?;
        self.free |= 1 << slot;
        Some(frame)
    }
}

/// Whether an index passed `mark` on its way from `old` to `new` (section 2.7.7.2).
fn passed(mark: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(mark).wrapping_sub(1) < new.wrapping_sub(old)
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
        Queue::new(Box::leak(Box::new(QueueMemory::new()))).unwrap()
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
        queue.use_event_index(true);
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
        let mut first = Queue::new(memory).unwrap();
        assert!(matches!(Queue::new(memory), Err(Error::QueueInUse)));
        assert_eq!(memory.rings.read16(AVAILABLE), NO_INTERRUPT);
        first.offer(frame(), (0x1000, 5), (0x2000, 6)).unwrap();
        let at = |offset| memory.rings.read32(TABLE + offset);
        assert_eq!([at(0), at(8), at(12)], [0x1000, 5, 1 << 16 | u32::from(NEXT)]);
        assert_eq!([at(16), at(24), at(28)], [0x2000, 6, u32::from(WRITE)]);
        assert!(first.take_back().is_some() && first.take_back().is_none());
        first.release();
        assert!(Queue::new(memory).is_ok());
    }

    #[test]
    fn notifications_follow_the_index_that_the_device_says() {
        let check = |event_index: bool, said: u16, offers: &[u16], wanted: &[bool]| {
            let mut queue = queue();
            queue.use_event_index(event_index);
            queue.memory.rings.write16(if event_index { NOTIFY_BEHIND } else { USED }, said);
            let seen: vec::Vec<_> = offers
                .iter()
                .map(|count| {
                    for _ in 0..*count {
                        queue.offer(frame(), (0, 1), (0, 1)).map_err(|(error, _)| error).unwrap();
                    }
                    queue.wants_notification()
                })
                .collect();
            assert_eq!(seen, wanted, "{event_index} {said} {offers:?}");
        };
        // By index: once, when the entry behind it is offered, however many come with it.
        check(true, 0, &[1, 1, 1], &[true, false, false]);
        check(true, 1, &[1, 1, 1], &[false, true, false]);
        check(true, 2, &[1, 3, 1], &[false, true, false]);
        check(true, 3, &[3, 0, 1], &[false, false, true]);
        // The device looks by itself.
        check(true, u16::MAX, &[1, 5], &[false, false]);
        // By flag.
        check(false, 0, &[1, 1], &[true, true]);
        check(false, NO_NOTIFY, &[1, 1], &[false, false]);
        assert!(passed(u16::MAX, u16::MAX, 0) && passed(3, 0, 40) && !passed(3, 4, 40) && !passed(40, 0, 40));
    }

    /// Every order in which the driver goes to sleep while the device uses a frame: either the device sees that an
    /// interrupt is wanted, or the driver sees the frame and stays awake.
    #[test]
    fn no_order_of_things_sleeps_through_an_answer() {
        // `true`: the driver's next step; `false`: the device's. Two of each: write, then look.
        for order in 0u8..16 {
            if order.count_ones() != 2 {
                continue;
            }
            for (event_index, before) in [(true, 0u16), (true, 7), (true, 65_534), (false, 0), (false, 7)] {
                let mut queue = queue();
                queue.use_event_index(event_index);
                for _ in 0..before {
                    queue.offer(frame_of_nothing(), (0, 1), (0, 1)).map_err(|(error, _)| error).unwrap();
                    put_used(&queue, 0, 0);
                    queue.used().unwrap().unwrap();
                }
                queue.offer(frame_of_nothing(), (0, 1), (0, 1)).map_err(|(error, _)| error).unwrap();
                let old = queue.memory.rings.read16(USED + 2);
                let (mut driver, mut device) = (0, 0);
                let (mut sees, mut interrupts) = (false, false);
                for step in 0..4 {
                    if order >> step & 1 == 1 {
                        driver += 1;
                        if driver == 1 { queue.want_interrupt() } else { sees = queue.is_used() }
                    } else {
                        device += 1;
                        if device == 1 {
                            put_used(&queue, 0, 0);
                        } else if event_index {
                            let mark = queue.memory.rings.read16(INTERRUPT_BEHIND);
                            interrupts = passed(mark, old, old.wrapping_add(1));
                        } else {
                            interrupts = queue.memory.rings.read16(AVAILABLE) & NO_INTERRUPT == 0;
                        }
                    }
                }
                assert!(sees || interrupts, "{order:04b} {event_index} {before}");
                // Who looks without having asked is not interrupted.
                queue.used().unwrap().unwrap();
                queue.hold_interrupts();
                if event_index {
                    let mark = queue.memory.rings.read16(INTERRUPT_BEHIND);
                    assert!(!passed(mark, old.wrapping_add(1), old.wrapping_add(2)));
                } else {
                    assert_eq!(queue.memory.rings.read16(AVAILABLE), NO_INTERRUPT);
                }
            }
        }
        fn frame_of_nothing() -> Frame {
            Frame::new(&mut [], &mut [])
        }
    }
}
