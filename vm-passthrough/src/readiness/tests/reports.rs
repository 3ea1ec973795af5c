//! Hosts rebuilt from public reports of device assignment that failed, each with the answer of an expert.
//!
//! * harvester/harvester#7340 (GitHub, 2025): HPE server, whose firmware reserves memory (RMRR) for a port of its NIC.
//! * kubernetes-sigs/dranet#186 (GitHub, 2026): Dell server, two-port NIC in one group, the management network on the other port.
//! * seapath/meta-seapath#166 (GitHub, 2024): hardened libvirtd unit without CAP_IPC_LOCK, default limit of locked memory.
//! * raspberrypi/linux#6834 (GitHub, 2025): Raspberry Pi 5, whose IOMMUs serve devices of the SoC, but not PCI Express.
//! * flatcar/scripts#2484 (GitHub, 2024): arm64 server, whose Linux is built without VFIO.
//! * isc30/ryzen-gpu-passthrough-proxmox#33 (GitHub, 2024): GPU of an AMD processor, which nothing resets between guests.
//! * actions/runner-images#9821 (GitHub, 2024): guest with 256 GiB of huge pages on a reinstalled host that has none.
//! * bigstack-oss/cubecos#312 (GitHub, 2026): virtual function that NVIDIA's driver makes a vGPU, to be passed as a device.
//! * bryansteiner/gpu-passthrough-tutorial#39 (GitHub, 2024): laptop GPU, which a process of the desktop has open.
//! * cloud-hypervisor/cloud-hypervisor#7030 (GitHub, 2025): virtual machine with a virtual IOMMU of 39 bits, BARs above it.
//! * bpg/terraform-provider-proxmox#1353 (GitHub, 2024): guest with 48 GiB and a GPU, whose start takes minutes.
//! * harvester/harvester#5253 (GitHub, 2024): virtual function of a NIC, which another guest got meanwhile.

use super::*;

/// Root port of the device.
const ROOT: &str = "0000:00:1c.0";

/// A host with these functions, behind [`ROOT`] unless they are below another port.
struct Report {
    sim: SimHost,
    options: ExplainOptions,
}

impl Report {
    fn new(functions: impl IntoIterator<Item = SimFunction>) -> Self {
        let sim = SimHost::new().unwrap();
        sim.add(&SimFunction::root_port(address(ROOT))).unwrap();
        for function in functions {
            sim.add(&function).unwrap();
        }
        Self { sim, options: ExplainOptions::for_memory(4 << 30) }
    }

    fn write(self, path: &str, text: &str) -> Self {
        self.sim.write(path, text).unwrap();
        self
    }

    fn delete(self, path: &str) -> Self {
        self.sim.delete(path).unwrap();
        self
    }

    /// Opens a file of the simulated host in a process.
    fn open(self, pid: u32, command: &str, file: &str) -> Self {
        std::fs::create_dir_all(self.sim.path(&format!("proc/{pid}/fd"))).unwrap();
        let link = self.sim.path(&format!("proc/{pid}/fd/17"));
        std::os::unix::fs::symlink(self.sim.path(file), link).unwrap();
        self.write(&format!("proc/{pid}/comm"), &format!("{command}\n")).write(file, "")
    }

    /// Asserts the whole answer for `target`: one blocker, of `function`.
    fn check(
        &self,
        target: &str,
        code: Code,
        function: &str,
        evidence: &[&str],
        fix: &[&str],
        absent: &[&str],
    ) {
        let readiness = explain(&self.sim.plain_host(), address(target), &self.options).unwrap();
        let [found] = &readiness.blockers[..] else { panic!("{readiness}") };
        assert_eq!(
            (found.code, found.severity, found.function),
            (code, Blocks, address(function)),
            "{readiness}"
        );
        for part in evidence {
            assert!(found.evidence.contains(part), "no `{part}` in {readiness}");
        }
        for part in fix {
            assert!(found.remedy.contains(part), "no `{part}` in {readiness}");
        }
        for part in absent {
            assert!(!found.remedy.contains(part), "`{part}` in {readiness}");
        }
    }
}

