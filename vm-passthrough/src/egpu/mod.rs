//! GPUs in enclosures of USB4 and Thunderbolt: connected, watched, recovered and disconnected safely.
//!
//! ```text
//! policy (may it?) ─▶ state (pure: what comes next) ─▶ manager (does it) ─▶ Enclosure (the host, or a simulated one)
//! ```
//!
//! An eGPU is known by the UUID of its enclosure's router and by which GPU is in it, never by its PCI address, which depends on
//! the port.

mod enclosure;
mod host;
mod manager;
mod policy;
mod state;

pub use enclosure::{Dropped, EgpuError, Enclosure, Observation};
pub use host::{Guests, HostEnclosure};
pub use manager::{Change, Manager};
pub use policy::{Authorise, KnownEgpu, Policy, Refusal, is_accelerator};
pub use state::{Action, Before, Drain, DrainStep, Egpu, Event, Fault, Limits, Recovery, Rung, State};

/// How long functions must stay the same for all of them to have come: Linux adds them one after the other.
pub(crate) const QUIET: std::time::Duration = std::time::Duration::from_millis(500);

#[cfg(test)]
mod tests;
