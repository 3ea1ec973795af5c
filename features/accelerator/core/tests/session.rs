//! Sessions of the caller's own, without a worker: borrowed memory, further streams, typed buffers, guards.
#![cfg(not(loom))]
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_accel::fake::{FakeAccelerator, FakeCall};
use vm_accel::programs::Program;
use vm_accel::sys::BorrowedMemory;
use vm_accel::{
    Accelerator, Element, Error, Launch, Limits, MemoryKind, QueueOptions, Session, Worker, WorkerOptions,
    arguments,
};

type Own = Session<FakeAccelerator>;

fn open(device: &Arc<FakeAccelerator>) -> Own {
    Session::open(Arc::clone(device), WorkerOptions::default()).unwrap()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// The names of this process's threads.
fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok()).collect()
}

#[test]
fn a_session_needs_no_thread_and_gives_everything_back() {
    let device = Arc::new(FakeAccelerator::new());
    let options = WorkerOptions { name: "no-thread".into(), ..WorkerOptions::default() };
    let session = Own::open(Arc::clone(&device), options.clone()).unwrap();
    let kernel = session.load(&FakeAccelerator::artifact(Program::Add)).unwrap();
    let (x, y) = (session.upload(&[1u32, 2, 3]).unwrap(), session.allocate_typed::<u32>(3).unwrap());
    session.launch(&kernel, 1, &arguments![&x, &y, 10u32]).unwrap();
    assert_eq!(session.download(&y).unwrap(), [11, 12, 13]);
    assert!(!threads().contains(&"no-thread\n".into()), "{:?}", threads());
    let worker = Worker::start(Arc::clone(&device), options).unwrap();
    assert!(threads().contains(&"no-thread\n".into()), "a worker has one");
    worker.stop(Duration::from_secs(20)).unwrap();
    // What is dropped, on whichever thread, is used again.
    std::thread::scope(|scope| drop(scope.spawn(move || drop(x))));
    let again = session.allocate_typed::<u32>(3).unwrap();
    assert_eq!((session.statistics().hits, session.statistics().buffers), (1, 2));
    drop((again, y, kernel));
    session.close().unwrap();
    assert_eq!(device.used(), 0);
}

#[test]
fn kernels_and_graphs_that_are_dropped_are_gone_with_the_next_call() {
    let device = Arc::new(FakeAccelerator::new());
    let session = open(&device);
    let kernel = session.load(&FakeAccelerator::artifact(Program::Bump)).unwrap();
    let x = session.allocate_zeroed(400).unwrap();
    let graph = session.capture(|session| session.launch(&kernel, 1, &arguments![&x, 3u32])).unwrap();
    drop(kernel);
    (0..4).for_each(|_| session.replay(&graph).unwrap());
    let mut sums = [0u32; 100];
    session.read(&x, &mut sums).unwrap();
    assert_eq!(sums, [12; 100]);
    drop((graph, x));
    session.poll();
    session.synchronize(soon()).unwrap();
    assert_eq!(session.statistics().buffers, 0);
    // A batch goes the same way as on a worker.
    let kernel = session.load(&FakeAccelerator::artifact(Program::Bump)).unwrap();
    let x = session.allocate_zeroed(400).unwrap();
    let mut batch = session.batch();
    (0..64).for_each(|_| batch.launch(&kernel, 1, &arguments![&x, 1u32]).unwrap());
    session.launch_batch(batch).unwrap();
    session.read(&x, &mut sums).unwrap();
    assert_eq!((sums, device.graph_launches()), ([64; 100], 64));
}

