//! One GPU.

use std::fmt;
use std::path::PathBuf;

use crate::sys::hip;
use crate::topology::listed;
use crate::{RocmAccelerator, RocmError};

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
    /// The device at a PCI address, as in `0000:65:00.0`, of a host below `roots`.
    ///
    /// # Errors
    /// What [`devices`](crate::devices) fails with; what is wrong with a node that can't be read, which it may be;
    /// [`RocmError::NoDevice`].
    pub fn at(roots: &Roots, address: &str) -> Result<Self, RocmError> {
        let (devices, wrong) = listed(roots)?;
        let device = devices.into_iter().find(|device| device.address == address);
        device.ok_or_else(|| wrong.unwrap_or_else(|| RocmError::NoDevice { wanted: address.to_owned() }))
    }

    /// Opens the device to run kernels. Of the partitions of one GPU, which have its address, it opens the first.
    ///
    /// # Errors
    /// [`RocmError::Hip`] where there is no HIP that can be used, with what to do; [`RocmError::NoDevice`] where it does not list
    /// the device.
    pub fn open(&self) -> Result<RocmAccelerator, RocmError> {
        RocmAccelerator::of(hip()?, self)
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
