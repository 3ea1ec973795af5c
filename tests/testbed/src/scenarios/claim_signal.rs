//! A signal at every step of `claim`: it is sent SIGTERM before each of its calls that change something, and releases what it
//! has taken by then. No other command has to.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::agent::{At, Fate, Function, L1, NvmeDisk, Victim, kill_at};
use crate::scenario::{Contents, Scenario, Variant, Variants};
use crate::scenarios::linux_nvme::{DISK, NVME, NVME_AND_EDU};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "claim-signal",
    about: "claim, asked to end before each changing system call, has released what it took when it ends",
    variants: Variants::Only(Variant::Iommufd),
    ports: 2,
    devices: NVME_AND_EDU,
    disks: DISK,
    memory_mib: 768,
    deadline: Duration::from_secs(1800),
    contents: Contents::NONE,
    l1,
    l2: None,
};

/// A part of the sweep has one of so many calls, beside the writes to sysfs.
const EVERY: usize = 8;
const TIMEOUT: Duration = Duration::from_secs(600);
/// It makes fewer calls that change something.
const MOST: usize = 300;
/// `vm-service`'s exit status when what was begun was undone.
const FAILED: i32 = 1;

fn l1(l1: &mut L1) -> Result<()> {
    let nvme = Function::find(NVME.0, NVME.1)?;
    let Fate::Completed { calls } = asked_at(l1, &nvme, At::Number(usize::MAX))? else {
        bail!("claim was asked to end, though nobody did")
    };
    l1.figure("claim, asked to end before its calls", calls.len() as f64, "calls");
    // Threads and helpers take turns as they come, so that a write is no certain call of these.
    for attribute in ATTRIBUTES {
        let fate = asked_at(l1, &nvme, At::Helper(&format!("{attribute})")))?;
        l1.prove(
            matches!(fate, Fate::Killed { .. }),
            format!("SIGTERM before the write to {attribute}: claim releases what it has taken"),
        )?;
    }
    // Past the last, until it completes: once more than it was seen to make.
    let sweep = l1.sweep;
    for at in (0..MOST).filter(|&at| at >= calls.len() || sweep.takes(at, EVERY)) {
        let number = at + 1;
        if let Fate::Completed { .. } =
            asked_at(l1, &nvme, At::Number(number)).with_context(|| format!("call {number}"))?
        {
            return Ok(());
        }
    }
    bail!("claim did not complete within {MOST} calls")
}

/// Claims, asked to end before a call, and gives back what is claimed then.
fn asked_at(l1: &mut L1, nvme: &Function, at: At<'_>) -> Result<Fate> {
    NvmeDisk::of(nvme)?;
    let mut command = Command::new("/bin/vm-service");
    let command = command.args(["claim", &nvme.address]);
    let fate = kill_at(command, at, Victim::Asked, TIMEOUT, &mut || Ok(()))?;
    match &fate {
        Fate::Killed { before, code, by_helper } => {
            let taken = ends(l1, nvme, *code).with_context(|| format!("SIGTERM before {before}"))?;
            l1.step(format!("SIGTERM before {before}: exit status {code:?}, taken: {taken}"));
            ensure!(!(*by_helper && taken), "SIGTERM before {before}: the claim went on");
        }
        Fate::Completed { .. } => {
            l1.vm_service(&["release", &nvme.address], TIMEOUT)?.succeeded()?;
        }
    }
    Ok(fate)
}

/// Checks that the function is claimed if `claim` says so, and else as it was; whether it is claimed. Gives it back.
fn ends(l1: &mut L1, nvme: &Function, code: Option<i32>) -> Result<bool> {
    let driver = nvme.driver();
    if code == Some(0) {
        // It was complete by then.
        ensure!(driver.as_deref() == Some("vfio-pci"), "claim succeeded, and the driver is {driver:?}");
        l1.vm_service(&["release", &nvme.address], TIMEOUT)?.succeeded()?;
        return Ok(true);
    }
    // `None`: it had not begun, and ended as every program does.
    ensure!(matches!(code, None | Some(FAILED)), "the exit status is {code:?}");
    ensure!(driver.as_deref() == Some("nvme"), "the driver is {driver:?}, not nvme");
    let restriction = nvme.attribute("driver_override");
    ensure!(restriction.as_deref() == Some("(null)"), "driver_override is {restriction:?}");
    let released = l1.vm_service(&["release", &nvme.address], TIMEOUT)?;
    ensure!(
        released.code == Some(FAILED) && released.stderr.contains("is not claimed"),
        "something was left to release: {}{}",
        released.stdout,
        released.stderr
    );
    Ok(false)
}

/// What is written to at each step of taking it.
const ATTRIBUTES: [&str; 3] = ["/driver_override", "/drivers/nvme/unbind", "/drivers/vfio-pci/bind"];
