//! Disks of every kind, in every place on the bus, in one Linux guest: an NVMe controller with two namespaces below a switch, one
//! behind a bridge of conventional PCI, a virtio disk that goes through the IOMMU, and a USB stick at a controller that only
//! its bus resets. The guest's own drivers use them, and then the host's have them again.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::device_kinds::XHCI;
use super::linux_nvme::NVME;
use super::topology;
use crate::agent::{Disk, Function, Guest, GuestPlan, L1, L2};
use crate::scenario::{self, Contents, Scenario, Variant, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "linux-storage",
    about: "a Linux guest uses disks behind a switch, a bridge, an IOMMU's virtio and a USB controller",
    variants: Variants::Both,
    ports: 4,
    devices: &[
        "-drive",
        "file={first},if=none,id=drive0,format=raw,cache=unsafe",
        "-drive",
        "file={second},if=none,id=drive1,format=raw,cache=unsafe",
        "-drive",
        "file={third},if=none,id=drive2,format=raw,cache=unsafe",
        "-drive",
        "file={fourth},if=none,id=drive3,format=raw,cache=unsafe",
        "-drive",
        "file={fifth},if=none,id=drive4,format=raw,cache=unsafe",
        "-device",
        "x3130-upstream,id=switch0,bus=port0",
        "-device",
        "xio3130-downstream,id=down0,bus=switch0,chassis=21",
        "-device",
        "nvme,id=nvme0,serial=two,bus=down0",
        "-device",
        "nvme-ns,bus=nvme0,drive=drive0,nsid=1",
        "-device",
        "nvme-ns,bus=nvme0,drive=drive1,nsid=2",
        "-device",
        "pcie-pci-bridge,id=bridge0,bus=port1",
        "-device",
        "nvme,drive=drive2,serial=old,bus=bridge0,addr=1.0",
        "-device",
        "virtio-blk-pci,drive=drive3,bus=port2,iommu_platform=on,disable-legacy=on",
        "-device",
        "qemu-xhci,id=usb0,bus=port3",
        "-device",
        "usb-storage,bus=usb0.0,drive=drive4",
    ],
    disks: &[
        scenario::Disk { name: "first", mib: 16 },
        scenario::Disk { name: "second", mib: 16 },
        scenario::Disk { name: "third", mib: 16 },
        scenario::Disk { name: "fourth", mib: 16 },
        scenario::Disk { name: "fifth", mib: 16 },
    ],
    memory_mib: 1536,
    deadline: Duration::from_secs(1800),
    contents: Contents { linux_guest: true, ..Contents::NONE },
    l1,
    l2: Some(l2),
};

const TIMEOUT: Duration = Duration::from_secs(600);
/// A virtio disk of version 1, as others can't go through an IOMMU.
pub(super) const VIRTIO_BLOCK: (u16, u16) = (0x1af4, 0x1042);
const LEN: usize = 512 << 10;
const HOST_SEED: u64 = 0x686f_7374;
const GUEST_SEED: u64 = 0x0067_7565_7374;
const GUEST_AT: u64 = 8 << 20;

/// What is passed: what it is, the function, and how many disks are behind it.
type Passed = (&'static str, Function, usize);

/// The functions. Linux as the testbed builds it has no drivers of USB; Debian's has.
fn functions() -> Result<Vec<Passed>> {
    let nvme = Function::find_all(NVME.0, NVME.1)?;
    let [two, old]: [Function; 2] = nvme.try_into().ok().context("there are not two NVMe controllers")?;
    let virtio = Function::find(VIRTIO_BLOCK.0, VIRTIO_BLOCK.1)?;
    let mut functions = vec![
        ("NVMe with two namespaces below a switch", two, 2),
        ("NVMe behind a bridge", old, 1),
        ("virtio-blk through the IOMMU", virtio, 1),
    ];
    if Path::new("/sys/bus/pci/drivers/xhci_hcd").exists() {
        functions.push(("USB storage", Function::find(XHCI.0, XHCI.1)?, 1));
    }
    Ok(functions)
}

/// Does something with each disk; each has a seed of its own.
fn each(passed: &[Passed], mut act: impl FnMut(&str, &Disk, u64) -> Result<()>) -> Result<()> {
    let mut seed = 0;
    for (kind, function, count) in passed {
        for disk in Disk::all(function, *count)? {
            act(kind, &disk, seed).with_context(|| format!("{kind}, {}", disk.node.display()))?;
            seed += 1;
        }
    }
    Ok(())
}

fn l1(l1: &mut L1) -> Result<()> {
    let passed = functions()?;
    ensure!(
        (passed.len() == 4) == (l1.variant == Variant::Group),
        "only Debian's Linux drives USB: {passed:?}"
    );
    each(&passed, |_, disk, seed| disk.write_pattern(HOST_SEED + seed, 0, LEN).map(drop))?;
    let drivers: Vec<_> = passed.iter().map(|(_, function, _)| function.driver()).collect();
    for (kind, function, _) in &passed {
        l1.vm_service(&["explain", &function.address], TIMEOUT)?.succeeded()?;
        l1.proved(format!("explain: {kind} ({}) is ready", function.address));
    }

    let devices: Vec<_> = passed.iter().map(|(_, function, _)| function).collect();
    let cmdline = topology::parameter(&devices)?;
    let plan = GuestPlan { devices, cmdline: &cmdline, ..GuestPlan::linux("storage", &passed[0].1) };
    let ended = Guest::start(l1, &plan)?.end(TIMEOUT)?.succeeded(l1)?;
    l1.figure("run of the guest, from start to its end", ended.process.took.as_secs_f64(), "s");

    let again: Vec<_> = passed.iter().map(|(_, function, _)| function.driver()).collect();
    l1.prove(again == drivers, format!("the host's drivers have them again: {again:?}"))?;
    each(&passed, |kind, disk, seed| {
        disk.check_pattern(HOST_SEED + seed, 0, LEN)?;
        let written = disk.check_pattern(GUEST_SEED + seed, GUEST_AT, LEN)?;
        l1.proved(format!("{kind}: the host reads its own data and the guest's, checksum {written:016x}"));
        Ok(())
    })
}

fn l2(l2: &mut L2) -> Result<()> {
    let functions = functions()?;
    topology::compare(l2, &functions.iter().map(|(_, function, _)| function).collect::<Vec<_>>())?;
    each(&functions, |kind, disk, seed| {
        disk.check_pattern(HOST_SEED + seed, 0, LEN)?;
        disk.write_pattern(GUEST_SEED + seed, GUEST_AT, LEN)?;
        l2.prove(true, format!("{kind}: the guest reads the host's data and writes its own"))
    })
}
