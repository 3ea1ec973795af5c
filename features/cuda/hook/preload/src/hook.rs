//! A process's hook: its mode, its manager, and when each call must wait for what is put off.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, Once, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crate::gate::{self, Pass};
use crate::sys::Real;
use vm_hook::driver::Result;
use vm_hook::log::{self, Level};
use vm_hook::manager::Manager;
use vm_hook::options::{Mode, Options};

/// How long a copy may wait: a kernel that runs may look for what it brings.
const LONGEST: Duration = Duration::from_millis(1);

type Guard = MutexGuard<'static, Option<Manager<Real>>>;

static MANAGER: Mutex<Option<Manager<Real>>> = Mutex::new(None);
/// Must the next call look at the manager first?
static UNSETTLED: AtomicBool = AtomicBool::new(false);
/// Has this process none of its parent's contexts?
static FORKED: AtomicBool = AtomicBool::new(false);
/// For the thread that settles what waits for too long.
static WAITS: Condvar = Condvar::new();

thread_local! {
    /// Is this thread inside of the hook? What the driver calls meanwhile is the driver's.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// The manager, which is made of the environment at its first use.
fn manager() -> Guard {
    made(MANAGER.lock().unwrap_or_else(PoisonError::into_inner))
}

fn made(mut manager: Guard) -> Guard {
    manager.get_or_insert_with(|| Manager::new(Real::default(), Options::get().quota));
    manager
}

/// Is anything put off?
pub(crate) fn is_unsettled() -> bool {
    UNSETTLED.load(Ordering::Acquire)
}

/// Is this a call of the program's, in the process that the hook is of?
pub(crate) fn is_here() -> bool {
    !FORKED.load(Ordering::Acquire) && !INSIDE.get()
}

/// Says what of the environment was not understood, and leaves children alone that are forked from here on.
pub(crate) fn greet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        crate::sys::at_fork(|| {
            FORKED.store(true, Ordering::Release);
            gate::forget();
            crate::control::forget();
        });
        gate::prepare();
        crate::sys::at_exit(end);
        for text in &Options::get().wrong {
            log::line(Level::Error, "environment", &[("text", text.as_str().into())]);
        }
        crate::control::start();
    });
}

/// The program exits: what its handlers call goes through, also if it is paused.
pub(crate) extern "C" fn end() {
    if FORKED.load(Ordering::Acquire) {
        return;
    }
    crate::control::remove();
    crate::pause::finish();
}

/// Before a call of the program's: waits while it is paused. What only frees needs no memory at the program's end.
pub(crate) fn enter(only_frees: bool) -> Option<Pass> {
    if !is_here() {
        return None;
    }
    let (pass, is_ending) = gate::enter();
    if is_ending && !only_frees {
        bring_back();
    }
    Some(pass)
}

/// Resumes for handlers of the program's end that use memory. If it can't be had, the driver tells them.
#[cold]
fn bring_back() {
    let _ = with(|manager| if manager.is_paused() { manager.resume().map(drop) } else { Ok(()) });
}

/// Does the hook do anything here?
pub(crate) fn is_on() -> bool {
    is_here() && Options::get().mode == Mode::Vmm
}

/// Runs what belongs to the hook: what it calls of the driver is not hooked again.
pub(crate) fn inside<R>(f: impl FnOnce() -> R) -> R {
    struct Leave(bool);
    impl Drop for Leave {
        fn drop(&mut self) {
            INSIDE.set(self.0);
        }
    }
    let _leave = Leave(INSIDE.replace(true));
    f()
}

/// Looks at the manager, unless it is busy for long.
pub(crate) fn look<R>(f: impl FnOnce(&Manager<Real>) -> R) -> Option<R> {
    let deadline = Instant::now() + Duration::from_millis(200);
    loop {
        match MANAGER.try_lock() {
            Ok(guard) => return made(guard).as_ref().map(f),
            Err(TryLockError::Poisoned(guard)) => return made(guard.into_inner()).as_ref().map(f),
            Err(TryLockError::WouldBlock) if Instant::now() >= deadline => return None,
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Asks the manager for something, logs what happened, and tells other threads whether anything is put off.
pub(crate) fn with<R>(f: impl FnOnce(&mut Manager<Real>) -> R) -> R {
    inside(|| {
        let mut guard = manager();
        let Some(manager) = guard.as_mut() else { unreachable!("it was just made") };
        let result = f(manager);
        for event in manager.events() {
            log::event(&event);
        }
        let unsettled = manager.is_unsettled();
        UNSETTLED.store(unsettled, Ordering::Release);
        if manager.waits() {
            start_the_clock();
            WAITS.notify_all();
        }
        result
    })
}

/// Before a call that may look at memory: what is put off is done. An error is the driver's code for the caller.
pub(crate) fn before() -> Result<()> {
    if UNSETTLED.load(Ordering::Acquire) && is_on() { with(Manager::settle) } else { Ok(()) }
}

/// The first name that was asked for and the hook does not know.
static UNKNOWN: OnceLock<String> = OnceLock::new();

/// The first function of the driver that the program asked for and the hook does not know.
pub(crate) fn stranger() -> Option<&'static str> {
    UNKNOWN.get().map(String::as_str)
}

/// A name that the hook does not know was asked for: nothing is put off any more, and the program is not paused.
pub(crate) fn unknown(name: &str) {
    static ONCE: Once = Once::new();
    if is_on() {
        ONCE.call_once(|| {
            let _ = UNKNOWN.set(name.to_owned());
            log::line(Level::Info, "unknown", &[("name", name.into())]);
            let _ = with(Manager::put_nothing_off);
        });
    }
}

/// Starts the thread that settles what waits for longer than [`LONGEST`].
fn start_the_clock() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Signals are the program's threads'.
        let started =
            crate::sys::without_signals(|| std::thread::Builder::new().name("vmhook".into()).spawn(clock));
        if started.is_err() {
            log::line(Level::Error, "no-thread", &[]);
        }
    });
}

fn clock() {
    INSIDE.set(true);
    loop {
        let mut guard = manager();
        while !guard.as_ref().is_some_and(Manager::waits) {
            guard = WAITS.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        drop(guard);
        std::thread::sleep(LONGEST);
        // Whoever makes the next call is told what fails.
        let _ = with(Manager::settle_for_nobody);
        // What can't be settled is not tried without end.
        std::thread::sleep(LONGEST);
    }
}
