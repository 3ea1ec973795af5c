//! What an onlooker sees of a run.

use super::memory::Memory;
use crate::module::{Kernel, Op, Place, Value};

/// Sees each op before the threads take it, and each loop's iterations behind it; to hold what was claimed of a kernel
/// against what it does.
pub trait Observer {
    /// These threads of the cluster are about to take an op; one with regions is reported once, before them.
    fn op(&mut self, op: &Op, threads: &[u32], state: &State<'_>) {
        let _ = (op, threads, state);
    }

    /// A thread has left a `for` or a `while` after this number of iterations.
    fn looped(&mut self, op: &Op, thread: u32, iterations: u64) {
        let _ = (op, thread, iterations);
    }
}

/// What threads have where they are.
pub struct State<'a> {
    pub(super) kernel: &'a Kernel,
    pub(super) values: &'a [Vec<u64>],
    pub(super) views: &'a [Option<Memory>],
    pub(super) shared: &'a [Memory],
    pub(super) local: &'a [Memory],
}

impl State<'_> {
    /// The kernel that is run.
    pub fn kernel(&self) -> &Kernel {
        self.kernel
    }

    /// The bits of each lane of a value that a thread has defined.
    pub fn lanes(&self, value: Value, thread: u32) -> &[u64] {
        let lanes = usize::from(self.kernel.type_of(value).lanes());
        &self.values[value.index()][thread as usize * lanes..][..lanes]
    }

    /// The extents of a view, a shared or a local array.
    pub fn extents(&self, place: Place) -> &[u64] {
        let memory = match place {
            Place::View(i) => self.views.get(usize::from(i)).and_then(Option::as_ref),
            Place::Shared(i) => self.shared.get(usize::from(i)),
            Place::Local(i) => self.local.get(usize::from(i)),
            Place::Channel(_) | Place::Fragment(_) => None,
        };
        memory.map_or(&[], |memory| &memory.tensor.extents)
    }
}
