//! Guests that need no operating system.
//!
//! One ELF program, entered in 64-bit mode with identity-mapped memory and RSI pointing to the Linux boot
//! parameters. The first word of the command line picks what it does:
//!
//! | command line | does |
//! | --- | --- |
//! | `hello` | prints and powers off |
//! | `spin` | never ends |
//! | `reboot` | prints and resets the machine |
//! | `pci` | lists every PCI function that it sees |
//! | `edu [msis=N] [pins=N] [outside=0xADDRESS] [peer=0|1] [stay]` | drives QEMU's `edu` device: registers, DMA both ways, N interrupts by MSI (200) and by its pin (none), DMA to an address outside its RAM, and to the memory of an `ivshmem-plain`, which it is not to reach, or is to; also for ever |
//! | `gpu` | drives the modelled GPU: boot registers, power, a ring of submissions, errors, a reset in the middle |
//! | `nvme from=N to=N blocks=N [buffer=0xADDRESS] [wait] [stay] [crash]` | drives an NVMe controller, also one that comes later: copies blocks through memory at that address, also for ever, or makes a triple fault after it |
//! | `xhci [reboot]` | checks that USB controllers are as a reset leaves them, and leaves a mark in them; also again after each reset of the machine |
//! | `accel [hz=N]` | uses an accelerator that the host shares: kernels on its own memory, copies, batches, a kernel that never ends |
//! | `accel-hostile [hz=N] [seed=N]` | does to such an accelerator's device what no driver should, and then uses it |
//! | `accel-steady [hz=N] [seconds=N]` | launches for N seconds (10) and checks every result |
//! | `accel-loop [hz=N] [seconds=N]` | launches kernels that stray and kernels that never end for N seconds (10) |
//! | `accel-bench [hz=N] [mib=N] [launches=N]` | measures kernels on its own memory, single launches from user mode and from kernel mode, and batches |
//! | `accel-tiles [hz=N] [launches=N]` | launches a matrix product and attention of the kernel library, N times (100) more to be timed, and checks the results |
//! | `accel-model` | runs a model on an NPU, and checks its result; what is no model is refused |
//!
//! It reports on COM1, a line a check, `bare: CHECK ok` or `bare: CHECK FAILED: what`; the last line is
//! `bare: PASS` or `bare: FAIL`. Then it powers off through ACPI.
#![no_std]
#![no_main]

mod accel;
mod acpi;
mod boot;
mod edu;
mod gpu;
mod nvme;
mod pci;
mod serial;
mod sys;
mod xhci;

use core::panic::PanicInfo;

use acpi::Acpi;
use boot::BootParams;
use serial::println;

/// How a check ended: `Err` says what was seen.
type Check = Result<(), &'static str>;

/// Runs the program that the command line names. [`sys`] enters here.
fn main(params: BootParams) -> ! {
    let acpi = Acpi::find(params.rsdp());
    let mut words = params.command_line().split(|&byte| byte == b' ').filter(|word| !word.is_empty());
    let passed = match (words.next(), &acpi) {
        (Some(b"hello"), _) => {
            println!("bare: hello from the guest");
            true
        }
        (Some(b"spin"), _) => loop {
            sys::pause();
        },
        (Some(b"reboot"), Some(acpi)) => {
            println!("bare: reboot");
            acpi.reset();
        }
        (Some(b"pci"), Some(acpi)) => {
            pci::scan(acpi.ecam, |function| println!("{function}"));
            true
        }
        (Some(b"edu"), Some(acpi)) => edu::run(acpi.ecam, words),
        (Some(b"gpu"), Some(acpi)) => gpu::run(acpi.ecam),
        (Some(b"nvme"), Some(acpi)) => nvme::run(acpi.ecam, words),
        (Some(b"xhci"), Some(acpi)) => xhci::run(acpi, words),
        (
            Some(
                name @ (b"accel" | b"accel-hostile" | b"accel-steady" | b"accel-loop" | b"accel-bench"
                | b"accel-tiles" | b"accel-model"),
            ),
            Some(acpi),
        ) => accel::run(name, acpi.ecam, words),
        (_, None) => {
            println!("bare: acpi FAILED: no usable tables at {:#x}", params.rsdp());
            false
        }
        _ => {
            println!(
                "bare: command-line FAILED: it names none of hello, spin, reboot, pci, edu, gpu, nvme, xhci, accel, accel-hostile, accel-steady, accel-loop, accel-bench, accel-tiles, accel-model"
            );
            false
        }
    };
    println!("bare: {}", if passed { "PASS" } else { "FAIL" });
    match acpi {
        Some(acpi) => acpi.power_off(),
        None => sys::halt(),
    }
}

/// Prints how the check `name` ended and returns whether it passed.
fn report(name: &str, check: Check) -> bool {
    match check {
        Ok(()) => println!("bare: {name} ok"),
        Err(what) => println!("bare: {name} FAILED: {what}"),
    }
    check.is_ok()
}

/// Waits until something is done.
fn until(mut done: impl FnMut() -> bool, late: &'static str) -> Check {
    // Long past any answer of a device: a DMA of edu takes 100 ms by design.
    const DEADLINE_CYCLES: u64 = 60_000_000_000;
    let start = sys::cycles();
    while !done() {
        if sys::cycles().wrapping_sub(start) > DEADLINE_CYCLES {
            return Err(late);
        }
        sys::pause();
    }
    Ok(())
}

#[panic_handler]
fn panic(info: &PanicInfo) -> ! {
    println!("bare: panic FAILED: {info}");
    println!("bare: FAIL");
    sys::halt()
}
