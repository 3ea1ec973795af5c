//! Several streams of a context, and events between queues on two threads, of one device or two.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::mpsc::channel;

use vm_abi::Element;

use super::{Programs, numbers, soon};
use crate::accelerator::{Accelerator, Queue};
use crate::arguments;
use crate::device::QueueOptions;
use crate::error::{Error, Result};
use crate::extents::Extents;
use crate::launch::{Arguments, Grid, Launch, Limits, QueueArgument};
use crate::memory::{Memory, MemoryKind};
use crate::programs::Program;
use crate::sys::BorrowedMemory;
use crate::worker::{Session, View, WorkerOptions};

/// Long enough that a stream which does not wait is seen.
const BYTES: u64 = 8 << 20;
const TURNS: u8 = 12;

fn event_after<Q: Queue>(queue: &Q) -> Q::Event {
    let event = queue.event(false).expect("an event");
    queue.record(&event).expect("a record");
    event
}

/// The first and the last byte.
fn ends(memory: &Memory) -> [u8; 2] {
    let at = |offset| {
        let mut byte = [0];
        let part = memory.region().slice(offset, 1).expect("a part");
        part.read_host(&mut byte).expect("the host reads pinned memory");
        byte[0]
    };
    [at(0), at(memory.bytes() - 1)]
}

/// Two streams that hand each other one memory, in turns.
pub(super) fn turns<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let left = accelerator.open(&QueueOptions::default()).expect("a queue opens");
    // SAFETY: what is freed here was used by commands that have ended.
    let right = unsafe { left.stream() }.expect("a stream opens");
    right
        .wait_event(&right.event(false).expect("an event"))
        .expect("nothing waits for what was never recorded");

    let shared = left.allocate(MemoryKind::Device, BYTES).expect("memory");
    let seen: Vec<_> = (0..TURNS)
        .map(|turn| {
            let copy = right.allocate(MemoryKind::Pinned, BYTES).expect("memory");
            left.fill(shared.region(), turn).expect("a fill");
            right.wait_event(&event_after(&left)).expect("a wait for the other stream");
            right.copy(copy.region(), shared.region()).expect("a copy");
            left.wait_event(&event_after(&right)).expect("a wait for the other stream");
            copy
        })
        .collect();
    right.wait(&event_after(&left), soon()).expect("a queue waits for the event of another");
    for (turn, copy) in (0..).zip(seen) {
        assert_eq!(ends(&copy), [turn; 2], "turn {turn}");
        left.free(copy).expect("a free of what the other stream allocated");
    }

    // A kernel that one loaded runs on both.
    let artifact = programs(Program::Bump);
    let kernel = left.load(&artifact).expect("a load");
    let values = numbers(1000);
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let host = left.allocate(MemoryKind::Pinned, 4000).expect("memory");
    host.region().write_host(&bytes).expect("a write");
    for turn in 0..TURNS {
        let (this, other) = if turn % 2 == 0 { (&left, &right) } else { (&right, &left) };
        let arguments = [
            QueueArgument::View(host.region(), Extents::WHOLE),
            QueueArgument::Scalar(u32::from(turn).into()),
        ];
        let arguments = Arguments::new(&artifact, arguments).expect("arguments");
        // SAFETY: the memory is freed when both have ended.
        unsafe { this.launch(&kernel, Grid::from(4), &arguments) }.expect("a launch");
        other.wait_event(&event_after(this)).expect("a wait for the other stream");
    }
    left.wait(&event_after(&left), soon()).expect("all ends");
    let mut back = vec![0; 4000];
    host.region().read_host(&mut back).expect("a read");
    let sum: u32 = (0..u32::from(TURNS)).sum();
    let wanted: Vec<u8> = values.iter().flat_map(|value| value.wrapping_add(sum).to_le_bytes()).collect();
    assert!(back == wanted, "a launch got lost between two streams");

    let event = event_after(&right);
    left.begin_capture().expect("a capture");
    let refused = left.wait_event(&event);
    assert!(matches!(refused, Err(Error::Capturing { .. } | Error::Driver { .. })), "{refused:?}");
    if let Ok(graph) = left.end_capture() {
        left.discard(graph).expect("a graph is dropped");
    }
    right.unload(kernel).expect("the other stream unloads it");
    drop(left);
    // The context is there as long as one of its streams.
    right.fill(shared.region(), 1).expect("a fill");
    right.wait(&event_after(&right), soon()).expect("all ends");
    right.free(host).expect("a free");
    right.free(shared).expect("a free");
}

