//! One function of a simulated host: what its config space and its sysfs attributes say.

use super::SimConfig;
use crate::PciAddress;
use crate::pci::{Bar, BarKind, Link, PciIds, regs};

/// A function to add to a [`SimHost`](super::SimHost). Every method but the constructors changes one thing and
/// returns the function.
#[derive(Clone, Debug)]
pub struct SimFunction {
    pub(super) address: PciAddress,
    pub(super) parent: Option<PciAddress>,
    pub(super) ids: PciIds,
    pub(super) class: u32,
    pub(super) header_type: u8,
    pub(super) bars: Vec<Bar>,
    /// A bridge's non-prefetchable and prefetchable windows, as address and size; a size of 0 is a closed window.
    pub(super) windows: [(u64, u64); 2],
    /// With a bit for each size that they can have, from 1 MiB on.
    pub(super) resizable: Vec<(u8, u32)>,
    pub(super) rom: u64,
    pub(super) group: Option<u32>,
    pub(super) driver: Option<String>,
    pub(super) numa_node: Option<u16>,
    pub(super) link: Option<Link>,
    pub(super) power_state: &'static str,
    pub(super) total_vfs: Option<u16>,
    pub(super) physical: Option<PciAddress>,
    pub(super) resets: String,
    pub(super) boot_display: bool,
    pub(super) capabilities: Vec<(u8, Vec<u8>)>,
    pub(super) extended: Vec<(u16, u8, Vec<u8>)>,
    pub(super) config: Option<Vec<u8>>,
}

impl SimFunction {
    /// A function without BARs, capabilities, group or driver, that can be reset (`flr`) and is in D0.
    pub fn new(address: PciAddress, vendor: u16, device: u16, class: u32) -> Self {
        Self {
            address,
            parent: None,
            ids: PciIds { vendor, device, subsystem_vendor: 0, subsystem_device: 0, revision: 0 },
            class,
            header_type: 0,
            bars: Vec::new(),
            windows: [(0, 0); 2],
            resizable: Vec::new(),
            rom: 0,
            group: None,
            driver: None,
            numa_node: None,
            link: None,
            power_state: "D0",
            total_vfs: None,
            physical: None,
            resets: "flr".into(),
            boot_display: false,
            capabilities: Vec::new(),
            extended: Vec::new(),
            config: None,
        }
    }

    /// An NVMe disk with a 16 KiB BAR, MSI-X and a 16 GT/s x4 link, in the group numbered as its bus.
    pub fn nvme(address: PciAddress) -> Self {
        Self::new(address, 0x144d, 0xa80a, 0x01_0802)
            .subsystem(0x144d, 0xa801)
            .bar(0, BarKind::Memory64, false, bar_address(address, 0), 0x4000)
            .endpoint()
            .link(16_000, 4)
    }

    /// A GPU of NVIDIA with a 16 MiB, a 16 GiB and a 32 MiB BAR and a ROM, in the group numbered as its bus.
    pub fn gpu(address: PciAddress) -> Self {
        Self::new(address, 0x10de, 0x2684, 0x03_0000)
            .subsystem(0x10de, 0x16f3)
            .bar(0, BarKind::Memory32, false, 0x8000_0000 | (u64::from(address.bus()) << 24), 16 << 20)
            .bar(1, BarKind::Memory64, true, bar_address(address, 1), 16 << 30)
            .bar(3, BarKind::Memory64, true, bar_address(address, 2), 32 << 20)
            .rom(512 << 10)
            .endpoint()
            .link(16_000, 16)
    }

    /// A network controller with a 128 KiB BAR, MSI-X and a link, in the group numbered as its bus.
    pub fn network(address: PciAddress) -> Self {
        Self::new(address, 0x8086, 0x10d3, 0x02_0000)
            .subsystem(0x8086, 0xa01f)
            .bar(0, BarKind::Memory32, false, 0x9000_0000 | (u64::from(address.bus()) << 17), 128 << 10)
            .endpoint()
            .link(2_500, 1)
    }

