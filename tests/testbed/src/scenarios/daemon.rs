//! A daemon with two Linux guests: one gets the host's NVMe disk while it runs, writes to it, and gives it back; the daemon is
//! killed meanwhile and started again; the other guest counts all the while, and notices nothing. The daemon's word on the
//! state of their devices is that of Linux in L1.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::mount::{MountFlags, mount};

use crate::agent::{Finished, Function, L1, L2, NvmeDisk, VM_SERVICE, wait_until};
use crate::report::Report;
use crate::scenario::{Contents, Scenario, Variants};
use crate::scenarios::device_state;
use crate::scenarios::linux_e1000e::E1000E;
use crate::scenarios::linux_nvme::{DISK, NVME};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "daemon",
    about: "a daemon's guest gets a disk while it runs, and gives it back though the daemon was killed meanwhile; another counts",
    variants: Variants::Both,
    ports: 2,
    devices: DEVICES,
    disks: DISK,
    memory_mib: 1536,
    deadline: Duration::from_secs(1800),
    contents: Contents { linux_guest: true, ..Contents::NONE },
    l1,
    l2: Some(l2),
};

/// A disk, and a card that has AER, as the disk has not.
const DEVICES: &[&str] = &[
    "-drive",
    "file={disk},if=none,id=drive0,format=raw,cache=unsafe",
    "-device",
    "nvme,drive=drive0,serial=testbed,bus=port0",
    "-device",
    "e1000e,bus=port1",
];

const TIMEOUT: Duration = Duration::from_secs(300);
const LEN: usize = 1 << 20;
const HOST_SEED: u64 = 0x0068_6f73_7421;
const GUEST_SEED: u64 = 0x6775_6573_7421;
const GUEST_AT: u64 = 32 << 20;

/// What the guests report: that one waits, has found the disk, has written to it and has lost it; and how far the other counts.
const WAITS: &str = "waits";
const FOUND: &str = "found";
const WRITTEN: &str = "written";
const LOST: &str = "lost";
const COUNT: &str = "count";
const BEAT: Duration = Duration::from_millis(250);

fn l1(l1: &mut L1) -> Result<()> {
    let nvme = Function::find(NVME.0, NVME.1)?;
    let written = NvmeDisk::of(&nvme)?.write_pattern(HOST_SEED, 0, LEN)?;
    mount_terminals()?;

    let mut daemon = serve()?;
    let (web1, web2) = (Console::start(l1, "web1")?, Console::start(l1, "web2")?);
    web1.value(WAITS)?;
    let before = web2.count()?;

    let begun = Instant::now();
    done(l1.vm_service(&["attach", &nvme.address, "--guest", "web1"], TIMEOUT))?;
    l1.figure("attach, as its command takes", begun.elapsed().as_secs_f64(), "s");
    web1.value(FOUND)?;
    l1.figure("from the command until the guest's driver has the disk", begun.elapsed().as_secs_f64(), "s");
    let by_guest = web1.value(WRITTEN)?;
    l1.proved("the guest reads the host's data, and writes its own");

    for more in [&[][..], &["--socket", "/run/other.sock"]] {
        let second = l1.vm_service(&[&["serve"], more].concat(), TIMEOUT)?;
        l1.prove(
            second.code == Some(1) && second.stderr.contains("another daemon serves the guests of"),
            "a second daemon is refused",
        )
        .with_context(|| second.stderr)?;
    }

    let card = Function::find(E1000E.0, E1000E.1)?;
    done(l1.vm_service(&["attach", &card.address, "--guest", "web2"], TIMEOUT))?;
    device_state::compare(l1, [("web1", &nvme), ("web2", &card)], 256 << 20)?;

    daemon.kill().and_then(|()| daemon.wait())?;
    let counted = web2.count()?;
    wait_until("the other guest's count", TIMEOUT, || {
        web2.count().ok().filter(|count| *count > counted + 2)
    })?;
    l1.proved("the guests go on when the daemon is killed");
    let begun = Instant::now();
    let mut daemon = serve()?;
    let listed = done(l1.vm_service(&["guests", "--json"], TIMEOUT))?.json()?;
    l1.figure("from the daemon's start until it has reported its guests", begun.elapsed().as_secs_f64(), "s");
    let names: Vec<_> =
        listed["guests"].as_array().into_iter().flatten().map(|guest| &guest["name"]).collect();
    l1.prove(names == ["web1", "web2"], "the daemon that is started again finds both guests")?;
    let has = &listed["guests"][0]["devices"][0]["address"];
    l1.prove(*has == nvme.address.as_str(), "and knows who has the disk")?;

    let begun = Instant::now();
    let detached = done(l1.vm_service(&["detach", &nvme.address, "--deadline", "60", "--json"], TIMEOUT))?;
    l1.figure("detach, as its command takes", begun.elapsed().as_secs_f64(), "s");
    l1.prove(
        detached.json()?["devices"][0]["how"] == "orderly",
        "the guest lets go of the disk when it is asked to",
    )?;
    web1.value(LOST)?;
    let disk = NvmeDisk::of(&nvme)?;
    l1.prove(nvme.driver().as_deref() == Some("nvme"), "the host's driver has it again")?;
    let (host, guest) =
        (disk.check_pattern(HOST_SEED, 0, LEN)?, disk.check_pattern(GUEST_SEED, GUEST_AT, LEN)?);
    l1.prove(host == written, format!("the host's data is still there, checksum {host:016x}"))?;
    l1.prove(format!("{guest:x}") == by_guest, format!("so is the guest's, checksum {guest:016x}"))?;

    let counts = web2.counts()?;
    l1.prove(web2.count()? > before, "the other guest counted all the while")?;
    ensure!(
        counts.windows(2).all(|pair| pair[1] == pair[0] + 1),
        "the other guest's count has gaps: {counts:?}"
    );
    l1.proved(format!("its count has no gap, up to {}", counts.len()));
    for guest in ["web1", "web2"] {
        done(l1.vm_service(&["stop", guest, "--now"], TIMEOUT))?;
    }
    let left = done(l1.vm_service(&["claims", "--json"], TIMEOUT))?.json()?;
    l1.prove(left["claims"].as_array().is_some_and(Vec::is_empty), "nothing is left claimed")?;
    daemon.kill().and_then(|()| daemon.wait())?;
    Ok(())
}

