//! The conformance suite on the simulated accelerator, and what only a simulated one can show: faults.
#![cfg(not(loom))]

use std::fs::File;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use vm_accel::fake::{FakeAccelerator, FakeCall};
use vm_accel::programs::Program;
use vm_accel::{
    Artifact, Error, MemoryKind, Parameter, ParameterKind, PoolOptions, QueueOptions, Signature, Worker,
    WorkerOptions, arguments,
};

const TIMEOUT: Duration = Duration::from_secs(20);

fn start(device: &Arc<FakeAccelerator>) -> Worker<FakeAccelerator> {
    Worker::start(Arc::clone(device), WorkerOptions::default()).unwrap()
}

fn soon() -> Instant {
    Instant::now() + TIMEOUT
}

fn shared_file() -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(8192).unwrap();
    file
}

#[test]
fn conforms() {
    let device = Arc::new(FakeAccelerator::new());
    assert_eq!(
        vm_accel::conformance::check(&device, &FakeAccelerator::artifact),
        vm_accel::conformance::CASES
    );
    let other = Arc::new(FakeAccelerator::new());
    vm_accel::conformance::events_between(&device, &other);
    vm_accel::conformance::turns(&device, &FakeAccelerator::artifact, &shared_file);
    assert_eq!((device.used(), other.used(), device.imported()), (0, 0, 0));
}

#[test]
fn jobs_run_in_order_and_inline_on_the_worker() {
    let device = Arc::new(FakeAccelerator::new());
    let worker = start(&device);
    let (send, receive) = channel();
    let jobs: Vec<_> = (0..100)
        .map(|index| {
            let (send, worker) = (send.clone(), worker.clone());
            worker
                .clone()
                .submit(move |_| {
                    send.send((index, "outer")).unwrap();
                    let inner = worker.submit_and_wait(soon(), |_| {
                        send.send((index, "inner")).unwrap();
                        Ok(index)
                    });
                    assert_eq!(worker.allocate(16)?.bytes(), 16);
                    worker.synchronize(TIMEOUT)?;
                    inner
                })
                .unwrap()
        })
        .collect();
    for (index, job) in jobs.into_iter().enumerate() {
        assert_eq!(job.wait(soon()).unwrap(), index);
    }
    let theirs = worker.clone();
    let stopped = worker.submit_and_wait(soon(), move |_| theirs.stop(TIMEOUT));
    assert!(
        matches!(stopped, Err(Error::Deadline { .. })),
        "a job can't wait for its own thread: {stopped:?}"
    );
    let order: Vec<_> = receive.try_iter().collect();
    assert!(order.chunks(2).enumerate().all(|(index, pair)| pair == [(index, "outer"), (index, "inner")]));
    worker.stop(TIMEOUT).unwrap();
}

/// Keeps the worker busy until what it returns is dropped.
fn block(worker: &Worker<FakeAccelerator>) -> std::sync::mpsc::Sender<()> {
    let (release, wait) = channel::<()>();
    let (started, running) = channel();
    drop(worker.submit(move |_| {
        started.send(()).unwrap();
        let _ = wait.recv();
        Ok(())
    }));
    running.recv().unwrap();
    release
}

#[test]
fn a_queued_job_can_be_cancelled() {
    let worker = start(&Arc::new(FakeAccelerator::new()));
    let release = block(&worker);
    let ran = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let counted = |ran: &Arc<std::sync::atomic::AtomicU32>| {
        let ran = Arc::clone(ran);
        move |_: &_| Ok(ran.fetch_add(1, std::sync::atomic::Ordering::SeqCst))
    };
    let cancelled = worker.submit(counted(&ran)).unwrap();
    assert!(cancelled.cancel());
    let mut local = 0;
    let borrowed = worker.submit_and_wait(Instant::now() + Duration::from_millis(20), |_| {
        local += 1;
        Ok(())
    });
    assert!(matches!(borrowed, Err(Error::Deadline { .. })), "{borrowed:?}");
    let waited = worker.submit(counted(&ran)).unwrap().wait(Instant::now() + Duration::from_millis(20));
    assert!(matches!(waited, Err(Error::Deadline { .. })), "{waited:?}");
    drop(release);
    worker.synchronize(TIMEOUT).unwrap();
    assert_eq!(cancelled.wait(soon()), Err(Error::Cancelled));
    assert_eq!((local, ran.load(std::sync::atomic::Ordering::SeqCst)), (0, 0));
    worker.stop(TIMEOUT).unwrap();
}

