//! How fast a GPU is.

use schemars::JsonSchema;
use serde::Serialize;

/// `egpu benchmark`: a GPU, and how fast it is.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct EgpuBenchmark {
    /// Address of its function.
    pub address: String,
    /// What measured it says that it is.
    pub device: String,
    /// Name of the enclosure that it is in; null where it is in none, or in one that is not known.
    pub enclosure: Option<String>,
    /// What its link allows; null where that is not known.
    pub link: Option<BenchmarkLink>,
    /// Copies between the host and it.
    pub transfers: Vec<BenchmarkTransfer>,
    /// How long small copies take.
    pub latencies: Vec<BenchmarkLatency>,
    /// Operations of f32 in a second, of which a multiplication with an addition (FMA) counts as two; null for a simulated one.
    pub f32_flops: Option<BenchmarkSpread>,
    /// Bytes of its memory that a kernel which copies reads and writes in a second; null for a simulated one.
    pub memory_bytes_per_second: Option<BenchmarkSpread>,
    /// What checked copies came to; null without them.
    pub checks: Option<BenchmarkChecks>,
}

/// The most bytes that a link allows in a second.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct BenchmarkLink {
    /// From the host to the GPU.
    pub to_device: f64,
    /// From the GPU to the host.
    pub from_device: f64,
    /// What was reckoned with, and where it is from.
    pub basis: String,
}

/// Several measurements of one thing.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct BenchmarkSpread {
    /// The median.
    pub median: f64,
    /// The tenth percentile.
    pub low: f64,
    /// The ninetieth percentile.
    pub high: f64,
    /// How many there are.
    pub count: usize,
}

/// Memory of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema, strum::Display)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum BenchmarkMemory {
    /// Locked in place, so that the device copies by itself.
    Pinned,
    /// Any other, which the host copies into pinned memory first, or out of it.
    Pageable,
}

/// Which way a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema, strum::Display)]
#[serde(rename_all = "kebab-case")]
pub enum BenchmarkDirection {
    /// From the host to the GPU.
    #[strum(serialize = "to device")]
    ToDevice,
    /// From the GPU to the host.
    #[strum(serialize = "from device")]
    FromDevice,
}

/// Copies of one kind.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct BenchmarkTransfer {
    /// The host's memory.
    pub memory: BenchmarkMemory,
    /// Which way.
    pub direction: BenchmarkDirection,
    /// Bytes of each.
    pub bytes: u64,
    /// Bytes in a second.
    #[serde(rename = "bytes_per_second")]
    pub rate: BenchmarkSpread,
    /// How much that is of what the link allows; null where that is not known.
    pub percent_of_link: Option<f64>,
    /// Bytes in a second where both ends are checked by CRC-32; null without `--checked`.
    #[serde(rename = "checked_bytes_per_second")]
    pub checked: Option<BenchmarkSpread>,
    /// How many times as long a checked copy takes.
    pub checked_time_ratio: Option<f64>,
}

/// How long a small copy takes.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct BenchmarkLatency {
    /// Which way.
    pub direction: BenchmarkDirection,
    /// Its bytes.
    pub bytes: u64,
    /// Seconds from the call until it is known to have ended.
    pub seconds: BenchmarkSpread,
}

/// What checked copies came to.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct BenchmarkChecks {
    /// Chunks that were copied.
    pub chunks: u64,
    /// Times that one arrived corrupted.
    pub corrupted: u64,
    /// Times that one was sent again.
    pub resent: u64,
}
