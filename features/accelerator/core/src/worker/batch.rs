//! Launches that are given together.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use super::Shared;
use super::buffer::{Argument, Buffer, Kernel, Loaded};
use crate::accelerator::Accelerator;
use crate::error::Result;
use crate::launch::{Arguments, Launch};

/// Launches for [`Worker::launch_batch`](crate::Worker::launch_batch), packed one behind the other. It borrows the
/// buffers that they use.
pub struct Batch<'a, A: Accelerator> {
    shared: Arc<Shared<A>>,
    steps: Steps<A>,
    buffers: PhantomData<&'a Buffer<A>>,
}

/// Launches one behind the other.
pub(super) struct Steps<A: Accelerator> {
    steps: Vec<Step<A>>,
    words: Vec<u64>,
    /// The position from which commands may use all buffers in it.
    ready: u64,
}

struct Step<A: Accelerator> {
    loaded: Arc<Loaded<A>>,
    launch: Launch,
    /// Which of all words are its arguments.
    words: Range<usize>,
}

/// Some launches that stand together.
pub(super) struct Part<'a, A: Accelerator> {
    steps: &'a [Step<A>],
    words: &'a [u64],
}

impl<A: Accelerator> Clone for Part<'_, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A: Accelerator> Copy for Part<'_, A> {}

/// One of them.
pub(super) struct Packed<'a, A: Accelerator> {
    pub(super) loaded: &'a Arc<Loaded<A>>,
    pub(super) launch: Launch,
    words: &'a [u64],
}

impl<A: Accelerator> Packed<'_, A> {
    pub(super) fn arguments(&self) -> Arguments {
        Arguments::repacked(self.loaded.layout.params.bytes, self.words)
    }
}

impl<'a, A: Accelerator> Part<'a, A> {
    pub(super) fn len(&self) -> usize {
        self.steps.len()
    }

    /// So many launches, and the rest.
    pub(super) fn split_at(self, count: usize) -> (Self, Self) {
        let (steps, rest) = self.steps.split_at(count.min(self.len()));
        (Self { steps, ..self }, Self { steps: rest, ..self })
    }

    pub(super) fn iter(self) -> impl Iterator<Item = Packed<'a, A>> {
        self.steps.iter().map(move |step| {
            // They were put there with it.
            let words = self.words.get(step.words.clone()).unwrap_or(&[]);
            Packed { loaded: &step.loaded, launch: step.launch, words }
        })
    }
}

impl<A: Accelerator> Steps<A> {
    pub(super) fn new() -> Self {
        Self { steps: Vec::new(), words: Vec::new(), ready: 0 }
    }

    pub(super) fn push(&mut self, loaded: Arc<Loaded<A>>, launch: Launch, arguments: &Arguments) {
        let first = self.words.len();
        self.words.extend_from_slice(arguments.words());
        self.steps.push(Step { loaded, launch, words: first..self.words.len() });
    }

    /// Takes all launches out, and keeps the room.
    pub(super) fn clear(&mut self) {
        self.steps.clear();
        self.words.clear();
        self.ready = 0;
    }

    pub(super) fn len(&self) -> usize {
        self.steps.len()
    }

    pub(super) fn ready(&self) -> u64 {
        self.ready
    }

    /// All launches.
    pub(super) fn all(&self) -> Part<'_, A> {
        Part { steps: &self.steps, words: &self.words }
    }
}

impl<'a, A: Accelerator> Batch<'a, A> {
    pub(super) fn new(shared: Arc<Shared<A>>) -> Self {
        Self { shared, steps: Steps::new(), buffers: PhantomData }
    }

    /// Adds a launch, as [`Worker::launch`](crate::Worker::launch) takes it.
    ///
    /// # Errors
    /// [`Error::Grid`](crate::Error::Grid), [`Error::Arguments`](crate::Error::Arguments),
    /// [`Error::WrongWorker`](crate::Error::WrongWorker); the batch is then as it was.
    pub fn launch(
        &mut self,
        kernel: &Kernel<A>,
        launch: impl Into<Launch>,
        arguments: &[Argument<'a, A>],
    ) -> Result<()> {
        let launch = launch.into();
        let packed = self.shared.pack(kernel, launch, arguments)?;
        let ready = arguments.iter().map(|argument| match argument {
            Argument::View(shaped) => shaped.view.ready(),
            Argument::Scalar(_) => 0,
        });
        self.steps.push(Arc::clone(&kernel.0), launch, &packed);
        self.steps.ready = ready.fold(self.steps.ready, u64::max);
        Ok(())
    }

    /// How many launches it has.
    pub fn len(&self) -> usize {
        self.steps.steps.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The launches, for the worker that the batch is of.
    pub(super) fn into_steps(self, shared: &Arc<Shared<A>>) -> Result<Steps<A>> {
        shared.own("batch", &self.shared)?;
        Ok(self.steps)
    }
}

impl<A: Accelerator> std::fmt::Debug for Batch<'_, A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Batch").field("launches", &self.len()).finish_non_exhaustive()
    }
}
