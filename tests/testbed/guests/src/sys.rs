//! Everything that touches the machine: entry, interrupts, ports, memory by physical address.
#![allow(unsafe_code)]

mod user;

use core::arch::{asm, global_asm};
use core::sync::atomic::{AtomicU64, Ordering};

use crate::boot::BootParams;
use crate::serial::println;

// Entry: enable SSE, which compiled code uses, take a stack, clear nothing (the loader zeroed .bss), and go on in Rust.
global_asm!(
    r#"
    .section .text.entry, "ax"
    .global _start
_start:
    cli
    mov rax, cr0
    and ax, 0xfffb
    or ax, 0x2
    mov cr0, rax
    mov rax, cr4
    or ax, 0x600
    mov cr4, rax
    lea rsp, [rip + {stack} + {stack_size}]
    xor ebp, ebp
    mov rdi, rsi
    call {entry}
    ud2

    // An exception: its number on the stack, then what the processor pushed.
    .balign 16
    .global exception_stubs
exception_stubs:
    .set vector, 0
    .rept 32
    .balign 16
    push vector
    jmp exception_common
    .set vector, vector + 1
    .endr
exception_common:
    mov rdi, rsp
    and rsp, -16
    call {exception}
    ud2

    // The device interrupt: count it, acknowledge it in the device if that is wanted, tell the local APIC, go on.
    .balign 16
interrupt_stub:
    push rax
    lock inc qword ptr [rip + {interrupts}]
    mov rax, qword ptr [rip + {acknowledge}]
    test rax, rax
    jz 1f
    mov dword ptr [rax], 1
1:
    mov eax, 0xfee000b0
    mov dword ptr [rax], 0
    pop rax
    iretq

    // The timer's: it ends a halt, and nothing else.
    .balign 16
timer_stub:
    push rax
    mov eax, 0xfee000b0
    mov dword ptr [rax], 0
    pop rax
    iretq
    .text
"#,
    stack = sym STACK,
    stack_size = const STACK_SIZE,
    entry = sym entry,
    exception = sym exception,
    interrupts = sym INTERRUPTS,
    acknowledge = sym ACKNOWLEDGE,
);

const STACK_SIZE: usize = 64 << 10;

/// The only stack. Only the entry code names it.
#[repr(C, align(16))]
struct Stack([u8; STACK_SIZE]);
static mut STACK: Stack = Stack([0; STACK_SIZE]);

/// Device interrupts so far.
static INTERRUPTS: AtomicU64 = AtomicU64::new(0);

/// The register to which the interrupt's handler writes 1; 0 for none.
static ACKNOWLEDGE: AtomicU64 = AtomicU64::new(0);

/// Has the handler of the device's interrupt acknowledge it in the device, by a 1 to this register.
pub fn acknowledge_by(register: Option<u64>) {
    ACKNOWLEDGE.store(register.unwrap_or(0), Ordering::SeqCst);
}

/// Leads a pin of the I/O APIC to the only processor, as the device's interrupt, level-triggered and active low; or masks it.
pub fn route_pin(pin: u8, masked: bool) {
    const LEVEL_ACTIVE_LOW: u32 = 1 << 15 | 1 << 13;
    let register = 0x10 + 2 * u32::from(pin);
    for (register, value) in [
        (register + 1, 0),
        (register, u32::from(masked) << 16 | LEVEL_ACTIVE_LOW | u32::from(INTERRUPT_VECTOR)),
    ] {
        write32(IO_APIC, register);
        write32(IO_APIC + 0x10, value);
    }
}

/// The I/O APIC: a register that selects one, and the one that is selected 16 bytes further.
const IO_APIC: u64 = 0xfec0_0000;

/// The vector that devices are to use.
pub const INTERRUPT_VECTOR: u8 = 0x40;

/// The vector of the local APIC's timer.
const TIMER_VECTOR: u8 = 0x41;

/// Where a device writes to interrupt the only processor.
pub const MSI_ADDRESS: u32 = 0xfee0_0000;

extern "C" fn entry(boot_params: u64) -> ! {
    enable_interrupts();
    let top: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, cr3", out(reg) top, options(nomem, nostack)) };
    PAGE_TABLES.store(top & !0xfff, Ordering::Relaxed);
    crate::main(BootParams::at(boot_params))
}

extern "C" fn exception(frame: u64) -> ! {
    println!(
        "bare: exception FAILED: vector {}, then {:#x} {:#x} {:#x}",
        read64(frame),
        read64(frame + 8),
        read64(frame + 16),
        read64(frame + 24)
    );
    println!("bare: FAIL");
    halt()
}

/// Device interrupts since the start.
pub fn interrupts() -> u64 {
    INTERRUPTS.load(Ordering::SeqCst)
}

#[repr(C, packed)]
struct TableRegister {
    limit: u16,
    base: u64,
}

const GATES: usize = 256;
static mut IDT: [[u64; 2]; GATES] = [[0; 2]; GATES];

