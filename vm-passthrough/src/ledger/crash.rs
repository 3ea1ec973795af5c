//! Crashes on demand: the process dies by SIGKILL before or after the n-th change of the ledger or of sysfs, and after each
//! lock. A test may also stop a thread at these points, and observe when one waits for a lock.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::rc::Rc;
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};

/// Points left until the crash; negative for none.
static LEFT: AtomicI64 = AtomicI64::new(-1);
/// Points passed.
static PASSED: AtomicI64 = AtomicI64::new(0);

/// Makes this process die at the `point`th point from now.
pub(crate) fn arm(point: i64) {
    LEFT.store(point, SeqCst);
}

/// How many points were passed.
pub(crate) fn passed() -> i64 {
    PASSED.load(SeqCst)
}

/// Where a thread is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum At {
    /// It is at a place to die at.
    Point,
    /// It waits for a lock, or for a claim that another is changing.
    Wait,
}

type Observer = Rc<dyn Fn(At)>;

thread_local! {
    static OBSERVER: RefCell<Option<Observer>> = const { RefCell::new(None) };
}

/// Calls `observer` at each of these places of this thread.
pub(crate) fn observe(observer: impl Fn(At) + 'static) {
    OBSERVER.set(Some(Rc::new(observer)));
}

fn observed(at: At) {
    if let Some(observer) = OBSERVER.with_borrow(Clone::clone) {
        observer(at);
    }
}

/// A place where a thread waits for another.
pub(crate) fn wait_point() {
    observed(At::Wait);
}

fn is_due() -> bool {
    observed(At::Point);
    PASSED.fetch_add(1, SeqCst);
    LEFT.load(SeqCst) >= 0 && LEFT.fetch_sub(1, SeqCst) == 0
}

fn die() -> ! {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    unreachable!("SIGKILL does not return")
}

/// A place to die at.
pub(crate) fn crash_point() {
    if is_due() {
        die()
    }
}

/// A place to die at after half of `text` was written.
pub(crate) fn tear_point(file: &File, text: &str) {
    if is_due() {
        file.write_all_at(&text.as_bytes()[..text.len() / 2], 0).unwrap();
        die()
    }
}
