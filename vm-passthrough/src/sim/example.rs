//! A simulated host to try things on: it is kept, and has a dozen kinds of device.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use tempfile::TempDir;

use super::{SimFunction, SimHost};
use crate::PciAddress;
use crate::ledger::{LedgerError, check_trusted};
use crate::pci::{BarKind, Link};
use crate::usb4::Route;

/// The file that tells a simulated host that is kept from any other directory, and what is in it.
const MARK: (&str, &str) = ("sim/version", "2\n");

impl SimHost {
    /// The simulated host in `dir`, which outlives this process. Where there is none it is made, with a dozen kinds of device:
    /// some can be passed to a guest, and the others are what keeps a device from that on real hosts.
    ///
    /// # Errors
    /// When `dir` holds something else, when another user owns or may change it, when its state lies elsewhere, or when the file
    /// system refuses.
    pub fn open(dir: &Path) -> io::Result<Self> {
        let is_there = || fs::read_to_string(dir.join(MARK.0)).is_ok_and(|text| text == MARK.1);
        if !is_there() {
            let dir = std::path::absolute(dir)?;
            let parent = dir.parent().unwrap_or(&dir);
            fs::create_dir_all(parent)?;
            let made = TempDir::with_prefix_in(".sim-host-", parent)?;
            let sim = Self::fill(made.path().into(), None)?;
            sim.add_examples()?;
            sim.write(MARK.0, MARK.1)?;
            match fs::rename(made.path(), &dir) {
                Ok(()) => drop(made.keep()),
                // Another has just made one.
                Err(_) if is_there() => {}
                Err(error) => {
                    let what = "is no simulated host, and one can't be made there; name a directory that is not there yet";
                    return Err(io::Error::new(error.kind(), format!("{} {what} ({error})", dir.display())));
                }
            }
        }
        let sim = Self::at(&fs::canonicalize(dir)?);
        sim.check_owned().map_err(|error| {
            let root = sim.root().display();
            let what = format!("cannot use the simulated host {root}: {error}, or name another directory");
            io::Error::new(error.kind(), what)
        })?;
        sim.advance()?;
        Ok(sim)
    }

    /// Checks that the tree belongs to this user, and that its state lies in it: commands write there, as root too.
    fn check_owned(&self) -> io::Result<()> {
        let root = self.root().symlink_metadata()?;
        check_trusted(self.root(), &root, true).map_err(io::Error::other)?;
        for name in ["dev", "etc", "lib", "proc", "run", "sim", "sys", "var"] {
            let path = self.path(name);
            let data = match path.symlink_metadata() {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                data => data?,
            };
            let what = if data.is_symlink() {
                "is a symbolic link".into()
            } else if !data.is_dir() {
                "is not a directory".into()
            } else if data.uid() != root.uid() {
                format!("belongs to user {} and not to {}", data.uid(), root.uid())
            } else {
                continue;
            };
            return Err(io::Error::other(LedgerError::Untrusted { path, what }));
        }
        Ok(())
    }

