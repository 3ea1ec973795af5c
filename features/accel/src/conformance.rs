//! What every accelerator must do, as one suite: run [`check`] against an implementation.
//!
//! It panics at the first thing that is not as it must be, with the name of the case.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::accelerator::{Accelerator, Queue};
use crate::arguments;
use crate::artifact::Artifact;
use crate::device::QueueOptions;
use crate::error::Error;
use crate::extents::Extents;
use crate::launch::{Arguments, Grid, QueueArgument};
use crate::memory::MemoryKind;
use crate::pool::PoolOptions;
use crate::programs::Program;
use crate::worker::{AnyWorker, Argument, Worker, WorkerOptions};

/// How long anything here may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Where the suite gets its programs from, compiled for the accelerator.
pub type Programs<'a> = &'a (dyn Fn(Program) -> Artifact + Sync);

type Case<A> = (&'static str, fn(&Arc<A>, Programs<'_>));

/// Runs every case, and gives how many there were.
///
/// # Panics
/// When the accelerator does not conform.
pub fn check<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) -> usize {
    let cases: &[Case<A>] = &[
        ("info", info),
        ("queue: memory of each kind", queue_memory),
        ("queue: launch and events", queue_launch),
        ("queue: registered host memory", queue_registered),
        ("worker: write, launch, read", worker_round_trip),
        ("worker: large transfers", worker_large),
        ("worker: a view's part", worker_views),
        ("worker: memory is reused in order", worker_reuse),
        ("worker: limits and statistics", worker_limits),
        ("worker: zeroed memory", worker_zeroed),
        ("worker: trim", worker_trim),
        ("worker: graphs keep what they use", worker_graphs),
        ("worker: errors", worker_errors),
        ("worker: many threads", worker_threads),
        ("worker: pinned and unified buffers", worker_host_kinds),
    ];
    for (name, case) in cases {
        println!("conformance of {}: {name}", accelerator.info().backend);
        case(accelerator, programs);
    }
    cases.len()
}

fn start<A: Accelerator>(accelerator: &Arc<A>, pool: PoolOptions) -> Worker<A> {
    let options = WorkerOptions { pool, ..WorkerOptions::default() };
    Worker::start(Arc::clone(accelerator), options).expect("a worker starts")
}

fn stop<A: Accelerator>(worker: &Worker<A>) {
    worker.stop(PATIENCE).expect("a worker stops");
}

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

fn numbers(count: u32) -> Vec<u32> {
    (0..count).map(|n| n.wrapping_mul(2_654_435_761)).collect()
}

fn info<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
    let info = accelerator.info();
    assert!(!info.name.is_empty() && !info.target.is_empty() && !info.driver.is_empty(), "{info:?}");
    assert!(info.memory_bytes > 0 && info.units > 0 && info.lanes > 0, "{info:?}");
    assert!(info.block_items >= info.lanes && info.grid[0] > 0, "{info:?}");
}

fn queue_memory<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
    let queue = accelerator.open(&QueueOptions::default()).expect("a queue opens");
    let mut kinds = vec![MemoryKind::Device, MemoryKind::Pinned];
    kinds.extend(accelerator.info().unified.then_some(MemoryKind::Unified));
    let bytes: Vec<u8> = (0..=255).collect();
    let event = queue.event(false).expect("an event");
    assert!(queue.done(&event).expect("an event that was not recorded can be asked"));
    let staging = queue.allocate(MemoryKind::Pinned, 512).expect("pinned memory");
    for kind in kinds {
        let memory = queue.allocate(kind, 1024).expect("memory");
        assert_eq!((memory.bytes(), memory.kind()), (1024, kind));
        assert_eq!(memory.address() % 256, 0, "{kind:?}");
        let [low, high] = [0, 256].map(|offset| staging.region().slice(offset, 256).expect("a part"));
        low.write_host(&bytes).expect("the host writes pinned memory");
        queue.copy(memory.region().slice(100, 256).expect("a part"), low).expect("a copy in");
        queue.fill(memory.region().slice(100, 16).expect("a part"), 0xee).expect("a fill");
        queue.copy(high, memory.region().slice(100, 256).expect("a part")).expect("a copy out");
        queue.record(&event).expect("a record");
        queue.wait(&event, soon()).expect("the copies end");
        let mut back = vec![0; 256];
        high.read_host(&mut back).expect("the host reads pinned memory");
        assert_eq!(back[..16], [0xee; 16], "{kind:?}");
        assert_eq!(back[16..], bytes[16..], "{kind:?}");
        assert_eq!(memory.region().read_host(&mut [0; 1024]).is_ok(), kind.host_visible());
        let lengths = queue.copy(memory.region(), low);
        assert_eq!(lengths, Err(Error::Lengths { source_bytes: 256, destination_bytes: 1024 }));
        queue.free(memory).expect("a free");
    }
    queue.free(staging).expect("a free");
    assert!(matches!(queue.allocate(MemoryKind::Registered, 1), Err(Error::Unsupported { .. })));
    let total = queue.memory().expect("memory info").total;
    let too_much = queue.allocate(MemoryKind::Device, total.saturating_mul(4));
    assert!(matches!(too_much, Err(Error::OutOfMemory { .. })), "{too_much:?}");
    queue.trim(0).expect("a trim");
}

