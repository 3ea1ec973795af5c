//! A PCI function of the host.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use vm_passthrough::pci;

/// A PCI function of the host.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Function {
    /// Address, as in `0000:65:00.0`.
    pub address: String,
    /// What it is.
    #[serde(rename = "type")]
    pub device_type: DeviceType,
    /// Vendor's name from the PCI ID database.
    pub vendor: Option<String>,
    /// Device's name from the PCI ID database.
    pub name: Option<String>,
    /// Vendor ID, four hexadecimal digits.
    pub vendor_id: String,
    /// Device ID, four hexadecimal digits.
    pub device_id: String,
    /// Subsystem vendor ID, four hexadecimal digits.
    pub subsystem_vendor_id: String,
    /// Subsystem ID, four hexadecimal digits.
    pub subsystem_id: String,
    /// Revision, two hexadecimal digits.
    pub revision: String,
    /// Class code, six hexadecimal digits.
    pub class: String,
    /// Name of its class from the PCI ID database.
    pub class_name: Option<String>,
    /// Number of its IOMMU group, null when no IOMMU translates for it.
    pub iommu_group: Option<u32>,
    /// Other functions of its IOMMU group.
    pub companions: Vec<String>,
    /// Driver that is bound to it.
    pub driver: Option<String>,
    /// Driver that `driver_override` restricts it to. Only `info` asks for it; null in lists.
    pub driver_override: Option<String>,
    /// NUMA node.
    pub numa_node: Option<u16>,
    /// PCI Express link, null when it has none.
    pub link: Option<Link>,
    /// Power state.
    #[serde(with = "PowerState")]
    pub power_state: pci::PowerState,
    /// SR-IOV, null when it has none.
    pub sriov: Option<Sriov>,
    /// Resets that the Linux kernel can do, in the order that it tries them.
    pub resets: Vec<ResetMethod>,
    /// BARs.
    pub bars: Vec<Bar>,
    /// Size of the expansion ROM in bytes, null when it has none.
    pub rom_bytes: Option<u64>,
    /// Capabilities.
    pub capabilities: Vec<Capability>,
    /// Extended capabilities; empty when the caller may not read them.
    pub extended_capabilities: Vec<Capability>,
    /// Function of the bridge right above it, null on a root bus.
    pub upstream: Option<String>,
    /// Whether the firmware's boot display is on it.
    pub boot_display: bool,
}

/// What a function is.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[expect(missing_docs, reason = "the names say it")]
pub enum DeviceType {
    GpuNvidia,
    GpuAmd,
    GpuIntel,
    Npu,
    Accelerator,
    Nvme,
    Network,
    Bridge,
    Other,
}

impl From<pci::DeviceType> for DeviceType {
    fn from(value: pci::DeviceType) -> Self {
        match value {
            pci::DeviceType::GpuNvidia => Self::GpuNvidia,
            pci::DeviceType::GpuAmd => Self::GpuAmd,
            pci::DeviceType::GpuIntel => Self::GpuIntel,
            pci::DeviceType::Npu => Self::Npu,
            pci::DeviceType::Accelerator => Self::Accelerator,
            pci::DeviceType::Nvme => Self::Nvme,
            pci::DeviceType::Network => Self::Network,
            pci::DeviceType::Bridge => Self::Bridge,
            _ => Self::Other,
        }
    }
}

/// A PCI Express link.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Link {
    /// Speed now in megatransfers per second and lane, 0 when the link is down.
    pub speed: u32,
    /// Lanes now, 0 when the link is down.
    pub width: u8,
    /// Highest speed that the function can do.
    pub max_speed: u32,
    /// Most lanes that the function can use.
    pub max_width: u8,
}

/// PCI power management state.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(remote = "pci::PowerState", rename_all = "lowercase")]
#[expect(missing_docs, reason = "the names are the specification's")]
pub enum PowerState {
    D0,
    D1,
    D2,
    D3Hot,
    D3Cold,
    Unknown,
}

/// A physical function, and the virtual functions that it has.
#[derive(Debug, Serialize, JsonSchema)]
pub struct PhysicalFunction {
    /// Its address.
    pub address: String,
    /// Most virtual functions that it can have.
    pub total_vfs: u16,
    /// Addresses of those that it has, in order.
    pub functions: Vec<String>,
}

