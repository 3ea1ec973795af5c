//! The guest-physical address map and the I/O ports.
//!
//! ```text
//! 0                RAM below the 32-bit hole, at most 3 GiB (the first MiB holds what the guest is booted with)
//! 0xc000_0000      BARs below 4 GiB
//! 0xe000_0000      ECAM, 1 MiB for each bus
//! 0xfec0_0000      I/O APIC
//! 0xfee0_0000      local APIC and MSI
//! 0xfffb_c000      KVM's own page tables and task state (Intel without unrestricted guests)
//! 4 GiB            the rest of the RAM, as far as it ends below 1012 GiB
//! 1 TiB            what is left of it then
//! next 1 GiB bound 64-bit BARs, to the end of what the processor can address
//! ```

use std::ops::Range;

use vm_passthrough::readiness::ExplainOptions;

/// The guest enters with RSP here; it grows down. Below it is the interrupt vector table that nothing uses.
pub const BOOT_STACK: u64 = 0x8ff0;
/// Global descriptor table that the guest enters with.
pub const BOOT_GDT: u64 = 0x500;
/// `struct boot_params`, one page.
pub const BOOT_PARAMS: u64 = 0x7000;
/// Top of the identity page tables: one PML4 page, one PDPT page and four page directories.
pub const BOOT_PML4: u64 = 0x9000;
/// Kernel command line, terminated by a zero.
pub const CMDLINE: u64 = 0x2_0000;
/// Room for the command line with its zero.
pub const CMDLINE_ROOM: u64 = 0x1_0000;
/// First address above conventional memory.
pub const CONVENTIONAL_END: u64 = 0xa_0000;
/// The ACPI tables, RSDP first.
pub const ACPI_TABLES: u64 = 0xe_0000;
/// Where a PC's firmware resets the machine for whoever jumps there in real mode (F000:FFF0), and the end of the ACPI tables.
pub const RESET_ENTRY: u64 = 0xf_fff0;
/// Where RAM for kernels begins.
pub const HIGH_RAM: u64 = 0x10_0000;

/// RAM stops here and goes on at [`FOUR_GIB`].
pub const LOW_RAM_LIMIT: u64 = 0xc000_0000;
/// Window for BARs below 4 GiB.
pub const MEM32: Range<u64> = LOW_RAM_LIMIT..ECAM;
/// Config space of bus 0; those of the other buses follow, 1 MiB each.
pub const ECAM: u64 = 0xe000_0000;
/// Bytes of ECAM for one bus.
pub const ECAM_BUS: u64 = 1 << 20;
/// Config space of all buses that there could be.
pub const ECAM_WINDOW: Range<u64> = ECAM..ECAM + 256 * ECAM_BUS;
/// The I/O APIC's registers.
pub const IO_APIC: u32 = 0xfec0_0000;
/// The local APIC's registers.
pub const LOCAL_APIC: u32 = 0xfee0_0000;
/// A page for KVM's identity map, below its task state segment.
pub const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;
/// Three pages for KVM's task state segment.
pub const KVM_TSS: usize = 0xfffb_d000;
/// Where RAM goes on.
pub const FOUR_GIB: u64 = 1 << 32;

/// Interrupt line of the serial console.
pub const SERIAL_GSI: u32 = 4;
/// Interrupt line of the power button.
pub const POWER_BUTTON_GSI: u32 = 5;
/// Interrupt pins of the I/O APIC.
pub const IO_APIC_PINS: u32 = 24;

/// Interrupt lines that the pins INTA to INTD of a slot of bus 0 lead to, and so do those of what is behind a port there. They
/// are those that nothing of ISA uses; slots next to each other share none of them for their INTA.
pub fn intx_lines(slot: u8) -> [u32; 4] {
    const FIRST: u32 = 16;
    std::array::from_fn(|pin| FIRST + (u32::from(slot) + pin as u32) % (IO_APIC_PINS - FIRST))
}

