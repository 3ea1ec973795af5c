//! What uses a GPU.

use schemars::JsonSchema;
use serde::Serialize;

/// What uses a GPU now. What its driver does not tell is null.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct Usage {
    /// Why nothing is known; null when something is.
    pub unknown: Option<String>,
    /// Percent of the time that kernels ran, over the driver's last interval.
    pub busy_percent: Option<u32>,
    /// Bytes of its memory that are in use.
    pub memory_used_bytes: Option<u64>,
    /// Bytes of its memory.
    pub memory_bytes: Option<u64>,
    /// Its temperature.
    pub temperature_celsius: Option<u32>,
    /// What it draws.
    pub power_watts: Option<f64>,
    /// The processes that have it open to compute or to draw.
    pub processes: Option<Vec<GpuProcess>>,
}

/// A process that uses a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct GpuProcess {
    /// Process ID.
    pub pid: u32,
    /// Name of its command; null when it is gone, or in another namespace.
    pub command: Option<String>,
    /// Bytes of the GPU's memory that it has.
    pub memory_bytes: Option<u64>,
}
