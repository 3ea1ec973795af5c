//! Carries frames between a guest's queues and a tap, where vhost-net is not to be had. One thread does both ways; each frame is
//! copied once.

use std::io::{Read as _, Write as _};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use virtio_bindings::virtio_net::VIRTIO_NET_F_MRG_RXBUF;
use virtio_queue::{Error, Queue, QueueOwnedT as _, QueueT as _};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

use super::tap::Tap;
use super::{Activation, HEADER, RECEIVE, TRANSMIT};
use crate::vmm::{Stop, sys};

/// The longest frame with its header: the longest IP packet behind an Ethernet header with a VLAN tag.
const FRAME: usize = HEADER + 18 + 65_535;
/// How many frames go one way before the other has its turn, and before the driver hears of them.
const BATCH: usize = 64;
/// Where in the header the number of buffers stands that a received frame fills.
const BUFFERS_AT: usize = 10;

/// Carries frames until it is asked to end.
///
/// # Errors
/// When the driver breaks a queue.
pub(super) fn serve(tap: Arc<Tap>, work: Activation, end: &Stop) -> Result<(), Error> {
    let mergeable = work.features >> VIRTIO_NET_F_MRG_RXBUF & 1 != 0;
    let (mut queues, mut kicks) = ([None, None], Vec::new());
    for (index, queue, kick) in work.queues {
        queues[usize::from(index)] = Some(queue);
        kicks.push(kick);
    }
    let interrupt = work.interrupt;
    let mut datapath = Datapath::new(tap, work.memory, queues, mergeable, move |queue| interrupt.used(queue));
    while !end.requested() {
        let transmitting = datapath.transmit(end)?;
        let receiving = datapath.receive(end)?;
        if transmitting != Next::Frame && receiving != Next::Frame {
            datapath.wait(end, &kicks, receiving == Next::Tap);
        }
    }
    Ok(())
}

/// What goes on with one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// There may be another frame.
    Frame,
    /// The driver has to notify.
    Driver,
    /// A frame has to come to the tap.
    Tap,
}

/// The two queues and what is between them and the tap.
pub(super) struct Datapath<N> {
    tap: Arc<Tap>,
    memory: GuestMemoryMmap,
    receive: Option<Queue>,
    transmit: Option<Queue>,
    /// Whether a received frame may fill several buffers.
    mergeable: bool,
    notify: N,
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
    /// Length of the frame in `incoming`, which the driver has no room for yet; 0 when there is none.
    held: usize,
    /// The tap was deleted.
    gone: bool,
}

impl<N: Fn(u16)> Datapath<N> {
    /// Nothing has been carried. `notify` tells the driver of used buffers.
    pub(super) fn new(
        tap: Arc<Tap>,
        memory: GuestMemoryMmap,
        [receive, transmit]: [Option<Queue>; 2],
        mergeable: bool,
        notify: N,
    ) -> Self {
        let (outgoing, incoming) = (vec![0; FRAME], vec![0; FRAME]);
        Self { tap, memory, receive, transmit, mergeable, notify, outgoing, incoming, held: 0, gone: false }
    }

    /// Interrupts where the driver asks for them (`VIRTIO_F_EVENT_IDX`).
    #[cfg(test)]
    pub(super) fn set_event_idx_for_test(&mut self) {
        self.receive.iter_mut().chain(&mut self.transmit).for_each(|queue| queue.set_event_idx(true));
    }

    /// Waits for the driver, for a frame if that is wanted, or until it is asked to end.
    fn wait(&self, end: &Stop, kicks: &[EventFd], for_frame: bool) {
        let events: Vec<_> = std::iter::once(end.event()).chain(kicks).map(sys::borrow).collect();
        let mut waited: Vec<_> = events.iter().map(|event| PollFd::new(event, PollFlags::IN)).collect();
        if for_frame && !self.gone {
            waited.push(PollFd::new(self.tap.file(), PollFlags::IN));
        }
        // When it fails, by a signal as a rule, all is looked at.
        let _ = poll(&mut waited, None);
        for kick in kicks {
            // It fails when it was not signalled.
            let _ = kick.read();
        }
    }

    /// Sends what the driver has for the tap, N frames at most.
    ///
    /// # Errors
    /// When the driver breaks the queue.
    pub(super) fn transmit(&mut self, end: &Stop) -> Result<Next, Error> {
        let Some(queue) = &mut self.transmit else { return Ok(Next::Driver) };
        let (mut next, mut used) = (Next::Frame, false);
        queue.disable_notification(&self.memory)?;
        for _ in 0..BATCH {
            if end.requested() {
                break;
            }
            let Some(chain) = queue.iter(&self.memory)?.next() else {
                if queue.enable_notification(&self.memory)? {
                    break;
                }
                next = Next::Driver;
                break;
            };
            let head = chain.head_index();
            let mut reader = chain.reader(&self.memory)?;
            let len = reader.available_bytes();
            if (HEADER..=FRAME).contains(&len) {
                let frame = &mut self.outgoing[..len];
                reader.read_exact(frame).map_err(|_| Error::InvalidChain)?;
                // As a network does, it loses what it can't carry.
                if let Err(error) = self.tap.send(frame) {
                    tracing::warn!(tap = self.tap.name(), %error, "a frame of the guest was lost");
                }
            }
            queue.add_used(&self.memory, head, 0)?;
            used = true;
        }
        if used && queue.needs_notification(&self.memory)? {
            (self.notify)(TRANSMIT);
        }
        Ok(next)
    }

