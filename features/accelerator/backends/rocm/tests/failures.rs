//! What goes wrong with HIP is said, in time, and leaves nothing behind: each call fails once, with each kind of failure.
#![allow(unsafe_code)]

mod common;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use vm_accel::programs::Program;
use vm_accel::{
    Accelerator, Arguments, Artifact, Error, Extents, Grid, MemoryKind, Queue, QueueArgument, QueueOptions,
    Result, Worker, WorkerOptions, arguments,
};
use vm_rocm::fake::{Fake, FakeOptions, code_object, know};
use vm_rocm::sys::FUNCTIONS;
use vm_rocm::{RocmAccelerator, RocmDevice, RocmError};

const ARCHITECTURE: &str = "gfx942";
const OPTIONS: QueueOptions = QueueOptions { keep_bytes: u64::MAX, timeout: SOON };
/// Of a queue whose device does nothing.
const HURRIED: QueueOptions = QueueOptions { keep_bytes: u64::MAX, timeout: Duration::from_millis(200) };
const SOON: Duration = Duration::from_secs(20);
/// `hipErrorOutOfMemory`, `hipErrorLaunchFailure`, by which the device is lost, and one that no list has.
const OUT_OF_MEMORY: u32 = 2;
const LAUNCH_FAILURE: u32 = 719;
const UNKNOWN: u32 = 4321;

/// Creates a device that is not device 0, which HIP calls without a device use.
fn fake() -> Fake {
    static FIRST: OnceLock<Fake> = OnceLock::new();
    FIRST.get_or_init(|| Fake::new(FakeOptions::default()));
    Fake::new(FakeOptions::default())
}

/// A use of all that there is.
fn work(device: &RocmAccelerator) -> Result<u32> {
    let program = common::program(ARCHITECTURE, Program::Add);
    let queue = device.open(&OPTIONS)?;
    queue.memory()?;
    let kernel = queue.load(&program)?;
    let memory =
        [MemoryKind::Device, MemoryKind::Unified, MemoryKind::Pinned].map(|kind| queue.allocate(kind, 8));
    let [own, shared, pinned] = memory;
    let (own, shared, pinned) = (own?, shared?, pinned?);
    let mut host = vec![0u64; 1024];
    // SAFETY: it is there until the queue is dropped, and nobody looks at it.
    let registered = unsafe { queue.register(host.as_mut_ptr().cast(), 8192) }?;
    queue.fill(own.region(), 0)?;
    queue.copy(shared.region(), own.region())?;
    let [from, to] = [0, 4].map(|offset| shared.region().slice(offset, 4));
    let view = |region| QueueArgument::View(region, Extents::WHOLE);
    let arguments = Arguments::new(&program, [view(from?), view(to?), QueueArgument::Scalar(5u32.into())])?;
    // SAFETY: the memory is freed below, by the same queue.
    unsafe { queue.launch(&kernel, Grid::from(1), &arguments) }?;
    queue.begin_capture()?;
    let recorded = queue.copy(pinned.region(), shared.region());
    let graph = queue.end_capture();
    recorded?;
    let graph = graph?;
    // SAFETY: as above.
    unsafe { queue.replay(&graph) }?;
    // SAFETY: what one of the two frees the other's commands come before.
    let side = unsafe { queue.stream() }?;
    let [begin, end] = [queue.event(true)?, queue.event(true)?];
    queue.record(&begin)?;
    side.wait_event(&begin)?;
    queue.record(&end)?;
    queue.wait(&end, Instant::now() + Duration::from_secs(20))?;
    queue.elapsed(&begin, &end)?;
    let mut sum = [0; 4];
    pinned.region().slice(4, 4)?.read_host(&mut sum)?;
    for memory in [own, shared, pinned, registered] {
        queue.free(memory)?;
    }
    queue.discard(graph)?;
    queue.unload(kernel)?;
    Ok(u32::from_le_bytes(sum))
}

/// Calls that are about no device.
const NOT_ON_A_DEVICE: [&str; 4] = ["hipInit", "hipGetDevice", "hipGetDeviceCount", "hipRuntimeGetVersion"];
/// Those that are made when a device is opened.
const OPENING: [&str; 4] =
    ["hipDeviceGetAttribute", "hipDeviceGetName", "hipDeviceTotalMem", "hipDeviceGetPCIBusId"];