    /// A PCI Express root port with access control services enabled, in the group numbered 1000 and up.
    pub fn root_port(address: PciAddress) -> Self {
        Self::new(address, 0x8086, 0x3420, 0x06_0400)
            .header_type(1)
            .windows((0x8000_0000, 0x7000_0000), (0x40_0000_0000, 1 << 46))
            .capability(regs::CAP_ID_PM, &[0x03, 0x00, 0x08, 0x00, 0x00, 0x00])
            .express(4)
            // Capability, then control: source validation, request and completion redirect, upstream forwarding.
            .extended_capability(regs::EXT_CAP_ID_ACS, 1, &[0x1f, 0x00, 0x1d, 0x00])
            .group(1000 + u32::from(address.bus()) * 256 + u32::from(address.device()) * 8)
            .driver("pcieport")
            .link(16_000, 16)
    }

    /// Power management, MSI-X and PCI Express capabilities, and a group.
    fn endpoint(self) -> Self {
        let group = u32::from(self.address.bus());
        self.capability(regs::CAP_ID_PM, &[0x03, 0x00, 0x08, 0x00, 0x00, 0x00])
            // 32 vectors, the table at 0x2000 and the PBA at 0x3000 of BAR 0.
            .capability(regs::CAP_ID_MSIX, &[0x1f, 0x00, 0x00, 0x20, 0x00, 0x00, 0x00, 0x30, 0x00, 0x00])
            .express(0)
            .group(group)
    }

    /// Sets a bridge's non-prefetchable and prefetchable windows, as address and size; a size of 0 closes one.
    pub fn windows(mut self, memory: (u64, u64), prefetchable: (u64, u64)) -> Self {
        self.windows = [memory, prefetchable];
        self
    }

    /// Adds a PCI Express capability of device/port type `port_type` (PCI Express 6.0, 7.5.3.2), version 2. A root port and a
    /// downstream port have a slot.
    pub fn express(self, port_type: u8) -> Self {
        let mut body = vec![0; 0x3a];
        body[0] = port_type << 4 | 2;
        body[1] = u8::from(matches!(port_type, 4 | 6));
        // Function Level Reset in Device Capabilities.
        body[5] = 0x10;
        self.capability(regs::CAP_ID_EXP, &body)
    }

    /// Makes it a port without a slot: the device below is part of the chip or soldered on.
    pub fn without_slot(mut self) -> Self {
        for (_, body) in self.capabilities.iter_mut().filter(|(id, _)| *id == regs::CAP_ID_EXP) {
            body[1] &= !1;
        }
        self
    }

    /// Puts it below a bridge, which must be added first.
    pub fn below(mut self, bridge: PciAddress) -> Self {
        self.parent = Some(bridge);
        self
    }

    /// Subsystem vendor and device IDs.
    pub fn subsystem(mut self, vendor: u16, device: u16) -> Self {
        self.ids.subsystem_vendor = vendor;
        self.ids.subsystem_device = device;
        self
    }

    /// Revision ID.
    pub fn revision(mut self, revision: u8) -> Self {
        self.ids.revision = revision;
        self
    }

    /// Header type; with bit 7 for a multifunction device.
    pub fn header_type(mut self, header_type: u8) -> Self {
        self.header_type = header_type;
        self
    }

    /// Adds a BAR, or changes the one at `index`.
    pub fn bar(mut self, index: u8, kind: BarKind, prefetchable: bool, address: u64, size: u64) -> Self {
        self.bars.retain(|bar| bar.index != index);
        self.bars.push(Bar { index, kind, prefetchable, address, size });
        self
    }

    /// Makes a BAR one that can be resized: to 2 to the power of N MiB, for each bit N of `sizes`, which has less than 28.
    pub fn resizable(mut self, index: u8, sizes: u32) -> Self {
        self.resizable.push((index, sizes));
        self
    }

    /// Size of the expansion ROM in bytes.
    pub fn rom(mut self, size: u64) -> Self {
        self.rom = size;
        self
    }

    /// Number of its IOMMU group.
    pub fn group(mut self, group: u32) -> Self {
        self.group = Some(group);
        self
    }

    /// Takes it out of any IOMMU group.
    pub fn no_group(mut self) -> Self {
        self.group = None;
        self
    }

    /// Binds it to a driver, which is registered if need be.
    pub fn driver(mut self, driver: &str) -> Self {
        self.driver = Some(driver.into());
        self
    }

    /// NUMA node.
    pub fn numa_node(mut self, node: u16) -> Self {
        self.numa_node = Some(node);
        self
    }

    /// A link that runs at the most it can: megatransfers per second, and lanes.
    pub fn link(self, speed: u32, width: u8) -> Self {
        self.degraded_link(Link { speed, width, max_speed: speed, max_width: width })
    }

