//! Processes of guests that have devices die or hang: a guest's VMM, its keeper, and a VMM that is to stop. The devices are reset, and
//! work for the host and for the next guest; what a guest had written is there. A guest that is reset, or crashes, keeps its device.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::bare_edu::EDU;
use super::linux_nvme::{DISK, NVME, NVME_AND_EDU};
use crate::agent::{Function, Guest, GuestPlan, L1, NvmeDisk, VM_SERVICE, processes, wait_until};
use crate::scenario::{Contents, Scenario, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "vmm-killed",
    about: "a guest's VMM or keeper is killed, or hangs, while the guest uses its device: that is reset, and works for host and guests",
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

const TIMEOUT: Duration = Duration::from_secs(600);
/// A VMM has 40 s to end its guest, and is killed then.
const STOPPED: Duration = Duration::from_secs(200);
const LEN: usize = 64 << 10;
const SEED: u64 = 0x006b_696c_6c65_6421;
const BLOCK: u64 = 512;
const FROM: u64 = 1 << 20;
/// Where one guest after the other has copied to.
const TO: [u64; 3] = [16 << 20, 32 << 20, 48 << 20];

fn l1(l1: &mut L1) -> Result<()> {
    let (nvme, edu) = (Function::find(NVME.0, NVME.1)?, Function::find(EDU.0, EDU.1)?);
    NvmeDisk::of(&nvme)?.write_pattern(SEED, FROM, LEN)?;
    let mut daemon = Command::new(VM_SERVICE).arg("serve").stdin(Stdio::null()).spawn()?;
    wait_until("the daemon", TIMEOUT, || {
        l1.vm_service(&["guests"], TIMEOUT).ok().filter(|asked| asked.code == Some(0))
    })?;

    // It takes its time, in which the rest is done.
    let mut stuck = Guest::start(l1, &GuestPlan::bare("stuck", "spin", &edu))?;
    stuck.wait_for_log("attached in", TIMEOUT)?;
    crashes(l1, &nvme)?;
    l1.prove(stuck.runs() && stuck.holds_a_device(), "another guest runs on, with its device")?;
    signal(stuck.vmm()?, Signal::STOP)?;
    let stop = Command::new(VM_SERVICE)
        .args(["stop", "stuck", "--now"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;

    let mut guest = copies(l1, &nvme, "reset", TO[0])?;
    l1.vm_service(&["reset", "reset"], TIMEOUT)?.succeeded()?;
    guest.wait_for_texts("bare: enable ok", 2, TIMEOUT)?;
    guest.wait_for_log("the guest restarts", TIMEOUT)?;
    l1.proved("a guest that is reset has its device at once, as new");

    signal(guest.vmm()?, Signal::KILL)?;
    let ended = guest.end(TIMEOUT)?.process;
    l1.prove(
        ended.code == Some(1)
            && ended.stderr.contains("the guest's VMM was killed; see its messages in the log"),
        "its keeper fails when the VMM is killed, and says so",
    )
    .with_context(|| ended.stderr.clone())?;
    has_reset(l1, &nvme, &ended.stderr)?;
    has_copied(l1, &nvme, TO[0])?;

    let guest = copies(l1, &nvme, "orphan", TO[1])?;
    signal(guest.pid(), Signal::KILL)?;
    ensure!(guest.end(TIMEOUT)?.process.code.is_none(), "it was not killed");
    let left = || processes("guest-vmm").len() == 1;
    wait_until("the VMM's end with its keeper", TIMEOUT, || left().then_some(()))?;
    let back = || (nvme.driver().as_deref() == Some("nvme")).then_some(());
    wait_until("the daemon's giving back what it had", TIMEOUT, back)?;
    has_copied(l1, &nvme, TO[1])?;

    let plan = copying(TO[2], "");
    Guest::start(l1, &GuestPlan::bare("next", &plan, &nvme))?.end(TIMEOUT)?.succeeded(l1)?;
    has_copied(l1, &nvme, TO[2])?;

    let ended = stuck.end(STOPPED)?.process;
    l1.prove(
        ended.code == Some(1) && ended.stderr.contains("as it did not end the guest within 40 s"),
        "a VMM that does not end its guest is killed",
    )
    .with_context(|| ended.stderr.clone())?;
    has_reset(l1, &edu, &ended.stderr)?;
    let stopped = stop.wait_with_output()?;
    let said = String::from_utf8_lossy(&stopped.stdout);
    l1.prove(
        stopped.status.success() && said.contains("its process failed"),
        format!("who stops it gets the reason: {}", said.trim()),
    )
    .with_context(|| String::from_utf8_lossy(&stopped.stderr).into_owned())?;
    let next = GuestPlan::bare("after", "edu msis=20", &edu);
    Guest::start(l1, &next)?.end(TIMEOUT)?.succeeded(l1)?;
    let left = l1.vm_service(&["claims", "--json"], TIMEOUT)?.succeeded()?.json()?;
    l1.prove(left["claims"].as_array().is_some_and(Vec::is_empty), "nothing is left claimed")?;
    daemon.kill().and_then(|()| daemon.wait())?;
    Ok(())
}

/// Has a guest copy blocks of the disk and then make a triple fault: one that restarts after it, and one that does not.
fn crashes(l1: &mut L1, nvme: &Function) -> Result<()> {
    let plan = copying(TO[0], "crash ");
    let plan = GuestPlan::bare("crashes", &plan, nvme);
    let mut guest = Guest::start(l1, &plan)?;
    guest.wait_for_texts("bare: copy ok", 2, TIMEOUT)?;
    guest.wait_for_log("the guest crashed (triple fault)", TIMEOUT)?;
    signal(guest.pid(), Signal::TERM)?;
    let ended = guest.end(TIMEOUT)?.process;
    l1.prove(ended.code == Some(0), "a guest that crashes restarts, and has its device as new")
        .with_context(|| ended.stderr)?;

    let ended = Guest::start(l1, &GuestPlan { arguments: &["--no-reboot"], ..plan })?.end(TIMEOUT)?;
    let said = ended.process.stderr;
    l1.prove(
        ended.process.code == Some(1) && said.contains("the guest crashes crashed (triple fault)"),
        "one that is not to restart ends, and its process says why",
    )
    .with_context(|| said.clone())?;
    // It would say so if the device could not be shown to be reset.
    let released = format!("{} released in", nvme.address);
    ensure!(said.contains(&released) && !said.contains("tried again") && !said.contains("ERROR"), "{said}");
    has_copied(l1, nvme, TO[0])
}

/// Starts a guest that copies blocks of the disk for ever, and waits until all of them were copied.
fn copies(l1: &mut L1, nvme: &Function, name: &'static str, to: u64) -> Result<Guest> {
    let mut guest = Guest::start(l1, &GuestPlan::bare(name, &copying(to, "stay "), nvme))?;
    guest.wait_for_text("bare: copy ok", TIMEOUT)?;
    Ok(guest)
}

fn copying(to: u64, stay: &str) -> String {
    format!("nvme {stay}from={} to={} blocks={}", FROM / BLOCK, to / BLOCK, LEN as u64 / BLOCK)
}

fn has_copied(l1: &mut L1, nvme: &Function, to: u64) -> Result<()> {
    let driver = nvme.driver();
    ensure!(driver.as_deref() == Some("nvme"), "the host's driver of {} is {driver:?}", nvme.address);
    let got = NvmeDisk::of(nvme)?.check_pattern(SEED, to, LEN)?;
    l1.proved(format!("the host's driver has the disk with what the guest copied, checksum {got:016x}"));
    Ok(())
}

/// Whether a keeper said that it reset a device by itself, and gave it back.
fn has_reset(l1: &mut L1, function: &Function, said: &str) -> Result<()> {
    let address = &function.address;
    let (reset, given_back) =
        (format!("{address} was reset in the place of the guest's VMM"), format!("{address} released in"));
    l1.prove(
        said.contains(&reset) && said.contains(&given_back) && !said.contains("tried once more"),
        format!("{address} was reset by the keeper, which proves that, and released"),
    )
    .with_context(|| said.to_owned())
}

/// Sends a signal to a process.
pub(super) fn signal(process: u32, signal: Signal) -> Result<()> {
    let process = Pid::from_raw(process.cast_signed()).context("no process id")?;
    Ok(kill_process(process, signal)?)
}
