//! A process that holds a function open makes unbinding it block in the Linux kernel: `release` must not hang, must
//! name the process and the file, and must succeed when the process has gone.

use std::time::Duration;

use anyhow::{Context, Result};

use crate::agent::{Function, Holder, L1, NvmeDisk, wait_until};
use crate::scenario::{Contents, Scenario, Variants};
use crate::scenarios::linux_nvme::{DISK, NVME, NVME_AND_EDU};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "unbind-stuck",
    about: "release of a function that a process holds open ends in time and names process and file",
    variants: Variants::Both,
    ports: 2,
    devices: NVME_AND_EDU,
    disks: DISK,
    memory_mib: 768,
    deadline: Duration::from_secs(1800),
    contents: Contents::NONE,
    l1,
    l2: None,
};

/// Longer than an operator may have to wait for the answer, on a machine that has much else to do.
const ANSWER: Duration = Duration::from_secs(600);
const SEED: u64 = 0x7374_7563_6b21;

fn l1(l1: &mut L1) -> Result<()> {
    let nvme = Function::find(NVME.0, NVME.1)?;
    NvmeDisk::of(&nvme)?.write_pattern(SEED, 0, 4096)?;
    l1.vm_service(&["claim", &nvme.address], ANSWER)?.succeeded()?;
    let holder = Holder::start(&nvme, l1.variant)?;

    let stuck = l1.vm_service(&["release", &nvme.address], ANSWER)?;
    l1.prove(stuck.code == Some(1), format!("release fails while the device is held ({:?})", stuck.code))?;
    l1.figure("release of a held function, until its answer", stuck.took.as_secs_f64(), "s");
    let said = &stuck.stderr;
    l1.prove(said.contains(&holder.pid().to_string()), format!("it names the process, {}", holder.pid()))
        .with_context(|| format!("it said: {said}"))?;
    l1.prove(said.contains(&holder.node), format!("it names the file, {}", holder.node))
        .with_context(|| format!("it said: {said}"))?;

    // A second manager is not locked out by the first one's stuck write, and hangs no more than it did.
    let again = l1.vm_service(&["release", &nvme.address], ANSWER)?;
    l1.prove(again.code == Some(1), "a second release, while the first's write is stuck, answers too")?;

    // Neither does it keep anybody from looking: reading some attributes would wait for the stuck function's lock.
    for look in [&["list", "--all"][..], &["info", &nvme.address], &["explain", &nvme.address]] {
        let answer = l1.vm_service(look, ANSWER)?;
        l1.prove(answer.code.is_some(), format!("{} answers while the unbind is stuck", look.join(" ")))?;
        l1.figure(&format!("{} while an unbind is stuck", look[0]), answer.took.as_secs_f64(), "s");
    }

    drop(holder);
    let released = wait_until("the release after the holder has gone", ANSWER, || {
        let released = l1.vm_service(&["release", &nvme.address], ANSWER).ok()?;
        (nvme.driver().as_deref() == Some("nvme")).then_some(released)
    })?;
    l1.proved(format!(
        "after the holder has gone the nvme driver has it again (release: {:?})",
        released.code
    ));
    let restriction = nvme.attribute("driver_override");
    l1.prove(restriction.as_deref() == Some("(null)"), "and it is unrestricted")?;
    NvmeDisk::of(&nvme)?.check_pattern(SEED, 0, 4096)?;

    l1.vm_service(&["claim", &nvme.address], ANSWER)?.succeeded()?;
    l1.vm_service(&["release", &nvme.address], ANSWER)?.succeeded()?;
    l1.prove(nvme.driver().as_deref() == Some("nvme"), "claim and release work as before")
}
