//! A simulated host with what a workstation has.

use vm_passthrough::PciAddress;
use vm_passthrough::pci::{BarKind, Link};
use vm_passthrough::sim::{SimFunction, SimHost};

pub(crate) fn address(text: &str) -> PciAddress {
    text.parse().expect("an address")
}

/// A GPU with its audio function in one group, an NVMe disk, a network card and the root ports above them.
pub(crate) fn workstation() -> SimHost {
    let sim = SimHost::new().expect("a simulated host");
    for driver in ["nvidia", "snd_hda_intel", "nvme", "igc", "pcieport"] {
        sim.add_driver(driver).expect("a driver");
    }
    let add = |function: SimFunction| drop(sim.add(&function).expect("a function"));
    for (port, group) in [("0000:00:01.0", 1), ("0000:00:06.0", 2), ("0000:00:1c.0", 3)] {
        add(SimFunction::root_port(address(port)).group(group).driver("pcieport"));
    }
    add(SimFunction::new(address("0000:01:00.0"), 0x10de, 0x2684, 0x03_00_00)
        .express(0)
        .below(address("0000:00:01.0"))
        .subsystem(0x1043, 0x889a)
        .revision(0xa1)
        .bar(0, BarKind::Memory32, false, 0x8500_0000, 16 << 20)
        .bar(1, BarKind::Memory64, true, 0x60_0000_0000, 32 << 30)
        .bar(3, BarKind::Memory64, true, 0x68_0000_0000, 32 << 20)
        .bar(5, BarKind::Io, false, 0x5000, 128)
        .rom(512 << 10)
        .group(13)
        .driver("nvidia")
        .numa_node(0)
        .degraded_link(Link { speed: 2500, width: 8, max_speed: 16000, max_width: 16 })
        .resets("flr bus"));
    add(SimFunction::new(address("0000:01:00.1"), 0x10de, 0x22ba, 0x04_03_00)
        .express(0)
        .below(address("0000:00:01.0"))
        .group(13)
        .driver("snd_hda_intel"));
    add(SimFunction::nvme(address("0000:02:00.0")).below(address("0000:00:06.0")).group(14).driver("nvme"));
    add(SimFunction::network(address("0000:03:00.0")).below(address("0000:00:1c.0")).group(15).driver("igc"));
    sim
}
