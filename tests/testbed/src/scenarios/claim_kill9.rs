//! `kill -9` at every step: `claim`, `release` and `run` are killed before each of their calls that change something,
//! and each time the next `release`, or the next claim, finds its way back to the former driver.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::agent::{Fate, Function, L1, NvmeDisk, Victim, kill_at};
use crate::scenario::{Contents, Disk, Scenario, Variant};
use crate::scenarios::linux_nvme::NVME;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "claim-kill9",
    about: "claim, release and run, killed before each changing system call, leave nothing that can't be undone",
    variants: Variant::ALL,
    devices: &[
        "-device",
        "pcie-root-port,id=port0,chassis=1,addr=4.0",
        "-drive",
        "file={disk},if=none,id=drive0,format=raw,cache=unsafe",
        "-device",
        "nvme,drive=drive0,serial=testbed,bus=port0",
    ],
    disks: &[Disk { name: "disk", mib: 16 }],
    memory_mib: 1024,
    deadline: Duration::from_secs(900),
    contents: Contents { linux_guest: false, bare_guest: true, qemu: false, example: false },
    l1,
    l2: None,
};

const PATIENCE: Duration = Duration::from_secs(40);
const SEED: u64 = 0x6b69_6c6c_2139;
const LEN: usize = 4096;
/// No command makes so many calls that change something.
const MOST: usize = 1000;
const GUEST: &str = "/tmp/killed.toml";

fn l1(l1: &mut L1) -> Result<()> {
    let nvme = Function::find(NVME.0, NVME.1)?;
    NvmeDisk::of(&nvme)?.write_pattern(SEED, 0, LEN)?;
    std::fs::write(
        GUEST,
        "name = \"killed\"\nmemory = \"32M\"\n\n[boot]\nkernel = \"/guest/bare\"\ncmdline = \"hello\"\n",
    )?;
    let claim = ["claim", &nvme.address];
    let release = ["release", &nvme.address];
    let run = ["run", GUEST, "--console", "none", "--device", &nvme.address];
    kill_at_every_call(l1, &nvme, &[], &claim)?;
    kill_at_every_call(l1, &nvme, &claim, &release)?;
    kill_at_every_call(l1, &nvme, &[], &run)
}

/// Runs `arguments`, after `before` where it is not empty, until it completes unkilled.
fn kill_at_every_call(l1: &mut L1, nvme: &Function, before: &[&str], arguments: &[&str]) -> Result<()> {
    let name = arguments[0];
    for number in 1..MOST {
        // Taking turns: the process alone, or its helpers too; and the two ways back.
        let victim = if number % 2 == 0 { Victim::All } else { Victim::Process };
        if !before.is_empty() {
            l1.vm_service(before, PATIENCE)?.succeeded()?;
        }
        let mut command = Command::new("/bin/vm-service");
        let fate = kill_at(command.args(arguments), number, victim, PATIENCE)
            .with_context(|| format!("{name}, call {number}"))?;
        let at = match &fate {
            Fate::Killed { before } => {
                format!("{name} killed before its call {number}, {before} ({victim:?})")
            }
            Fate::Completed { calls } => format!("{name} completed with {calls} calls"),
        };
        l1.step(at.clone());
        come_back(l1, nvme, number % 4 < 2).with_context(|| at)?;
        if let Fate::Completed { calls } = fate {
            ensure!(
                calls > 3,
                "{name} made only {calls} calls that change something; the count must be wrong"
            );
            l1.figure(&format!("{name}, killed before each of its calls"), calls as f64, "calls");
            l1.proved(format!(
                "{name}: after a kill before each of its {calls} changing calls all was restored"
            ));
            return Ok(());
        }
    }
    bail!("{name} did not complete within {MOST} calls")
}

/// Finds the way back, by `release` or by the next claim, and checks that the host is as it was.
fn come_back(l1: &mut L1, nvme: &Function, by_release: bool) -> Result<()> {
    let mut said = Vec::new();
    if !by_release {
        // A claim finds what was left, undoes it, and then claims; or says that a claim is in place.
        let next = l1.vm_service(&["claim", &nvme.address], PATIENCE)?;
        said.push(format!("claim: {:?} {}", next.code, next.stderr.trim()));
    }
    let released = l1.vm_service(&["release", &nvme.address], PATIENCE)?;
    said.push(format!("release: {:?} {}", released.code, released.stderr.trim()));
    let said = said.join("; ");
    ensure!(nvme.driver().as_deref() == Some("nvme"), "the driver is {:?}, not nvme; {said}", nvme.driver());
    let restriction = nvme.attribute("driver_override");
    ensure!(restriction.as_deref() == Some("(null)"), "driver_override is {restriction:?}; {said}");
    NvmeDisk::of(nvme).and_then(|disk| disk.check_pattern(SEED, 0, LEN)).with_context(|| said)?;
    Ok(())
}
