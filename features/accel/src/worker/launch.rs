//! The worker's side of kernels and graphs: loading, launching, capturing, replaying.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Garbage;
use super::brand::Brand;
use super::buffer::{Argument, Graph, Kernel, Loaded};
use super::guard::{self, Guarded, Guards};
use super::idle::Over;
use super::session::{QueueOf, Session};
use super::watch::Words;
use crate::accelerator::{Accelerator, Queue};
use crate::artifact::{Artifact, Layout};
use crate::error::{Error, Result};
use crate::executor::guarded;
use crate::executor::job::Completer;
use crate::launch::{Arguments, Launch, Limits};

/// A graph, as the worker keeps it.
pub(super) struct Recorded<A: Accelerator, B: Brand> {
    pub(super) graph: <QueueOf<A> as Queue>::Graph,
    pub(super) uses: Uses<A, B>,
    /// The stop words, to be armed, if it has any.
    words: Option<(Words, Duration)>,
    /// Guarded replays that the device has not been seen to end.
    pub(super) running: u32,
    /// Whether a replay was stopped since `running` was last 0.
    pub(super) stopped: bool,
}

/// What a graph keeps.
pub(super) struct Uses<A: Accelerator, B: Brand> {
    pub(super) memory: Vec<u64>,
    pub(super) kernels: Vec<Arc<Loaded<A, B>>>,
    pub(super) guarded: Vec<Guarded>,
}

impl<A: Accelerator, B: Brand> Uses<A, B> {
    fn none() -> Self {
        Self { memory: Vec::new(), kernels: Vec::new(), guarded: Vec::new() }
    }
}

impl<A: Accelerator, B: Brand> Session<A, B> {
    /// Loads a kernel.
    ///
    /// # Errors
    /// [`Error::Load`].
    pub fn load(&self, artifact: &Artifact) -> Result<Kernel<A, B>> {
        self.not_capturing("loading a kernel")?;
        self.shared.accelerator.info().check(artifact)?;
        if artifact.signature().guarded && self.guards.borrow().is_none() {
            let memory = self.note(self.queue().allocate_watched(guard::BYTES))?;
            *self.guards.borrow_mut() = Some(Guards::new(memory)?);
        }
        let kernel = ManuallyDrop::new(self.note(self.queue().load(artifact))?);
        let layout = Arc::clone(artifact.layout());
        let number = self.next_kernel.replace(self.next_kernel.get() + 1);
        Ok(Kernel(Arc::new(Loaded { number, kernel, layout, shared: Arc::clone(&self.shared) })))
    }

