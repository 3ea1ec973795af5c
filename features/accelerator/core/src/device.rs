//! What an accelerator says about itself.

use std::time::{Duration, Instant};

use crate::artifact::{Artifact, Signature};
use crate::error::{Error, Result};

/// A device's identity and limits. They do not change while it is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The product's name, as the driver gives it.
    pub name: String,
    /// The driver's interface: `cuda`, `fake`, …
    pub backend: &'static str,
    /// The target that code must be compiled for, in the compiler's words: `sm_90`.
    pub target: String,
    /// The PCI address, as in `0000:65:00.0`; `None` for a device that is no PCI function.
    pub address: Option<String>,
    /// The driver's version, in its own words.
    pub driver: String,
    /// Bytes of the device's memory.
    pub memory_bytes: u64,
    /// What runs blocks: SMs, CUs, cores.
    pub compute_units: u32,
    /// Threads that run in step: the size of a warp or wave.
    pub warp_size: u32,
    /// The most threads in a block.
    pub block_threads: u32,
    /// The most threads in each dimension of a block.
    pub block: [u32; 3],
    /// The most blocks in each dimension of a grid.
    pub grid: [u32; 3],
    /// The most bytes of shared memory of a block.
    pub shared_bytes: u32,
    /// The most bytes of a kernel's parameters.
    pub parameter_bytes: u32,
    /// Whether host and device may use unified memory.
    pub unified: bool,
    /// Whether existing host memory can be registered.
    pub host_registration: bool,
    /// Whether launches are stopped by cancel flags. Where not, kernels have no guard, and the device stops those that take too long by
    /// limits of its own; the next wait says so.
    pub guards: bool,
}

impl DeviceInfo {
    /// Checks a kernel's block, shared memory and parameters against the limits.
    ///
    /// # Errors
    /// [`Error::Load`], naming the limit that is passed.
    pub fn check(&self, artifact: &Artifact) -> Result<()> {
        let signature = artifact.signature();
        let bad = |reason| Err(Error::Load { kernel: signature.entry.clone(), reason });
        let Signature { block, shared_bytes, .. } = signature;
        for (axis, (size, limit)) in ["x", "y", "z"].iter().zip(block.iter().zip(self.block)) {
            if *size > limit {
                return bad(format!(
                    "its blocks have {size} threads along {axis}, {} takes {limit}",
                    self.name
                ));
            }
        }
        let threads = block.iter().fold(1u64, |threads, &size| threads.saturating_mul(u64::from(size)));
        if threads > u64::from(self.block_threads) {
            return bad(format!(
                "its blocks have {threads} threads, {} takes {}",
                self.name, self.block_threads
            ));
        }
        if *shared_bytes > self.shared_bytes {
            return bad(format!(
                "its blocks need {shared_bytes} bytes of shared memory, {} has {}",
                self.name, self.shared_bytes
            ));
        }
        let (needed, available) = (artifact.parameter_bytes(), self.parameter_bytes);
        if needed > available {
            return bad(format!(
                "its parameters take {needed} bytes, {} passes {available}; split the kernel",
                self.name
            ));
        }
        Ok(())
    }
}

/// How full the device's memory is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes free for anybody.
    pub free: u64,
    /// Bytes in all.
    pub total: u64,
    /// Bytes that this queue's own pool holds, used or not.
    pub reserved: u64,
}

/// How a queue is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueOptions {
    /// Bytes of freed memory that the driver's pool keeps for the next allocation instead of releasing them.
    pub keep_bytes: u64,
    /// How long the queue waits for the device where it must, as when it frees pinned memory.
    pub timeout: Duration,
}

impl QueueOptions {
    /// When the timeout ends that begins now.
    pub fn deadline(&self) -> Instant {
        deadline(self.timeout)
    }
}

/// The end of a wait of this length that begins now. What no clock reaches is a century.
pub fn deadline(timeout: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    let now = Instant::now();
    // No clock that began to run with the machine is near its end.
    now.checked_add(timeout.min(CENTURY)).unwrap_or(now)
}

impl Default for QueueOptions {
    fn default() -> Self {
        Self { keep_bytes: u64::MAX, timeout: Duration::from_secs(30) }
    }
}
