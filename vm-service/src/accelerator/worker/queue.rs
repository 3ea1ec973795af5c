//! The worker's end of the virtqueue.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, poll};
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT as _, QueueT as _};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};
use vm_paravirt::{MAX_BATCH_BYTES, MAX_REPLY_BYTES};
use vmm_sys_util::eventfd::EventFd;

use super::server::Answer;
use crate::accelerator::Start;
use crate::vmm::sys::borrow;

/// The queue, its doorbell and its interrupt.
pub(super) struct Ring {
    memory: GuestMemoryMmap,
    queue: Mutex<Queue>,
    doorbell: EventFd,
    interrupt: Option<EventFd>,
}

/// A chain that the driver offered, with what it holds for us copied.
#[derive(Debug)]
pub(super) struct Request {
    /// The batch; `None` for one that is longer than a batch may be.
    pub(super) batch: Option<Vec<u8>>,
    /// Where the answer goes.
    pub(super) reply: ReplyRoom,
}

/// Where an answer goes.
#[derive(Debug)]
pub(super) struct ReplyRoom {
    head: u16,
    parts: Vec<(GuestAddress, u32)>,
}

impl ReplyRoom {
    /// Bytes that it has.
    pub(super) fn bytes(&self) -> usize {
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

    /// The next request; waits for the doorbell while there is none.
    ///
    /// # Errors
    /// When the driver broke the queue.
    pub(super) fn next(&self) -> Result<Request, String> {
        let wrong = |error: virtio_queue::Error| format!("the guest's driver broke its queue: {error}");
        loop {
            if let Some(request) = self.take().map_err(wrong)? {
                return Ok(request);
            }
            // Whatever is offered from here on rings.
            if self.queue().enable_notification(&self.memory).map_err(wrong)? {
                self.queue().disable_notification(&self.memory).map_err(wrong)?;
                continue;
            }
            self.wait().map_err(|error| format!("the doorbell can't be waited for: {error}"))?;
            self.queue().disable_notification(&self.memory).map_err(wrong)?;
        }
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
    fn take(&self) -> Result<Option<Request>, virtio_queue::Error> {
        let mut queue = self.queue();
        let Some(chain) = queue.iter(&self.memory)?.next() else { return Ok(None) };
        let head = chain.head_index();
        let (mut readable, mut writable) = (Vec::new(), Vec::new());
        for descriptor in chain {
            let part = (descriptor.addr(), descriptor.len());
            if is_write_only(&descriptor) { writable.push(part) } else { readable.push(part) }
        }
        drop(queue);
        Ok(Some(Request { batch: self.copy(&readable), reply: ReplyRoom { head, parts: writable } }))
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

    /// Gives a chain back with its answer, and tells the driver.
    ///
    /// # Errors
    /// When the driver broke the queue.
    pub(super) fn answer(&self, room: &ReplyRoom, answer: &Answer) -> Result<(), String> {
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
        let wants = queue.needs_notification(&self.memory).map_err(wrong)?;
        drop(queue);
        if let Some(interrupt) = self.interrupt.as_ref().filter(|_| wants) {
            // It fails only when the counter is full, and then it is signalled.
            let _ = interrupt.write(1);
        }
        Ok(())
    }
}

fn is_write_only(descriptor: &Descriptor) -> bool {
    descriptor.is_write_only()
}
