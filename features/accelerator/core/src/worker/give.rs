//! The caller's side of launches: what is wrong with them is said at once, and they are queued packed.

use std::sync::Arc;

use super::batch::Batch;
use super::buffer::{Argument, Graph, Kernel, View};
use super::session::Session;
use super::{Shared, Worker, current};
use crate::accelerator::Accelerator;
use crate::artifact::Artifact;
use crate::error::{Error, Result};
use crate::executor::guarded;
use crate::executor::job::{Cell, Completer, Job};
use crate::launch::{Arguments, Launch, QueueArgument};
use crate::memory::Region;

impl<A: Accelerator> Shared<A> {
    /// Packs arguments for a launch by whoever borrows the buffers until it is queued.
    pub(super) fn pack(
        self: &Arc<Self>,
        kernel: &Kernel<A>,
        launch: Launch,
        arguments: &[Argument<'_, A>],
    ) -> Result<Arguments> {
        self.pack_of(kernel, launch, arguments, |view| {
            self.own("buffer", view.shared())?;
            Ok(view.region())
        })
    }

    /// Packs arguments for a launch, with `region` to say whether a view may be used, and where it lies.
    pub(super) fn pack_of(
        self: &Arc<Self>,
        kernel: &Kernel<A>,
        launch: Launch,
        arguments: &[Argument<'_, A>],
        region: impl Fn(View<'_, A>) -> Result<Region<'static>>,
    ) -> Result<Arguments> {
        self.own("kernel", &kernel.0.shared)?;
        launch.grid.check(&kernel.0.layout.signature, self.accelerator.info())?;
        let layout = &kernel.0.layout;
        Arguments::pack(
            layout,
            arguments.iter().enumerate().map(|(index, argument)| match argument {
                Argument::View(shaped) => {
                    shaped.view.element().map_or(Ok(()), |given| layout.check_element(index, given))?;
                    Ok(QueueArgument::View(region(shaped.view)?, shaped.extents))
                }
                Argument::Scalar(scalar) => Ok(QueueArgument::Scalar(*scalar)),
            }),
        )
    }
}

impl<A: Accelerator> Worker<A> {
    /// Loads a kernel.
    ///
    /// # Errors
    /// [`Error::Load`], [`Error::Stopped`], [`Error::Lost`].
    pub fn load(&self, artifact: &Artifact) -> Result<Kernel<A>> {
        self.submit_and_wait(self.0.deadline(), |session| session.load(artifact))
    }

    /// Queues a launch: `worker.launch(&kernel, 64, &arguments![&x, &y, 1u32])`. The caller allocates nothing for it, up
    /// to 512 bytes of parameters. Launches that wait one behind the other may be given to the device as one graph.
    ///
    /// That a guarded kernel was stopped ([`Error::OutOfFuel`], [`Error::DeadlineExceeded`]) the next wait says, as of
    /// all that fails later.
    ///
    /// # Errors
    /// [`Error::Grid`], [`Error::Arguments`], [`Error::WrongWorker`], [`Error::QueueFull`] when no room came in the
    /// options' timeout, [`Error::Stopped`], [`Error::Lost`].
    pub fn launch(
        &self,
        kernel: &Kernel<A>,
        launch: impl Into<Launch>,
        arguments: &[Argument<'_, A>],
    ) -> Result<()> {
        let (shared, launch) = (&self.0.shared, launch.into());
        if let Some(done) = current::with(shared, |session| session.launch(kernel, launch, arguments)) {
            return done;
        }
        let packed = shared.pack(kernel, launch, arguments)?;
        let loaded = Arc::clone(&kernel.0);
        self.command(move |session| {
            session.gather(loaded, launch, &packed);
            Ok(())
        })
    }

    /// As [`Worker::launch`], with a future that ends when the kernel has ended, with what became of it: a launch whose
    /// failure is this job's and nobody else's to see. The next wait says it too.
    ///
    /// Until the launch is given to the device it can be [cancelled](Job::cancel).
    ///
    /// # Errors
    /// As [`Worker::launch`].
    pub fn launch_job(
        &self,
        kernel: &Kernel<A>,
        launch: impl Into<Launch>,
        arguments: &[Argument<'_, A>],
    ) -> Result<Job<()>> {
        let (shared, launch) = (&self.0.shared, launch.into());
        let cell = Arc::new(Cell::new());
        let mut completer = Some(Completer(Arc::clone(&cell)));
        let inline = current::with(shared, |session| {
            cell.start();
            session.launch_job(kernel, launch, arguments, &mut completer)
        });
        if let Some(done) = inline {
            return done.map(|()| Job(cell));
        }
        let mut packed = shared.pack(kernel, launch, arguments)?;
        let loaded = Arc::clone(&kernel.0);
        self.command(move |session| {
            if !completer.as_ref().is_some_and(|completer| completer.0.start()) {
                return Ok(());
            }
            let launched = guarded(|| session.launch_packed(&loaded, launch, &mut packed, &mut completer));
            if let (Some(completer), Err(error)) = (completer, &launched) {
                completer.complete(Err(error.clone()));
            }
            launched
        })?;
        Ok(Job(cell))
    }

    /// A batch of launches for [`Worker::launch_batch`], without any yet.
    pub fn batch<'a>(&self) -> Batch<'a, A> {
        Batch::new(Arc::clone(&self.0.shared))
    }

    /// Queues the launches of a batch, one behind the other, as one command: it costs less than to queue each by
    /// itself. Where the accelerator can, batches that come again and again are replayed as a graph.
    ///
    /// What fails, fails as it would by itself, and those behind it run.
    ///
    /// # Errors
    /// [`Error::WrongWorker`], [`Error::QueueFull`] when no room came in the options' timeout, [`Error::Stopped`],
    /// [`Error::Lost`]; on the worker's own thread [`Error::OutOfOrder`], and [`Error::Capturing`] in a capture.
    pub fn launch_batch(&self, batch: Batch<'_, A>) -> Result<()> {
        let shared = &self.0.shared;
        let steps = batch.into_steps(shared)?;
        if steps.len() == 0 {
            return Ok(());
        }
        if current::is(shared.id) {
            let done = current::with(shared, |session| session.launch_steps_now(&steps));
            return done.unwrap_or(Err(Error::Stopped));
        }
        self.command(move |session| session.launch_steps(&steps))
    }

    /// Records what `f` does into a graph, instead of doing it.
    ///
    /// # Errors
    /// What `f` returns; [`Error::Capturing`] for what can't be recorded; the device's.
    pub fn capture<'a>(&self, f: impl FnOnce(&Session<A>) -> Result<()> + Send + 'a) -> Result<Graph<A>> {
        self.submit_and_wait(self.0.deadline(), |session| session.capture(f))
    }

    /// Queues a graph.
    ///
    /// # Errors
    /// As [`Worker::launch`].
    pub fn replay(&self, graph: &Graph<A>) -> Result<()> {
        let shared = &self.0.shared;
        shared.own("graph", &graph.shared)?;
        if let Some(done) = current::with(shared, |session| session.replay(graph)) {
            return done;
        }
        let id = graph.id;
        self.command(move |session| session.replay_id(id))
    }
}
