//! A Linux guest gets an NVMe disk while it runs, by its PCI address: its own drivers find it, work on it, and let go of it when
//! the host asks; it is pulled from under them; and the Linux kernel of the host takes it back. The guest runs on through all of it.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::agent::{Function, Guest, GuestPlan, L1, L2, NvmeDisk, VM_SERVICE, kernel_log, wait_until};
use crate::report::Report;
use crate::scenario::{Contents, Scenario, Variants};
use crate::scenarios::linux_nvme::{DISK, NVME};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "hot-attach",
    about: "a Linux guest gets an NVMe disk while it runs, and loses it orderly, by surprise and to the host",
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

/// A disk, and a display controller with a BAR of 64 MiB below 4 GiB, which no free slot has room for.
const DEVICES: &[&str] = &[
    "-drive",
    "file={disk},if=none,id=drive0,format=raw,cache=unsafe",
    "-device",
    "nvme,drive=drive0,serial=testbed,bus=port0",
    "-device",
    "secondary-vga,vgamem_mb=64,romfile=,bus=port1",
];
const DISPLAY: (u16, u16) = (0x1234, 0x1111);
const GUEST: &str = "hot";
const TIMEOUT: Duration = Duration::from_secs(600);
const LEN: usize = 2 << 20;
const HOST_SEED: u64 = 0x0068_6f74_686f;
const HOST_AT: u64 = 1 << 20;
const GUEST_SEED: u64 = 0x0068_6f74_6775;
const GUEST_AT: u64 = 32 << 20;

/// How the disk goes, each time that it has come.
const GOES: [&str; 3] = ["orderly", "by surprise", "to the host"];

fn l1(l1: &mut L1) -> Result<()> {
    let nvme = Function::find(NVME.0, NVME.1)?;
    let written = NvmeDisk::of(&nvme)?.write_pattern(HOST_SEED, HOST_AT, LEN)?;
    l1.proved(format!("the host wrote {LEN} bytes, checksum {written:016x}"));
    let plan = GuestPlan { devices: Vec::new(), ..GuestPlan::linux(GUEST, &nvme) };
    let mut guest = Guest::start(l1, &plan)?;
    let mut daemon = Command::new(VM_SERVICE).arg("serve").stdin(Stdio::null()).spawn()?;
    wait_for(&mut guest, "it waits for orderly")?;
    wait_until("the daemon", TIMEOUT, || {
        l1.vm_service(&["guests"], TIMEOUT)
            .ok()
            .filter(|asked| asked.code == Some(0) && asked.stdout.contains(GUEST))
    })?;

    let display = Function::find(DISPLAY.0, DISPLAY.1)?;
    let refused = l1.vm_service(&["attach", &display.address, "--guest", GUEST], TIMEOUT)?;
    l1.prove(
        refused.code == Some(3) && refused.stderr.contains("have the guest start with it"),
        format!("what fits into no slot is refused: {}", refused.stderr.trim()),
    )?;
    ensure!(display.driver().is_none(), "it was touched: {:?} drives it", display.driver());

    for (turn, how) in (0..).zip(GOES) {
        let asked = Instant::now();
        let came = attach(l1, &mut guest, &nvme, how)?;
        l1.figure(&format!("{how}: from the request until the guest sees the disk"), came.as_secs_f64(), "s");
        wait_for(&mut guest, &format!("it wrote {how}"))?;
        l1.figure(&format!("{how}: until it has written"), asked.elapsed().as_secs_f64(), "s");
        let asked = Instant::now();
        match turn {
            0 => detach(l1, &nvme, &[])?,
            1 => detach(l1, &nvme, &["--surprise"])?,
            _ => {
                let path = nvme.path().join("remove");
                let asking = std::thread::spawn(move || fs::write(path, "1"));
                wait_until("the host's having the disk", TIMEOUT, || asking.is_finished().then_some(()))?;
                fs::write("/sys/bus/pci/rescan", "1")?;
            }
        }
        l1.figure(&format!("{how}: until the host has the disk"), asked.elapsed().as_secs_f64(), "s");
        wait_for(&mut guest, &format!("it is gone {how}"))?;
        let back = || (nvme.driver().as_deref() == Some("nvme")).then_some(());
        wait_until("the host's nvme driver", TIMEOUT, back)?;
        let disk = NvmeDisk::of(&nvme)?;
        disk.check_pattern(HOST_SEED, HOST_AT, LEN)?;
        let got = disk.check_pattern(GUEST_SEED + turn, GUEST_AT, LEN)?;
        l1.proved(format!("{how}: the host has the disk with what the guest wrote, checksum {got:016x}"));
        // After the last the guest may have ended by itself.
        ensure!(turn == 2 || guest.runs(), "{how}: the guest's process ended: {}", guest.log());
        ensure!(!guest.holds_a_device(), "{how}: the guest's process holds a device");
    }
    let ended = guest.end(TIMEOUT)?.succeeded(l1)?;
    daemon.kill().and_then(|()| daemon.wait())?;
    let said = ended.process.stderr;
    for words in ["the host asked for", "the guest let go of"] {
        l1.prove(said.contains(words), format!("the guest's process said {words:?}"))
            .with_context(|| said.clone())?;
    }
    Ok(())
}