#[test]
fn guards_hold_without_a_worker() {
    let device = Arc::new(FakeAccelerator::new());
    let session = open(&device);
    let spin = session.load(&FakeAccelerator::artifact(Program::Spin)).unwrap();
    let x = session.allocate_zeroed(4).unwrap();
    let check = |turns: u64, fuel, time, want: fn(&Result<(), Error>) -> bool| {
        let launch = Launch::over(1).within(Limits { fuel, time });
        session.launch(&spin, launch, &arguments![&x, turns]).unwrap();
        let ended = session.synchronize(soon());
        assert!(want(&ended), "{turns} {fuel} {time:?}: {ended:?}");
    };
    let long = Duration::from_secs(100);
    check(10, 100, long, |ended| ended.is_ok());
    check(1000, 10, long, |ended| matches!(ended, Err(Error::OutOfFuel { fuel: 10, .. })));
    check(u64::MAX, u64::MAX, Duration::from_millis(5), |ended| {
        matches!(ended, Err(Error::DeadlineExceeded { .. }))
    });
    // One that does not end does not keep the session from ending.
    let options = QueueOptions { timeout: Duration::from_millis(50), ..QueueOptions::default() };
    let options = WorkerOptions { queue: options, ..WorkerOptions::default() };
    let other = Own::open(Arc::clone(&device), options).unwrap();
    let spin = other.load(&FakeAccelerator::artifact(Program::Spin)).unwrap();
    let y = other.allocate(4).unwrap();
    let launch = Launch::over(1).within(Limits { fuel: u64::MAX, time: long });
    other.launch(&spin, launch, &arguments![&y, u64::MAX]).unwrap();
    let ended = other.close();
    assert!(matches!(ended, Err(Error::DeadlineExceeded { .. })), "{ended:?}");
}

#[test]
fn what_would_run_without_the_session_is_not_captured_by_the_streams_owner() {
    let device = Arc::new(FakeAccelerator::new());
    let session = open(&device);
    let bump = session.load(&FakeAccelerator::artifact(Program::Bump)).unwrap();
    let spin = session.load(&FakeAccelerator::artifact(Program::Spin)).unwrap();
    let x = session.allocate_zeroed(400).unwrap();
    let graph = session.capture(|session| session.launch(&bump, 1, &arguments![&x, 1u32])).unwrap();
    device.set_captured(true);
    session.launch(&bump, 1, &arguments![&x, 1u32]).unwrap();
    let view = x.view(0, 4).unwrap();
    let mut batch = session.batch();
    batch.launch(&bump, 1, &arguments![&x, 1u32]).unwrap();
    let check = |what: &str, done: Result<(), Error>| {
        assert!(matches!(done, Err(Error::Capturing { .. })), "{what}: {done:?}");
    };
    check("a guarded launch", session.launch(&spin, 1, &arguments![view, 1u64]));
    check("a batch", session.launch_batch(batch));
    check("a replay", session.replay(&graph));
    check("an allocation", session.allocate(1 << 20).map(drop));
    check("a scope", session.scope(|_| Ok(())));
    drop((graph, spin));
    session.poll();
    device.set_captured(false);
    let mut sums = [0u32; 100];
    session.read(&x, &mut sums).unwrap();
    assert_eq!(sums, [1; 100]);
    drop((x, bump));
    session.close().unwrap();
    assert_eq!(device.used(), 0);
}

