//! Two guests at once, each with a device of its own: a bare guest with edu, and a Linux guest with an NVMe disk. Each
//! sees its own device only, and the bare guest's device can't reach the Linux guest's memory.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::agent::{Canary, Function, Guest, GuestPlan, L1, L2, NvmeDisk, ProcessMemory};
use crate::report::Report;
use crate::scenario::{Contents, Scenario, Variants};
use crate::scenarios::bare_edu::EDU;
use crate::scenarios::linux_nvme::{DISK, NVME, NVME_AND_EDU};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "two-guests",
    about: "two guests at once, each with its device, each blind to the other's device and memory",
    variants: Variants::Both,
    ports: 2,
    devices: NVME_AND_EDU,
    disks: DISK,
    memory_mib: 1536,
    deadline: Duration::from_secs(1800),
    contents: Contents { linux_guest: true, bare_guest: true, ..Contents::NONE },
    l1,
    l2: Some(l2),
};

const TIMEOUT: Duration = Duration::from_secs(600);
/// The bare guest's RAM: an address below is its own.
const BARE_RAM: u64 = 32 << 20;
const LINUX_RAM_MIB: u32 = 256;
const HIDDEN: &str = "hidden-page";
const LEN: usize = 64 << 10;
const SEED: u64 = 0x7477_6f21;
/// How long the Linux guest works on its disk, at least.
const WORK: Duration = Duration::from_secs(25);

fn l1(l1: &mut L1) -> Result<()> {
    let (nvme, edu) = (Function::find(NVME.0, NVME.1)?, Function::find(EDU.0, EDU.1)?);
    let mut linux =
        Guest::start(l1, &GuestPlan { memory_mib: LINUX_RAM_MIB, ..GuestPlan::linux("linux", &nvme) })?;
    let (_, hidden) = linux.wait_for("the address of its hidden page", TIMEOUT, |report| match report {
        Report::Value { name, value } if name == HIDDEN => u64::from_str_radix(value, 16).ok(),
        _ => None,
    })?;
    // Where that page of the Linux guest is for the host: in the process, and in the machine.
    let memory = ProcessMemory::of(linux.vmm()?, u64::from(LINUX_RAM_MIB) << 20)?;
    l1.prove(memory.is_canary(hidden)?, format!("the host finds the Linux guest's page {hidden:#x}"))?;
    let target = memory.physical(hidden)?;
    l1.prove(target >= BARE_RAM, format!("it lies at {target:#x}, which is not the bare guest's own RAM"))?;

    let bare =
        Guest::start(l1, &GuestPlan::bare("bare", &format!("edu msis=200 outside={target:#x}"), &edu))?;
    bare.end(TIMEOUT)?.succeeded(l1)?;
    l1.prove(linux.runs(), "the Linux guest ran all the while")?;
    l1.prove(
        memory.is_canary(hidden)?,
        "its page is unchanged, though the other guest's device aimed at it",
    )?;
    let seen = Guest::start(l1, &GuestPlan::bare("looks", "pci", &edu))?.end(TIMEOUT)?.succeeded(l1)?;
    l1.prove(
        seen.console.contains("1234:11e8") && !seen.console.contains("1b36:0010"),
        "the bare guest sees its edu and not the other's disk",
    )?;
    linux.end(TIMEOUT)?.succeeded(l1)?;
    l1.prove(nvme.driver().as_deref() == Some("nvme"), "the host has the disk again")?;
    NvmeDisk::of(&nvme)?.check_pattern(SEED, 0, LEN)?;
    Ok(())
}

fn l2(l2: &mut L2) -> Result<()> {
    let nvme = Function::find(NVME.0, NVME.1)?;
    l2.prove(
        Function::find_all(EDU.0, EDU.1)?.is_empty(),
        "the other guest's edu is not on this guest's bus",
    )?;
    let canary = Canary::above(0)?;
    l2.report(&Report::Value { name: HIDDEN.into(), value: format!("{:x}", canary.physical()) });
    let disk = NvmeDisk::of(&nvme)?;
    let start = Instant::now();
    let mut rounds = 0;
    while start.elapsed() < WORK {
        rounds += 1;
        disk.write_pattern(SEED + rounds, 1 << 20, LEN)?;
        disk.check_pattern(SEED + rounds, 1 << 20, LEN).with_context(|| format!("round {rounds}"))?;
    }
    disk.write_pattern(SEED, 0, LEN)?;
    l2.prove(rounds > 1, "the guest wrote and read its disk all the while")?;
    l2.prove(canary.unchanged(), "the guest's hidden memory is unchanged")
}