#[test]
fn all_of_it_works() {
    let fake = fake();
    assert_eq!(work(&fake.accelerator()), Ok(5));
    assert_eq!((fake.faults(), fake.left()), (vec![], vec![]));
}

#[test]
fn each_call_that_fails_is_named_and_leaves_nothing() {
    let check = |call: &'static str, successes: u32, status: u32| {
        let (fake, what) = (fake(), format!("{call} with {status} after {successes}"));
        let device = fake.accelerator();
        fake.fail(call, successes, status);
        let done = work(&device);
        assert!(!fake.fails(call), "{what}: it was not called");
        let ends = ["Free", "Destroy", "Unload", "Unregister"].iter().any(|end| call.contains(end));
        match &done {
            Err(error) if status == LAUNCH_FAILURE => assert!(error.is_lost(), "{what}: {error}"),
            // Of memory it is said how much there is.
            Err(Error::OutOfMemory { total, .. }) => {
                assert_eq!((status, *total), (OUT_OF_MEMORY, 1 << 30), "{what}")
            }
            Err(error) => assert!(error.to_string().contains(call), "{what}: {error}"),
            // What can't be ended when it is dropped is told to nobody.
            Ok(sum) => assert!(ends && *sum == 5, "{what}: {sum}"),
        }
        assert_eq!(fake.faults(), Vec::<String>::new(), "{what}");
        // What was not ended is still there, and nothing else; what is freed is tried again when the queue is dropped.
        let left = fake.left();
        assert!(left.len() <= usize::from(ends), "{what}: {left:?}");
    };
    let calls = FUNCTIONS.iter().filter(|call| !NOT_ON_A_DEVICE.contains(call) && !OPENING.contains(call));
    for call in calls {
        // The first use of a device of another number than the thread's.
        for status in [OUT_OF_MEMORY, LAUNCH_FAILURE, UNKNOWN] {
            check(call, 0, status);
        }
    }
    // In the midst of things.
    for successes in 1..4 {
        check("hipEventRecord", successes, LAUNCH_FAILURE);
        check("hipEventCreateWithFlags", successes, UNKNOWN);
    }
}

#[test]
fn a_device_that_does_not_open_says_why() {
    for call in OPENING {
        let fake = fake();
        fake.fail(call, 0, UNKNOWN);
        match fake.accelerator_without(&[]) {
            Err(RocmError::Hip(error)) => assert!(error.to_string().contains(call), "{call}: {error}"),
            other => panic!("{call}: {other:?}"),
        }
    }
    let other = Fake::new(FakeOptions { wavefront: 48, ..FakeOptions::default() });
    let mut listed = other.listed();
    listed.wavefront = 64;
    let refused = |listed| other.accelerator_as(listed).unwrap_err().to_string();
    let hidden = RocmDevice { address: "0000:ff:1f.7".into(), ..listed.clone() };
    assert!(refused(&hidden).contains("none is at 0000:ff:1f.7"), "{}", refused(&hidden));
    let refused = refused(&listed);
    assert!(refused.contains("waves have 48 threads, and the driver 64"), "{refused}");
}

/// A function that a version lacks is an error of the call alone.
#[test]
fn what_an_older_version_lacks_is_named() {
    let check = |function: &str, opens: bool| {
        let fake = fake();
        let failed = match fake.accelerator_without(&[function]) {
            Ok(device) => {
                assert!(opens, "{function}");
                work(&device).map(drop)
            }
            Err(RocmError::Hip(error)) => {
                assert!(!opens, "{function}: {error}");
                Err(error)
            }
            Err(error) => panic!("{function}: {error}"),
        };
        match failed {
            Err(Error::Unavailable { cause, remedy, .. }) => {
                assert_eq!(cause, format!("it has no {function}"));
                assert!(remedy.contains("ROCm 5.2"), "{remedy}");
            }
            other => panic!("{function}: {other:?}"),
        }
        assert_eq!((fake.faults(), fake.left()), (vec![], vec![]), "{function}");
    };
    check("hipRuntimeGetVersion", false);
    check("hipMallocManaged", true);
    check("hipGraphLaunch", true);
    check("hipEventQuery", false);
    check("hipFree", false);
    check("hipModuleLoadData", true);
}