fn queue_launch<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let queue = accelerator.open(&QueueOptions::default()).expect("a queue opens");
    let kernel = queue.load(&programs(Program::Add)).expect("the program loads");
    let memory = queue.allocate(MemoryKind::Pinned, 8).expect("memory");
    let [input, output] = [0, 4].map(|offset| memory.region().slice(offset, 4).expect("a part"));
    input.write_host(&41u32.to_le_bytes()).expect("a write");
    let view = |region| QueueArgument::View(region, Extents::WHOLE);
    let arguments = [view(input), view(output), QueueArgument::Scalar(1u32.into())];
    let packed = Arguments::new(&programs(Program::Add), arguments).expect("the arguments fit");
    let (from, to) = (queue.event(true).expect("an event"), queue.event(true).expect("an event"));
    queue.record(&from).expect("a record");
    queue.launch(&kernel, Grid::from(1), &packed).expect("a launch");
    queue.record(&to).expect("a record");
    queue.wait(&to, soon()).expect("the kernel ends");
    assert!(queue.elapsed(&from, &to).expect("a time") < PATIENCE);
    let mut sum = [0; 4];
    output.read_host(&mut sum).expect("a read");
    assert_eq!(u32::from_le_bytes(sum), 42);
    queue.unload(kernel).expect("an unload");
    queue.free(memory).expect("a free");
}

#[allow(unsafe_code)]
fn queue_registered<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
    if !accelerator.info().host_registration {
        return;
    }
    let worker = start(accelerator, PoolOptions::default());
    let mut host = vec![0u8; 3 << 20];
    let start = host.as_ptr().align_offset(4096);
    let page = &raw mut host[start];
    let bytes = 2 << 20;
    // SAFETY: `host` outlives the buffer, and is not looked at until it has been given back.
    let registered = unsafe { worker.register(page, bytes) }.expect("a registration");
    // SAFETY: as above; it is refused anyway.
    let twice = unsafe { worker.register(page, bytes) };
    assert!(twice.is_err(), "{twice:?}");
    let device = worker.allocate(bytes).expect("memory");
    worker.fill(&device, 0x5a).expect("a fill");
    worker.copy(&registered, &device).expect("a copy");
    worker.free(registered).expect("the host has its memory back");
    assert!(host[start..start + bytes as usize].iter().all(|&byte| byte == 0x5a));
    drop(device);
    stop(&worker);
}

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

fn worker_round_trip<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
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

fn worker_large<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
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

fn worker_views<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
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

fn worker_reuse<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
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

use crate::worker::View;

fn worker_limits<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
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

fn worker_zeroed<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
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
    stop(&worker);
    let worker = start(accelerator, PoolOptions::default());
    let dirty = worker.allocate(300).expect("memory");
    worker.fill(&dirty, 9).expect("a fill");
    drop(dirty);
    let clean = worker.allocate_zeroed(300).expect("memory");
    let mut bytes = [1u8; 300];
    worker.read(&clean, &mut bytes).expect("a read");
    assert_eq!(bytes, [0; 300]);
    drop(clean);
    stop(&worker);
}

fn worker_trim<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
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

fn worker_graphs<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let worker = start(accelerator, PoolOptions::default());
    let kernel = worker.load(&programs(Program::Add)).expect("the program loads");
    let total = worker.allocate(4).expect("memory");
    let step = worker.allocate(4).expect("memory");
    worker.fill(&total, 0).expect("a fill");
    let graph = worker
        .capture(|session| {
            let first = arguments![&total, &step, 5u32];
            session.launch(&kernel, 1, &first)?;
            session.copy(&total, &step)
        })
        .expect("a capture");
    // The graph keeps the memory and the kernel, so nobody else gets them.
    let address = step.address();
    drop((step, kernel));
    let other = worker.allocate(4).expect("memory");
    assert_ne!(other.address(), address);
    for _ in 0..3 {
        worker.replay(&graph).expect("a replay");
        worker.fill(&other, 0xff).expect("a fill");
    }
    let mut sum = [0u32];
    worker.read(&total, &mut sum).expect("a read");
    assert_eq!(sum, [15]);
    let refused = worker.capture(|session| session.read(&total, &mut [0; 4]));
    assert!(matches!(refused, Err(Error::Capturing { .. })), "{refused:?}");
    let panicked = worker.capture(|_| panic!("in a capture"));
    assert!(matches!(panicked, Err(Error::Panicked { .. })), "{panicked:?}");
    worker.read(&total, &mut sum).expect("the worker goes on after a capture that failed");
    let buffers = worker.statistics().buffers;
    drop(graph);
    worker.synchronize(PATIENCE).expect("a wait");
    assert_eq!(worker.statistics().buffers, buffers);
    drop((other, total));
    stop(&worker);
}

fn worker_errors<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let worker = start(accelerator, PoolOptions::default());
    let broken = worker.load(&programs(Program::Broken));
    assert!(matches!(&broken, Err(Error::Load { reason, .. }) if !reason.is_empty()), "{broken:?}");
    let kernel = worker.load(&programs(Program::Add)).expect("the program loads");
    let buffer = worker.allocate(128).expect("memory");
    let part = |offset, bytes| buffer.view(offset, bytes).expect("a view");
    let good = arguments![part(0, 64), part(64, 64), 1u32];
    let check = |grid: [u32; 3], arguments: &[Argument<'_, A, AnyWorker>], want: &str| {
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
    worker.synchronize(PATIENCE).expect("a wait");
    drop((buffer, kernel));
    stop(&worker);
    stop(&worker);
}

fn worker_threads<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
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

fn worker_host_kinds<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
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
