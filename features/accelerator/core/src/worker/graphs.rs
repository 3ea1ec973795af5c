//! The session's graphs: recording them, replaying them, and what they keep.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::DeferredFree;
use super::buffer::{Graph, Loaded};
use super::guard::{self, Guarded};
use super::session::{QueueOf, Session};
use super::stream::Over;
use super::watch::Words;
use crate::accelerator::{Accelerator, Queue};
use crate::error::{Error, Result};
use crate::executor::guarded;

/// The graphs of a session.
pub(super) struct Graphs<A: Accelerator> {
    pub(super) recorded: RefCell<HashMap<u64, Recorded<A>>>,
    /// What the one uses that is being recorded.
    pub(super) capture: RefCell<Option<Uses<A>>>,
    next: Cell<u64>,
}

impl<A: Accelerator> Default for Graphs<A> {
    fn default() -> Self {
        Self { recorded: RefCell::default(), capture: RefCell::new(None), next: Cell::new(1) }
    }
}

/// A graph, as the worker keeps it.
pub(super) struct Recorded<A: Accelerator> {
    pub(super) graph: <QueueOf<A> as Queue>::Graph,
    pub(super) uses: Uses<A>,
    /// The cancel flags, to be armed, if it has any.
    words: Option<(Words, Duration)>,
    /// Guarded replays that the device has not been seen to end.
    pub(super) running: u32,
    /// Whether a replay was stopped since `running` was last 0.
    pub(super) stopped: bool,
}

/// What a graph keeps.
pub(super) struct Uses<A: Accelerator> {
    pub(super) memory: Vec<u64>,
    pub(super) kernels: Vec<Arc<Loaded<A>>>,
    pub(super) guarded: Vec<Guarded>,
}

impl<A: Accelerator> Uses<A> {
    fn none() -> Self {
        Self { memory: Vec::new(), kernels: Vec::new(), guarded: Vec::new() }
    }
}

impl<A: Accelerator> Session<A> {
    /// Records what `f` does to this session into a graph, instead of doing it.
    ///
    /// Guarded launches in it keep the fuel that they are given here; a replay may take the sum of their times. When
    /// one is stopped, the replays of the graph that were given before that was seen are stopped too.
    ///
    /// # Errors
    /// What `f` returns; [`Error::Capturing`] inside another capture, or for more guarded launches than all graphs may
    /// have together, which is about 3000; the device's.
    pub fn capture(&self, f: impl FnOnce(&Self) -> Result<()>) -> Result<Graph<A>> {
        self.not_capturing("another capture")?;
        self.poll_pending();
        self.note(self.queue().begin_capture())?;
        *self.graphs.capture.borrow_mut() = Some(Uses::none());
        let done = guarded(|| f(self));
        let uses = self.graphs.capture.borrow_mut().take().unwrap_or_else(Uses::none);
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
        let id = self.graphs.next.replace(self.graphs.next.get() + 1);
        let recorded = Recorded { graph, uses, words, running: 0, stopped: false };
        self.graphs.recorded.borrow_mut().insert(id, recorded);
        Ok(Graph { id, shared: Arc::clone(&self.shared) })
    }

    /// Runs a graph.
    ///
    /// # Errors
    /// [`Error::WrongWorker`]; [`Error::Deadline`] when a graph that was stopped does not end; the device's.
    pub fn replay(&self, graph: &Graph<A>) -> Result<()> {
        self.shared.own("graph", &graph.shared)?;
        self.replay_id(graph.id)
    }

    pub(super) fn replay_id(&self, id: u64) -> Result<()> {
        self.not_capturing("a replay")?;
        self.not_captured("a replay")?;
        self.flush();
        // Cancel flags that are set would stop this replay too.
        let stopped = |recorded: &Recorded<A>| recorded.running > 0 && recorded.stopped;
        let deadline = self.timeout();
        while self.graphs.recorded.borrow().get(&id).is_some_and(stopped) {
            self.poll_pending();
            if Instant::now() >= deadline {
                return Err(Error::Deadline { what: "the end of a graph that was stopped".into() });
            }
            std::thread::yield_now();
        }
        let mut graphs = self.graphs.recorded.borrow_mut();
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

    /// Lets go of what a graph keeps.
    pub(super) fn give_up(&self, uses: &Uses<A>) {
        self.unhold(uses);
        if !uses.guarded.is_empty() {
            let _ = self.with_guards(|guards| uses.guarded.iter().for_each(|guarded| guards.give(guarded)));
        }
    }

    /// Lets go of the memory that a graph keeps.
    pub(super) fn unhold(&self, uses: &Uses<A>) {
        for &address in &uses.memory {
            if let Some(memory) = self.shared.pool.unhold(address, self.shared.executor.tail()) {
                // Its buffer may have been dropped after the graph, behind commands that wait.
                self.shared.discard(DeferredFree::Memory(memory));
            }
        }
    }
}