    /// Gives the driver what has come to the tap, N frames at most.
    ///
    /// # Errors
    /// When the driver breaks the queue.
    pub(super) fn receive(&mut self, end: &Stop) -> Result<Next, Error> {
        let Some(mut queue) = self.receive.take() else { return Ok(Next::Driver) };
        let (mut next, mut used) = (Next::Frame, false);
        for _ in 0..BATCH {
            if self.held == 0 {
                match self.tap.receive(&mut self.incoming) {
                    Ok(len) if len >= HEADER => self.held = len,
                    // No tap gives that.
                    Ok(_) => continue,
                    Err(Errno::AGAIN) => {
                        next = Next::Tap;
                        break;
                    }
                    Err(error) => {
                        if !std::mem::replace(&mut self.gone, true) {
                            tracing::warn!(tap = self.tap.name(), %error, "the tap is gone, and nothing comes to the guest any more");
                        }
                        next = Next::Tap;
                        break;
                    }
                }
            }
            queue.disable_notification(&self.memory)?;
            if self.place(&mut queue, end)? {
                self.held = 0;
                used = true;
            } else {
                next = Next::Driver;
                break;
            }
        }
        if used && queue.needs_notification(&self.memory)? {
            (self.notify)(RECEIVE);
        }
        self.receive = Some(queue);
        Ok(next)
    }

    /// Writes the frame that is held to the driver's buffers, all of it or nothing; whether it is dealt with. One that the driver
    /// never has room for is lost.
    fn place(&mut self, queue: &mut Queue, end: &Stop) -> Result<bool, Error> {
        let most = if self.mergeable { usize::from(queue.size()) } else { 1 };
        let first = queue.next_avail();
        let (mut buffers, mut room) = (Vec::new(), 0);
        while room < self.held {
            if buffers.len() == most || end.requested() {
                queue.set_next_avail(first);
                return Ok(true);
            }
            let Some(chain) = queue.iter(&self.memory)?.next() else {
                // The driver is to notify of the first buffer that was not seen.
                if queue.enable_notification(&self.memory)? {
                    queue.disable_notification(&self.memory)?;
                    continue;
                }
                queue.set_next_avail(first);
                return Ok(false);
            };
            let head = chain.head_index();
            let writer = chain.writer(&self.memory)?;
            // The least that a driver may offer (section 5.1.6.3.1), so that no walk through its descriptors is for nothing.
            if writer.available_bytes() < HEADER {
                return Err(Error::InvalidChain);
            }
            room += writer.available_bytes();
            buffers.push((head, writer));
        }
        self.incoming[BUFFERS_AT..HEADER].copy_from_slice(&(buffers.len() as u16).to_le_bytes());
        let mut frame = &self.incoming[..self.held];
        let mut used = Vec::with_capacity(buffers.len());
        for (head, mut writer) in buffers {
            let (part, rest) = frame.split_at(frame.len().min(writer.available_bytes()));
            writer.write_all(part).map_err(|_| Error::InvalidChain)?;
            frame = rest;
            used.push((head, part.len() as u32));
        }
        add_used(queue, &self.memory, &used).map(|()| true)
    }
}

/// Marks the buffers of a frame as used, all at once: a driver that saw the first alone would take the frame for a broken one.
fn add_used(queue: &mut Queue, memory: &GuestMemoryMmap, used: &[(u16, u32)]) -> Result<(), Error> {
    let Some((&(head, len), before)) = used.split_last() else { return Ok(()) };
    let first = queue.next_used();
    for (&(head, len), index) in before.iter().zip(0..) {
        // The ring lies in RAM, as was checked.
        let at = queue.used_ring() + 4 + 8 * u64::from(first.wrapping_add(index) % queue.size());
        let element = u64::from(head) | u64::from(len) << 32;
        memory.write_obj(element.to_le(), GuestAddress(at)).map_err(Error::GuestMemory)?;
    }
    let last = first.wrapping_add(before.len() as u16);
    // The last one notifies the driver of all. That it is notified again for each of them changes nothing in the ring, and
    // counts them for whether the driver wants to be interrupted.
    for _ in used {
        queue.set_next_used(last);
        queue.add_used(memory, head, len)?;
    }
    Ok(())
}