/// I/O ports.
pub mod port {
    /// First of the eight registers of the serial console.
    pub const SERIAL: u16 = 0x3f8;
    /// Command and status register of the keyboard controller, of which only the reset line exists.
    pub const KEYBOARD: u16 = 0x64;
    /// ACPI sleep control register.
    pub const SLEEP_CONTROL: u16 = 0x600;
    /// ACPI sleep status register.
    pub const SLEEP_STATUS: u16 = 0x601;
    /// Address register of PCI configuration mechanism 1, four bytes wide.
    pub const PCI_ADDRESS: u16 = 0xcf8;
    /// Reset control register, also the ACPI reset register. It lies within [`PCI_ADDRESS`] but is one byte wide.
    pub const RESET: u16 = 0xcf9;
    /// Data register of PCI configuration mechanism 1.
    pub const PCI_DATA: u16 = 0xcfc;
    /// Window for I/O BARs.
    pub const PCI_WINDOW: std::ops::Range<u32> = 0x1000..0x1_0000;
}

/// How one guest's RAM and BAR windows lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// RAM ranges, which begin on a huge page: up to three, around the 32-bit hole and what HyperTransport has.
    pub ram: Vec<Range<u64>>,
    /// Window for BARs that may lie above 4 GiB.
    pub mem64: Range<u64>,
}

impl Layout {
    /// Lays out `memory` bytes of RAM for processors with `phys_bits` address bits, of which they keep the addresses `reserved`
    /// to themselves; `None` when that leaves no room for 64-bit BARs.
    pub fn new(memory: u64, phys_bits: u8, reserved: Range<u64>) -> Option<Self> {
        // Where `explain` takes them to be.
        let mut options = ExplainOptions::for_memory(memory);
        options.processor_reserved = reserved;
        let mem64 = options.windows(Some(phys_bits)).high;
        let ram = options.ram.iter().map(|ram| *ram.start()..ram.end().saturating_add(1)).collect();
        (!mem64.is_empty()).then_some(Self { ram, mem64 })
    }
}

#[cfg(test)]
// The guest's RAM is a list of ranges, often of one.
#[allow(clippy::single_range_in_vec_init)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn ram_lies_around_the_hole() {
        fn check(memory: u64, phys_bits: u8, ram: &[Range<u64>], mem64: Option<Range<u64>>) {
            let layout = Layout::new(memory, phys_bits, 0..0);
            assert_eq!(layout.as_ref().map(|l| l.mem64.clone()), mem64, "{memory:#x} {phys_bits}");
            assert_eq!(ExplainOptions::for_memory(memory).windows(Some(phys_bits)).low, MEM32);
            if let Some(layout) = layout {
                assert_eq!(layout.ram, ram, "{memory:#x} {phys_bits}");
            }
        }
        check(2 << 20, 39, &[0..2 << 20], Some(FOUR_GIB..1 << 39));
        check(3 * GIB, 39, &[0..LOW_RAM_LIMIT], Some(FOUR_GIB..1 << 39));
        check(3 * GIB + 4096, 39, &[0..LOW_RAM_LIMIT, FOUR_GIB..FOUR_GIB + 4096], Some(5 * GIB..1 << 39));
        let low = [0..LOW_RAM_LIMIT, FOUR_GIB..1012 * GIB];
        check(1011 * GIB, 46, &low, Some(1012 * GIB..1 << 46));
        let three = [&low[..], &[1 << 40..(1 << 40) + 3 * GIB]].concat();
        check(1014 * GIB, 46, &three, Some(1027 * GIB..1 << 46));
        check(1014 * GIB, 40, &[], None);
        check(64 * GIB, 36, &[], None);
        check(u64::MAX - 1, 52, &[], None);
        check(1 << 20, 255, &[0..1 << 20], Some(FOUR_GIB..1 << 52));
    }
}
