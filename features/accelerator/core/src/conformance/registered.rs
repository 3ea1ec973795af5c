//! Host memory that is registered with a device: when the host has it back, and that nothing touches it from then on.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use super::{Programs, TIMEOUT, soon, start, stop};
use crate::accelerator::Accelerator;
use crate::arguments;
use crate::error::{Error, Result};
use crate::pool::PoolOptions;
use crate::programs::Program;
use crate::worker::{Buffer, Graph, Worker};

/// Some pages of any size.
const BYTES: u64 = 64 << 10;

/// Pages of the host, reached by raw pointers only.
struct Pages(*mut u8);

impl Pages {
    const LAYOUT: Layout = match Layout::from_size_align(BYTES as usize, BYTES as usize) {
        Ok(layout) => layout,
        Err(_) => panic!("a layout"),
    };

    fn new() -> Self {
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(Self::LAYOUT) };
        assert!(!start.is_null(), "no host memory");
        Self(start)
    }

    /// Whether every byte is `value`.
    fn hold(&self, value: u8) -> bool {
        // SAFETY: the pages are there until the drop; each case waits for the device before it looks.
        (0..BYTES as usize).all(|at| unsafe { self.0.wrapping_add(at).read_volatile() } == value)
    }

    fn fill(&self, value: u8) {
        // SAFETY: as above.
        (0..BYTES as usize).for_each(|at| unsafe { self.0.wrapping_add(at).write_volatile(value) });
    }

    fn register<A: Accelerator>(&self, worker: &Worker<A>) -> Result<Buffer<A>> {
        // SAFETY: every case gives them back, or stops the worker, before they are dropped.
        unsafe { worker.register(self.0, BYTES) }
    }

    /// Registers them once the device has given them back, which nobody waited for.
    fn register_again<A: Accelerator>(&self, worker: &Worker<A>) -> Buffer<A> {
        let end = soon();
        loop {
            match self.register(worker) {
                Ok(buffer) => return buffer,
                Err(error) if std::time::Instant::now() >= end => {
                    panic!("the host does not get its memory back: {error}")
                }
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: they were allocated so, once.
        unsafe { dealloc(self.0, Self::LAYOUT) };
    }
}

fn finish<A: Accelerator>(worker: &Worker<A>) {
    worker.synchronize(TIMEOUT).expect("a wait");
}

pub(super) fn round_trip<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
    let pages = Pages::new();
    let worker = start(accelerator, PoolOptions::default());
    let registered = pages.register(&worker);
    if !accelerator.info().host_registration {
        assert!(matches!(registered, Err(Error::Unsupported { .. })), "{registered:?}");
        return stop(&worker);
    }
    let registered = registered.expect("a registration");
    let twice = pages.register(&worker);
    assert!(twice.is_err(), "{twice:?}");
    let device = worker.allocate(BYTES).expect("memory");
    worker.fill(&device, 0x5a).expect("a fill");
    worker.copy(&registered, &device).expect("a copy");
    worker.free(registered).expect("the host has its memory back");
    assert!(pages.hold(0x5a));
    let again = pages.register(&worker).expect("a registration after the end of one");
    worker.free(again).expect("the host has its memory back");
    drop(device);
    stop(&worker);
}

/// A graph that writes what `device` holds into `registered`.
fn copying<A: Accelerator>(worker: &Worker<A>, registered: &Buffer<A>, device: &Buffer<A>) -> Graph<A> {
    worker.capture(|session| session.copy(registered, device)).expect("a capture")
}

