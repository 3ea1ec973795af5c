//! Launches as graphs: to replay one costs a device a fraction of its launches.
//!
//! The launches of a batch, or those that stand one behind the other in the worker's queue, become a graph, which is kept for the next batch of the same kernels and grids; of that, only
//! the arguments that differ are set. A guarded launch keeps its own cancel flag, and an event behind it tells when it has
//! ended: its time, and what became of it, are those of a launch by itself. Since an event tells of its last replay only,
//! such a graph is not replayed before it has ended; several of the same shape take turns.
//!
//! Memory is not kept: no graph runs before its arguments are those of a batch that waits to be launched. Kernels are
//! not either: before one is unloaded, its graphs are dropped.

use std::cell::RefCell;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use super::batch::{Packed, Part, Steps};
use super::buffer::Loaded;
use super::guard::Guarded;
use super::idle::{EAGER, POLL};
use super::session::{EventOf, QueueOf, Session};
use super::stream::{Over, Pending};
use crate::accelerator::{Accelerator, GraphNode, Queue};
use crate::error::{Error, Result};
use crate::executor::guarded;
use crate::launch::{Arguments, Grid, Launch};

/// The most launches of a graph.
const LONGEST: usize = 64;
/// A shape is worth a graph when this number of launches of it was seen. To make a graph of that many and replay it once takes
/// the driver no longer than the launches.
const WORTH: usize = 32;
/// The least launches of a graph with guarded ones: those that take turns must keep the device busy.
const GUARDED: usize = 16;
/// Graphs that are kept.
const KEPT: usize = 48;
/// Guarded graphs of the same shape, which take turns.
const TURNS: usize = 4;
/// Shapes that are remembered without a graph.
const REMEMBERED: usize = 64;

/// The graphs that a worker keeps.
struct GraphExecs<A: Accelerator> {
    /// The one used last stands last.
    kept: Vec<Exec<A>>,
    /// Hashes of shapes without a graph, and how many launches of each were seen.
    seen: Vec<(u64, usize)>,
    /// Whether the accelerator has no such graphs.
    unsupported: bool,
}

impl<A: Accelerator> Default for GraphExecs<A> {
    fn default() -> Self {
        Self { kept: Vec::new(), seen: Vec::new(), unsupported: false }
    }
}

/// A session's launches that are given together.
pub(super) struct Batches<A: Accelerator> {
    /// Launches that were not given to the queue yet, because more come.
    gathered: RefCell<Steps<A>>,
    /// Graphs of batches that came before.
    execs: RefCell<GraphExecs<A>>,
    /// Room for those of a batch.
    cancel_flags: RefCell<Vec<Option<Guarded>>>,
}

impl<A: Accelerator> Default for Batches<A> {
    fn default() -> Self {
        Self {
            gathered: RefCell::new(Steps::new()),
            execs: RefCell::default(),
            cancel_flags: RefCell::default(),
        }
    }
}

/// A graph of launches.
struct Exec<A: Accelerator> {
    graph: <QueueOf<A> as Queue>::Graph,
    shape: Shape,
    /// The words of all arguments, one launch behind the other.
    words: Vec<u64>,
    /// Of the guarded launches, in their order.
    events: Vec<Rc<EventOf<A>>>,
}

impl<A: Accelerator> Exec<A> {
    /// Whether the last replay was seen to end, where that matters.
    fn has_ended(&self) -> bool {
        self.events.last().is_none_or(|last| Rc::strong_count(last) == 1)
    }
}

/// Which kernels, by their numbers, in which grids.
struct Shape {
    hash: u64,
    nodes: Vec<(u64, Grid)>,
}

fn node<A: Accelerator>(one: Packed<'_, A>) -> (u64, Grid) {
    (one.loaded.number, one.launch.grid)
}

fn hash<A: Accelerator>(part: Part<'_, A>) -> u64 {
    let mut hasher = DefaultHasher::new();
    part.iter().map(node).for_each(|node| node.hash(&mut hasher));
    hasher.finish()
}

impl Shape {
    fn is_of<A: Accelerator>(&self, hash: u64, part: Part<'_, A>) -> bool {
        self.hash == hash && self.nodes.iter().copied().eq(part.iter().map(node))
    }
}

impl<A: Accelerator> Session<A> {
    /// Launches a batch in a job of the worker's own.
    pub(super) fn launch_steps_now(&self, steps: &Steps<A>) -> Result<()> {
        self.not_capturing("a batch of launches")?;
        self.not_captured("a batch of launches")?;
        if steps.ready() > self.shared.executor.position() {
            return Err(Error::OutOfOrder);
        }
        self.launch_steps(steps)
    }

    /// Launches a batch. What fails is kept for the next wait, and those behind it are launched.
    pub(super) fn launch_steps(&self, steps: &Steps<A>) -> Result<()> {
        self.flush();
        let mut rest = steps.all();
        while rest.len() > 0 {
            let (part, after) = rest.split_at(rest.len().min(LONGEST));
            self.launch_part(part);
            rest = after;
        }
        Ok(())
    }

