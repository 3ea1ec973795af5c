//! A launch allocates nothing: not on the caller's thread, and not on the worker's, which makes a graph of launches now
//! and then.
#![cfg(not(loom))]
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vm_accel::fake::FakeAccelerator;
use vm_accel::programs::Program;
use vm_accel::{Worker, WorkerOptions, arguments};

static ALL: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static MINE: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: all is the system's allocator's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALL.fetch_add(1, Ordering::Relaxed);
        let _ = MINE.try_with(|mine| mine.set(mine.get() + 1));
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const TIMEOUT: Duration = Duration::from_secs(20);

#[test]
fn a_launch_allocates_nothing() {
    let worker =
        Worker::<FakeAccelerator>::start(Arc::new(FakeAccelerator::new()), WorkerOptions::default()).unwrap();
    let copy = worker.load(&FakeAccelerator::artifact(Program::Copy4)).unwrap();
    let spin = worker.load(&FakeAccelerator::artifact(Program::Spin)).unwrap();
    let (source, target) = (worker.allocate(64).unwrap(), worker.allocate(64).unwrap());
    let shape = [1, 2, 2, 4];
    let views = arguments![source.shaped(&shape).unwrap(), target.shaped(&shape).unwrap()];
    let (word, turns) = (target.view(0, 4).unwrap(), 1u64);
    let launch = |count: u32| {
        (0..count).for_each(|_| worker.launch(&copy, [2, 1, 1], &views).unwrap());
    };
    // The simulated device's list grows as long as nobody polls.
    launch(3000);
    worker.synchronize(TIMEOUT).unwrap();
    let (before, mine) = (ALL.load(Ordering::SeqCst), MINE.get());
    launch(1000);
    assert_eq!(MINE.get() - mine, 0, "on the caller's thread");
    // As many as a few graphs take, however many launches there are.
    let all = ALL.load(Ordering::SeqCst) - before;
    assert!(all < 200, "{all} on any thread");
    worker.synchronize(TIMEOUT).unwrap();
    // A guarded launch records an event, for which the simulated device allocates; the caller does not.
    let mine = MINE.get();
    (0..1000).for_each(|_| worker.launch(&spin, 1, &arguments![word, turns]).unwrap());
    assert_eq!(MINE.get() - mine, 0, "for a guarded launch");
    worker.synchronize(TIMEOUT).unwrap();
    drop((source, target));
    worker.stop(TIMEOUT).unwrap();
}