/// SR-IOV side of a function.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Sriov {
    /// A physical function.
    Physical {
        /// Most virtual functions that it can have.
        total_vfs: u16,
        /// Virtual functions that are enabled.
        num_vfs: u16,
    },
    /// A virtual function.
    Virtual {
        /// Address of its physical function.
        physical: String,
    },
}

/// A way to reset a function.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names are those of sysfs reset_method")]
pub enum ResetMethod {
    DeviceSpecific,
    Acpi,
    Flr,
    AfFlr,
    Pm,
    Bus,
    CxlBus,
}

impl From<pci::ResetMethod> for ResetMethod {
    fn from(value: pci::ResetMethod) -> Self {
        match value {
            pci::ResetMethod::DeviceSpecific => Self::DeviceSpecific,
            pci::ResetMethod::Acpi => Self::Acpi,
            pci::ResetMethod::Flr => Self::Flr,
            pci::ResetMethod::AfFlr => Self::AfFlr,
            pci::ResetMethod::Pm => Self::Pm,
            pci::ResetMethod::Bus => Self::Bus,
            pci::ResetMethod::CxlBus => Self::CxlBus,
        }
    }
}

/// A BAR.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Bar {
    /// Index of its (first) register, 0 to 5.
    pub index: u8,
    /// Address space and width.
    #[serde(with = "BarKind")]
    pub kind: pci::BarKind,
    /// Whether reads have no side effects.
    pub prefetchable: bool,
    /// Address that the host gave it, in hexadecimal with 0x, 0x0 when none.
    pub address: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Sizes in bytes that it can be given (`bars` in a guest file), ascending; empty when it can't be resized, and when the
    /// caller may not read extended capabilities.
    pub sizes_bytes: Vec<u64>,
}

/// Address space and width of a BAR.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
#[serde(remote = "pci::BarKind", rename_all = "lowercase")]
#[expect(missing_docs, reason = "the names say it")]
pub enum BarKind {
    Io,
    Memory32,
    Memory64,
}

/// A capability of config space.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Capability {
    /// Capability ID.
    pub id: u16,
    /// Offset in config space.
    pub offset: u16,
}

impl Function {
    /// `function` as scanned, with the other functions of its group.
    pub fn new<'a>(
        function: &pci::PciFunction,
        companions: impl Iterator<Item = &'a pci::PciFunction>,
    ) -> Self {
        let ids = function.ids;
        Self {
            address: function.address.to_string(),
            device_type: function.device_type.into(),
            vendor: function.vendor_name().map(str::to_owned),
            name: function.device_name().map(str::to_owned),
            vendor_id: format!("{:04x}", ids.vendor),
            device_id: format!("{:04x}", ids.device),
            subsystem_vendor_id: format!("{:04x}", ids.subsystem_vendor),
            subsystem_id: format!("{:04x}", ids.subsystem_device),
            revision: format!("{:02x}", ids.revision),
            class: format!("{:06x}", function.class.0),
            class_name: function.class_name().map(str::to_owned),
            iommu_group: function.iommu_group,
            companions: companions.map(|companion| companion.address.to_string()).collect(),
            driver: function.driver.clone(),
            driver_override: None,
            numa_node: function.numa_node,
            link: function.link.map(|link| Link {
                speed: link.speed,
                width: link.width,
                max_speed: link.max_speed,
                max_width: link.max_width,
            }),
            power_state: function.power_state,
            sriov: function.sriov.map(|sriov| match sriov {
                pci::Sriov::Physical { total_vfs, num_vfs } => Sriov::Physical { total_vfs, num_vfs },
                pci::Sriov::Virtual { physical } => Sriov::Virtual { physical: physical.to_string() },
            }),
            resets: function.resets.iter().map(|&reset| reset.into()).collect(),
            bars: function
                .bars
                .iter()
                .map(|bar| Bar {
                    index: bar.index,
                    kind: bar.kind,
                    prefetchable: bar.prefetchable,
                    address: format!("{:#x}", bar.address),
                    size_bytes: bar.size,
                    sizes_bytes: function.bar_sizes(bar.index).to_vec(),
                })
                .collect(),
            rom_bytes: function.rom.map(|rom| rom.size),
            capabilities: function
                .capabilities
                .iter()
                .map(|capability| Capability { id: capability.id.into(), offset: capability.offset.into() })
                .collect(),
            extended_capabilities: function
                .extended_capabilities
                .iter()
                .map(|capability| Capability { id: capability.id, offset: capability.offset })
                .collect(),
            upstream: function.upstream.map(|address| address.to_string()),
            boot_display: function.boot_display,
        }
    }
}
