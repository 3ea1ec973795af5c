//! What kernels print: put aside when they have ended, and written to the program's standard output when it waits for the device, as CUDA does.

use super::lock;
use crate::{
    error::{Error, Result},
    memory::{By, Kind},
    state::{self, State},
    sys,
};
use std::{
    collections::VecDeque,
    io::Write,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};
use vm_ptx::print::{HEAD, Record, format, records};

/// Bytes of a format, of a string, and of what one call of `printf` prints.
const TEXT: usize = 8 << 10;
/// The least and the most bytes of a ring.
const RING: [usize; 2] = [4 << 10, 64 << 20];
/// The most bytes of all texts that wait.
const TEXTS: usize = 64 << 20;
/// How much longer texts may be, all together, than the records that they were made of.
const GROWTH: usize = 16;
/// Bytes of a ring that are read at once, with the driver locked.
const PART: usize = 1 << 20;

/// Texts that are not yet printed, the oldest first.
#[derive(Default)]
struct Texts {
    bytes: VecDeque<u8>,
    /// The length of each text, and the ring bytes that it counts as.
    lens: VecDeque<(usize, usize)>,
    counts: usize,
}

impl Texts {
    /// Appends a text and drops the oldest ones beyond the limits.
    fn push(&mut self, text: &[u8], counts: usize, room: usize) {
        self.bytes.extend(text);
        self.lens.push_back((text.len(), counts));
        self.counts += counts;
        while self.counts > room || self.bytes.len() > TEXTS {
            let Some((len, counts)) = self.lens.pop_front() else { break };
            self.bytes.drain(..len);
            self.counts -= counts;
        }
    }
}

static WAITING: Mutex<Texts> = Mutex::new(Texts { bytes: VecDeque::new(), lens: VecDeque::new(), counts: 0 });
/// Whether there are any.
static ANY: AtomicBool = AtomicBool::new(false);

/// Ahead of a call: a launch prints what waits. What it starts itself may be done when it returns, and is not printed then.
pub(crate) fn before(call: &str) {
    if ANY.load(Ordering::Acquire) && (call.starts_with("cuLaunch") || call.starts_with("cuGraphLaunch")) {
        flush();
    }
}

/// Calls of the driver that wait: behind them all is printed.
fn waits(call: &str) -> bool {
    let named = |names: &[&str]| names.iter().any(|name| call.starts_with(name));
    named(&["cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize"])
        || named(&[
            "cuModuleLoad",
            "cuModuleUnload",
            "cuLibraryUnload",
            "cuCtxDestroy",
            "cuDevicePrimaryCtxRe",
        ])
        || (named(&["cuMemcpy"]) && !call.contains("Async"))
}

/// Behind a call: prints what waits, if it is one that does that.
pub(crate) fn after(call: &str) {
    if ANY.load(Ordering::Acquire) && waits(call) {
        flush();
    }
}

/// Prints what waits.
pub(crate) fn flush() {
    if !ANY.swap(false, Ordering::AcqRel) {
        return;
    }
    // Texts of several threads stay in order. Launches can add texts while the program's reader blocks this thread.
    static PRINTING: Mutex<()> = Mutex::new(());
    let _printing = lock(&PRINTING);
    let texts = std::mem::take(&mut *lock(&WAITING));
    let (first, second) = texts.bytes.as_slices();
    sys::print(first);
    sys::print(second);
    sys::flush();
}

/// A ring for a launch.
pub(super) struct Ring {
    at: u64,
    size: usize,
}

impl Ring {
    /// The address of its first byte.
    pub(super) fn address(&self) -> u64 {
        self.at
    }

    pub(super) fn mask(&self) -> u64 {
        self.size as u64 - 1
    }

    /// Formats the records that a kernel left, prints those of failed assertions on standard error, and releases the ring. Locks the driver for short
    /// reads only. Returns whether an assertion failed.
    ///
    /// # Errors
    /// `LaunchTimeout` once `is_late`; then nothing is printed.
    pub(super) fn collect(self, context: u64, is_late: impl Fn() -> bool) -> Result<bool> {
        let collected = self.put_aside(context, is_late);
        let released = self.release();
        collected.and_then(|failed| released.map(|()| failed))
    }

    /// Releases the ring.
    pub(super) fn release(self) -> Result {
        state::lock().release(self.at)
    }

    fn put_aside(&self, context: u64, is_late: impl Fn() -> bool) -> Result<bool> {
        let read =
            |at: u64, len: usize| Some(state::lock().reach(at, len, By::Copy(context), 1, false)?.bytes());
        let head = read(self.at, 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes);
        if head == 0 {
            return Ok(false);
        }
        let mut bytes = Vec::with_capacity(self.size);
        while bytes.len() < self.size {
            let part = read(self.at + HEAD + bytes.len() as u64, PART.min(self.size - bytes.len()));
            bytes.extend(part.ok_or(Error::IllegalAddress)?);
        }
        let string = |at| state::lock().string(context, at);
        let mut assertions = Vec::new();
        let text = |record: &Record| match record.assertion(string) {
            Some(text) => {
                assertions.push(text);
                Vec::new()
            }
            None => format(&string(record.format).unwrap_or_default(), &record.arguments, TEXT, string),
        };
        let newest = newest(records(head, &bytes), self.size, text, is_late).ok_or(Error::LaunchTimeout)?;
        let mut waiting = lock(&WAITING);
        for (text, counts) in newest {
            waiting.push(&text, counts, self.size);
        }
        ANY.store(true, Ordering::Release);
        drop(waiting);
        // The oldest first. The reader of standard error may be gone.
        let _ = std::io::stderr().write_all(&assertions.iter().rev().flatten().copied().collect::<Vec<_>>());
        Ok(!assertions.is_empty())
    }
}