fn nic(text: &str, vendor: u16, device: u16) -> SimFunction {
    SimFunction::new(address(text), vendor, device, 0x02_0000)
        .bar(0, BarKind::Memory64, true, 0x38_0000_0000 | u64::from(address(text).function()) << 16, 64 << 10)
        .express(0)
        .capability(0x11, &[0x1f, 0x00, 0x00, 0x20, 0x00, 0x00, 0x00, 0x30, 0x00, 0x00])
        .below(address(ROOT))
}

#[test]
fn memory_reserved_for_a_management_controller() {
    let port = |function: u32| {
        let port = nic(&format!("0000:04:00.{function}"), 0x14e4, 0x1657).group(30 + function);
        port.driver(if function == 1 { "vfio-pci" } else { "tg3" })
    };
    let regions = "0x00000000bdf83000 0x00000000bdf84fff direct\n0x00000000fee00000 0x00000000feefffff msi\n";
    Report::new((0..4).map(port))
        .write("dev/vfio/31", "")
        .write("sys/kernel/iommu_groups/31/reserved_regions", regions)
        .check(
            "0000:04:00.1",
            Code::FirmwareMemory,
            "0000:04:00.1",
            &["groups/31/reserved_regions", "0xbdf83000-0xbdf84fff", "RMRR"],
            &["firmware setup", "HP and Dell management controllers", "another slot"],
            &["unsafe", "relax"],
        );
}

#[test]
fn management_network_on_the_other_port() {
    let port = |text| nic(text, 0x14e4, 0x165f).group(75).driver("tg3");
    let host = Report::new(["0000:02:00.0", "0000:02:00.1"].map(port));
    host.sim.add_child(address("0000:02:00.0"), "net", "net/eno8303", &[]).unwrap();
    let route = "Iface Destination\neno8303\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n";
    host.write("proc/net/route", route).check(
        "0000:02:00.1",
        Code::DefaultRoute,
        "0000:02:00.0",
        &["eno8303 has a default route", "/net/route"],
        &["move the default route to another interface"],
        &["unbind", "--with-group", "virtual function"],
    );
}

#[test]
fn hardened_unit_without_the_right_to_lock_memory() {
    let host = Report::new([nic("0000:07:00.0", 0x8086, 0x1521).group(49).driver("vfio-pci")]);
    host.sim.set_memlock(Some(8 << 20)).unwrap();
    // CAP_DAC_OVERRIDE and CAP_NET_ADMIN.
    host.sim.set_credentials(0, 0, 1 << 1 | 1 << 12).unwrap();
    host.write("dev/vfio/49", "").check(
        "0000:07:00.0",
        Code::MemlockTooLow,
        "0000:07:00.0",
        &["needs 4 GiB locked", "allows 8 MiB"],
        &["LimitMEMLOCK=infinity in the systemd unit", "CAP_IPC_LOCK"],
        &[],
    );
}

#[test]
fn no_iommu_in_front_of_pci_express() {
    const PORT: &str = "0001:00:00.0";
    let sim = SimHost::new().unwrap();
    sim.add(&SimFunction::root_port(address(PORT)).no_group()).unwrap();
    let mut host = Report { sim, options: ExplainOptions::default() }
        .delete("sys/class/iommu")
        .write("proc/cpuinfo", "CPU implementer : 0x41\nCPU part : 0xd0b\n")
        .write("proc/interrupts", " 13: 42 GICv2 30 Level arch_timer\n");
    for (group, device) in ["1000800000.codec", "107c580000.hvs"].into_iter().enumerate() {
        host = host.write(&format!("sys/devices/platform/axi/{device}/uevent"), "");
        let link = format!("sys/kernel/iommu_groups/{group}/devices/{device}");
        host.sim.link(&link, &format!("sys/devices/platform/axi/{device}")).unwrap();
    }
    for function in 0..4 {
        let port = SimFunction::network(address(&format!("0001:01:00.{function}"))).no_group();
        host.sim.add(&port.below(address(PORT)).driver("igb")).unwrap();
    }
    host.check(
        "0001:01:00.0",
        Code::NoIommu,
        "0001:01:00.0",
        &["iommu_group is missing", "no PCI function of this host is in a group"],
        &["iommu-map of the device tree", "another host"],
        &["slot", "VT-d", "noiommu"],
    );
}

