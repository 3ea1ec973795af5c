//! One PCI function of the host, as found in sysfs.

use std::fmt;

use pci_ids::FromId as _;

use super::PciAddress;

/// One PCI function of the host with everything that a scan learns of it.
///
/// It is a snapshot: the function may have changed driver, or vanished, since.
#[derive(Clone, Debug)]
pub struct PciFunction {
    /// Where it is.
    pub address: PciAddress,
    /// Who made it and what model it is.
    pub ids: PciIds,
    /// Class code.
    pub class: PciClass,
    /// What it is to this crate.
    pub device_type: DeviceType,
    /// Header type without the multifunction bit: 0 for an endpoint, 1 for a PCI-to-PCI bridge.
    pub header_type: u8,
    /// The function of the bridge right above it, `None` on a root bus.
    pub upstream: Option<PciAddress>,
    /// The function whose driver created this function's PCI domain, such as Intel's Volume Management Device. The IOMMU sees
    /// the DMA of the whole domain as that of the controller.
    pub controller: Option<PciAddress>,
    /// The BARs that exist, in order of their index.
    pub bars: Vec<Bar>,
    /// The BARs that can be given other sizes; empty like the list of extended capabilities.
    pub resizable: Vec<ResizableBar>,
    /// The expansion ROM.
    pub rom: Option<Rom>,
    /// Number of its IOMMU group; `None` when no IOMMU translates for it.
    pub iommu_group: Option<u32>,
    /// Name of the driver bound to it.
    pub driver: Option<String>,
    /// NUMA node of its root complex.
    pub numa_node: Option<u16>,
    /// PCI Express link; `None` on conventional PCI and on integrated endpoints, and in D3cold.
    pub link: Option<Link>,
    /// Power state that the Linux kernel knows.
    pub power_state: PowerState,
    /// SR-IOV, when it is a physical or a virtual function.
    pub sriov: Option<Sriov>,
    /// Resets that the Linux kernel can do, in the order that it tries them.
    pub resets: Vec<ResetMethod>,
    /// Capability list of its config space; empty when the caller may not read past the first 64 bytes, and in
    /// D3cold, as reading would wake the function.
    pub capabilities: Vec<Capability>,
    /// Extended capability list of its config space; empty when the caller may not read past the first 64 or
    /// 256 bytes, and in D3cold like the other list.
    pub extended_capabilities: Vec<ExtendedCapability>,
    /// Whether the firmware's boot display is on it.
    pub boot_display: bool,
}

impl PciFunction {
    /// Whether it is a bridge to another bus, which VFIO refuses, or the host's own. A bridge in name only, like an NVSwitch,
    /// is an endpoint.
    pub fn is_bridge(&self) -> bool {
        self.header_type != 0 || (self.class.base() == 0x06 && self.class.subclass() <= 0x01)
    }

    /// The sizes that BAR `index` can be given, ascending; none where it can't be resized.
    pub fn bar_sizes(&self, index: u8) -> &[u64] {
        self.resizable.iter().find(|bar| bar.index == index).map_or(&[], |bar| &bar.sizes)
    }

    /// The vendor's name from the PCI ID database.
    pub fn vendor_name(&self) -> Option<&'static str> {
        pci_ids::Vendor::from_id(self.ids.vendor).map(|vendor| vendor.name())
    }

    /// The name of its subclass, or else of its class, from the PCI ID database.
    pub fn class_name(&self) -> Option<&'static str> {
        let (base, subclass) = (self.class.base(), self.class.subclass());
        let name = pci_ids::Subclass::from_cid_sid(base, subclass).map(|subclass| subclass.name());
        name.or_else(|| pci_ids::Class::from_id(base).map(|class| class.name()))
    }

    /// The device's name from the PCI ID database.
    pub fn device_name(&self) -> Option<&'static str> {
        pci_ids::Device::from_vid_pid(self.ids.vendor, self.ids.device).map(|device| device.name())
    }
}

/// Vendor and device numbers (PCI Local Bus 3.0, 6.2.1 and 6.2.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PciIds {
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Subsystem vendor ID, 0 when the function has none.
    pub subsystem_vendor: u16,
    /// Subsystem ID, 0 when the function has none.
    pub subsystem_device: u16,
    /// Revision ID.
    pub revision: u8,
}

