//! The units of the package, under a real systemd, with all of their hardening.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::linux_nvme::{DISK, NVME};
use super::linux_storage::VIRTIO_BLOCK;
use crate::agent::{Disk, Finished, Function, L1, L2, NvmeDisk, Systemd, VM_SERVICE, net, wait_until};
use crate::scenario::{Contents, Scenario, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "systemd",
    about: "hardened units start guests and, on the first request, the daemon; its guests outlive it",
    variants: Variants::Both,
    ports: 1,
    devices: &[
        "-drive",
        "file={disk},if=none,id=drive0,format=raw,cache=unsafe",
        "-device",
        "nvme,drive=drive0,serial=testbed,bus=port0",
    ],
    disks: DISK,
    memory_mib: 1536,
    deadline: Duration::from_secs(1800),
    contents: Contents { bare_guest: true, linux_guest: true, systemd: true, ..Contents::NONE },
    l1,
    l2: Some(l2),
};

const TIMEOUT: Duration = Duration::from_secs(600);

fn l1(l1: &mut L1) -> Result<()> {
    fs::create_dir_all("/etc/vm-service")?;
    let guest = |name: &str, cmdline: &str| {
        let text = format!(
            "name = \"{name}\"\nmemory = \"32M\"\n[boot]\nkernel = \"/guest/bare\"\ncmdline = \"{cmdline}\"\n"
        );
        fs::write(format!("/etc/vm-service/{name}.toml"), text)
    };
    guest("web1", "spin")?;
    guest("web2", "pci")?;

    let systemd = Systemd::start(l1)?;
    let systemctl = |arguments: &[&str]| systemd.run("systemctl", arguments, TIMEOUT);
    let state =
        |unit: &str| -> Result<String> { Ok(systemctl(&["is-active", unit])?.stdout.trim().to_owned()) };
    let ended = |unit: &str| {
        wait_until(&format!("the end of {unit}"), TIMEOUT, || {
            state(unit).ok().filter(|state| matches!(state.as_str(), "inactive" | "failed"))
        })
    };
    systemctl(&["start", "vm-guest@web1", "vm-guest@web2"]).and_then(Finished::succeeded)?;
    l1.prove(
        ended("vm-guest@web2")? == "inactive",
        "a guest that powers off leaves its unit inactive, not failed",
    )?;
    l1.prove(state("vm-guest@web1")? == "active", "the other guest runs on")?;
    let console = fs::read_link("/run/vm-guest/web1/console")?;
    l1.prove(console.starts_with("/dev/pts"), format!("its console is {}", console.display()))?;
    // It knows no power button: a second SIGTERM cuts its power.
    systemctl(&["kill", "--kill-who=main", "vm-guest@web1"]).and_then(Finished::succeeded)?;
    systemctl(&["stop", "vm-guest@web1"]).and_then(Finished::succeeded)?;
    l1.prove(ended("vm-guest@web1")? == "inactive", "a guest that is stopped leaves its unit inactive, too")?;
    l1.prove(!fs::exists("/run/vm-guest/web1")?, "nothing of it is left in /run")?;
    systemctl(&["start", "vm-guest@missing"])?;
    l1.prove(ended("vm-guest@missing")? == "failed", "a guest without a file fails its unit")?;

    // The daemon starts when somebody asks it, and its guests are not its own.
    let ask = |arguments: &[&str]| systemd.run(VM_SERVICE, arguments, TIMEOUT).and_then(Finished::succeeded);
    systemctl(&["start", "vm-service.socket"]).and_then(Finished::succeeded)?;
    l1.prove(state("vm-service.service")? == "inactive", "the daemon is not started before it is asked")?;
    ask(&["start", "/etc/vm-service/web1.toml"])?;
    l1.prove(state("vm-service.service")? == "active", "the first request starts it")?;
    let guest = process_of("web1")?;
    let cgroup = fs::read_to_string(format!("/proc/{guest}/cgroup"))?;
    l1.prove(cgroup.trim_end().ends_with("/vm-guest-web1.scope"), format!("the guest's cgroup is {cgroup}"))?;
    let runs = |l1: &mut L1, what: &str| -> Result<()> {
        // It may not have begun to answer yet.
        let answer = wait_until("the daemon", TIMEOUT, || ask(&["guests"]).ok())?;
        let known = answer.stdout.contains("web1");
        l1.prove(known && process_of("web1")? == guest, format!("{what}, and the guest's process runs on"))
    };
    systemctl(&["restart", "vm-service.service"]).and_then(Finished::succeeded)?;
    runs(l1, "the daemon was restarted")?;
    systemctl(&["kill", "--signal=KILL", "vm-service.service"]).and_then(Finished::succeeded)?;
    runs(l1, "the daemon was killed")?;
    systemctl(&["stop", "vm-service.service", "vm-service.socket"]).and_then(Finished::succeeded)?;
    l1.prove(
        process_of("web1")? == guest,
        "the daemon and its socket were stopped, and the guest's process runs on",
    )?;
    systemctl(&["start", "vm-service.socket"]).and_then(Finished::succeeded)?;
    // As systemd does when the host shuts down: every process of the unit gets SIGTERM.
    systemctl(&["stop", "vm-guest-web1.scope"]).and_then(Finished::succeeded)?;
    l1.prove(
        ended("vm-guest-web1.scope")? == "inactive",
        "nothing is left of the guest when its scope is stopped",
    )?;
    let log = ask(&["logs", "web1"])?.stdout;
    l1.prove(
        log.contains("pressing the guest's power button") && log.contains("the guest's power was cut"),
        "it had its power button pressed, and then its power cut",
    )
    .context(log)?;
    ask(&["start", "/etc/vm-service/web1.toml"])?;
    ask(&["stop", "web1", "--now"])?;
    l1.prove(ended("vm-guest-web1.scope")? == "inactive", "nothing is left of the guest when it is stopped")?;

    // Devices and disks, within the hardening: of a guest that the daemon starts, and of one with a unit of its own.
    let nvme = Function::find(NVME.0, NVME.1)?;
    let daemon = Guest { name: "linux1", unit: "vm-guest-linux1.scope" };
    let file = daemon.write(l1)?;
    ask(&["start", &file])?;
    daemon.attach_and_detach(l1, &systemd, &nvme)?;
    l1.prove(ended(daemon.unit)? == "inactive", "the daemon's guest powered itself off")?;
    let unit = Guest { name: "linux2", unit: "vm-guest@linux2.service" };
    unit.write(l1)?;
    systemctl(&["start", unit.unit]).and_then(Finished::succeeded)?;
    unit.attach_and_detach(l1, &systemd, &nvme)?;
    l1.prove(ended(unit.unit)? == "inactive", "the unit's guest powered itself off")?;

    // A boot ends claims, and forgets them but for those that are to be made again.
    ask(&["claim", &nvme.address, "--persist"])?;
    nvme.bind(None)?;
    fs::remove_dir_all("/run/vm-passthrough/ledger")?;
    systemctl(&["start", "vm-claims.service"]).and_then(Finished::succeeded)?;
    l1.prove(nvme.driver().as_deref() == Some("vfio-pci"), "vm-claims.service made a claim again")?;
    ask(&["release", &nvme.address])?;
    l1.prove(nvme.driver().as_deref() == Some("nvme"), "the claim was released")
}

