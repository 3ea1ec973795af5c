//! What can go wrong.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why NPUs can't be listed or used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NpuError {
    /// The subsystem is not there.
    #[error(
        "there is no {}: no driver of an NPU is loaded, or the Linux kernel is older than 6.2; load the NPU's driver, \
         as in modprobe intel_vpu or modprobe amdxdna",
        path.display()
    )]
    NoDriver {
        /// Where its devices would be listed.
        path: PathBuf,
    },
    /// A directory can't be read.
    #[error("{} can't be read: {source}; run as root", path.display())]
    Read {
        /// The directory.
        path: PathBuf,
        /// What the Linux kernel answered.
        source: io::Error,
    },
    /// The device is not listed.
    #[error("{wanted} is an accelerator without a driver of the accel subsystem; load its driver")]
    NoDevice {
        /// Its number or address.
        wanted: String,
    },
    /// Kernels can't be run on NPUs yet.
    #[error("{device} can't run kernels yet: there is no code generator for it; {remedy}")]
    NoLaunch {
        /// The device.
        device: String,
        /// What to do instead.
        remedy: &'static str,
    },
}
