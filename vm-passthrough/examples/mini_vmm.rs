//! A VMM in one file, with a passed-through device.
//!
//! ```text
//! cargo run --example mini_vmm -- 0000:65:00.0 [PROGRAM]
//! ```
//!
//! It takes the function from its driver, gives it to a guest, and gives it back when the guest ends. PROGRAM is a flat
//! binary of 32-bit code; it is loaded at 0x1000 and starts there, in protected mode without paging. What it finds:
//!
//! * EBX: the address of the device's first memory BAR; the other BARs are in config space.
//! * ESI: the address of config space (ECAM); the device is 00:01.0.
//! * Port 0x3f8: what is written there is printed. Port 0xf4: a write ends the guest.
//!
//! Without PROGRAM it prints the 32 bits at the start of the BAR, read by the guest with no exit to this process.

use std::error::Error;
use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Arc;

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_segment};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};
use vm_passthrough::claim::ClaimOptions;
use vm_passthrough::guest::{BarMap, KvmVmm, VfioPciDevice};
use vm_passthrough::manager::Claimed;
use vm_passthrough::pci::placement::{self, FunctionRequest, Windows};
use vm_passthrough::{PassthroughDevice, PassthroughManager, vfio};

/// The guest's address map: RAM, config space, and room for BARs, all of it below 4 GiB for 32-bit code.
const RAM: usize = 64 << 20;
const ECAM: u64 = 0xb000_0000;
const ECAM_SIZE: u64 = 1 << 20;
const BARS: std::ops::Range<u64> = 0xc000_0000..0xfe00_0000;

/// Where the program is loaded.
const PROGRAM: u64 = 0x1000;

/// Prints the 32 bits at EBX in hexadecimal.
const PRINT_REGISTER: &[u8] = &[
    0x8b, 0x03, //                         mov   (%ebx), %eax
    0xb9, 0x08, 0x00, 0x00, 0x00, //       mov   $8, %ecx
    0xba, 0xf8, 0x03, 0x00, 0x00, //       mov   $0x3f8, %edx
    0xc1, 0xc0, 0x04, //             next: rol   $4, %eax
    0x89, 0xc7, //                         mov   %eax, %edi
    0x24, 0x0f, //                         and   $0xf, %al
    0x04, 0x30, //                         add   $'0', %al
    0x3c, 0x39, //                         cmp   $'9', %al
    0x76, 0x02, //                         jbe   put
    0x04, 0x27, //                         add   $('a' - '9' - 1), %al
    0xee, //                          put: out   %al, (%dx)
    0x89, 0xf8, //                         mov   %edi, %eax
    0xe2, 0xec, //                         loop  next
    0xb0, 0x0a, //                         mov   $'\n', %al
    0xee, //                               out   %al, (%dx)
    0xe6, 0xf4, //                         out   %al, $0xf4
];

fn main() -> ExitCode {
    match embed() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mini_vmm: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Claims the function, runs the guest, gives the function back.
fn embed() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().ok_or("usage: mini_vmm ADDRESS [PROGRAM]")?.parse()?;
    let program = arguments.next().map(std::fs::read).transpose()?;

    // What happens is undone in any case: by `close`, which tells what it could not undo, or by the drop.
    let mut manager = PassthroughManager::new()?;
    let claimed = manager.claim(address, &ClaimOptions::default())?;
    run(&mut manager, &claimed, program.as_deref().unwrap_or(PRINT_REGISTER))?;
    Ok(manager.close()?)
}

/// Runs a guest that has the claimed function.
fn run(manager: &mut PassthroughManager, claimed: &Claimed, program: &[u8]) -> Result<(), Box<dyn Error>> {
    // A guest with RAM and KVM's interrupt controllers.
    let kvm = Kvm::new()?;
    let vm = Arc::new(kvm.create_vm()?);
    vm.create_irq_chip()?;
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), RAM)])?;
    memory.write_slice(program, GuestAddress(PROGRAM))?;
    let vmm = KvmVmm::new(vm.clone(), memory)?;

    // The device, which shares the guest's memory from `attach_device` on.
    let address = claimed.address();
    let space = vfio::open_space(manager.host(), &[address], None)?;
    let device = VfioPciDevice::new(claimed.open(&space)?, vmm.clone())?;
    manager.attach_device(device.clone())?;

    // Firmware's work: give the BARs addresses, and turn the device on.
    let bars = placement::probe(&*device);
    let request = FunctionRequest { name: address.to_string(), slot: None, bars };
    for placed in placement::plan(&[request], &Windows { low: BARS, high: 0..0, io: 0..0 })? {
        placement::program(&*device, &placed);
        placement::enable(&*device);
    }

    let mut vcpu = vm.create_vcpu(0)?;
    let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
    start(&mut vcpu, &cpuid, first_bar(&*device))?;
    let ended = run_vcpu(&mut vcpu, &*device, vmm.bars());
    manager.detach_device(address)?;
    ended
}