    fn launch_part(&self, part: Part<'_, A>) {
        let mut guards = self.batches.cancel_flags.take();
        if !self.replay_exec(part, &mut guards) {
            for one in part.iter() {
                self.defer(self.launch_packed(one.loaded, one.launch, &mut one.arguments(), &mut None));
            }
        }
        guards.clear();
        self.batches.cancel_flags.replace(guards);
        // Who waits for earlier ones does not wait for many such parts.
        self.poll_pending();
    }

    /// Takes a launch that nobody waits for. It is given to the device with those behind it, if more commands wait.
    pub(super) fn gather(&self, loaded: Arc<Loaded<A>>, launch: Launch, arguments: &Arguments) {
        let mut gathered = self.batches.gathered.borrow_mut();
        gathered.push(loaded, launch, arguments);
        let enough = gathered.len() >= LONGEST || self.shared.executor.runs_the_last();
        drop(gathered);
        if enough {
            self.flush();
        }
    }

    /// Gives the device what was gathered.
    pub(super) fn flush(&self) {
        if self.batches.gathered.borrow().len() == 0 {
            return;
        }
        let mut gathered = self.batches.gathered.replace(Steps::new());
        // Where the row was cut is chance: parts of few different lengths come again.
        let mut rest = gathered.all();
        while rest.len() > 0 {
            let (part, after) = rest.split_at(1 << rest.len().min(LONGEST).ilog2());
            // Who waits for it hears of it, and is another than the one whose command this is.
            self.defer(guarded(|| {
                self.launch_part(part);
                Ok(())
            }));
            rest = after;
        }
        gathered.clear();
        self.batches.gathered.replace(gathered);
    }

    /// Launches a part of a batch as a graph. False where there is none: then nothing was launched.
    fn replay_exec(&self, part: Part<'_, A>, guards: &mut Vec<Option<Guarded>>) -> bool {
        if self.batches.execs.borrow().unsupported {
            return false;
        }
        let stoppable = part.iter().any(|one| one.loaded.layout.signature.guarded);
        if stoppable && part.len() < GUARDED {
            return false;
        }
        let hash = hash(part);
        let ended = self.ended_exec(hash, part);
        if ended.is_none() && !self.is_worth(hash, part.len()) {
            return false;
        }
        if self.take_cancel_flags(part, guards).is_err() {
            self.give_cancel_flags(guards);
            ended.into_iter().for_each(|exec| self.keep(exec));
            return false;
        }
        let exec = match ended {
            Some(mut exec) => self.update_exec(&mut exec, part, guards).map(|()| exec),
            None => self.make_exec(hash, part, guards),
        };
        let replayed = exec.and_then(|exec| self.start_graph(&exec.graph).map(|()| exec));
        match replayed {
            Ok(exec) => {
                for (event, guarded) in exec.events.iter().zip(guards.drain(..).flatten()) {
                    let _ = self.with_guards(|all| all.armed.arm(all.word(&guarded), guarded.time()));
                    let pending = Pending::Launch(Rc::clone(event), Over::Launch(guarded), None);
                    self.stream.pending.borrow_mut().push_back(pending);
                }
                self.keep(exec);
                true
            }
            Err(error) => {
                // The launches, one by one, say what else is wrong.
                if !matches!(error, Error::Unsupported { .. }) {
                    tracing::warn!(worker = self.shared.name(), %error, "batches are not made graphs any more");
                }
                self.batches.execs.borrow_mut().unsupported = true;
                self.give_cancel_flags(guards);
                false
            }
        }
    }

    fn give_cancel_flags(&self, guards: &mut Vec<Option<Guarded>>) {
        let _ = self.with_guards(|all| guards.drain(..).flatten().for_each(|one| all.give(&one)));
    }

    /// A cancel flag for each guarded launch.
    fn take_cancel_flags(&self, part: Part<'_, A>, guards: &mut Vec<Option<Guarded>>) -> Result<()> {
        for one in part.iter() {
            let layout = &one.loaded.layout;
            let limits = one.launch.limits.unwrap_or(self.shared.options.limits);
            guards.push(match layout.signature.guarded {
                true => Some(self.cancel_flag(layout, limits, false)?),
                false => None,
            });
        }
        Ok(())
    }

    /// A launch's arguments, with its cancel flag.
    fn guarded_arguments(&self, one: &Packed<'_, A>, guarded: Option<&Guarded>) -> Result<Arguments> {
        let mut arguments = one.arguments();
        if let Some(guarded) = guarded {
            let address = self.with_guards(|guards| guards.address(guarded))?;
            arguments.set_guard(&one.loaded.layout, address, guarded.fuel());
        }
        Ok(arguments)
    }

