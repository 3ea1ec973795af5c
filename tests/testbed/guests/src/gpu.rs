//! Drives the modelled GPU (`vm_passthrough::sim::SimGpu`): its boot registers, its power states, a channel that works on a ring in
//! this program's memory, fences and interrupts, and a reset in the middle.
//!
//! It shares no code with the model or with `vm_passthrough::gpu`: what it writes is by NVIDIA's open-gpu-doc (`dev_ram.ref.txt`,
//! `dev_pbdma.ref.txt`) and class headers (`clc46f.h`, `clc5b5.h`), so that it checks both.

use crate::acpi::Ecam;
use crate::pci::{self, Function};
use crate::{Check, report, sys, until};

const ID: u32 = 0x2330_10de;
const CAPABILITY_PM: u8 = 0x01;
const CAPABILITY_MSI: u8 = 0x05;
const CAPABILITY_EXPRESS: u8 = 0x10;

const COMMAND: u16 = 4;
const BAR_0: u16 = 0x10;
const MEMORY: u16 = 1 << 1;
const MASTER: u16 = 1 << 2;

const BOOT_0: u64 = 0x0;
const BOOT_1: u64 = 0x4;
const BOOT_42: u64 = 0xa00;
const TIME_0: u64 = 0x9400;
const DOORBELL: u64 = 0x81_0090;
/// The model's own: a ring's address in two halves, its number of entries, and what makes a channel of it.
const CHANNEL: u64 = 0xff_0010;
/// Where the model has no register.
const NO_REGISTER: u64 = 0x10_0000;

/// Parts of a ring's memory: USERD with GP_GET and GP_PUT, the fence, the error notifier, entries, segments.
const GP_GET: u64 = 0x88;
const GP_PUT: u64 = 0x8c;
const FENCE: u64 = 0x200;
const NOTIFIER_INFO: u64 = 0x218;
const NOTIFIER_STATUS: u64 = 0x21c;
const ENTRIES: u64 = 0x1000;
const SEGMENT: u64 = 512;
const MOST_ENTRIES: u32 = 8;

const COPY: u32 = 4;
const COPY_CLASS: u32 = 0xc5b5;
const SET_OBJECT: u32 = 0x0;
const NON_STALL_INTERRUPT: u32 = 0x20;
const SEMAPHORE: u32 = 0x5c;
const RELEASE: u32 = 1 | 1 << 20;
const ACQUIRE: u32 = 3 | 1 << 12;
const LAUNCH: u32 = 0x300;
const LINEAR: u32 = 2 | 1 << 2 | 1 << 7 | 1 << 8;
const REMAP: u32 = 1 << 10;

/// What the work is done on: four areas, of which the first and the last stay as they are.
const AREA: u64 = 1024;
const UNTOUCHED: u32 = 0x5a5a_5a5a;

