//! The units of the package, under a real systemd.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::agent::{Finished, L1, Systemd, VM_SERVICE, wait_until};
use crate::scenario::{Contents, Scenario, Variant, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "systemd",
    about: "systemd starts guests by their units, and the daemon when it is asked, whose guests outlive it",
    variants: Variants::Only(Variant::Iommufd),
    ports: 0,
    devices: &[],
    disks: &[],
    memory_mib: 768,
    deadline: Duration::from_secs(1800),
    contents: Contents { bare_guest: true, systemd: true, ..Contents::NONE },
    l1,
    l2: None,
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
        let known = ask(&["guests"])?.stdout.contains("web1");
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
    l1.prove(ended("vm-guest-web1.scope")? == "inactive", "nothing is left of the guest when it is stopped")
}

/// The process that runs a guest of the daemon's.
fn process_of(name: &str) -> Result<u32> {
    let is_it = |pid: &u32| {
        let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.contains("\0run\0") && line.contains(&format!("guests/{name}/"))
    };
    let mut pids =
        fs::read_dir("/proc")?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(is_it).with_context(|| format!("no process runs the guest {name}"))
}
