//! Pause and resume of the process: its calls are kept out, its work is waited for, and the manager does the rest.
//!
//! A call that waits at the gate may be what a call or work inside waits for: a function of the program's that a stream calls, a lock of the
//! program's. So the gate is not closed until the timeout, but for moments, each twice as long as the one before, until nobody is inside.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use vm_hook::control::Changed;
use vm_hook::driver::{Context, Failure};
use vm_hook::log::{self, Level, Value};
use vm_hook::manager::{Cant, Manager, Report};
use vm_hook::options::{Mode, Options};

use crate::gate;
use crate::hook::{self, with};
use crate::sys::{self, Saved};

/// The first moment that calls are kept out for.
const FIRST: Duration = Duration::from_millis(20);
/// The longest: longer work is paused only where it ends in time by chance.
const LONGEST: Duration = Duration::from_secs(10);
/// How long they may run in between. Behind the longest moments it is as long as these: a program that can't be paused would otherwise stand still until
/// the timeout, which may be a day.
const BETWEEN: Duration = Duration::from_millis(5);

/// What an attempt to wait for work left: a thread that still waits.
type Left = Option<Receiver<Result<(), Failure>>>;

/// Held by who pauses or resumes.
static CONTROL: Mutex<Left> = Mutex::new(None);
static ENDING: AtomicBool = AtomicBool::new(false);
static CHANGING: AtomicBool = AtomicBool::new(false);

/// Is the program about to be paused or to go on?
pub(crate) fn is_changing() -> bool {
    CHANGING.load(Ordering::Acquire)
}

/// Why there is no pause at the moment.
enum Not {
    /// It may be had later.
    Busy(&'static str),
    /// It is not to be had.
    Never(String),
}

impl From<Cant> for Not {
    fn from(error: Cant) -> Self {
        Not::Never(error.to_string())
    }
}

/// Pauses the program, unless `time` passes first or the client is gone. `deliver` sends the result and returns whether the client has
/// received it. If not, nobody knows of the pause, and the program runs on.
///
/// # Errors
/// The reason why the program is not paused. `deliver` was not called.
pub(crate) fn pause(
    time: Duration,
    is_wanted: impl Fn() -> bool,
    deliver: impl FnOnce(Changed) -> bool,
) -> Result<(), String> {
    if Options::get().mode == Mode::Monitor {
        return Err(
            "the program runs in MONITOR mode, in which no memory can be moved: run it without --monitor"
                .into(),
        );
    }
    if let Some(name) = hook::stranger() {
        return Err(format!(
            "the program uses {name} of the driver, which the hook does not know: it can't keep its calls out"
        ));
    }
    let deadline = Instant::now() + time;
    let mut control = take(deadline).ok_or("another pause or resume runs: try again")?;
    let changing = Changing::new();
    if with(|manager| manager.is_paused()) {
        // It stays paused, as an earlier client wanted.
        deliver(changed(with(Manager::pause).map_err(|error| error.to_string())?));
        return Ok(());
    }
    let report = wait_and_pause(&mut control, deadline, is_wanted)?;
    drop(changing);
    if !deliver(changed(report)) {
        undo();
    }
    Ok(())
}

/// Resumes after a pause whose client is gone.
fn undo() {
    let (level, text) = match resume_held() {
        Ok(_) => (Level::Info, "the client of the pause is gone: the program runs on".into()),
        Err(error) => {
            (Level::Error, format!("the client of the pause is gone, and the program cannot resume: {error}"))
        }
    };
    log::line(level, "control", &[("text", Value::Text(text))]);
}

/// Pauses as soon as no call and no work runs.
fn wait_and_pause(
    control: &mut Left,
    deadline: Instant,
    is_wanted: impl Fn() -> bool,
) -> Result<Report, String> {
    let mut moment = FIRST;
    loop {
        match attempt(control, moment) {
            Ok(report) => return Ok(report),
            Err(Not::Never(text)) => return Err(text),
            Err(Not::Busy(_)) if ENDING.load(Ordering::Acquire) => return Err("the program ends".into()),
            Err(Not::Busy(what)) if Instant::now() >= deadline => {
                return Err(format!(
                    "the program is busy: {what}; it runs on, so try again with a longer timeout"
                ));
            }
            Err(Not::Busy(_)) if !is_wanted() => return Err("who asked is gone".into()),
            Err(Not::Busy(_)) => {
                let next = Instant::now() + if moment == LONGEST { LONGEST } else { BETWEEN };
                let may_wait = || is_wanted() && !ENDING.load(Ordering::Acquire);
                while Instant::now() < next.min(deadline) && may_wait() {
                    std::thread::sleep(BETWEEN);
                }
                let left = deadline.saturating_duration_since(Instant::now());
                moment = (moment * 2).min(LONGEST).min(left.max(FIRST));
            }
        }
    }
}

/// Opens the gate again, unless the program is paused.
struct Closed;

impl Drop for Closed {
    fn drop(&mut self) {
        gate::open();
    }
}

fn attempt(left: &mut Left, moment: Duration) -> Result<Report, Not> {
    if ENDING.load(Ordering::Acquire) || !gate::close(moment) {
        return Err(Not::Busy("a call of the driver has not returned"));
    }
    let closed = Closed;
    let contexts = with(|manager| {
        if manager.is_capturing() {
            return Err(Cant::Capture);
        }
        manager.settle_for_nobody()?;
        let mut contexts = manager.driver().contexts();
        contexts.extend(manager.tracker().all().map(|of| of.context));
        Ok(contexts)
    })?;
    wait_for_work(left, contexts, moment)?;
    let report = with(Manager::pause)?;
    // What the program registered meanwhile runs behind it.
    sys::at_exit(hook::end);
    std::mem::forget(closed);
    Ok(report)
}

/// Waits for all work of contexts: for a moment if calls wait meanwhile, which the work may wait for.
fn wait_for_work(left: &mut Left, contexts: BTreeSet<Context>, moment: Duration) -> Result<(), Not> {
    let busy = Not::Busy("work of a device has not ended");
    let until = Instant::now() + moment;
    let wait = |receiver: &Receiver<Result<(), Failure>>| {
        let time = until.saturating_duration_since(Instant::now());
        receiver.recv_timeout(time)
    };
    if let Some(before) = left {
        match wait(before) {
            Err(RecvTimeoutError::Timeout) => return Err(busy),
            _ => *left = None,
        }
    }
    let (sender, receiver) = mpsc::channel();
    let is_over = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&is_over);
    let work = move || {
        hook::inside(|| {
            let mut contexts = contexts.into_iter().take_while(|context| begin(*context, &stop));
            let result = contexts.try_for_each(sys::synchronize);
            SYNCHRONIZED.0.lock().unwrap_or_else(PoisonError::into_inner).take();
            SYNCHRONIZED.1.notify_all();
            let _ = sender.send(result);
        });
    };
    if let Err(error) = Builder::new().name("vmhook-wait".into()).spawn(work) {
        return Err(Not::Never(format!("no thread can wait for work: {error}")));
    }
    match wait(&receiver) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(failure)) => Err(Cant::Driver(failure).into()),
        Err(_) => {
            is_over.store(true, Ordering::Release);
            *left = Some(receiver);
            Err(busy)
        }
    }
}

