//! Kernels that do what a test says: they take so long, never end, or fault.

use std::time::Duration;

use super::heap::Heap;
use super::programs::Progress;

/// What a scripted kernel does, in the simulated device's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Script {
    /// It ends after so many microseconds, at least one, and writes nothing.
    Takes(Duration),
    /// It never ends, unless it is guarded and cancelled.
    Hangs,
    /// It touches memory that is not there, which loses the context.
    Faults,
}

/// A launch of one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scripted {
    pub(super) script: Script,
    /// The address of its cancel flag, if it is guarded.
    pub(super) flag: Option<u64>,
}

impl Scripted {
    /// Goes on for a microsecond, of which there were so many, with this one.
    pub(super) fn go(self, micros: u64, heap: &Heap) -> Progress {
        let cancelled = self.flag.map_or(Some(0), |flag| heap.get(flag, 4));
        match (cancelled, self.script) {
            (None, _) | (_, Script::Faults) => Progress::Fault,
            (Some(0), Script::Hangs) => Progress::Running,
            (Some(0), Script::Takes(time)) if u128::from(micros) < time.as_micros() => Progress::Running,
            _ => Progress::Done,
        }
    }
}