fn enable_interrupts() {
    let code_segment: u16;
    let (exceptions, interrupt, timer): (u64, u64, u64);
    // SAFETY: reads a register and the addresses of two labels; touches no memory.
    unsafe {
        asm!(
            "mov {0:x}, cs",
            "lea {1}, [rip + exception_stubs]",
            "lea {2}, [rip + interrupt_stub]",
            "lea {3}, [rip + timer_stub]",
            out(reg) code_segment, out(reg) exceptions, out(reg) interrupt, out(reg) timer,
            options(nomem, nostack)
        );
    }
    let gate = |handler: u64| {
        [
            handler & 0xffff | u64::from(code_segment) << 16 | 0x8e00 << 32 | (handler >> 16 & 0xffff) << 48,
            handler >> 32,
        ]
    };
    let idt = &raw mut IDT;
    for vector in 0..32 {
        // SAFETY: the index is within the table, which only this function, called once, writes.
        unsafe { (*idt)[vector] = gate(exceptions + 16 * vector as u64) };
    }
    // SAFETY: as above.
    unsafe { (*idt)[usize::from(INTERRUPT_VECTOR)] = gate(interrupt) };
    // SAFETY: as above.
    unsafe { (*idt)[usize::from(TIMER_VECTOR)] = gate(timer) };
    // SAFETY: as above.
    unsafe { (*idt)[user::LEAVE] = gate(user::gate()) };
    let register = TableRegister { limit: (GATES * 16 - 1) as u16, base: idt as u64 };
    // SAFETY: the table is complete for the vectors in use and lives for ever.
    unsafe { asm!("lidt [{}]", in(reg) &register, options(readonly, nostack)) };
    // Software-enable the local APIC; its spurious vector is one that has no gate and is never raised here.
    write32(0xfee0_00f0, 0x1ff);
    // SAFETY: every vector that can be raised has a handler.
    unsafe { asm!("sti", options(nomem, nostack)) };
}

/// The page tables that the program was entered with.
static PAGE_TABLES: AtomicU64 = AtomicU64::new(0);

/// Runs `f` in user mode, which reaches all memory and registers that kernel mode does, but no ports.
pub fn in_user_mode<T>(f: impl FnOnce() -> T) -> T {
    user::enter(PAGE_TABLES.load(Ordering::Relaxed));
    let result = f();
    user::leave();
    result
}

/// Halts until an interrupt comes, for about N nanoseconds at most, unless `awake` says so once interrupts are held
/// back. User mode can't halt: it waits a moment.
pub fn halt_for(nanoseconds: u64, awake: &dyn Fn() -> bool) {
    if user::is_on() {
        return pause();
    }
    const TIMER: u64 = 0xfee0_0320;
    const INITIAL_COUNT: u64 = 0xfee0_0380;
    const DIVIDE: u64 = 0xfee0_03e0;
    // Once, at a billionth of a second a count, as KVM's timer runs. Where it runs at another speed, halts are longer or
    // shorter.
    write32(DIVIDE, 0b1011);
    write32(TIMER, TIMER_VECTOR.into());
    write32(INITIAL_COUNT, nanoseconds.try_into().unwrap_or(u32::MAX));
    // SAFETY: holds interrupts back for a few lines.
    unsafe { asm!("cli", options(nostack)) };
    if !awake() {
        // SAFETY: interrupts come through with the halt, not before it.
        unsafe { asm!("sti", "hlt", options(nostack)) };
    }
    // SAFETY: every vector that can be raised has a handler.
    unsafe { asm!("sti", options(nostack)) };
    write32(INITIAL_COUNT, 0);
}

/// Waits a moment.
pub fn pause() {
    core::hint::spin_loop();
}