/// The context whose work is waited for.
static SYNCHRONIZED: (Mutex<Option<Context>>, Condvar) = (Mutex::new(None), Condvar::new());

/// Goes on to a context's work, unless nobody wants that any more.
fn begin(context: Context, stop: &AtomicBool) -> bool {
    let mut current = SYNCHRONIZED.0.lock().unwrap_or_else(PoisonError::into_inner);
    let goes_on = !stop.load(Ordering::Acquire);
    *current = goes_on.then_some(context);
    SYNCHRONIZED.1.notify_all();
    goes_on
}

/// Before a context ends, whose work has ended: nobody is left in it.
pub(crate) fn leave(context: Context) {
    let current = SYNCHRONIZED.0.lock().unwrap_or_else(PoisonError::into_inner);
    let is_inside = |current: &mut Option<Context>| *current == Some(context);
    drop(SYNCHRONIZED.1.wait_timeout_while(current, Duration::from_secs(10), is_inside));
    sys::reserve::leave(context);
}

/// Lets the program go on. What its memory had is returned, to be freed.
pub(crate) fn resume() -> Result<(Changed, Vec<Saved>), String> {
    let deadline = Instant::now() + Duration::from_secs(60);
    let _control = take(deadline).ok_or("another pause or resume runs: try again")?;
    resume_held()
}

/// [`resume`] for the thread that holds [`CONTROL`].
fn resume_held() -> Result<(Changed, Vec<Saved>), String> {
    let _changing = Changing::new();
    let (report, mut saved) = with(Manager::resume).map_err(|error| error.to_string())?;
    saved.iter_mut().for_each(Saved::give_back);
    gate::open();
    Ok((changed(report), saved))
}

/// The program ends: a pause or resume that runs is waited for, none begins, and calls pass.
pub(crate) fn finish() {
    ENDING.store(true, Ordering::Release);
    let control = take(Instant::now() + Duration::from_secs(60));
    gate::end();
    drop(control);
    sys::reserve::end();
}

fn take(deadline: Instant) -> Option<MutexGuard<'static, Left>> {
    loop {
        match CONTROL.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(guard)) => return Some(PoisonError::into_inner(guard)),
            Err(TryLockError::WouldBlock) if Instant::now() >= deadline => return None,
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

struct Changing;

impl Changing {
    fn new() -> Self {
        CHANGING.store(true, Ordering::Release);
        Self
    }
}

impl Drop for Changing {
    fn drop(&mut self) {
        CHANGING.store(false, Ordering::Release);
    }
}

fn changed(report: Report) -> Changed {
    Changed {
        bytes: report.bytes,
        dropped: report.dropped,
        pinned: report.kept.pinned,
        native: report.kept.native,
        failed: report.kept.failed,
        milliseconds: 0,
    }
}
