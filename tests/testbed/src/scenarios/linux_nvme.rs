//! The main job: an NVMe disk is taken from the host's driver by its PCI address, a Linux guest's own driver works
//! on it through a real IOMMU with MSI-X, and then the host's driver has it again, with the guest's data. It is a device of two
//! functions, and so it is for the guest.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};

use super::topology;
use crate::agent::{Function, Guest, GuestPlan, L1, L2, NvmeDisk};
use crate::scenario::{Contents, Disk, Scenario, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "linux-nvme",
    about: "a Linux guest reads and writes an NVMe disk taken from the host by address; the host then has its data",
    variants: Variants::Both,
    ports: 1,
    devices: &[
        "-drive",
        "file={disk},if=none,id=drive0,format=raw,cache=unsafe",
        "-drive",
        "file={second},if=none,id=drive1,format=raw,cache=unsafe",
        "-device",
        "nvme,drive=drive0,serial=testbed,bus=port0,addr=0.0,multifunction=on",
        "-device",
        "nvme,drive=drive1,serial=second,bus=port0,addr=0.1",
    ],
    disks: &[Disk { name: "disk", mib: 64 }, Disk { name: "second", mib: 16 }],
    memory_mib: 1536,
    deadline: Duration::from_secs(1800),
    contents: Contents { linux_guest: true, ..Contents::NONE },
    l1,
    l2: Some(l2),
};

/// An NVMe controller, of the disk `disk`, and an edu, each behind a root port. Scenarios that need either have both, and so
/// share an L1.
pub(super) const NVME_AND_EDU: &[&str] = &[
    "-drive",
    "file={disk},if=none,id=drive0,format=raw,cache=unsafe",
    "-device",
    "nvme,drive=drive0,serial=testbed,bus=port0",
    "-device",
    "edu,bus=port1,dma_mask=0xffffffffffffffff",
];
/// Its disk.
pub(super) const DISK: &[Disk] = &[Disk { name: "disk", mib: 64 }];
/// QEMU's NVMe controller.
pub(super) const NVME: (u16, u16) = (0x1b36, 0x0010);

const LEN: usize = 2 << 20;
const HOST_SEED: u64 = 0x0068_6f73_7421;
const HOST_AT: u64 = 1 << 20;
const GUEST_SEED: u64 = 0x6775_6573_7421;
const GUEST_AT: u64 = 32 << 20;
const SECOND_SEED: u64 = 0x7365_636f_6e64;
const SECOND_LEN: usize = 64 << 10;

/// The two functions, which are those of one device.
fn functions() -> Result<[Function; 2]> {
    let found = Function::find_all(NVME.0, NVME.1)?;
    let found: Result<[Function; 2], _> = found.try_into();
    let [nvme, second] = found.map_err(|found| anyhow!("these are {}, not 2: {found:?}", found.len()))?;
    let slot =
        nvme.address.strip_suffix(".0").with_context(|| format!("{} is no function 0", nvme.address))?;
    ensure!(second.address == format!("{slot}.1"), "{} is not the other function of {slot}", second.address);
    for function in [&nvme, &second] {
        NvmeDisk::of(function)?;
        let driver = function.driver();
        ensure!(driver.as_deref() == Some("nvme"), "{} is bound to {driver:?}", function.address);
    }
    Ok([nvme, second])
}

fn l1(l1: &mut L1) -> Result<()> {
    let [nvme, second] = functions()?;
    l1.proved(format!("the host's nvme driver has {} and {}", nvme.address, second.address));
    let written = NvmeDisk::of(&nvme)?.write_pattern(HOST_SEED, HOST_AT, LEN)?;
    l1.proved(format!("the host wrote {LEN} bytes, checksum {written:016x}"));

    let cmdline = topology::parameter(&[&nvme, &second])?;
    let plan = GuestPlan { cmdline: &cmdline, ..GuestPlan::linux("main-job", &nvme) };
    let guest = Guest::start(l1, &GuestPlan { devices: vec![&nvme, &second], ..plan })?;
    let ended = guest.end(Duration::from_secs(240))?.succeeded(l1)?;
    l1.figure("run of the guest, from start to its end", ended.process.took.as_secs_f64(), "s");

    functions()?;
    l1.proved(format!("the host's nvme driver has {} and {} again", nvme.address, second.address));
    let disk = NvmeDisk::of(&nvme)?;
    let kept = disk.check_pattern(HOST_SEED, HOST_AT, LEN)?;
    l1.prove(kept == written, format!("the host's data is still there, checksum {kept:016x}"))?;
    let got = disk.check_pattern(GUEST_SEED, GUEST_AT, LEN)?;
    l1.proved(format!("the host reads what the guest wrote, checksum {got:016x}"));
    NvmeDisk::of(&second)?.check_pattern(SECOND_SEED, 0, SECOND_LEN)?;
    l1.proved("so it does from the other function");
    let again = disk.write_pattern(HOST_SEED + 1, HOST_AT, LEN)?;
    l1.proved(format!("the host writes again, checksum {again:016x}"));
    Ok(())
}

fn l2(l2: &mut L2) -> Result<()> {
    let [nvme, second] = functions()?;
    let disk = NvmeDisk::of(&nvme)?;
    topology::compare(l2, &[&nvme, &second])?;
    NvmeDisk::of(&second)?.write_pattern(SECOND_SEED, 0, SECOND_LEN)?;
    let read = disk.check_pattern(HOST_SEED, HOST_AT, LEN)?;
    l2.prove(true, format!("the guest reads what the host wrote, checksum {read:016x}"))?;
    let written = disk.write_pattern(GUEST_SEED, GUEST_AT, LEN)?;
    l2.prove(true, format!("the guest wrote {LEN} bytes, checksum {written:016x}"))?;
    let vectors = nvme.message_vectors();
    l2.prove(
        !vectors.is_empty() && vectors.iter().all(|kind| kind == "msix"),
        format!("the disk interrupts the guest by MSI-X ({} vectors)", vectors.len()),
    )?;
    let taken = interrupts_of(&disk.controller)?;
    l2.prove(taken > 0, format!("interrupts came from {}", disk.controller))
}

/// How many interrupts came from the controller's queues.
fn interrupts_of(controller: &str) -> Result<u64> {
    let table = fs::read_to_string("/proc/interrupts").context("can't read /proc/interrupts")?;
    let lines = table.lines().filter(|line| line.contains(&format!("{controller}q")));
    Ok(lines
        .flat_map(|line| line.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok()))
        .sum())
}
