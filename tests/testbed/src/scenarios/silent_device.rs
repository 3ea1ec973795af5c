//! A device stops answering: at every step of `claim` and of `release`, and while a guest uses it. Each ends by itself and says what it
//! could not do. Once the device has power again, which has set up nothing in it, the commands that the error names, and `release`,
//! bring it back to its driver.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::agent::{
    Fate, Function, Guest, GuestPlan, L1, NvmeDisk, PortSlot, SAID, VM_SERVICE, Victim, kill_at, wait_until,
};
use crate::scenario::{Contents, Scenario, Variants};
use crate::scenarios::bare_edu::EDU;
use crate::scenarios::linux_nvme::{DISK, NVME, NVME_AND_EDU};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "silent-device",
    about: "a device that stops answering at any step of a claim or a release, or in a guest, keeps nothing waiting, and comes back",
    variants: Variants::Both,
    ports: 2,
    devices: NVME_AND_EDU,
    disks: DISK,
    memory_mib: 1024,
    deadline: Duration::from_secs(600),
    contents: Contents { bare_guest: true, ..Contents::NONE },
    l1,
    l2: None,
};

const TIMEOUT: Duration = Duration::from_secs(600);
const SEED: u64 = 0x7369_6c65_6e74;
const LEN: usize = 4096;
/// `vm-service`'s exit statuses.
const DONE: Option<i32> = Some(0);
const FAILED: Option<i32> = Some(1);
const BLOCKED: Option<i32> = Some(3);
/// How errors name a write to an attribute.
const BY_HAND: &str = "echo 1 > ";

fn l1(l1: &mut L1) -> Result<()> {
    let nvme = Function::find(NVME.0, NVME.1)?;
    NvmeDisk::of(&nvme)?.write_pattern(SEED, 0, LEN)?;
    in_a_guest(l1, &Function::find(EDU.0, EDU.1)?)?;
    sweep(l1, &nvme, &[], "claim")?;
    sweep(l1, &nvme, &["claim"], "release")
}

/// Silences a device that a guest has.
fn in_a_guest(l1: &mut L1, edu: &Function) -> Result<()> {
    let slot = PortSlot::of(edu)?;
    let mut guest = Guest::start(l1, &GuestPlan::bare("silenced", "spin", edu))?;
    guest.wait_for_log("attached in", TIMEOUT)?;
    let begun = Instant::now();
    slot.set_power(false)?;
    guest.wait_for_log(&format!("{} was lost while the guest ran", edu.address), TIMEOUT)?;
    wait_until("its release", TIMEOUT, || (!guest.holds_a_device()).then_some(()))?;
    l1.figure("from its last answer until its guest has it no more", begun.elapsed().as_secs_f64(), "s");
    l1.prove(guest.runs(), "the guest goes on without it").with_context(|| guest.log())?;
    slot.set_power(true)?;
    drop(guest);
    // Nothing is left to undo where the guest's process had released it.
    let released = l1.vm_service(&["release", &edu.address], TIMEOUT)?;
    let had_been = released.stderr.contains("is not claimed");
    ensure!(released.code == DONE || had_been, "{}", released.stderr);
    find_again(edu)?;
    settled(l1, edu, None)?;
    l1.proved("it is the host's again, as it was");
    Ok(())
}

