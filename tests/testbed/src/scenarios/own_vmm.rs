//! The library in a VMM that is built otherwise than `vm-service`: it gives a bare guest that runs an NVMe controller, and
//! the guest's driver works on it. And in two processes, of which one has claimed `edu`, and the other has its descriptors and no rights.

use std::time::Duration;

use anyhow::Result;

use super::bare_edu::EDU;
use super::linux_nvme::{DISK, NVME, NVME_AND_EDU};
use crate::agent::{Function, L1, NvmeDisk, OWN_VMM, VFIO_EDU};
use crate::scenario::{Contents, Scenario, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "own-vmm",
    about: "a VMM unlike vm-service plugs an NVMe controller into a bare guest, which copies blocks by RAM added later; a process \
            without rights drives edu by the descriptors that another gives it",
    variants: Variants::Both,
    ports: 2,
    devices: NVME_AND_EDU,
    disks: DISK,
    memory_mib: 768,
    deadline: Duration::from_secs(1800),
    contents: Contents { bare_guest: true, library_examples: true, ..Contents::NONE },
    l1,
    l2: None,
};

const LEN: usize = 128 << 10;
const SEED: u64 = 0x006f_776e_2076_6d6d;
const FROM: u64 = 1 << 20;
const TO: u64 = 32 << 20;
const BLOCK: u64 = 512;
/// In the RAM that the VMM adds once the device is attached.
const BUFFER: u64 = 0x1000_0000;

fn l1(l1: &mut L1) -> Result<()> {
    let nvme = Function::find(NVME.0, NVME.1)?;
    let written = NvmeDisk::of(&nvme)?.write_pattern(SEED, FROM, LEN)?;
    l1.proved(format!("the host wrote {LEN} bytes, checksum {written:016x}"));

    let address = nvme.address.to_string();
    let words = format!(
        "nvme wait from={} to={} blocks={} buffer={BUFFER:#x}",
        FROM / BLOCK,
        TO / BLOCK,
        LEN as u64 / BLOCK
    );
    let ended =
        l1.program(OWN_VMM, &[&address, "/guest/bare", &words], Duration::from_secs(240))?.succeeded()?;
    for check in ["arrival", "msix", "enable", "identify", "queues", "copy", "interrupts"] {
        let line = format!("bare: {check} ok");
        l1.prove(ended.stdout.lines().any(|said| said.trim() == line), format!("in the guest: {check}"))?;
    }
    l1.prove(ended.stdout.trim_end().ends_with("bare: PASS"), "the guest says that all held")?;

    l1.prove(
        nvme.driver().as_deref() == Some("nvme"),
        format!("the host's nvme driver has {} again", nvme.address),
    )?;
    let got = NvmeDisk::of(&nvme)?.check_pattern(SEED, TO, LEN)?;
    l1.prove(got == written, format!("the host reads what the guest copied, checksum {got:016x}"))?;

    let edu = Function::find(EDU.0, EDU.1)?.address.to_string();
    let backend = l1.variant.to_string();
    let backend = ["--backend", &backend];
    let ended = l1.program(VFIO_EDU, &[&[edu.as_str()], &backend[..]].concat(), Duration::from_secs(240))?;
    let said = ended.succeeded()?.stdout;
    let nobody = "ok: nobody writes to config space past VFIO";
    l1.prove(said.contains(nobody), "a process without rights can't write to the device past VFIO")?;
    l1.prove(
        said.contains("ok: another process did it, with the descriptors alone"),
        "it drives the device all the same: registers, DMA of its own memory, interrupts, and a reset that its keeper proves",
    )
}
