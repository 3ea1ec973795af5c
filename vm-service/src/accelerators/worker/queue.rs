//! The worker's end of the virtqueue.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, poll};
use virtio_queue::{Queue, QueueOwnedT as _, QueueT as _};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};
use vm_paravirt::{MAX_BATCH_BYTES, MAX_REPLY_BYTES};
use vmm_sys_util::eventfd::EventFd;

use super::link::{Link, Request};
use super::server::Answer;
use crate::accelerators::Start;
use crate::vmm::sys::borrow;

/// The driver does not want interrupts (section 2.7.6); where it says that by an index, this flag counts for nothing.
const NO_INTERRUPT: u16 = 1;

/// The queue, its doorbell and its interrupt.
pub(super) struct Ring {
    memory: GuestMemoryMmap,
    queue: Mutex<Queue>,
    doorbell: EventFd,
    interrupt: Option<EventFd>,
}

/// Where an answer goes: the rest of the chain whose batch it answers.
#[derive(Debug)]
pub(super) struct ReplyRoom {
    head: u16,
    parts: Vec<(GuestAddress, u32)>,
}

impl ReplyRoom {
    /// Bytes that it has.
    fn bytes(&self) -> usize {
        let sum = self.parts.iter().fold(0u64, |sum, (_, len)| sum.saturating_add((*len).into()));
        usize::try_from(sum).unwrap_or(usize::MAX).min(MAX_REPLY_BYTES)
    }
}

impl Ring {
    /// The queue that a driver set up.
    ///
    /// # Errors
    /// When it does not lie in the guest's memory, or the number of eventfds is wrong.
    pub(super) fn new(
        memory: GuestMemoryMmap,
        start: &Start,
        eventfds: Vec<EventFd>,
    ) -> Result<Self, String> {
        let wrong = |error: virtio_queue::Error| error.to_string();
        let mut queue = Queue::new(start.size).map_err(wrong)?;
        queue.try_set_size(start.size).map_err(wrong)?;
        queue.try_set_desc_table_address(GuestAddress(start.descriptors)).map_err(wrong)?;
        queue.try_set_avail_ring_address(GuestAddress(start.available)).map_err(wrong)?;
        queue.try_set_used_ring_address(GuestAddress(start.used)).map_err(wrong)?;
        queue.set_event_idx(start.event_index);
        queue.set_ready(true);
        if !queue.is_valid(&memory) {
            return Err("the queue does not lie in RAM".into());
        }
        // Until it is first waited for, it is looked at.
        queue.disable_notification(&memory).map_err(wrong)?;
        let mut eventfds = eventfds.into_iter();
        let doorbell = eventfds.next().ok_or("there is no doorbell")?;
        Ok(Self { memory, queue: Mutex::new(queue), doorbell, interrupt: eventfds.next() })
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self) -> io::Result<()> {
        let doorbell = borrow(&self.doorbell);
        loop {
            match poll(&mut [PollFd::new(&doorbell, PollFlags::IN)], None) {
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
                Ok(_) => break,
            }
        }
        // It fails when another reader was faster, and there is none.
        let _ = self.doorbell.read();
        Ok(())
    }

    /// Takes a chain. Its descriptors are read once, then what they point to; what the driver changes later changes
    /// nothing any more. A chain that loops ends after as many descriptors as its table has.
    fn take(&self) -> Result<Option<Request<ReplyRoom>>, virtio_queue::Error> {
        let mut queue = self.queue();
        let Some(chain) = queue.iter(&self.memory)?.next() else { return Ok(None) };
        let head = chain.head_index();
        let (mut readable, mut writable) = (Vec::new(), Vec::new());
        for descriptor in chain {
            let part = (descriptor.addr(), descriptor.len());
            if descriptor.is_write_only() { writable.push(part) } else { readable.push(part) }
        }
        drop(queue);
        let place = ReplyRoom { head, parts: writable };
        Ok(Some(Request { batch: self.copy(&readable), room: place.bytes(), place }))
    }

    fn copy(&self, parts: &[(GuestAddress, u32)]) -> Option<Vec<u8>> {
        let bytes = parts.iter().try_fold(0usize, |sum, (_, len)| sum.checked_add(*len as usize))?;
        if bytes > MAX_BATCH_BYTES {
            return None;
        }
        let mut batch = vec![0; bytes];
        let mut rest = batch.as_mut_slice();
        for (address, len) in parts {
            let (part, after) = rest.split_at_mut(*len as usize);
            if let Err(error) = self.memory.read_slice(part, *address) {
                tracing::debug!(%error, "a batch lies outside of the guest's memory");
                return Some(Vec::new());
            }
            rest = after;
        }
        Some(batch)
    }
}

impl Link for Ring {
    type Place = ReplyRoom;

