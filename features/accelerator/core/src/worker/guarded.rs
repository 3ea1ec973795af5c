//! The session's launches that can be stopped: how they come by a cancel flag, and what became of them.

use std::sync::Arc;
use std::time::Instant;

use super::guard::{self, Guarded, Guards};
use super::session::Session;
use super::stream::Over;
use crate::accelerator::{Accelerator, Queue};
use crate::artifact::Layout;
use crate::error::{Error, Result};
use crate::launch::Limits;

impl<A: Accelerator> Session<A> {
    /// Sees to it that there are cancel flags.
    pub(super) fn begin_guards(&self) -> Result<()> {
        if self.guards.borrow().is_none() {
            let memory = self.note(self.queue().allocate_polled(guard::BYTES))?;
            *self.guards.borrow_mut() = Some(Guards::new(memory)?);
        }
        Ok(())
    }

    /// A cancel flag, as soon as one is free.
    pub(super) fn cancel_flag(
        &self,
        layout: &Arc<Layout>,
        limits: Limits,
        capturing: bool,
    ) -> Result<Guarded> {
        self.begin_guards()?;
        let deadline = self.timeout();
        loop {
            if let Some(guarded) = self.with_guards(|guards| guards.take(capturing, layout, limits))? {
                return Ok(guarded);
            }
            if capturing {
                return Err(Error::Capturing { what: "a guarded launch more than graphs may have" });
            }
            self.poll_pending();
            if Instant::now() >= deadline {
                return Err(Error::Deadline { what: "a cancel flag that no launch uses".into() });
            }
            std::thread::yield_now();
        }
    }

    pub(super) fn with_guards<R>(&self, f: impl FnOnce(&mut Guards) -> R) -> Result<R> {
        // They stay until the session ends.
        self.guards.borrow_mut().as_mut().map(f).ok_or(Error::Stopped)
    }

    /// What a guarded launch or replay came to, now that it has ended; `seen` is false where the context is lost.
    pub(super) fn came_to(&self, over: &Over, seen: bool) -> Result<()> {
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
                let mut graphs = self.graphs.recorded.borrow_mut();
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

    /// Takes out what was armed last, whose end can't be seen.
    pub(super) fn forget(&self, over: &Over) {
        if !matches!(over, Over::Nothing) {
            let _ = self.with_guards(|guards| guards.armed.forget());
        }
        if let Over::Replay(id) = over
            && let Some(recorded) = self.graphs.recorded.borrow_mut().get_mut(id)
        {
            recorded.running = recorded.running.saturating_sub(1);
        }
    }
}
