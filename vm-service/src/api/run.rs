//! The report of a guest's run.

use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;
use vm_passthrough::PciAddress;

use super::{Confinement, StoppedHow};
use crate::vmm;

/// How a guest ran.
#[derive(Debug, Serialize, JsonSchema)]
pub struct RunReport {
    /// Name of the guest.
    pub guest: String,
    /// How it ended.
    pub how: StoppedHow,
    /// How often it was restarted in place.
    pub restarts: u32,
    /// From the start of the command until the guest was started, in milliseconds.
    pub startup_ms: f64,
    /// From the start of the command until everything was released, in milliseconds.
    pub duration_ms: f64,
    /// Exits to user space.
    pub exits: Exits,
    /// How the devices were opened, `iommufd` or `group`; null without devices.
    pub backend: Option<String>,
    /// The devices that it had.
    pub devices: Vec<RunDevice>,
    /// How far the process was confined in which it ran.
    pub confinement: Confinement,
}

/// A device of a guest, and how long each step took, in milliseconds.
#[derive(Debug, Serialize, JsonSchema)]
pub struct RunDevice {
    /// Address on the host.
    pub address: String,
    /// Taking it and its companions from their drivers.
    pub claim_ms: f64,
    /// Opening it through VFIO.
    pub open_ms: f64,
    /// Reset, and mapping the guest's RAM for its DMA.
    pub attach_ms: f64,
    /// Taking it from the guest.
    pub detach_ms: f64,
    /// Giving it and its companions back to their drivers; 0 for a claim that outlives the run.
    pub release_ms: f64,
}

impl RunDevice {
    /// A device that took so long to claim.
    pub(crate) fn new(address: PciAddress, claim: Duration) -> Self {
        Self {
            address: address.to_string(),
            claim_ms: milliseconds(claim),
            open_ms: 0.0,
            attach_ms: 0.0,
            detach_ms: 0.0,
            release_ms: 0.0,
        }
    }
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

impl From<&vmm::ExitCounts> for Exits {
    fn from(exits: &vmm::ExitCounts) -> Self {
        Self {
            total: exits.total(),
            port_reads: exits.port_reads,
            port_writes: exits.port_writes,
            memory_reads: exits.memory_reads,
            memory_writes: exits.memory_writes,
            interrupted: exits.interrupted,
            other: exits.other,
        }
    }
}
