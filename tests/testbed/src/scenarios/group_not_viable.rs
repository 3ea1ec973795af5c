//! Two devices behind a conventional PCI bridge share an IOMMU group: neither can be taken alone, and the refusal says
//! which companion and which driver is in the way, before anything was touched.

use std::time::Duration;

use anyhow::{Context, Result};

use crate::agent::{Function, Guest, GuestPlan, L1, NvmeDisk};
use crate::scenario::{Contents, Disk, Scenario, Variants};
use crate::scenarios::linux_e1000e::E1000E;
use crate::scenarios::linux_nvme::NVME;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "group-not-viable",
    about: "a function whose group holds another driver's device is refused untouched; --with-group takes both, after a boot too",
    variants: Variants::Both,
    ports: 1,
    devices: &[
        "-device",
        "pcie-pci-bridge,id=bridge0,bus=port0",
        "-drive",
        "file={disk},if=none,id=drive0,format=raw,cache=unsafe",
        "-device",
        "nvme,drive=drive0,serial=testbed,bus=bridge0,addr=1.0",
        "-device",
        "e1000e,bus=bridge0,addr=2.0",
    ],
    disks: &[Disk { name: "disk", mib: 16 }],
    memory_mib: 1024,
    deadline: Duration::from_secs(1800),
    contents: Contents { bare_guest: true, ..Contents::NONE },
    l1,
    l2: None,
};

const TIMEOUT: Duration = Duration::from_secs(600);
/// `vm-service`'s exit status for a device that can't be passed.
const BLOCKED: i32 = 3;
const SEED: u64 = 0x6772_6f75_7021;

fn l1(l1: &mut L1) -> Result<()> {
    let (nvme, card) = (Function::find(NVME.0, NVME.1)?, Function::find(E1000E.0, E1000E.1)?);
    l1.prove(nvme.group().is_some() && nvme.group() == card.group(), "both devices are in one IOMMU group")?;
    NvmeDisk::of(&nvme)?.write_pattern(SEED, 0, 4096)?;
    let drivers = |nvme: &Function, card: &Function| (nvme.driver(), card.driver());
    let before = drivers(&nvme, &card);
    l1.prove(before == (Some("nvme".into()), Some("e1000e".into())), "the host's drivers have both")?;

    let plan = GuestPlan { arguments: &[], ..GuestPlan::bare("refused", "pci", &nvme) };
    for what in ["explain", "claim", "run"] {
        let refused = match what {
            "run" => Guest::start(l1, &plan)?.end(TIMEOUT)?.process,
            command => l1.vm_service(&[command, &nvme.address], TIMEOUT)?,
        };
        l1.prove(
            refused.code == Some(BLOCKED),
            format!("{what} answers that the device can't be passed ({:?})", refused.code),
        )?;
        let said = format!("{}{}", refused.stdout, refused.stderr);
        for word in ["group-not-viable", &card.address, "e1000e"] {
            l1.prove(said.contains(word), format!("{what} names {word}"))
                .with_context(|| format!("{what} said:\n{said}"))?;
        }
        l1.prove(drivers(&nvme, &card) == before, format!("after {what} the drivers are as before"))?;
        for function in [&nvme, &card] {
            let restriction = function.attribute("driver_override");
            l1.prove(
                restriction.as_deref() == Some("(null)"),
                format!("{what} left {} unrestricted", function.address),
            )?;
        }
    }

    l1.vm_service(&["claim", &nvme.address, "--with-group", "--persist"], TIMEOUT)?.succeeded()?;
    let both = (Some("vfio-pci".into()), Some("vfio-pci".into()));
    l1.prove(drivers(&nvme, &card) == both, "claim --with-group takes both")?;
    // As a boot leaves it.
    std::fs::remove_dir_all("/run/vm-passthrough")?;
    nvme.bind(None)?;
    card.bind(None)?;
    l1.prove(drivers(&nvme, &card) == before, "a boot ends the claim")?;
    l1.vm_service(&["claim", "--restore"], TIMEOUT)?.succeeded()?;
    l1.prove(drivers(&nvme, &card) == both, "claim --restore takes both again")?;
    let again = l1.vm_service(&["claim", "--restore"], TIMEOUT)?.succeeded()?;
    l1.prove(again.stdout.contains("is claimed already"), "and leaves them when it is run again")?;
    let claims = l1.vm_service(&["claims"], TIMEOUT)?.succeeded()?;
    l1.prove(claims.stdout.matches("  yes  ").count() == 2, format!("claims has both:\n{}", claims.stdout))?;
    l1.vm_service(&["release", "--all"], TIMEOUT)?.succeeded()?;
    l1.prove(drivers(&nvme, &card) == before, "release gives both back")?;

    let plan = GuestPlan { arguments: &["--with-group"], ..GuestPlan::bare("group", "pci", &nvme) };
    let ended = Guest::start(l1, &plan)?.end(TIMEOUT)?.succeeded(l1)?;
    l1.prove(ended.console.contains("1b36:0010"), "run --with-group gives the guest its device")?;
    l1.prove(!ended.console.contains("8086:10d3"), "and not the companion")?;
    l1.prove(drivers(&nvme, &card) == before, "after it both have their drivers again")?;
    NvmeDisk::of(&nvme)?.check_pattern(SEED, 0, 4096)?;
    Ok(())
}
