//! `struct boot_params`: what Linux is given by its boot loader (Documentation/arch/x86/zero-page.rst).

use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

use super::error::BootError;
use super::image::Loaded;
use crate::vmm::layout::{self, Layout};

const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;
const E820_ACPI: u32 = 3;

/// Writes the parameters of a guest whose command line and initial RAM disk (address and size) are in RAM.
///
/// # Errors
/// When there is no RAM for them.
pub(super) fn write(
    memory: &GuestMemoryMmap,
    layout: &Layout,
    loaded: &Loaded,
    cmdline: &str,
    initrd: Option<(u64, u64)>,
    rsdp: u64,
) -> Result<(), BootError> {
    let mut params = boot_params {
        hdr: loaded.header.unwrap_or(setup_header {
            boot_flag: 0xaa55,
            header: u32::from_le_bytes(*b"HdrS"),
            version: 0x20f,
            kernel_alignment: 0x20_0000,
            ..setup_header::default()
        }),
        acpi_rsdp_addr: rsdp,
        ..boot_params::default()
    };
    // "Undefined" boot loader.
    params.hdr.type_of_loader = 0xff;
    params.hdr.cmd_line_ptr = layout::CMDLINE as u32;
    params.hdr.cmdline_size = cmdline.len() as u32;
    if let Some((address, size)) = initrd {
        params.hdr.ramdisk_image = address as u32;
        params.hdr.ramdisk_size = size as u32;
        params.ext_ramdisk_image = (address >> 32) as u32;
        params.ext_ramdisk_size = (size >> 32) as u32;
    }
    let map = memory_map(layout);
    params.e820_entries = map.len() as u8;
    for (slot, entry) in params.e820_table.iter_mut().zip(map) {
        *slot = entry;
    }
    memory.write_obj(params, GuestAddress(layout::BOOT_PARAMS)).map_err(|_| BootError::TooLittleRam)
}

/// The memory map. ECAM is in it because Linux uses ECAM early only if the map reserves it.
fn memory_map(layout: &Layout) -> Vec<boot_e820_entry> {
    let entry = |start: u64, end: u64, kind| boot_e820_entry { addr: start, size: end - start, r#type: kind };
    let mut map = vec![
        entry(0, layout::CONVENTIONAL_END, E820_RAM),
        entry(layout::ACPI_TABLES, layout::HIGH_RAM, E820_ACPI),
    ];
    for range in &layout.ram {
        map.push(entry(range.start.max(layout::HIGH_RAM), range.end, E820_RAM));
    }
    map.insert(3, entry(layout::ECAM, layout::ECAM + 256 * layout::ECAM_BUS, E820_RESERVED));
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_map_is_sorted_and_has_all_ram() {
        for memory in [2 << 20, 1 << 30, 3 << 30, 7u64 << 30, 1500 << 30] {
            let layout = Layout::new(memory, 46, 0..0).unwrap();
            let map = memory_map(&layout);
            for pair in map.windows(2) {
                let (addr, size, next) = (pair[0].addr, pair[0].size, pair[1].addr);
                assert!(addr + size <= next);
            }
            let ram: u64 = map.iter().filter(|e| e.r#type == E820_RAM).map(|e| e.size).sum();
            assert_eq!(ram, memory - (layout::HIGH_RAM - layout::CONVENTIONAL_END));
        }
    }
}
