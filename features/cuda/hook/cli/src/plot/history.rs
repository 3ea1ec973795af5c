//! All that a process ever had: what a picture shows.

use crate::memory::{Block, Counts, Memory, Sums};
use crate::trace::{Process, Trace, What};

/// An allocation that failed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failure {
    pub(super) time: u64,
    /// What was asked for.
    pub(super) bytes: u64,
    /// What the process had.
    pub(super) taken: u64,
}

/// That the process was paused.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pause {
    pub(super) start: u64,
    pub(super) end: u64,
    /// What was given back.
    pub(super) bytes: u64,
}

/// Times are microseconds since the first event.
#[derive(Clone, Debug)]
pub(super) struct History {
    pub(super) process: Process,
    /// How long it is.
    pub(super) length: u64,
    /// All allocations, in the order of their ends.
    pub(super) blocks: Vec<Block>,
    /// What all took together, from a time on.
    pub(super) sums: Vec<(u64, Sums)>,
    pub(super) failures: Vec<Failure>,
    pub(super) pauses: Vec<Pause>,
    pub(super) peak: u64,
    pub(super) counts: Counts,
}

impl History {
    /// That of a trace.
    pub(super) fn of(trace: &Trace) -> Self {
        let first = trace.events.iter().map(|event| event.time).min().unwrap_or(0);
        let last = trace.events.iter().map(|event| event.time).max().unwrap_or(0);
        let (mut memory, mut blocks, mut sums, mut failures) =
            (Memory::default(), Vec::new(), Vec::new(), Vec::new());
        let (mut latest, mut pauses) = (0, Vec::<Pause>::new());
        for event in &trace.events {
            let mut event = event.clone();
            // Threads write their lines in another order than they took the time, and clocks are set back.
            event.time = (event.time - first).max(latest);
            latest = event.time;
            blocks.extend(memory.apply(&event));
            match event.what {
                What::Failed { bytes, .. } => {
                    failures.push(Failure { time: event.time, bytes, taken: memory.sums.taken() });
                }
                What::Paused { bytes } => {
                    pauses.push(Pause { start: event.time, end: last - first, bytes });
                    sums.push((event.time, memory.sums));
                }
                What::Resumed => {
                    pauses.iter_mut().rev().take(1).for_each(|pause| pause.end = pause.end.min(event.time));
                    sums.push((event.time, memory.sums));
                }
                _ => sums.push((event.time, memory.sums)),
            }
        }
        blocks.extend(memory.live().cloned());
        let (peak, counts) = (memory.peak, memory.counts);
        Self {
            process: trace.process.clone(),
            length: last - first,
            blocks,
            sums,
            failures,
            pauses,
            peak,
            counts,
        }
    }
}
