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
    /// Kernels can't be run on AMD GPUs yet.
    #[error(
        "{device} can't run kernels yet: there is no code generator for {architecture}; pass the GPU whole to a guest, \
         or run the kernel on the CPU"
    )]
    NoLaunch {
        /// The device.
        device: String,
        /// Its architecture.
        architecture: String,
    },
}