/// Attaches the disk, and returns how long it took until the guest saw it.
fn attach(l1: &mut L1, guest: &mut Guest, nvme: &Function, how: &str) -> Result<Duration> {
    let asked = Instant::now();
    let seen = std::thread::scope(|scope| -> Result<Duration> {
        let attaching = scope.spawn(|| l1.vm_service(&["attach", &nvme.address, "--guest", GUEST], TIMEOUT));
        wait_for(guest, &format!("it sees {how}"))?;
        let seen = asked.elapsed();
        attaching.join().map_err(|_| anyhow::anyhow!("the thread that attaches panicked"))??.succeeded()?;
        Ok(seen)
    })?;
    Ok(seen)
}

fn detach(l1: &mut L1, nvme: &Function, how: &[&str]) -> Result<()> {
    let arguments = [&["detach", &nvme.address, "--guest", GUEST], how].concat();
    l1.vm_service(&arguments, TIMEOUT)?.succeeded()?;
    Ok(())
}

/// Waits until the guest's agent has proved something.
fn wait_for(guest: &mut Guest, what: &str) -> Result<Duration> {
    let proved =
        |report: &Report| matches!(report, Report::Proved { what: proved } if proved == what).then_some(());
    Ok(guest.wait_for(what, TIMEOUT, proved)?.0)
}

fn l2(l2: &mut L2) -> Result<()> {
    let find = || Function::find(NVME.0, NVME.1).ok();
    for (turn, how) in (0..).zip(GOES) {
        l2.prove(find().is_none(), format!("it waits for {how}"))?;
        let nvme = wait_until("the disk", TIMEOUT, find)?;
        l2.prove(true, format!("it sees {how}"))?;
        let disk = NvmeDisk::of(&nvme)?;
        disk.check_pattern(HOST_SEED, HOST_AT, LEN)?;
        disk.write_pattern(GUEST_SEED + turn, GUEST_AT, LEN)?;
        l2.prove(nvme.message_vectors().iter().any(|kind| kind == "msix"), format!("it wrote {how}"))?;
        wait_until("its going", TIMEOUT, || find().is_none().then_some(()))?;
        l2.prove(true, format!("it is gone {how}"))?;
    }
    // Linux waits for 5 s after a button was pressed, so nothing that comes may press one.
    let log = kernel_log()?;
    for line in log.lines().filter(|line| line.contains("pciehp")) {
        l2.prove(!line.contains("power on in"), line)?;
    }
    let asked = log.lines().filter(|line| line.contains("will power off in 5 sec")).count();
    l2.prove(asked == 2, "it was asked for the disk twice, by the button")
}
