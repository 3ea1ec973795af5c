//! The report of a guest's run.

use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;

use crate::vmm;

/// How a guest ran.
#[derive(Debug, Serialize, JsonSchema)]
pub struct RunReport {
    /// Name of the guest.
    pub guest: String,
    /// Why it ended.
    pub end: End,
    /// How often it was restarted in place.
    pub restarts: u32,
    /// From the start of the command to its end, in milliseconds.
    pub duration_ms: f64,
    /// Exits to user space.
    pub exits: Exits,
}

/// Why a guest ended.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// It powered itself off.
    Shutdown,
    /// It asked for a reboot, and `--no-reboot` was given.
    Reboot,
    /// It crashed, and `--no-reboot` was given.
    TripleFault,
    /// A signal or the operator's keys stopped it.
    Stopped,
}

/// Exits to user space, by kind.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct Exits {
    /// All of them.
    pub total: u64,
    /// Reads of I/O ports.
    pub port_reads: u64,
    /// Writes of I/O ports.
    pub port_writes: u64,
    /// Reads of memory that is not RAM.
    pub memory_reads: u64,
    /// Writes of memory that is not RAM.
    pub memory_writes: u64,
    /// Signals to a vCPU's thread.
    pub interrupted: u64,
    /// Everything else.
    pub other: u64,
}

/// A duration in milliseconds, to the microsecond.
pub(crate) fn milliseconds(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1000.0
}

impl RunReport {
    /// The report of `guest`.
    pub fn new(guest: &str, run: &vmm::RunReport, duration: Duration) -> Self {
        let exits = &run.exits;
        Self {
            guest: guest.to_owned(),
            end: match run.end {
                vmm::End::Shutdown => End::Shutdown,
                vmm::End::Reboot => End::Reboot,
                vmm::End::TripleFault => End::TripleFault,
                vmm::End::Stopped => End::Stopped,
            },
            restarts: run.restarts,
            duration_ms: milliseconds(duration),
            exits: Exits {
                total: exits.total(),
                port_reads: exits.port_reads,
                port_writes: exits.port_writes,
                memory_reads: exits.memory_reads,
                memory_writes: exits.memory_writes,
                interrupted: exits.interrupted,
                other: exits.other,
            },
        }
    }
}