/// Formats the newest records that fit in `room`, and returns their texts, the oldest first, each with the ring bytes that it counts as. Formats no
/// text that would not be kept. Returns `None` once `is_late`.
fn newest(
    records: impl DoubleEndedIterator<Item = Record>,
    room: usize,
    mut text: impl FnMut(&Record) -> Vec<u8>,
    is_late: impl Fn() -> bool,
) -> Option<impl Iterator<Item = (Vec<u8>, usize)>> {
    let (mut room, mut bytes) = (room, TEXTS);
    let mut found = Vec::new();
    for record in records.rev() {
        if is_late() {
            return None;
        }
        let text = text(&record).into_boxed_slice();
        let counts = (16 + record.arguments.len()).max(text.len() / GROWTH);
        match (room.checked_sub(counts), bytes.checked_sub(text.len())) {
            (Some(less), Some(fewer)) => (room, bytes) = (less, fewer),
            _ => break,
        }
        found.push((text, counts));
    }
    Some(found.into_iter().rev().map(|(text, counts)| (text.into_vec(), counts)))
}

impl State {
    /// Makes a ring of the size that the context was told.
    pub(super) fn ring(&mut self, context: u64) -> Result<Ring> {
        let context_ = self.contexts.get(&context).ok_or(Error::InvalidContext)?;
        let size = context_.limits[1].clamp(RING[0], RING[1]).next_power_of_two();
        let (device, len) = (context_.device, HEAD + size as u64);
        let at = self.allocate(device, context, len, true, |offset| Kind::Data { offset })?;
        Ok(Ring { at, size })
    }

    /// What is at an address up to its NUL, as far as it is there.
    fn string(&self, context: u64, from: u64) -> Option<Vec<u8>> {
        const CHUNK: u64 = 64;
        let (mut text, mut at) = (Vec::new(), from);
        while text.len() < TEXT {
            let chunk = (CHUNK - at % CHUNK) as usize;
            let part = [chunk, 1].iter().find_map(|len| self.reach(at, *len, By::Copy(context), 1, false));
            let Some(part) = part.map(sys::Range::bytes) else {
                return (!text.is_empty()).then_some(text);
            };
            let end = part.iter().position(|byte| *byte == 0);
            text.extend(&part[..end.unwrap_or(part.len())]);
            if end.is_some() {
                return Some(text);
            }
            at = at.checked_add(part.len() as u64)?;
        }
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn records(count: u64) -> impl DoubleEndedIterator<Item = Record> {
        (0..count).map(|format| Record { format, arguments: Vec::new() })
    }

    #[test]
    fn no_text_is_made_once_the_time_is_up() {
        let (asked, made) = (Cell::new(0), Cell::new(0));
        let text = |_: &Record| {
            made.set(made.get() + 1);
            vec![b'x'; 10]
        };
        let is_late = || {
            asked.set(asked.get() + 1);
            asked.get() > 100
        };
        assert!(newest(records(u64::from(u32::MAX)), usize::MAX, text, is_late).is_none());
        assert_eq!((asked.get(), made.get()), (101, 100));
    }

    #[test]
    fn texts_are_made_of_the_newest_records_that_are_kept() {
        let check = |room: usize, len: usize, expect: u64| {
            let made = Cell::new(0);
            let text = |record: &Record| {
                made.set(made.get() + 1);
                let mut text = record.format.to_le_bytes().to_vec();
                text.resize(len, 0);
                text
            };
            let found: Vec<_> = newest(records(1_000_000), room, text, || false).unwrap().collect();
            let first = u64::from_le_bytes(*found[0].0.first_chunk().unwrap());
            assert_eq!((found.len() as u64, first), (expect, 1_000_000 - expect), "{room} {len}");
            assert_eq!(made.get(), expect + 1, "{room} {len}");
        };
        check(1600, 8, 100);
        check(1600, 1600, 16);
        check(usize::MAX, TEXT, (TEXTS / TEXT) as u64);
    }

    #[test]
    fn waiting_texts_are_bounded() {
        let mut texts = Texts::default();
        for byte in 0..=255 {
            texts.push(&[byte; 10], 100, 1000);
        }
        assert_eq!((texts.lens.len(), texts.counts, texts.bytes.len()), (10, 1000, 100));
        assert_eq!((texts.bytes[0], texts.bytes[99]), (246, 255));
        for _ in 0..2 * TEXTS / TEXT {
            texts.push(&[7; TEXT], 0, 1000);
        }
        assert_eq!(texts.bytes.len(), TEXTS);
    }
}