    /// A link that may run at less than it can.
    pub fn degraded_link(mut self, link: Link) -> Self {
        self.link = Some(link);
        self
    }

    /// Text of `power_state`: `D0`, `D3hot`, `D3cold`, `unknown` …
    pub fn power_state(mut self, state: &'static str) -> Self {
        self.power_state = state;
        self
    }

    /// Makes it a physical function that can have `total` virtual ones; none is enabled.
    pub fn sriov(mut self, total: u16) -> Self {
        self.total_vfs = Some(total);
        self
    }

    /// Makes it a virtual function of `physical`, which must be added first and have room.
    pub fn virtual_of(mut self, physical: PciAddress) -> Self {
        self.physical = Some(physical);
        self
    }

    /// Text of `reset_method`, as in `flr bus`; when empty there is no such attribute.
    pub fn resets(mut self, methods: &str) -> Self {
        self.resets = methods.into();
        self
    }

    /// Whether it is the firmware's boot display.
    pub fn boot_display(mut self, boot: bool) -> Self {
        self.boot_display = boot;
        self
    }

    /// Adds a capability; `body` follows its ID and next pointer.
    pub fn capability(mut self, id: u8, body: &[u8]) -> Self {
        self.capabilities.push((id, body.to_vec()));
        self
    }

    /// Adds an extended capability; `body` follows its four-byte header.
    pub fn extended_capability(mut self, id: u16, version: u8, body: &[u8]) -> Self {
        self.extended.push((id, version, body.to_vec()));
        self
    }

    /// Takes away all extended capabilities.
    pub fn no_extended_capabilities(mut self) -> Self {
        self.extended.clear();
        self
    }

    /// Replaces the whole config space, for what the other methods can't say.
    pub fn config(mut self, bytes: Vec<u8>) -> Self {
        self.config = Some(bytes);
        self
    }

    /// Where it is.
    pub fn address(&self) -> PciAddress {
        self.address
    }

    /// Its config space: 4096 bytes with a PCI Express capability, else 256.
    pub fn config_space(&self) -> Vec<u8> {
        if let Some(bytes) = &self.config {
            return bytes.clone();
        }
        // A virtual function's IDs read all ones (SR-IOV 1.1, 3.4.1.1).
        let (vendor, device) =
            if self.physical.is_some() { (0xffff, 0xffff) } else { (self.ids.vendor, self.ids.device) };
        let mut config = SimConfig::new(vendor, device, self.class);
        config.put(0x04, &0x0006u16.to_le_bytes());
        config.put(0x08, &[self.ids.revision]);
        config.put(0x0e, &[self.header_type]);
        let endpoint = self.header_type & 0x7f == 0;
        let subsystem =
            if endpoint { [self.ids.subsystem_vendor, self.ids.subsystem_device] } else { [0; 2] };
        config.put(0x2c, &subsystem.map(u16::to_le_bytes).concat());
        for bar in self.bars.iter().filter(|_| self.physical.is_none()) {
            let register = 0x10 + usize::from(bar.index) * 4;
            config.put(register, &(bar.address as u32 | bar_register_flags(bar)).to_le_bytes());
            if bar.kind == BarKind::Memory64 {
                config.put(register + 4, &((bar.address >> 32) as u32).to_le_bytes());
            }
        }
        if self.header_type & regs::HEADER_TYPE_MASK == 1 {
            let [memory, prefetchable] = self.windows.map(|(address, size)| match size {
                0 => (1 << 20, 0),
                _ => (address, address + (size - 1)),
            });
            // The lowest bit of base and limit says that the prefetchable window is 64 bits wide.
            let unit = |address: u64, wide: u16| ((address >> 16) as u16 & 0xfff0 | wide).to_le_bytes();
            config.put(regs::MEMORY_BASE.into(), &[unit(memory.0, 0), unit(memory.1, 0)].concat());
            config.put(
                regs::PREF_MEMORY_BASE.into(),
                &[unit(prefetchable.0, 1), unit(prefetchable.1, 1)].concat(),
            );
            let upper = |address: u64| ((address >> 32) as u32).to_le_bytes();
            config.put(
                regs::PREF_BASE_UPPER32.into(),
                &[upper(prefetchable.0), upper(prefetchable.1)].concat(),
            );
        }
        let mut at = 0x40;
        for (id, body) in &self.capabilities {
            config.capability(*id, at as u8, body);
            if *id == regs::CAP_ID_EXP
                && let Some(link) = &self.link
            {
                let capabilities = speed_code(link.max_speed) | u32::from(link.max_width) << 4;
                let status = (speed_code(link.speed) | u32::from(link.width) << 4) as u16;
                config.put(at + 0x0c, &capabilities.to_le_bytes());
                config.put(at + 0x12, &status.to_le_bytes());
            }
            at = (at + 2 + body.len()).next_multiple_of(4);
        }
        let mut extended = self.extended.clone();
        if let Some(total) = self.total_vfs {
            let mut body = vec![0; 0x3c];
            body[0x08..0x0a].copy_from_slice(&total.to_le_bytes());
            body[0x0a..0x0c].copy_from_slice(&total.to_le_bytes());
            extended.push((regs::EXT_CAP_ID_SRIOV, 1, body));
        }
        if !self.resizable.is_empty() {
            let count = (self.resizable.len() as u32) << 5;
            let registers =
                self.resizable.iter().flat_map(|&(index, sizes)| [sizes << 4, count | u32::from(index)]);
            let body: Vec<u8> = registers.flat_map(u32::to_le_bytes).collect();
            extended.push((regs::EXT_CAP_ID_REBAR, 1, body));
        }
        let mut at = 0x100;
        for (id, version, body) in &extended {
            config.extended(*id, at as u16, body);
            config.put(at + 2, &[*version]);
            at = (at + 4 + body.len()).next_multiple_of(4);
        }
        let mut space = config.bytes();
        if !self.capabilities.iter().any(|(id, _)| *id == regs::CAP_ID_EXP) {
            space.truncate(256);
        }
        space
    }

