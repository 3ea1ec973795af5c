//! What a worker does over an accelerator: transfers, order, the pool, errors, many threads.

use std::sync::Arc;
use std::time::Duration;

use super::{Programs, TIMEOUT, numbers, soon, start, stop};
use crate::accelerator::Accelerator;
use crate::arguments;
use crate::device::QueueOptions;
use crate::error::Error;
use crate::launch::Limits;
use crate::memory::MemoryKind;
use crate::pool::PoolOptions;
use crate::programs::Program;
use crate::worker::{Argument, View, Worker, WorkerOptions};

fn add_all<A: Accelerator>(worker: &Worker<A>, programs: Programs<'_>, count: u32, addend: u32) {
    let kernel = worker.load(&programs(Program::Add)).expect("the program loads");
    let bytes = u64::from(count) * 4;
    let (input, output) = (worker.allocate(bytes).expect("memory"), worker.allocate(bytes).expect("memory"));
    let values = numbers(count);
    worker.write(&input, &values).expect("a write");
    let arguments = arguments![&input, &output, addend];
    worker.launch(&kernel, 64, &arguments).expect("a launch");
    let mut sums = vec![0u32; count as usize];
    worker.read(&output, &mut sums).expect("a read");
    assert!(
        values.iter().zip(&sums).all(|(value, sum)| value.wrapping_add(addend) == *sum),
        "{count} {addend}"
    );
}

pub(super) fn round_trip<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let worker = start(accelerator, PoolOptions::default());
    for (count, addend) in [(1, 7), (255, 1), (4096, u32::MAX), (100_003, 3)] {
        add_all(&worker, programs, count, addend);
    }
    let kernel = worker.load(&programs(Program::Bump)).expect("the program loads");
    let buffer = worker.allocate(4).expect("memory");
    worker.fill(&buffer, 0).expect("a fill");
    let arguments = arguments![&buffer, 1u32];
    for _ in 0..1500 {
        worker.launch(&kernel, 1, &arguments).expect("a launch");
    }
    let mut sum = [0u32];
    worker.read(&buffer, &mut sum).expect("a read");
    assert_eq!(sum, [1500], "launches run one after another, also when the queue fills up");
    // The kernel goes while its launches wait.
    worker.launch(&kernel, 1, &arguments).expect("a launch");
    drop(kernel);
    worker.read(&buffer, &mut sum).expect("a read");
    assert_eq!(sum, [1501]);
    drop(buffer);
    stop(&worker);
}

pub(super) fn large<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
    let worker = start(accelerator, PoolOptions::default());
    // More than both halves of the staging memory, and no multiple of them.
    let values = numbers((9 << 20) / 4 + 5);
    let buffer = worker.allocate(values.len() as u64 * 4).expect("memory");
    worker.write(&buffer, &values).expect("a write");
    let mut back = vec![0u32; values.len()];
    worker.read(&buffer, &mut back).expect("a read");
    assert!(values == back, "a large transfer comes back as it went");
    drop(buffer);
    stop(&worker);
}

pub(super) fn views<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
    let worker = start(accelerator, PoolOptions::default());
    let buffer = worker.allocate(100).expect("memory");
    assert_eq!(buffer.bytes(), 100);
    worker.fill(&buffer, 1).expect("a fill");
    worker.fill(buffer.view(10, 5).expect("a view"), 2).expect("a fill");
    worker.copy(buffer.view(90, 10).expect("a view"), buffer.view(10, 10).expect("a view")).expect("a copy");
    let mut bytes = [0u8; 100];
    worker.read(&buffer, &mut bytes).expect("a read");
    let at = |index: usize| (10..15).contains(&index) || (90..95).contains(&index);
    assert!(
        bytes.iter().enumerate().all(|(index, byte)| *byte == if at(index) { 2 } else { 1 }),
        "{bytes:?}"
    );
    for (offset, length) in [(0, 101), (100, 1), (u64::MAX, 2), (1, u64::MAX)] {
        assert!(matches!(buffer.view(offset, length), Err(Error::OutOfRange { .. })), "{offset} {length}");
    }
    drop(buffer);
    stop(&worker);
}

pub(super) fn reuse<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let worker = start(accelerator, PoolOptions::default());
    let kernel = worker.load(&programs(Program::Bump)).expect("the program loads");
    let results = worker.allocate(4 * 200).expect("memory");
    for index in 0..200u32 {
        // All of these get the same memory, while the commands of those before still wait.
        let scratch = worker.allocate(4).expect("memory");
        worker.fill(&scratch, 0).expect("a fill");
        let one = results.view(u64::from(index) * 4, 4).expect("a view");
        let arguments = arguments![&scratch, index];
        worker.launch(&kernel, 1, &arguments).expect("a launch");
        worker.copy(one, View::from(&scratch)).expect("a copy");
    }
    let mut back = [0u32; 200];
    worker.read(&results, &mut back).expect("a read");
    assert!(back.iter().enumerate().all(|(index, value)| index as u32 == *value), "{back:?}");
    let statistics = worker.statistics();
    assert_eq!((statistics.misses, statistics.hits), (2, 199), "{statistics:?}");
    drop(results);
    stop(&worker);
}

