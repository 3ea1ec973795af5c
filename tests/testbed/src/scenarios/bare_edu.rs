//! A bare guest owns QEMU's `edu` device: registers, DMA both ways, interrupts without exits, and no reach beyond its
//! own memory.

use std::time::Duration;

use anyhow::Result;

use crate::agent::{Canary, Function, Guest, GuestPlan, L1, kernel_log};
use crate::scenario::{Contents, Scenario, Variants};
use crate::scenarios::linux_nvme::{DISK, NVME_AND_EDU};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "bare-edu",
    about: "a bare guest drives edu: MMIO, DMA both ways, MSI and INTx with no exit; DMA outside its memory changes nothing",
    variants: Variants::Both,
    ports: 2,
    devices: NVME_AND_EDU,
    disks: DISK,
    memory_mib: 768,
    deadline: Duration::from_secs(1800),
    contents: Contents { bare_guest: true, ..Contents::NONE },
    l1,
    l2: None,
};

/// QEMU's `edu`.
pub(super) const EDU: (u16, u16) = (0x1234, 0x11e8);

/// The guest's RAM: 32 MiB, below which no canary may lie, or the guest would own its address.
const GUEST_RAM: u64 = 32 << 20;
const TIMEOUT: Duration = Duration::from_secs(600);

fn l1(l1: &mut L1) -> Result<()> {
    let edu = Function::find(EDU.0, EDU.1)?;
    let canary = Canary::above(GUEST_RAM)?;
    let faults_before = faults()?;
    let cmdline = format!("edu msis=200 pins=50 outside={:#x}", canary.physical());
    let guest = Guest::start(l1, &GuestPlan::bare("edu", &cmdline, &edu))?;
    let ended = guest.end(TIMEOUT)?.succeeded(l1)?;
    l1.prove(
        canary.unchanged(),
        format!("host memory at {:#x}, which the guest aimed at, is unchanged", canary.physical()),
    )?;
    l1.prove(faults()? > faults_before, "the IOMMU faulted the DMA outside the guest's memory")?;
    let exits_of_200 = ended.access_exits()?;

    // The same run with 1,000 interrupts more: what it exits more often is what interrupts cost.
    let cmdline = format!("edu msis=1200 pins=50 outside={:#x}", canary.physical());
    let guest = Guest::start(l1, &GuestPlan::bare("edu-more", &cmdline, &edu))?;
    let exits_of_1200 = guest.end(TIMEOUT)?.succeeded(l1)?.access_exits()?;
    l1.figure(
        "exits to user space per 1,000 interrupts",
        exits_of_1200 as f64 - exits_of_200 as f64,
        "exits",
    );
    l1.prove(
        exits_of_1200 == exits_of_200,
        format!("1,000 interrupts more cost no exit to user space ({exits_of_200} exits either way)"),
    )?;

    // And by its pin.
    let cmdline = format!("edu msis=200 pins=1050 outside={:#x}", canary.physical());
    let guest = Guest::start(l1, &GuestPlan::bare("edu-pin", &cmdline, &edu))?;
    let exits_of_1050 = guest.end(TIMEOUT)?.succeeded(l1)?.access_exits()?;
    l1.prove(
        exits_of_1050 == exits_of_200,
        format!("nor do 1,000 more by INTx, each served once ({exits_of_1050} exits)"),
    )?;
    l1.prove(edu.driver().is_none(), format!("{} is without a driver again, as before", edu.address))
}

/// How many faults the IOMMU has reported.
fn faults() -> Result<usize> {
    Ok(kernel_log()?.lines().filter(|line| line.contains("DMAR") && line.contains("fault")).count())
}
