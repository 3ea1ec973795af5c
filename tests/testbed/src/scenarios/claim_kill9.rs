//! `kill -9` at every step: `claim`, `release` and `run` are killed before each of their calls that change something,
//! and each time the next `release`, or the next claim, finds its way back to the former driver. A call after one that leaves
//! nothing behind, as fsync or a lock, is passed over: a kill there leaves what one before it did. `run` claims and releases as
//! the commands do: of the calls before which these were killed it is killed before every fourth only.
//!
//! Writes to sysfs are made by helpers. Before each of them three things happen in turn: both are killed; the process is,
//! and its helper's write takes effect; and, as a helper may come late, the way back is tried while it is still to write.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::agent::{Fate, Function, L1, NvmeDisk, VM_SERVICE, Victim, kill_at, wait_until};
use crate::scenario::{Contents, Scenario, Variants};
use crate::scenarios::linux_nvme::{DISK, NVME, NVME_AND_EDU};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "claim-kill9",
    about: "claim, release and run, killed before each changing system call, leave nothing that can't be undone",
    variants: Variants::Both,
    ports: 2,
    devices: NVME_AND_EDU,
    disks: DISK,
    memory_mib: 1024,
    deadline: Duration::from_secs(1800),
    contents: Contents { bare_guest: true, ..Contents::NONE },
    l1,
    l2: None,
};

const TIMEOUT: Duration = Duration::from_secs(600);
const SEED: u64 = 0x6b69_6c6c_2139;
const LEN: usize = 4096;
const GUEST: &str = "/tmp/killed.toml";
/// Whoever changes a function has the file of its address in here open.
const LOCKS: &str = "/run/vm-passthrough/locks";
/// A part of the sweep has one of so many calls, and all writes to sysfs.
const EVERY: usize = 8;
/// Longer than a command takes that finds nobody at work.
const AT_WORK: Duration = Duration::from_secs(1);

fn l1(l1: &mut L1) -> Result<()> {
    let nvme = Function::find(NVME.0, NVME.1)?;
    NvmeDisk::of(&nvme)?.write_pattern(SEED, 0, LEN)?;
    fs::write(
        GUEST,
        "name = \"killed\"\nmemory = \"32M\"\n\n[boot]\nkernel = \"/guest/bare\"\ncmdline = \"hello\"\n",
    )?;
    let claim = ["claim", &nvme.address];
    let release = ["release", &nvme.address];
    let run = ["run", GUEST, "--console", "none", "--device", &nvme.address];
    let taking = ["/driver_override", "/drivers/nvme/unbind", "/drivers/vfio-pci/bind"];
    let giving = ["/drivers/vfio-pci/unbind", "/driver_override", "/drivers/nvme/bind"];
    let mut killings = Killings { l1, nvme: &nvme, deadline_seen: false, killed: BTreeSet::new() };
    killings.at_every_call(&[], &claim, &taking)?;
    killings.at_every_call(&claim, &release, &giving)?;
    killings.at_every_call(&[], &run, &[taking, giving].concat())
}

/// Commands that are killed, and what is left of them.
struct Killings<'a> {
    l1: &'a mut L1,
    nvme: &'a Function,
    /// Whether a release was seen to wait for a helper until its deadline.
    deadline_seen: bool,
    /// The calls before which a command was killed.
    killed: BTreeSet<String>,
}

