//! The chip of a GPU.

use schemars::JsonSchema;
use serde::Serialize;
use vm_passthrough::gpu::{self, BootRegisters};

/// What is known of a GPU's chip.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Chip {
    /// Chip that its registers name, as in `GH100`; null where they do not.
    pub name: Option<String>,
    /// Its generation, as in `Hopper`.
    pub architecture: Option<String>,
    /// Its stepping, as in `A1`.
    pub revision: Option<String>,
    /// Whether the function is a virtual one.
    #[serde(rename = "virtual")]
    pub is_virtual: Option<bool>,
    /// Chip that the PCI ID database has for its numbers, null where it has none.
    pub named: Option<String>,
    /// What `NV_PMC_BOOT_0` reads, in hexadecimal with 0x; null where it was not read.
    pub boot_0: Option<String>,
    /// What `NV_PMC_BOOT_42` reads.
    pub boot_42: Option<String>,
    /// Why its registers name no chip; null where they do.
    pub problem: Option<String>,
}

impl From<&gpu::ChipReport> for Chip {
    fn from(report: &gpu::ChipReport) -> Self {
        let chip = report.chip.as_ref().ok();
        let hex = |value: u32| format!("{value:#010x}");
        let boot = |register: fn(BootRegisters) -> Option<u32>| report.boot.and_then(register).map(hex);
        Self {
            name: chip.map(|chip| chip.name.to_owned()),
            architecture: chip.map(|chip| <&str>::from(chip.architecture).to_owned()),
            revision: chip.map(|chip| chip.revision.to_string()),
            is_virtual: chip.map(|chip| chip.is_virtual),
            named: report.named.map(str::to_owned),
            boot_0: boot(|boot| Some(boot.boot_0)),
            boot_42: boot(|boot| boot.boot_42),
            problem: report.chip.as_ref().err().map(ToString::to_string),
        }
    }
}
