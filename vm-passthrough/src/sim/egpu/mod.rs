//! A simulated eGPU in virtual time: a model of an enclosure, its tunnel, its GPU and its users, with faults on demand.
//!
//! [`SimEgpu`] stands where [`HostEnclosure`](crate::egpu::HostEnclosure) does, so that a [`Manager`](crate::egpu::Manager) takes it
//! through its life. Nothing of it is hardware: times, temperatures and rates are those of the model. No clock is read: time
//! passes by what is done with it and by [`SimEgpu::advance`], and the same seed and [`SimScript`] give the same run.
//!
//! ```
//! use std::time::Duration;
//! use vm_passthrough::egpu::{Event, Limits, Manager, State};
//! use vm_passthrough::sim::SimEgpu;
//!
//! // Its GPU hangs after 10 s, and only a reset of its bus brings it back.
//! let egpu = SimEgpu::new(1, &"at 10s hang hard".parse()?);
//! let mut manager = Manager::new(egpu, Limits::default());
//! manager.poll(&mut |_| ())?;
//! manager.take(Event::Connect, &mut |_| ());
//! assert_eq!(manager.state(), State::Ready);
//! manager.enclosure().advance(Duration::from_secs(10));
//! let mut told = Vec::new();
//! for _ in 0..3 {
//!     manager.poll(&mut |change| told.push(change.to.name()))?;
//! }
//! assert!(told.contains(&"recovering") && manager.state() == State::Ready);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod enclosure;
mod fault;
mod heat;
mod link;
mod model;
mod outcomes;
mod random;
mod script;

pub use fault::{Coming, Cure, Ending, SimEgpuFault, SimStep, Times};
pub use heat::SimHeat;
pub use link::{Carried, LinkDown, SimLink};
pub use model::{Cut, Resources, SimEgpu};
pub use random::SplitMix64;
pub use script::{SimScript, SimScriptError};

#[cfg(test)]
mod tests;