    /// The next chain; waits for the doorbell while there is none. A queue that was not broken has no end.
    fn next(&self) -> Result<Option<Request<ReplyRoom>>, String> {
        let wrong = |error: virtio_queue::Error| format!("the guest's driver broke its queue: {error}");
        loop {
            if let Some(request) = self.take().map_err(wrong)? {
                return Ok(Some(request));
            }
            // Whatever is offered from here on rings. It polls once more behind a full barrier, as a driver does between
            // offering and asking whether to ring: one of them sees the other.
            if self.queue().enable_notification(&self.memory).map_err(wrong)? {
                self.queue().disable_notification(&self.memory).map_err(wrong)?;
                continue;
            }
            self.wait().map_err(|error| format!("the doorbell can't be waited for: {error}"))?;
            // Until it is next waited for, what is offered is looked for.
            self.queue().disable_notification(&self.memory).map_err(wrong)?;
        }
    }

    fn ready(&self) -> bool {
        let queue = self.queue();
        // What is wrong with the index, `next` reports.
        queue.avail_idx(&self.memory, Ordering::Acquire).map_or(true, |index| index.0 != queue.next_avail())
    }

    /// Returns a chain with its answer, and notifies the driver.
    fn answer(&self, room: &ReplyRoom, answer: &Answer) -> Result<(), String> {
        let bytes = answer.encode(room.bytes());
        let (mut written, mut rest) = (0, bytes.as_slice());
        for (address, len) in &room.parts {
            let (part, after) = rest.split_at(rest.len().min(*len as usize));
            if let Err(error) = self.memory.write_slice(part, *address) {
                tracing::debug!(%error, "an answer goes outside of the guest's memory");
                break;
            }
            written += part.len() as u32;
            rest = after;
        }
        let wrong = |error: virtio_queue::Error| format!("the guest's driver broke its queue: {error}");
        let mut queue = self.queue();
        queue.add_used(&self.memory, room.head, written).map_err(wrong)?;
        // It orders this after what was used: a driver that asks for interrupts polls once more.
        let mut wants = queue.needs_notification(&self.memory).map_err(wrong)?;
        if !queue.event_idx_enabled() {
            let flags = self.memory.read_obj::<u16>(GuestAddress(queue.avail_ring()));
            // It was within RAM when the queue was set up.
            wants = flags.map_or(true, |flags| u16::from_le(flags) & NO_INTERRUPT == 0);
        }
        drop(queue);
        if let Some(interrupt) = self.interrupt.as_ref().filter(|_| wants) {
            // It fails only when the counter is full, and then it is signalled.
            let _ = interrupt.write(1);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::fence;

    use proptest::prelude::*;
    use rustix::event::Timespec;
    use vm_paravirt::Status;
    use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK};

    use super::*;

    const SIZE: u16 = 8;
    const START: Start =
        Start { size: SIZE, descriptors: 0x1000, available: 0x2000, used: 0x3000, event_index: false };
    const DATA: u64 = 0x4000;
    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;

    fn ring() -> Ring {
        ring_with(START)
    }

    fn ring_with(start: Start) -> Ring {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap();
        let eventfds = (0..2).map(|_| EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).unwrap()).collect();
        Ring::new(memory, &start, eventfds).unwrap()
    }

    fn descriptor(ring: &Ring, at: u64, (address, len, flags, next): (u64, u32, u16, u16)) {
        ring.memory.write_obj(address, GuestAddress(at)).unwrap();
        ring.memory.write_obj(len, GuestAddress(at + 8)).unwrap();
        ring.memory.write_obj(flags, GuestAddress(at + 12)).unwrap();
        ring.memory.write_obj(next, GuestAddress(at + 14)).unwrap();
    }

    /// Offers the chain that begins at descriptor 0.
    fn offer(ring: &Ring, table: &[(u64, u32, u16, u16)]) {
        for (index, entry) in (0u64..).zip(table) {
            descriptor(ring, START.descriptors + 16 * index, *entry);
        }
        ring.memory.write_obj(0u16, GuestAddress(START.available + 4)).unwrap();
        ring.memory.write_obj(1u16, GuestAddress(START.available + 2)).unwrap();
    }