#[test]
fn borrowed_memory_is_checked_as_any_other_and_stays_with_its_owner() {
    let device = Arc::new(FakeAccelerator::new());
    let session = open(&device);
    let kernel = session.load(&FakeAccelerator::artifact(Program::Copy2)).unwrap();
    // What another session allocated, as another library would.
    let owner = open(&device);
    let (source, target) = (owner.allocate(480).unwrap(), owner.allocate(480).unwrap());
    let numbers: Vec<u32> = (0..120).collect();
    owner.write(&source, &numbers).unwrap();
    owner.fill(&target, 0xff).unwrap();
    owner.synchronize(soon()).unwrap();

    // SAFETY: the owner keeps both until this test ends, and uses neither meanwhile.
    let borrow = |address| session.borrow(unsafe { BorrowedMemory::new(address, 480) });
    let (from, to) = (borrow(source.address()), borrow(target.address()));
    let view = |buffer, extents: &[u64], strides: &[u64]| {
        let view = vm_accel::View::from(buffer).of(Element::U32);
        view.strided(extents, strides)
    };
    let launch = |from, to| session.launch(&kernel, 1, &arguments![from, to]);
    launch(view(&from, &[10, 8], &[48]).unwrap(), view(&to, &[10, 8], &[48]).unwrap()).unwrap();
    session.synchronize(soon()).unwrap();
    let mut back = [0u32; 120];
    owner.read(&target, &mut back).unwrap();
    let wanted = |at: usize| if at % 12 < 8 { at as u32 } else { u32::MAX };
    assert!((0..).zip(back).all(|(at, value)| value == wanted(at)), "{back:?}");

    let check = |done: Result<(), Error>, want: &str| {
        let said = done.unwrap_err().to_string();
        assert!(said.contains(want), "{said}: {want}");
    };
    let good = view(&from, &[10, 8], &[48]).unwrap();
    check(
        launch(good, view(&to, &[11, 8], &[48]).unwrap()),
        "reach over 512 bytes, the buffer's part has 480",
    );
    check(launch(good, view(&to, &[10, 8], &[46]).unwrap()), "no multiple of 4 bytes");
    check(launch(good, good), "overlaps the view");
    let float = vm_accel::View::from(&to).of(Element::F32).strided(&[10, 8], &[48]).unwrap();
    check(launch(good, float), "parameter target: elements of u32 are wanted, f32 were given");
    // SAFETY: as above.
    let odd = session.borrow(unsafe { BorrowedMemory::new(target.address() + 2, 400) });
    check(launch(good, view(&odd, &[1, 8], &[48]).unwrap()), "is not aligned to 4");
    let stranger = owner.launch(&kernel, 1, &arguments![good, good]);
    assert!(matches!(stranger, Err(Error::WrongWorker { .. })), "{stranger:?}");

    drop((from, to, odd));
    assert_eq!((session.statistics().buffers, owner.statistics().buffers), (0, 2));
    owner.fill(&target, 1).unwrap();
    owner.read(&target, &mut back).unwrap();
    assert_eq!(back, [0x0101_0101; 120], "the memory is still the owner's");
}

#[test]
fn streams_of_a_scope_begin_and_end_with_it() {
    let device = Arc::new(FakeAccelerator::new());
    let session = open(&device);
    let bump = session.load(&FakeAccelerator::artifact(Program::Bump)).unwrap();
    let spin = session.load(&FakeAccelerator::artifact(Program::Spin)).unwrap();
    let (x, y, flag) = (
        session.allocate_zeroed(4000).unwrap(),
        session.allocate(4000).unwrap(),
        session.allocate_zeroed(4).unwrap(),
    );
    for turn in 1..=10u32 {
        session.launch(&bump, 1, &arguments![&x, 1u32]).unwrap();
        session
            .scope(|scope| {
                let (left, right) = (scope.stream()?, scope.stream()?);
                left.launch(&bump, 1, &arguments![&x, 2u32])?;
                let bumped = left.record()?;
                right.wait(&bumped)?;
                right.copy(&y, &x)?;
                left.wait(&right.record()?)?;
                left.launch(&spin, 1, &arguments![&flag, 5u64])?;
                left.launch(&bump, 1, &arguments![&x, 3u32])
            })
            .unwrap();
        let mut sums = [[0u32; 1000]; 2];
        session.read(&y, &mut sums[0]).unwrap();
        session.read(&x, &mut sums[1]).unwrap();
        assert_eq!((sums[0][999], sums[1][0]), (6 * turn - 3, 6 * turn));
    }
    let wanted = (&bump, &spin);
    // What a stream's guard stopped the session's wait says.
    let failed = session.scope(|scope| {
        let stream = scope.stream()?;
        let limits = Limits { fuel: 10, ..Limits::default() };
        stream.launch(wanted.1, Launch::over(1).within(limits), &arguments![&flag, 1000u64])?;
        Ok(())
    });
    failed.unwrap();
    let ended = session.synchronize(soon());
    assert!(matches!(ended, Err(Error::OutOfFuel { .. })), "{ended:?}");
    // A panic in the scope joins its streams too.
    let panicked = session.scope(|scope| -> Result<(), Error> {
        scope.stream()?.launch(wanted.0, 1, &arguments![&x, 1u32])?;
        panic!("inside")
    });
    assert_eq!(panicked, Err(Error::Panicked { message: "inside".into() }));
    let mut sums = [0u32; 1000];
    session.read(&x, &mut sums).unwrap();
    assert_eq!(sums, [61; 1000]);
    // Where it can't be joined by an event, this thread waits.
    let joined = session.scope(|scope| {
        scope.stream()?.launch(wanted.0, 1, &arguments![&x, 1u32])?;
        device.fail_next(FakeCall::WaitEvent, Error::OutOfOrder);
        Ok(())
    });
    joined.unwrap();
    session.read(&x, &mut sums).unwrap();
    assert_eq!(sums, [62; 1000]);
    drop((x, y, flag, bump, spin));
    session.close().unwrap();
    assert_eq!(device.used(), 0);
}

