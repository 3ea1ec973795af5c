//! A Linux guest gets an NVMe disk and loses it, again and again: no process of it is left with more descriptors or mappings
//! than after the first time.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process};

use crate::agent::{Function, Guest, GuestPlan, L1, L2, NvmeDisk, VM_SERVICE, wait_until};
use crate::report::Report;
use crate::scenario::{Scenario, Variants};
use crate::scenarios::hot_attach;
use crate::scenarios::linux_nvme::NVME;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "hot-attach-cycles",
    about: "a Linux guest gets and loses a disk again and again, and nothing of that is left in its processes",
    variants: Variants::Both,
    l1,
    l2: Some(l2),
    ..hot_attach::SCENARIO
};

/// How many, and how many in a part of the sweep. [`bench_hot_attach`](super::bench_hot_attach) has 100.
const CYCLES: [usize; 2] = [10, 3];
const TIMEOUT: Duration = Duration::from_secs(600);
const SEED: u64 = 0x686f_742d_706c;
const LEN: usize = 64 << 10;

fn l1(l1: &mut L1) -> Result<()> {
    let nvme = Function::find(NVME.0, NVME.1)?;
    write_pattern(&nvme)?;
    let mut daemon = Daemon::start()?;
    let cycles = CYCLES[usize::from(!l1.sweep.is_whole())];
    for (process, [first, last]) in wear(l1, &nvme, cycles)? {
        l1.prove(
            (first.descriptors, first.mappings) == (last.descriptors, last.mappings),
            format!("the {process} after the first cycle has {first:?}, and after {cycles} more {last:?}"),
        )?;
    }
    daemon.end()?;
    l1.prove(nvme.driver().as_deref() == Some("nvme"), "the host's driver has the disk")
}

/// Writes what the guest is to read each time.
pub(super) fn write_pattern(nvme: &Function) -> Result<()> {
    NvmeDisk::of(nvme)?.write_pattern(SEED, 0, LEN).map(drop)
}

/// What a process has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Footprint {
    pub(super) descriptors: usize,
    pub(super) mappings: usize,
    /// Resident memory, the guest's among it.
    pub(super) kib: usize,
}

impl Footprint {
    fn of(pid: u32) -> Result<Self> {
        let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}"));
        let status = read("status")?;
        let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = kib.and_then(|line| line.split_whitespace().next()).context("no VmRSS")?;
        Ok(Self {
            descriptors: std::fs::read_dir(format!("/proc/{pid}/fd"))?.count(),
            mappings: read("maps")?.lines().count(),
            kib: kib.parse()?,
        })
    }
}

/// Has a guest get and lose the disk once, and `cycles` times more, by surprise: Linux waits for 5 s when it is asked. Returns
/// what its processes have after the first time, as that is kept for the next, and after the last.
pub(super) fn wear(
    l1: &mut L1,
    nvme: &Function,
    cycles: usize,
) -> Result<[(&'static str, [Footprint; 2]); 2]> {
    let name = "worn";
    let cmdline = format!("cycles={}", cycles + 1);
    let plan = GuestPlan { arguments: PATIENT, ..without_device(name, nvme, &cmdline) };
    let mut guest = Guest::start(l1, &plan)?;
    wait_for(&mut guest, "ready")?;
    let cycle = |l1: &mut L1, guest: &mut Guest, number: usize| -> Result<[Footprint; 2]> {
        l1.vm_service(&["attach", &nvme.address, "--guest", name], TIMEOUT)?.succeeded()?;
        wait_for(guest, &format!("used {number}"))?;
        l1.vm_service(&["detach", &nvme.address, "--surprise"], TIMEOUT)?.succeeded()?;
        wait_for(guest, &format!("gone {number}"))?;
        Ok([Footprint::of(guest.pid())?, Footprint::of(guest.vmm()?)?])
    };
    let first = cycle(l1, &mut guest, 0)?;
    let mut last = first;
    for number in 1..=cycles {
        last = cycle(l1, &mut guest, number)?;
    }
    end(l1, guest, press_power_button)?;
    Ok([("keeper", [first[0], last[0]]), ("VMM", [first[1], last[1]])])
}

/// Arguments of `vm-service run`: a guest has all the time that it needs to power itself off.
pub(super) const PATIENT: &[&str] = &["--shutdown-timeout", "600"];

/// Presses the power button of a guest that `vm-service run` runs.
pub(super) fn press_power_button(guest: &Guest) -> Result<()> {
    let process = Pid::from_raw(guest.pid().cast_signed()).context("it has no process")?;
    Ok(kill_process(process, Signal::TERM)?)
}

/// Ends a guest, whose agent waits for the power button after its last cycle. If the guest powered itself off instead, its VMM could end
/// before it has reported the last removal.
pub(super) fn end(l1: &mut L1, mut guest: Guest, press: impl FnOnce(&Guest) -> Result<()>) -> Result<()> {
    wait_for(&mut guest, "power-button")?;
    press(&guest).map_err(|error| guest.explain(error))?;
    guest.end(TIMEOUT)?.succeeded(l1).map(drop)
}

pub(super) fn without_device<'a>(name: &'a str, nvme: &'a Function, cmdline: &'a str) -> GuestPlan<'a> {
    GuestPlan { devices: Vec::new(), cmdline, ..GuestPlan::linux(name, nvme) }
}

/// Waits until the guest's agent has reported a value of this name, and returns when that was.
pub(super) fn wait_for(guest: &mut Guest, what: &str) -> Result<Duration> {
    let is_it = |report: &Report| matches!(report, Report::Value { name, .. } if name == what).then_some(());
    Ok(guest.wait_for(what, TIMEOUT, is_it)?.0)
}

/// The daemon, in L1.
pub(super) struct Daemon(Child);

impl Daemon {
    pub(super) fn start() -> Result<Self> {
        let daemon = Command::new(VM_SERVICE).arg("serve").stdin(Stdio::null()).spawn();
        let daemon = Self(daemon.context("can't start the daemon")?);
        let ready = || Command::new(VM_SERVICE).arg("guests").stdout(Stdio::null()).status().ok();
        wait_until("the daemon", TIMEOUT, || ready().filter(std::process::ExitStatus::success))?;
        Ok(daemon)
    }

    pub(super) fn end(&mut self) -> Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }
}

pub(super) fn l2(l2: &mut L2) -> Result<()> {
    let cycles: usize = l2.parameter("cycles")?.parse()?;
    let mut tell = |what: String| l2.report(&Report::Value { name: what, value: String::new() });
    tell("ready".into());
    for cycle in 0..cycles {
        let nvme = wait_until("the device", TIMEOUT, || Function::find(NVME.0, NVME.1).ok())?;
        tell(format!("seen {cycle}"));
        NvmeDisk::of(&nvme)?.check_pattern(SEED, 0, LEN)?;
        tell(format!("used {cycle}"));
        wait_until("the device to go", TIMEOUT, || Function::find(NVME.0, NVME.1).is_err().then_some(()))?;
        tell(format!("gone {cycle}"));
    }
    l2.await_power_button(TIMEOUT)
}