    /// Takes a graph of this shape that may be replayed, as soon as there is one.
    fn ended_exec(&self, hash: u64, part: Part<'_, A>) -> Option<Exec<A>> {
        let mut begun = None;
        loop {
            {
                let mut execs = self.batches.execs.borrow_mut();
                let same = |exec: &Exec<A>| exec.shape.is_of(hash, part);
                if let Some(index) = execs.kept.iter().position(|exec| same(exec) && exec.has_ended()) {
                    return Some(execs.kept.remove(index));
                }
                if execs.kept.iter().filter(|exec| same(exec)).count() < TURNS {
                    return None;
                }
            }
            self.poll_pending();
            // A graph of short kernels has soon ended; a kernel that loops need not keep a core busy.
            match begun.get_or_insert_with(Instant::now).elapsed() {
                waited if waited < EAGER => std::hint::spin_loop(),
                waited if waited < self.shared.options.queue.timeout => std::thread::sleep(POLL),
                _ => return None,
            }
        }
    }

    /// Whether a graph should be made for a shape that has none, or none that is free.
    fn is_worth(&self, hash: u64, launches: usize) -> bool {
        if launches >= WORTH {
            return true;
        }
        let seen = &mut self.batches.execs.borrow_mut().seen;
        let (_, before) = match seen.iter().position(|(one, _)| *one == hash) {
            Some(index) => seen.remove(index),
            None => (hash, 0),
        };
        if before + launches >= WORTH {
            return true;
        }
        if seen.len() >= REMEMBERED {
            seen.remove(0);
        }
        seen.push((hash, before + launches));
        false
    }

    fn update_exec(&self, exec: &mut Exec<A>, part: Part<'_, A>, guards: &[Option<Guarded>]) -> Result<()> {
        let mut rest = exec.words.as_mut_slice();
        for (place, (one, guarded)) in part.iter().zip(guards).enumerate() {
            let arguments = self.guarded_arguments(&one, guarded.as_ref())?;
            let words = arguments.words();
            // Launches of the same kernel have as many words.
            let Some((kept, after)) = std::mem::take(&mut rest).split_at_mut_checked(words.len()) else {
                return Err(Error::Stopped);
            };
            if kept != words {
                let (kernel, grid) = (&one.loaded.kernel, one.launch.grid);
                self.note(self.queue().update(&exec.graph, place, kernel, grid, &arguments))?;
                kept.copy_from_slice(words);
            }
            rest = after;
        }
        Ok(())
    }

    fn make_exec(&self, hash: u64, part: Part<'_, A>, guards: &[Option<Guarded>]) -> Result<Exec<A>> {
        let event = |_: &Guarded| self.note(self.queue().event(false)).map(Rc::new);
        let events = guards.iter().flatten().map(event).collect::<Result<Vec<_>>>()?;
        let mut behind = events.iter();
        let mut words = Vec::new();
        let mut nodes = Vec::with_capacity(part.len());
        for (one, guarded) in part.iter().zip(guards) {
            let arguments = self.guarded_arguments(&one, guarded.as_ref())?;
            words.extend_from_slice(arguments.words());
            let then = guarded.as_ref().and_then(|_| behind.next()).map(|event| &**event);
            nodes.push(GraphNode { kernel: &*one.loaded.kernel, grid: one.launch.grid, arguments, then });
        }
        let graph = self.note(self.queue().graph_exec(&nodes))?;
        drop(nodes);
        let shape = Shape { hash, nodes: part.iter().map(node).collect() };
        Ok(Exec { graph, shape, words, events })
    }

    /// Keeps a graph, and drops the one that was not used for longest where there are too many.
    fn keep(&self, exec: Exec<A>) {
        let mut execs = self.batches.execs.borrow_mut();
        execs.kept.push(exec);
        if execs.kept.len() <= KEPT {
            return;
        }
        let oldest = execs.kept.remove(0);
        drop(execs);
        // It may run yet.
        let event = self.event().and_then(|event| self.note(self.queue().record(&event)).map(|()| event));
        match event {
            Ok(event) => self.stream.pending.borrow_mut().push_back(Pending::GraphExec(
                event,
                oldest.graph,
                oldest.events,
            )),
            // The context is lost, and the graph with it.
            Err(_) => self.log(self.queue().discard(oldest.graph)),
        }
    }

    /// Drops the graphs that launch a kernel which no command uses any more.
    pub(super) fn forget_execs(&self, kernel: u64) {
        let uses = |exec: &mut Exec<A>| exec.shape.nodes.iter().any(|(number, _)| *number == kernel);
        let dropped: Vec<_> = self.batches.execs.borrow_mut().kept.extract_if(.., uses).collect();
        dropped.into_iter().for_each(|exec| self.log(self.stream.queue.discard(exec.graph)));
    }

    /// Drops all graphs, when nothing runs any more.
    pub(super) fn end_execs(&self) {
        let dropped = std::mem::take(&mut self.batches.execs.borrow_mut().kept);
        dropped.into_iter().for_each(|exec| self.log(self.stream.queue.discard(exec.graph)));
    }
}
