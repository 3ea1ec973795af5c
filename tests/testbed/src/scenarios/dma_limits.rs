//! A guest's RAM can't be mapped for its device: VFIO keeps account of too few ranges (`dma_entry_limit`), or the process may lock too
//! little memory. Nothing stays touched, another guest runs on, and what `vm-service` says to do is done to the letter, and helps.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::thread::CapabilitySet;

use crate::agent::{
    Finished, Function, Guest, GuestPlan, L1, NvmeDisk, VM_SERVICE, processes, wait_until, with_locked_memory,
};
use crate::scenario::{Contents, Scenario, Variant};
use crate::scenarios::bare_edu::EDU;
use crate::scenarios::linux_nvme::{DISK, NVME, NVME_AND_EDU};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "dma-limits",
    about: "too few DMA entries, too little locked memory: run and attach refuse, nothing stays touched, and the remedies work",
    variants: Variant::ALL,
    ports: 2,
    devices: NVME_AND_EDU,
    disks: DISK,
    memory_mib: 768,
    deadline: Duration::from_secs(600),
    contents: Contents { bare_guest: true, ..Contents::NONE },
    l1,
    l2: None,
};

const TIMEOUT: Duration = Duration::from_secs(600);
/// `vm-service`'s exit statuses.
const FAILED: Option<i32> = Some(1);
const BLOCKED: Option<i32> = Some(3);
/// A guest that runs without a device.
const HOT: &str = "hot";
/// What a process may lock at first.
const LITTLE: Option<u64> = Some(1 << 20);

fn l1(l1: &mut L1) -> Result<()> {
    let (nvme, edu) = (Function::find(NVME.0, NVME.1)?, Function::find(EDU.0, EDU.1)?);
    let mut other = Guest::start(l1, &GuestPlan::bare("other", "spin", &nvme))?;
    other.wait_for_log("attached in", TIMEOUT)?;
    let mut daemon = Command::new(VM_SERVICE).arg("serve").stdin(Stdio::null()).spawn()?;
    let tested = match l1.variant {
        Variant::Group => entries(l1, &edu),
        Variant::Iommufd => Ok(()),
    }
    .and_then(|()| locked(l1, &edu));
    daemon.kill().and_then(|()| daemon.wait())?;
    tested?;
    l1.prove(other.runs() && other.holds_a_device(), "another guest, with its device, ran on all the while")?;
    drop(other);
    Guest::start(l1, &GuestPlan::bare("next", "pci", &nvme))?.end(TIMEOUT)?.succeeded(l1)?;
    NvmeDisk::of(&nvme)?;
    Ok(())
}

/// VFIO keeps account of no range.
fn entries(l1: &mut L1, edu: &Function) -> Result<()> {
    const LIMIT: &str = "/sys/module/vfio_iommu_type1/parameters/dma_entry_limit";
    let hot = hot(l1)?;
    fs::write(LIMIT, "0")?;
    let words = ["takes 1 entries", "0 are left", LIMIT];
    let said = refused(l1, edu, "no entry", FAILED, &words, |l1| run(l1, edu, "refused"))?;
    refused(l1, edu, "no entry, attach", FAILED, &words, |l1| attach(l1, edu))?;
    let (value, path) = remedy(&said, "echo ")?.split_once(" > ").context("it says no echo")?;
    let path = path.trim_end_matches(|end: char| !end.is_ascii_alphabetic());
    fs::write(path, value).with_context(|| format!("echo {value} > {path}"))?;
    run(l1, edu, "entries")?.succeeded()?;
    attach(l1, edu)?.succeeded()?;
    l1.proved(format!("{value} in {path} helps: both have the device then"));
    stop(l1, hot)
}

