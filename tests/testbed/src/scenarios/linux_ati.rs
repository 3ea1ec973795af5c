//! A Linux guest sees of a GPU what the host does: its expansion ROM and its registers in port I/O.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::agent::{Function, Guest, GuestPlan, L1, L2};
use crate::provision::fnv1a;
use crate::scenario::{Contents, Scenario, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "linux-ati",
    about: "a Linux guest reads of a GPU of AMD's, which has INTx alone, the same ROM and ports as the host, or a ROM from a file",
    variants: Variants::Both,
    ports: 1,
    // The host's console is on the first, so that it is not on the other.
    devices: &["-device", "VGA,addr=2.0", "-device", "ati-vga,model=rv100,bus=port0"],
    disks: &[],
    memory_mib: 1536,
    deadline: Duration::from_secs(1800),
    contents: Contents { linux_guest: true, bare_guest: true, ..Contents::NONE },
    l1,
    l2: Some(compare),
};

const TIMEOUT: Duration = Duration::from_secs(600);
/// A ROM in a file, and the word for none.
const OTHER: &str = "/tmp/other.rom";
const NONE: &str = "none";

pub(super) const ATI: (u16, u16) = (0x1002, 0x5159);

fn l1(l1: &mut L1) -> Result<()> {
    let gpu = Function::find(ATI.0, ATI.1)?;
    let (rom, ports) = read(&gpu)?;
    l1.proved(format!("the host reads a ROM of {} bytes, and {ports:x?} through ports", rom.len()));
    let mut other = rom.clone();
    // The first image has the last byte, its checksum, which nobody sums.
    let last = other.last_mut().context("the ROM is empty")?;
    *last = !*last;
    fs::write(OTHER, &other)?;
    let setting = |value: &str| format!("[[devices]]\naddress = \"{}\"\nrom = \"{value}\"\n", gpu.address);
    for (name, file, rom) in [
        ("gpu", String::new(), format!("{:016x}", fnv1a(&rom))),
        ("rom-file", setting(OTHER), format!("{:016x}", fnv1a(&other))),
        ("rom-none", setting(NONE), NONE.to_owned()),
    ] {
        l1.step(format!("a guest with {}", if file.is_empty() { "the GPU as it is" } else { &file }));
        let cmdline = parameters(&rom, ports);
        let plan = GuestPlan { cmdline: &cmdline, file: &file, ..GuestPlan::linux(name, &gpu) };
        let ended = Guest::start(l1, &plan)?.end(TIMEOUT)?;
        ended.succeeded(l1)?;
    }
    l1.prove(gpu.driver().is_none(), "the GPU is without a driver again")?;

    other.truncate(other.len() - 512);
    fs::write(OTHER, &other)?;
    let plan = GuestPlan { file: &setting(OTHER), ..GuestPlan::bare("rom-short", "pci", &gpu) };
    let said = Guest::start(l1, &plan)?.end(TIMEOUT)?.process;
    let named = [OTHER, &gpu.address, &format!("ends at offset {:#x}", other.len()), "offset 0x0"];
    l1.prove(
        said.code == Some(2) && named.iter().all(|part| said.stderr.contains(part)) && gpu.driver().is_none(),
        "a ROM that is cut off is refused, with its file and the offset, and nothing was touched",
    )
    .with_context(|| said.stderr)
}

/// The guest's parameters, by which it finds what the host reads.
pub(super) fn expectation(gpu: &Function) -> Result<String> {
    let (rom, ports) = read(gpu)?;
    Ok(parameters(&format!("{:016x}", fnv1a(&rom)), ports))
}

fn parameters(rom: &str, [first, second]: [u32; 2]) -> String {
    format!("testbed.rom={rom} testbed.ports={first:08x}-{second:08x}")
}

/// The guest's side.
pub(super) fn compare(l2: &mut L2) -> Result<()> {
    let gpu = Function::find(ATI.0, ATI.1)?;
    let expect = l2.parameter("testbed.rom")?;
    if expect == NONE {
        return l2.prove(!gpu.path().join("rom").exists(), "it has no ROM");
    }
    let (rom, ports) = read(&gpu)?;
    l2.prove(
        format!("{:016x}", fnv1a(&rom)) == expect,
        format!("its ROM of {} bytes is what it is to read ({expect})", rom.len()),
    )?;
    let expect = l2.parameter("testbed.ports")?;
    l2.prove(
        format!("{:08x}-{:08x}", ports[0], ports[1]) == expect,
        format!("{ports:x?} through ports is what the host read"),
    )
}

/// Its ROM, and registers that it shows through ports, while it decodes.
fn read(function: &Function) -> Result<(Vec<u8>, [u32; 2])> {
    let enable = function.path().join("enable");
    fs::write(&enable, "1").context("it can't be enabled")?;
    let read = (rom(function)?, ports(function)?);
    fs::write(&enable, "0")?;
    Ok(read)
}

/// What sysfs reads of its ROM.
fn rom(function: &Function) -> Result<Vec<u8>> {
    let path = function.path().join("rom");
    fs::write(&path, "1").context("the ROM can't be enabled")?;
    let rom = fs::read(&path).context("the ROM can't be read")?;
    fs::write(&path, "0")?;
    ensure!(rom.starts_with(&[0x55, 0xaa]), "the ROM begins with {:02x?}", rom.get(..4));
    Ok(rom)
}

/// Two registers that it reads through its index and data registers, which its I/O BAR begins with: those of its config space
/// are among them.
fn ports(function: &Function) -> Result<[u32; 2]> {
    const CONFIG_SPACE: u32 = 0xf00;
    let path = function.path().join("resource1");
    let file = OpenOptions::new().read(true).write(true).open(path).context("it has no I/O BAR 1")?;
    let registers = [0, 0x2c].map(|register| indirect(&file, CONFIG_SPACE + register));
    let [ids, subsystem] = registers;
    let (ids, subsystem) = (ids?, subsystem?);
    ensure!(ids == u32::from(ATI.1) << 16 | u32::from(ATI.0), "its ports read {ids:#x}");
    Ok([ids, subsystem])
}

fn indirect(ports: &File, register: u32) -> Result<u32> {
    ports.write_all_at(&register.to_le_bytes(), 0)?;
    let mut value = [0; 4];
    ports.read_exact_at(&mut value, 4)?;
    Ok(u32::from_le_bytes(value))
}
