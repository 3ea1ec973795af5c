//! Every kind of device that can be emulated, in every place on the bus: what `explain` says of it is what VFIO does.
//! Behind a bridge with a hot-plug driver, what `explain` tells one to do works.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::Signal;

use super::vmm_killed::signal;
use crate::agent::{Function, Guest, GuestPlan, Holder, L1};
use crate::scenario::{Contents, Disk, Scenario, Variant, Variants};
use crate::scenarios::bare_edu::EDU;
use crate::scenarios::linux_igb::{IGB, IGB_VF};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "device-kinds",
    about: "explain and VFIO agree on each kind of device in each place; behind a bridge of shpchp the remedies work",
    variants: Variants::Both,
    ports: 13,
    devices: &[
        // Without ACPI's hot-plug Linux's own drivers serve the slots: pciehp, and shpchp on the conventional bridge.
        "-global",
        "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off",
        "-device",
        "edu,addr=3.0",
        "-audiodev",
        "none,id=silent",
        "-drive",
        "file={disk},if=none,id=drive0,format=raw,cache=unsafe",
        "-device",
        "nvme,drive=drive0,serial=testbed,bus=port0",
        "-device",
        "e1000e,bus=port1",
        "-device",
        "ati-vga,model=rv100,bus=port2,multifunction=on,addr=0.0",
        "-device",
        "ich9-intel-hda,bus=port2,addr=0.1",
        "-device",
        "igb,bus=port3",
        "-device",
        "bochs-display,bus=port4",
        "-device",
        "virtio-gpu-pci,bus=port5,iommu_platform=on,disable-legacy=on",
        "-object",
        "memory-backend-ram,id=shared,size=1M",
        "-device",
        "ivshmem-plain,memdev=shared,bus=port6",
        "-device",
        "pci-testdev,bus=port7",
        "-device",
        "qemu-xhci,bus=port8",
        "-device",
        "pcie-pci-bridge,id=bridge0,bus=port9",
        "-device",
        "edu,bus=bridge0,addr=1.0",
        "-device",
        "AC97,bus=bridge0,addr=2.0,audiodev=silent",
        "-device",
        "x3130-upstream,id=switch0,bus=port10",
        "-device",
        "xio3130-downstream,id=down0,bus=switch0,chassis=21",
        "-device",
        "xio3130-downstream,id=down1,bus=switch0,chassis=22",
        "-device",
        "edu,bus=down0,dma_mask=0xffffffffffffffff",
        "-device",
        "virtio-rng-pci,bus=down1,iommu_platform=on,disable-legacy=on",
        "-device",
        "igb,bus=port11",
        "-device",
        "qemu-xhci,bus=port12,multifunction=on,addr=0.0",
        "-device",
        "qemu-xhci,bus=port12,addr=0.1",
    ],
    disks: &[Disk { name: "disk", mib: 16 }],
    memory_mib: 1024,
    deadline: Duration::from_secs(1800),
    contents: Contents { bare_guest: true, ..Contents::NONE },
    l1,
    l2: None,
};

const TIMEOUT: Duration = Duration::from_secs(600);
/// `vm-service`'s exit status for a device that can't be passed.
const BLOCKED: i32 = 3;
/// QEMU's bridge from PCI Express to PCI.
const BRIDGE: (u16, u16) = (0x1b36, 0x000e);
/// QEMU's USB controller, which has no reset but its bus's.
pub(super) const XHCI: (u16, u16) = (0x1b36, 0x000d);
const SHPCHP: &str = "/sys/bus/pci/drivers/shpchp";