#[test]
fn a_full_queue_says_so() {
    let options = WorkerOptions {
        capacity: 4,
        queue: QueueOptions { timeout: Duration::from_millis(50), ..QueueOptions::default() },
        ..WorkerOptions::default()
    };
    let worker = Worker::<FakeAccelerator>::start(Arc::new(FakeAccelerator::new()), options).unwrap();
    let buffer = worker.allocate(16).unwrap();
    let release = block(&worker);
    let jobs: Vec<_> = (0..8).map(|_| worker.submit(|_| Ok(()))).collect();
    let refused = jobs.iter().filter(|job| matches!(job, Err(Error::QueueFull { capacity: 4 }))).count();
    assert_eq!(refused, 5, "one slot is the running job's");
    assert_eq!(worker.fill(&buffer, 0), Err(Error::QueueFull { capacity: 4 }), "after the timeout");
    drop(release);
    jobs.into_iter().flatten().for_each(|job| job.wait(soon()).unwrap());
    worker.stop(TIMEOUT).unwrap();
}

#[test]
fn stop_runs_what_was_queued() {
    let device = Arc::new(FakeAccelerator::new());
    let worker = start(&device);
    let release = block(&worker);
    let jobs: Vec<_> = (0..50).map(|index| worker.submit(move |_| Ok(index)).unwrap()).collect();
    assert!(matches!(worker.stop(Duration::from_millis(20)), Err(Error::Deadline { .. })));
    assert!(matches!(worker.submit(|_| Ok(())), Err(Error::Stopped)));
    drop(release);
    for (index, job) in jobs.into_iter().enumerate() {
        assert_eq!(job.wait(soon()), Ok(index));
    }
    worker.stop(TIMEOUT).unwrap();
    assert_eq!(device.used(), 0);
}

#[test]
fn the_future_wakes_and_a_fence_waits_for_the_device() {
    let device = Arc::new(FakeAccelerator::new());
    let worker = start(&device);
    let buffer = worker.allocate(16).unwrap();
    device.pause();
    worker.fill(&buffer, 3).unwrap();
    let mut fence = pin!(worker.fence().unwrap());
    let mut context = Context::from_waker(Waker::noop());
    worker.submit_and_wait(soon(), |_| Ok(())).unwrap();
    assert!(fence.as_mut().poll(&mut context).is_pending(), "the device has not done it");
    let late = worker.synchronize(Duration::from_millis(20));
    assert!(matches!(late, Err(Error::Deadline { .. })), "{late:?}");
    device.resume();
    let end = soon();
    while fence.as_mut().poll(&mut context).is_pending() {
        assert!(Instant::now() < end);
        std::thread::yield_now();
    }
    drop(buffer);
    worker.stop(TIMEOUT).unwrap();
}

#[test]
fn a_job_may_not_use_memory_that_queued_commands_still_use() {
    let worker = start(&Arc::new(FakeAccelerator::new()));
    let old = worker.allocate(512).unwrap();
    let (started, running) = channel();
    let (send, receive) = channel::<vm_accel::Buffer<FakeAccelerator>>();
    let job = worker
        .submit(move |session| {
            started.send(()).unwrap();
            let buffer = receive.recv().unwrap();
            let fresh = session.allocate(512)?;
            Ok((session.fill(&buffer, 1), fresh.address() == buffer.address(), session.fill(&fresh, 1)))
        })
        .unwrap();
    running.recv().unwrap();
    worker.fill(&old, 7).unwrap();
    let address = old.address();
    drop(old);
    let again = worker.allocate(512).unwrap();
    assert_eq!(again.address(), address, "a caller gets it back at once");
    send.send(again).unwrap();
    assert_eq!(job.wait(soon()).unwrap(), (Err(Error::OutOfOrder), false, Ok(())));
    worker.stop(TIMEOUT).unwrap();
}

