//! Memory that somebody else allocated, and keeps until a worker is done with it.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};

use super::{Programs, TIMEOUT, soon, start, stop};
use crate::accelerator::{Accelerator, Queue};
use crate::arguments;
use crate::device::QueueOptions;
use crate::memory::{Memory, MemoryKind};
use crate::pool::PoolOptions;
use crate::programs::Program;
use crate::sys::BorrowedMemory;
use crate::worker::{Buffer, Worker};

const BYTES: u64 = 4000;

/// Says that it was dropped.
struct Keeper(Sender<()>);

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

/// A queue's memory, full of threes, as a buffer of a worker.
fn adopted<A: Accelerator>(queue: &A::Queue, worker: &Worker<A>) -> (Memory, Buffer<A>, Receiver<()>) {
    let memory = queue.allocate(MemoryKind::Device, BYTES).expect("memory");
    queue.fill(memory.region(), 3).expect("a fill");
    let filled = queue.event(false).expect("an event");
    queue.record(&filled).expect("a record");
    queue.wait(&filled, soon()).expect("the fill ends");
    let (keeper, kept) = channel();
    // SAFETY: each case frees it when the keeper was dropped.
    let borrowed = unsafe { BorrowedMemory::new(memory.address(), BYTES) };
    (memory, worker.adopt(borrowed, Keeper(keeper)), kept)
}

pub(super) fn goes_back_in_order<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    let queue = accelerator.open(&QueueOptions::default()).expect("a queue opens");
    let worker = start(accelerator, PoolOptions::default());
    let (add, spin) = (worker.load(&programs(Program::Add)), worker.load(&programs(Program::Spin)));
    let (add, spin) = (add.expect("a load"), spin.expect("a load"));
    let (sums, flag) = (worker.allocate(BYTES), worker.allocate_zeroed(4));
    let (sums, flag) = (sums.expect("memory"), flag.expect("memory"));
    let (memory, buffer, kept) = adopted(&queue, &worker);
    assert_eq!((buffer.bytes(), buffer.address()), (BYTES, memory.address()));
    worker.launch(&spin, 1, &arguments![&flag, 10_000u64]).expect("a launch");
    worker.launch(&add, 8, &arguments![&buffer, &sums, 5u32]).expect("a launch");
    assert_eq!(kept.try_recv(), Err(TryRecvError::Empty), "the buffer has it");
    let before = worker.fence().expect("a fence");
    drop(buffer);
    kept.recv_timeout(TIMEOUT).expect("its owner has it back");
    assert!(before.is_done(), "it went back before the commands had run");
    before.wait(soon()).expect("they did run");
    assert!(kept.recv().is_err(), "it goes back once");
    queue.free(memory).expect("the memory is its owner's");
    let mut read = [0u32; BYTES as usize / 4];
    worker.read(&sums, &mut read).expect("a read");
    assert_eq!(read, [0x0303_0308; BYTES as usize / 4]);
    drop((sums, flag, add, spin));
    assert_eq!(worker.statistics().buffers, 0, "what was adopted does not count");
    stop(&worker);
}

pub(super) fn ends_with_the_worker<A: Accelerator>(accelerator: &Arc<A>, _: Programs<'_>) {
    let queue = accelerator.open(&QueueOptions::default()).expect("a queue opens");
    let worker = start(accelerator, PoolOptions::default());
    let ((first, dropped, first_kept), (second, held, second_kept)) =
        (adopted(&queue, &worker), adopted(&queue, &worker));
    worker.fill(&dropped, 1).expect("a fill");
    drop(dropped);
    stop(&worker);
    first_kept.recv_timeout(TIMEOUT).expect("what was dropped before went back");
    assert_eq!(second_kept.try_recv(), Err(TryRecvError::Empty), "the buffer still has it");
    drop((held, worker));
    second_kept.recv_timeout(TIMEOUT).expect("what is dropped later goes back too");
    queue.free(first).expect("the memory is its owner's");
    queue.free(second).expect("the memory is its owner's");
}