// The verdicts on all devices are compared after this, as in every scenario.
fn l1(l1: &mut L1) -> Result<()> {
    virtual_functions(l1)?;
    reset_together(l1)?;
    let bridge = Function::find(BRIDGE.0, BRIDGE.1)?;
    let behind = Function::find_all(EDU.0, EDU.1)?.into_iter().find(|edu| edu.group() == bridge.group());
    let behind = behind.context("no edu shares the bridge's group")?;
    let has_driver = bridge.driver().as_deref() == Some("shpchp");
    l1.prove(
        has_driver == (l1.variant == Variant::Group),
        format!("shpchp, which Debian's Linux has, drives the bridge: {has_driver}"),
    )?;
    if !has_driver {
        return Ok(());
    }
    for command in ["explain", "claim"] {
        let refused = l1.vm_service(&[command, &behind.address], TIMEOUT)?;
        let said = format!("{}{}", refused.stdout, refused.stderr);
        let named = [&*bridge.address, "shpchp", "--with-group", "shpchp/unbind"];
        l1.prove(
            refused.code == Some(BLOCKED) && named.iter().all(|part| said.contains(part)),
            format!("{command} refuses what is behind it, names the driver and says what to do"),
        )
        .with_context(|| format!("{command} said:\n{said}"))?;
    }

    l1.step("unbind shpchp, as explain says");
    fs::write(format!("{SHPCHP}/unbind"), &bridge.address)?;
    let refused = l1.vm_service(&["explain", &behind.address], TIMEOUT)?;
    l1.prove(
        refused.code == Some(BLOCKED)
            && refused.stdout.contains("not ready, 1 blocker")
            && refused.stdout.contains("which the guest does not get"),
        "then nothing is left but that it can't be reset without its neighbour",
    )
    .with_context(|| refused.stdout)?;
    for command in ["explain", "claim"] {
        l1.vm_service(&[command, &behind.address, "--accept", "no-reset"], TIMEOUT)?.succeeded()?;
    }
    drop(Holder::start(&behind, l1.variant)?);
    l1.proved("with that accepted it is ready, and VFIO opens it");
    l1.vm_service(&["release", &behind.address], TIMEOUT)?.succeeded()?;
    fs::write(format!("{SHPCHP}/bind"), &bridge.address)?;

    l1.vm_service(&["explain", &behind.address, "--with-group"], TIMEOUT)?.succeeded()?;
    l1.vm_service(&["claim", &behind.address, "--with-group"], TIMEOUT)?.succeeded()?;
    l1.prove(bridge.driver().is_none(), "claim --with-group takes the bridge from shpchp")?;
    drop(Holder::start(&behind, l1.variant)?);
    l1.vm_service(&["release", &behind.address], TIMEOUT)?.succeeded()?;
    l1.prove(bridge.driver().as_deref() == Some("shpchp"), "release gives it back")?;

    let plan = GuestPlan { arguments: &["--with-group"], ..GuestPlan::bare("behind", "pci", &behind) };
    let ended = Guest::start(l1, &plan)?.end(TIMEOUT)?.succeeded(l1)?;
    l1.prove(ended.console.contains("1234:11e8"), "run --with-group gives it to a guest")?;
    l1.prove(bridge.driver().as_deref() == Some("shpchp"), "and the bridge back to shpchp")
}

/// Kills the VMM of a guest that has a device of two functions, which can be reset only together.
fn reset_together(l1: &mut L1) -> Result<()> {
    let found = Function::find_all(XHCI.0, XHCI.1)?;
    let second = found.iter().find(|function| function.address.ends_with(".1")).context("no function 1")?;
    let slot = second.address.trim_end_matches("1");
    let first =
        found.iter().find(|function| function.address == format!("{slot}0")).context("no function 0")?;
    let plan = GuestPlan { devices: vec![first, second], ..GuestPlan::bare("both", "spin", first) };
    let mut guest = Guest::start(l1, &plan)?;
    for function in [first, second] {
        let attached = format!("{} opened through {} and attached in", function.address, l1.variant);
        guest.wait_for_log(&attached, TIMEOUT)?;
    }
    signal(guest.vmm()?, Signal::KILL)?;
    let said = guest.end(TIMEOUT)?.process.stderr;
    let back = format!("{} released in", first.address);
    for function in [first, second] {
        let reset = format!("{} was reset in the place of the guest's VMM (hot reset", function.address);
        l1.prove(
            said.contains(&reset) && said.contains(&back) && !said.contains("tried again"),
            format!(
                "{} of a guest whose VMM was killed was reset along with its neighbour",
                function.address
            ),
        )
        .with_context(|| said.clone())?;
    }
    Ok(())
}

/// Enables two virtual functions of one card, and gives one of them to a guest. The other card has none.
fn virtual_functions(l1: &mut L1) -> Result<()> {
    let physical = Function::find_all(IGB.0, IGB.1)?.pop().context("there is no igb")?;
    l1.prove(physical.driver().as_deref() == Some("igb"), format!("igb drives {}", physical.address))?;
    l1.vm_service(&["vfs", "create", &physical.address, "2"], TIMEOUT)?.succeeded()?;
    let found = Function::find_all(IGB_VF.0, IGB_VF.1)?;
    l1.prove(found.len() == 2, format!("it has virtual functions: {found:?}"))?;
    let function = &found[0];
    let driver = function.driver();
    l1.vm_service(&["explain", &function.address], TIMEOUT)?.succeeded()?;
    let ended =
        Guest::start(l1, &GuestPlan::bare("virtual", "pci", function))?.end(TIMEOUT)?.succeeded(l1)?;
    l1.prove(ended.console.contains("8086:10ca"), "a virtual function of igb is ready, and a guest has it")?;
    l1.prove(function.driver() == driver, format!("and afterwards its driver is {driver:?}, as before"))
}
