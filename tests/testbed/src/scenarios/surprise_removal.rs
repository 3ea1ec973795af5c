//! A disk is pulled out while a Linux guest writes to it: the guest's writes fail and it lives on, the host has nothing of it left, and
//! another guest does not notice.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::agent::{Function, Guest, GuestPlan, L1, L2, NvmeDisk, PortSlot, wait_until};
use crate::report::Report;
use crate::scenario::{Contents, Scenario, Variants};
use crate::scenarios::bare_edu::EDU;
use crate::scenarios::host_wants_back::{DEVICES, DISKS, Others};
use crate::scenarios::linux_nvme::NVME;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "surprise-removal",
    about: "a disk that is pulled out while a guest writes to it is gone for guest and host, and nothing else is",
    variants: Variants::Both,
    ports: 6,
    devices: DEVICES,
    disks: DISKS,
    memory_mib: 1536,
    deadline: Duration::from_secs(600),
    contents: Contents { bare_guest: true, linux_guest: true, ..Contents::NONE },
    l1,
    l2: Some(l2),
};

const TIMEOUT: Duration = Duration::from_secs(600);
const LEN: usize = 1 << 20;
const WRITES: &str = "it writes to its disk";

fn l1(l1: &mut L1) -> Result<()> {
    let nvmes = Function::find_all(NVME.0, NVME.1)?;
    let nvme = nvmes.first().context("there is no disk")?;
    let slot = PortSlot::of(nvme)?;
    let edu = Function::find_all(EDU.0, EDU.1)?.pop().context("there is no other device")?;
    let others = Others::start(l1, &edu)?;
    let mut guest = Guest::start(l1, &GuestPlan::linux("pulled", nvme))?;
    let writes = |report: &Report| matches!(report, Report::Proved { what } if what == WRITES).then_some(());
    guest.wait_for(WRITES, TIMEOUT, writes)?;
    let pulled = Instant::now();
    slot.pull()?;
    wait_until("the guest's letting go", TIMEOUT, || (!guest.holds_a_device()).then_some(()))?;
    l1.figure("until the guest's process holds the disk no more", pulled.elapsed().as_secs_f64(), "s");
    wait_until("its going", TIMEOUT, || (!nvme.path().exists()).then_some(()))?;
    l1.figure("until Linux of the host has it no more", pulled.elapsed().as_secs_f64(), "s");
    wait_until("the ledger", TIMEOUT, || {
        let claims = l1.vm_service(&["claims"], TIMEOUT).ok()?;
        (claims.code == Some(0) && !claims.stdout.contains(&nvme.address)).then_some(())
    })?;
    l1.figure("until nothing of it is claimed", pulled.elapsed().as_secs_f64(), "s");
    let ended = guest.end(TIMEOUT)?;
    for (_, report) in &ended.reports {
        if let Report::Proved { what } = report {
            l1.proved(format!("in the guest: {what}"));
        }
    }
    let said = ended.process.stderr;
    l1.prove(
        ended.reports.iter().any(|(_, report)| *report == Report::Passed) && !said.contains("panicked"),
        "the guest goes on to its own end",
    )
    .with_context(|| said.clone())?;
    let lost = format!("{} was lost while the guest ran", nvme.address);
    l1.prove(said.contains(&lost), format!("its process says that {lost}")).with_context(|| said)?;
    others.end(l1)?;
    l1.proved("the other guest's device works as ever");
    // As it was, for what comes after.
    l1.monitor("device_add nvme,id=nvme0,drive=drive0,serial=testbed,bus=port0");
    wait_until("the disk in its slot", TIMEOUT, || (nvme.driver().as_deref() == Some("nvme")).then_some(()))?;
    l1.proved("what is put into the slot then works as ever");
    Ok(())
}

fn l2(l2: &mut L2) -> Result<()> {
    let nvme = Function::find(NVME.0, NVME.1)?;
    let disk = NvmeDisk::of(&nvme)?;
    let mut seeds = 0..;
    let mut write = || disk.write_pattern(seeds.next().unwrap_or_default(), 0, LEN);
    write()?;
    l2.prove(true, WRITES)?;
    let error = loop {
        if let Err(error) = write() {
            break error;
        }
    };
    l2.prove(true, format!("the write that was under way failed: {error:#}"))?;
    wait_until("its going", TIMEOUT, || Function::find(NVME.0, NVME.1).is_err().then_some(()))?;
    l2.prove(true, "it sees that the disk is gone")
}
