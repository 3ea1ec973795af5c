//! Functions that nothing resets one by one: those of one device, and two devices behind a conventional bridge.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::Signal;

use super::device_kinds::XHCI;
use super::vmm_killed::signal;
use crate::agent::{Function, Guest, GuestPlan, L1};
use crate::scenario::{Contents, Scenario, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "joint-reset",
    about: "functions without a reset of their own are reset together, which a register shows; explain says which of them need which",
    variants: Variants::Both,
    ports: 2,
    devices: &[
        "-global",
        "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off",
        "-device",
        "qemu-xhci,bus=port0,multifunction=on,addr=0.0",
        "-device",
        "qemu-xhci,bus=port0,addr=0.1",
        "-device",
        "pcie-pci-bridge,id=bridge0,bus=port1",
        "-device",
        "qemu-xhci,bus=bridge0,addr=1.0",
        "-device",
        "qemu-xhci,bus=bridge0,addr=2.0",
    ],
    disks: &[],
    memory_mib: 768,
    deadline: Duration::from_secs(1800),
    contents: Contents { bare_guest: true, ..Contents::NONE },
    l1,
    l2: None,
};

const TIMEOUT: Duration = Duration::from_secs(600);
const BLOCKED: i32 = 3;
/// CONFIG of the operational registers, which QEMU has 64 bytes into BAR 0: where the guest leaves its mark.
const CONFIG: u64 = 0x40 + 0x38;

fn l1(l1: &mut L1) -> Result<()> {
    let found = Function::find_all(XHCI.0, XHCI.1)?;
    let [first, second, left, right] = &found[..] else {
        bail!("these are not two functions of a device and two devices behind a bridge: {found:?}");
    };
    for (function, other) in [(first, second), (second, first)] {
        let along = format!("is reset by its port 0000:00:04.0, along with {}", other.address);
        says(l1, &["explain", &function.address], 0, &[&along, "goes to the same guest"])?;
    }
    for (function, other) in [(left, right), (right, left)] {
        let also = format!("would also reset {}, which the guest does not get", other.address);
        let give = format!("give {} to the same guest, as --with-group does", other.address);
        for command in ["explain", "claim"] {
            says(l1, &[command, &function.address], BLOCKED, &[&also, &give])?;
        }
        let along = format!(", along with {}", other.address);
        says(l1, &["explain", &function.address, "--with-group"], 0, &[&along])?;
    }
    // Linux says otherwise of the first one that it finds on a bus.
    for function in [first, left] {
        let method = function.attribute("reset_method");
        l1.prove(
            method.as_deref() == Some("bus"),
            format!("{}: though Linux names its bus", function.address),
        )?;
    }
    let plan = GuestPlan { devices: vec![left], ..GuestPlan::bare("one", "xhci", left) };
    let refused = Guest::start(l1, &plan)?.end(TIMEOUT)?.process;
    let holds = refused.code == Some(BLOCKED)
        && refused.stderr.contains("nothing was touched")
        && refused.stderr.contains(&format!("would also reset {}", right.address));
    l1.prove(holds, "a guest that is to get one of two is refused before anything is touched")
        .with_context(|| refused.stderr)?;

    for (name, arguments, devices) in [
        ("functions", &[][..], [first, second]),
        ("function", &[], [first, first]),
        ("devices", &["--with-group"], [left, right]),
    ] {
        let before: Vec<_> = devices.iter().map(|device| device.driver()).collect();
        for time in ["first", "second"] {
            let mut devices = devices.to_vec();
            devices.dedup();
            let count = devices.len();
            let plan = GuestPlan { devices, arguments, ..GuestPlan::bare(name, "xhci", first) };
            let ended = Guest::start(l1, &plan)?.end(TIMEOUT)?.succeeded(l1)?;
            l1.prove(
                ended.console.matches("bare: clean ok").count() == count,
                format!("{name}: the {time} guest finds {count} as a reset leaves them, and leaves its mark"),
            )?;
        }
        for (device, before) in devices.iter().zip(before) {
            l1.prove(device.driver() == before, format!("{} is on {before:?} again", device.address))?;
            if before.is_none() {
                let config = device.exchange_words(0, &[CONFIG], None)?;
                l1.prove(config == [0], format!("the host finds no mark in {}", device.address))?;
            }
        }
    }

    let plan = GuestPlan {
        devices: vec![left, right],
        arguments: &["--with-group"],
        ..GuestPlan::bare("restarts", "xhci reboot", left)
    };
    let mut guest = Guest::start(l1, &plan)?;
    guest.wait_for_texts("bare: controllers ok", 4, TIMEOUT)?;
    signal(guest.pid(), Signal::TERM)?;
    let console = guest.end(TIMEOUT)?.console;
    l1.prove(
        !console.contains("FAILED") && console.matches("bare: clean ok").count() >= 8,
        "both are reset whenever their guest restarts",
    )
    .with_context(|| console)
}

/// Checks how a command of `vm-service` ends, and that it says all of this.
fn says(l1: &mut L1, arguments: &[&str], code: i32, parts: &[&str]) -> Result<()> {
    let ended = l1.vm_service(arguments, TIMEOUT)?;
    let said = format!("{}{}", ended.stdout, ended.stderr);
    l1.prove(
        ended.code == Some(code) && parts.iter().all(|part| said.contains(part)),
        format!("{}: {}", arguments.join(" "), parts.join(" … ")),
    )
    .with_context(|| format!("{:?}: {said}", ended.code))
}
