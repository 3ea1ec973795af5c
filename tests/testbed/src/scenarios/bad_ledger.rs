//! The ledger's bad days: its file system is full, or one of its records is damaged. Nothing is claimed that could not be noted,
//! what is claimed can be released, and what `vm-service` says to do by hand for a damaged record puts the function back.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::agent::{Function, Guest, GuestPlan, L1, NvmeDisk};
use crate::scenario::{Contents, Scenario, Variant, Variants};
use crate::scenarios::bare_edu::EDU;
use crate::scenarios::linux_nvme::{DISK, NVME, NVME_AND_EDU};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "bad-ledger",
    about: "a full disk under the ledger, and damaged records: nothing is lost, and the remedies work",
    variants: Variants::Only(Variant::Iommufd),
    ports: 2,
    devices: NVME_AND_EDU,
    disks: DISK,
    memory_mib: 768,
    deadline: Duration::from_secs(1800),
    contents: Contents { bare_guest: true, ..Contents::NONE },
    l1,
    l2: None,
};

const TIMEOUT: Duration = Duration::from_secs(600);
/// `vm-service`'s exit statuses.
const FAILED: Option<i32> = Some(1);
const BLOCKED: Option<i32> = Some(3);
/// Where the ledger is.
const STATE: &str = "/run/vm-passthrough";
const FULL: &str = "No space left on device";
const BY_HAND: &str = "put it back by hand: ";

fn l1(l1: &mut L1) -> Result<()> {
    let (nvme, edu) = (Function::find(NVME.0, NVME.1)?, Function::find(EDU.0, EDU.1)?);
    fs::create_dir_all(STATE)?;
    mount("ledger", STATE, "tmpfs", MountFlags::empty(), c"size=64k,mode=0755")?;
    let tested = full(l1, &nvme, &edu).and_then(|()| damaged(l1, &nvme));
    unmount(STATE, UnmountFlags::DETACH)?;
    tested
}

/// Fills the file system of the ledger while one function is claimed and another is not.
fn full(l1: &mut L1, nvme: &Function, edu: &Function) -> Result<()> {
    l1.vm_service(&["claim", &edu.address], TIMEOUT)?.succeeded()?;
    let filler = format!("{STATE}/filler");
    let file = fs::File::create(&filler)?;
    let written = (0..).try_for_each(|page: u64| file.write_all_at(&[1; 4096], page * 4096));
    drop(file);
    l1.prove(written.is_err(), "the file system of the ledger is full")?;

    let refused = l1.vm_service(&["claim", &nvme.address], TIMEOUT)?;
    let (says, driver) = (refused.stderr.contains(FULL), nvme.driver());
    l1.prove(
        refused.code == FAILED && says && driver.as_deref() == Some("nvme"),
        format!("claim says so, and leaves {} with its driver", nvme.address),
    )
    .with_context(|| refused.stderr.clone())?;
    let ended = Guest::start(l1, &GuestPlan::bare("full", "pci", nvme))?.end(TIMEOUT)?.process;
    l1.prove(
        ended.code == FAILED && ended.stderr.contains(FULL) && nvme.driver().as_deref() == Some("nvme"),
        "so does run",
    )
    .with_context(|| ended.stderr.clone())?;
    l1.vm_service(&["release", &edu.address], TIMEOUT)?.succeeded()?;
    l1.prove(edu.driver().is_none(), "what was claimed can be released")?;

    fs::remove_file(&filler)?;
    let ended = Guest::start(l1, &GuestPlan::bare("room", "pci", nvme))?.end(TIMEOUT)?.succeeded(l1)?;
    l1.prove(ended.console.contains("1b36:0010"), "with room again a guest gets the disk")?;
    NvmeDisk::of(nvme)?;
    Ok(())
}

/// What becomes of a record.
type Damage = fn(&[u8]) -> Vec<u8>;

/// Damages the record of a claim in each of several ways.
fn damaged(l1: &mut L1, nvme: &Function) -> Result<()> {
    let record = format!("{STATE}/ledger/{}.claim", nvme.address);
    let ways: [(&str, Damage); 5] = [
        ("cut off", |good| good[..good.len() / 2].to_vec()),
        ("empty", |_| Vec::new()),
        ("zeros", |good| vec![0; good.len()]),
        ("garbage", |good| good.iter().map(|byte| byte.wrapping_mul(31) ^ 0x5a).collect()),
        ("one bit", |good| good.iter().enumerate().map(|(at, byte)| byte ^ u8::from(at == 40)).collect()),
    ];
    for (what, damage) in ways {
        l1.vm_service(&["claim", &nvme.address], TIMEOUT)?.succeeded()?;
        let good = fs::read(&record)?;
        fs::write(&record, damage(&good))?;
        let mut said = String::new();
        for (command, code) in [("claim", BLOCKED), ("release", FAILED)] {
            let refused = l1.vm_service(&[command, &nvme.address], TIMEOUT)?;
            said = format!("{}{}", refused.stdout, refused.stderr);
            ensure!(refused.code == code && said.contains(&record), "{what}: {command} said\n{said}");
        }
        ensure!(nvme.driver().as_deref() == Some("vfio-pci"), "{what}: the driver is {:?}", nvme.driver());
        let by_hand = said.lines().rev().find_map(|line| Some(line.split_once(BY_HAND)?.1));
        let by_hand = by_hand.with_context(|| format!("{what}: no remedy in\n{said}"))?;
        by_hand.split("; ").try_for_each(execute).with_context(|| format!("{what}: {by_hand}"))?;
        NvmeDisk::of(nvme).with_context(|| format!("{what}: {by_hand}"))?;
        let restriction = nvme.attribute("driver_override");
        ensure!(restriction.as_deref() == Some("(null)"), "{what}: driver_override is {restriction:?}");
        l1.proved(format!(
            "a record that is damaged ({what}) is kept, and what to do by hand gives the disk back"
        ));
    }
    Ok(())
}

/// Does what a shell would.
fn execute(command: &str) -> Result<()> {
    match command.split_once(" > ").map(|(echo, path)| (echo.trim().strip_prefix("echo"), path)) {
        Some((Some(value), path)) => Ok(fs::write(path, format!("{}\n", value.trim()))?),
        _ => match command.strip_prefix("rm ") {
            Some(path) => Ok(fs::remove_file(path)?),
            None => bail!("`{command}` is not known here"),
        },
    }
}
