//! A Linux guest has a BAR of 1 GiB, or of 256 GiB, reaches all of it, and KVM maps it by the GiB.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;

use super::vmm_killed::signal;
use crate::agent::{Function, Guest, GuestPlan, L1, L2};
use crate::report::Report;
use crate::scenario::{Contents, Scenario, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "linux-big-bar",
    about: "a Linux guest has a BAR of 1 GiB, and reaches its first, middle and last page with no exit",
    variants: Variants::Both,
    ports: 1,
    devices: &[
        "-object",
        "memory-backend-ram,id=large,size=1G,reserve=off",
        "-device",
        "ivshmem-plain,memdev=large,bus=port0",
    ],
    disks: &[],
    memory_mib: 1536,
    deadline: Duration::from_secs(1800),
    contents: Contents { linux_guest: true, ..Contents::NONE },
    l1: |l1| give(l1, GIB),
    l2: Some(l2),
};

// In a machine of its own: its firmware finds no place for both.
pub(super) const HUGE: Scenario = Scenario {
    name: "linux-huge-bar",
    about: "a Linux guest has a BAR of 256 GiB, and reaches its first, middle and last page with no exit",
    devices: &[
        "-cpu",
        "max,-erms,-fsrm,phys-bits=46",
        "-global",
        "q35-pcihost.pci-hole64-size=1T",
        "-object",
        "memory-backend-ram,id=huge,size=256G,reserve=off",
        "-device",
        "ivshmem-plain,memdev=huge,bus=port0",
    ],
    l1: |l1| give(l1, 256 * GIB),
    ..SCENARIO
};

const TIMEOUT: Duration = Duration::from_secs(600);
/// QEMU's shared memory, which is its BAR 2.
pub(super) const IVSHMEM: (u16, u16) = (0x1af4, 0x1110);
const BAR: usize = 2;
const GIB: u64 = 1 << 30;
/// What the guest reports once it has touched the BAR.
const AWAITS_BUTTON: &str = "power-button";

/// Gives a guest the function whose BAR is that large.
fn give(l1: &mut L1, size: u64) -> Result<()> {
    let (function, found) = found()?;
    ensure!(found == size, "the BAR has {found:#x} bytes");
    fill(&function, size, host_word)?;
    let explained = l1.vm_service(&["explain", &function.address], TIMEOUT)?.succeeded()?;
    l1.prove(explained.stdout.contains("ready"), format!("a BAR of {} GiB is ready", size / GIB))?;
    l1.vm_service(&["claim", &function.address], TIMEOUT)?.succeeded()?;
    let mut guest = Guest::start(l1, &GuestPlan::linux("big", &function))?;
    let is_touched = |report: &Report| match report {
        Report::Value { name, .. } if name == AWAITS_BUTTON => Some(()),
        _ => None,
    };
    guest.wait_for("touching the BAR", TIMEOUT, is_touched)?;
    let log = guest.log();
    let line = log.lines().find(|line| line.contains("attached in"));
    let ms = line.and_then(|line| line.rsplit_once("attached in ")?.1.split_once(" ms")?.0.parse().ok());
    let ms = ms.with_context(|| format!("no time of the attach in\n{log}"))?;
    l1.figure("opening and attaching it", ms, "ms");
    let pages: u64 = fs::read_to_string("/sys/kernel/debug/kvm/pages_1g")?.trim().parse()?;
    l1.prove(pages > 0, format!("KVM maps {pages} pages of 1 GiB into the guest, which has 256 MiB of RAM"))?;
    signal(guest.pid(), Signal::TERM)?;
    guest.end(TIMEOUT)?.succeeded(l1)?;
    let begun = Instant::now();
    l1.vm_service(&["release", &function.address], TIMEOUT)?.succeeded()?;
    l1.figure("releasing it", begun.elapsed().as_secs_f64() * 1e3, "ms");
    l1.prove(function.driver().is_none(), "it is without a driver again")?;
    let words = function.exchange_words(BAR, &pages_of(size), None)?;
    l1.prove(
        words == pages_of(size).map(guest_word),
        "what the guest wrote is in the pages where it wrote it",
    )
}

fn l2(l2: &mut L2) -> Result<()> {
    let (function, size) = found()?;
    let (address, _) = function.memory_bar(BAR)?;
    l2.prove(address % size == 0, format!("the BAR of {} GiB is at {address:#x}", size / GIB))?;
    let before = fill(&function, size, guest_word)?;
    l2.prove(before == pages_of(size).map(host_word), "it reads in it what the host wrote")?;
    l2.await_power_button(TIMEOUT)
}

/// The function, and the size of its BAR.
fn found() -> Result<(Function, u64)> {
    let function = Function::find(IVSHMEM.0, IVSHMEM.1)?;
    let (_, size) = function.memory_bar(BAR)?;
    Ok((function, size))
}

/// Writes to the pages of its BAR; what was there before.
fn fill(function: &Function, size: u64, word: fn(u64) -> u32) -> Result<Vec<u32>> {
    function.exchange_words(BAR, &pages_of(size), Some(&pages_of(size).map(word)))
}

/// The first, the middle and the last page.
fn pages_of(size: u64) -> [u64; 3] {
    [0, size / 2, size - 4096]
}

fn host_word(at: u64) -> u32 {
    0x4057_0000 ^ (at >> 12) as u32
}

fn guest_word(at: u64) -> u32 {
    !host_word(at)
}