/// Two queues that know each other's stream by its handle only, and hand each other one memory.
pub(super) fn handles<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
    let open = || accelerator.open(&QueueOptions::default()).expect("a queue opens");
    let (left, right) = (open(), open());
    let Some(theirs) = left.handle() else {
        // SAFETY: there are no such streams, so none of them is used.
        let follows = unsafe { right.follow(0) };
        // SAFETY: as above.
        let precedes = unsafe { right.precede(0) };
        assert!(matches!(follows, Err(Error::Unsupported { .. })), "{follows:?}");
        assert!(matches!(precedes, Err(Error::Unsupported { .. })), "{precedes:?}");
        return;
    };
    assert_ne!(Some(theirs), right.handle(), "each has its own");
    let shared = left.allocate(MemoryKind::Device, BYTES).expect("memory");
    let copies: Vec<_> = (0..TURNS)
        .map(|turn| {
            let copy = right.allocate(MemoryKind::Pinned, BYTES).expect("memory");
            left.fill(shared.region(), turn).expect("a fill");
            // SAFETY: the stream is of this device, and there until the end of this.
            unsafe { right.follow(theirs) }.expect("a wait for the other");
            right.copy(copy.region(), shared.region()).expect("a copy");
            // SAFETY: as above.
            unsafe { right.precede(theirs) }.expect("the other's wait");
            copy
        })
        .collect();
    right.wait(&event_after(&right), soon()).expect("all ends");
    for (turn, copy) in (0..).zip(copies) {
        assert_eq!(ends(&copy), [turn; 2], "turn {turn}");
        right.free(copy).expect("a free");
    }
    left.wait(&event_after(&left), soon()).expect("all ends");
    left.free(shared).expect("a free");
}

/// A session on this thread, on memory that a queue of somebody else's allocated.
pub(super) fn session<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let session = Session::open(Arc::clone(accelerator), WorkerOptions::default()).expect("a session opens");
    let owner = accelerator.open(&QueueOptions::default()).expect("a queue opens");
    let memory = owner.allocate(MemoryKind::Device, 8000).expect("memory");
    owner.fill(memory.region(), 3).expect("a fill");
    owner.wait(&event_after(&owner), soon()).expect("the fill ends");
    let add = session.load(&programs(Program::Add)).expect("a load");
    // SAFETY: the owner frees it at the end of this.
    let borrow = |at| session.borrow(unsafe { BorrowedMemory::new(memory.address() + at, 4000) });
    let (input, output) = (borrow(0), borrow(4000));
    let known = View::from(&output).of(Element::U32);
    session.launch(&add, 8, &arguments![&input, known, 5u32]).expect("a launch");
    let mut sums = [0u32; 1000];
    session.read(&output, &mut sums).expect("a read");
    assert_eq!(sums, [0x0303_0308; 1000]);
    let check = |done: Result<()>, want: &str| {
        let said = done.expect_err(want).to_string();
        assert!(said.contains(want), "{said}: {want}");
    };
    check(session.launch(&add, 8, &arguments![&input, &input, 5u32]), "overlaps");
    check(
        session.launch(&add, 8, &arguments![&input, output.shaped(&[1001]).expect("a shape"), 5u32]),
        "reach over",
    );
    let halves = View::from(&output).of(Element::F16);
    check(
        session.launch(&add, 8, &arguments![&input, halves, 5u32]),
        "elements of u32 are wanted, f16 were given",
    );
    let (one, two) = (
        session.upload(&[7u32, 8, 9]).expect("an upload"),
        session.allocate_typed::<i32>(3).expect("memory"),
    );
    session.launch(&add, 1, &arguments![&one, &two, (-10i32) as u32]).expect("a launch");
    assert_eq!(session.download(&two).expect("a download"), [-3, -2, -1]);
    drop((input, output, one, two, add));
    assert_eq!(session.statistics().buffers, 0);
    session.close().expect("a session ends");
    owner.free(memory).expect("the memory is its owner's");
}