/// The time stamp counter, in cycles.
pub fn cycles() -> u64 {
    // SAFETY: reads a counter.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Makes a triple fault: no exception has a handler any more.
pub fn crash() -> ! {
    let none = TableRegister { limit: 0, base: 0 };
    // SAFETY: nothing of this program runs after it.
    unsafe { asm!("lidt [{}]", "ud2", in(reg) &none, options(noreturn)) };
}

/// Stops for ever.
pub fn halt() -> ! {
    loop {
        // SAFETY: no interrupt wakes it for long.
        unsafe { asm!("cli", "hlt", options(nomem, nostack)) };
    }
}

/// Reads an I/O port.
pub fn in8(port: u16) -> u8 {
    let value;
    // SAFETY: port accesses touch no memory of this program.
    unsafe { asm!("in al, dx", in("dx") port, out("al") value, options(nomem, nostack)) };
    value
}

/// Writes an I/O port.
pub fn out8(port: u16, value: u8) {
    // SAFETY: as for `in8`.
    unsafe { asm!("out dx, al", in("dx") port, in("al") value, options(nomem, nostack)) };
}

macro_rules! physical {
    ($($read:ident $write:ident $type:ty;)*) => {$(
        /// Reads memory or a register at a physical address.
        pub fn $read(address: u64) -> $type {
            // SAFETY: all physical memory is identity-mapped, and this program's own data is reached only by
            // reading, or through statics meant for devices.
            unsafe { (address as *const $type).read_volatile() }
        }

        /// Writes memory or a register at a physical address.
        #[allow(dead_code, reason = "the set is complete")]
        pub fn $write(address: u64, value: $type) {
            // SAFETY: the callers write device registers and tables of the VMM only.
            unsafe { (address as *mut $type).write_volatile(value) }
        }
    )*};
}

physical! {
    read8 write8 u8;
    read16 write16 u16;
    read32 write32 u32;
}

/// Writes eight bytes of memory.
pub fn write64(address: u64, value: u64) {
    // SAFETY: the callers write page tables and memory that was handed out for a device.
    unsafe { (address as *mut u64).write_volatile(value) }
}

/// Reads eight bytes of memory.
fn read64(address: u64) -> u64 {
    // SAFETY: as for `read32`.
    unsafe { (address as *const u64).read_volatile() }
}

/// The next free byte of [`ARENA`].
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Memory that is handed out once, page by page.
#[repr(C, align(4096))]
struct Arena(core::cell::UnsafeCell<[u8; ARENA_SIZE]>);

// SAFETY: `arena` hands out each byte once.
unsafe impl Sync for Arena {}

const ARENA_SIZE: usize = 4 << 20;
static ARENA: Arena = Arena(core::cell::UnsafeCell::new([0; ARENA_SIZE]));

/// The address of `bytes` bytes of zeros, in whole pages, that nothing else uses.
pub fn arena(bytes: usize) -> u64 {
    let bytes = bytes.next_multiple_of(4096) as u64;
    let start = NEXT.fetch_add(bytes, Ordering::SeqCst);
    assert!(start + bytes <= ARENA_SIZE as u64, "the arena is used up");
    ARENA.0.get() as u64 + start
}

/// As [`arena`], as a slice.
pub fn arena_slice(bytes: usize) -> &'static mut [u8] {
    let start = arena(bytes);
    // SAFETY: nothing else is ever given these bytes.
    unsafe { core::slice::from_raw_parts_mut(start as *mut u8, bytes) }
}

/// A page table for registers above the 4 GiB that the program is entered with.
#[repr(C, align(4096))]
struct PageTable([u64; 512]);
static mut HIGH: PageTable = PageTable([0; 512]);

/// Makes the GiB around a physical address reachable, uncached; it can be done for one. Returns whether it is reachable.
pub fn map_registers(address: u64) -> bool {
    // Present, writable, and for user mode too.
    const PRESENT_WRITABLE: u64 = 7;
    const LARGE: u64 = 1 << 7;
    const UNCACHED: u64 = 1 << 4;
    const GIB: u64 = 1 << 30;
    if address < 4 * GIB {
        return true;
    }
    if address >= 512 * GIB {
        return false;
    }
    let pointers = read64(PAGE_TABLES.load(Ordering::Relaxed)) & 0xf_ffff_ffff_f000;
    let slot = pointers + address / GIB * 8;
    let table = &raw mut HIGH as u64;
    if read64(slot) & 1 != 0 {
        // Either it is this very GiB, or the VMM's own.
        return true;
    }
    if read64(table) != 0 {
        return false;
    }
    for index in 0..512 {
        let page = address / GIB * GIB + (index << 21);
        write64(table + 8 * index, page | LARGE | UNCACHED | PRESENT_WRITABLE);
    }
    write64(slot, table | PRESENT_WRITABLE);
    true
}

/// Memory that the VMM filled before the start and nothing writes.
pub fn bytes(address: u64, len: usize) -> &'static [u8] {
    // SAFETY: identity-mapped, and constant for the whole run.
    unsafe { core::slice::from_raw_parts(address as *const u8, len) }
}

// The compiler calls these; there is no C library that has them.

/// Copies forwards.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("rep movsb", inout("rdi") to => _, inout("rsi") from => _, inout("rcx") len => _, options(nostack, preserves_flags));
    }
    to
}

/// Copies between areas that may overlap.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
    if (to as usize).wrapping_sub(from as usize) >= len {
        // SAFETY: the caller's promise; copying forwards is right when `to` does not start within `from`.
        return unsafe { memcpy(to, from, len) };
    }
    // SAFETY: the caller's promise; the direction flag is restored.
    unsafe {
        asm!("std", "rep movsb", "cld",
            inout("rdi") to.wrapping_add(len).wrapping_sub(1) => _,
            inout("rsi") from.wrapping_add(len).wrapping_sub(1) => _,
            inout("rcx") len => _, options(nostack));
    }
    to
}

/// Fills.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, value: i32, len: usize) -> *mut u8 {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("rep stosb", inout("rdi") to => _, in("al") value as u8, inout("rcx") len => _, options(nostack, preserves_flags));
    }
    to
}

/// Compares.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, len: usize) -> i32 {
    for i in 0..len {
        // SAFETY: the caller's promise. Volatile, so that the loop is not made into a call of this function.
        let x = unsafe { a.add(i).read_volatile() };
        // SAFETY: as above.
        let y = unsafe { b.add(i).read_volatile() };
        if x != y {
            return i32::from(x) - i32::from(y);
        }
    }
    0
}

/// Compares for equality.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(a: *const u8, b: *const u8, len: usize) -> i32 {
    // SAFETY: the caller's promise.
    unsafe { memcmp(a, b, len) }
}