#[test]
fn a_device_that_does_nothing_keeps_nobody() {
    let fake = fake();
    let device = fake.accelerator();
    let begun = Instant::now();
    let queue = device.open(&HURRIED).unwrap();
    let memory = queue.allocate(MemoryKind::Device, 64).unwrap();
    fake.hold(true);
    queue.fill(memory.region(), 1).unwrap();
    let event = queue.event(false).unwrap();
    queue.record(&event).unwrap();
    let late = |result: Result<()>| assert!(matches!(result, Err(Error::Deadline { .. })), "{result:?}");
    late(queue.wait(&event, Instant::now() + Duration::from_millis(50)));
    late(queue.free(memory));
    late(queue.trim(0));
    drop((event, queue));
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    fake.hold(false);
    // What the device may still use is left to the end of the process; of wrong use there is none.
    assert_eq!(fake.faults(), Vec::<String>::new());
    let left = fake.left();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[test]
fn what_is_not_the_queues_is_refused() {
    let fake = fake();
    let device = fake.accelerator();
    let (one, other) = (device.open(&OPTIONS).unwrap(), device.open(&OPTIONS).unwrap());
    let (add, bump) =
        (common::program(ARCHITECTURE, Program::Add), common::program(ARCHITECTURE, Program::Bump));
    let memory = one.allocate(MemoryKind::Device, 64).unwrap();
    let (kernel, foreign) = (one.load(&add).unwrap(), other.load(&bump).unwrap());
    let view = |bytes| QueueArgument::View(memory.region().slice(0, bytes).unwrap(), Extents::WHOLE);
    let arguments = Arguments::new(&bump, [view(64), QueueArgument::Scalar(1u32.into())]).unwrap();
    let launch = |kernel, grid| {
        // SAFETY: none of them is launched.
        unsafe { one.launch(kernel, grid, &arguments) }
    };
    assert_eq!(launch(&foreign, Grid::from(1)), Err(Error::WrongWorker { what: "kernel" }));
    assert!(matches!(launch(&kernel, Grid::from(1)), Err(Error::Arguments { .. })));
    let own = one.load(&bump).unwrap();
    let refused = launch(&own, Grid([1 << 24, 1, 1])).unwrap_err().to_string();
    assert!(refused.contains("4294967296 threads along one dimension"), "{refused}");
    // Code for another GPU, and none at all.
    let refused = one.load(&common::program("gfx1100", Program::Add)).unwrap_err().to_string();
    assert!(refused.contains("it is for another GPU than gfx942"), "{refused}");
    assert_eq!(other.free(memory), Err(Error::WrongWorker { what: "buffer" }));
    one.unload(kernel).unwrap();
    one.unload(own).unwrap();
    drop((one, other));
    assert_eq!((fake.faults(), fake.left()), (vec![], vec![]));
}

/// What the library's worker makes of it: it is told of what failed, ends in time, and leaves nothing.
#[test]
fn a_worker_ends_whatever_the_device_does() {
    let begin = |fake: &Fake, queue: QueueOptions| {
        let options = WorkerOptions { queue, ..WorkerOptions::default() };
        let worker = Worker::start(Arc::new(fake.accelerator()), options).unwrap();
        let kernel = worker.load(&common::program(ARCHITECTURE, Program::Bump)).unwrap();
        let data = worker.allocate_zeroed(400).unwrap();
        worker.synchronize(SOON).unwrap();
        (worker, kernel, data)
    };
    let lost = fake();
    let (worker, kernel, data) = begin(&lost, OPTIONS);
    lost.fail("hipModuleLaunchKernel", 0, LAUNCH_FAILURE);
    // The call itself may be told, or the next wait.
    let launched =
        worker.launch(&kernel, 1, &arguments![&data, 1u32]).and_then(|()| worker.synchronize(SOON));
    let is_lost = |result: Result<()>| assert!(result.as_ref().is_err_and(Error::is_lost), "{result:?}");
    is_lost(launched);
    is_lost(worker.fill(&data, 1).and_then(|()| worker.synchronize(SOON)));
    drop((data, kernel));
    let begun = Instant::now();
    let _ = worker.stop(SOON);
    drop(worker);
    assert!(begun.elapsed() < SOON);
    assert_eq!((lost.faults(), lost.left()), (vec![], vec![]));

    let held = fake();
    let (worker, kernel, data) = begin(&held, HURRIED);
    held.hold(true);
    worker.launch(&kernel, 1, &arguments![&data, 1u32]).unwrap();
    let late = worker.synchronize(Duration::from_millis(50));
    assert!(matches!(late, Err(Error::Deadline { .. })), "{late:?}");
    drop((data, kernel));
    let begun = Instant::now();
    let stopped = worker.stop(Duration::from_millis(500));
    assert!(begun.elapsed() < SOON, "{stopped:?} after {:?}", begun.elapsed());
    held.hold(false);
    drop(worker);
    assert_eq!(held.faults(), Vec::<String>::new());

    // For want of memory the worker gives back what its pool keeps, and tries again; then it is an error, and the worker goes on.
    let full = fake();
    let (worker, kernel, data) = begin(&full, OPTIONS);
    full.fail("hipMalloc", 0, OUT_OF_MEMORY);
    drop(worker.allocate(1 << 25).unwrap());
    let refused = worker.allocate(1 << 31);
    assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{refused:?}");
    worker.launch(&kernel, 1, &arguments![&data, 7u32]).unwrap();
    let mut back = [0u32; 100];
    worker.read(&data, &mut back).unwrap();
    assert_eq!(back, [7; 100]);
    drop((data, kernel));
    worker.stop(SOON).unwrap();
    assert_eq!((full.faults(), full.left()), (vec![], vec![]));
}

/// While commands are recorded nothing waits, and a queue that ends meanwhile ends at once.
#[test]
fn a_queue_ends_while_it_records() {
    let fake = fake();
    let device = fake.accelerator();
    let queue = device.open(&OPTIONS).unwrap();
    let memory = queue.allocate(MemoryKind::Device, 64).unwrap();
    let event = queue.event(false).unwrap();
    queue.begin_capture().unwrap();
    queue.fill(memory.region(), 1).unwrap();
    let refused = |result: Result<()>| assert!(matches!(result, Err(Error::Capturing { .. })), "{result:?}");
    refused(queue.allocate(MemoryKind::Pinned, 64).map(drop));
    refused(queue.trim(0));
    refused(queue.wait_event(&event));
    refused(queue.free(memory));
    let begun = Instant::now();
    drop((event, queue));
    assert!(begun.elapsed() < SOON / 2);
    assert_eq!((fake.faults(), fake.left()), (vec![], vec![]));
}

/// A code object whose descriptor is of another kernel than its artifact is refused before HIP sees the kernel.
#[test]
fn code_that_is_not_the_artifacts_is_not_loaded() {
    let fake = fake();
    let device = fake.accelerator();
    let queue = device.open(&OPTIONS).unwrap();
    let (_, signature, kernel) = common::compiled(ARCHITECTURE, Program::Add);
    let image = code_object(ARCHITECTURE, vec![kernel.clone()]);
    /// Behind the head of the file and what tells it from others.
    const DESCRIPTOR: usize = 64 + 8;
    let check = |offset: usize, bytes: &[u8], told: Option<&str>| {
        let mut image = image.clone();
        image[DESCRIPTOR + offset..][..bytes.len()].copy_from_slice(bytes);
        know(&image, ARCHITECTURE, vec![kernel.clone()]);
        // SAFETY: it is not launched.
        let artifact = unsafe { Artifact::new(image, signature.clone()) }.unwrap();
        match (queue.load(&artifact), told) {
            (Ok(kernel), None) => queue.unload(kernel).unwrap(),
            (Err(Error::Load { reason, .. }), Some(told)) => assert!(reason.contains(told), "{reason}"),
            (loaded, told) => panic!("{:?}, not {told:?}", loaded.map(drop)),
        }
    };
    check(0, &[], None);
    check(0, &0x1_0001u32.to_le_bytes(), Some("65537 bytes of shared memory (LDS), the device has 65536"));
    check(4, &8192u32.to_le_bytes(), Some("it spills 8192 bytes"));
    check(8, &4u32.to_le_bytes(), Some("its code has 4 bytes of parameters"));
    check(8, &u32::MAX.to_le_bytes(), Some("its code has 4294967295 bytes of parameters"));
    check(56, &[0, 4], Some("for waves of 32 threads, and the device's have 64"));
    drop(queue);
    assert_eq!((fake.faults(), fake.left()), (vec![], vec![]));
}
