//! A simulated eGPU in the hands of a manager.

mod faults;
mod ladder;
mod sequences;

use std::time::Duration;

use super::*;
use crate::egpu::{Event, Limits, Manager, State};

const LIMITS: Limits = Limits { missed: 3, rounds: 3, well: 5, hottest: 90_000 };

/// A manager with its eGPU, and where it has been since it was last asked.
struct Rig {
    manager: Manager<SimEgpu>,
    been: Vec<State>,
    /// Whether the manager was started anew and has not connected it since: it knows nothing of what was left then.
    is_new: bool,
}

impl Rig {
    fn new(seed: u64, script: &SimScript) -> Self {
        Self { manager: Manager::new(SimEgpu::new(seed, script), LIMITS), been: Vec::new(), is_new: false }
    }

    fn egpu(&mut self) -> &mut SimEgpu {
        self.manager.enclosure()
    }

    fn state(&self) -> State {
        self.manager.state()
    }

    fn take(&mut self, event: Event) -> State {
        let been = &mut self.been;
        self.manager.take(event, &mut |change| been.push(change.to));
        self.state()
    }

    /// Looks at it after a time. Whether it could be looked at.
    fn poll(&mut self, after: Duration) -> bool {
        self.egpu().advance(after);
        let been = &mut self.been;
        self.manager.poll(&mut |change| been.push(change.to)).is_ok()
    }

    /// Where it has been, each once in a row.
    fn been(&mut self) -> String {
        let mut names: Vec<&str> = self.been.drain(..).map(State::name).collect();
        names.dedup();
        names.join(" ")
    }
}