/// Runs a command after others, with the device silenced before one of its calls after the other: each that reaches the device's
/// sysfs, the one after it, and every fourth of the rest, which only note what was done.
fn sweep(l1: &mut L1, nvme: &Function, before: &[&str], name: &str) -> Result<()> {
    let slot = PortSlot::of(nvme)?;
    let silenced = |l1: &mut L1, number| -> Result<Fate> {
        for name in before {
            l1.vm_service(&[name, &nvme.address], TIMEOUT)?.succeeded()?;
        }
        let mut command = Command::new(VM_SERVICE);
        command.args([name, &nvme.address]);
        kill_at(&mut command, number, Victim::Nobody, TIMEOUT, &mut || slot.set_power(false))
    };
    let Fate::Completed { calls } = silenced(l1, usize::MAX)? else { bail!("{name} was silenced too early") };
    // What completed is undone, if it was the claim.
    let undo = |l1: &mut L1| -> Result<()> {
        if before.is_empty() {
            l1.vm_service(&["release", &nvme.address], TIMEOUT)?.succeeded()?;
        }
        settled(l1, nvme, Some("nvme"))
    };
    undo(l1)?;
    let is_sysfs =
        |at: Option<usize>| at.and_then(|at| calls.get(at)).is_some_and(|call| call.contains("(/sys/"));
    let chosen =
        (0..calls.len()).filter(|&at| is_sysfs(Some(at)) || is_sysfs(at.checked_sub(1)) || at % 4 == 0);
    let (mut longest, mut silences, mut failures) = (Duration::ZERO, 0, 0);
    for at in chosen {
        let begun = Instant::now();
        let Fate::Killed { before: call, code, .. } = silenced(l1, at + 1)? else {
            // Its threads and helpers take turns as they come: it made fewer calls this time.
            undo(l1)?;
            continue;
        };
        longest = longest.max(begun.elapsed());
        let said = fs::read_to_string(SAID)?;
        l1.step(format!("{name} silenced before {call}: {code:?}, {}", said.trim()));
        let is_clear = match code {
            DONE => true,
            FAILED | BLOCKED => said.contains(&nvme.address),
            _ => false,
        };
        ensure!(is_clear && !said.contains("panicked"), "{name}, silenced before {call}: {code:?} {said}");
        (silences, failures) = (silences + 1, failures + u32::from(code != DONE));
        slot.set_power(true)?;
        come_back(l1, nvme, said).with_context(|| format!("{name}, silenced before {call}"))?;
    }
    l1.figure(&format!("{name}, silenced before its calls: the longest"), longest.as_secs_f64(), "s");
    l1.prove(failures > 0, format!("{name} ended each of {silences} times, {failures} of them with an error"))
}

/// Does what the last error says, that of `release` after the command, or the command's.
fn come_back(l1: &mut L1, nvme: &Function, said: String) -> Result<()> {
    let released = l1.vm_service(&["release", &nvme.address], TIMEOUT)?;
    let was_released = released.code == DONE || released.stderr.contains("is not claimed");
    let last = if released.stderr.contains(BY_HAND) { released.stderr } else { said };
    for command in last.split(BY_HAND).skip(1) {
        let attribute = command.split([';', '\n', ' ']).next().unwrap_or_default();
        fs::write(attribute, "1").with_context(|| format!("what it says can't be done: {attribute}"))?;
    }
    if !last.contains(BY_HAND) {
        // It had been released before, and then its driver lost it.
        ensure!(was_released, "nothing is said of what to do: {last}");
        find_again(nvme)?;
    }
    if !was_released {
        l1.vm_service(&["release", &nvme.address], TIMEOUT)?.succeeded().with_context(|| last.clone())?;
    }
    settled(l1, nvme, Some("nvme")).with_context(|| last)?;
    NvmeDisk::of(nvme)?.check_pattern(SEED, 0, LEN).map(drop)
}

/// Has Linux set up a function that has lost what was set up.
fn find_again(function: &Function) -> Result<()> {
    fs::write(function.path().join("remove"), "1")?;
    Ok(fs::write("/sys/bus/pci/rescan", "1")?)
}

/// Checks that nothing is claimed, and that the host has the function as before.
fn settled(l1: &mut L1, function: &Function, driver: Option<&str>) -> Result<()> {
    wait_until("its driver", TIMEOUT, || (function.driver().as_deref() == driver).then_some(()))?;
    let restriction = function.attribute("driver_override");
    ensure!(restriction.as_deref() == Some("(null)"), "driver_override is {restriction:?}");
    let claims = l1.vm_service(&["claims"], TIMEOUT)?.succeeded()?.stdout;
    ensure!(!claims.contains(&function.address), "something is left: {claims}");
    Ok(())
}