    #[test]
    fn a_chain_is_copied_and_answered_across_its_parts() {
        let ring = ring();
        ring.memory.write_slice(b"a batch in two parts", GuestAddress(DATA)).unwrap();
        let table = [
            (DATA, 7, NEXT, 1),
            (DATA + 0x100, 12, NEXT | WRITE, 2),
            (DATA + 0x200, 12, NEXT | WRITE, 3),
            (DATA + 7, 13, 0, 0),
        ];
        offer(&ring, &table);
        let request = ring.take().unwrap().unwrap();
        // What changes now changes nothing any more.
        ring.memory.write_slice(b"???????", GuestAddress(DATA)).unwrap();
        assert_eq!(request.batch.as_deref(), Some(&b"a batch in two parts"[..]));
        assert_eq!(request.room, 24);
        ring.answer(&request.place, &Answer::refused(Status::Version)).unwrap();
        let mut reply = [0; 16];
        ring.memory.read_slice(&mut reply[..12], GuestAddress(DATA + 0x100)).unwrap();
        ring.memory.read_slice(&mut reply[12..], GuestAddress(DATA + 0x200)).unwrap();
        assert_eq!(vm_paravirt::Reply::decode(&reply).unwrap().status(), Status::Version);
        assert_eq!(ring.memory.read_obj::<u32>(GuestAddress(START.used + 8)).unwrap(), 16);
        assert_eq!(ring.interrupt.as_ref().unwrap().read().unwrap(), 1);
        assert!(ring.take().unwrap().is_none());
    }

    #[test]
    fn chains_that_no_driver_makes_end() {
        let check = |table: &[(u64, u32, u16, u16)], batch: Option<usize>| {
            let ring = ring();
            offer(&ring, table);
            let request = ring.take().unwrap().unwrap();
            assert_eq!(request.batch.map(|batch| batch.len()), batch, "{table:x?}");
            ring.answer(&request.place, &Answer::refused(Status::Malformed)).unwrap();
        };
        // A loop ends after as many descriptors as the table has.
        check(&[(DATA, 16, NEXT, 0)], Some(16 * usize::from(SIZE)));
        check(&[(DATA, 16, NEXT, 1), (DATA, 8, NEXT | WRITE, 0)], Some(16 * usize::from(SIZE) / 2));
        check(&[(DATA, 16, NEXT, 60_000)], Some(16));
        check(&[(DATA, u32::MAX, NEXT, 1), (DATA, u32::MAX, NEXT, 0)], None);
        check(&[(1 << 40, 16, 0, 0)], Some(0));
        check(&[(u64::MAX, 16, NEXT, 1), (u64::MAX, 16, WRITE, 0)], Some(0));
        check(&[(0xfff0, 32, 0, 0)], Some(0));
        check(&[(1 << 40, 16, INDIRECT, 0)], Some(0));
        // More chains than there is room for.
        let ring = ring();
        ring.memory.write_obj(SIZE + 1, GuestAddress(START.available + 2)).unwrap();
        assert!(ring.take().is_err());
        let outside = Start { used: 0xfff0, ..START };
        assert!(Ring::new(ring.memory.clone(), &outside, Vec::new()).is_err());
    }

    /// A driver that offers one chain at a time, always the same.
    struct Driver {
        ring: Arc<Ring>,
        event_index: bool,
        offered: u16,
        kicks: u32,
        interrupts: u32,
    }

    impl Driver {
        const SAYS: u64 = START.available + 4 + 2 * SIZE as u64;
        const SAID: u64 = START.used + 4 + 8 * SIZE as u64;

        fn new(event_index: bool) -> Self {
            let ring = ring_with(Start { event_index, ..START });
            descriptor(&ring, START.descriptors, (DATA, 16, NEXT, 1));
            descriptor(&ring, START.descriptors + 16, (DATA + 0x100, 16, WRITE, 0));
            Self { ring: Arc::new(ring), event_index, offered: 0, kicks: 0, interrupts: 0 }
        }

        fn load(&self, address: u64) -> u16 {
            self.ring.memory.load(GuestAddress(address), Ordering::Acquire).unwrap()
        }

        fn store(&self, value: u16, address: u64) {
            self.ring.memory.store(value, GuestAddress(address), Ordering::Release).unwrap();
        }

        /// Offers it, and rings where the device wants that. Whether it did.
        fn offer(&mut self) -> bool {
            self.store(0, START.available + 4 + 2 * u64::from(self.offered % SIZE));
            let before = self.offered;
            self.offered = before.wrapping_add(1);
            self.store(self.offered, START.available + 2);
            fence(Ordering::SeqCst);
            let wanted =
                if self.event_index { self.load(Self::SAID) == before } else { self.load(START.used) == 0 };
            if wanted {
                self.kicks += 1;
                self.ring.doorbell.write(1).unwrap();
            }
            wanted
        }

        fn is_answered(&self) -> bool {
            self.load(START.used + 2) == self.offered
        }

        /// Says whether it wants an interrupt for the next answer.
        fn want_interrupt(&self, wants: bool) {
            if self.event_index {
                let behind = self.load(START.used + 2).wrapping_sub(u16::from(!wants));
                self.store(behind, Self::SAYS);
            } else {
                self.store(if wants { 0 } else { NO_INTERRUPT }, START.available);
            }
            fence(Ordering::SeqCst);
        }