/// Runs all checks.
pub fn run(ecam: Ecam) -> bool {
    let Some(function) = pci::find(ecam, ID) else {
        return report("arrival", Err("there is no modelled GPU"));
    };
    let found =
        (function.memory_bar(0), function.capability(CAPABILITY_PM), function.capability(CAPABILITY_MSI));
    let (Some(bar), Some(power), Some(msi)) = found else {
        return report("arrival", Err("it has no BAR 0, power management or MSI"));
    };
    let Some(express) = function.capability(CAPABILITY_EXPRESS) else {
        return report("arrival", Err("it has no PCI Express capability"));
    };
    let memory = sys::arena(ENTRIES as usize + MOST_ENTRIES as usize * (8 + SEGMENT as usize));
    let data = sys::arena(4 * AREA as usize);
    let mut gpu =
        Gpu { function, bar, power, msi, express, memory, data, entries: 0, put: 0, fence: 0, handle: 0 };
    // Each takes the GPU as the one before has left it.
    type Named = (&'static str, fn(&mut Gpu) -> Check);
    const CHECKS: &[Named] = &[
        ("dark", Gpu::is_dark),
        ("identification", Gpu::identification),
        ("clock", Gpu::clock),
        ("power", Gpu::power),
        ("no-channel", Gpu::no_channel),
        ("not-master", Gpu::not_master),
        ("fill", Gpu::fill),
        ("copy", Gpu::copy),
        ("wait", Gpu::wait_for_semaphore),
        ("wrap", Gpu::wrap),
        ("idle-doorbell", Gpu::idle_doorbell),
        ("errors", Gpu::errors),
        ("reset", Gpu::reset_in_the_middle),
        ("after-reset", Gpu::fill),
    ];
    CHECKS.iter().all(|(name, check)| report(name, check(&mut gpu)))
}

struct Gpu {
    function: Function,
    bar: u64,
    power: u16,
    msi: u16,
    express: u16,
    /// The ring's memory, and what the work is done on.
    memory: u64,
    data: u64,
    entries: u32,
    /// Where the next entry goes, and the number of the last submission.
    put: u32,
    fence: u32,
    handle: u32,
}

/// Methods of a pushbuffer segment, as they are written to memory.
struct Segment {
    start: u64,
    len: u32,
}

impl Segment {
    fn dword(&mut self, value: u32) {
        sys::write32(self.start + u64::from(self.len) * 4, value);
        self.len += 1;
    }

    /// A header for ascending methods, and their data.
    fn methods(&mut self, subchannel: u32, method: u32, data: &[u32]) {
        self.dword(1 << 29 | (data.len() as u32) << 16 | subchannel << 13 | method >> 2);
        data.iter().for_each(|&value| self.dword(value));
    }

    fn semaphore(&mut self, at: u64, value: u32, execute: u32) {
        self.methods(0, SEMAPHORE, &[at as u32, (at >> 32) as u32, value, 0, execute]);
    }

    fn fill(&mut self, at: u64, value: u32) {
        self.methods(COPY, 0x700, &[value]);
        self.methods(COPY, 0x708, &[4 | 3 << 16]);
        self.methods(COPY, 0x408, &[(at >> 32) as u32, at as u32]);
        self.methods(COPY, 0x418, &[AREA as u32 / 4, 1]);
        self.methods(COPY, LAUNCH, &[LINEAR | REMAP]);
    }

    fn copy(&mut self, from: u64, to: u64) {
        self.methods(COPY, 0x400, &[(from >> 32) as u32, from as u32, (to >> 32) as u32, to as u32]);
        self.methods(COPY, 0x418, &[AREA as u32, 1]);
        self.methods(COPY, LAUNCH, &[LINEAR]);
    }
}

impl Gpu {
    fn read(&self, register: u64) -> u32 {
        sys::read32(self.bar + register)
    }

    fn write(&self, register: u64, value: u32) {
        sys::write32(self.bar + register, value);
    }

    fn command(&self, bits: u16, on: bool) -> Check {
        let command = self.function.read16(COMMAND) & !bits;
        self.function.write16(COMMAND, if on { command | bits } else { command });
        let read = self.function.read16(COMMAND) & bits;
        if read == if on { bits } else { 0 } { Ok(()) } else { Err("Command does not read what was written") }
    }

    /// The memory that work is done on: the area at an index.
    fn area(&self, index: u64) -> u64 {
        self.data + index * AREA
    }

    fn holds(&self, index: u64, value: u32) -> bool {
        (0..AREA / 4).all(|at| sys::read32(self.area(index) + at * 4) == value)
    }

    fn set_areas(&self) {
        (0..AREA).for_each(|at| sys::write32(self.data + at * 4, UNTOUCHED));
    }

    fn is_dark(&mut self) -> Check {
        self.command(MEMORY | MASTER, false)?;
        if self.read(BOOT_0) == u32::MAX { Ok(()) } else { Err("it answers though its memory is off") }
    }

    fn identification(&mut self) -> Check {
        self.command(MEMORY, true)?;
        let (boot, boot_42) = (self.read(BOOT_0), self.read(BOOT_42));
        if boot == u32::MAX {
            return Err("its boot register reads all ones");
        }
        if boot >> 16 == 0xbadf {
            return Err("its boot register reads NVIDIA's pattern for errors");
        }
        // Architecture Hopper, implementation 0, revision A1.
        if (boot >> 24 & 0x1f, boot >> 20 & 0xf, boot & 0xff) != (0x18, 0, 0xa1) {
            return Err("its boot register does not say GH100 revision A1");
        }
        if (boot_42 >> 20 & 0x3ff, boot_42 >> 12 & 0xff) != (0x180, 0xa1) {
            return Err("its boot registers disagree");
        }
        if self.read(BOOT_1) != 0 {
            return Err("it says that it is a virtual function");
        }
        self.write(BOOT_0, 0);
        if self.read(BOOT_0) != boot || self.read(NO_REGISTER) >> 16 != 0xbadf {
            return Err("its boot register can be written, or a register is where none is");
        }
        Ok(())
    }

    fn clock(&mut self) -> Check {
        let before = self.read(TIME_0);
        until(|| self.read(TIME_0) != before, "its counter of nanoseconds stands still")
    }

    fn power(&mut self) -> Check {
        let control = self.power + 4;
        self.function.write16(control, 3);
        if self.function.read16(control) & 3 != 3 || self.read(BOOT_0) != u32::MAX {
            return Err("it is not in D3hot");
        }
        self.function.write16(control, 0);
        until(|| self.function.read16(control) & 3 == 0, "it does not come back to D0")?;
        if self.read(BOOT_0) >> 24 == 0x18 { Ok(()) } else { Err("it does not answer in D0") }
    }

    /// Makes a channel of a ring of so many entries at an address. Its handle, 0 for none.
    fn make_channel(&self, at: u64, entries: u32) -> u32 {
        for (register, value) in (0..).zip([at as u32, (at >> 32) as u32, entries, 1]) {
            self.write(CHANNEL + register * 4, value);
        }
        self.read(CHANNEL + 12)
    }

    fn no_channel(&mut self) -> Check {
        for (at, entries) in
            [(self.memory, 3), (self.memory, 0), (self.memory, 1 << 13), (1 << 40, 4), (8, 4)]
        {
            if self.make_channel(at, entries) != 0 {
                return Err("it makes a channel of what is no ring");
            }
        }
        Ok(())
    }

    /// Makes a channel of an empty ring, in the place of the one before.
    fn attach(&mut self, entries: u32) -> Check {
        for offset in [GP_GET, GP_PUT, NOTIFIER_INFO, NOTIFIER_STATUS] {
            sys::write32(self.memory + offset, 0);
        }
        sys::write32(self.memory + FENCE, self.fence);
        let handle = self.make_channel(self.memory, entries);
        if handle == 0 || handle == self.handle {
            return Err("it makes no channel");
        }
        (self.entries, self.put, self.handle) = (entries, 0, handle);
        Ok(())
    }

    /// Has MSI interrupt this processor, and lets the function master the bus.
    fn enable_interrupt(&self) -> Check {
        self.function.write(self.msi + 4, sys::MSI_ADDRESS);
        self.function.write(self.msi + 8, 0);
        self.function.write16(self.msi + 12, u16::from(sys::INTERRUPT_VECTOR));
        self.function.write16(self.msi + 2, 1);
        self.command(MASTER, true)
    }

    /// Puts a submission into the ring, and rings no doorbell. Its last methods write the fence and interrupt.
    fn put(&mut self, methods: impl FnOnce(&mut Segment)) {
        let start = self.memory + ENTRIES + u64::from(self.entries) * 8 + u64::from(self.put) * SEGMENT;
        let mut segment = Segment { start, len: 0 };
        segment.methods(COPY, SET_OBJECT, &[COPY_CLASS]);
        methods(&mut segment);
        self.fence += 1;
        segment.semaphore(self.memory + FENCE, self.fence, RELEASE);
        segment.methods(0, NON_STALL_INTERRUPT, &[0]);
        let entry = self.memory + ENTRIES + u64::from(self.put) * 8;
        sys::write32(entry, start as u32);
        sys::write32(entry + 4, (start >> 32) as u32 | segment.len << 10);
        self.put = (self.put + 1) % self.entries;
        sys::write32(self.memory + GP_PUT, self.put);
    }

    fn ring(&self) {
        self.write(DOORBELL, self.handle);
    }

    fn is_done(&self) -> bool {
        sys::read32(self.memory + FENCE) == self.fence
    }

    /// Rings the doorbell, and waits for the fence, GP_GET, and so many interrupts.
    fn finish(&self, interrupts: u64) -> Check {
        let before = sys::interrupts();
        self.ring();
        until(|| self.is_done(), "the fence is not written")?;
        if sys::read32(self.memory + GP_GET) != self.put {
            return Err("GP_GET is not where GP_PUT is");
        }
        until(|| sys::interrupts() - before >= interrupts, "the interrupt does not come")?;
        if sys::interrupts() - before > interrupts || sys::read32(self.memory + NOTIFIER_STATUS) != 0 {
            return Err("there are more interrupts than submissions, or an error that nobody made");
        }
        Ok(())
    }

    fn not_master(&mut self) -> Check {
        self.set_areas();
        self.attach(4)?;
        let at = self.area(1);
        self.put(|segment| segment.fill(at, 1));
        self.ring();
        if self.is_done() || !self.holds(1, UNTOUCHED) {
            return Err("it does DMA though it may not");
        }
        self.enable_interrupt()?;
        self.finish(1)?;
        if self.holds(1, 1) { Ok(()) } else { Err("what it wrote is wrong") }
    }

    fn fill(&mut self) -> Check {
        self.set_areas();
        let at = self.area(1);
        self.put(|segment| segment.fill(at, 0x1234_5678));
        self.finish(1)?;
        if !self.holds(1, 0x1234_5678) {
            return Err("what it wrote is wrong");
        }
        if [0, 2, 3].iter().any(|&index| !self.holds(index, UNTOUCHED)) {
            return Err("it wrote beside the area");
        }
        Ok(())
    }

    /// Of a pattern. Two submissions by one doorbell, done in order, which one interrupt may tell of.
    fn copy(&mut self) -> Check {
        let (from, to) = (self.area(1), self.area(2));
        for at in 0..AREA / 4 {
            sys::write32(from + at * 4, at as u32 ^ 0xc0de_0000);
        }
        self.put(|segment| segment.copy(from, to));
        self.put(|segment| segment.fill(from, 7));
        self.finish(1)?;
        if (0..AREA / 4).any(|at| sys::read32(to + at * 4) != at as u32 ^ 0xc0de_0000) || !self.holds(1, 7) {
            return Err("what it copied is wrong, or was done out of order");
        }
        if self.holds(0, UNTOUCHED) && self.holds(3, UNTOUCHED) {
            Ok(())
        } else {
            Err("it wrote beside the areas")
        }
    }

    fn wait_for_semaphore(&mut self) -> Check {
        let (semaphore, at) = (self.area(3), self.area(1));
        sys::write32(semaphore, 4);
        self.put(|segment| {
            segment.semaphore(semaphore, 5, ACQUIRE);
            segment.fill(at, 9);
        });
        self.ring();
        if self.is_done() || self.holds(1, 9) {
            return Err("it does not wait for a semaphore");
        }
        sys::write32(semaphore, 5);
        self.finish(1)?;
        if self.holds(1, 9) { Ok(()) } else { Err("what it wrote after the wait is wrong") }
    }

    fn wrap(&mut self) -> Check {
        for entries in [2, 4, MOST_ENTRIES] {
            self.attach(entries)?;
            for value in 0..2 * entries + 1 {
                let at = self.area(1 + u64::from(value & 1));
                self.put(|segment| segment.fill(at, value));
                self.finish(1)?;
                if !self.holds(1 + u64::from(value & 1), value) {
                    return Err("what it wrote is wrong");
                }
            }
        }
        Ok(())
    }

    fn idle_doorbell(&mut self) -> Check {
        let before = sys::interrupts();
        let get = sys::read32(self.memory + GP_GET);
        (0..3).for_each(|_| self.ring());
        if sys::read32(self.memory + GP_GET) != get || !self.is_done() {
            return Err("a doorbell without work does something");
        }
        let at = self.area(1);
        self.put(|segment| segment.fill(at, 11));
        for handle in [0, self.handle - 1, self.handle + 1, u32::MAX] {
            self.write(DOORBELL, handle);
        }
        if self.is_done() || sys::interrupts() != before {
            return Err("another channel's doorbell does its work");
        }
        self.finish(1)?;
        if self.holds(1, 11) { Ok(()) } else { Err("what it wrote is wrong") }
    }

    /// What is no work ends the channel with an error, and changes nothing.
    fn errors(&mut self) -> Check {
        type Bad = fn(&mut Segment, u64);
        const BAD: &[(u32, Bad)] = &[
            // A method that the copy engine does not have, of a subchannel without a class, and a header that is none.
            (39, |segment, _| segment.methods(COPY, 0x304, &[0])),
            (32, |segment, at| segment.methods(2, LAUNCH, &[at as u32])),
            (32, |segment, _| segment.dword(0xe000_0000)),
            // A layout that is not linear, and addresses of no RAM.
            (39, |segment, _| segment.methods(COPY, LAUNCH, &[1])),
            (31, |segment, _| segment.fill(1 << 39, 1)),
            (31, |segment, at| segment.copy(1 << 39, at)),
        ];
        self.set_areas();
        for &(code, bad) in BAD {
            let at = self.area(1);
            self.attach(4)?;
            self.put(|segment| bad(segment, at));
            self.fails(code)?;
            // It does no more.
            self.put(|segment| segment.fill(at, 1));
            self.ring();
            if sys::read32(self.memory + FENCE) != self.fence - 2 || !self.holds(1, UNTOUCHED) {
                return Err("it goes on after an error");
            }
        }
        self.attach(4)?;
        sys::write32(self.memory + GP_PUT, 4);
        self.fails(32)?;
        self.attach(4)
    }

    fn fails(&self, code: u32) -> Check {
        let before = sys::interrupts();
        self.ring();
        until(|| sys::read32(self.memory + NOTIFIER_STATUS) >> 16 == 0xffff, "it reports no error")?;
        if sys::read32(self.memory + NOTIFIER_INFO) != code {
            return Err("it reports another error");
        }
        until(|| sys::interrupts() - before == 1, "it does not interrupt for an error")
    }

    /// A Function Level Reset while work is under way: none of it is done later, and a new channel works.
    fn reset_in_the_middle(&mut self) -> Check {
        let (semaphore, at) = (self.area(3), self.area(1));
        self.set_areas();
        sys::write32(semaphore, 0);
        self.put(|segment| segment.fill(at, 1));
        self.put(|segment| {
            segment.semaphore(semaphore, 1, ACQUIRE);
            segment.fill(at, 2);
        });
        self.ring();
        if sys::read32(self.memory + FENCE) != self.fence - 1 || !self.holds(1, 1) {
            return Err("the work before the reset is not done, or too much of it");
        }
        let control = self.express + 8;
        self.function.write16(control, self.function.read16(control) | 1 << 15);
        until(|| self.function.id() == ID, "it does not come back from its reset")?;
        if self.function.read16(COMMAND) & (MEMORY | MASTER) != 0 || self.read(BOOT_0) != u32::MAX {
            return Err("its reset leaves its memory on");
        }
        // What it has forgotten.
        if self.function.memory_bar(0).is_some() {
            return Err("its reset leaves the address of its BAR");
        }
        self.function.write(BAR_0, self.bar as u32);
        self.command(MEMORY, true)?;
        until(|| self.read(BOOT_0) >> 24 == 0x18, "its boot register does not come back")?;
        if self.read(CHANNEL + 12) != 0 || self.read(CHANNEL) != 0 {
            return Err("its channel is there after the reset");
        }
        self.enable_interrupt()?;
        let before = sys::interrupts();
        sys::write32(semaphore, 1);
        self.ring();
        if self.is_done() || !self.holds(1, 1) || sys::interrupts() != before {
            return Err("what was under way is done after the reset");
        }
        self.attach(MOST_ENTRIES)
    }
}
