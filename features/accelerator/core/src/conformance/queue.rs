//! Queues by themselves: memory, copies, fills, events, limits.

use std::sync::Arc;
use std::time::Duration;

use super::{Programs, TIMEOUT, soon, start, stop};
use crate::accelerator::{Accelerator, Queue};
use crate::artifact::{Artifact, Signature};
use crate::device::QueueOptions;
use crate::error::Error;
use crate::memory::{Memory, MemoryKind};
use crate::pool::PoolOptions;
use crate::programs::Program;

pub(super) fn info<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
    let info = accelerator.info();
    assert!(!info.name.is_empty() && !info.target.is_empty() && !info.driver.is_empty(), "{info:?}");
    assert!(info.memory_bytes > 0 && info.compute_units > 0 && info.warp_size > 0, "{info:?}");
    assert!(info.block_threads >= 256 && info.block.iter().all(|&size| size >= 2), "{info:?}");
    assert!(info.grid[0] >= 65_535 && info.grid[1..].iter().all(|&size| size >= 2), "{info:?}");
    assert!(info.shared_bytes >= 256, "{info:?}");
}

fn open<A: Accelerator>(accelerator: &Arc<A>) -> A::Queue {
    accelerator.open(&QueueOptions::default()).expect("a queue opens")
}

pub(super) fn kinds<A: Accelerator>(accelerator: &Arc<A>) -> Vec<MemoryKind> {
    let mut kinds = vec![MemoryKind::Device, MemoryKind::Pinned];
    kinds.extend(accelerator.info().unified.then_some(MemoryKind::Unified));
    kinds
}

fn finish<Q: Queue>(queue: &Q) {
    let event = queue.event(false).expect("an event");
    queue.record(&event).expect("a record");
    queue.wait(&event, soon()).expect("the commands end");
}

/// What memory of any kind holds.
fn contents<Q: Queue>(queue: &Q, memory: &Memory) -> Vec<u8> {
    let staging = queue.allocate(MemoryKind::Pinned, memory.bytes()).expect("pinned memory");
    queue.copy(staging.region(), memory.region()).expect("a copy out");
    finish(queue);
    let mut bytes = vec![0; memory.bytes() as usize];
    staging.region().read_host(&mut bytes).expect("the host reads pinned memory");
    queue.free(staging).expect("a free");
    bytes
}

pub(super) fn memory<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
    let queue = open(accelerator);
    for kind in kinds(accelerator) {
        let all: Vec<_> = [1, 256, 1000, 1 << 20]
            .map(|bytes| {
                let memory = queue.allocate(kind, bytes).expect("memory");
                assert_eq!((memory.bytes(), memory.kind()), (bytes, kind));
                assert_eq!(memory.address() % 256, 0, "{kind:?}");
                assert_eq!(memory.host_address() != 0, kind.host_visible(), "{kind:?}");
                memory
            })
            .into();
        let mut ranges: Vec<_> = all.iter().map(|memory| (memory.address(), memory.bytes())).collect();
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "{kind:?}: {ranges:?}");
        let mut byte = [7];
        let host = all[0].region().write_host(&byte).and_then(|()| all[0].region().read_host(&mut byte));
        assert_eq!(host.is_ok(), kind.host_visible(), "{kind:?}");
        for memory in all {
            queue.free(memory).expect("a free");
        }
    }
    assert!(matches!(queue.allocate(MemoryKind::Registered, 1), Err(Error::Unsupported { .. })));
    let memory = queue.memory().expect("memory info");
    assert!(memory.free <= memory.total && memory.total > 0, "{memory:?}");
    queue.trim(0).expect("a trim");
}

