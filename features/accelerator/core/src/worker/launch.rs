//! The session's kernels: loading them and launching them.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::buffer::{Argument, Kernel, Loaded};
use super::session::Session;
use super::stream::Over;
use crate::accelerator::{Accelerator, Queue};
use crate::artifact::Artifact;
use crate::error::Result;
use crate::executor::job::Completer;
use crate::launch::{Arguments, Launch};

impl<A: Accelerator> Session<A> {
    /// Loads a kernel.
    ///
    /// # Errors
    /// [`Error::Load`](crate::Error::Load).
    pub fn load(&self, artifact: &Artifact) -> Result<Kernel<A>> {
        self.not_capturing("loading a kernel")?;
        self.shared.accelerator.info().check(artifact)?;
        if artifact.signature().guarded {
            self.begin_guards()?;
        }
        let kernel = ManuallyDrop::new(self.note(self.queue().load(artifact))?);
        let layout = Arc::clone(artifact.layout());
        let number = self.next_kernel.replace(self.next_kernel.get() + 1);
        Ok(Kernel(Arc::new(Loaded { number, kernel, layout, shared: Arc::clone(&self.shared) })))
    }

    /// Launches a kernel.
    ///
    /// # Errors
    /// [`Error::Grid`](crate::Error::Grid), [`Error::Arguments`](crate::Error::Arguments),
    /// [`Error::WrongWorker`](crate::Error::WrongWorker), [`Error::OutOfOrder`](crate::Error::OutOfOrder); for a guarded kernel
    /// [`Error::Deadline`](crate::Error::Deadline) when no cancel flag became free in time, and
    /// [`Error::Capturing`](crate::Error::Capturing) when the stream's owner captures it; the device's. That a guarded kernel
    /// was stopped the next wait says.
    pub fn launch(
        &self,
        kernel: &Kernel<A>,
        launch: impl Into<Launch>,
        arguments: &[Argument<'_, A>],
    ) -> Result<()> {
        self.tend();
        let launch = launch.into();
        let mut packed = self.shared.pack_of(kernel, launch, arguments, |view| self.region(view))?;
        self.launch_packed(&kernel.0, launch, &mut packed, &mut None)
    }

    /// As [`Session::launch`]; `completer` is completed when the kernel has ended.
    pub(super) fn launch_job(
        &self,
        kernel: &Kernel<A>,
        launch: Launch,
        arguments: &[Argument<'_, A>],
        completer: &mut Option<Completer<()>>,
    ) -> Result<()> {
        let mut packed = self.shared.pack_of(kernel, launch, arguments, |view| self.region(view))?;
        self.launch_packed(&kernel.0, launch, &mut packed, completer)
    }

    /// Launches with arguments that were packed for the kernel. `completer`, where there is one, is completed when the
    /// kernel has ended; it is left where it is if the launch fails.
    pub(super) fn launch_packed(
        &self,
        loaded: &Arc<Loaded<A>>,
        launch: Launch,
        packed: &mut Arguments,
        completer: &mut Option<Completer<()>>,
    ) -> Result<()> {
        if completer.is_some() {
            self.not_capturing("a launch that is waited for")?;
        }
        let capturing = match self.graphs.capture.borrow_mut().as_mut() {
            Some(uses) => {
                uses.kernels.push(Arc::clone(loaded));
                true
            }
            None => false,
        };
        let layout = &loaded.layout;
        let begin = |packed: &Arguments| self.start(&loaded.kernel, launch.grid, packed);
        if !layout.signature.guarded {
            begin(packed)?;
            return if completer.is_some() {
                self.pend(self.event()?, Over::Nothing, completer)
            } else {
                Ok(())
            };
        }

        self.not_captured("a guarded launch, by the stream's owner,")?;
        let limits = launch.limits.unwrap_or(self.shared.options.limits);
        let guarded = self.cancel_flag(layout, limits, capturing)?;
        let (address, word) = self.with_guards(|guards| (guards.address(&guarded), guards.word(&guarded)))?;
        packed.set_guard(layout, address, limits.fuel);
        if let Some(uses) = self.graphs.capture.borrow_mut().as_mut() {
            uses.guarded.push(guarded);
            return begin(packed);
        }
        match self.event().and_then(|event| begin(packed).map(|()| event)) {
            Ok(event) => {
                self.with_guards(|guards| guards.armed.arm(word, limits.time))?;
                self.pend(event, Over::Launch(guarded), completer)
            }
            Err(error) => {
                self.with_guards(|guards| guards.give(&guarded))?;
                Err(error)
            }
        }
    }
}
