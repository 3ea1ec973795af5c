//! Drives QEMU's educational device (docs/specs/edu.rst): what a passed-through device must do, in one small device.

use core::cell::UnsafeCell;

use crate::acpi::Ecam;
use crate::pci::{self, Function};
use crate::serial::println;
use crate::{Check, boot, report, sys, until};

const ID: u32 = 0x11e8_1234;
const CAPABILITY_MSI: u8 = 5;

const IDENTIFICATION: u64 = 0x00;
const LIVENESS: u64 = 0x04;
const FACTORIAL: u64 = 0x08;
const STATUS: u64 = 0x20;
const INTERRUPT_STATUS: u64 = 0x24;
const INTERRUPT_RAISE: u64 = 0x60;
const INTERRUPT_ACKNOWLEDGE: u64 = 0x64;
const DMA_SOURCE: u64 = 0x80;
const DMA_DESTINATION: u64 = 0x88;
const DMA_COUNT: u64 = 0x90;
const DMA_COMMAND: u64 = 0x98;
const DMA_START: u32 = 1;
const DMA_FROM_DEVICE: u32 = 2;
/// The device's own memory, as its DMA engine addresses it.
const DEVICE_MEMORY: u64 = 0x4_0000;

const PAGE: usize = 4096;
/// What the host's canary is made of, and nothing here.
const CANARY: u8 = 0xc5;

/// Memory that the device reads and writes: a page, between two that it must leave alone.
#[repr(C, align(4096))]
struct DmaMemory(UnsafeCell<[u8; 3 * PAGE]>);

#[allow(unsafe_code)]
// SAFETY: the only processor and the device reach it, by physical address.
unsafe impl Sync for DmaMemory {}

static MEMORY: DmaMemory = DmaMemory(UnsafeCell::new([0; 3 * PAGE]));

/// Address of the middle page.
fn buffer() -> u64 {
    MEMORY.0.get() as u64 + PAGE as u64
}

/// Runs all checks; the words that are left of the command line say how.
pub fn run<'a>(ecam: Ecam, words: impl Iterator<Item = &'a [u8]>) -> bool {
    let (mut msis, mut pins, mut outside, mut peer, mut stays) = (200, 0, None, None, false);
    for word in words {
        if let Some(count) = boot::number(word, b"msis") {
            msis = count;
        } else if let Some(count) = boot::number(word, b"pins") {
            pins = count;
        } else if let Some(address) = boot::number(word, b"outside") {
            outside = Some(address);
        } else if let Some(reached) = boot::number(word, b"peer") {
            peer = Some(reached != 0);
        } else if word == b"stay" {
            stays = true;
        }
    }
    let Some(function) = pci::find(ecam, ID) else {
        return report("identification", Err("there is no edu device"));
    };
    let Some(bar) = function.memory_bar(0) else {
        return report("identification", Err("BAR 0 has no address"));
    };
    // Memory decoding and bus mastering.
    function.write16(4, function.read16(4) | 6);
    let edu = Edu { bar };
    let mut passed = report("identification", edu.identification());
    passed &= report("liveness", edu.liveness());
    passed &= report("factorial", edu.factorial());
    passed &= report("dma-to-device", edu.copy_out(0x11));
    passed &= report("dma-from-device", edu.copy_in(0x11));
    if pins > 0 {
        passed &= report("intx", edu.pin(&function, pins));
    }
    passed &= report("msi", edu.interrupts(&function, msis));
    if pins > 0 {
        passed &= report("intx-after-msi", edu.pin(&function, 10));
    }
    if let Some(address) = outside {
        passed &= report("dma-outside", edu.outside(address));
    }
    let Some(reached) = peer else { return passed };
    let Some(mut shared) = SharedMemory::find(ecam) else {
        return report("peer", Err("there is no ivshmem device with memory in reach"));
    };
    if !reached {
        passed &= report("peer-unreached", edu.misses(&shared));
    } else {
        passed &= report("peer-write", edu.reach(&shared, 0x55));
        passed &= report("peer-read", edu.read_back(&shared, 0x66));
        passed &= report("peer-moved", edu.follow(&mut shared));
        passed &= report("peer-off", edu.spare(&shared));
    }
    let mut transfers = 0u32;
    while stays && passed {
        passed &=
            edu.copy_out(0x77).and_then(|()| edu.dma(DEVICE_MEMORY, shared.bar, DMA_FROM_DEVICE)).is_ok();
        transfers += 1;
        println!("bare: transfer {}", transfers);
    }
    passed
}

/// QEMU's `ivshmem-plain`, whose BAR 2 is memory.
struct SharedMemory {
    function: Function,
    bar: u64,
}

impl SharedMemory {
    const ID: u32 = 0x1110_1af4;
    const SIZE: u64 = 1 << 20;
    const BAR: u16 = 0x18;
    /// What it is filled with where no transfer is to change it.
    const FILLED: u8 = 0x5a;

    fn find(ecam: Ecam) -> Option<Self> {
        let function = pci::find(ecam, Self::ID)?;
        let bar = function.memory_bar(2)?;
        let found = Self { function, bar };
        found.decode(true);
        sys::map_registers(bar).then_some(found)
    }