impl fmt::Display for PciIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vendor, device, subsystem_vendor, subsystem_device, revision } = self;
        write!(
            f,
            "{vendor:04x}:{device:04x} (subsystem {subsystem_vendor:04x}:{subsystem_device:04x}, revision {revision:02x})"
        )
    }
}

/// The 24-bit class code: base class, subclass and programming interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PciClass(pub u32);

impl PciClass {
    /// Base class, 0x03 for a display controller.
    pub const fn base(self) -> u8 {
        (self.0 >> 16) as u8
    }

    /// Subclass within the base class.
    pub const fn subclass(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// Programming interface.
    pub const fn interface(self) -> u8 {
        self.0 as u8
    }
}

/// What a function is to those who pass devices to guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DeviceType {
    /// GPU (display or 3D controller) made by NVIDIA.
    GpuNvidia,
    /// GPU made by AMD.
    GpuAmd,
    /// GPU made by Intel.
    GpuIntel,
    /// Neural processing unit.
    Npu,
    /// Other processing accelerator: class 0x12, or one that the accel subsystem drives.
    Accelerator,
    /// NVM Express controller.
    Nvme,
    /// Network controller.
    Network,
    /// PCI bridge.
    Bridge,
    /// Anything else.
    Other,
}

/// One base address register that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// Index of its (first) register, 0 to 5.
    pub index: u8,
    /// Address space and width.
    pub kind: BarKind,
    /// Whether reads have no side effects.
    pub prefetchable: bool,
    /// Address that the host gave it, 0 when none.
    pub address: u64,
    /// Size in bytes.
    pub size: u64,
}

/// A BAR that can be given other sizes (PCI Express Base 6.0, 7.8.6).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResizableBar {
    /// Index of its (first) register, 0 to 5.
    pub index: u8,
    /// The sizes that the device supports, in bytes, ascending.
    pub sizes: Vec<u64>,
}

/// Address space and width of a BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarKind {
    /// Port I/O.
    Io,
    /// Memory below 4 GiB.
    Memory32,
    /// Memory anywhere; takes two registers.
    Memory64,
}

/// The expansion ROM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rom {
    /// Size in bytes.
    pub size: u64,
}

/// PCI Express link, speeds in megatransfers per second and lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Speed now, 0 when the link is down.
    pub speed: u32,
    /// Lanes now, 0 when the link is down.
    pub width: u8,
    /// Highest speed that the function can do.
    pub max_speed: u32,
    /// Most lanes that the function can use.
    pub max_width: u8,
}

/// PCI power management state, written as in sysfs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString, strum::IntoStaticStr)]
pub enum PowerState {
    /// Fully on.
    D0,
    /// Light sleep.
    D1,
    /// Deeper sleep.
    D2,
    /// Software off, still powered.
    #[strum(serialize = "D3hot")]
    D3Hot,
    /// Off: config space reads all ones until it is woken.
    #[strum(serialize = "D3cold")]
    D3Cold,
    /// The Linux kernel does not say.
    #[strum(serialize = "unknown")]
    Unknown,
}

/// SR-IOV side of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sriov {
    /// A physical function.
    Physical {
        /// Most virtual functions that it can have.
        total_vfs: u16,
        /// Virtual functions that are enabled now.
        num_vfs: u16,
    },
    /// A virtual function.
    Virtual {
        /// Its physical function.
        physical: PciAddress,
    },
}

/// A way to reset a function, written as in sysfs `reset_method`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum ResetMethod {
    /// Specific to the device.
    DeviceSpecific,
    /// By ACPI `_RST`.
    Acpi,
    /// Function level reset of PCI Express.
    Flr,
    /// Function level reset of the conventional AF capability.
    AfFlr,
    /// D3hot and back.
    Pm,
    /// Secondary bus reset of the bridge above.
    Bus,
    /// Secondary bus reset of the CXL port above.
    CxlBus,
}

/// An entry of the capability list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capability {
    /// Capability ID.
    pub id: u8,
    /// Offset in config space.
    pub offset: u8,
}

/// An entry of the extended capability list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtendedCapability {
    /// Extended capability ID.
    pub id: u16,
    /// Version of the capability.
    pub version: u8,
    /// Offset in config space.
    pub offset: u16,
}