/// A process may lock too little, and raise that or not.
fn locked(l1: &mut L1, edu: &Function) -> Result<()> {
    let (lock, resource) = (CapabilitySet::IPC_LOCK, CapabilitySet::SYS_RESOURCE);
    let little = (LITTLE, LITTLE);
    let limited = |l1: &mut L1, limit, without| with_locked_memory(limit, without, || run(l1, edu, "locked"));

    let hot_guest = with_locked_memory(little, lock | resource, || hot(l1))?;
    let words = ["memlock-too-low", "32 MiB", "ulimit -l "];
    let said = refused(l1, edu, "locked memory", BLOCKED, &words, |l1| limited(l1, little, lock | resource))?;
    // What maps the RAM is the guest's process, another user, which has no right of the one that started it.
    let words = ["may lock 1048576", "LimitMEMLOCK=infinity", "CAP_SYS_RESOURCE"];
    refused(l1, edu, "locked memory, attach", FAILED, &words, |l1| attach(l1, edu))?;
    stop(l1, hot_guest)?;

    let kib: u64 = remedy(&said, "ulimit -l ")?.parse().context("ulimit takes a number")?;
    let raised = (Some(kib << 10), Some(kib << 10));
    limited(l1, raised, lock | resource)?.succeeded()?;
    let hot_guest = with_locked_memory(raised, lock | resource, || hot(l1))?;
    attach(l1, edu)?.succeeded()?;
    l1.proved(format!("`ulimit -l {kib}` is enough, for `run` and for `attach`"));
    stop(l1, hot_guest)?;

    refused(l1, edu, "CAP_IPC_LOCK alone", FAILED, &words, |l1| limited(l1, little, resource))?;
    limited(l1, little, CapabilitySet::empty())?.succeeded()?;
    limited(l1, little, lock)?.succeeded()?;
    l1.proved("with CAP_SYS_RESOURCE the limit is raised, with CAP_IPC_LOCK or without");
    limited(l1, (LITTLE, None), lock | resource)?.succeeded()?;
    l1.proved("a soft limit is raised by itself");
    Ok(())
}

/// The word of a message that follows `before`.
fn remedy<'a>(said: &'a str, before: &str) -> Result<&'a str> {
    let after = said.split_once(before).with_context(|| format!("{before:?} is not in\n{said}"))?.1;
    let end = after.find([';', ',', ')', '"']).unwrap_or(after.len());
    Ok(after[..end].trim())
}

/// Does what must be refused with this exit status and these words, and checks that nothing is left of it; what it said.
fn refused(
    l1: &mut L1,
    edu: &Function,
    what: &str,
    code: Option<i32>,
    words: &[&str],
    act: impl FnOnce(&mut L1) -> Result<Finished>,
) -> Result<String> {
    let before = processes("guest-vmm").len();
    let refused = act(l1)?;
    let said = format!("{}{}", refused.stderr, refused.stdout);
    let says = words.iter().all(|word| said.contains(word));
    l1.prove(refused.code == code && says, format!("{what}: it is refused, with the remedy"))
        .with_context(|| format!("{:?} {words:?}\n{said}", refused.code))?;
    let claims = l1.vm_service(&["claims"], TIMEOUT)?.succeeded()?.stdout;
    let restriction = edu.attribute("driver_override");
    l1.prove(
        edu.driver().is_none()
            && restriction.as_deref() == Some("(null)")
            && !claims.contains(&edu.address)
            && processes("guest-vmm").len() == before,
        format!("{what}: nothing is bound, claimed or left running"),
    )
    .with_context(|| format!("{:?} {restriction:?}\n{claims}\n{said}", edu.driver()))?;
    Ok(said)
}

/// Runs a guest with the device, which drives it.
fn run(l1: &mut L1, edu: &Function, name: &str) -> Result<Finished> {
    Ok(Guest::start(l1, &GuestPlan::bare(name, "edu msis=1", edu))?.end(TIMEOUT)?.process)
}

/// Starts the guest without a device.
fn hot(l1: &mut L1) -> Result<Guest> {
    let guest = Guest::start(l1, &GuestPlan::sharing(HOT, "spin", ""))?;
    wait_until("the guest", TIMEOUT, || {
        let asked = l1.vm_service(&["guests"], TIMEOUT).ok()?;
        (asked.code == Some(0) && asked.stdout.contains(HOT)).then_some(())
    })?;
    Ok(guest)
}

fn attach(l1: &mut L1, edu: &Function) -> Result<Finished> {
    l1.vm_service(&["attach", &edu.address, "--guest", HOT], TIMEOUT)
}

fn stop(l1: &mut L1, guest: Guest) -> Result<()> {
    l1.vm_service(&["stop", HOT, "--now"], TIMEOUT)?.succeeded()?;
    guest.end(TIMEOUT)?.process.succeeded()?;
    Ok(())
}