#[test]
fn faults_become_errors_and_the_worker_goes_on_or_says_that_it_is_lost() {
    let device = Arc::new(FakeAccelerator::new());
    let planted = || Error::Host { what: "a test", cause: "planted".into() };
    device.fail_next(FakeCall::Open, planted());
    let refused = Worker::<FakeAccelerator>::start(Arc::clone(&device), WorkerOptions::default());
    assert_eq!(refused.err(), Some(planted()));
    device.panic_next(FakeCall::Open);
    let refused = Worker::<FakeAccelerator>::start(Arc::clone(&device), WorkerOptions::default());
    assert!(matches!(refused.err(), Some(Error::Panicked { .. })));

    let worker = start(&device);
    let kernel = worker.load(&FakeAccelerator::artifact(Program::Bump)).unwrap();
    let buffer = worker.allocate(64).unwrap();
    let arguments = arguments![&buffer, 1u32];
    let mut bytes = [0u8; 64];
    for (call, panics) in [(FakeCall::Launch, false), (FakeCall::Launch, true), (FakeCall::Fill, true)] {
        if panics {
            device.panic_next(call)
        } else {
            device.fail_next(call, planted())
        }
        worker.fill(&buffer, 0).unwrap();
        worker.launch(&kernel, 1, &arguments).unwrap();
        let error = worker.synchronize(TIMEOUT).expect_err("the wait says what failed");
        assert_eq!(matches!(error, Error::Panicked { .. }), panics, "{error}");
        worker.synchronize(TIMEOUT).expect("it is said once");
    }
    device.fail_next(FakeCall::EndCapture, planted());
    assert_eq!(worker.capture(|session| session.fill(&buffer, 1)).err(), Some(planted()));
    let oom = Error::OutOfMemory { kind: "device", bytes: 1, free: 0, total: 0 };
    device.fail_next(FakeCall::Allocate, oom.clone());
    worker.allocate(5000).expect("a second try after a trim");
    device.fail_next(FakeCall::Allocate, oom.clone());
    device.fail_next(FakeCall::Allocate, oom.clone());
    let before = worker.statistics();
    assert_eq!(worker.allocate(9000).err(), Some(oom));
    assert_eq!(worker.statistics().in_use, before.in_use);
    worker.read(&buffer, &mut bytes).unwrap();

    device.lose();
    worker.fill(&buffer, 0).unwrap();
    assert!(worker.synchronize(TIMEOUT).is_err_and(|error| error.is_lost()));
    assert!(worker.launch(&kernel, 1, &arguments).is_err_and(|error| error.is_lost()));
    assert!(worker.allocate(1).is_err_and(|error| error.is_lost()));
    assert!(worker.submit(|_| Ok(())).is_err_and(|error| error.is_lost()));
    drop((buffer, kernel));
    assert!(worker.stop(TIMEOUT).is_err_and(|error| error.is_lost()));
}

#[test]
fn buffers_outlive_their_worker_without_harm() {
    let device = Arc::new(FakeAccelerator::new());
    let worker = start(&device);
    let kernel = worker.load(&FakeAccelerator::artifact(Program::Bump)).unwrap();
    let buffer = worker.allocate(64).unwrap();
    let graph = worker.capture(|session| session.fill(&buffer, 1)).unwrap();
    worker.stop(TIMEOUT).unwrap();
    assert_eq!(device.used(), 0, "the queue freed it");
    assert_eq!(worker.replay(&graph), Err(Error::Stopped));
    assert_eq!(worker.fill(&buffer, 0), Err(Error::Stopped));
    drop((graph, buffer, kernel, worker));
}