#[test]
fn kernel_without_vfio() {
    let host = Report::new([nic("0000:01:00.0", 0x15b3, 0x1017).group(12).driver("mlx5_core")])
        .delete("sys/bus/pci/drivers/vfio-pci")
        .delete("dev/vfio")
        .delete("dev/iommu")
        .delete("sys/class/iommu")
        .write("sys/class/iommu/smmu3.0x0000000100000000/uevent", "")
        .write("proc/cpuinfo", "CPU implementer : 0x41\nCPU part : 0xd0c\n")
        .write("proc/interrupts", " 24: 0 ITS-PCI-MSIX-0000:01:00.0 0 Edge mlx5_async\n")
        .write("proc/sys/kernel/osrelease", "6.6.60-flatcar\n")
        .write("lib/modules/6.6.60-flatcar/modules.dep", "kernel/drivers/net/mlx5_core.ko.xz:\n");
    let readiness = explain(&host.sim.plain_host(), address("0000:01:00.0"), &host.options).unwrap();
    let codes: Vec<_> = readiness.blockers.iter().map(|found| found.code).collect();
    assert_eq!(codes, [Code::VfioPciUnavailable, Code::VfioNodeMissing], "{readiness}");
    let [driver, nodes] = &readiness.blockers[..] else { unreachable!() };
    assert!(driver.evidence.contains("6.6.60-flatcar/modules.dep has no vfio-pci"), "{readiness}");
    for part in ["CONFIG_VFIO_PCI", "linux-image-arm64"] {
        assert!(driver.remedy.contains(part), "no `{part}` in {readiness}");
    }
    // There is nothing to load.
    assert!(!nodes.remedy.contains("modprobe"), "{readiness}");
}

#[test]
fn gpu_of_the_processor_that_nothing_resets() {
    const INTERNAL: &str = "0000:00:08.1";
    let host = Report::new([SimFunction::root_port(address(INTERNAL)).without_slot()])
        .delete("sys/class/iommu")
        .write("sys/class/iommu/ivhd0/amd-iommu/features", "25bf732fa2295afe\n")
        .write("proc/cpuinfo", "vendor_id : AuthenticAMD\naddress sizes : 48 bits physical\n")
        .write("dev/vfio/15", "")
        .write("dev/vfio/16", "");
    let function = |function: u8, vendor: u16, device: u16, class: u32, driver: &str, resets: &str| {
        let text = format!("0000:c5:00.{function}");
        let added = SimFunction::new(address(&text), vendor, device, class).express(0);
        let added = added.capability(0x05, &[0; 12]).group(15 + u32::from(function)).resets(resets);
        host.sim.add(&added.driver(driver).below(address(INTERNAL))).unwrap();
    };
    function(0, 0x1002, 0x15bf, 0x03_0000, "vfio-pci", "bus");
    function(1, 0x1002, 0x1640, 0x04_0300, "vfio-pci", "");
    function(2, 0x1022, 0x15c7, 0x10_8000, "ccp", "");
    function(3, 0x1022, 0x15b9, 0x0c_0330, "xhci_hcd", "pm");
    host.check(
        "0000:c5:00.0",
        Code::NoReset,
        "0000:c5:00.0",
        &["only its bus", "resetting its port 0000:00:08.1 would also reset", "0000:c5:00.3"],
        &["newer Linux kernel", "accept no-reset"],
        &["slot", "root port", "the card"],
    );
}

