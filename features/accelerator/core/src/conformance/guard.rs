//! Guarded launches: a kernel that loops is stopped, and no other.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use vm_abi::Guard;

use super::{Programs, TIMEOUT, soon, start, stop};
use crate::accelerator::{Accelerator, Queue};
use crate::arguments;
use crate::device::QueueOptions;
use crate::error::Error;
use crate::extents::Extents;
use crate::launch::{Arguments, Grid, Launch, Limits, QueueArgument};
use crate::memory::MemoryKind;
use crate::pool::PoolOptions;
use crate::programs::Program;

/// More turns and fuel than any device takes while a test waits.
const FOREVER: u64 = 1 << 61;
/// A time in which nothing that ends is stopped on a device that works.
const SHORT: Duration = Duration::from_millis(100);

fn within(fuel: u64, time: Duration) -> Launch {
    Launch::over(1).within(Limits { fuel, time })
}

pub(super) fn by_hand<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    if !accelerator.info().guards {
        return;
    }
    let queue = accelerator.open(&QueueOptions::default()).expect("a queue opens");
    let program = programs(Program::Spin);
    let kernel = queue.load(&program).expect("the program loads");
    let memory = queue.allocate(MemoryKind::Pinned, 8).expect("memory");
    let [output, stop] = [0, 4].map(|offset| memory.region().slice(offset, 4).expect("a part"));
    let done = queue.event(false).expect("an event");
    let read = |region: crate::memory::Region<'_>| {
        let mut word = [0; 4];
        region.read_host(&mut word).expect("a read");
        u32::from_le_bytes(word)
    };
    let begin = |turns: u64, fuel: u64, word: u32| {
        memory.region().write_host(&[0; 8]).expect("a write");
        stop.write_host(&word.to_le_bytes()).expect("a write");
        let arguments = [QueueArgument::View(output, Extents::WHOLE), QueueArgument::Scalar(turns.into())];
        let mut packed = Arguments::new(&program, arguments).expect("the arguments fit");
        packed.guard(&program, stop, fuel).expect("a cancel flag of 4 bytes");
        // SAFETY: the memory is freed below, by the same queue.
        #[allow(unsafe_code)]
        unsafe { queue.launch(&kernel, Grid::from(1), &packed) }.expect("a launch");
        queue.record(&done).expect("a record");
    };
    let check = |turns: u64, fuel: u64, word: u32, want: (u32, u32)| {
        begin(turns, fuel, word);
        queue.wait(&done, soon()).expect("the kernel ends");
        assert_eq!((read(output), read(stop)), want, "{turns} turns, {fuel} fuel, cancel flag {word}");
    };
    check(1000, 100_000, 0, (1, 0));
    check(100_000, 1000, 0, (0, Guard::OUT_OF_FUEL));
    check(FOREVER, FOREVER, Guard::STOP, (0, Guard::STOP));
    begin(FOREVER, FOREVER, 0);
    thread::sleep(Duration::from_millis(20));
    assert!(!queue.done(&done).expect("an event can be asked"), "it loops");
    stop.write_host(&Guard::STOP.to_le_bytes()).expect("a write");
    let set = Instant::now();
    queue.wait(&done, soon()).expect("the kernel is stopped");
    println!("stopped {:?} after the cancel flag was set", set.elapsed());
    assert_eq!((read(output), read(stop)), (0, Guard::STOP));
    begin(FOREVER, FOREVER, 0);
    let until = soon();
    while queue.notify(&done, &thread::current()).expect("an event's thread") {
        // Only the first time it still loops.
        stop.write_host(&Guard::STOP.to_le_bytes()).expect("a write");
        thread::park_timeout(until.saturating_duration_since(Instant::now()));
        if queue.done(&done).expect("an event can be asked") {
            break;
        }
        assert!(Instant::now() < until, "nobody told that it was stopped");
    }
    stop.write_host(&Guard::STOP.to_le_bytes()).expect("a write");
    queue.wait(&done, soon()).expect("the kernel is stopped");
    queue.unload(kernel).expect("an unload");
    queue.free(memory).expect("a free");
}