/// Mounts what makes pseudo-terminals, as which a daemon's guests have their consoles.
pub(super) fn mount_terminals() -> Result<()> {
    fs::create_dir_all("/dev/pts")?;
    mount("devpts", "/dev/pts", "devpts", MountFlags::empty(), None).context("there are no pseudo-terminals")
}

fn done(finished: Result<Finished>) -> Result<Finished> {
    finished.and_then(Finished::succeeded)
}

/// Starts the daemon, and waits until it answers.
fn serve() -> Result<Child> {
    let log = File::options().create(true).append(true).open("/tmp/daemon.log")?;
    let daemon = Command::new(VM_SERVICE).arg("serve").stdin(Stdio::null()).stderr(log).spawn()?;
    wait_until("the daemon", TIMEOUT, || {
        let asked =
            Command::new(VM_SERVICE).arg("guests").stdout(Stdio::null()).stderr(Stdio::null()).status();
        asked.is_ok_and(|status| status.success()).then_some(())
    })?;
    Ok(daemon)
}

/// The console of a guest, as `vm-service console` shows it.
struct Console {
    guest: &'static str,
    process: Child,
}

impl Console {
    /// Has the daemon start a Linux guest, and looks at its console.
    fn start(l1: &mut L1, guest: &'static str) -> Result<Self> {
        let file = format!("/tmp/{guest}.toml");
        let cmdline = format!(
            "console=ttyS0 quiet panic=-1 testbed.level=2 testbed.scenario={} testbed.variant={} guest={guest}",
            l1.scenario, l1.variant
        );
        let boot =
            format!("kernel = \"/guest/kernel\"\ninitrd = \"/guest/initrd\"\ncmdline = \"{cmdline}\"\n");
        fs::write(&file, format!("name = \"{guest}\"\nmemory = \"256M\"\n[boot]\n{boot}"))?;
        done(l1.vm_service(&["start", &file], TIMEOUT))?;
        let screen = File::create(format!("/tmp/{guest}.console"))?;
        let process =
            Command::new(VM_SERVICE).args(["console", guest]).stdin(Stdio::null()).stdout(screen).spawn()?;
        Ok(Self { guest, process })
    }

    /// All values of this name that the guest has reported.
    fn values(&self, wanted: &str) -> Result<Vec<String>> {
        let text = fs::read(Path::new("/tmp").join(format!("{}.console", self.guest)))?;
        let text = String::from_utf8_lossy(&text);
        let mut values = Vec::new();
        for report in text.lines().filter_map(Report::parse_console) {
            match report {
                Report::Value { name, value } if name == wanted => values.push(value),
                Report::Failed { reason } => anyhow::bail!("guest {} failed: {reason}", self.guest),
                _ => {}
            }
        }
        Ok(values)
    }

    /// Waits for a value.
    fn value(&self, wanted: &str) -> Result<String> {
        let waited = wait_until(&format!("`{wanted}` of {}", self.guest), TIMEOUT, || {
            self.values(wanted).map(|mut values| values.pop()).transpose()
        });
        waited.and_then(|value| value).with_context(|| {
            let log = done_quietly(&["logs", self.guest]);
            let console = fs::read(format!("/tmp/{}.console", self.guest)).unwrap_or_default();
            let end = console.len().saturating_sub(2000);
            format!("--- log\n{log}\n--- console\n{}", String::from_utf8_lossy(&console[end..]))
        })
    }

    /// How far the guest has counted.
    fn count(&self) -> Result<u64> {
        Ok(self.value(COUNT)?.parse()?)
    }

    fn counts(&self) -> Result<Vec<u64>> {
        self.values(COUNT)?.iter().map(|count| Ok(count.parse()?)).collect()
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        // Both fail only on a process that has ended and was waited for.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What a command prints, whatever becomes of it.
fn done_quietly(arguments: &[&str]) -> String {
    let output = Command::new(VM_SERVICE).args(arguments).stdin(Stdio::null()).output();
    output
        .map_or_else(|error| error.to_string(), |output| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn l2(l2: &mut L2) -> Result<()> {
    let report =
        |l2: &mut L2, name: &str, value: String| l2.report(&Report::Value { name: name.into(), value });
    if l2.parameter("guest")? == "web2" {
        // Until its power is cut.
        for count in 1u64.. {
            report(l2, COUNT, count.to_string());
            std::thread::sleep(BEAT);
        }
    }
    let find = || Function::find_all(NVME.0, NVME.1).ok()?.pop();
    ensure!(find().is_none(), "the guest starts without the disk");
    report(l2, WAITS, String::new());
    let nvme = wait_until("the disk", TIMEOUT, find)?;
    let disk = NvmeDisk::of(&nvme)?;
    report(l2, FOUND, nvme.address.clone());
    disk.check_pattern(HOST_SEED, 0, LEN)?;
    let written = disk.write_pattern(GUEST_SEED, GUEST_AT, LEN)?;
    report(l2, WRITTEN, format!("{written:x}"));
    wait_until("the end of the disk", 2 * TIMEOUT, || find().is_none().then_some(()))?;
    report(l2, LOST, String::new());
    // Until its power is cut.
    loop {
        std::thread::sleep(BEAT);
    }
}