impl Killings<'_> {
    /// Runs `arguments`, after `before` where it is not empty, killed before one call after the other. The writes to sysfs that
    /// helpers make must have been among those calls by then: those to `attributes`.
    fn at_every_call(&mut self, before: &[&str], arguments: &[&str], attributes: &[&str]) -> Result<()> {
        let name = arguments[0];
        let Fate::Completed { calls } = self.once(before, arguments, (usize::MAX, Victim::Process))? else {
            bail!("{name} was killed though nothing killed it")
        };
        let (tried, sweep) = (self.killed.clone(), self.l1.sweep);
        let is_chosen = |number: usize, call: &String| match tried.contains(call) {
            true => number.is_multiple_of(4) && sweep.takes(number / 4, 2),
            false => call.starts_with("write(/sys/") || sweep.takes(number, EVERY),
        };
        let (chosen, rest): (Vec<usize>, Vec<usize>) =
            (1..=calls.len()).partition(|&number| is_chosen(number, &calls[number - 1]));
        let mut kills = 0;
        for number in chosen {
            kills += self.at_call((before, arguments), number, !tried.contains(&calls[number - 1]))?;
        }
        // In a part of the sweep, as threads and helpers take turns, it may have been the one next to it.
        for number in rest {
            if self.missing(attributes).is_none() {
                break;
            }
            kills += self.at_call((before, arguments), number, false)?;
        }
        if let Some(attribute) = self.missing(attributes) {
            bail!("nothing was killed before a write to {attribute}, but before {:?}", self.killed);
        }
        self.l1.figure(&format!("{name}, killed before its calls"), f64::from(kills), "times");
        self.l1.proved(format!(
            "{name}: after each of {kills} kills before its {} changing calls all was restored",
            calls.len()
        ));
        self.l1.proved(format!("{name}: a helper that outlives it is waited for"));
        Ok(())
    }

    /// One of these attributes of sysfs before whose write nothing was killed.
    fn missing<'a>(&self, attributes: &[&'a str]) -> Option<&'a str> {
        let was_killed = |attribute: &str| {
            let wanted = format!("{attribute})");
            self.killed.iter().any(|call| call.starts_with("write(/sys/") && call.ends_with(&wanted))
        };
        attributes.iter().copied().find(|attribute| !was_killed(attribute))
    }

    /// Runs a command after another, killed before this call, and if that is a helper's and `is_new`, once in each way;
    /// how often it was killed.
    fn at_call(
        &mut self,
        (before, arguments): (&[&str], &[&str]),
        number: usize,
        is_new: bool,
    ) -> Result<u32> {
        let (mut kills, sweep) = (0, self.l1.sweep);
        let mut victims = vec![victim(number)];
        while let Some(kind) = victims.pop() {
            // One that completes made fewer calls this time: its threads and helpers take turns as they come.
            let Fate::Killed { before: call, by_helper, .. } =
                self.once(before, arguments, (number, kind))?
            else {
                continue;
            };
            kills += 1;
            self.killed.insert(call);
            if by_helper && is_new && kind == victim(number) {
                // Each way for those that change the drivers.
                let ways = [Victim::ProcessFirst, victim(number + 1)];
                let is_taken = |way: &Victim| match way {
                    Victim::ProcessFirst => !self.deadline_seen || sweep.takes(number, 2),
                    _ => sweep.takes(number + 1, 2),
                };
                victims.extend(ways.into_iter().filter(is_taken));
            }
        }
        Ok(kills)
    }

    /// Kills it once, and finds the way back.
    fn once(
        &mut self,
        before: &[&str],
        arguments: &[&str],
        (number, victim): (usize, Victim),
    ) -> Result<Fate> {
        let name = arguments[0];
        if !before.is_empty() {
            self.l1.vm_service(before, TIMEOUT)?.succeeded()?;
        }
        let mut command = Command::new(VM_SERVICE);
        let command = command.args(arguments);
        let timeout = if victim == Victim::ProcessFirst { TIMEOUT * 2 } else { TIMEOUT };
        let fate = kill_at(command, number, victim, timeout, &mut || self.release_waits())
            .with_context(|| format!("{name}, call {number} ({victim:?})"))?;
        let at = match &fate {
            Fate::Killed { before, .. } => {
                format!("{name} killed before its call {number}, {before} ({victim:?})")
            }
            Fate::Completed { calls } => format!("{name} completed with {} calls", calls.len()),
        };
        self.l1.step(at.clone());
        // The two ways back take turns.
        self.come_back(number % 4 < 2).with_context(|| at)?;
        Ok(fate)
    }

    /// While a helper is held right before its write, the way back must not end, or succeed. That the wait ends with an
    /// error is seen once, as it takes until the deadline.
    fn release_waits(&mut self) -> Result<()> {
        let arguments = ["release", &self.nvme.address];
        if !self.deadline_seen {
            self.deadline_seen = true;
            let early = self.l1.vm_service(&arguments, TIMEOUT)?;
            let told = early.stderr.contains(&format!(" to unlock {}; ", self.nvme.address));
            ensure!(
                early.code == Some(1) && told,
                "release did not wait for the helper: {:?} {}",
                early.code,
                early.stderr
            );
            return Ok(());
        }
        self.l1.step("vm-service release, while the helper is held");
        let mut release = Command::new(VM_SERVICE)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let result = self.is_waiting(&mut release);
        // It fails only when it has ended.
        let _ = release.kill();
        release.wait()?;
        result
    }

    /// Whether `release` comes to wait for the lock, and goes on waiting.
    fn is_waiting(&self, release: &mut Child) -> Result<()> {
        let lock = Path::new(LOCKS).join(&self.nvme.address);
        let files = format!("/proc/{}/fd", release.id());
        let waits = || {
            let mut open = fs::read_dir(&files).into_iter().flatten().flatten();
            open.any(|file| fs::read_link(file.path()).is_ok_and(|path| path == lock))
        };
        wait_until("release at the lock", TIMEOUT, || waits().then_some(()))?;
        std::thread::sleep(AT_WORK);
        ensure!(release.try_wait()?.is_none() && waits(), "release did not wait for the helper");
        Ok(())
    }

    /// Finds the way back, by `release` or by the next claim, and checks that the host is as it was.
    fn come_back(&mut self, by_release: bool) -> Result<()> {
        let nvme = self.nvme;
        let mut said = Vec::new();
        if !by_release {
            // A claim finds what was left, undoes it, and then claims; or says that a claim is in place.
            let next = self.l1.vm_service(&["claim", &nvme.address], TIMEOUT)?;
            said.push(format!("claim: {:?} {}", next.code, next.stderr.trim()));
        }
        let released = self.l1.vm_service(&["release", &nvme.address], TIMEOUT)?;
        said.push(format!("release: {:?} {}", released.code, released.stderr.trim()));
        let said = said.join("; ");
        ensure!(
            nvme.driver().as_deref() == Some("nvme"),
            "the driver is {:?}, not nvme; {said}",
            nvme.driver()
        );
        let restriction = nvme.attribute("driver_override");
        ensure!(restriction.as_deref() == Some("(null)"), "driver_override is {restriction:?}; {said}");
        NvmeDisk::of(nvme).and_then(|disk| disk.check_pattern(SEED, 0, LEN)).with_context(|| said)?;
        Ok(())
    }
}

/// Taking turns: the process alone, or its helpers too.
fn victim(number: usize) -> Victim {
    if number.is_multiple_of(2) { Victim::All } else { Victim::Process }
}