#[test]
fn no_huge_pages_after_a_new_installation() {
    const POOL: &str = "sys/kernel/mm/hugepages/hugepages-2048kB";
    let gpu = SimFunction::gpu(address("0000:61:00.0")).below(address(ROOT)).driver("vfio-pci");
    let mut host = Report::new([gpu])
        .write("dev/vfio/97", "")
        .write("proc/meminfo", "MemTotal: 527952160 kB\nMemAvailable: 520000000 kB\n")
        .write(&format!("{POOL}/nr_hugepages"), "0\n")
        .write(&format!("{POOL}/free_hugepages"), "0\n");
    host.options = ExplainOptions::for_memory(256 << 30);
    host.options.pages = RamPages::Huge(2 << 20);
    host.check(
        "0000:61:00.0",
        Code::HugePagesTooFew,
        "0000:61:00.0",
        &["256 GiB of RAM take 131072 huge pages of 2 MiB", "has 0 that are free"],
        &["echo 131072 > ", "hugepages-2048kB/nr_hugepages"],
        &["memlock"],
    );
}

#[test]
fn virtual_function_that_is_a_vgpu() {
    const PHYSICAL: &str = "0001:04:00.0";
    const PORT: &str = "0001:00:01.0";
    let gpu = |text| SimFunction::gpu(address(text)).below(address(PORT)).driver("nvidia");
    let port = SimFunction::root_port(address(PORT));
    let host = Report::new([port, gpu(PHYSICAL).sriov(48)]);
    host.sim.add(&gpu("0001:04:00.2").virtual_of(address(PHYSICAL)).group(70)).unwrap();
    let types = "ID    : vGPU Name\n1561  : NVIDIA RTX Pro 6000 Blackwell DC-1-24Q\n";
    let dir = "sys/bus/pci/devices/0001:04:00.2/nvidia";
    host.write(&format!("{dir}/creatable_vgpu_types"), types)
        .write(&format!("{dir}/current_vgpu_type"), "1561\n")
        .check(
            "0001:04:00.2",
            Code::VgpuFunction,
            "0001:04:00.2",
            &["nvidia/current_vgpu_type makes it", "DC-1-24Q"],
            &["pass 0001:04:00.0 instead", "whole GPU", "libvirt (<hostdev managed='no'>)"],
            &["unbind", "modprobe"],
        );
}

#[test]
fn desktop_process_on_a_laptop_gpu() {
    let port = SimFunction::root_port(address("0000:00:01.0")).no_extended_capabilities().group(2);
    let gpu = SimFunction::new(address("0000:01:00.0"), 0x10de, 0x1f95, 0x03_0200)
        .bar(1, BarKind::Memory64, true, 0x60_0000_0000, 256 << 20)
        .express(0)
        .capability(0x05, &[0; 12])
        .group(2)
        .below(address("0000:00:01.0"));
    Report::new([port, gpu.driver("nvidia")])
        .write("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: x\nDevice Minor: \t 0\n")
        .open(1803, "gnome-shell", "dev/nvidia0")
        .check(
            "0000:01:00.0",
            Code::InUse,
            "0000:01:00.0",
            &["process 1803 (gnome-shell) has", "dev/nvidia0 open"],
            &["stop what has it open", "kill 1803"],
            &["unbind", "primary display"],
        );
}

#[test]
fn virtual_function_of_another_guest() {
    const PHYSICAL: &str = "0000:04:00.0";
    let physical = nic(PHYSICAL, 0x8086, 0x1521).group(40).driver("igb").sriov(7);
    let host = Report::new([physical]);
    let function = nic("0000:04:10.2", 0x8086, 0x1520).virtual_of(address(PHYSICAL)).group(57);
    host.sim.add(&function.driver("vfio-pci")).unwrap();
    host.open(9001, "qemu-system-x86", "dev/vfio/57").check(
        "0000:04:10.2",
        Code::InUse,
        "0000:04:10.2",
        &["process 9001 (qemu-system-x86) has", "dev/vfio/57 open"],
        &["kill 9001"],
        &["unbind"],
    );
}