        /// Waits until the chain is answered: polls `polls` times, then sleeps.
        fn wait(&mut self, polls: u32) {
            if (0..polls).any(|_| self.is_answered()) {
                return;
            }
            let before = self.offered.wrapping_sub(1);
            if self.event_index {
                self.store(before, Self::SAYS);
            } else {
                self.store(0, START.available);
            }
            fence(Ordering::SeqCst);
            while !self.is_answered() {
                let interrupt = borrow(self.ring.interrupt.as_ref().unwrap());
                let most = Timespec { tv_sec: 60, tv_nsec: 0 };
                let woken = poll(&mut [PollFd::new(&interrupt, PollFlags::IN)], Some(&most));
                assert_eq!(woken, Ok(1), "nobody woke: {} of {} rang", self.kicks, self.offered);
                self.interrupts += 1;
                let _ = self.ring.interrupt.as_ref().unwrap().read();
            }
            self.want_interrupt(false);
        }
    }

    #[test]
    fn while_it_is_looked_for_nothing_rings_and_nobody_is_interrupted() {
        for event_index in [true, false] {
            let mut driver = Driver::new(event_index);
            let ring = driver.ring.clone();
            let answer = |request: Request<ReplyRoom>| {
                ring.answer(&request.place, &Answer::refused(Status::Malformed)).unwrap();
            };
            driver.want_interrupt(false);
            // The first may ring, as the device was not there yet.
            assert!(!ring.ready());
            driver.offer();
            assert!(ring.ready());
            answer(ring.next().unwrap().unwrap());
            // It sleeps, and is woken.
            let sleeper = ring.clone();
            let thread = std::thread::spawn(move || sleeper.next().unwrap().unwrap());
            let asleep = |driver: &Driver| {
                if event_index {
                    driver.load(Driver::SAID) == driver.offered
                } else {
                    driver.load(START.used) == 0
                }
            };
            while !asleep(&driver) {
                std::thread::yield_now();
            }
            assert!(driver.offer());
            answer(thread.join().unwrap());
            // From here on it polls.
            for _ in 0..100 {
                assert!(!ring.ready());
                assert!(!driver.offer());
                assert!(ring.ready());
                answer(ring.next().unwrap().unwrap());
                assert!(driver.is_answered());
            }
            let interrupt = ring.interrupt.as_ref().unwrap();
            assert!(interrupt.read().is_err(), "an interrupt that nobody wanted");
            driver.want_interrupt(true);
            driver.offer();
            answer(ring.next().unwrap().unwrap());
            assert_eq!(interrupt.read().unwrap(), 1);
        }
    }

    #[test]
    fn two_sides_that_look_and_sleep_as_they_like_never_both_sleep() {
        const ROUNDS: u32 = 30_000;
        let count = crate::sweep::count(ROUNDS as usize) as u32;
        let first = crate::sweep::seed().map_or(0, |seed| (seed % u64::from(ROUNDS)) as u32);
        let rounds = first..first + count;
        for event_index in [true, false] {
            let mut driver = Driver::new(event_index);
            let ring = driver.ring.clone();
            driver.want_interrupt(false);
            let of_device = rounds.clone();
            let device = std::thread::spawn(move || {
                for round in of_device {
                    // Seldom and often, so that each finds the other at every point on its way to sleep.
                    (0..round % 97 * (round % 5)).any(|_| ring.ready());
                    let request = ring.next().unwrap().unwrap();
                    ring.answer(&request.place, &Answer::refused(Status::Malformed)).unwrap();
                }
            });
            for round in rounds.clone() {
                driver.offer();
                driver.wait(round % 89 * (round % 7));
            }
            device.join().unwrap();
            assert!(driver.kicks > 0, "nobody slept");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn no_queue_harms(
            table in prop::collection::vec((0u64..0x1_2000, 0u32..0x3000, 0u16..8, 0u16..12), usize::from(SIZE)),
            heads in prop::collection::vec(0u16..12, usize::from(SIZE)),
            index in 0u16..12,
        ) {
            let ring = ring();
            for (slot, (address, len, flags, next)) in (0u64..).zip(table) {
                // The rings stay as they are.
                descriptor(&ring, START.descriptors + 16 * slot, (address.max(DATA), len, flags, next));
            }
            for (slot, head) in (0u64..).zip(heads) {
                ring.memory.write_obj(head, GuestAddress(START.available + 4 + 2 * slot)).unwrap();
            }
            ring.memory.write_obj(index, GuestAddress(START.available + 2)).unwrap();
            // It may succeed or fail, but it ends.
            for _ in 0..=index {
                let Ok(Some(request)) = ring.take() else { break };
                prop_assert!(request.batch.is_none_or(|batch| batch.len() <= MAX_BATCH_BYTES));
                let _ = ring.answer(&request.place, &Answer::refused(Status::Malformed));
            }
        }
    }
}
