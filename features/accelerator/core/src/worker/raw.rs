//! What a queue can't check, and a worker answers for: that launches and graphs use nothing that was freed.
#![allow(unsafe_code)]

use super::session::Session;
use crate::accelerator::{Accelerator, Queue};
use crate::error::Result;
use crate::launch::{Arguments, Grid};

type OwnQueue<A> = <A as Accelerator>::Queue;

impl<A: Accelerator> Session<A> {
    /// Launches a kernel of this worker with arguments that were packed from its buffers.
    pub(super) fn start(
        &self,
        kernel: &<OwnQueue<A> as Queue>::Kernel,
        grid: Grid,
        arguments: &Arguments,
    ) -> Result<()> {
        // SAFETY: the arguments were packed from views of this worker's buffers while those were borrowed. A buffer that is
        // dropped is freed by a command, which is behind this one in the worker and so in the queue. A cancel flag is the
        // worker's own and given to no other launch before this one has ended.
        self.note(unsafe { self.queue().launch(kernel, grid, arguments) })
    }

    /// Opens a further stream, for a scope.
    pub(super) fn open_stream(&self) -> Result<OwnQueue<A>> {
        // SAFETY: a scope's streams use what is borrowed longer than the scope, so none of it is freed or unloaded before; when
        // the scope ends, this session comes behind all that they were given, or the context is taken for lost.
        self.note(unsafe { self.queue().stream() })
    }

    /// Runs a graph that this worker recorded or made.
    pub(super) fn start_graph(&self, graph: &<OwnQueue<A> as Queue>::Graph) -> Result<()> {
        // SAFETY: a recorded graph keeps the memory, the kernels and the cancel flags that it uses until it is discarded. One
        // that was made of launches is given the arguments of those that are replayed, for which the same holds as above.
        self.note(unsafe { self.queue().replay(graph) })
    }
}
