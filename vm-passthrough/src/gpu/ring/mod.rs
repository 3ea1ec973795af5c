//! A ring of submissions to a device, with fences and interrupts that tell when they are done.
//!
//! # Where it runs
//! Its memory has the layout of NVIDIA's host interface: entries of 8 bytes in a circular buffer, `GP_GET` and `GP_PUT` in a page
//! that both sides see, a doorbell, pushbuffer segments of methods, semaphores (`manuals/volta/gv100/dev_pbdma.ref.txt`,
//! `dev_ram.ref.txt` and `manuals/turing/tu104/dev_usermode.ref.txt` of NVIDIA's open-gpu-doc). **It runs against a modelled
//! function alone and never ran on silicon**: what is missing there is what makes a channel at all, an instance block, page tables and a
//! runlist, which from Turing on NVIDIA's firmware (GSP) is asked for. That is [`ChannelSetup`], which only
//! [`SimGpu`](crate::sim::SimGpu) implements.
//!
//! # What it holds on to
//! A submission ends exactly once, done or with an error, in the order in which they were made. Room in the ring is counted by fences,
//! not by `GP_GET`, so that a device that lies of that overwrites nothing. Whatever a device writes that can't be (a `GP_GET` outside of the ring,
//! or one that goes back behind what is done or past `GP_PUT`; a fence of what was not submitted, or that goes back; an error of its own) ends
//! every submission with that as the error, and the ring takes no more until it is [restarted](Ring::restart).

mod error;
mod layout;
pub mod methods;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use super::clock::Clock;
use super::identify::BOOT_0;
use super::registers::{RegisterError, Registers};
use crate::vfio::{AddressSpace, DmaPermission, HostMemory, VfioError, load_u32, store_u32};

pub use error::{RingError, RingFailure};
pub use layout::{
    ENTRY_SIZE, FEWEST_ENTRIES, GP_GET, GP_PUT, Layout, MOST_ENTRIES, NOTIFIER_INFO, NOTIFIER_STATUS,
};
pub use methods::Command;

/// The doorbell, in BAR 0 from Turing on: `NV_USERMODE_NOTIFY_CHANNEL_PENDING`.
pub const DOORBELL: u64 = 0x81_0090;

/// What has a device work on a ring: it makes a channel of it.
pub trait ChannelSetup: std::fmt::Debug + Send + Sync {
    /// Makes a channel of a ring that is empty. What is to be written to the [doorbell](DOORBELL) for it.
    ///
    /// # Errors
    /// When the device refuses or does not answer.
    fn attach(&self, layout: Layout) -> Result<u32, RegisterError>;
    /// Ends a channel: the device no longer reads or writes the ring's memory.
    ///
    /// # Errors
    /// When the device does not answer.
    fn detach(&self, handle: u32) -> Result<(), RegisterError>;
}

/// One submission. Numbers are never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

impl Ticket {
    /// What the device writes to the fence when it is done.
    pub fn fence(self) -> u32 {
        self.0 as u32
    }
}

/// A submission that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Which.
    pub ticket: Ticket,
    /// How.
    pub result: Result<(), RingFailure>,
}

/// A ring, and the channel that a device made of it.
#[derive(Debug)]
pub struct Ring {
    memory: Arc<HostMemory>,
    layout: Layout,
    registers: Arc<dyn Registers>,
    setup: Arc<dyn ChannelSetup>,
    space: Arc<dyn AddressSpace>,
    handle: u32,
    /// Where the next entry goes, and where the device last said that it is.
    put: u32,
    get: u32,
    /// Numbers of the last submission, and of the last that was done.
    submitted: u64,
    completed: u64,
    ended: VecDeque<Completion>,
    failure: Option<RingFailure>,
    is_mapped: bool,
}

impl Ring {
    /// Makes a ring of `entries` entries in memory that is mapped at `iova` of the device's address space, and a channel of it. The
    /// first submission writes the fence `first`.
    ///
    /// # Errors
    /// When there is no memory, it can't be mapped there, or the device refuses. Nothing is mapped then.
    pub fn new(
        registers: Arc<dyn Registers>,
        setup: Arc<dyn ChannelSetup>,
        space: Arc<dyn AddressSpace>,
        iova: u64,
        entries: u32,
        first: u32,
    ) -> Result<Self, RingError> {
        if !layout::is_count(entries) {
            return Err(RingError::Entries { entries });
        }
        let len = Layout { iova: 0, entries }.len();
        let layout = Layout::new(iova, entries).ok_or(RingError::Range { at: iova, len: len as u32 })?;
        let memory = HostMemory::new(len as usize)
            .map_err(|source| RingError::System { what: "taking memory", source })?;
        let memory = Arc::new(memory);
        space.map(iova, memory.clone(), DmaPermission::ReadWrite)?;
        // One before the first, however that wraps; the upper half is only to tell tickets apart.
        let before = (1 << 32) + u64::from(first) - 1;
        let mut ring = Self {
            memory,
            layout,
            registers,
            setup,
            space,
            handle: 0,
            put: 0,
            get: 0,
            submitted: before,
            completed: before,
            ended: VecDeque::new(),
            failure: None,
            is_mapped: true,
        };
        // What fails from here on unmaps the memory when the ring is dropped.
        ring.begin()?;
        Ok(ring)
    }