pub(super) fn fuel<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    if !accelerator.info().guards {
        return;
    }
    let worker = start(accelerator, PoolOptions::default());
    let kernel = worker.load(&programs(Program::Spin)).expect("the program loads");
    let output = worker.allocate(4).expect("memory");
    let mut value = [0u32];
    for (turns, fuel, stopped) in [(1000u64, 100_000, false), (100_000, 1000, true), (1, FOREVER, false)] {
        worker.fill(&output, 0).expect("a fill");
        let arguments = arguments![&output, turns];
        let job = worker.launch_job(&kernel, within(fuel, TIMEOUT), &arguments).expect("a launch");
        let want =
            if stopped { Err(Error::OutOfFuel { kernel: kernel.entry().into(), fuel }) } else { Ok(()) };
        assert_eq!(job.wait(soon()), want);
        assert_eq!(worker.synchronize(TIMEOUT), want, "the next wait says so too");
        worker.read(&output, &mut value).expect("a read");
        assert_eq!(value, [u32::from(!stopped)]);
    }
    drop(output);
    stop(&worker);
}

pub(super) fn time<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    if !accelerator.info().guards {
        return;
    }
    let worker = start(accelerator, PoolOptions::default());
    let kernel = worker.load(&programs(Program::Spin)).expect("the program loads");
    let output = worker.allocate_zeroed(4).expect("memory");
    let arguments = arguments![&output, FOREVER];
    let late = Err(Error::DeadlineExceeded { kernel: kernel.entry().into(), limit: SHORT });
    let begun = Instant::now();
    worker.launch(&kernel, within(FOREVER, SHORT), &arguments).expect("a launch");
    assert_eq!(worker.synchronize(TIMEOUT), late);
    println!("stopped {:?} after its time was up", begun.elapsed().saturating_sub(SHORT));
    // The worker's thread waits for the device meanwhile.
    let waited = worker.submit_and_wait(soon(), |session| {
        session.launch(&kernel, within(FOREVER, SHORT), &arguments)?;
        session.synchronize(soon())
    });
    assert_eq!(waited, Ok(()));
    assert_eq!(worker.synchronize(TIMEOUT), late);
    let mut value = [7u32];
    worker.read(&output, &mut value).expect("a read");
    assert_eq!(value, [0]);
    drop(output);
    stop(&worker);
}

pub(super) fn behind<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    if !accelerator.info().guards {
        return;
    }
    let worker = start(accelerator, PoolOptions::default());
    let kernel = worker.load(&programs(Program::Spin)).expect("the program loads");
    let bump = worker.load(&programs(Program::Bump)).expect("the program loads");
    let (output, count) =
        (worker.allocate_zeroed(4).expect("memory"), worker.allocate_zeroed(4).expect("memory"));
    let begin = |turns: u64| {
        let arguments = arguments![&output, turns];
        let job = worker.launch_job(&kernel, within(FOREVER, SHORT), &arguments).expect("a launch");
        worker.launch(&bump, 1, &arguments![&count, 1u32]).expect("a launch");
        job
    };
    let jobs = [FOREVER, 1000, FOREVER, 1000].map(begin);
    let stopped = jobs.map(|job| job.wait(soon()).is_err());
    assert_eq!(stopped, [true, false, true, false]);
    assert!(worker.synchronize(TIMEOUT).is_err());
    let mut value = [0u32];
    worker.read(&count, &mut value).expect("a read");
    assert_eq!(value, [4], "what is not guarded runs on");
    drop((output, count));
    stop(&worker);
}

