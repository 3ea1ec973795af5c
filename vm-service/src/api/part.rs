//! The parts that a device is divided into.

use schemars::JsonSchema;
use serde::Serialize;
use vm_passthrough::pci;

/// A part of a device.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Part {
    /// What it is.
    pub kind: PartKind,
    /// Its name: a UUID, the address of a virtual function, or the numbers of a MIG instance, as in `gi1/ci0`.
    pub name: String,
    /// Name of its type, where it has one, as in `NVIDIA L40-1B`.
    pub type_name: Option<String>,
    /// Address of the function that it belongs to: the device itself, or a virtual function of it.
    pub function: String,
}

/// What a part of a device is.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PartKind {
    /// A mediated device.
    Mdev,
    /// A vGPU that NVIDIA's driver has put on a virtual function.
    Vgpu,
    /// A MIG instance.
    Mig,
    /// Another.
    Other,
}

/// A type of part that a function can get.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct PartType {
    /// What is written to sysfs to have one.
    pub id: String,
    /// Its name, where it has one.
    pub name: Option<String>,
}

impl From<&pci::Part> for Part {
    fn from(part: &pci::Part) -> Self {
        let kind = match part.kind {
            pci::PartKind::Mdev => PartKind::Mdev,
            pci::PartKind::Vgpu => PartKind::Vgpu,
            pci::PartKind::Mig => PartKind::Mig,
            _ => PartKind::Other,
        };
        let (name, type_name) = (part.name.clone(), part.type_name.clone());
        Self { kind, name, type_name, function: part.function.to_string() }
    }
}

impl From<pci::PartType> for PartType {
    fn from(pci::PartType { id, name }: pci::PartType) -> Self {
        Self { id, name }
    }
}
