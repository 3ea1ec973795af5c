//! Page-locked memory of the host that the process keeps for its pauses (`VMM_RESERVE`): devices copy straight there and back.
//!
//! A thread makes it in parts, between which calls that need the driver's lock pass. Each is memory of the process's own that a context has
//! registered for all. The registration ends with the context, and the part is given up then; the memory is there as long as anybody copies.

use std::ffi::{c_int, c_uint, c_void};
use std::mem::transmute;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::Duration;

use super::plain::{LARGE, Plain};
use super::real::{NOT_FOUND, Of, call, done, found, within};
use super::without_signals;
use crate::hook;
use vm_hook::driver::{Context, Result};
use vm_hook::log::{self, Level, Value};
use vm_hook::options::Options;

/// The most bytes of a part: the driver's lock is held for some tens of milliseconds.
const PART: u64 = 256 << 20;

/// Bytes of all parts.
static BYTES: AtomicU64 = AtomicU64::new(0);
static STATE: Mutex<State> = Mutex::new(State::new());
/// That the thread has left the driver.
static LEFT: Condvar = Condvar::new();

struct State {
    /// What no pause has.
    free: Vec<Part>,
    /// The context that makes more.
    maker: Option<Context>,
    /// The one that the thread is in.
    inside: Option<Context>,
    /// Is there a thread?
    runs: bool,
    /// Is no more to be made?
    is_over: bool,
}

impl State {
    const fn new() -> Self {
        Self { free: Vec::new(), maker: None, inside: None, runs: false, is_over: false }
    }
}

/// Memory that devices of all contexts reach.
pub(super) struct Part {
    plain: Plain,
    pub(super) bytes: u64,
    of: Of,
}

impl Part {
    fn new(bytes: u64, context: Context) -> Result<Self> {
        /// `CU_MEMHOSTREGISTER_PORTABLE`.
        const PORTABLE: c_uint = 1;
        let plain = Plain::new(bytes)?;
        // Not under the driver's lock.
        plain.populate();
        let (start, length) = (plain.start() as *mut c_void, bytes as usize);
        within(context, || {
            done(call!(c"cuMemHostRegister_v2" (*mut c_void, usize, c_uint) (start, length, PORTABLE)))
        })?;
        BYTES.fetch_add(bytes, Ordering::AcqRel);
        Ok(Self { plain, bytes, of: Of::context(context) })
    }

    pub(super) fn start(&self) -> usize {
        self.plain.start()
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        BYTES.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many bytes there are.
pub(crate) fn bytes() -> u64 {
    BYTES.load(Ordering::Acquire)
}

/// Begins to make what is wanted and not there, by a context that has begun.
pub(crate) fn start(context: Context) {
    let Some(wanted) = Options::get().reserve else { return };
    let mut state = lock();
    if state.is_over || state.maker.is_some() || bytes() >= wanted {
        return;
    }
    state.maker = Some(context);
    if !state.runs {
        let thread =
            || Builder::new().name("vmhook-reserve".into()).spawn(move || hook::inside(|| fill(wanted)));
        match without_signals(thread) {
            Ok(_) => state.runs = true,
            Err(error) => state.fail(wanted, &error.to_string()),
        }
    }
}

impl State {
    /// What can't be had is not tried again, and pauses do without.
    fn fail(&mut self, wanted: u64, why: &str) {
        (self.is_over, self.maker) = (true, None);
        let text = format!("{why}: pauses copy what is beyond through buffers; ask for less by VMM_RESERVE");
        let (has, wanted) = (Value::Number(bytes()), Value::Number(wanted));
        log::line(
            Level::Error,
            "reserve",
            &[("bytes", has), ("wanted", wanted), ("text", Value::Text(text))],
        );
    }
}

fn fill(wanted: u64) {
    /// `CU_STREAM_CAPTURE_MODE_RELAXED`.
    const RELAXED: c_int = 2;
    // What this thread calls ends no capture of the program's.
    let mut mode = RELAXED;
    let _ = call!(c"cuThreadExchangeStreamCaptureMode" (*mut c_int) (&mut mode));
    let mut state = lock();
    while let Some(context) = state.maker.filter(|_| !state.is_over) {
        let missing = wanted.saturating_sub(bytes()).min(PART).next_multiple_of(LARGE as u64);
        if missing == 0 {
            state.maker = None;
            log::line(Level::Info, "reserve", &[("bytes", Value::Number(bytes()))]);
            break;
        }
        state.inside = Some(context);
        drop(state);
        let made = Part::new(missing, context);
        state = lock();
        state.inside = None;
        LEFT.notify_all();
        match made {
            Ok(part) => state.free.push(part),
            Err(failure) => {
                state.fail(wanted, &format!("the host has no more page-locked memory ({failure})"))
            }
        }
    }
    state.runs = false;
}

/// Before a context may end: nobody is left in it.
pub(crate) fn leave(context: Context) {
    let mut state = lock();
    state.maker = state.maker.filter(|maker| *maker != context);
    drop(LEFT.wait_timeout_while(state, Duration::from_secs(10), |state| state.inside == Some(context)));
}

/// A context has ended, before which there were so many things of contexts, and what it registered is not any more.
pub(crate) fn end_context(context: Context, until: u64) {
    let gone: Vec<Part> = lock().free.extract_if(.., |part| part.of.ended(context, until)).collect();
    drop(gone);
}

/// The program ends: no more is made.
pub(crate) fn end() {
    let mut state = lock();
    state.is_over = true;
    drop(LEFT.wait_timeout_while(state, Duration::from_secs(10), |state| state.inside.is_some()));
}

/// Lends a pause up to so many bytes. It gives them back before a context can end.
pub(super) fn lend(bytes: u64) -> Vec<Part> {
    let (mut state, mut missing) = (lock(), bytes);
    let mut parts = Vec::new();
    while missing != 0
        && let Some(part) = state.free.pop()
    {
        missing = missing.saturating_sub(part.bytes);
        parts.push(part);
    }
    parts
}

/// Takes back what was lent.
pub(super) fn take_back(parts: &mut Vec<Part>) {
    lock().free.append(parts);
}