    fn decode(&self, on: bool) {
        let command = self.function.read16(4) & !2;
        self.function.write16(4, command | u16::from(on) << 1);
    }

    fn fill(&self) {
        (0..PAGE as u64).for_each(|i| sys::write8(self.bar + i, Self::FILLED));
    }

    fn is_filled(&self) -> bool {
        (0..PAGE as u64).all(|i| sys::read8(self.bar + i) == Self::FILLED)
    }
}

struct Edu {
    bar: u64,
}

impl Edu {
    fn read(&self, register: u64) -> u32 {
        sys::read32(self.bar + register)
    }

    fn write(&self, register: u64, value: u32) {
        sys::write32(self.bar + register, value);
    }

    fn identification(&self) -> Check {
        match self.read(IDENTIFICATION) {
            0x0100_00ed => Ok(()),
            0xffff_ffff => Err("the register reads all ones"),
            _ => Err("the register reads something else than 0x010000ed"),
        }
    }

    fn liveness(&self) -> Check {
        for value in [0, 0x1234_5678, 0xffff_ffff, 0xdead_beef] {
            self.write(LIVENESS, value);
            if self.read(LIVENESS) != !value {
                return Err("it does not answer with the inverse");
            }
        }
        Ok(())
    }

    fn factorial(&self) -> Check {
        self.write(FACTORIAL, 10);
        until(|| self.read(STATUS) & 1 == 0, "it does not finish")?;
        if self.read(FACTORIAL) == 3_628_800 { Ok(()) } else { Err("10! is not 3628800") }
    }

    fn dma(&self, source: u64, destination: u64, direction: u32) -> Check {
        for (register, value) in
            [(DMA_SOURCE, source), (DMA_DESTINATION, destination), (DMA_COUNT, PAGE as u64)]
        {
            // In two halves, the upper one would be ignored.
            sys::write64(self.bar + register, value);
        }
        self.write(DMA_COMMAND, DMA_START | direction);
        until(|| self.read(DMA_COMMAND) & DMA_START == 0, "the transfer does not finish")
    }

    /// Copies a pattern to the device's memory.
    fn copy_out(&self, seed: u8) -> Check {
        for i in 0..PAGE as u64 {
            sys::write8(buffer() + i, pattern(seed, i));
        }
        self.dma(buffer(), DEVICE_MEMORY, 0)
    }

    /// Copies the device's memory back, and expects the pattern there, and nothing beside it.
    fn copy_in(&self, seed: u8) -> Check {
        for i in 0..3 * PAGE as u64 {
            sys::write8(buffer() - PAGE as u64 + i, 0x5a);
        }
        self.dma(DEVICE_MEMORY, buffer(), DMA_FROM_DEVICE)?;
        for i in 0..PAGE as u64 {
            if sys::read8(buffer() + i) != pattern(seed, i) {
                return Err("the bytes are not those that were sent");
            }
            if sys::read8(buffer() + i - PAGE as u64) != 0x5a
                || sys::read8(buffer() + i + PAGE as u64) != 0x5a
            {
                return Err("bytes beside the buffer have changed");
            }
        }
        Ok(())
    }

    /// INTx, as often as `count`, with all that can hold it up.
    fn pin(&self, function: &Function, count: u64) -> Check {
        const COMMAND: u16 = 4;
        const INTX_DISABLE: u16 = 1 << 10;
        const STATUS: u16 = 6;
        const PENDING: u16 = 1 << 3;
        let [line, pin, ..] = function.read(0x3c).to_le_bytes();
        if pin != 1 || !(16..24).contains(&line) {
            return Err("it has no INTA, or that leads nowhere");
        }
        let command = function.read16(COMMAND);
        let pending = || function.read16(STATUS) & PENDING != 0;
        let start = sys::interrupts();
        let came = || sys::interrupts() - start;
        // The handler has the device deassert its pin.
        let served = |raised, late| until(|| came() >= raised && self.read(INTERRUPT_STATUS) == 0, late);
        sys::acknowledge_by(Some(self.bar + INTERRUPT_ACKNOWLEDGE));
        sys::route_pin(line, false);
        for raised in 1..=count {
            self.write(INTERRUPT_RAISE, 1);
            served(raised, "an interrupt did not come")?;
        }

        // Asserted while the I/O APIC masks it.
        sys::route_pin(line, true);
        self.write(INTERRUPT_RAISE, 1);
        until(pending, "Interrupt Status does not show that the pin is asserted")?;
        if came() != count {
            return Err("an interrupt came more than once, or though the I/O APIC masks it");
        }
        sys::route_pin(line, false);
        served(count + 1, "an interrupt that the I/O APIC had masked did not come")?;

        // While the function disables it.
        for _ in 0..20 {
            let before = came();
            function.write16(COMMAND, command | INTX_DISABLE);
            self.write(INTERRUPT_RAISE, 1);
            until(pending, "Interrupt Status does not show that the pin would be asserted")?;
            if came() != before {
                return Err("an interrupt came though it is disabled");
            }
            function.write16(COMMAND, command);
            served(before + 1, "an interrupt that was disabled did not come")?;
        }

        // Nobody serves it while it is disabled and enabled all the time: one that is under way is not another.
        sys::route_pin(line, true);
        self.write(INTERRUPT_RAISE, 1);
        for _ in 0..100 {
            function.write16(COMMAND, command | INTX_DISABLE);
            function.write16(COMMAND, command);
        }
        let before = came();
        sys::route_pin(line, false);
        served(before + 1, "an interrupt did not come after all that")?;
        if came() > before + 2 {
            return Err("interrupts come without end");
        }
        sys::route_pin(line, true);
        sys::acknowledge_by(None);
        Ok(())
    }