pub(super) fn graphs<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    if !accelerator.info().guards {
        return;
    }
    let worker = start(accelerator, PoolOptions::default());
    let kernel = worker.load(&programs(Program::Spin)).expect("the program loads");
    let outputs = worker.allocate_zeroed(8).expect("memory");
    let capture = |turns: [u64; 2], launch: Launch| {
        worker
            .capture(|session| {
                session.fill(&outputs, 0)?;
                let parts = [outputs.view(0, 4)?, outputs.view(4, 4)?];
                parts
                    .into_iter()
                    .zip(turns)
                    .try_for_each(|(part, turns)| session.launch(&kernel, launch, &arguments![part, turns]))
            })
            .expect("a capture")
    };
    let mut values = [0u32; 2];
    let good = capture([1000, 1000], within(100_000, TIMEOUT));
    let bad = capture([100_000, 1000], within(10_000, TIMEOUT));
    let endless = capture([1000, FOREVER], within(FOREVER, SHORT));
    for _ in 0..2 {
        worker.replay(&good).expect("a replay");
        worker.replay(&good).expect("a replay");
        assert_eq!(worker.synchronize(TIMEOUT), Ok(()));
        worker.replay(&bad).expect("a replay");
        let error = worker.synchronize(TIMEOUT);
        assert!(matches!(error, Err(Error::OutOfFuel { fuel: 10_000, .. })), "{error:?}");
        worker.read(&outputs, &mut values).expect("a read");
        assert_eq!(values, [0, 1]);
        worker.replay(&endless).expect("a replay");
        let error = worker.synchronize(TIMEOUT);
        assert!(matches!(error, Err(Error::DeadlineExceeded { limit: SHORT, .. })), "{error:?}");
    }
    worker.replay(&good).expect("a replay");
    worker.read(&outputs, &mut values).expect("a read");
    assert_eq!(values, [1, 1]);
    drop((good, bad, endless, outputs));
    stop(&worker);
}

pub(super) fn batches<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) {
    if !accelerator.info().guards {
        return;
    }
    const LAUNCHES: u64 = 40;
    const AMONG: u64 = 13;
    let worker = start(accelerator, PoolOptions::default());
    let kernel = worker.load(&programs(Program::Spin)).expect("the program loads");
    let outputs = worker.allocate(4 * LAUNCHES).expect("memory");
    let (late, fuel) = (SHORT, 10_000);
    let run = |turns: u64, launch: Launch| {
        worker.fill(&outputs, 0).expect("a fill");
        let mut batch = worker.batch();
        for index in 0..LAUNCHES {
            let output = outputs.view(4 * index, 4).expect("a part");
            let turns = if index == AMONG { turns } else { 1000 };
            batch.launch(&kernel, launch, &arguments![output, turns]).expect("the arguments fit");
        }
        worker.launch_batch(batch).expect("a batch");
        let ended = worker.synchronize(TIMEOUT);
        let mut values = [7u32; LAUNCHES as usize];
        worker.read(&outputs, &mut values).expect("a read");
        let stopped: Vec<_> = (0..LAUNCHES).filter(|index| values[*index as usize] != 1).collect();
        (ended, stopped)
    };
    let name = || kernel.entry().to_owned();
    // Again and again: an accelerator may have made a graph of it.
    for _ in 0..3 {
        assert_eq!(run(1000, within(FOREVER, TIMEOUT)), (Ok(()), vec![]));
        let error = Error::OutOfFuel { kernel: name(), fuel };
        assert_eq!(run(100_000, within(fuel, TIMEOUT)), (Err(error), vec![AMONG]));
        let error = Error::DeadlineExceeded { kernel: name(), limit: late };
        let begun = Instant::now();
        assert_eq!(run(FOREVER, within(FOREVER, late)), (Err(error), vec![AMONG]));
        println!("the whole batch ended {:?} after the time of one", begun.elapsed().saturating_sub(late));
    }
    // Several at once, each with one that is stopped.
    let mut batches = Vec::new();
    for _ in 0..8 {
        let mut batch = worker.batch();
        for index in 0..LAUNCHES {
            let output = outputs.view(4 * index, 4).expect("a part");
            let turns: u64 = if index == AMONG { 100_000 } else { 1000 };
            batch.launch(&kernel, within(fuel, TIMEOUT), &arguments![output, turns]).expect("they fit");
        }
        batches.push(batch);
    }
    worker.fill(&outputs, 0).expect("a fill");
    batches.into_iter().for_each(|batch| worker.launch_batch(batch).expect("a batch"));
    let error = Error::OutOfFuel { kernel: name(), fuel };
    assert_eq!(worker.synchronize(TIMEOUT), Err(error));
    assert_eq!(run(1000, within(FOREVER, TIMEOUT)), (Ok(()), vec![]));
    drop(outputs);
    stop(&worker);
}