/// Two streams of a scope that hand each other one buffer, between commands of the session's own.
pub(super) fn scope<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let session = Session::open(Arc::clone(accelerator), WorkerOptions::default()).expect("a session opens");
    let (bump, spin) = (session.load(&programs(Program::Bump)), session.load(&programs(Program::Spin)));
    let (bump, spin) = (bump.expect("a load"), spin.expect("a load"));
    let data = session.allocate_typed::<u32>(100_000).expect("memory");
    let copy = session.allocate_typed::<u32>(100_000).expect("memory");
    let flag = session.allocate_zeroed(4).expect("memory");
    for turn in 1..=u32::from(TURNS) {
        session.fill(&data, 0).expect("a fill");
        let streams = session.scope(|scope| {
            let (left, right) = (scope.stream()?, scope.stream()?);
            for by in 0..10 {
                let (this, next) = if by % 2 == 0 { (&left, &right) } else { (&right, &left) };
                this.launch(&bump, 64, &arguments![&data, turn])?;
                next.wait(&this.record()?)?;
            }
            right.launch(&spin, 1, &arguments![&flag, 10u64])?;
            left.copy(&copy, &data)
        });
        streams.expect("two streams");
        session.fill(&data, 0xff).expect("a fill");
        let sums = session.download(&copy).expect("a download");
        assert!(sums.iter().all(|sum| *sum == 10 * turn), "turn {turn}: {:?}", &sums[..4]);
    }
    if accelerator.info().guards {
        let stopped = session.scope(|scope| {
            let launch = Launch::over(1).within(Limits { fuel: 10, ..Limits::default() });
            scope.stream()?.launch(&spin, launch, &arguments![&flag, 1000u64])
        });
        stopped.expect("a launch");
        let ended = session.synchronize(soon());
        assert!(matches!(ended, Err(Error::OutOfFuel { .. })), "{ended:?}");
    }
    drop((data, copy, flag, bump, spin));
    session.close().expect("a session ends");
}

pub(super) fn threads<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
    events_between(accelerator, accelerator);
}

/// That queues of two accelerators, each on a thread of its own, wait for each other's events: the first fills memory of the
/// host, and the second copies it to its device before the first fills it again.
///
/// # Panics
/// When one did not wait.
pub fn events_between<A: Accelerator>(first: &Arc<A>, second: &Arc<A>) {
    let options = QueueOptions::default();
    let (filled, fills) = channel();
    let (copied, copies) = channel();
    let (ended, end) = channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let queue = first.open(&options).expect("a queue opens");
            let memory = queue.allocate(MemoryKind::Pinned, BYTES).expect("memory");
            let (filled, copies, end) = (filled, copies, end);
            for turn in 0..TURNS {
                queue.fill(memory.region(), turn).expect("a fill");
                let place = (memory.address(), memory.host_address());
                filled.send((event_after(&queue), place)).expect("the other thread runs");
                queue.wait_event(&copies.recv().expect("the other thread runs")).expect("a wait");
            }
            queue.wait(&event_after(&queue), soon()).expect("all ends");
            end.recv().expect("the other thread runs");
            queue.free(memory).expect("a free");
        });
        scope.spawn(|| {
            let queue = second.open(&options).expect("a queue opens");
            let device = queue.allocate(MemoryKind::Device, BYTES).expect("memory");
            let (fills, copied, ended) = (fills, copied, ended);
            let seen: Vec<_> = (0..TURNS)
                .map(|_| {
                    let (event, (address, host)) = fills.recv().expect("the other thread runs");
                    // SAFETY: the other thread keeps the memory until this one is done with it.
                    let theirs = unsafe { Memory::from_raw(MemoryKind::Pinned, address, host, BYTES) };
                    let copy = queue.allocate(MemoryKind::Pinned, BYTES).expect("memory");
                    queue.wait_event(&event).expect("a wait");
                    queue.copy(device.region(), theirs.region()).expect("a copy");
                    copied.send(event_after(&queue)).expect("the other thread runs");
                    queue.copy(copy.region(), device.region()).expect("a copy");
                    copy
                })
                .collect();
            queue.wait(&event_after(&queue), soon()).expect("all ends");
            ended.send(()).expect("the other thread runs");
            for (turn, copy) in (0..).zip(seen) {
                assert_eq!(ends(&copy), [turn; 2], "turn {turn}");
                queue.free(copy).expect("a free");
            }
            queue.free(device).expect("a free");
        });
    });
}
