//! Copies between the host and the device with a check at both ends.
//!
//! ```text
//! chunk ─▶ copy ─▶ kernel sums the device's side ─▶ sums to the host ─▶ same as the host's? ─▶ next
//!            ▲                                                                │ no
//!            └──────────────────────────── again ◀────────────────────────────┘
//! ```
//!
//! Several chunks are under way at once; one that arrived wrong is sent again by itself, behind those.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::hash;
use super::session::{EventOf, QueueOf, Session};
use super::transfer::STAGING_BYTES;
use crate::accelerator::{Accelerator, Queue};
use crate::artifact::Layout;
use crate::checksum::Direction;
use crate::crc32::{self, Parts};
use crate::error::{Error, Result};
use crate::extents::Extents;
use crate::launch::{Arguments, Grid, QueueArgument};
use crate::memory::{Memory, MemoryKind, Region};

/// How many chunks may be under way at once. One more place is for what is sent again.
const SLOTS: usize = 8;
/// How many chunks may wait for the host's sum.
const WAITING: usize = 16;
/// Bytes of the sums of a chunk, at the next multiple of what memory is aligned to.
const SUMS_BYTES: u64 = (4 * (crc32::BLOCKS as u64 + crc32::EDGES as u64)).next_multiple_of(256);

/// Which way a copy between memory of these kinds goes, if it is one between the host and the device.
pub(super) fn crossing(target: MemoryKind, source: MemoryKind) -> Option<Direction> {
    match (target.host_visible(), source.host_visible()) {
        (false, true) => Some(Direction::HostToDevice),
        (true, false) => Some(Direction::DeviceToHost),
        _ => None,
    }
}

/// What sums the device's side.
pub(super) struct Checker<A: Accelerator> {
    kernel: <QueueOf<A> as Queue>::Kernel,
    layout: Arc<Layout>,
    chunk: u64,
    retries: u32,
    powers: Memory,
    /// On the device, a place for each slot.
    sums: Memory,
    /// The same on the host.
    reported: Memory,
    events: Vec<EventOf<A>>,
}

/// A chunk on its way.
#[derive(Clone, Copy)]
struct Chunk {
    direction: Direction,
    /// From the beginning of the copy.
    offset: u64,
    device: Region<'static>,
    host: Region<'static>,
}

/// The CRC-32 of what was sent, and of what arrived.
struct Ends {
    sent: u32,
    received: u32,
}

impl Chunk {
    fn ends(&self, host: u32, device: u32) -> Ends {
        match self.direction {
            Direction::HostToDevice => Ends { sent: host, received: device },
            Direction::DeviceToHost => Ends { sent: device, received: host },
        }
    }
}

impl<A: Accelerator> Session<A> {
    /// Has all copies checked from here on, if the worker's options say so.
    pub(super) fn begin_checks(&self) -> Result<()> {
        let Some(checksum) = &self.shared.options.checksum else { return Ok(()) };
        let signature = checksum.kernel.signature();
        self.shared.accelerator.info().check(&checksum.kernel)?;
        if signature.guarded || signature.block != [crc32::ITEMS, 1, 1] {
            let reason = "it is no kernel for checksums: these have blocks of 256 and no guard".into();
            return Err(Error::Load { kernel: signature.entry.clone(), reason });
        }
        let queue = self.queue();
        let places = SUMS_BYTES * (SLOTS as u64 + 1);
        let powers: Vec<u8> = crc32::powers().into_iter().flat_map(u32::to_le_bytes).collect();
        let mut checker = Checker {
            kernel: self.note(queue.load(&checksum.kernel))?,
            layout: Arc::clone(checksum.kernel.layout()),
            chunk: powers.len() as u64,
            retries: checksum.retries,
            powers: self.note(queue.allocate(MemoryKind::Device, powers.len() as u64))?,
            sums: self.note(queue.allocate(MemoryKind::Device, places))?,
            reported: self.note(queue.allocate(MemoryKind::Pinned, places))?,
            events: (0..=SLOTS).map(|_| self.note(queue.event(false))).collect::<Result<_>>()?,
        };
        // The table is used to check its own arrival: a wrong one gives a wrong sum. So must one of which only a part has come, and it goes
        // in one chunk, however small those of the options are.
        self.write_checked(&checker, checker.powers.detached(), &powers)?;
        checker.chunk = checksum.chunk_bytes.clamp(1, STAGING_BYTES.min(crc32::BYTES));
        *self.transfers.checker.borrow_mut() = Some(Rc::new(checker));
        Ok(())
    }

    /// What checks copies, if they are to be checked.
    pub(super) fn checker(&self) -> Option<Rc<Checker<A>>> {
        self.transfers.checker.borrow().clone()
    }