/// Sets the vCPU to the start of the program.
fn start(vcpu: &mut VcpuFd, cpuid: &CpuId, bar: u64) -> Result<(), Box<dyn Error>> {
    vcpu.set_cpuid2(cpuid)?;
    let mut system = vcpu.get_sregs()?;
    let flat = kvm_segment { limit: 0xffff_ffff, present: 1, s: 1, db: 1, g: 1, ..Default::default() };
    let data = kvm_segment { selector: 0x10, type_: 0x3, ..flat };
    system.cs = kvm_segment { selector: 0x08, type_: 0xb, ..flat };
    (system.ds, system.es, system.ss, system.fs, system.gs) = (data, data, data, data, data);
    system.cr0 |= 1;
    vcpu.set_sregs(&system)?;

    let mut registers = vcpu.get_regs()?;
    registers.rip = PROGRAM;
    registers.rsp = PROGRAM;
    registers.rflags = 2;
    registers.rbx = bar;
    registers.rsi = ECAM;
    Ok(vcpu.set_regs(&registers)?)
}

/// Runs the guest until it ends itself.
fn run_vcpu(vcpu: &mut VcpuFd, device: &dyn PassthroughDevice, bars: &BarMap) -> Result<(), Box<dyn Error>> {
    loop {
        match vcpu.run()? {
            VcpuExit::IoOut(0x3f8, data) => std::io::stdout().write_all(data)?,
            VcpuExit::IoOut(0xf4, _) => return Ok(()),
            VcpuExit::MmioRead(address, data) => read(device, bars, address, data),
            VcpuExit::MmioWrite(address, data) => write(device, bars, address, data),
            VcpuExit::IoIn(_, data) => data.fill(0xff),
            VcpuExit::IoOut(..) => {}
            exit => return Err(format!("the guest stopped: {exit:?}").into()),
        }
    }
}

/// A read of the guest that reaches no memory. An error shows as all ones, as on a real bus.
fn read(device: &dyn PassthroughDevice, bars: &BarMap, address: u64, data: &mut [u8]) {
    data.fill(0xff);
    if let Some(offset) = config_offset(address) {
        device.config_read(offset, data);
    } else if let Some(hit) = bars.find(address)
        && let Err(error) = device.bar_read(hit.bar, hit.offset, data)
    {
        eprintln!("{error}");
    }
}

/// A write of the guest that reaches no memory.
fn write(device: &dyn PassthroughDevice, bars: &BarMap, address: u64, data: &[u8]) {
    if let Some(offset) = config_offset(address) {
        device.config_write(offset, data);
    } else if let Some(hit) = bars.find(address)
        && let Err(error) = device.bar_write(hit.bar, hit.offset, data)
    {
        eprintln!("{error}");
    }
}

/// The offset into the config space of 00:01.0, if `address` is there: each function has 4096 bytes, each device 8
/// functions.
fn config_offset(address: u64) -> Option<u16> {
    let offset = address.checked_sub(ECAM).filter(|&offset| offset < ECAM_SIZE)?;
    (offset >> 12 == 1 << 3).then_some(offset as u16 & 0xfff)
}

/// The address of the first memory BAR, or 0.
fn first_bar(device: &dyn PassthroughDevice) -> u64 {
    let registers = (0x10..0x28).step_by(4).map(|offset| {
        let mut register = [0; 4];
        device.config_read(offset, &mut register);
        u64::from(u32::from_le_bytes(register) & !0xf)
    });
    registers.into_iter().find(|&address| address != 0).unwrap_or(0)
}
