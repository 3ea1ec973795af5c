//! A guest's RAM can't be had, or mapped for its device: VFIO keeps account of too few ranges (`dma_entry_limit`), the process may lock
//! too little memory, or the host has too few huge pages. Nothing stays touched, another guest runs on, and what `vm-service` says to do is done to the letter, and helps.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::thread::CapabilitySet;

use crate::agent::{
    Finished, Function, Guest, GuestPlan, L1, NvmeDisk, VM_SERVICE, processes, wait_until, with_locked_memory,
};
use crate::scenario::{Contents, Scenario, Variant, Variants};
use crate::scenarios::bare_edu::EDU;
use crate::scenarios::linux_nvme::{DISK, NVME, NVME_AND_EDU};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "dma-limits",
    about: "too few DMA entries or huge pages, too little locked memory: run and attach refuse, nothing stays touched, and the remedies work",
    variants: Variants::Both,
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
    .and_then(|()| locked(l1, &edu))
    .and_then(|()| huge_pages(l1, &edu));
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
    let (value, path) = echo(&said)?;
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
    let words = ["memlock-too-low", "may lock 1 MiB", "LimitMEMLOCK=infinity", "CAP_SYS_RESOURCE"];
    refused(l1, edu, "locked memory, attach", BLOCKED, &words, |l1| attach(l1, edu))?;
    stop(l1, hot_guest)?;

    let kib: u64 = remedy(&said, "ulimit -l ")?.parse().context("ulimit takes a number")?;
    let raised = (Some(kib << 10), Some(kib << 10));
    limited(l1, raised, lock | resource)?.succeeded()?;
    let hot_guest = with_locked_memory(raised, lock | resource, || hot(l1))?;
    attach(l1, edu)?.succeeded()?;
    l1.proved(format!("`ulimit -l {kib}` is enough, for `run` and for `attach`"));
    stop(l1, hot_guest)?;

    let words = ["may lock 1048576", "LimitMEMLOCK=infinity", "CAP_SYS_RESOURCE"];
    refused(l1, edu, "CAP_IPC_LOCK alone", FAILED, &words, |l1| limited(l1, little, resource))?;
    limited(l1, little, CapabilitySet::empty())?.succeeded()?;
    limited(l1, little, lock)?.succeeded()?;
    l1.proved("with CAP_SYS_RESOURCE the limit is raised, with CAP_IPC_LOCK or without");
    limited(l1, (LITTLE, None), lock | resource)?.succeeded()?;
    l1.proved("a soft limit is raised by itself");
    Ok(())
}

/// The host's pool of huge pages is empty.
fn huge_pages(l1: &mut L1, edu: &Function) -> Result<()> {
    const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";
    let free =
        || -> Result<u64> { Ok(fs::read_to_string(format!("{POOL}/free_hugepages"))?.trim().parse()?) };
    let plan = |name| GuestPlan {
        settings: "hugepages = \"2M\"",
        memory_mib: 64,
        ..GuestPlan::bare(name, "edu msis=200", edu)
    };
    let run = |l1: &mut L1| Ok(Guest::start(l1, &plan("huge"))?.end(TIMEOUT)?.process);
    let words = ["huge-pages-too-few", "take 32 huge pages of 2 MiB", "has 0 that are free"];
    let alone = |l1: &mut L1| {
        let plan = GuestPlan { devices: Vec::new(), ..plan("alone") };
        Ok(Guest::start(l1, &plan)?.end(TIMEOUT)?.process)
    };
    refused(l1, edu, "huge pages, no device", FAILED, &words[1..], alone)?;
    let said = refused(l1, edu, "huge pages", BLOCKED, &words, run)?;
    let (value, path) = echo(&said)?;
    run(l1)?.succeeded()?;
    l1.proved(format!("{value} in {path} helps: its device reaches the guest's RAM"));

    let mut guest = Guest::start(l1, &GuestPlan { cmdline: "spin", ..plan("spins") })?;
    guest.wait_for_log("attached in", TIMEOUT)?;
    let smaps = fs::read_to_string(format!("/proc/{}/smaps", guest.vmm()?))?;
    let lines = smaps.lines().skip_while(|line| !line.contains("guest-ram"));
    let pages = lines.into_iter().find_map(|line| line.strip_prefix("KernelPageSize:")).map(str::trim);
    l1.prove(pages == Some("2048 kB") && free()? == 0, "all of its RAM is mapped by huge pages")
        .with_context(|| format!("{pages:?}, {} are free", free().unwrap_or_default()))?;
    l1.vm_service(&["stop", "spins", "--now"], TIMEOUT)?.succeeded()?;
    guest.end(TIMEOUT)?.process.succeeded()?;
    l1.prove(free()?.to_string() == value, "the host has all of them back")?;

    let without =
        GuestPlan { settings: plan("").settings, memory_mib: 64, ..GuestPlan::sharing(HOT, "spin", "") };
    let guest = hot_as(l1, &without)?;
    attach(l1, edu)?.succeeded()?;
    l1.prove(free()? == 0, "a guest that has all of them gets a device while it runs")?;
    stop(l1, guest)?;
    Ok(fs::write(path, "0")?)
}

/// Does the `echo` that a message names: what was written, and where.
fn echo(said: &str) -> Result<(&str, &str)> {
    let (value, path) = remedy(said, "echo ")?.split_once(" > ").context("it says no echo")?;
    fs::write(path, value).with_context(|| format!("echo {value} > {path}"))?;
    Ok((value, path))
}

/// The words of a message that follow `before`.
fn remedy<'a>(said: &'a str, before: &str) -> Result<&'a str> {
    let after = said.split_once(before).with_context(|| format!("{before:?} is not in\n{said}"))?.1;
    let end = after.find([';', ',', ')', '"', '\n']).unwrap_or(after.len());
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
    hot_as(l1, &GuestPlan::sharing(HOT, "spin", ""))
}

fn hot_as(l1: &mut L1, plan: &GuestPlan<'_>) -> Result<Guest> {
    let guest = Guest::start(l1, plan)?;
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