    /// Gives a chunk to the device, and has its side summed.
    fn send(&self, checker: &Checker<A>, slot: usize, chunk: &Chunk) -> Result<()> {
        let (target, source) = match chunk.direction {
            Direction::HostToDevice => (chunk.device, chunk.host),
            Direction::DeviceToHost => (chunk.host, chunk.device),
        };
        self.note(self.queue().copy(target, source))?;
        let parts = Parts::of(chunk.device)?;
        let (sums, reported) = checker.places(slot, parts.blocks())?;
        let words = match parts.words.bytes() {
            // Aligned, where bytes before and behind no words need not be.
            0 => checker.powers.region().slice(0, 0)?,
            _ => parts.words,
        };
        let views = [words, parts.head, parts.tail, checker.powers.region(), sums];
        let views = views.map(|region| Ok(QueueArgument::View(region, Extents::WHOLE)));
        let arguments = Arguments::pack(&checker.layout, views)?;
        self.start(&checker.kernel, Grid::from(parts.blocks()), &arguments)?;
        self.note(self.queue().copy(reported, sums))?;
        self.note(self.queue().record(&checker.events[slot]))
    }

    /// Waits for a chunk, and gives the CRC-32 of the device's side.
    fn receive(&self, checker: &Checker<A>, slot: usize, chunk: &Chunk) -> Result<u32> {
        self.note(self.queue().wait(&checker.events[slot], self.timeout()))?;
        let parts = Parts::of(chunk.device)?;
        let (_, reported) = checker.places(slot, parts.blocks())?;
        let mut bytes = [0; SUMS_BYTES as usize];
        let bytes = &mut bytes[..reported.bytes() as usize];
        reported.read_host(bytes)?;
        let words = bytes.chunks_exact(4).map(|word| word.try_into().map_or(0, u32::from_le_bytes));
        Ok(parts.crc32(&words.collect::<Vec<_>>()))
    }

    /// Compares the ends of a chunk, and has it sent again as long as they differ and it may be.
    fn settle(
        &self,
        checker: &Checker<A>,
        chunk: &Chunk,
        mut ends: Ends,
        mut again: impl FnMut() -> Result<Ends>,
    ) -> Result<()> {
        let count = |counter: &std::sync::atomic::AtomicU64| counter.fetch_add(1, Ordering::Relaxed);
        let checks = &self.shared.checks;
        count(&checks.chunks);
        let (direction, offset, bytes) = (chunk.direction, chunk.offset, chunk.device.bytes());
        let mut attempts = 1;
        while ends.sent != ends.received {
            count(&checks.corrupted);
            let worker = self.shared.name();
            tracing::warn!(
                worker,
                attempts,
                "{bytes} bytes from {offset} of a copy {direction} arrived corrupted"
            );
            let Ends { sent, received } = ends;
            if attempts > u64::from(checker.retries) {
                count(&checks.given_up);
                return Err(Error::Corrupted { direction, offset, bytes, attempts, sent, received });
            }
            count(&checks.resent);
            attempts += 1;
            ends = again()?;
        }
        Ok(())
    }

    /// Lets the device end what a copy that failed has left it, so that nothing of it is in the way of the next.
    fn settled(&self, result: Result<()>) -> Result<()> {
        if result.is_err()
            && let Err(error) = self.wait(self.timeout())
        {
            tracing::debug!(worker = self.shared.name(), %error, "a copy that failed did not end");
        }
        result
    }

    /// Copies host bytes into memory of the device.
    pub(super) fn write_checked(&self, checker: &Checker<A>, target: Region<'_>, bytes: &[u8]) -> Result<()> {
        let halves = self.staging()?.halves();
        let target = target.detached();
        let part = |chunk: &Chunk| &bytes[chunk.offset as usize..][..chunk.device.bytes() as usize];
        let settle = |slot: usize, chunk: &Chunk, host: u32| {
            let device = self.receive(checker, slot, chunk)?;
            self.settle(checker, chunk, chunk.ends(host, device), || {
                let host = hash::write(chunk.host, part(chunk))?;
                self.send(checker, SLOTS, chunk)?;
                Ok(chunk.ends(host, self.receive(checker, SLOTS, chunk)?))
            })
        };
        let mut under_way = VecDeque::new();
        let mut all = || {
            for (index, offset) in (0..target.bytes()).step_by(checker.chunk as usize).enumerate() {
                if under_way.len() == halves.len()
                    && let Some((slot, chunk, host)) = under_way.pop_front()
                {
                    settle(slot, &chunk, host)?;
                }
                let slot = index % halves.len();
                let chunk = checker
                    .chunk(Direction::HostToDevice, offset, target, |len| halves[slot].slice(0, len))?;
                let host = hash::write(chunk.host, part(&chunk))?;
                self.send(checker, slot, &chunk)?;
                under_way.push_back((slot, chunk, host));
            }
            under_way.drain(..).try_for_each(|(slot, chunk, host)| settle(slot, &chunk, host))
        };
        self.settled(all())
    }

