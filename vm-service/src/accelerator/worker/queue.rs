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
use crate::accelerator::Start;
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
            // Whatever is offered from here on rings. It looks once more behind a full barrier, as a driver does between
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
        // What is wrong with the index, `next` tells.
        queue.avail_idx(&self.memory, Ordering::Acquire).map_or(true, |index| index.0 != queue.next_avail())
    }

    /// Gives a chain back with its answer, and tells the driver.
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
        // It orders this after what was used: a driver that asks for interrupts looks once more.
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
    use proptest::prelude::*;
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
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap();
        let eventfds = (0..2).map(|_| EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).unwrap()).collect();
        Ring::new(memory, &START, eventfds).unwrap()
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
