//! Crashes on demand: the process dies by SIGKILL before or after the n-th change of the ledger or of sysfs.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
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

fn is_due() -> bool {
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
