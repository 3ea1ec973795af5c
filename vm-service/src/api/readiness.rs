//! What keeps a function from being passed to a guest.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use vm_passthrough::iommu::DriverChoice;
use vm_passthrough::{PciAddress, readiness};

/// What was found of one function.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Readiness {
    /// Its address.
    pub address: String,
    /// Its names, or its numbers.
    pub name: String,
    /// The functions that are given away together, this one first.
    pub functions: Vec<String>,
    /// The VFIO driver that each of them is bound to by a claim; none of a bridge.
    pub drivers: Vec<VfioDriver>,
    /// Whether nothing keeps it from being passed to a guest; warnings don't.
    pub ready: bool,
    /// What was found; blockers first, then warnings.
    pub blockers: Vec<Blocker>,
}

/// The VFIO driver that a claim binds a function to.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct VfioDriver {
    /// The function.
    pub function: String,
    /// The driver.
    pub driver: String,
    /// Why this one, in words: its name comes first.
    pub why: String,
}

/// One thing that was found.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Blocker {
    /// Stable code, as in `group-not-viable`.
    pub code: String,
    /// How bad it is.
    #[serde(with = "Severity")]
    pub severity: readiness::Severity,
    /// The function that it is about: the one that was asked for, or a companion.
    pub function: String,
    /// What was read, and where.
    pub evidence: String,
    /// What to do.
    pub remedy: String,
}

/// How bad it is.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(remote = "readiness::Severity", rename_all = "kebab-case")]
pub enum Severity {
    /// The function can't be passed to a guest, or only to the host's harm.
    Blocker,
    /// It works, but not as well or as safely as it should.
    Warning,
}

impl From<&readiness::Readiness> for Readiness {
    fn from(value: &readiness::Readiness) -> Self {
        Self {
            address: value.address.to_string(),
            name: value.name.clone(),
            functions: value.functions.iter().map(ToString::to_string).collect(),
            drivers: value.drivers.iter().map(VfioDriver::from).collect(),
            ready: value.is_ready(),
            blockers: value.blockers.iter().map(Blocker::from).collect(),
        }
    }
}

impl From<&(PciAddress, DriverChoice)> for VfioDriver {
    fn from((function, choice): &(PciAddress, DriverChoice)) -> Self {
        Self { function: function.to_string(), driver: choice.driver.clone(), why: choice.to_string() }
    }
}

impl From<&readiness::Blocker> for Blocker {
    fn from(value: &readiness::Blocker) -> Self {
        Self {
            code: value.code.to_string(),
            severity: value.severity,
            function: value.function.to_string(),
            evidence: value.evidence.clone(),
            remedy: value.remedy.clone(),
        }
    }
}