pub(super) fn graphs_keep_it<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
    if !accelerator.info().host_registration {
        return;
    }
    let pages = Pages::new();
    let worker = start(accelerator, PoolOptions::default());
    let device = worker.allocate(BYTES).expect("memory");
    let replay = |graph: &Graph<A>, value: u8| {
        worker.fill(&device, value).expect("a fill");
        worker.replay(graph).expect("a replay");
    };

    // While one of two graphs is there, it is not returned.
    let registered = pages.register(&worker).expect("a registration");
    let (first, second) = (copying(&worker, &registered, &device), copying(&worker, &registered, &device));
    drop(first);
    assert_eq!(worker.free(registered), Err(Error::InGraph));
    replay(&second, 0x11);
    finish(&worker);
    assert!(pages.hold(0x11), "the graph still reaches it");
    assert!(pages.register(&worker).is_err(), "it is registered still");
    drop(second);

    // A buffer that is dropped, while the graph is there and with it.
    let registered = pages.register_again(&worker);
    let graph = copying(&worker, &registered, &device);
    drop(registered);
    replay(&graph, 0x22);
    finish(&worker);
    assert!(pages.hold(0x22), "the graph still reaches it");
    assert!(pages.register(&worker).is_err(), "it is registered still");
    replay(&graph, 0x23);
    drop(graph);
    let registered = pages.register_again(&worker);
    assert!(pages.hold(0x23), "it goes back after the last replay");

    // Once the graph was dropped, it need not be waited for.
    let graph = copying(&worker, &registered, &device);
    (0x31..0x34).for_each(|value| replay(&graph, value));
    drop(graph);
    worker.free(registered).expect("the host has its memory back");
    assert!(pages.hold(0x33), "the replays ran before");
    pages.fill(0);
    finish(&worker);
    assert!(pages.hold(0), "nothing runs after");

    // A capture that fails keeps nothing, also of what is dropped in it.
    let registered = pages.register(&worker).expect("a registration");
    let failed = worker.capture(|session| {
        session.copy(&registered, &device)?;
        let refused = worker.free(registered);
        assert!(matches!(refused, Err(Error::Capturing { .. })), "{refused:?}");
        Err(Error::Cancelled)
    });
    assert_eq!(failed.err(), Some(Error::Cancelled));
    drop(pages.register_again(&worker));
    drop(device);
    stop(&worker);
}

pub(super) fn goes_back_in_order<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
    if !accelerator.info().host_registration {
        return;
    }
    let pages = Pages::new();
    let worker = start(accelerator, PoolOptions::default());
    let registered = pages.register(&worker).expect("a registration");
    // A job is given memory that a command behind it uses.
    let (give, take) = channel::<Buffer<A>>();
    let inner = worker.clone();
    let job = worker.submit(move |_| match take.recv_timeout(TIMEOUT) {
        Ok(buffer) => Ok(inner.free(buffer)),
        Err(_) => Err(Error::Stopped),
    });
    worker.fill(&registered, 0x44).expect("a fill");
    give.send(registered).expect("the job waits");
    assert_eq!(job.expect("a job").wait(soon()), Ok(Err(Error::OutOfOrder)));
    let registered = pages.register_again(&worker);
    assert!(pages.hold(0x44), "it goes back after what used it");
    // Behind nothing, a job may.
    let inner = worker.clone();
    worker.submit_and_wait(soon(), move |_| inner.free(registered)).expect("the host has its memory back");
    pages.fill(0);
    finish(&worker);
    assert!(pages.hold(0));
    stop(&worker);
}

pub(super) fn batches_keep_none<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    if !accelerator.info().host_registration {
        return;
    }
    let pages = Pages::new();
    let worker = start(accelerator, PoolOptions::default());
    let bump = worker.load(&programs(Program::Bump)).expect("the program loads");
    let device = worker.allocate_zeroed(BYTES).expect("memory");
    let bumped = |buffer: &Buffer<A>| {
        let mut batch = worker.batch();
        (0..40).for_each(|_| batch.launch(&bump, 4, &arguments![buffer, 1u32]).expect("a launch"));
        worker.launch_batch(batch).expect("a batch");
    };
    let registered = pages.register(&worker).expect("a registration");
    (0..3).for_each(|_| bumped(&registered));
    // What the accelerator keeps for the next batch of these kernels does not reach it any more.
    worker.free(registered).expect("the host has its memory back");
    pages.fill(0);
    (0..3).for_each(|_| bumped(&device));
    let mut sums = vec![0u32; BYTES as usize / 4];
    worker.read(&device, &mut sums).expect("a read");
    assert!(sums.iter().all(|sum| *sum == 120), "every launch ran");
    assert!(pages.hold(0), "and touched its own memory");
    drop((device, bump));
    stop(&worker);
}

pub(super) fn ends_with_the_worker<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
    if !accelerator.info().host_registration {
        return;
    }
    let pages = Pages::new();
    let worker = start(accelerator, PoolOptions::default());
    let device = worker.allocate(BYTES).expect("memory");
    let registered = pages.register(&worker).expect("a registration");
    let graph = copying(&worker, &registered, &device);
    worker.fill(&device, 0x55).expect("a fill");
    (0..100).for_each(|_| worker.replay(&graph).expect("a replay"));
    // Whichever clone learns that the worker has ended has the memory back.
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let worker = worker.clone();
            scope.spawn(move || stop(&worker));
        }
    });
    assert!(pages.hold(0x55), "what was queued ran");
    pages.fill(0);
    assert_eq!(worker.replay(&graph), Err(Error::Stopped));
    assert_eq!(worker.free(registered), Err(Error::Stopped));
    drop((graph, device));
    assert!(pages.hold(0));
}