    /// Copies memory of the device into host bytes.
    pub(super) fn read_checked(
        &self,
        checker: &Checker<A>,
        source: Region<'_>,
        bytes: &mut [u8],
    ) -> Result<()> {
        let halves = self.staging()?.halves();
        let source = source.detached();
        let mut settle = |slot: usize, chunk: &Chunk| {
            let part = &mut bytes[chunk.offset as usize..][..chunk.device.bytes() as usize];
            let device = self.receive(checker, slot, chunk)?;
            let ends = chunk.ends(hash::read(chunk.host, part)?, device);
            self.settle(checker, chunk, ends, || {
                self.send(checker, SLOTS, chunk)?;
                let device = self.receive(checker, SLOTS, chunk)?;
                Ok(chunk.ends(hash::read(chunk.host, part)?, device))
            })
        };
        let mut under_way = VecDeque::new();
        let mut all = || {
            for (index, offset) in (0..source.bytes()).step_by(checker.chunk as usize).enumerate() {
                let slot = index % halves.len();
                let chunk = checker
                    .chunk(Direction::DeviceToHost, offset, source, |len| halves[slot].slice(0, len))?;
                self.send(checker, slot, &chunk)?;
                under_way.push_back((slot, chunk));
                // While one half is being read out, the device fills the other.
                if under_way.len() == halves.len()
                    && let Some((slot, chunk)) = under_way.pop_front()
                {
                    settle(slot, &chunk)?;
                }
            }
            under_way.drain(..).try_for_each(|(slot, chunk)| settle(slot, &chunk))
        };
        self.settled(all())
    }

    /// Copies between memory of the device and memory that host and device reach, and waits for it.
    pub(super) fn copy_checked(
        &self,
        checker: &Checker<A>,
        direction: Direction,
        target: Region<'_>,
        source: Region<'_>,
    ) -> Result<()> {
        self.not_capturing("a checked copy between host and device")?;
        if target.bytes() != source.bytes() {
            return Err(Error::Lengths { source_bytes: source.bytes(), destination_bytes: target.bytes() });
        }
        let (device, host) = match direction {
            Direction::HostToDevice => (target.detached(), source.detached()),
            Direction::DeviceToHost => (source.detached(), target.detached()),
        };
        // What writes the source has to end before the host sums it.
        self.wait(self.timeout())?;
        let count = usize::try_from(device.bytes().div_ceil(checker.chunk)).unwrap_or(usize::MAX);
        let chunk = |index: usize| {
            let offset = index as u64 * checker.chunk;
            checker.chunk(direction, offset, device, |len| host.slice(offset, len))
        };
        self.settled(hash::with(count, |mut sums| {
            let (mut under_way, mut waiting) = (VecDeque::new(), VecDeque::new());
            let settle = |sums: &mut hash::Sums, index: usize, device: u32| {
                let chunk = &chunk(index)?;
                let host = sums.wait(index, self.timeout())?;
                self.settle(checker, chunk, chunk.ends(host, device), || {
                    self.send(checker, SLOTS, chunk)?;
                    let device = self.receive(checker, SLOTS, chunk)?;
                    Ok(chunk.ends(hash::sum(chunk.host)?, device))
                })
            };
            for index in 0..count.saturating_add(SLOTS) {
                if index >= SLOTS
                    && let Some(landed) = under_way.pop_front()
                {
                    let sum = self.receive(checker, landed % SLOTS, &chunk(landed)?)?;
                    if direction == Direction::DeviceToHost {
                        sums.begin(landed, chunk(landed)?.host);
                    }
                    waiting.push_back((landed, sum));
                }
                if index < count {
                    let chunk = chunk(index)?;
                    self.send(checker, index % SLOTS, &chunk)?;
                    if direction == Direction::HostToDevice {
                        sums.begin(index, chunk.host);
                    }
                    under_way.push_back(index);
                }
                if waiting.len() > WAITING
                    && let Some((index, device)) = waiting.pop_front()
                {
                    settle(&mut sums, index, device)?;
                }
            }
            waiting.into_iter().try_for_each(|(index, device)| settle(&mut sums, index, device))
        }))
    }
}

impl<A: Accelerator> Checker<A> {
    /// Where the sums of a slot lie, on the device and on the host.
    fn places(&self, slot: usize, blocks: u32) -> Result<(Region<'static>, Region<'static>)> {
        let (offset, bytes) = (SUMS_BYTES * slot as u64, 4 * crc32::sums(blocks));
        Ok((self.sums.detached().slice(offset, bytes)?, self.reported.detached().slice(offset, bytes)?))
    }

    /// The chunk from `offset` of a copy with this side on the device.
    fn chunk(
        &self,
        direction: Direction,
        offset: u64,
        device: Region<'static>,
        host: impl FnOnce(u64) -> Result<Region<'static>>,
    ) -> Result<Chunk> {
        let device = device.slice(offset, self.chunk.min(device.bytes() - offset))?;
        Ok(Chunk { direction, offset, device, host: host(device.bytes())? })
    }
}
