//! Drives an NVMe controller (NVM Express Base 2.0): copies blocks of its first namespace, with interrupts by MSI-X.

use crate::acpi::Ecam;
use crate::pci::{self, Function};
use crate::serial::println;
use crate::{Check, boot, report, sys, until};

const ID: u32 = 0x0010_1b36;
const CAPABILITY_MSIX: u8 = 0x11;

const CAPABILITIES: u64 = 0x00;
const CONFIGURATION: u64 = 0x14;
const STATUS: u64 = 0x1c;
const ADMIN_QUEUE_SIZES: u64 = 0x24;
const ADMIN_SUBMISSION: u64 = 0x28;
const ADMIN_COMPLETION: u64 = 0x30;
const DOORBELLS: u64 = 0x1000;

const WRITE: u32 = 0x01;
const READ: u32 = 0x02;
const CREATE_SUBMISSION: u32 = 0x01;
const CREATE_COMPLETION: u32 = 0x05;
const IDENTIFY: u32 = 0x06;

const ENTRIES: u32 = 16;
/// Bytes that one command moves, one page, and the blocks that these are.
const PIECE: u64 = 4096;
const BLOCKS: u64 = PIECE / 512;

/// Runs all checks; the words that are left of the command line say what is copied, through which memory, and whether the
/// controller comes while this runs, and whether this goes on copying for ever, or crashes after it.
pub fn run<'a>(ecam: Ecam, words: impl Iterator<Item = &'a [u8]>) -> bool {
    let (mut from, mut to, mut blocks, mut buffer) = (0, 0, 0, None);
    let (mut waits, mut stays, mut crashes) = (false, false, false);
    for word in words {
        for (name, value) in [(&b"from"[..], &mut from), (b"to", &mut to), (b"blocks", &mut blocks)] {
            if let Some(number) = boot::number(word, name) {
                *value = number;
            }
        }
        buffer = boot::number(word, b"buffer").or(buffer);
        waits |= word == b"wait";
        stays |= word == b"stay";
        crashes |= word == b"crash";
    }
    let buffer = buffer.unwrap_or_else(|| sys::arena(PIECE as usize));
    if waits {
        if pci::find(ecam, ID).is_some() {
            return report("absence", Err("there is an NVMe controller at the start"));
        }
        println!("bare: waits for an NVMe controller");
        let came = until(|| pci::find(ecam, ID).is_some(), "it did not come");
        if !report("arrival", came) {
            return false;
        }
    }
    let Some(function) = pci::find(ecam, ID) else {
        return report("identification", Err("there is no NVMe controller"));
    };
    let Some(bar) = function.memory_bar(0) else {
        return report("identification", Err("BAR 0 has no address"));
    };
    // Memory decoding and bus mastering.
    function.write16(4, function.read16(4) | 6);
    let mut admin = Queue::new(bar, 0);
    if !report("msix", enable_msix(&function)) || !report("enable", enable(bar, &admin)) {
        return false;
    }
    let mut passed = report("identify", identify(&mut admin, buffer));
    let mut io = Queue::new(bar, 1);
    passed &= report("queues", create(&mut admin, &io));
    loop {
        let copied = (0..blocks / BLOCKS).try_for_each(|piece| {
            io.command(READ, 1, buffer, [(from + piece * BLOCKS) as u32, 0, BLOCKS as u32 - 1])?;
            io.command(WRITE, 1, buffer, [(to + piece * BLOCKS) as u32, 0, BLOCKS as u32 - 1])
        });
        passed &= report("copy", copied);
        if crashes && passed {
            sys::crash();
        }
        if !stays || !passed {
            break;
        }
    }
    // Every command above waited for one.
    passed &= report("interrupts", if sys::interrupts() > 0 { Ok(()) } else { Err("none came") });
    passed
}

/// A submission queue and its completion queue.
struct Queue {
    bar: u64,
    number: u32,
    submissions: u64,
    completions: u64,
    next: u32,
    /// Flips each time that the completion queue wraps.
    phase: u32,
}

