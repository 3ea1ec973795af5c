//! The state in which the first vCPU enters the guest: 64-bit mode, as the boot module says.

use kvm_bindings::{kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

use crate::vmm::acpi;
use crate::vmm::boot::{BootError, Entry};
use crate::vmm::error::MachineError;
use crate::vmm::layout;

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_NE: u64 = 1 << 5;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
const PTE_PRESENT_WRITABLE: u64 = 3;
const PTE_HUGE: u64 = 1 << 7;
const PAGE: u64 = 4096;

/// Descriptors: two empty ones, then what the boot protocol calls `__BOOT_CS` (0x10) and `__BOOT_DS` (0x18), then a
/// task state segment.
const GDT: [u64; 5] = [0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff, 0x008f_8b00_0000_ffff];

/// `mov dx, 0xcf9; mov al, 0x0e; out dx, al; hlt; jmp` to the `hlt`, in real mode.
///
/// Linux with support for EFI restarts itself so where ACPI is hardware-reduced and there is no EFI: it takes EFI to be what
/// restarts the machine, and without one falls back to the BIOS.
const RESET_CODE: [u8; 9] = {
    let [low, high] = layout::port::RESET.to_le_bytes();
    [0xba, low, high, 0xb0, acpi::RESET_VALUE, 0xee, 0xf4, 0xeb, 0xfd]
};

fn flat(selector: u16, type_: u8, long: bool) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        s: 1,
        l: long.into(),
        db: (!long).into(),
        g: 1,
        ..kvm_segment::default()
    }
}

/// Writes the page tables (4 GiB identity-mapped in 2 MiB pages), the descriptor table, and what resets the machine at
/// [`RESET_ENTRY`](layout::RESET_ENTRY).
///
/// # Errors
/// When there is no RAM for them.
pub(in crate::vmm) fn write_tables(memory: &GuestMemoryMmap) -> Result<(), BootError> {
    let write = |address: u64, value: u64| {
        memory.write_obj(value, GuestAddress(address)).map_err(|_| BootError::TooLittleRam)
    };
    for (index, descriptor) in GDT.into_iter().enumerate() {
        write(layout::BOOT_GDT + index as u64 * 8, descriptor)?;
    }
    let pdpt = layout::BOOT_PML4 + PAGE;
    memory
        .write_slice(&[0; 2 * PAGE as usize], GuestAddress(layout::BOOT_PML4))
        .map_err(|_| BootError::TooLittleRam)?;
    write(layout::BOOT_PML4, pdpt | PTE_PRESENT_WRITABLE)?;
    for gib in 0..4 {
        let directory = pdpt + PAGE * (gib + 1);
        write(pdpt + gib * 8, directory | PTE_PRESENT_WRITABLE)?;
        let entries: Vec<u8> = (0..512u64)
            .flat_map(|entry| (gib << 30 | entry << 21 | PTE_PRESENT_WRITABLE | PTE_HUGE).to_le_bytes())
            .collect();
        memory.write_slice(&entries, GuestAddress(directory)).map_err(|_| BootError::TooLittleRam)?;
    }
    let reset = GuestAddress(layout::RESET_ENTRY);
    memory.write_slice(&RESET_CODE, reset).map_err(|_| BootError::TooLittleRam)
}

/// Sets the registers with which the first vCPU enters the guest.
///
/// # Errors
/// When KVM refuses.
pub(in crate::vmm) fn enter(vcpu: &VcpuFd, entry: Entry) -> Result<(), MachineError> {
    let mut sregs = vcpu.get_sregs().map_err(MachineError::kvm("KVM_GET_SREGS"))?;
    sregs.cs = flat(0x10, 0xb, true);
    for segment in [&mut sregs.ds, &mut sregs.es, &mut sregs.ss, &mut sregs.fs, &mut sregs.gs] {
        *segment = flat(0x18, 0x3, false);
    }
    sregs.tr =
        kvm_segment { selector: 0x20, type_: 0xb, s: 0, limit: 0x67, g: 0, db: 0, ..flat(0, 0, false) };
    sregs.gdt.base = layout::BOOT_GDT;
    sregs.gdt.limit = (GDT.len() * 8 - 1) as u16;
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
    sregs.cr0 = CR0_PE | CR0_ET | CR0_NE | CR0_PG;
    sregs.cr3 = layout::BOOT_PML4;
    sregs.cr4 = CR4_PAE;
    sregs.efer = EFER_LME | EFER_LMA;
    vcpu.set_sregs(&sregs).map_err(MachineError::kvm("KVM_SET_SREGS"))?;
    let regs = kvm_regs {
        rip: entry.rip,
        rsi: layout::BOOT_PARAMS,
        rsp: layout::BOOT_STACK,
        // Bit 1 is always one.
        rflags: 2,
        ..kvm_regs::default()
    };
    vcpu.set_regs(&regs).map_err(MachineError::kvm("KVM_SET_REGS"))
}
