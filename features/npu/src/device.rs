//! One device of the subsystem.

use std::fmt;
use std::path::PathBuf;

use crate::{NpuError, devices};

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

/// What a device is, by its driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NpuKind {
    /// Intel's NPU of Core Ultra (`intel_vpu`).
    Intel,
    /// AMD's XDNA NPU of Ryzen AI (`amdxdna`).
    Amd,
    /// Intel's Gaudi (`habanalabs`).
    Gaudi,
    /// Qualcomm's Cloud AI (`qaic`).
    Qualcomm,
    /// Rockchip's NPU (`rocket`).
    Rockchip,
    /// Arm's Ethos-U (`ethosu`).
    Arm,
    /// Another.
    Other,
}

impl NpuKind {
    /// The kind that a driver serves.
    pub fn of_driver(driver: &str) -> Self {
        match driver {
            "intel_vpu" => Self::Intel,
            "amdxdna" => Self::Amd,
            "habanalabs" => Self::Gaudi,
            "qaic" => Self::Qualcomm,
            "rocket" => Self::Rockchip,
            "ethosu" => Self::Arm,
            _ => Self::Other,
        }
    }

    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Intel => "Intel NPU",
            Self::Amd => "AMD XDNA NPU",
            Self::Gaudi => "Intel Gaudi",
            Self::Qualcomm => "Qualcomm Cloud AI",
            Self::Rockchip => "Rockchip NPU",
            Self::Arm => "Arm Ethos-U",
            Self::Other => "accelerator",
        }
    }
}

/// A device of the accel subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NpuDevice {
    /// Its number in the subsystem: 0 for `accel0`.
    pub number: u32,
    /// What it is.
    pub kind: NpuKind,
    /// The driver that serves it, where it has one.
    pub driver: Option<String>,
    /// PCI address, as in `0000:00:0b.0`; `None` for one that is no PCI function.
    pub address: Option<String>,
    /// PCI vendor and device ID, for a PCI function.
    pub ids: Option<(u16, u16)>,
    /// Its device node, as in `/dev/accel/accel0`.
    pub node: PathBuf,
}

impl NpuDevice {
    /// Opens the device to run kernels, which is not possible yet.
    ///
    /// # Errors
    /// [`NpuError::NoLaunch`], always.
    pub fn open(&self) -> Result<NpuAccelerator, NpuError> {
        let remedy = match self.address {
            Some(_) => "pass it whole to a guest, or run the kernel on a GPU or the CPU",
            None => "run the kernel on a GPU or the CPU",
        };
        Err(NpuError::NoLaunch { device: self.to_string(), remedy })
    }
}

/// An NPU that runs kernels. There is none yet: whoever asks for one gets [`NpuError::NoLaunch`].
#[derive(Clone, Copy, Debug)]
pub enum NpuAccelerator {}

impl NpuAccelerator {
    /// The device with a number in the order of [`devices`].
    ///
    /// # Errors
    /// What [`devices`] fails with, [`NpuError::NoDevice`], and otherwise [`NpuError::NoLaunch`].
    pub fn new(ordinal: usize) -> Result<Self, NpuError> {
        let devices = devices(&Roots::system())?;
        devices.get(ordinal).ok_or_else(|| NpuError::NoDevice { wanted: ordinal.to_string() })?.open()
    }

    /// The device at a PCI address, as in `0000:65:00.0`, of a host below `roots`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn at(roots: &Roots, address: &str) -> Result<Self, NpuError> {
        let devices = devices(roots)?;
        let device = devices.iter().find(|device| device.address.as_deref() == Some(address));
        device.ok_or_else(|| NpuError::NoDevice { wanted: address.to_owned() })?.open()
    }
}

impl fmt::Display for NpuDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} accel{}", self.kind.name(), self.number)?;
        if let Some(address) = &self.address {
            write!(f, " at {address}")?;
        }
        if let (NpuKind::Other, Some(driver)) = (self.kind, &self.driver) {
            write!(f, " (driver {driver})")?;
        }
        Ok(())
    }
}
