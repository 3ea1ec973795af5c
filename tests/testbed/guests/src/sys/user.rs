//! User mode: a part of the program runs in ring 3, and goes on in ring 0.
//!
//! Programs of an operating system run there. Some KVMs run user mode on the processor and emulate the kernel mode of
//! guests that were not made for them, instruction by instruction (PVM is one): what is timed in ring 0 is the emulator
//! then.
#![allow(unsafe_code)]

use core::arch::{asm, global_asm};

use super::{read64, write64};

global_asm!(
    r#"
    // To ring 3, on the same stack. RDI: its data segment; RSI: its code segment.
    .balign 16
    .global user_mode_enter, user_mode_leave, user_mode_gate
user_mode_enter:
    pop rax
    mov rcx, rsp
    mov ds, edi
    mov es, edi
    push rdi
    push rcx
    pushfq
    push rsi
    push rax
    iretq

    // Back to ring 0, on the same stack.
    .balign 16
user_mode_leave:
    ud2
    .balign 16
user_mode_gate:
    push rax
    lea rax, [rip + user_mode_leave]
    cmp rax, [rsp + 8]
    pop rax
    jne exception_stubs + 96
    mov rsp, [rsp + 24]
    mov eax, 0x18
    mov ss, eax
    mov ds, eax
    mov es, eax
    sti
    ret
    .text
"#
);

unsafe extern "sysv64" {
    fn user_mode_enter(data: u64, code: u64);
    fn user_mode_leave();
    fn user_mode_gate();
}

/// The exception by which user mode ends: an undefined instruction. Not every KVM knows interrupts by instruction there.
pub(super) const LEAVE: usize = 6;

/// Where it leads.
pub(super) fn gate() -> u64 {
    user_mode_gate as *const () as u64
}

/// Ends user mode, with the same stack.
pub(super) fn leave() {
    // SAFETY: the gate is there; what comes behind goes on in ring 0, on the same stack.
    unsafe { user_mode_leave() }
}

const USER: u64 = 4;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0xf_ffff_ffff_f000;
const STACK_SIZE: usize = 16 << 10;

/// What interrupts run on.
#[repr(C, align(16))]
struct Stack([u8; STACK_SIZE]);
static mut STACK: Stack = Stack([0; STACK_SIZE]);

/// The task state segment: all that counts is where the stack of ring 0 ends.
#[repr(C, align(16))]
struct Task([u32; 26]);
static mut TASK: Task = Task([0; 26]);

static mut GDT: [u64; 8] = [0; 8];
const TASK_SEGMENT: u16 = 0x20;
const USER_DATA: u64 = 0x30 | 3;
const USER_CODE: u64 = 0x38 | 3;

#[repr(C, packed)]
struct TableRegister {
    limit: u16,
    base: u64,
}

/// Whether this is user mode.
pub(super) fn is_on() -> bool {
    let segment: u16;
    // SAFETY: reads a register.
    unsafe { asm!("mov {:x}, cs", out(reg) segment, options(nomem, nostack)) };
    segment & 3 == 3
}

/// Goes on in user mode, with the same stack.
pub(super) fn enter(page_tables: u64) {
    open_table(page_tables & ADDRESS, 3);
    let (task, stack, gdt) =
        (&raw mut TASK as u64, &raw mut STACK as u64 + STACK_SIZE as u64, &raw mut GDT as u64);
    // RSP0 lies at byte 4; the map of ports begins behind the limit, so that there is none.
    super::write32(task + 4, stack as u32);
    super::write32(task + 8, (stack >> 32) as u32);
    super::write32(task + 100, 104 << 16);
    let limit = 103;
    let descriptors = [
        0,
        0,
        0x00af_9b00_0000_ffff,
        0x00cf_9300_0000_ffff,
        limit | (task & 0xff_ffff) << 16 | 0x89 << 40 | (task >> 24 & 0xff) << 56,
        task >> 32,
        0x00cf_f300_0000_ffff,
        0x00af_fb00_0000_ffff,
    ];
    for (index, descriptor) in (0..).zip(descriptors) {
        write64(gdt + 8 * index, descriptor);
    }
    let register = TableRegister { limit: 63, base: gdt };
    // SAFETY: the table is complete and lives for ever; all segments in use stay what they were. The page tables are the
    // same ones with more rights.
    unsafe {
        asm!(
            "lgdt [{register}]", "ltr {task:x}", "mov {scratch}, cr3", "mov cr3, {scratch}",
            register = in(reg) &register, task = in(reg) TASK_SEGMENT, scratch = out(reg) _,
            options(nostack, preserves_flags)
        );
    }
    // SAFETY: goes on behind the call, with the same stack, which user mode may reach now.
    unsafe { user_mode_enter(USER_DATA, USER_CODE) }
}

/// Lets user mode reach what a page table leads to.
fn open_table(table: u64, level: u32) {
    for slot in (table..table + 4096).step_by(8) {
        let entry = read64(slot);
        if entry & 1 == 0 {
            continue;
        }
        write64(slot, entry | USER);
        if level > 1 && entry & LARGE == 0 {
            open_table(entry & ADDRESS, level - 1);
        }
    }
}