    /// Launches a kernel.
    ///
    /// # Errors
    /// [`Error::Grid`], [`Error::Arguments`], [`Error::WrongWorker`], [`Error::OutOfOrder`]; [`Error::Deadline`] when
    /// no stop word became free in time for a guarded kernel; the device's. That a guarded kernel was stopped the next
    /// wait says.
    pub fn launch(
        &self,
        kernel: &Kernel<A, B>,
        launch: impl Into<Launch>,
        arguments: &[Argument<'_, A, B>],
    ) -> Result<()> {
        let launch = launch.into();
        let mut packed = self.shared.pack_of(kernel, launch, arguments, |view| self.region(view))?;
        self.launch_packed(&kernel.0, launch, &mut packed, &mut None)
    }

    /// As [`Session::launch`]; `completer` is completed when the kernel has ended.
    pub(super) fn launch_job(
        &self,
        kernel: &Kernel<A, B>,
        launch: Launch,
        arguments: &[Argument<'_, A, B>],
        completer: &mut Option<Completer<()>>,
    ) -> Result<()> {
        let mut packed = self.shared.pack_of(kernel, launch, arguments, |view| self.region(view))?;
        self.launch_packed(&kernel.0, launch, &mut packed, completer)
    }

    /// Launches with arguments that were packed for the kernel. `completer`, where there is one, is completed when the
    /// kernel has ended; it is left where it is if the launch fails.
    pub(super) fn launch_packed(
        &self,
        loaded: &Arc<Loaded<A, B>>,
        launch: Launch,
        packed: &mut Arguments,
        completer: &mut Option<Completer<()>>,
    ) -> Result<()> {
        if completer.is_some() {
            self.not_capturing("a launch that is waited for")?;
        }
        let capturing = match self.capture.borrow_mut().as_mut() {
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

        let limits = launch.limits.unwrap_or(self.shared.options.limits);
        let guarded = self.stop_word(layout, limits, capturing)?;
        let (address, word) = self.with_guards(|guards| (guards.address(&guarded), guards.word(&guarded)))?;
        packed.set_guard(layout, address, limits.fuel);
        if let Some(uses) = self.capture.borrow_mut().as_mut() {
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

    /// A stop word, as soon as one is free.
    pub(super) fn stop_word(&self, layout: &Arc<Layout>, limits: Limits, capturing: bool) -> Result<Guarded> {
        let deadline = self.timeout();
        loop {
            if let Some(guarded) = self.with_guards(|guards| guards.take(capturing, layout, limits))? {
                return Ok(guarded);
            }
            if capturing {
                return Err(Error::Capturing { what: "a guarded launch more than graphs may have" });
            }
            self.look();
            if Instant::now() >= deadline {
                return Err(Error::Deadline { what: "a stop word that no launch uses".into() });
            }
            std::thread::yield_now();
        }
    }

    pub(super) fn with_guards<R>(&self, f: impl FnOnce(&mut Guards) -> R) -> Result<R> {
        // A guarded kernel is loaded only where there are stop words, and they stay until the worker ends.
        self.guards.borrow_mut().as_mut().map(f).ok_or(Error::Stopped)
    }

    /// What a guarded launch or replay came to, now that it has ended; `seen` is false where the context is lost.
    pub(super) fn over(&self, over: &Over, seen: bool) -> Result<()> {
        match over {
            Over::Nothing => Ok(()),
            Over::Launch(guarded) => self.with_guards(|guards| {
                guards.armed.end();
                let outcome = guards.outcome(guarded);
                if seen {
                    guards.give(guarded);
                }
                outcome
            })?,
            Over::Replay(id) => self.with_guards(|guards| {
                guards.armed.end();
                let mut graphs = self.graphs.borrow_mut();
                let Some(recorded) = graphs.get_mut(id) else { return Ok(()) };
                let outcomes = recorded.uses.guarded.iter().map(|guarded| guards.outcome(guarded));
                let outcome = outcomes.into_iter().find(Result::is_err).unwrap_or(Ok(()));
                recorded.running = recorded.running.saturating_sub(1);
                recorded.stopped |= outcome.is_err();
                if recorded.running == 0 && std::mem::take(&mut recorded.stopped) {
                    guards.reset(&recorded.uses.guarded);
                }
                outcome
            })?,
        }
    }

    /// Records what `f` does to this session into a graph, instead of doing it.
    ///
    /// Guarded launches in it keep the fuel that they are given here; a replay may take the sum of their times. When
    /// one is stopped, the replays of the graph that were given before that was seen are stopped too.
    ///
    /// # Errors
    /// What `f` returns; [`Error::Capturing`] inside another capture, or for more guarded launches than all graphs may
    /// have together, which is about 3000; the device's.
    pub fn capture(&self, f: impl FnOnce(&Self) -> Result<()>) -> Result<Graph<A, B>> {
        self.not_capturing("another capture")?;
        self.look();
        self.note(self.queue().begin_capture())?;
        *self.capture.borrow_mut() = Some(Uses::none());
        let done = guarded(|| f(self));
        let uses = self.capture.borrow_mut().take().unwrap_or_else(Uses::none);
        let graph = match (self.note(self.queue().end_capture()), done) {
            (Ok(graph), Ok(())) => graph,
            (graph, done) => {
                self.give_up(&uses);
                let mut result = done;
                match graph {
                    Ok(graph) => self.log(self.queue().discard(graph)),
                    Err(error) => result = result.and(Err(error)),
                }
                return Err(result.err().unwrap_or(Error::Stopped));
            }
        };
        let words = match uses.guarded.as_slice() {
            [] => None,
            all => Some((self.with_guards(|guards| guards.words(all))?, guard::time(all))),
        };
        let id = self.next_graph.replace(self.next_graph.get() + 1);
        let recorded = Recorded { graph, uses, words, running: 0, stopped: false };
        self.graphs.borrow_mut().insert(id, recorded);
        Ok(Graph { id, shared: Arc::clone(&self.shared) })
    }

    /// Runs a graph.
    ///
    /// # Errors
    /// [`Error::WrongWorker`]; [`Error::Deadline`] when a graph that was stopped does not end; the device's.
    pub fn replay(&self, graph: &Graph<A, B>) -> Result<()> {
        self.shared.own("graph", &graph.shared)?;
        self.replay_id(graph.id)
    }

    pub(super) fn replay_id(&self, id: u64) -> Result<()> {
        self.not_capturing("a replay")?;
        self.flush();
        // Stop words that are set would stop this replay too.
        let stopped = |recorded: &Recorded<A, B>| recorded.running > 0 && recorded.stopped;
        let deadline = self.timeout();
        while self.graphs.borrow().get(&id).is_some_and(stopped) {
            self.look();
            if Instant::now() >= deadline {
                return Err(Error::Deadline { what: "the end of a graph that was stopped".into() });
            }
            std::thread::yield_now();
        }
        let mut graphs = self.graphs.borrow_mut();
        let recorded = graphs.get_mut(&id).ok_or(Error::WrongWorker { what: "graph" })?;
        let Some((words, time)) = recorded.words.clone() else {
            return self.start_graph(&recorded.graph);
        };
        let event = self.event()?;
        self.start_graph(&recorded.graph)?;
        recorded.running += 1;
        drop(graphs);
        self.with_guards(|guards| guards.armed.arm(words, time))?;
        self.pend(event, Over::Replay(id), &mut None)
    }

    /// Takes out what was armed last, whose end can't be seen.
    pub(super) fn forget(&self, over: &Over) {
        if !matches!(over, Over::Nothing) {
            let _ = self.with_guards(|guards| guards.armed.forget());
        }
        if let Over::Replay(id) = over
            && let Some(recorded) = self.graphs.borrow_mut().get_mut(id)
        {
            recorded.running = recorded.running.saturating_sub(1);
        }
    }

    /// Lets go of what a graph keeps.
    pub(super) fn give_up(&self, uses: &Uses<A, B>) {
        self.unhold(uses);
        if !uses.guarded.is_empty() {
            let _ = self.with_guards(|guards| uses.guarded.iter().for_each(|guarded| guards.give(guarded)));
        }
    }

    /// Lets go of the memory that a graph keeps.
    pub(super) fn unhold(&self, uses: &Uses<A, B>) {
        for &address in &uses.memory {
            if let Some(memory) = self.shared.pool.unhold(address, self.shared.executor.tail()) {
                // Its buffer may have been dropped after the graph, behind commands that wait.
                self.shared.discard(Garbage::Memory(memory));
            }
        }
    }
}