/// Bytes of each pattern that a guest reads or writes.
const LEN: usize = 64 << 10;
/// L1 writes this on both disks. The guest reads it, and then writes one of the others: `READY` on its own disk, `USED` on both.
const HOST_SEED: u64 = 0x0073_6861_7265;
const READY: (u64, u64) = (0x0072_6561_6479, 1 << 20);
const USED: (u64, u64) = (0x0000_7573_6564, 2 << 20);
const GONE: (u64, u64) = (0x0000_676f_6e65, 3 << 20);

/// A Linux guest with a disk in a home directory, a tap and vsock.
struct Guest {
    name: &'static str,
    unit: &'static str,
}

impl Guest {
    /// Its disk: an image that only another user may open.
    fn disk(&self) -> Disk {
        Disk { node: format!("/home/{}/disk.img", self.name).into() }
    }

    /// Makes its disk, its tap and its file, which is returned.
    fn write(&self, l1: &L1) -> Result<String> {
        const ALICE: u32 = 1000;
        let disk = self.disk();
        let home = disk.node.parent().context("it is in no directory")?;
        fs::create_dir_all(home)?;
        fs::File::create(&disk.node)?.set_len(4 << 20)?;
        disk.write_pattern(HOST_SEED, 0, LEN)?;
        for (path, mode) in [(&*disk.node, 0o600), (home, 0o700)] {
            fs::set_permissions(path, Permissions::from_mode(mode))?;
            chown(path, Some(ALICE), Some(ALICE))?;
        }
        let file = format!("/etc/vm-service/{}.toml", self.name);
        let text = format!(
            "name = \"{}\"\nmemory = \"256M\"\n[boot]\nkernel = \"/guest/kernel\"\ninitrd = \"/guest/initrd\"\n\
             cmdline = \"console=ttyS0 quiet panic=-1 testbed.level=2 testbed.scenario={} testbed.variant={}\"\n\
             [[disks]]\npath = \"{}\"\n[[net]]\ntap = \"{0}\"\nvhost = true\n[vsock]\ncid = 33\n",
            self.name,
            l1.scenario,
            l1.variant,
            disk.node.display()
        );
        net::make_tap(self.name)?;
        fs::write(&file, text)?;
        Ok(file)
    }

