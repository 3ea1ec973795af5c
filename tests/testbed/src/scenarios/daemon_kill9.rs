//! `kill -9` of the daemon in each of its states: while a guest is started with the disk, gets another device, loses it and is
//! stopped, the daemon is killed before one changing system call after the other, its own and those of the guest's process.
//! What was asked for has then been done, or can be asked of the next daemon; and in the end nothing is left.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::agent::{
    Fate, Finished, Function, L1, NvmeDisk, VM_SERVICE, Victim, kill_at, processes, wait_until,
};
use crate::scenario::{Contents, Scenario, Variant, Variants};
use crate::scenarios::bare_edu::EDU;
use crate::scenarios::daemon::mount_terminals;
use crate::scenarios::linux_nvme::{DISK, NVME, NVME_AND_EDU};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "daemon-kill9",
    about: "a daemon that is killed at any step of a guest's start, attach, detach or stop leaves nothing that its next can't do",
    variants: Variants::Only(Variant::Iommufd),
    ports: 2,
    devices: NVME_AND_EDU,
    disks: DISK,
    memory_mib: 1024,
    deadline: Duration::from_secs(1800),
    contents: Contents { bare_guest: true, ..Contents::NONE },
    l1,
    l2: None,
};

const TIMEOUT: Duration = Duration::from_secs(300);
const SEED: u64 = 0x6461_656d_2139;
const LEN: usize = 4096;
const GUEST: &str = "killed";
const OTHER: &str = "other";
/// How often the daemon is killed, evenly over the calls.
const KILLS: usize = 14;
/// A part of the sweep has one of so many.
const EVERY: usize = 7;

fn l1(l1: &mut L1) -> Result<()> {
    let (nvme, edu) = (Function::find(NVME.0, NVME.1)?, Function::find(EDU.0, EDU.1)?);
    NvmeDisk::of(&nvme)?.write_pattern(SEED, 0, LEN)?;
    for guest in [GUEST, OTHER] {
        fs::write(
            file(guest),
            format!(
                "name = {guest:?}\nmemory = \"32M\"\n\n[boot]\nkernel = \"/guest/bare\"\ncmdline = \"spin\"\n"
            ),
        )?;
    }
    mount_terminals()?;
    let mut first = serve()?;
    l1.vm_service(&["start", &file(OTHER)], TIMEOUT)?.succeeded()?;
    let other = status(l1, OTHER)?.context("the other guest does not run")?;
    end(&mut first)?;

    let sweep = l1.sweep;
    let Fate::Completed { calls } = once(l1, &nvme, &edu, usize::MAX)? else {
        bail!("it was killed though nothing killed it")
    };
    let (mut kills, mut tried) = (0, 0);
    for at in (0..KILLS).filter(|&at| sweep.takes(at, EVERY)) {
        tried += 1;
        let number = 1 + at * calls.len() / KILLS;
        // One that completes made fewer calls this time: threads and processes take turns as they come.
        if let Fate::Killed { .. } = once(l1, &nvme, &edu, number)? {
            kills += 1;
        }
    }
    ensure!(
        kills > 0 && (kills + 1) * 4 >= tried * 3,
        "the daemon was killed {kills} times only, of {tried}"
    );
    l1.proved(format!(
        "after each of {kills} kills before one of {} changing calls all went on with the next daemon",
        calls.len(),
    ));

    let mut last = serve()?;
    let now = status(l1, OTHER)?.context("the other guest has ended")?;
    l1.prove(now["pid"] == other["pid"] && now["state"] == "running", "the other guest ran all the while")?;
    l1.vm_service(&["stop", OTHER, "--now"], TIMEOUT)?.succeeded()?;
    end(&mut last)
}

fn file(guest: &str) -> String {
    format!("/tmp/{guest}.toml")
}

/// Goes through a guest's life with a daemon that is killed before the `number`th call, and through the rest with the next.
fn once(l1: &mut L1, nvme: &Function, edu: &Function, number: usize) -> Result<Fate> {
    let killed = AtomicBool::new(false);
    let fate = std::thread::scope(|scope| {
        let traced = scope.spawn(|| {
            let mut command = Command::new(VM_SERVICE);
            let mut note = || {
                killed.store(true, Ordering::SeqCst);
                Ok(())
            };
            kill_at(command.arg("serve"), number, Victim::ProcessFirst, TIMEOUT * 4, &mut note)
        });
        let lived = Life { l1, killed: &killed, next: None }.live(nvme, edu);
        if lived.is_err() {
            // What is traced ends, or the thread would wait for it.
            for role in ["serve", "run", "guest-vmm"] {
                processes(role).into_iter().for_each(|(pid, _)| signal(pid, Signal::KILL));
            }
        }
        let fate = traced.join().map_err(|_| anyhow!("the thread that kills panicked"))?;
        lived.and(fate)
    })
    .with_context(|| format!("killed before call {number}"))?;
    if let Fate::Killed { before, .. } = &fate {
        l1.step(format!("the daemon was killed before call {number}, {before}"));
    }
    Ok(fate)
}

fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
        // It fails only on a process that has ended.
        let _ = kill_process(pid, signal);
    }
}

/// A guest's life, in which the daemon is killed once.
struct Life<'a> {
    l1: &'a mut L1,
    /// Whether the first daemon was killed.
    killed: &'a AtomicBool,
    /// The next one.
    next: Option<Child>,
}

