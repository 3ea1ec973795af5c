//! The state of a device: its link, its power, its errors and its interrupts.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use vm_passthrough::pci;

use super::PowerState;

/// The state of a device at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceHealth {
    /// Power state.
    #[serde(with = "PowerState")]
    pub power_state: pci::PowerState,
    /// PCI Express link; null without one, in D3cold, and where it could not be read.
    pub link: Option<LinkHealth>,
    /// Errors that it has reported since Linux found it (AER); null where Linux counts none. Those that its link partner saw are
    /// counted there.
    pub errors: Option<DeviceErrors>,
    /// Interrupts; null where VFIO has set up none.
    pub interrupts: Option<DeviceInterrupts>,
    /// What could not be read, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unread: Vec<String>,
}

/// The state of a link, speeds in megatransfers per second and lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LinkHealth {
    /// Speed now, 0 when the link is down. Devices that save power slow it down.
    pub speed: u32,
    /// Lanes now, 0 when the link is down.
    pub width: u8,
    /// Highest speed that the function and the port above it can both do.
    pub possible_speed: u32,
    /// Most lanes that the function and the port above it can both use.
    pub possible_width: u8,
}

/// Errors by severity.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceErrors {
    /// Those that the hardware corrected.
    pub correctable: ErrorCount,
    /// Those that lost a transaction, but left the link reliable.
    pub nonfatal: ErrorCount,
    /// Those after which the link is not reliable.
    pub fatal: ErrorCount,
}

/// Errors of one severity.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorCount {
    /// Messages: one may tell of several errors.
    pub total: u64,
    /// The kinds of which there were any, as Linux names them.
    pub kinds: Vec<ErrorKind>,
}

/// Errors of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorKind {
    /// Its name, as in `BadTLP`.
    pub name: String,
    /// How many there were.
    pub count: u64,
}

/// Interrupts that the host has handled for a device, those that KVM delivers to a guest by irqfd among them. What the processor
/// posts to a guest that runs (VT-d posted interrupts, AVIC) is counted by nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceInterrupts {
    /// Vectors that are set up.
    pub vectors: u32,
    /// Interrupts, of all of these since each was set up.
    pub total: u64,
    /// Interrupts a second, in the last seconds; null where they were counted only once.
    pub per_second: Option<u64>,
}

impl DeviceHealth {
    /// What was read, with the interrupts of the same moment.
    pub fn new(
        health: &pci::DeviceHealth,
        interrupts: Option<pci::Interrupts>,
        per_second: Option<u64>,
    ) -> Self {
        let interrupts = interrupts.map(|pci::Interrupts { vectors, total }| DeviceInterrupts {
            vectors,
            total,
            per_second,
        });
        Self {
            power_state: health.power_state,
            link: health.link.map(LinkHealth::from),
            errors: health.errors.as_ref().map(DeviceErrors::from),
            interrupts,
            unread: health.unread.clone(),
        }
    }
}

impl From<pci::LinkHealth> for LinkHealth {
    fn from(health: pci::LinkHealth) -> Self {
        let pci::LinkHealth { link, possible_speed, possible_width } = health;
        Self { speed: link.speed, width: link.width, possible_speed, possible_width }
    }
}

impl From<&pci::AerCounters> for DeviceErrors {
    fn from(counters: &pci::AerCounters) -> Self {
        let count = |count: &pci::AerCount| ErrorCount {
            total: count.total,
            kinds: count
                .kinds
                .iter()
                .map(|(name, count)| ErrorKind { name: name.clone(), count: *count })
                .collect(),
        };
        Self {
            correctable: count(&counters.correctable),
            nonfatal: count(&counters.nonfatal),
            fatal: count(&counters.fatal),
        }
    }
}
