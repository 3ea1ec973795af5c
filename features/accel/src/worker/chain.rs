//! Batches as graphs: to replay one costs a device a fraction of its launches.
//!
//! The launches of a batch become a graph, which is kept for the next batch of the same kernels and grids; of that, only
//! the arguments that differ are set. A guarded launch keeps its own stop word, and an event behind it tells when it has
//! ended: its time, and what became of it, are those of a launch by itself. Since an event tells of its last replay only,
//! such a graph is not replayed before it has ended; several of the same shape take turns.
//!
//! Memory is not kept: no graph runs before its arguments are those of a batch that waits to be launched. Kernels are
//! not either: before one is unloaded, its graphs are dropped.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;
use std::time::Instant;

use super::batch::{Packed, Steps};
use super::brand::Brand;
use super::guard::Guarded;
use super::idle::{Over, Pending};
use super::session::{EventOf, QueueOf, Session};
use crate::accelerator::{Accelerator, Link, Queue};
use crate::error::{Error, Result};
use crate::launch::{Arguments, Grid};

/// The most launches of a graph.
const LONGEST: usize = 64;
/// So many launches are worth a graph that may never be replayed; fewer are when they come again.
const LONG: usize = 16;
/// Graphs that are kept.
const KEPT: usize = 48;
/// Guarded graphs of the same shape, which take turns.
const TURNS: usize = 4;
/// Shapes that are remembered without a graph.
const REMEMBERED: usize = 64;

/// The graphs that a worker keeps.
pub(super) struct Chains<A: Accelerator> {
    /// The one used last stands last.
    kept: Vec<Chain<A>>,
    seen: VecDeque<u64>,
    /// Whether the accelerator has no such graphs.
    unsupported: bool,
}

impl<A: Accelerator> Default for Chains<A> {
    fn default() -> Self {
        Self { kept: Vec::new(), seen: VecDeque::new(), unsupported: false }
    }
}

/// A graph of launches.
struct Chain<A: Accelerator> {
    graph: <QueueOf<A> as Queue>::Graph,
    shape: Shape,
    /// The words of all arguments, one launch behind the other.
    words: Vec<u64>,
    /// Of the guarded launches, in their order.
    events: Vec<Rc<EventOf<A>>>,
}

impl<A: Accelerator> Chain<A> {
    /// Whether the last replay was seen to end, where that matters.
    fn has_ended(&self) -> bool {
        self.events.last().is_none_or(|last| Rc::strong_count(last) == 1)
    }
}

/// Which kernels, by their numbers, in which grids.
#[derive(PartialEq, Eq)]
struct Shape {
    hash: u64,
    links: Vec<(u64, Grid)>,
}

impl Shape {
    fn of<A: Accelerator, B: Brand>(part: &[Packed<'_, A, B>]) -> Self {
        let links: Vec<_> = part.iter().map(|one| (one.loaded.number, one.launch.grid)).collect();
        let mut hasher = DefaultHasher::new();
        links.hash(&mut hasher);
        Self { hash: hasher.finish(), links }
    }
}

impl<A: Accelerator, B: Brand> Session<A, B> {
    /// Launches a batch in a job of the worker's own.
    pub(super) fn launch_steps_now(&self, steps: &Steps<A, B>) -> Result<()> {
        self.not_capturing("a batch of launches")?;
        if steps.ready() > self.shared.executor.position() {
            return Err(Error::OutOfOrder);
        }
        self.launch_steps(steps)
    }

    /// Launches a batch. What fails is kept for the next wait, and those behind it are launched.
    pub(super) fn launch_steps(&self, steps: &Steps<A, B>) -> Result<()> {
        for first in (0..steps.len()).step_by(LONGEST) {
            let part = steps.part(first..steps.len().min(first + LONGEST));
            if !self.replay_chain(&part) {
                for one in part {
                    self.defer(self.launch_packed(one.loaded, one.launch, &mut one.arguments(), &mut None));
                }
            }
            // Who waits for earlier ones does not wait for many such batches.
            self.look();
        }
        Ok(())
    }

