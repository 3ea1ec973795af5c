//! One device.

use std::fmt;
use std::path::PathBuf;

use crate::{NpuError, Provider};

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

/// What a device is, by its driver or by the provider that runs models on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NpuKind {
    /// Intel's NPU of Core Ultra (`intel_vpu`, OpenVINO).
    Intel,
    /// AMD's XDNA NPU of Ryzen AI (`amdxdna`, Vitis AI).
    Amd,
    /// Intel's Gaudi (`habanalabs`).
    Gaudi,
    /// Qualcomm's Hexagon (QNN).
    Hexagon,
    /// Qualcomm's Cloud AI (`qaic`).
    CloudAi,
    /// Huawei's Ascend, of Da Vinci cores (CANN).
    Ascend,
    /// MediaTek's APU, or whatever else NNAPI has.
    MediaTek,
    /// Apple's Neural Engine (Core ML).
    NeuralEngine,
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
            "qaic" => Self::CloudAi,
            "rocket" => Self::Rockchip,
            "ethosu" => Self::Arm,
            _ => Self::Other,
        }
    }

    /// The kind on which a provider runs models.
    pub fn of_provider(provider: Provider) -> Self {
        match provider {
            Provider::Qnn => Self::Hexagon,
            Provider::OpenVino => Self::Intel,
            Provider::VitisAi => Self::Amd,
            Provider::Cann => Self::Ascend,
            Provider::CoreMl => Self::NeuralEngine,
            Provider::Nnapi => Self::MediaTek,
            Provider::Cpu => Self::Other,
        }
    }

    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Intel => "Intel NPU",
            Self::Amd => "AMD XDNA NPU",
            Self::Gaudi => "Intel Gaudi",
            Self::Hexagon => "Qualcomm Hexagon",
            Self::CloudAi => "Qualcomm Cloud AI",
            Self::Ascend => "Huawei Ascend",
            Self::MediaTek => "MediaTek APU",
            Self::NeuralEngine => "Apple Neural Engine",
            Self::Rockchip => "Rockchip NPU",
            Self::Arm => "Arm Ethos-U",
            Self::Other => "accelerator",
        }
    }

    /// What runs models on such a device, and where it is had; none where nothing is known that does.
    fn remedy(self) -> Option<&'static str> {
        Some(match self {
            Self::Intel => {
                "install ONNX Runtime with OpenVINO: pip install onnxruntime onnxruntime-ep-openvino"
            }
            Self::Amd => "install AMD's Ryzen AI software, which has ONNX Runtime with Vitis AI",
            Self::Hexagon => "install ONNX Runtime with QNN: pip install onnxruntime onnxruntime-qnn",
            Self::Ascend => "install CANN, and ONNX Runtime built with it",
            _ => return None,
        })
    }
}

/// A device: of the accel subsystem, or of an execution provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NpuDevice {
    /// Its number in the subsystem, 0 for `accel0`; of a device that only a provider knows, its place in the list.
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
    pub node: Option<PathBuf>,
    /// What runs models on it; `None` where nothing does, or ONNX Runtime was not asked.
    pub provider: Option<Provider>,
    /// What it is instead of a device of silicon: `emulated`.
    pub emulated: Option<&'static str>,
}

impl NpuDevice {
    /// Why no model can be run on it.
    pub(crate) fn no_provider(&self) -> NpuError {
        let whole = self.address.is_some().then_some("pass it whole to a guest, or ");
        let other = "run the model elsewhere";
        let remedy = match self.kind.remedy() {
            Some(remedy) => remedy.to_owned(),
            None => format!("{}{other}", whole.unwrap_or_default()),
        };
        NpuError::NoProvider { device: self.to_string(), remedy }
    }
}

impl fmt::Display for NpuDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name())?;
        if self.node.is_some() {
            write!(f, " accel{}", self.number)?;
        }
        if let Some(instead) = self.emulated {
            write!(f, ", {instead}")?;
        }
        if let Some(address) = &self.address {
            write!(f, " at {address}")?;
        }
        if let (NpuKind::Other, Some(driver)) = (self.kind, &self.driver) {
            write!(f, " (driver {driver})")?;
        }
        Ok(())
    }
}