#[test]
fn dropping_the_last_handle_ends_the_thread() {
    let device = Arc::new(FakeAccelerator::new());
    let worker = start(&device);
    let buffer = worker.allocate_kind(MemoryKind::Device, 1 << 20).unwrap();
    let job = worker.submit(|_| Ok(5)).unwrap();
    drop(worker);
    assert_eq!(job.wait(soon()), Ok(5));
    let end = soon();
    while device.used() > 0 {
        assert!(Instant::now() < end, "the queue was not dropped");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(buffer);
}

#[test]
fn polling_a_job_gives_its_result() {
    let worker = start(&Arc::new(FakeAccelerator::new()));
    let mut job = pin!(worker.submit(|_| Ok(11)).unwrap());
    worker.synchronize(TIMEOUT).unwrap();
    let polled = job.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert_eq!(polled, Poll::Ready(Ok(11)));
    worker.stop(TIMEOUT).unwrap();
}

#[test]
fn zeroing_reaches_memory_that_a_running_job_takes() {
    let options = WorkerOptions {
        pool: PoolOptions { zero: true, ..PoolOptions::default() },
        ..WorkerOptions::default()
    };
    let worker = Worker::<FakeAccelerator>::start(Arc::new(FakeAccelerator::new()), options).unwrap();
    let mut bytes = [1u8; 100];
    worker
        .submit_and_wait(soon(), |session| {
            let buffer = session.allocate(100)?;
            session.read(&buffer, &mut bytes)
        })
        .unwrap();
    assert_eq!(bytes, [0; 100]);
    worker.stop(TIMEOUT).unwrap();
}

#[test]
fn a_borrow_lasts_until_the_job_has_ended_whatever_the_deadline() {
    let worker = start(&Arc::new(FakeAccelerator::new()));
    let late = Duration::from_millis(20);
    let mut local = vec![0u8; 1 << 16];
    let begun = Instant::now();
    let result = worker.submit_and_wait(begun + late, |_| {
        for byte in &mut local {
            *byte += 1;
        }
        std::thread::sleep(5 * late);
        local.iter_mut().for_each(|byte| *byte += 1);
        Ok(local.len())
    });
    assert_eq!(result, Ok(1 << 16), "it started in time, so it ends and its result counts");
    assert!(begun.elapsed() >= 5 * late);
    assert!(local.iter().all(|&byte| byte == 2));
    worker.stop(TIMEOUT).unwrap();
}

#[test]
fn batches_become_graphs_and_a_fault_in_one_loses_no_launch() {
    let device = Arc::new(FakeAccelerator::new());
    let worker = Worker::<FakeAccelerator>::start(Arc::clone(&device), WorkerOptions::default()).unwrap();
    let bump = worker.load(&FakeAccelerator::artifact(Program::Bump)).unwrap();
    let data = worker.allocate_zeroed(4).unwrap();
    let run_over = |grid: u32, launches: u32, in_graphs: u64| {
        let before = device.graph_launches();
        worker.fill(&data, 0).unwrap();
        let mut batch = worker.batch();
        (0..launches).for_each(|by| batch.launch(&bump, grid, &arguments![&data, by]).unwrap());
        worker.launch_batch(batch).unwrap();
        let mut sum = [7u32];
        worker.read(&data, &mut sum).unwrap();
        assert_eq!(sum, [launches * (launches - 1) / 2]);
        assert_eq!(device.graph_launches() - before, in_graphs, "{launches} launches");
    };
    let run = |launches: u32, in_graphs: u64| run_over(1, launches, in_graphs);
    // A long one becomes a graph at once, a short one when it came often; nothing is longer than 64.
    run(40, 40);
    run(40, 40);
    (0..10).for_each(|_| run(3, 0));
    run(3, 3);
    run(3, 3);
    run(130, 128);
    // More shapes than are kept.
    for grid in [1, 2, 3, 1, 2, 3] {
        (32..=64).for_each(|launches| run_over(grid, launches, launches.into()));
    }
    let cause = Error::Unsupported { what: "that".into(), device: "this".into() };
    device.fail_next(FakeCall::EndCapture, cause);
    drop(bump);
    let bump = worker.load(&FakeAccelerator::artifact(Program::Bump)).unwrap();
    let mut batch = worker.batch();
    worker.fill(&data, 0).unwrap();
    (0..40u32).for_each(|by| batch.launch(&bump, 1, &arguments![&data, by]).unwrap());
    let before = device.graph_launches();
    worker.launch_batch(batch).unwrap();
    let mut sum = [0u32];
    worker.read(&data, &mut sum).unwrap();
    assert_eq!((sum, device.graph_launches()), ([780], before));
    drop((data, bump));
    worker.stop(TIMEOUT).unwrap();
}

#[test]
fn launches_that_wait_in_a_row_keep_their_place_among_all_else() {
    let device = Arc::new(FakeAccelerator::new());
    let worker = start(&device);
    let bump = worker.load(&FakeAccelerator::artifact(Program::Bump)).unwrap();
    let spin = worker.load(&FakeAccelerator::artifact(Program::Spin)).unwrap();
    let data = worker.allocate_zeroed(4).unwrap();
    let copies = worker.allocate_zeroed(16).unwrap();
    let one = arguments![&data, 1u32];
    let graph = worker.capture(|session| session.launch(&bump, 1, &one)).unwrap();
    let word = copies.view(12, 4).unwrap();
    let guarded = worker.capture(|session| session.launch(&spin, 1, &arguments![word, 1u64])).unwrap();
    for round in 1..=4u32 {
        let (go, wait) = channel::<()>();
        let held = worker.submit(move |_| wait.recv().map_err(|_| Error::Stopped)).unwrap();
        let launch = |count: u32| (0..count).for_each(|_| worker.launch(&bump, 1, &one).unwrap());
        let copy = |index: u64| worker.copy(copies.view(4 * index, 4).unwrap(), &data).unwrap();
        worker.fill(&copies, 0).unwrap();
        worker.fill(&data, 0).unwrap();
        launch(37);
        copy(0);
        launch(64);
        worker.replay(&guarded).unwrap();
        launch(5);
        (0..20).for_each(|_| worker.launch(&spin, 1, &arguments![word, 1u64]).unwrap());
        let mut batch = worker.batch();
        (0..40).for_each(|_| batch.launch(&bump, 1, &one).unwrap());
        worker.launch_batch(batch).unwrap();
        copy(1);
        launch(3);
        worker.replay(&graph).unwrap();
        let job = worker.launch_job(&bump, 1, &one).unwrap();
        launch(2);
        let inside = worker.submit({
            let inner = worker.clone();
            let bump = bump.clone();
            move |session| {
                let fresh = session.allocate(4)?;
                session.fill(&fresh, 0)?;
                inner.launch(&bump, 1, &arguments![&fresh, 7u32])?;
                let mut value = [0u8; 4];
                session.read(&fresh, &mut value)?;
                Ok(value)
            }
        });
        copy(2);
        launch(50 * round);
        go.send(()).unwrap();
        held.wait(soon()).unwrap();
        job.wait(soon()).unwrap();
        assert_eq!(inside.unwrap().wait(soon()), Ok([7, 0, 0, 0]));
        let mut values = [0u32; 4];
        worker.read(&copies, &mut values).unwrap();
        assert_eq!(values, [37, 146, 153, 1]);
        let mut sum = [0u32];
        worker.read(&data, &mut sum).unwrap();
        assert_eq!(sum, [153 + 50 * round]);
    }
    assert!(device.graph_launches() > 1000, "{}", device.graph_launches());
    drop((data, copies, graph, guarded));
    worker.stop(TIMEOUT).unwrap();
}

#[test]
fn every_stop_waits_for_the_same_end_and_says_the_same() {
    let device = Arc::new(FakeAccelerator::new());
    let options = WorkerOptions {
        queue: QueueOptions { timeout: Duration::from_millis(50), ..QueueOptions::default() },
        ..WorkerOptions::default()
    };
    let worker = Worker::<FakeAccelerator>::start(Arc::clone(&device), options).unwrap();
    let buffer = worker.allocate(16).unwrap();
    // A device that does not end its work may use registered memory for ever.
    device.pause();
    worker.fill(&buffer, 1).unwrap();
    let stops = std::thread::scope(|scope| {
        let stops = [(); 3].map(|()| scope.spawn(|| worker.stop(TIMEOUT)));
        stops.map(|stop| stop.join().unwrap())
    });
    for stop in stops.into_iter().chain([worker.stop(TIMEOUT)]) {
        assert!(matches!(stop, Err(Error::Deadline { .. })), "{stop:?}");
    }

    // What a command failed with is said once: the worker has ended all the same.
    let worker = start(&Arc::new(FakeAccelerator::new()));
    let release = block(&worker);
    let late = worker.stop(Duration::from_millis(10));
    assert!(matches!(late, Err(Error::Deadline { .. })), "{late:?}");
    drop(release);
    worker.stop(TIMEOUT).unwrap();
    let device = Arc::new(FakeAccelerator::new());
    let worker = start(&device);
    let buffer = worker.allocate(16).unwrap();
    let planted = Error::Host { what: "a test", cause: "planted".into() };
    device.fail_next(FakeCall::Fill, planted.clone());
    worker.fill(&buffer, 1).unwrap();
    assert_eq!(worker.stop(TIMEOUT), Err(planted));
    assert_eq!(worker.stop(TIMEOUT), Ok(()));
}

#[test]
#[allow(unsafe_code)]
fn registered_memory_goes_back_by_itself_when_its_last_graph_is_gone() {
    let device = Arc::new(FakeAccelerator::new());
    let worker = start(&device);
    let mut host = vec![0u8; 64];
    let start = host.as_mut_ptr();
    // SAFETY: `host` outlives the worker, and nobody looks at it before that has stopped.
    let register = || unsafe { worker.register(start, 64) }.unwrap();
    let buffer = register();
    let graph = worker.capture(|session| session.fill(&buffer, 1)).unwrap();
    drop(buffer);
    assert_eq!(device.registered(), 64);
    // When the device is done with it, no command comes that would wake the worker up.
    device.pause();
    worker.replay(&graph).unwrap();
    drop(graph);
    std::thread::sleep(Duration::from_millis(20));
    device.resume();
    let end = soon();
    while device.registered() > 0 {
        assert!(Instant::now() < end, "it is registered still");
        std::thread::sleep(Duration::from_millis(1));
    }

    // Of a graph that was dropped but may run yet, the end is waited for.
    let buffer = register();
    let graph = worker.capture(|session| session.fill(&buffer, 2)).unwrap();
    device.pause();
    worker.replay(&graph).unwrap();
    drop(graph);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            device.resume();
        });
        assert_eq!(worker.free(buffer), Ok(()));
    });
    assert_eq!(device.registered(), 0);
    worker.stop(TIMEOUT).unwrap();
    assert_eq!(host, [2; 64]);
}