    /// Has the device write to another's BAR, until that is mapped for it and the processor reads there what it wrote.
    fn reach(&self, shared: &SharedMemory, seed: u8) -> Check {
        self.copy_out(seed)?;
        for _ in 0..600 {
            self.dma(DEVICE_MEMORY, shared.bar, DMA_FROM_DEVICE)?;
            if (0..PAGE as u64).all(|i| sys::read8(shared.bar + i) == pattern(seed, i)) {
                return Ok(());
            }
        }
        Err("what the device writes to another's BAR does not come there")
    }

    /// Has it read there what the processor wrote.
    fn read_back(&self, shared: &SharedMemory, seed: u8) -> Check {
        (0..PAGE as u64).for_each(|i| sys::write8(shared.bar + i, pattern(seed, i)));
        self.dma(shared.bar, DEVICE_MEMORY, 0)?;
        self.copy_in(seed)
    }

    /// Moves the BAR: it is reached at its new address, and at its old one no more.
    fn follow(&self, shared: &mut SharedMemory) -> Check {
        let old = shared.bar;
        shared.bar += SharedMemory::SIZE;
        shared.decode(false);
        shared.function.write(SharedMemory::BAR, shared.bar as u32);
        shared.function.write(SharedMemory::BAR + 4, (shared.bar >> 32) as u32);
        shared.decode(true);
        shared.fill();
        self.copy_out(0x88)?;
        self.dma(DEVICE_MEMORY, old, DMA_FROM_DEVICE)?;
        if !shared.is_filled() {
            return Err("the device reaches the BAR where it was");
        }
        self.reach(shared, 0x99)
    }

    /// Turns its decoding off: it is reached no more.
    fn spare(&self, shared: &SharedMemory) -> Check {
        shared.fill();
        shared.decode(false);
        self.dma(DEVICE_MEMORY, shared.bar, DMA_FROM_DEVICE)?;
        shared.decode(true);
        if shared.is_filled() { Ok(()) } else { Err("the device reaches a BAR that does not decode") }
    }

    /// Has it write to another's BAR, which must change nothing there.
    fn misses(&self, shared: &SharedMemory) -> Check {
        shared.fill();
        self.copy_out(0xaa)?;
        for _ in 0..10 {
            self.dma(DEVICE_MEMORY, shared.bar, DMA_FROM_DEVICE)?;
        }
        if shared.is_filled() { Ok(()) } else { Err("the device reaches the BAR") }
    }

    fn interrupts(&self, function: &Function, count: u64) -> Check {
        let msi = function.capability(CAPABILITY_MSI).ok_or("there is no MSI capability")?;
        let control = function.read16(msi + 2);
        function.write(msi + 4, sys::MSI_ADDRESS);
        let data = if control & 0x80 != 0 {
            function.write(msi + 8, 0);
            msi + 12
        } else {
            msi + 8
        };
        function.write16(data, u16::from(sys::INTERRUPT_VECTOR));
        function.write16(msi + 2, control & !0x70 | 1);
        let before = sys::interrupts();
        for i in 1..=count {
            self.write(INTERRUPT_RAISE, 1);
            until(|| sys::interrupts() - before >= i, "an interrupt did not come")?;
            self.write(INTERRUPT_ACKNOWLEDGE, 1);
        }
        function.write16(msi + 2, control & !0x71);
        if sys::interrupts() - before == count {
            Ok(())
        } else {
            Err("more interrupts came than were raised")
        }
    }

    /// Makes the device read and write an address outside the RAM: it must learn and change nothing, and go on
    /// working.
    fn outside(&self, address: u64) -> Check {
        self.copy_out(0x22)?;
        self.dma(address, DEVICE_MEMORY, 0)?;
        self.dma(DEVICE_MEMORY, buffer(), DMA_FROM_DEVICE)?;
        if (0..PAGE as u64).any(|i| sys::read8(buffer() + i) == CANARY) {
            return Err("the device read memory outside the RAM");
        }
        self.copy_out(0x33)?;
        self.dma(DEVICE_MEMORY, address, DMA_FROM_DEVICE)?;
        self.copy_out(0x44)?;
        self.copy_in(0x44)
    }
}

/// Bytes that differ from page to page and hold no [`CANARY`].
fn pattern(seed: u8, i: u64) -> u8 {
    let byte = (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ seed;
    if byte == CANARY { byte ^ 1 } else { byte }
}
