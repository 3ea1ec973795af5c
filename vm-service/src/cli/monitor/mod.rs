//! Watching GPUs: what was seen of each, how it changes, and what is to be looked after.
//!
//! ```text
//! Sampler ─▶ Observation ─▶ Board ─▶ screen, or lines of JSON
//! ```
//!
//! A [`Board`] only takes observations and knows no clock: what it says follows from what it was given.

mod history;
mod panel;
mod sampler;
mod screen;
mod terminal;

use std::time::Instant;

use vm_passthrough::telemetry::Answer;

pub(crate) use panel::{Panel, State};
pub(crate) use sampler::Sampler;
pub(crate) use screen::{View, draw};
pub(crate) use terminal::Screen;

use crate::devices::gpus::Gpu;

/// GPUs as they were at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Observation {
    /// When.
    pub(crate) at: Instant,
    /// Those that are there, each with its answer.
    pub(crate) gpus: Vec<(Gpu, Answer)>,
}

/// Every GPU that was seen, those behind a tunnel first.
#[derive(Debug, Default)]
pub(crate) struct Board {
    panels: Vec<Panel>,
}

impl Board {
    /// One without GPUs.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// The GPUs.
    pub(crate) fn panels(&self) -> &[Panel] {
        &self.panels
    }

    /// Takes what was seen. A GPU that is not there any more keeps its panel, and goes on in it when it comes back: at its
    /// address, or elsewhere in the same enclosure.
    pub(crate) fn observe(&mut self, seen: Observation) {
        let Observation { at, gpus } = seen;
        let there: Vec<_> = gpus.iter().map(|(gpu, _)| gpu.address()).collect();
        for panel in self.panels.iter_mut().filter(|panel| !there.contains(&panel.gpu().address())) {
            panel.gone(at);
        }
        for (gpu, answer) in gpus {
            let known = self.panels.iter().position(|panel| panel.gpu().address() == gpu.address());
            let known = known.or_else(|| self.panels.iter().position(|panel| panel.has_moved_to(&gpu)));
            let panel = match known.and_then(|at| self.panels.get_mut(at)) {
                Some(panel) => panel,
                None => {
                    self.panels.push(Panel::new(gpu.clone()));
                    let Some(new) = self.panels.last_mut() else { continue };
                    new
                }
            };
            panel.observe(at, gpu, answer);
        }
        self.panels.sort_by_key(|panel| (panel.gpu().tunnel.is_none(), panel.gpu().address()));
    }
}

#[cfg(test)]
mod tests;
