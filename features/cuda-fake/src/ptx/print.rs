//! What kernels print: put aside when they have ended, and written to the program's standard output when it waits for the device, as CUDA does.

use super::lock;
use crate::{
    error::{Error, Result},
    memory::{By, Kind},
    state::State,
    sys,
};
use std::{
    collections::VecDeque,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};
use vm_ptx::print::{HEAD, format, records};

/// Bytes of a format, of a string, and of what one call of `printf` prints.
const TEXT: usize = 8 << 10;
/// The least and the most bytes of a ring.
const RING: [usize; 2] = [4 << 10, 256 << 20];
/// How much longer texts may be, all together, than the records that they were made of.
const GROWTH: usize = 16;

/// Texts that nobody has waited for yet, each with the bytes that count of it.
struct Waiting {
    texts: VecDeque<(usize, Vec<u8>)>,
    bytes: usize,
}

static WAITING: Mutex<Waiting> = Mutex::new(Waiting { texts: VecDeque::new(), bytes: 0 });
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
    let mut waiting = lock(&WAITING);
    waiting.bytes = 0;
    // The lock is held, so that texts of several threads stay in order.
    for (_, text) in std::mem::take(&mut waiting.texts) {
        sys::print(&text);
    }
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

    /// Puts aside what a kernel left in a ring, the oldest first; where there is no room for all, it's the oldest that goes.
    pub(super) fn collect(&mut self, context: u64, ring: &Ring) -> Result {
        let read = |at: u64, len: usize| Some(self.reach(at, len, By::Copy(context), 1, false)?.bytes());
        let head = read(ring.at, 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes);
        if head > 0 {
            let bytes = read(ring.at + HEAD, ring.size).unwrap_or_default();
            let mut waiting = lock(&WAITING);
            for record in records(head, &bytes) {
                let text = self.string(context, record.format).unwrap_or_default();
                let string = |at| self.string(context, at);
                let text = format(&text, &record.arguments, TEXT, string);
                let counts = (16 + record.arguments.len()).max(text.len() / GROWTH);
                waiting.bytes += counts;
                waiting.texts.push_back((counts, text));
                while waiting.bytes > ring.size {
                    let Some((counts, _)) = waiting.texts.pop_front() else { break };
                    waiting.bytes -= counts;
                }
            }
            ANY.store(true, Ordering::Release);
        }
        self.release(ring.at)
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