    /// Launches a part of a batch as a graph. False where there is none: then nothing was launched.
    fn replay_chain(&self, part: &[Packed<'_, A, B>]) -> bool {
        if self.chains.borrow().unsupported {
            return false;
        }
        let shape = Shape::of(part);
        let Some(guards) = self.guards_of(part) else { return false };
        let chain = match self.ended_chain(&shape) {
            Some(mut chain) => self.amend_chain(&mut chain, part, &guards).map(|()| Some(chain)),
            None if self.is_worth(&shape) => self.make_chain(shape, part, &guards).map(Some),
            None => Ok(None),
        };
        let replayed = chain.and_then(|chain| match chain {
            Some(chain) => self.note(self.queue.replay(&chain.graph)).map(|()| Some(chain)),
            None => Ok(None),
        });
        match replayed {
            Ok(Some(chain)) => {
                self.arm(&chain, part, guards);
                self.keep(chain);
                true
            }
            other => {
                if let Err(error) = other {
                    // The launches, one by one, say what else is wrong.
                    if !matches!(error, Error::Unsupported { .. }) {
                        tracing::warn!(worker = self.shared.name(), %error, "batches are not made graphs any more");
                    }
                    self.chains.borrow_mut().unsupported = true;
                }
                let give = |guarded: &Guarded| self.with_guards(|guards| guards.give(guarded));
                guards.iter().flatten().for_each(|guarded| drop(give(guarded)));
                false
            }
        }
    }

    /// A stop word for each guarded launch.
    fn guards_of(&self, part: &[Packed<'_, A, B>]) -> Option<Vec<Option<Guarded>>> {
        let mut guards = Vec::with_capacity(part.len());
        for one in part {
            let layout = &one.loaded.layout;
            let limits = one.launch.limits.unwrap_or(self.shared.options.limits);
            let guarded = match layout.signature.guard {
                Some(_) => self.stop_word(layout, limits, false).map(Some),
                None => Ok(None),
            };
            match guarded {
                Ok(guarded) => guards.push(guarded),
                Err(_) => {
                    let _ = self.with_guards(|all| guards.iter().flatten().for_each(|one| all.give(one)));
                    return None;
                }
            }
        }
        Some(guards)
    }

    /// A launch's arguments, with its stop word.
    fn guarded_arguments(&self, one: &Packed<'_, A, B>, guarded: Option<&Guarded>) -> Result<Arguments> {
        let mut arguments = one.arguments();
        if let Some(guarded) = guarded {
            let address = self.with_guards(|guards| guards.address(guarded))?;
            arguments.set_guard(&one.loaded.layout, address, guarded.rounds());
        }
        Ok(arguments)
    }

    /// Takes a graph of this shape that may be replayed, as soon as there is one.
    fn ended_chain(&self, shape: &Shape) -> Option<Chain<A>> {
        let deadline = self.patience();
        loop {
            {
                let mut chains = self.chains.borrow_mut();
                let same = |chain: &Chain<A>| chain.shape == *shape;
                if let Some(index) = chains.kept.iter().position(|chain| same(chain) && chain.has_ended()) {
                    return Some(chains.kept.remove(index));
                }
                if chains.kept.iter().filter(|chain| same(chain)).count() < TURNS {
                    return None;
                }
            }
            self.look();
            if Instant::now() >= deadline {
                return None;
            }
            std::hint::spin_loop();
        }
    }

    /// Whether a graph should be made for a shape that has none, or none that is free.
    fn is_worth(&self, shape: &Shape) -> bool {
        let mut chains = self.chains.borrow_mut();
        if shape.links.len() >= LONG || chains.seen.contains(&shape.hash) {
            return true;
        }
        if chains.seen.len() >= REMEMBERED {
            chains.seen.pop_front();
        }
        chains.seen.push_back(shape.hash);
        false
    }

    fn amend_chain(
        &self,
        chain: &mut Chain<A>,
        part: &[Packed<'_, A, B>],
        guards: &[Option<Guarded>],
    ) -> Result<()> {
        let mut rest = chain.words.as_mut_slice();
        for (place, (one, guarded)) in part.iter().zip(guards).enumerate() {
            let arguments = self.guarded_arguments(one, guarded.as_ref())?;
            let words = arguments.words();
            // Launches of the same kernel have as many words.
            let Some((kept, after)) = std::mem::take(&mut rest).split_at_mut_checked(words.len()) else {
                return Err(Error::Stopped);
            };
            if kept != words {
                let (kernel, grid) = (&one.loaded.kernel, one.launch.grid);
                self.note(self.queue.amend(&chain.graph, place, kernel, grid, &arguments))?;
                kept.copy_from_slice(words);
            }
            rest = after;
        }
        Ok(())
    }

    fn make_chain(
        &self,
        shape: Shape,
        part: &[Packed<'_, A, B>],
        guards: &[Option<Guarded>],
    ) -> Result<Chain<A>> {
        let event = |_: &Guarded| self.note(self.queue.event(false)).map(Rc::new);
        let events = guards.iter().flatten().map(event).collect::<Result<Vec<_>>>()?;
        let mut behind = events.iter();
        let mut words = Vec::new();
        let mut links = Vec::with_capacity(part.len());
        for (one, guarded) in part.iter().zip(guards) {
            let arguments = self.guarded_arguments(one, guarded.as_ref())?;
            words.extend_from_slice(arguments.words());
            let then = guarded.as_ref().and_then(|_| behind.next()).map(|event| &**event);
            links.push(Link { kernel: &*one.loaded.kernel, grid: one.launch.grid, arguments, then });
        }
        let graph = self.note(self.queue.chain(&links))?;
        Ok(Chain { graph, shape, words, events })
    }

    /// Looks after the guarded launches of a graph that was replayed just now.
    fn arm(&self, chain: &Chain<A>, part: &[Packed<'_, A, B>], guards: Vec<Option<Guarded>>) {
        debug_assert_eq!(part.len(), guards.len());
        for (event, guarded) in chain.events.iter().zip(guards.into_iter().flatten()) {
            let _ = self.with_guards(|all| all.armed.arm(all.word(&guarded), guarded.time()));
            let pending = Pending::Launch(Rc::clone(event), Over::Launch(guarded), None);
            self.pending.borrow_mut().push_back(pending);
        }
    }

    /// Keeps a graph, and drops the one that was not used for longest where there are too many.
    fn keep(&self, chain: Chain<A>) {
        let mut chains = self.chains.borrow_mut();
        chains.kept.push(chain);
        if chains.kept.len() <= KEPT {
            return;
        }
        let oldest = chains.kept.remove(0);
        drop(chains);
        // It may run yet.
        let event = self.event().and_then(|event| self.note(self.queue.record(&event)).map(|()| event));
        match event {
            Ok(event) => {
                self.pending.borrow_mut().push_back(Pending::Chain(event, oldest.graph, oldest.events))
            }
            // The context is lost, and the graph with it.
            Err(_) => self.log(self.queue.discard(oldest.graph)),
        }
    }

    /// Drops the graphs that launch a kernel which no command uses any more.
    pub(super) fn forget_chains(&self, kernel: u64) {
        let uses = |chain: &mut Chain<A>| chain.shape.links.iter().any(|(number, _)| *number == kernel);
        let dropped: Vec<_> = self.chains.borrow_mut().kept.extract_if(.., uses).collect();
        dropped.into_iter().for_each(|chain| self.log(self.queue.discard(chain.graph)));
    }

    /// Drops all graphs, when nothing runs any more.
    pub(super) fn end_chains(&self) {
        let dropped = std::mem::take(&mut self.chains.borrow_mut().kept);
        dropped.into_iter().for_each(|chain| self.log(self.queue.discard(chain.graph)));
    }
}