pub(super) fn limits<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
    let worker = start(accelerator, PoolOptions { limit: 4 << 20, zero: false });
    let first = worker.allocate(2 << 20).expect("memory");
    let second = worker.allocate(1 << 20).expect("memory");
    let third = worker.allocate(2 << 20);
    assert!(matches!(third, Err(Error::PoolLimit { in_use: 3_145_728, .. })), "{third:?}");
    assert_eq!((worker.statistics().buffers, worker.statistics().in_use), (2, 3 << 20));
    drop(first);
    assert_eq!((worker.statistics().buffers, worker.statistics().cached), (1, 2 << 20));
    // The free 2 MiB make room for another size.
    let fourth = worker.allocate(3 << 19).expect("memory");
    let statistics = worker.statistics();
    assert_eq!(
        (statistics.in_use, statistics.cached, statistics.peak),
        (5 << 19, 0, 3 << 20),
        "{statistics:?}"
    );
    drop((second, fourth));
    let none = worker.allocate(u64::MAX);
    assert!(matches!(none, Err(Error::PoolLimit { .. })), "{none:?}");
    stop(&worker);
}

pub(super) fn zeroed<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
    let worker = start(accelerator, PoolOptions { zero: true, ..PoolOptions::default() });
    for kind in [MemoryKind::Device, MemoryKind::Pinned] {
        for _ in 0..3 {
            let buffer = worker.allocate_kind(kind, 3000).expect("memory");
            let mut bytes = [1u8; 3000];
            worker.read(&buffer, &mut bytes).expect("a read");
            assert!(bytes.iter().all(|&byte| byte == 0), "{kind:?}: a former owner's bytes show");
            worker.fill(&buffer, 0x77).expect("a fill");
        }
    }
    // In a capture the zeroes would be recorded, and the memory stay as it is.
    let inner = worker.clone();
    let captured = worker.capture(|session| {
        let refused = [session.allocate(3000), inner.allocate(3000), inner.allocate_zeroed(3000)];
        assert!(refused.iter().all(|one| matches!(one, Err(Error::Capturing { .. }))), "{refused:?}");
        Ok(())
    });
    drop(captured.expect("a capture"));
    stop(&worker);
    let worker = start(accelerator, PoolOptions::default());
    let dirty = worker.allocate(300).expect("memory");
    worker.fill(&dirty, 9).expect("a fill");
    drop(dirty);
    let inner = worker.clone();
    let captured = worker.capture(|session| {
        let refused = inner.allocate_zeroed(300);
        assert!(matches!(refused, Err(Error::Capturing { .. })), "{refused:?}");
        // What need not be zero may come out of the pool.
        session.fill(&session.allocate(300)?, 9)
    });
    drop(captured.expect("a capture"));
    worker.synchronize(TIMEOUT).expect("a wait");
    let clean = worker.allocate_zeroed(300).expect("memory");
    let mut bytes = [1u8; 300];
    worker.read(&clean, &mut bytes).expect("a read");
    assert_eq!(bytes, [0; 300]);
    drop(clean);
    stop(&worker);
}

pub(super) fn trim<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
    let worker = start(accelerator, PoolOptions::default());
    let kept = worker.allocate(1 << 20).expect("memory");
    worker.trim().expect("a trim");
    let before = worker.memory().expect("memory info").reserved;
    drop(worker.allocate(32 << 20).expect("memory"));
    assert_eq!(worker.statistics().cached, 32 << 20);
    assert!(worker.memory().expect("memory info").reserved >= before + (32 << 20));
    worker.trim().expect("a trim");
    assert_eq!(worker.statistics().cached, 0);
    assert_eq!(worker.memory().expect("memory info").reserved, before, "the device has its memory back");
    drop(kept);
    stop(&worker);
}