pub(super) fn copies<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
    const BYTES: u64 = 1024;
    let queue = open(accelerator);
    let pattern: Vec<u8> = (0..BYTES).map(|index| (index * 7 + index / 256) as u8).collect();
    let origin = queue.allocate(MemoryKind::Pinned, BYTES).expect("memory");
    origin.region().write_host(&pattern).expect("the host writes pinned memory");
    for from in kinds(accelerator) {
        for to in kinds(accelerator) {
            let (source, target) = (queue.allocate(from, BYTES), queue.allocate(to, BYTES));
            let (source, target) = (source.expect("memory"), target.expect("memory"));
            queue.copy(source.region(), origin.region()).expect("a copy in");
            for (at, to_at, bytes) in [(0, 0, BYTES), (1, 0, 255), (0, 3, 17), (1000, 1, 24), (511, 513, 1)] {
                queue.fill(target.region(), 0xcc).expect("a fill");
                let part = source.region().slice(at, bytes).expect("a part");
                queue.copy(target.region().slice(to_at, bytes).expect("a part"), part).expect("a copy");
                let mut want = vec![0xcc; BYTES as usize];
                want[to_at as usize..][..bytes as usize]
                    .copy_from_slice(&pattern[at as usize..][..bytes as usize]);
                assert!(contents(&queue, &target) == want, "{from:?} {at} to {to:?} {to_at}, {bytes} bytes");
            }
            let short = source.region().slice(0, 256).expect("a part");
            let lengths = Error::Lengths { source_bytes: 256, destination_bytes: BYTES };
            assert_eq!(queue.copy(target.region(), short), Err(lengths));
            queue.free(source).expect("a free");
            queue.free(target).expect("a free");
        }
    }
    queue.free(origin).expect("a free");
}

pub(super) fn fills<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
    let queue = open(accelerator);
    for kind in kinds(accelerator) {
        let memory = queue.allocate(kind, 300).expect("memory");
        let mut want = vec![0; 300];
        for (at, bytes, value) in [(0, 300, 0), (0, 1, 0xff), (299, 1, 0x80), (7, 33, 0x5a), (16, 256, 1)] {
            queue.fill(memory.region().slice(at, bytes).expect("a part"), value).expect("a fill");
            want[at as usize..][..bytes as usize].fill(value);
            assert!(contents(&queue, &memory) == want, "{kind:?} {at} {bytes} {value}");
        }
        queue.free(memory).expect("a free");
    }
}

pub(super) fn events<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
    let queue = open(accelerator);
    let plain = queue.event(false).expect("an event");
    assert!(queue.done(&plain).expect("an event that was not recorded can be asked"));
    let marks = [(); 3].map(|()| queue.event(true).expect("an event"));
    let memory = queue.allocate(MemoryKind::Device, 8 << 20).expect("memory");
    for mark in &marks {
        queue.fill(memory.region(), 3).expect("a fill");
        queue.record(mark).expect("a record");
    }
    queue.record(&plain).expect("a record");
    queue.wait(&plain, soon()).expect("the fills end");
    assert!(marks.iter().all(|mark| queue.done(mark).expect("an event can be asked")));
    let [first, second, third] = &marks;
    let (one, both) =
        (queue.elapsed(first, second).expect("a time"), queue.elapsed(first, third).expect("a time"));
    assert!(one > Duration::ZERO && one <= both && both < TIMEOUT, "{one:?} {both:?}");
    assert!(queue.elapsed(first, &plain).is_err(), "an event without a time stamp has no time");
    // An event that is recorded again stands for the new place.
    queue.record(first).expect("a record");
    queue.wait(first, soon()).expect("an event that is recorded again");
    queue.free(memory).expect("a free");
}

pub(super) fn limits<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let queue = open(accelerator);
    let total = queue.memory().expect("memory info").total;
    let too_much = queue.allocate(MemoryKind::Device, total.saturating_mul(4));
    assert!(matches!(too_much, Err(Error::OutOfMemory { .. })), "{too_much:?}");
    drop(queue);

    let worker = start(accelerator, PoolOptions::default());
    let info = accelerator.info();
    let check = |change: &dyn Fn(&mut Signature), want: &str| {
        let good = programs(Program::Add);
        let mut signature = good.signature().clone();
        change(&mut signature);
        // SAFETY: it is not loaded, much less run.
        #[allow(unsafe_code)]
        let artifact = unsafe { Artifact::new(good.image(), signature) }.expect("a signature");
        match worker.load(&artifact) {
            Err(Error::Load { reason, .. }) => assert!(reason.contains(want), "{reason}: {want}"),
            other => panic!("{other:?}: {want}"),
        }
    };
    check(&|signature| signature.block = [1, 1, info.block[2] + 1], "along z");
    check(&|signature| signature.block = [info.block_threads, 2, 1], "threads");
    check(&|signature| signature.shared_bytes = u32::MAX, "shared memory");
    let broken = worker.load(&programs(Program::Broken));
    assert!(matches!(&broken, Err(Error::Load { reason, .. }) if !reason.is_empty()), "{broken:?}");
    stop(&worker);
}