    fn add_examples(&self) -> io::Result<()> {
        let at = |bus, device, function| {
            PciAddress::new(0, bus, device, function).ok_or(io::ErrorKind::InvalidInput)
        };
        let add = |function: SimFunction| self.add(&function).map(drop);
        // Each device below a root port of its own but where it says otherwise.
        for bus in 1..=10 {
            add(SimFunction::root_port(at(0, bus, 0)?).group(100 + u32::from(bus)))?;
        }
        let below = |bus| at(0, bus, 0);
        // Four functions of one GPU. Its link is slower than it could be.
        let slow = Link { speed: 8_000, width: 4, max_speed: 16_000, max_width: 16 };
        add(SimFunction::gpu(at(1, 0, 0)?)
            .below(below(1)?)
            .header_type(0x80)
            .driver("nouveau")
            .degraded_link(slow))?;
        // AD102, revision A1: NV_PMC_BOOT_0 and NV_PMC_BOOT_42.
        self.set_registers(at(1, 0, 0)?, 0, 16 << 20, &[(0x0, 0x1920_00a1), (0xa00, 0x192a_1000)])?;
        for (function, device, class, driver) in [
            (1, 0x22ba, 0x04_0300, "snd_hda_intel"),
            (2, 0x1ada, 0x0c_0330, "xhci_hcd"),
            (3, 0x1adb, 0x0c_8000, "ucsi_ccg"),
        ] {
            let function = SimFunction::new(at(1, 0, function)?, 0x10de, device, class).header_type(0x80);
            add(function.express(0).below(below(1)?).group(1).driver(driver))?;
        }
        // The processor's own GPU, which shows the boot's messages.
        let integrated =
            SimFunction::new(at(0, 31, 0)?, 0x8086, 0x4680, 0x03_0000).group(31).boot_display(true);
        add(integrated.bar(0, BarKind::Memory64, false, 0x60_0000_0000, 16 << 20).driver("i915"))?;
        // The disk of the root file system, and one that nothing uses.
        let root = at(2, 0, 0)?;
        add(SimFunction::nvme(root).below(below(2)?).driver("nvme"))?;
        self.add_child(root, "block", "nvme/nvme0/nvme0n1", &[("dev", "259:0")])?;
        self.write("proc/self/mountinfo", "29 1 259:0 / / rw,relatime shared:1 - ext4 /dev/nvme0n1 rw\n")?;
        add(SimFunction::nvme(at(3, 0, 0)?).below(below(3)?).driver("nvme"))?;
        // Two network cards behind a bridge of conventional PCI, which can't keep them apart.
        let bridge = at(4, 0, 0)?;
        add(SimFunction::new(bridge, 0x104c, 0x8240, 0x06_0400).header_type(1).below(below(4)?).group(4))?;
        for device in [1, 2] {
            let card = SimFunction::new(at(11, device, 0)?, 0x8086, 0x100e, 0x02_0000).below(bridge).group(4);
            let address = 0x9000_0000 + (u64::from(device) << 17);
            add(card.bar(0, BarKind::Memory32, false, address, 128 << 10).resets("").driver("e1000"))?;
        }
        // A network card that can have virtual functions, and the one that carries the default route.
        add(SimFunction::network(at(5, 0, 0)?).below(below(5)?).sriov(7).driver("igb"))?;
        let uplink = at(6, 0, 0)?;
        add(SimFunction::network(uplink).below(below(6)?).driver("e1000e"))?;
        self.add_child(uplink, "net", "net/eno1", &[("operstate", "up"), ("flags", "0x1003")])?;
        let route = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
                     eno1\t00000000\t0102A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n";
        self.write("proc/net/route", route)?;
        // A GPU that only a reset of its bus resets, one with more memory than most hosts, and an NPU.
        let amd =
            SimFunction::new(at(7, 0, 0)?, 0x1002, 0x744c, 0x03_0000).express(0).below(below(7)?).group(7);
        let amd =
            amd.bar(0, BarKind::Memory64, true, 0x70_0000_0000, 16 << 30).resets("bus").link(16_000, 16);
        add(amd.driver("amdgpu"))?;
        self.add_amdgpu(at(7, 0, 0)?)?;
        let large =
            SimFunction::new(at(8, 0, 0)?, 0x10de, 0x2330, 0x03_0200).express(0).below(below(8)?).group(8);
        let large = large.bar(0, BarKind::Memory64, true, 0x200_0000_0000, 16 << 20);
        add(large.bar(2, BarKind::Memory64, true, 0x300_0000_0000, 128 << 30).numa_node(1).link(32_000, 16))?;
        let npu = SimFunction::new(at(0, 11, 0)?, 0x8086, 0x7d1d, 0x12_0000).express(9).group(11);
        add(npu.bar(0, BarKind::Memory64, false, 0x61_0000_0000, 128 << 20).driver("intel_vpu"))?;
        // An enclosure of Thunderbolt with a GPU, to which no PCIe is tunnelled yet.
        let (port, interface) = (at(0, 12, 0)?, at(0, 13, 2)?);
        let dir = self.add(&SimFunction::root_port(port).group(12))?;
        fs::create_dir(dir.join(format!("supplier:pci:{interface}")))?;
        add(SimFunction::new(interface, 0x8086, 0x9a1b, 0x0c_0340).group(13).driver("thunderbolt"))?;
        let (upstream, downstream, egpu) = (at(0x30, 0, 0)?, at(0x31, 1, 0)?, at(0x32, 0, 0)?);
        add(SimFunction::root_port(upstream).below(port).group(0x30))?;
        add(SimFunction::root_port(downstream).below(upstream).group(0x31))?;
        let gpu = SimFunction::new(egpu, 0x1002, 0x744c, 0x03_0000).express(0).below(downstream).group(0x32);
        let gpu = gpu.bar(0, BarKind::Memory64, true, 0x80_0000_0000, 32 << 30).link(16_000, 16);
        // Linux shows what its PCI Express link is said to be: the one in the enclosure.
        add(gpu
            .bar(2, BarKind::Memory64, true, 0x88_0000_0000, 256 << 20)
            .resets("flr bus")
            .driver("amdgpu"))?;
        self.add_amdgpu(egpu)?;
        let domain = [("security", "user\n"), ("iommu_dma_protection", "1\n"), ("deauthorization", "1\n")];
        self.add_domain(0, Some(interface), &domain)?;
        let route = Route { domain: 0, path: 1 };
        let enclosure = [
            ("authorized", "0\n"),
            ("vendor_name", "Razer\n"),
            ("device_name", "Core X\n"),
            ("generation", "3\n"),
            ("nvm_version", "41.0\n"),
            ("usb4_port1/link", "tbt\n"),
            ("unique_id", "d2030000-00a0-751e-a3f4-c0e5ae7b0d30\n"),
            ("rx_speed", "20.0 Gb/s\n"),
            ("rx_lanes", "2\n"),
            ("tx_speed", "20.0 Gb/s\n"),
            ("tx_lanes", "2\n"),
        ];
        self.add_router(route, &enclosure)?;
        // The host's port that it is plugged into, one that is free, and a retimer on the board between port and connector.
        let host = Route { domain: 0, path: 0 };
        for (port, link, connector) in [(1, "tbt\n", "port0"), (3, "none\n", "port1")] {
            let dir = self.router_dir(host)?.join(format!("usb4_port{port}"));
            fs::create_dir_all(&dir)?;
            fs::write(dir.join("link"), link)?;
            let connector = self.path(&format!("sys/devices/platform/USBC000:00/typec/{connector}"));
            fs::create_dir_all(&connector)?;
            self.link_path(&dir.join("connector"), &connector)?;
        }
        let retimer = [("vendor", "0x8087\n"), ("device", "0x15ee\n"), ("nvm_version", "7.0\n")];
        let dir = self.router_dir(host)?.join("usb4_port1/0-0:1.1");
        self.add_on_usb4("0-0:1.1", &dir, &retimer)?;
        fs::write(self.router_dir(host)?.join("nvm_version"), "60.0\n")?;
        self.enclose(route, &[upstream, downstream, egpu])?;
        // Below a port that is asleep, and without a group, as where the firmware hides the IOMMU.
        add(SimFunction::network(at(9, 0, 0)?).below(below(9)?).power_state("D3cold").driver("igc"))?;
        add(SimFunction::nvme(at(10, 0, 0)?).below(below(10)?).no_group().driver("nvme"))
    }
}