    /// Where its parts are.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// How many submissions are under way.
    pub fn pending(&self) -> usize {
        (self.submitted - self.completed) as usize
    }

    /// Why it takes nothing more, if it does not.
    pub fn failure(&self) -> Option<&RingFailure> {
        self.failure.as_ref()
    }

    /// Has the device do these commands, in order, after all that was submitted before, and rings its doorbell.
    ///
    /// # Errors
    /// When there is no room for it or it can't be, and nothing is submitted; when the doorbell can't be rung, the ring has failed.
    pub fn submit(&mut self, commands: &[Command]) -> Result<Ticket, RingError> {
        if let Some(failure) = &self.failure {
            return Err(RingError::Failed(failure.clone()));
        }
        let most = self.layout.entries as usize;
        if self.pending() + 1 >= most {
            self.poll()?;
            if let Some(failure) = &self.failure {
                return Err(RingError::Failed(failure.clone()));
            }
        }
        if self.pending() + 1 >= most {
            return Err(RingError::Full { pending: self.pending() });
        }
        if self.ended.len() >= most {
            return Err(RingError::Untaken { ended: self.ended.len() });
        }
        let ticket = Ticket(self.submitted + 1);
        let fence_place = (self.layout.fence(), ticket.fence());
        let segment = methods::encode(commands, fence_place, layout::SEGMENT_DWORDS)?;
        let (at, index) = (self.layout.segment(self.put), self.put);
        for (dword, value) in segment.iter().enumerate() {
            self.store(at + dword as u64 * 4, *value)?;
        }
        let entry = self.layout.entry(index);
        self.store(entry, at as u32)?;
        self.store(entry + 4, (at >> 32) as u32 | (segment.len() as u32) << 10)?;
        // The device reads an entry only once GP_PUT is behind it, and GP_PUT only once the doorbell rang.
        fence(Ordering::SeqCst);
        let put = (index + 1) % self.layout.entries;
        self.store(self.layout.userd() + GP_PUT, put)?;
        fence(Ordering::SeqCst);
        self.put = put;
        self.submitted = ticket.0;
        if let Err(error) = self.registers.write32(DOORBELL, self.handle) {
            // It may have seen the entry all the same.
            self.fail(RingFailure::Doorbell { reason: error.to_string() });
        }
        Ok(ticket)
    }

    /// Looks what the device has done, as after an interrupt or without one. How many submissions have ended since the last look: none
    /// after a spurious interrupt, several where interrupts were merged.
    ///
    /// # Errors
    /// When the ring's own memory can't be read. What the device lies about is no error of this, but of the submissions.
    pub fn poll(&mut self) -> Result<usize, RingError> {
        let before = self.ended.len();
        if self.failure.is_none()
            && let Some(failure) = self.look()?
        {
            self.fail(failure);
        }
        Ok(self.ended.len() - before)
    }

    /// The next submission that has ended, in order.
    pub fn take(&mut self) -> Option<Completion> {
        self.ended.pop_front()
    }

    /// Waits until a submission has ended, and takes its completion. Interrupts that `event` brings only make it look sooner:
    /// spurious ones do not make it wait for longer, and lost ones not for ever.
    ///
    /// # Errors
    /// [`RingError::Deadline`] when it has not ended by then, and is still under way; the submission's own error.
    pub fn wait(
        &mut self,
        ticket: Ticket,
        event: BorrowedFd<'_>,
        clock: &dyn Clock,
        timeout: Duration,
    ) -> Result<(), RingError> {
        let begun = clock.now();
        loop {
            self.poll()?;
            if let Some(at) = self.ended.iter().position(|ended| ended.ticket == ticket) {
                let ended = self.ended.remove(at).map_or(Ok(()), |ended| ended.result);
                return ended.map_err(RingError::Failed);
            }
            if ticket.0 <= self.completed || ticket.0 > self.submitted {
                return Err(RingError::NotPending(ticket));
            }
            let Some(left) =
                timeout.checked_sub(clock.now().saturating_sub(begun)).filter(|left| !left.is_zero())
            else {
                return Err(self.late(ticket, timeout)?);
            };
            clock.wait(event, left).map_err(|source| RingError::System { what: "waiting", source })?;
        }
    }

    /// Ends every submission that is under way with an error, and takes no more. For a reset in mid-flight this comes first, then the
    /// reset, then [`restart`](Self::restart): what the device writes until it is reset goes to memory that nobody believes.
    pub fn abandon(&mut self, reason: &str) {
        if self.failure.is_none() {
            self.fail(RingFailure::Abandoned { reason: reason.into() });
        }
    }