impl Queue {
    fn new(bar: u64, number: u32) -> Self {
        let (submissions, completions) = (sys::arena(4096), sys::arena(4096));
        Self { bar, number, submissions, completions, next: 0, phase: 1 }
    }

    /// Sends a command and waits for its interrupt and for its end; both queues then stand at the same entry.
    fn command(&mut self, opcode: u32, namespace: u32, data: u64, words: [u32; 3]) -> Check {
        let entry = self.submissions + u64::from(self.next) * 64;
        let completion = self.completions + u64::from(self.next) * 16;
        let mut command = [0; 16];
        (command[0], command[1]) = (opcode, namespace);
        (command[6], command[7]) = (data as u32, (data >> 32) as u32);
        command[10..13].copy_from_slice(&words);
        for (word, value) in (0..).zip(command) {
            sys::write32(entry + word * 4, value);
        }
        let before = sys::interrupts();
        self.next = (self.next + 1) % ENTRIES;
        self.ring(0);
        until(|| sys::interrupts() > before, "an interrupt did not come")?;
        until(|| sys::read32(completion + 12) >> 16 & 1 == self.phase, "a command does not end")?;
        let status = sys::read32(completion + 12) >> 17;
        if self.next == 0 {
            self.phase ^= 1;
        }
        self.ring(1);
        if status & 0x7ff == 0 { Ok(()) } else { Err("a command failed") }
    }

    fn ring(&self, completion: u32) {
        let stride = 4 << (sys::read32(self.bar + CAPABILITIES + 4) & 0xf);
        sys::write32(self.bar + DOORBELLS + u64::from(2 * self.number + completion) * stride, self.next);
    }
}

/// Has vector 0 interrupt the only processor.
fn enable_msix(function: &Function) -> Check {
    let msix = function.capability(CAPABILITY_MSIX).ok_or("there is no MSI-X capability")?;
    let table = function.read(msix + 4);
    let bar = function.memory_bar(table as u16 & 7).ok_or("the table's BAR has no address")?;
    let entry = bar + u64::from(table & !7);
    for (word, value) in (0..).zip([sys::MSI_ADDRESS, 0, sys::INTERRUPT_VECTOR.into(), 0]) {
        sys::write32(entry + word * 4, value);
    }
    function.write16(msix + 2, function.read16(msix + 2) | 1 << 15);
    Ok(())
}

/// Resets the controller and enables it with its admin queues.
fn enable(bar: u64, admin: &Queue) -> Check {
    sys::write32(bar + CONFIGURATION, 0);
    until(|| sys::read32(bar + STATUS) & 1 == 0, "the controller does not stop")?;
    sys::write32(bar + ADMIN_QUEUE_SIZES, (ENTRIES - 1) << 16 | (ENTRIES - 1));
    for (register, address) in [(ADMIN_SUBMISSION, admin.submissions), (ADMIN_COMPLETION, admin.completions)]
    {
        sys::write32(bar + register, address as u32);
        sys::write32(bar + register + 4, (address >> 32) as u32);
    }
    // Entries of 64 and of 16 bytes, pages of 4 KiB.
    sys::write32(bar + CONFIGURATION, 4 << 20 | 6 << 16 | 1);
    until(|| sys::read32(bar + STATUS) & 1 != 0, "the controller does not start")
}

/// Reads the controller's data, with the serial number that the testbed gave it.
fn identify(admin: &mut Queue, buffer: u64) -> Check {
    admin.command(IDENTIFY, 0, buffer, [1, 0, 0])?;
    let serial = b"testbed ";
    match (0..).zip(serial).all(|(at, &byte)| sys::read8(buffer + 4 + at) == byte) {
        true => Ok(()),
        false => Err("the serial number is another"),
    }
}

fn create(admin: &mut Queue, io: &Queue) -> Check {
    let size = (ENTRIES - 1) << 16 | io.number;
    // In one piece, with interrupts by vector 0; then in one piece, for that completion queue.
    admin.command(CREATE_COMPLETION, 0, io.completions, [size, 3, 0])?;
    admin.command(CREATE_SUBMISSION, 0, io.submissions, [size, io.number << 16 | 1, 0])
}