    /// Text of its `resource` attribute: start, end and flags of the six BARs, the ROM and, for a bridge, its windows.
    pub fn resource(&self) -> String {
        let mut lines = vec![(0u64, 0u64, 0u64); if self.header_type & 0x7f == 1 { 17 } else { 7 }];
        for bar in &self.bars {
            if let Some(line) = lines.get_mut(usize::from(bar.index)) {
                *line = (bar.address, bar.address + (bar.size - 1), bar_resource_flags(bar));
            }
        }
        // IORESOURCE_MEM, and for the second | PREFETCH | MEM_64.
        for (index, flags) in [(14, 0x200u64), (15, 0x10_2200)] {
            let (address, size) = self.windows[index - 14];
            if let Some(line) = lines.get_mut(index).filter(|_| size > 0) {
                *line = (address, address + (size - 1), flags);
            }
        }
        if self.rom != 0 {
            // IORESOURCE_MEM | PREFETCH | READONLY | SIZEALIGN
            lines[6] = (0, self.rom - 1, 0x46200);
        }
        lines.iter().map(|(start, end, flags)| format!("{start:#018x} {end:#018x} {flags:#018x}\n")).collect()
    }
}

/// Where the `slot`th 64-bit BAR of a function goes: apart from all others.
fn bar_address(address: PciAddress, slot: u64) -> u64 {
    0x40_0000_0000 + (u64::from(address.bus()) << 38) + (u64::from(address.device()) << 36) + (slot << 34)
}

fn bar_register_flags(bar: &Bar) -> u32 {
    let prefetch = if bar.prefetchable { 0x8 } else { 0 };
    match bar.kind {
        BarKind::Io => 0x1,
        BarKind::Memory32 => prefetch,
        BarKind::Memory64 => 0x4 | prefetch,
    }
}

/// `IORESOURCE_*` flags (Linux `include/linux/ioport.h`), with the BAR's own low bits.
fn bar_resource_flags(bar: &Bar) -> u64 {
    let prefetch = if bar.prefetchable { 0x2000 } else { 0 };
    let space = match bar.kind {
        BarKind::Io => 0x4_0100,
        BarKind::Memory32 => 0x4_0200 | prefetch,
        BarKind::Memory64 => 0x14_0200 | prefetch,
    };
    space | u64::from(bar_register_flags(bar))
}

/// Link speed code (PCI Express 6.0, 7.5.3.18 Supported Link Speeds Vector).
fn speed_code(speed: u32) -> u32 {
    match speed {
        2_500 => 1,
        5_000 => 2,
        8_000 => 3,
        16_000 => 4,
        32_000 => 5,
        64_000 => 6,
        _ => 0,
    }
}