/// A GPU with a BAR of 256 GiB.
fn large_gpu(text: &str) -> SimFunction {
    let gpu = SimFunction::gpu(address(text)).below(address(ROOT));
    gpu.bar(1, BarKind::Memory64, true, 0x100_0000_0000 * u64::from(address(text).bus()), 256 << 30)
}

#[test]
fn bars_beyond_a_virtual_iommu() {
    // VT-d with 39 bits, as QEMU has it without aw-bits.
    let cap = "d2008c22260206\n";
    let host = Report::new(["0000:01:00.0", "0000:02:00.0"].map(large_gpu))
        .write(
            "proc/cpuinfo",
            "vendor_id : GenuineIntel\nflags : fpu hypervisor\naddress sizes : 46 bits physical\n",
        )
        .write("sys/devices/virtual/iommu/dmar0/intel-iommu/cap", cap);
    let functions = pci::scan(&host.sim.plain_host()).unwrap();
    let gpus: Vec<_> = functions.iter().filter(|function| !function.is_bridge()).collect();
    let plain = host.sim.plain_host();
    // One alone is as well off as elsewhere: there is nobody else to reach its BAR.
    let explainer = Explainer::new(&plain);
    assert_eq!(explainer.explain_guest(&gpus[..1], &host.options).unwrap()[0].blockers, []);
    let judged = explainer.explain_guest(&gpus, &host.options).unwrap();
    let [found, _] = [&judged[0], &judged[1]].map(|readiness| {
        let [found] = &readiness.blockers[..] else { panic!("{readiness}") };
        assert_eq!((found.code, found.severity), (Code::IovaTooWide, Warns));
        found
    });
    for part in ["translates 39 bits", "its DMA does not reach BAR 1 of 0000:02:00.0 (at 0xc000000000)"] {
        assert!(found.evidence.contains(part), "{found}");
    }
    for part in ["nothing, unless", "peer-to-peer", "aw-bits=48"] {
        assert!(found.remedy.contains(part), "{found}");
    }
    assert!(!found.remedy.contains("firmware"), "{found}");
}

#[test]
fn much_memory_that_is_pinned_at_the_start() {
    let gpu = || SimFunction::gpu(address("0000:01:00.0")).below(address(ROOT));
    let host = |available: u64| {
        let mut host = Report::new([gpu()]);
        host.options = ExplainOptions::for_memory(48 << 30);
        let memory = format!("MemTotal: 65536000 kB\nMemAvailable: {} kB\n", available << 20);
        // The IOMMU has fewer bits than the processor, which keeps nothing from this guest.
        host.write("proc/meminfo", &memory)
            .write("proc/cpuinfo", "vendor_id : GenuineIntel\naddress sizes : 46 bits physical\n")
            .write("sys/devices/virtual/iommu/dmar0/intel-iommu/cap", "d2008c22260206\n")
    };
    let explained =
        |host: Report| explain(&host.sim.plain_host(), address("0000:01:00.0"), &host.options).unwrap();
    let ready = explained(host(60));
    assert_eq!(ready.blockers, [], "{ready}");
    let busy = explained(host(40));
    let [found] = &busy.blockers[..] else { panic!("{busy}") };
    assert_eq!((found.code, found.severity), (Code::HostMemoryTooLow, Warns));
    assert!(
        found.evidence.contains("48 GiB of RAM stay pinned") && found.evidence.contains("40 GiB available"),
        "{busy}"
    );
    assert!(found.remedy.contains("huge pages (hugepages in the guest file)"), "{busy}");
}
