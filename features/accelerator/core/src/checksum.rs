//! Copies that are checked by CRC-32: how, and what came of it.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::artifact::Artifact;
use crate::crc32;

/// Which way a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::Display)]
pub enum Direction {
    /// From the host's memory to the device's.
    #[strum(serialize = "from the host to the device")]
    HostToDevice,
    /// From the device's memory to the host's.
    #[strum(serialize = "from the device to the host")]
    DeviceToHost,
}

/// How copies between the host and the device are checked.
///
/// They go chunk by chunk. The host computes the CRC-32 of its side of a chunk and the device that of its own, and where
/// they differ the chunk is sent again. That is all of [`Worker::write`](crate::Worker::write) and
/// [`Worker::read`](crate::Worker::read), and of [`Worker::copy`](crate::Worker::copy) what goes between memory of the kind
/// [`Device`](crate::MemoryKind::Device) and any other; the worker then waits for such a copy, and nobody may write its source
/// meanwhile. What kernels read and write in host memory themselves is not checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checksum {
    /// What computes the device's, for this device: [`crc32`] says what it has to do. `JitCompiler::checksum`
    /// of `vm-runtime` compiles one.
    pub kernel: Artifact,
    /// Bytes of a chunk, at most and without more said 4 MiB.
    pub chunk_bytes: u64,
    /// How often a chunk is sent again before the copy fails.
    pub retries: u32,
}

impl Checksum {
    /// With chunks of 4 MiB, sent again up to 5 times.
    pub fn new(kernel: Artifact) -> Self {
        Self { kernel, chunk_bytes: crc32::BYTES, retries: 5 }
    }
}

/// What the checks of a worker's copies came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChecksumStatistics {
    /// Chunks that were to be copied.
    pub chunks: u64,
    /// Times that a chunk arrived wrong.
    pub corrupted: u64,
    /// Times that a chunk was sent again.
    pub resent: u64,
    /// Chunks that never arrived right. Each failed its copy.
    pub given_up: u64,
}

/// The same, while it is counted.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) chunks: AtomicU64,
    pub(crate) corrupted: AtomicU64,
    pub(crate) resent: AtomicU64,
    pub(crate) given_up: AtomicU64,
}

impl Counters {
    pub(crate) fn statistics(&self) -> ChecksumStatistics {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ChecksumStatistics {
            chunks: of(&self.chunks),
            corrupted: of(&self.corrupted),
            resent: of(&self.resent),
            given_up: of(&self.given_up),
        }
    }
}