    /// Gives the guest that runs the NVMe disk, and takes it back once the guest has used both.
    fn attach_and_detach(&self, l1: &mut L1, systemd: &Systemd, nvme: &Function) -> Result<()> {
        let (name, home) = (self.name, self.disk());
        let ask =
            |arguments: &[&str]| systemd.run(VM_SERVICE, arguments, TIMEOUT).and_then(Finished::succeeded);
        let has = |disk: &Disk, (seed, at)| disk.check_pattern(seed, at, LEN).is_ok().then_some(());
        let process = process_of(name)?;
        l1.prove(
            is_hardened(process)?,
            format!("{} runs its guest with few rights, and with sysfs read-only but for devices", self.unit),
        )?;
        wait_until("READY on the disk below /home", TIMEOUT, || has(&home, READY))
            .with_context(|| logs(systemd, name))?;
        l1.proved(format!("{}: the guest reads and writes a disk below /home", self.unit));
        NvmeDisk::of(nvme)?.write_pattern(HOST_SEED, 0, LEN)?;
        ask(&["attach", &nvme.address, "--guest", name])?;
        wait_until("USED on the disk below /home", TIMEOUT, || has(&home, USED))
            .with_context(|| logs(systemd, name))?;
        ask(&["detach", &nvme.address, "--guest", name])?;
        l1.prove(nvme.driver().as_deref() == Some("nvme"), "the host's driver has the device again")?;
        let (seed, at) = USED;
        NvmeDisk::of(nvme)?.check_pattern(seed, at, LEN)?;
        l1.proved(format!("{}: the guest had the device, which has what it wrote", self.unit));
        wait_until("GONE on the disk below /home", TIMEOUT, || has(&home, GONE))
            .with_context(|| logs(systemd, name))
    }
}

/// The log of a guest's process.
fn logs(systemd: &Systemd, name: &str) -> String {
    let said = systemd.run(VM_SERVICE, &["logs", name], TIMEOUT);
    said.map_or_else(|error| format!("{error:#}"), |said| format!("{}{}", said.stdout, said.stderr))
}

/// Whether a process has what units set: no new privileges, a filter of system calls, few capabilities, and a view of sysfs in
/// which only devices and their drivers can be written to.
fn is_hardened(process: u32) -> Result<bool> {
    const SYS_MODULE: u64 = 1 << 16;
    const NET_ADMIN: u64 = 1 << 12;
    let read = |name: &str| fs::read_to_string(Path::new("/proc").join(process.to_string()).join(name));
    let status = read("status")?;
    let value = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.map(str::trim).with_context(|| format!("/proc tells no {name}"))
    };
    let bound = u64::from_str_radix(value("CapBnd")?, 16)?;
    let mounts = read("mountinfo")?;
    // The last mount at a place covers the others.
    let options = |place: &str| {
        let mut of = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        of.rfind(|fields| fields.get(4) == Some(&place)).and_then(|fields| fields.get(5).copied())
    };
    let starts = |place: &str, with: &str| options(place).is_some_and(|options| options.starts_with(with));
    Ok(value("NoNewPrivs")? == "1"
        && value("Seccomp")? == "2"
        && bound & (SYS_MODULE | NET_ADMIN) == 0
        && starts("/sys", "ro")
        && starts("/sys/devices", "rw"))
}

fn l2(l2: &mut L2) -> Result<()> {
    let home = Disk::all(&Function::find(VIRTIO_BLOCK.0, VIRTIO_BLOCK.1)?, 1)?.swap_remove(0);
    home.check_pattern(HOST_SEED, 0, LEN)?;
    home.write_pattern(READY.0, READY.1, LEN)?;
    let nvme = wait_until("the device", TIMEOUT, || Function::find(NVME.0, NVME.1).ok())?;
    let disk = NvmeDisk::of(&nvme)?;
    disk.check_pattern(HOST_SEED, 0, LEN)?;
    disk.write_pattern(USED.0, USED.1, LEN)?;
    home.write_pattern(USED.0, USED.1, LEN)?;
    wait_until("the device to go", TIMEOUT, || Function::find(NVME.0, NVME.1).is_err().then_some(()))?;
    home.write_pattern(GONE.0, GONE.1, LEN)?;
    l2.prove(true, "the guest used both disks")
}

/// The process that runs a guest, of the daemon's or of a unit.
fn process_of(name: &str) -> Result<u32> {
    let is_it = |pid: &u32| {
        let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let files = [format!("guests/{name}/guest.toml"), format!("vm-service/{name}.toml")];
        line.contains("\0run\0") && files.iter().any(|file| line.contains(file))
    };
    let mut pids =
        fs::read_dir("/proc")?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(is_it).with_context(|| format!("no process runs the guest {name}"))
}
