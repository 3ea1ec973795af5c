//! As much ACPI as a guest needs to find PCI and to switch itself off (ACPI 6.5, chapter 5).

use crate::sys;

const MAX_TABLES: u32 = 64;

/// What the tables say.
pub struct Acpi {
    /// Address of bus 0's config space (MCFG).
    pub ecam: Ecam,
    fadt: u64,
    sleep_type: u8,
}

/// Memory-mapped config space.
#[derive(Clone, Copy)]
pub struct Ecam {
    /// Address of bus 0.
    pub base: u64,
    /// Last bus.
    pub last_bus: u8,
}

/// A register as the tables give it.
struct GenericAddress {
    space: u8,
    address: u64,
}

impl GenericAddress {
    const IO: u8 = 1;

    fn at(address: u64) -> Self {
        Self { space: sys::read8(address), address: pointer(address + 4) }
    }

    fn write(&self, value: u8) {
        if self.space == Self::IO {
            sys::out8(self.address as u16, value);
        } else if self.address != 0 {
            sys::write8(self.address, value);
        }
    }
}

impl Acpi {
    /// Reads the tables from the root pointer on; `None` when one that is needed is missing.
    pub fn find(rsdp: u64) -> Option<Self> {
        if rsdp == 0 || sys::bytes(rsdp, 8) != b"RSD PTR " {
            return None;
        }
        let xsdt = pointer(rsdp + 24);
        let entries = sys::read32(xsdt + 4).checked_sub(36)? / 8;
        let table = |signature: &[u8; 4]| {
            (0..entries.min(MAX_TABLES))
                .map(|i| pointer(xsdt + 36 + u64::from(i) * 8))
                .find(|&table| sys::bytes(table, 4) == signature)
        };
        let (mcfg, fadt) = (table(b"MCFG")?, table(b"FACP")?);
        let ecam = Ecam { base: pointer(mcfg + 44), last_bus: sys::read8(mcfg + 55) };
        let mut dsdt = pointer(fadt + 140);
        if dsdt == 0 {
            dsdt = u64::from(sys::read32(fadt + 40));
        }
        let sleep_type = soft_off_type(sys::bytes(dsdt, sys::read32(dsdt + 4) as usize))?;
        Some(Self { ecam, fadt, sleep_type })
    }

    /// Switches the machine off: state S5.
    pub fn power_off(&self) -> ! {
        const SLEEP_ENABLE: u8 = 1 << 5;
        GenericAddress::at(self.fadt + 244).write(self.sleep_type << 2 | SLEEP_ENABLE);
        sys::halt()
    }

    /// Resets the machine.
    pub fn reset(&self) -> ! {
        GenericAddress::at(self.fadt + 116).write(sys::read8(self.fadt + 128));
        sys::halt()
    }
}

/// The sleep type of `\_S5`: the first element of its package.
fn soft_off_type(aml: &[u8]) -> Option<u8> {
    const PACKAGE: u8 = 0x12;
    const BYTE_PREFIX: u8 = 0x0a;
    let name = aml.windows(5).position(|window| window == b"_S5_\x12")?;
    let package = &aml[name + 4..];
    debug_assert_eq!(package[0], PACKAGE);
    // The package's length takes one byte and as many more as its two top bits say; then the element count.
    let first = 1 + 1 + usize::from(package.get(1)? >> 6) + 1;
    match *package.get(first)? {
        BYTE_PREFIX => package.get(first + 1).copied(),
        value @ 0..=1 => Some(value),
        _ => None,
    }
}

/// A 64-bit number at an address that need not be aligned to it.
fn pointer(address: u64) -> u64 {
    u64::from_le_bytes(core::array::from_fn(|i| sys::read8(address + i as u64)))
}