    /// Makes a channel of the ring again, once the device was reset and does no DMA to it any more. Numbers go on where they were, so that
    /// no fence of before is one of after.
    ///
    /// # Errors
    /// When the device refuses; the ring has failed still.
    pub fn restart(&mut self) -> Result<(), RingError> {
        self.abandon("the ring is restarted");
        self.begin()?;
        self.failure = None;
        Ok(())
    }

    /// Ends the channel, and gives the memory back. What is under way ends with an error, and comes back with what nobody took.
    ///
    /// # Errors
    /// When the device does not let go of it and it can't be taken from the device's reach.
    pub fn close(mut self) -> Result<Vec<Completion>, RingError> {
        self.abandon("the ring is closed");
        let detached = self.setup.detach(self.handle);
        // The IOMMU keeps a device out that did not let go.
        self.unmap()?;
        if let Err(error) = detached {
            tracing::warn!(%error, "a channel was not ended, but its memory was taken from the device");
        }
        Ok(std::mem::take(&mut self.ended).into())
    }

    /// Empties the ring and makes a channel of it.
    fn begin(&mut self) -> Result<(), RingError> {
        for offset in [GP_GET, GP_PUT] {
            self.store(self.layout.userd() + offset, 0)?;
        }
        for offset in [0, 4, NOTIFIER_INFO, NOTIFIER_STATUS] {
            self.store(self.layout.notifier() + offset, 0)?;
        }
        (self.put, self.get) = (0, 0);
        self.completed = self.submitted;
        self.store(self.layout.fence(), self.completed as u32)?;
        fence(Ordering::SeqCst);
        self.handle = self.setup.attach(self.layout)?;
        Ok(())
    }

    /// What the device has done; `Some` when that can't be.
    fn look(&mut self) -> Result<Option<RingFailure>, RingError> {
        let (put, entries) = (self.put, self.layout.entries);
        // What was done when it was looked at last. The fence is read before GP_GET: a device that has written GP_GET since is past that.
        let last = put.wrapping_sub(self.pending() as u32) % entries;
        let read = self.load(self.layout.fence())?;
        fence(Ordering::SeqCst);
        let get = self.load(self.layout.userd() + GP_GET)?;
        let status = self.load(self.layout.notifier() + NOTIFIER_STATUS)?;
        fence(Ordering::SeqCst);
        let (completed, submitted) = (self.completed as u32, self.submitted as u32);
        let done = read.wrapping_sub(completed);
        if done > submitted.wrapping_sub(completed) {
            return Ok(Some(RingFailure::Fence { read, completed, submitted }));
        }
        // What is done is done, whatever else is wrong.
        for number in self.completed + 1..=self.completed + u64::from(done) {
            self.ended.push_back(Completion { ticket: Ticket(number), result: Ok(()) });
        }
        self.completed += u64::from(done);
        if get >= entries {
            return Ok(Some(RingFailure::Outside { get, entries }));
        }
        let distance = |to: u32| to.wrapping_sub(last) % entries;
        // It may lag behind by any number of rounds, as long as it stands still.
        if get != self.get && distance(get) > distance(put) {
            return Ok(Some(RingFailure::Astray { get, last, put }));
        }
        self.get = get;
        if status >> 16 != 0 {
            let code = self.load(self.layout.notifier() + NOTIFIER_INFO)?;
            return Ok(Some(RingFailure::Fault { code }));
        }
        Ok(None)
    }

    fn fail(&mut self, failure: RingFailure) {
        for number in self.completed + 1..=self.submitted {
            self.ended.push_back(Completion { ticket: Ticket(number), result: Err(failure.clone()) });
        }
        self.completed = self.submitted;
        self.failure = Some(failure);
    }

    fn late(&self, ticket: Ticket, timeout: Duration) -> Result<RingError, RingError> {
        let boot = match self.registers.read32(BOOT_0) {
            Ok(value) => format!("{value:#010x}"),
            Err(error) => format!("nothing ({error})"),
        };
        let fence = self.load(self.layout.fence())?;
        let get = self.load(self.layout.userd() + GP_GET)?;
        Ok(RingError::Deadline { ticket, timeout, fence, get, put: self.put, boot })
    }

    fn load(&self, at: u64) -> Result<u32, RingError> {
        load_u32(&*self.memory, at - self.layout.iova)
            .map_err(|source| RingError::System { what: "reading the ring", source })
    }

    fn store(&self, at: u64, value: u32) -> Result<(), RingError> {
        store_u32(&*self.memory, at - self.layout.iova, value)
            .map_err(|source| RingError::System { what: "writing the ring", source })
    }

    fn unmap(&mut self) -> Result<(), VfioError> {
        if self.is_mapped {
            self.space.unmap(self.layout.iova)?;
            self.is_mapped = false;
        }
        Ok(())
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if let Err(error) = self.unmap() {
            tracing::error!(%error, "the memory of a ring stays mapped for DMA");
        }
    }
}