pub(super) fn errors<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let worker = start(accelerator, PoolOptions::default());
    let broken = worker.load(&programs(Program::Broken));
    assert!(matches!(&broken, Err(Error::Load { reason, .. }) if !reason.is_empty()), "{broken:?}");
    let kernel = worker.load(&programs(Program::Add)).expect("the program loads");
    let buffer = worker.allocate(128).expect("memory");
    let part = |offset, bytes| buffer.view(offset, bytes).expect("a view");
    let good = arguments![part(0, 64), part(64, 64), 1u32];
    let check = |grid: [u32; 3], arguments: &[Argument<'_, A>], want: &str| {
        let error = worker.launch(&kernel, grid, arguments).expect_err(want);
        assert!(error.to_string().contains(want), "{error}: {want}");
    };
    let one = [1; 3];
    check([0, 1, 1], &good, "no blocks along x");
    check([1, 1, u32::MAX], &good, "along z");
    check(one, &good[..2], "2 arguments given, 3 wanted");
    check(one, &arguments![good[0], good[1], good[2], good[2]], "only 3 parameters");
    check(one, &arguments![2u32, good[1], good[2]], "a buffer is wanted");
    check(one, &arguments![good[0], good[1], good[1]], "a scalar of 4 bytes is wanted");
    check(one, &arguments![good[0], good[1], 1u64], "of 8 bytes was given");
    check(one, &arguments![part(0, 6), good[1], good[2]], "no whole number of rows");
    check(one, &arguments![part(2, 8), good[1], good[2]], "not aligned");
    check(one, &arguments![part(4, 64), part(64, 64), 1u32], "overlaps");

    let other = start(accelerator, PoolOptions::default());
    let wrong = Err(Error::WrongWorker { what: "buffer" });
    assert_eq!(other.fill(&buffer, 0), wrong);
    let theirs = other.load(&programs(Program::Add)).expect("a load");
    assert_eq!(other.launch(&theirs, 1, &good), wrong);
    assert_eq!(other.launch(&kernel, 1, &good), Err(Error::WrongWorker { what: "kernel" }));
    stop(&other);
    assert!(matches!(other.allocate(1), Err(Error::Stopped)));

    let panicked = worker.submit_and_wait(soon(), |_| -> Result<(), Error> { panic!("number {}", 9) });
    assert_eq!(panicked, Err(Error::Panicked { message: "number 9".into() }));
    worker.launch(&kernel, 1, &good).expect("the worker goes on after a panic");
    worker.synchronize(TIMEOUT).expect("a wait");
    drop((buffer, kernel));
    stop(&worker);
    stop(&worker);
}

pub(super) fn waits_without_an_end<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let timeout = Duration::MAX;
    let queue = QueueOptions { timeout, ..QueueOptions::default() };
    let limits = Limits { time: timeout, ..Limits::default() };
    let options = WorkerOptions { queue, limits, ..WorkerOptions::default() };
    let worker = Worker::<A>::start(Arc::clone(accelerator), options).expect("a worker starts");
    let spin = worker.load(&programs(Program::Spin)).expect("the program loads");
    let pinned = worker.allocate_kind(MemoryKind::Pinned, 4).expect("memory");
    worker.launch(&spin, 1, &arguments![&pinned, 1u64]).expect("a launch");
    worker.synchronize(timeout).expect("a wait");
    drop(pinned);
    worker.trim().expect("a trim");
    worker.stop(timeout).expect("a worker stops");
}

pub(super) fn threads<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let worker = start(accelerator, PoolOptions::default());
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let worker = worker.clone();
            scope.spawn(move || {
                for round in 0..8 {
                    add_all(&worker, programs, 1000 + thread * 37 + round, thread * 100 + round);
                }
            });
        }
    });
    assert_eq!(worker.statistics().buffers, 0);
    stop(&worker);
}

pub(super) fn host_kinds<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let worker = start(accelerator, PoolOptions::default());
    let kernel = worker.load(&programs(Program::Bump)).expect("the program loads");
    let mut kinds = vec![MemoryKind::Pinned];
    kinds.extend(accelerator.info().unified.then_some(MemoryKind::Unified));
    for kind in kinds {
        let host = worker.allocate_kind(kind, 4000).expect("memory");
        let values = numbers(1000);
        worker.write(&host, &values).expect("a write");
        let arguments = arguments![&host, 3u32];
        worker.launch(&kernel, 4, &arguments).expect("a launch");
        let mut back = vec![0u32; 1000];
        worker.read(&host, &mut back).expect("a read waits for the kernel");
        assert!(values.iter().zip(&back).all(|(value, sum)| value.wrapping_add(3) == *sum), "{kind:?}");
    }
    stop(&worker);
}

pub(super) fn timed<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
    let worker = start(accelerator, PoolOptions::default());
    let buffer = worker.allocate(8 << 20).expect("memory");
    let time = worker.submit_and_wait(soon(), |session| {
        session.timed(soon(), |session| (0..4).try_for_each(|value| session.fill(&buffer, value)))
    });
    let time = time.expect("a time");
    assert!(time > Duration::ZERO && time < TIMEOUT, "{time:?}");
    drop(buffer);
    stop(&worker);
}