impl Life<'_> {
    fn live(mut self, nvme: &Function, edu: &Function) -> Result<()> {
        let has = |guest: &Value, address: &str| {
            let devices = guest["devices"].as_array();
            devices.into_iter().flatten().any(|device| device["address"] == address)
        };
        wait_until("the daemon", TIMEOUT, || answers().then_some(()).or_else(|| self.replace().ok()))?;
        let file = file(GUEST);
        self.insist(&["start", &file, "--device", &nvme.address], |guest| {
            guest.is_some_and(|guest| guest["state"] == "running" && has(guest, &nvme.address))
        })?;
        self.insist(&["attach", &edu.address, "--guest", GUEST], |guest| {
            guest.is_some_and(|guest| has(guest, &edu.address))
        })?;
        self.insist(&["detach", &edu.address, "--surprise"], |guest| {
            guest.is_some_and(|guest| !has(guest, &edu.address))
        })?;
        self.insist(&["stop", GUEST, "--now"], |guest| guest.is_none())?;

        let claims = self.l1.vm_service(&["claims", "--json"], TIMEOUT)?.succeeded()?.json()?;
        ensure!(claims["claims"].as_array().is_some_and(Vec::is_empty), "it is left claimed: {claims}");
        ensure!(nvme.driver().as_deref() == Some("nvme"), "the disk's driver is {:?}", nvme.driver());
        ensure!(edu.driver().is_none(), "edu's driver is {:?}", edu.driver());
        for function in [nvme, edu] {
            let restriction = function.attribute("driver_override");
            ensure!(restriction.as_deref() == Some("(null)"), "driver_override is {restriction:?}");
        }
        NvmeDisk::of(nvme)?.check_pattern(SEED, 0, LEN)?;
        let keepers = processes("run");
        ensure!(
            keepers.len() == 1,
            "there are processes of {} guests, not of the other alone",
            keepers.len()
        );
        match &mut self.next {
            Some(next) => end(next),
            None => {
                processes("serve").into_iter().for_each(|(pid, _)| signal(pid, Signal::TERM));
                Ok(())
            }
        }
    }

    /// Asks for something until the guest is so. Only the daemon's death is a reason to ask twice.
    fn insist(&mut self, arguments: &[&str], is_done: impl Fn(Option<&Value>) -> bool) -> Result<()> {
        let asked = self.l1.vm_service(arguments, TIMEOUT)?;
        if asked.code == Some(0) {
            let guest = self.status()?;
            ensure!(is_done(guest.as_ref()), "{} succeeded, but {guest:?}", arguments.join(" "));
            return Ok(());
        }
        let mut said = vec![asked.stderr];
        wait_until("the daemon's death, as it refused", TIMEOUT / 5, || {
            self.killed.load(Ordering::SeqCst).then_some(())
        })
        .with_context(|| format!("{}: {}", arguments.join(" "), said.join("")))?;
        let begun = std::time::Instant::now();
        loop {
            if is_done(self.status()?.as_ref()) {
                return Ok(());
            }
            let Finished { code, stderr, .. } = self.l1.vm_service(arguments, TIMEOUT)?;
            if code != Some(0) {
                ensure!(begun.elapsed() < TIMEOUT, "{} {stderr}: {}", arguments.join(" "), said.join("; "));
                said.push(stderr);
            }
        }
    }

    /// What the daemon says of the guest, or the next daemon where that was killed.
    fn status(&mut self) -> Result<Option<Value>> {
        match status(self.l1, GUEST) {
            Err(_) if self.next.is_none() && self.killed.load(Ordering::SeqCst) => {
                self.replace()?;
                status(self.l1, GUEST)
            }
            status => status,
        }
    }

    /// Starts the next daemon.
    fn replace(&mut self) -> Result<()> {
        ensure!(self.next.is_none() && self.killed.load(Ordering::SeqCst), "the daemon was not killed");
        self.next = Some(serve()?);
        Ok(())
    }
}

/// A guest, or `None` when there is none of that name.
fn status(l1: &mut L1, guest: &str) -> Result<Option<Value>> {
    // An L1 that has little of a processor, in which the daemon is traced, may take longer than a client waits.
    let listed = wait_until("an answer of the daemon", TIMEOUT, || {
        let listed = l1.vm_service(&["guests", "--json"], TIMEOUT);
        let is_late = |listed: &Finished| listed.stderr.contains("did not answer within");
        Some(listed).filter(|listed| !listed.as_ref().is_ok_and(is_late))
    })??;
    let listed = listed.succeeded()?.json()?;
    let guests = listed["guests"].as_array().context("no list of guests")?;
    Ok(guests.iter().find(|found| found["name"] == guest).cloned())
}

/// Starts a daemon, and waits until it answers.
fn serve() -> Result<Child> {
    let daemon = Command::new(VM_SERVICE).arg("serve").stdin(Stdio::null()).stderr(Stdio::null()).spawn()?;
    wait_until("the daemon", TIMEOUT, || answers().then_some(()))?;
    Ok(daemon)
}

fn answers() -> bool {
    let mut asking = Command::new(VM_SERVICE);
    let asking = asking.arg("guests").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    asking.status().is_ok_and(|status| status.success())
}

fn end(daemon: &mut Child) -> Result<()> {
    daemon.kill()?;
    daemon.wait()?;
    Ok(())
}
