//! What can go wrong.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why AMD GPUs can't be listed or used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RocmError {
    /// The driver is not there.
    #[error(
        "there is no {}: no AMD GPU is driven by amdgpu with its compute part; load it (modprobe amdgpu) and give it \
         the device",
        path.display()
    )]
    NoDriver {
        /// Where it would list its devices.
        path: PathBuf,
    },
    /// A file can't be read.
    #[error("{} can't be read: {source}; join the groups render and video, or run as root", path.display())]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// What the Linux kernel answered.
        source: io::Error,
    },
    /// A file does not say what it should.
    #[error("{}: {what}; look at `dmesg` for what amdgpu says", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The device is not listed.
    #[error("{wanted} is an AMD GPU that the compute driver does not list; bind it to amdgpu")]
    NoDevice {
        /// Its number or address.
        wanted: String,
    },
    /// HIP, by which kernels are run, is not there or fails.
    #[error(transparent)]
    Hip(#[from] vm_accel::Error),
}