#[test]
fn workers_and_sessions_of_two_devices_wait_for_each_other() {
    let (first, second) = (Arc::new(FakeAccelerator::new()), Arc::new(FakeAccelerator::new()));
    let worker = Worker::start(Arc::clone(&first), WorkerOptions::default()).unwrap();
    let session = open(&second);
    let shared = worker.allocate_kind(MemoryKind::Pinned, 4000).unwrap();
    // SAFETY: the worker keeps it until the session has ended.
    let theirs = session.borrow(unsafe { BorrowedMemory::new(shared.address(), 4000) });
    let copies: Vec<_> = (0..20u8)
        .map(|turn| {
            worker.fill(&shared, turn).unwrap();
            session.wait_event(&worker.record().unwrap()).unwrap();
            let copy = session.allocate(4000).unwrap();
            session.copy(&copy, &theirs).unwrap();
            worker.wait_event(&session.record().unwrap()).unwrap();
            copy
        })
        .collect();
    for (turn, copy) in (0..).zip(&copies) {
        let mut bytes = [0xffu8; 4000];
        session.read(copy, &mut bytes).unwrap();
        assert_eq!(bytes, [turn; 4000]);
    }
    // While one stands still, so does what waits for it.
    first.pause();
    worker.fill(&shared, 99).unwrap();
    session.wait_event(&worker.record().unwrap()).unwrap();
    let late = session.synchronize(Instant::now() + Duration::from_millis(20));
    assert!(matches!(late, Err(Error::Deadline { .. })), "{late:?}");
    first.resume();
    session.synchronize(soon()).unwrap();
    drop((copies, theirs));
    session.close().unwrap();
    drop(shared);
    worker.stop(Duration::from_secs(20)).unwrap();
}

#[test]
fn typed_buffers_say_what_does_not_fit() {
    let device = Arc::new(FakeAccelerator::new());
    let session = open(&device);
    assert_eq!(session.accelerator().info().backend, "fake");
    let halves = session.upload(&[half::f16::ONE; 6]).unwrap();
    assert_eq!((halves.len(), halves.is_empty()), (6, false));
    assert_eq!(halves.view(2..4).unwrap().bytes(), 4);
    assert!(matches!(halves.view(4..7), Err(Error::OutOfRange { .. })));
    assert_eq!(session.download(&halves).unwrap(), [half::f16::ONE; 6]);
    let bytes = halves.into_bytes();
    assert_eq!(bytes.bytes(), 12);
    let refused = bytes.typed::<f64>().map(|typed| typed.len());
    assert!(refused.unwrap_err().to_string().contains("12 bytes at"), "no f64 has 4 bytes");
    assert!(matches!(session.allocate_typed::<f64>(usize::MAX / 4), Err(Error::Extents { .. })));
    assert!(session.upload::<i8>(&[]).unwrap().is_empty());
}