#[test]
#[allow(unsafe_code)]
fn registered_memory_is_not_of_the_pools_limit() {
    let device = Arc::new(FakeAccelerator::new());
    let pool = PoolOptions { limit: 4096, zero: false };
    let worker: Worker<FakeAccelerator> =
        Worker::start(device, WorkerOptions { pool, ..WorkerOptions::default() }).unwrap();
    let mut host = vec![0u8; 1 << 16];
    let start = host.as_mut_ptr();
    // SAFETY: `host` outlives the worker, and nobody looks at it.
    let register = || unsafe { worker.register(start, 1 << 16) }.unwrap();
    for free in [true, false] {
        let registered = register();
        let buffer = worker.allocate(4096).unwrap();
        assert!(matches!(worker.allocate(1), Err(Error::PoolLimit { in_use: 4096, limit: 4096, .. })));
        if free {
            worker.free(registered).unwrap();
        } else {
            drop(registered);
        }
        assert!(matches!(worker.allocate(1), Err(Error::PoolLimit { in_use: 4096, .. })));
        drop(buffer);
        // What is kept of it gives way to another size.
        worker.allocate(2048).unwrap();
        worker.synchronize(TIMEOUT).unwrap();
    }
    assert!(worker.statistics().in_use + worker.statistics().cached <= 4096);
    worker.stop(TIMEOUT).unwrap();
}

#[test]
#[allow(unsafe_code)]
fn more_parameters_than_the_device_passes_are_refused() {
    let worker = start(&Arc::new(FakeAccelerator::new()));
    let scalar = Parameter { name: "n".into(), kind: ParameterKind::Scalar { bytes: 8, range: None } };
    let load = |count: usize| {
        let signature = Signature { parameters: vec![scalar.clone(); count], ..Program::Add.signature() };
        // SAFETY: it is never run: the simulated accelerator runs its own programs only.
        worker.load(&unsafe { Artifact::new([], signature) }.unwrap()).unwrap_err().to_string()
    };
    let refused = load(513);
    assert!(refused.contains("parameters take 4104 bytes, simulated accelerator passes 4096"), "{refused}");
    assert!(!load(512).contains("4096"), "{}", load(512));
    worker.stop(TIMEOUT).unwrap();
}
