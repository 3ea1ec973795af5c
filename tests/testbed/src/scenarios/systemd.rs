//! The units of the package, under a real systemd.

use std::fs;
use std::time::Duration;

use anyhow::Result;

use crate::agent::{Finished, L1, Systemd, wait_until};
use crate::scenario::{Contents, Scenario, Variant};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "systemd",
    about: "systemd starts and stops guests by their units, and knows how each ended",
    variants: &[Variant::Iommufd],
    ports: 0,
    devices: &[],
    disks: &[],
    memory_mib: 768,
    deadline: Duration::from_secs(180),
    contents: Contents { bare_guest: true, systemd: true, ..Contents::NONE },
    l1,
    l2: None,
};

const TIMEOUT: Duration = Duration::from_secs(60);

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
    systemctl(&["stop", "vm-guest@web1"]).and_then(Finished::succeeded)?;
    l1.prove(ended("vm-guest@web1")? == "inactive", "a guest that is stopped leaves its unit inactive, too")?;
    l1.prove(!fs::exists("/run/vm-guest/web1")?, "nothing of it is left in /run")?;
    systemctl(&["start", "vm-guest@missing"])?;
    l1.prove(ended("vm-guest@missing")? == "failed", "a guest without a file fails its unit")
}
