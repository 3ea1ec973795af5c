//! Graphs: recorded once, run often, and what they keep.

use std::sync::Arc;

use super::queue::kinds;
use super::{Programs, TIMEOUT, start, stop};
use crate::accelerator::Accelerator;
use crate::arguments;
use crate::error::Error;
use crate::memory::MemoryKind;
use crate::pool::PoolOptions;
use crate::programs::Program;

pub(super) fn keep_what_they_use<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    kinds(accelerator).into_iter().for_each(|kind| keep_memory_of(kind, accelerator, programs));
}

fn keep_memory_of<A: Accelerator>(kind: MemoryKind, accelerator: &Arc<A>, programs: Programs<'_>) {
    let worker = start(accelerator, PoolOptions::default());
    let kernel = worker.load(&programs(Program::Add)).expect("the program loads");
    let total = worker.allocate(4).expect("memory");
    let step = worker.allocate_kind(kind, 4).expect("memory");
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
    let other = worker.allocate_kind(kind, 4).expect("memory");
    assert_ne!(other.address(), address, "{kind:?}");
    for _ in 0..3 {
        worker.replay(&graph).expect("a replay");
        worker.fill(&other, 0xff).expect("a fill");
    }
    let mut sum = [0u32];
    worker.read(&total, &mut sum).expect("a read");
    assert_eq!(sum, [15], "{kind:?}");
    let refused = worker.capture(|session| session.read(&total, &mut [0; 4]));
    assert!(matches!(refused, Err(Error::Capturing { .. })), "{refused:?}");
    let panicked = worker.capture(|_| panic!("in a capture"));
    assert!(matches!(panicked, Err(Error::Panicked { .. })), "{panicked:?}");
    worker.read(&total, &mut sum).expect("the worker goes on after a capture that failed");
    let buffers = worker.statistics().buffers;
    drop(graph);
    worker.synchronize(TIMEOUT).expect("a wait");
    assert_eq!(worker.statistics().buffers, buffers);
    drop((other, total));
    stop(&worker);
}

pub(super) fn of_many_commands<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let worker = start(accelerator, PoolOptions::default());
    let bump = worker.load(&programs(Program::Bump)).expect("the program loads");
    let (data, copy) = (worker.allocate(400).expect("memory"), worker.allocate(400).expect("memory"));
    let graph = worker
        .capture(|session| {
            session.fill(&data, 0)?;
            (1..=50u32).try_for_each(|by| session.launch(&bump, 1, &arguments![&data, by]))?;
            session.copy(&copy, &data)?;
            session.launch(&bump, 1, &arguments![&copy, 1u32])
        })
        .expect("a capture");
    worker.fill(&copy, 0).expect("a fill");
    let mut back = [1u32; 100];
    worker.read(&copy, &mut back).expect("a read");
    assert_eq!(back, [0; 100], "a capture runs nothing");
    for _ in 0..100 {
        worker.replay(&graph).expect("a replay");
    }
    worker.read(&copy, &mut back).expect("a read");
    assert_eq!(back, [50 * 51 / 2 + 1; 100]);
    let empty = worker.capture(|_| Ok(())).expect("a capture of nothing");
    worker.replay(&empty).expect("a replay of nothing");
    worker.synchronize(TIMEOUT).expect("a wait");
    drop((graph, empty, data, copy));
    stop(&worker);
}
