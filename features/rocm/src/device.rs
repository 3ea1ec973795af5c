//! One GPU.

use std::fmt;
use std::path::PathBuf;

use crate::{RocmError, devices};

/// Where sysfs and the device nodes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots {
    /// Root of sysfs, `/sys` on a real host.
    pub sys: PathBuf,
    /// Root of the device nodes, `/dev` on a real host.
    pub dev: PathBuf,
}

impl Roots {
    /// Those of this machine.
    pub fn system() -> Self {
        Self { sys: "/sys".into(), dev: "/dev".into() }
    }
}

/// An AMD GPU, or a partition of one, that the compute driver lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RocmDevice {
    /// Number of its node in the topology.
    pub node: u32,
    /// The driver's own number for it; never 0.
    pub gpu_id: u32,
    /// The chip's name as the driver has it, `aldebaran` for one; many newer chips are only `ip discovery`.
    pub name: String,
    /// Its architecture in LLVM's words, as in `gfx942`.
    pub architecture: String,
    /// PCI address, as in `0000:65:00.0`.
    pub address: String,
    /// PCI device ID; the vendor is AMD, 1002.
    pub device_id: u16,
    /// Compute units.
    pub compute_units: u32,
    /// Threads of a wavefront: 32 or 64.
    pub wavefront: u32,
    /// Bytes of shared memory (LDS) of a block.
    pub shared_bytes: u32,
    /// Bytes of its own memory.
    pub memory_bytes: u64,
    /// Its device node for work, as in `/dev/dri/renderD128`, where it has one.
    pub render_node: Option<PathBuf>,
}

impl RocmDevice {
    /// Opens the device to run kernels, which is not possible yet.
    ///
    /// # Errors
    /// [`RocmError::NoLaunch`], always.
    pub fn open(&self) -> Result<RocmAccelerator, RocmError> {
        Err(RocmError::NoLaunch { device: self.to_string(), architecture: self.architecture.clone() })
    }
}

/// An AMD GPU that runs kernels. There is none yet: whoever asks for one gets [`RocmError::NoLaunch`].
#[derive(Clone, Copy, Debug)]
pub enum RocmAccelerator {}

impl RocmAccelerator {
    /// The device with a number in the order of [`devices`].
    ///
    /// # Errors
    /// What [`devices`] fails with, [`RocmError::NoDevice`], and otherwise [`RocmError::NoLaunch`].
    pub fn new(ordinal: usize) -> Result<Self, RocmError> {
        let devices = devices(&Roots::system())?;
        devices.get(ordinal).ok_or_else(|| RocmError::NoDevice { wanted: ordinal.to_string() })?.open()
    }

    /// The device at a PCI address, as in `0000:65:00.0`, of a host below `roots`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn at(roots: &Roots, address: &str) -> Result<Self, RocmError> {
        let devices = devices(roots)?;
        let device = devices.iter().find(|device| device.address == address);
        device.ok_or_else(|| RocmError::NoDevice { wanted: address.to_owned() })?.open()
    }
}

impl fmt::Display for RocmDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AMD GPU {} ({}", self.address, self.architecture)?;
        if !self.name.is_empty() {
            write!(f, ", {}", self.name)?;
        }
        f.write_str(")")
    }
}
