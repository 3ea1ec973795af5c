//! A VMM that implements [`Vmm`] itself, and is built otherwise than `vm-service` in every way that the library must not
//! care about.
//!
//! ```text
//! cargo run --example own_vmm -- 0000:65:00.0 KERNEL [COMMAND LINE]
//! ```
//!
//! One thread runs an event loop and owns everything: RAM in two regions of a memfd, of which the second is added once the
//! device is attached; a bus that is a map of address ranges; the device, which comes while the guest runs; and its interrupts,
//! which it takes from their eventfds and sends on as messages. Another thread runs the only vCPU, and has the loop serve each of
//! its exits.
//!
//! KERNEL is a static ELF program, entered in 64-bit mode with Linux boot parameters. It finds the device at 00:01.0 through
//! ACPI's MCFG, once it has printed a line, a serial port at 0x3f8, and powers off through ACPI's sleep control register.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::fs::File;
use std::io::Write as _;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_msi, kvm_segment};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use linux_loader::loader::{Elf, KernelLoader as _};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use vm_memory::GuestMemoryRegion as _;
use vm_memory::{Bytes as _, FileOffset, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap};
use vm_passthrough::claim::ClaimOptions;
use vm_passthrough::guest::{
    DecodedBar, MapId, MsiMessage, RamRegion, RouteId, SharedMemory, VfioPciDevice, Vmm, VmmError,
};
use vm_passthrough::manager::Claimed;
use vm_passthrough::pci::placement::{self, FunctionRequest, Windows};
use vm_passthrough::vfio::{self, Mapping};
use vm_passthrough::{PassthroughDevice, PassthroughManager, PciAddress};

/// The guest's address map: what it boots with, RAM that is added later, config space of bus 0, and BARs.
const RAM: usize = 16 << 20;
const MORE_RAM: (u64, usize) = (0x1000_0000, 16 << 20);
const ECAM: u64 = 0xb000_0000;
const ECAM_SIZE: u64 = 1 << 20;
const BARS: Range<u64> = 0xc000_0000..0xe000_0000;

/// What the guest boots with.
const GDT: u64 = 0x500;
const BOOT_PARAMS: u64 = 0x7000;
const STACK: u64 = 0x8ff0;
const PAGE_TABLES: u64 = 0x9000;
const COMMAND_LINE: u64 = 0x2_0000;
const ACPI: u64 = 0xe_0000;

/// The ports that there are: a serial port's data and line status, and ACPI's sleep control.
const SERIAL: u64 = 0x3f8;
const LINE_STATUS: u64 = SERIAL + 5;
const SLEEP_CONTROL: u64 = 0x600;

fn main() -> ExitCode {
    match embed() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("own_vmm: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Claims the function, runs the guest, gives the function back.
fn embed() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: own_vmm ADDRESS KERNEL [COMMAND LINE]";
    let address = arguments.next().ok_or(usage)?.parse()?;
    let kernel = File::open(arguments.next().ok_or(usage)?)?;
    let command_line = arguments.collect::<Vec<_>>().join(" ");

    // What happens is undone in any case: by `close`, which tells what it could not undo, or by the drop.
    let mut manager = PassthroughManager::new()?;
    let claimed = manager.claim(address, &ClaimOptions::default())?;
    run(&mut manager, &claimed, kernel, &command_line)?;
    Ok(manager.close()?)
}

/// Runs a guest that has the claimed function.
fn run(
    manager: &mut PassthroughManager,
    claimed: &Claimed,
    mut kernel: File,
    command_line: &str,
) -> Result<(), Box<dyn Error>> {
    let file = Arc::new(File::from(memfd_create("guest", MemfdFlags::CLOEXEC)?));
    file.set_len((RAM + MORE_RAM.1) as u64)?;
    let part = |start| Some(FileOffset::from_arc(file.clone(), start));
    let memory = GuestMemoryMmap::<()>::from_ranges_with_files([
        (GuestAddress(0), RAM, part(0)),
        (GuestAddress(MORE_RAM.0), MORE_RAM.1, part(RAM as u64)),
    ])?;
    let mut regions = memory.iter().map(|region| RamRegion {
        guest: region.start_addr().0,
        memory: Arc::new(SharedMemory::<()>::new(region.get_mmap())),
    });
    let (ram, more) = (regions.next().ok_or("no RAM")?, regions.next().ok_or("no more RAM")?);
    let entry = Elf::load(&memory, None, &mut kernel, None)?.kernel_load.0;
    write_boot(&memory, command_line)?;

    let kvm = Kvm::new()?;
    let vm = kvm.create_vm()?;
    vm.set_tss_address(0xfffb_d000)?;
    vm.create_irq_chip()?;
    let vcpu = vm.create_vcpu(0)?;
    vcpu.set_cpuid2(&kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?)?;
    enter(&vcpu, entry)?;
    let board = Arc::new(Board::new(vm));
    board.add_ram(ram, None)?;

    let (line, exits) = line()?;
    let ran = std::thread::scope(|scope| {
        scope.spawn(move || run_vcpu(vcpu, &line));
        // It returns, and lets go of the line, when the guest ends; the vCPU's thread waits for an answer then, and ends.
        board.serve(exits, || plug(manager, claimed, &board, more))
    });
    for address in manager.attached() {
        manager.detach_device(address)?;
    }
    ran
}

/// Gives the claimed function to the guest, which runs.
fn plug(
    manager: &mut PassthroughManager,
    claimed: &Claimed,
    board: &Arc<Board>,
    more: RamRegion,
) -> Result<Arc<VfioPciDevice>, Box<dyn Error>> {
    let address = claimed.address();
    let space = vfio::open_space(manager.host(), &[address], None)?;
    let device = VfioPciDevice::new(claimed.open(&space)?, board.clone())?;
    manager.attach_device(device.clone())?;
    board.add_ram(more, Some(&*device))?;

    // Firmware's work: give the BARs addresses. The guest turns the device on.
    let bars = placement::probe(&*device);
    let request = FunctionRequest { name: address.to_string(), slot: None, bars };
    for placed in placement::plan(&[request], &Windows { low: BARS, high: 0..0, io: 0..0 })? {
        placement::program(&*device, &placed);
    }
    Ok(device)
}

/// All that the event loop works on. The library's traits may be called from any thread, so what changes has locks, which
/// nobody contends for.
struct Board {
    vm: VmFd,
    ram: Mutex<Vec<RamRegion>>,
    /// Memory slots of KVM. What is in them lives as long as they do.
    slots: Mutex<BTreeMap<u32, RamRegion>>,
    routes: Mutex<BTreeMap<u32, Route>>,
    /// Ranges by their start, with their length and what is there.
    bus: Mutex<BTreeMap<u64, (u64, Target)>>,
}

/// An interrupt of the device.
struct Route {
    trigger: OwnedFd,
    message: Option<MsiMessage>,
}

/// What is in a range of the bus.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Target {
    Config,
    Bar(u8),
}

impl Board {
    fn new(vm: VmFd) -> Self {
        Self {
            vm,
            ram: Mutex::default(),
            slots: Mutex::default(),
            routes: Mutex::default(),
            bus: Mutex::new(BTreeMap::from([(ECAM, (ECAM_SIZE, Target::Config))])),
        }
    }

    /// Gives RAM to the guest, and to a device that is attached already.
    fn add_ram(
        &self,
        region: RamRegion,
        device: Option<&dyn PassthroughDevice>,
    ) -> Result<(), Box<dyn Error>> {
        self.map(region.guest, region.memory.clone())?;
        lock(&self.ram).push(region.clone());
        Ok(device.map_or(Ok(()), |device| device.ram_added(&region))?)
    }

    /// The event loop: interrupts of the device, and exits of the vCPU, until the guest powers off. The device is plugged when
    /// the guest has said its first line.
    fn serve(
        &self,
        exits: Exits,
        plug: impl FnOnce() -> Result<Arc<VfioPciDevice>, Box<dyn Error>>,
    ) -> Result<(), Box<dyn Error>> {
        let (mut plug, mut device) = (Some(plug), None);
        loop {
            self.wait(exits.arrived.as_fd())?;
            while let Ok(exit) = exits.asked.try_recv() {
                match exit {
                    Exit::Port { port: SERIAL, data: [byte, ..], write: true } => {
                        std::io::stdout().write_all(&[byte])?;
                        if let Some(plug) = plug.take_if(|_| byte == b'\n') {
                            device = Some(plug()?);
                        }
                    }
                    Exit::Port { port: SLEEP_CONTROL, write: true, .. } => return Ok(()),
                    Exit::Failed(reason) => return Err(reason.into()),
                    _ => {}
                }
                exits.answer.send(self.access(device.as_deref(), &exit))?;
            }
        }
    }

    /// Waits for an exit, and sends on the interrupts that come meanwhile.
    fn wait(&self, arrived: BorrowedFd<'_>) -> Result<(), Box<dyn Error>> {
        let routes = lock(&self.routes);
        loop {
            let unmasked: Vec<_> =
                routes.values().filter_map(|route| Some((&route.trigger, route.message?))).collect();
            let mut fds = vec![PollFd::from_borrowed_fd(arrived, PollFlags::IN)];
            fds.extend(unmasked.iter().map(|(trigger, _)| PollFd::new(*trigger, PollFlags::IN)));
            poll(&mut fds, None)?;
            let ready: Vec<bool> = fds.iter().map(|fd| fd.revents().contains(PollFlags::IN)).collect();
            for ((trigger, message), _) in unmasked.iter().zip(&ready[1..]).filter(|(_, ready)| **ready) {
                take(trigger.as_fd());
                let message = kvm_msi {
                    address_lo: message.address as u32,
                    address_hi: (message.address >> 32) as u32,
                    data: message.data,
                    ..Default::default()
                };
                if let Err(error) = self.vm.signal_msi(message) {
                    eprintln!("an interrupt was not delivered: {error}");
                }
            }
            if ready[0] {
                take(arrived);
                return Ok(());
            }
        }
    }

    /// What the guest reads, in the first bytes; all ones where there is nothing.
    fn access(&self, device: Option<&VfioPciDevice>, exit: &Exit) -> [u8; 8] {
        let mut answer = [0xff; 8];
        let &Exit::Memory { address, len, data, write } = exit else {
            if let Exit::Port { port: LINE_STATUS, .. } = exit {
                // Whatever was to be sent has been.
                answer[0] = 0x60;
            }
            return answer;
        };
        let found = lock(&self.bus).range(..=address).next_back().map(|(&start, &found)| (start, found));
        let (Some((start, (size, target))), Some(device)) = (found, device) else { return answer };
        let offset = address - start;
        let (inside, data) = (&mut answer[..len], &data[..len]);
        let result = match target {
            _ if offset >= size => Ok(()),
            // Each function has 4096 bytes, each device 8 functions; there is function 0 of device 1.
            Target::Config if offset >> 12 != 1 << 3 => Ok(()),
            Target::Config if write => {
                device.config_write(offset as u16 & 0xfff, data);
                Ok(())
            }
            Target::Config => {
                device.config_read(offset as u16 & 0xfff, inside);
                Ok(())
            }
            Target::Bar(bar) if write => device.bar_write(bar, offset, data),
            Target::Bar(bar) => device.bar_read(bar, offset, inside),
        };
        if let Err(error) = result {
            eprintln!("{error}");
        }
        answer
    }
}

impl Vmm for Board {
    fn ram(&self) -> Vec<RamRegion> {
        lock(&self.ram).clone()
    }

    fn map(&self, guest: u64, memory: Arc<dyn Mapping>) -> Result<MapId, VmmError> {
        let mut slots = lock(&self.slots);
        let slot = (0..).find(|slot| !slots.contains_key(slot)).unwrap_or(u32::MAX);
        sys::set_memory(&self.vm, slot, guest, Some(&*memory))
            .map_err(|error| VmmError::new("map memory into the guest", error))?;
        slots.insert(slot, RamRegion { guest, memory });
        Ok(MapId(slot))
    }

    fn unmap(&self, id: MapId) -> Result<(), VmmError> {
        let failed =
            |error: Box<dyn Error + Send + Sync>| VmmError::new("unmap memory from the guest", error);
        let mut slots = lock(&self.slots);
        let guest = slots.get(&id.0).ok_or_else(|| failed("there is no such mapping".into()))?.guest;
        sys::set_memory(&self.vm, id.0, guest, None).map_err(|error| failed(error.into()))?;
        slots.remove(&id.0);
        Ok(())
    }

    fn add_route(&self, trigger: BorrowedFd<'_>) -> Result<RouteId, VmmError> {
        let trigger = trigger
            .try_clone_to_owned()
            .map_err(|error| VmmError::new("duplicate an interrupt's eventfd", error))?;
        let mut routes = lock(&self.routes);
        let id = routes.last_key_value().map_or(0, |(last, _)| last + 1);
        routes.insert(id, Route { trigger, message: None });
        Ok(RouteId(id))
    }

    fn set_route(&self, id: RouteId, message: Option<MsiMessage>) -> Result<(), VmmError> {
        let mut routes = lock(&self.routes);
        let route = routes.get_mut(&id.0);
        route.ok_or_else(|| VmmError::new("find an interrupt route", "there is none"))?.message = message;
        Ok(())
    }

    fn remove_route(&self, id: RouteId) -> Result<(), VmmError> {
        lock(&self.routes).remove(&id.0);
        Ok(())
    }

    fn bars_changed(&self, _device: PciAddress, bars: &[DecodedBar]) {
        let mut bus = lock(&self.bus);
        bus.retain(|_, (_, target)| *target == Target::Config);
        for bar in bars.iter().filter(|bar| !bar.io) {
            bus.entry(bar.address).or_insert((bar.size, Target::Bar(bar.bar)));
        }
    }
}

impl fmt::Debug for Board {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Board").field("ram", &lock(&self.ram)).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes what an eventfd has collected.
fn take(event: BorrowedFd<'_>) {
    // It fails when there is nothing.
    let _ = rustix::io::read(event, &mut [0; 8]);
}

/// Why the vCPU left the guest.
enum Exit {
    Memory { address: u64, len: usize, data: [u8; 8], write: bool },
    Port { port: u64, data: [u8; 8], write: bool },
    Failed(String),
}

/// The vCPU's end of its line to the event loop.
struct Line {
    ask: Sender<Exit>,
    arrived: Arc<OwnedFd>,
    answers: Receiver<[u8; 8]>,
}

/// The event loop's end.
struct Exits {
    asked: Receiver<Exit>,
    arrived: Arc<OwnedFd>,
    answer: Sender<[u8; 8]>,
}

fn line() -> Result<(Line, Exits), Box<dyn Error>> {
    let arrived = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let ((ask, asked), (answer, answers)) = (channel(), channel());
    Ok((Line { ask, arrived: arrived.clone(), answers }, Exits { asked, arrived, answer }))
}

impl Line {
    /// Has the loop serve an exit; `None` when the guest is over.
    fn ask(&self, exit: Exit) -> Option<[u8; 8]> {
        self.ask.send(exit).ok()?;
        rustix::io::write(&self.arrived, &1u64.to_ne_bytes()).ok()?;
        self.answers.recv().ok()
    }
}

/// Runs the vCPU until the guest is over.
fn run_vcpu(mut vcpu: VcpuFd, line: &Line) {
    let copy = |from: &[u8]| std::array::from_fn(|at| from.get(at).copied().unwrap_or(0));
    loop {
        let (exit, into): (Exit, &mut [u8]) = match vcpu.run() {
            Ok(VcpuExit::MmioRead(address, data)) => {
                (Exit::Memory { address, len: data.len(), data: [0; 8], write: false }, data)
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                (Exit::Memory { address, len: data.len(), data: copy(data), write: true }, &mut [])
            }
            Ok(VcpuExit::IoIn(port, data)) => {
                (Exit::Port { port: port.into(), data: [0; 8], write: false }, data)
            }
            Ok(VcpuExit::IoOut(port, data)) => {
                (Exit::Port { port: port.into(), data: copy(data), write: true }, &mut [])
            }
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => continue,
            other => (Exit::Failed(format!("the guest stopped: {other:?}")), &mut []),
        };
        let Some(answer) = line.ask(exit) else { return };
        for (byte, read) in into.iter_mut().zip(answer) {
            *byte = read;
        }
    }
}

/// Writes what the guest boots with: descriptors, page tables of the first 4 GiB, boot parameters, and as much ACPI as tells
/// where config space is and how to power off.
fn write_boot(memory: &GuestMemoryMmap<()>, command_line: &str) -> Result<(), Box<dyn Error>> {
    let put = |address: u64, bytes: &[u8]| memory.write_slice(bytes, GuestAddress(address));
    let words = |address: u64, words: &[u64]| {
        put(address, &words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>())
    };
    // Code, data, a task state segment.
    words(GDT, &[0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff, 0x008f_8b00_0000_ffff])?;
    let table = |index: u64| PAGE_TABLES + index * 0x1000;
    words(table(0), &[table(1) | 3])?;
    words(table(1), &[table(2) | 3, table(3) | 3, table(4) | 3, table(5) | 3])?;
    // Present, writable, 2 MiB.
    words(table(2), &(0..2048).map(|page| page << 21 | 0x83).collect::<Vec<_>>())?;
    put(COMMAND_LINE, &[command_line.as_bytes(), &[0]].concat())?;
    put(BOOT_PARAMS + 0x228, &(COMMAND_LINE as u32).to_le_bytes())?;
    words(BOOT_PARAMS + 0x70, &[ACPI])?;

    let [xsdt, mcfg, fadt, dsdt] = [0x100, 0x200, 0x300, 0x500].map(|offset| ACPI + offset);
    put(ACPI, b"RSD PTR ")?;
    words(ACPI + 24, &[xsdt])?;
    let header = |address: u64, signature: &[u8; 4], len: u32| {
        put(address, &[&signature[..], &len.to_le_bytes()].concat())
    };
    header(xsdt, b"XSDT", 36 + 16)?;
    words(xsdt + 36, &[mcfg, fadt])?;
    header(mcfg, b"MCFG", 60)?;
    words(mcfg + 44, &[ECAM])?;
    header(fadt, b"FACP", 276)?;
    words(fadt + 140, &[dsdt])?;
    // The sleep control register: an I/O port of one byte.
    put(fadt + 244, &[1, 8, 0, 1])?;
    words(fadt + 248, &[SLEEP_CONTROL])?;
    // Name (_S5_, Package () { 5 })
    let s5 = b"\x08_S5_\x12\x04\x01\x0a\x05";
    header(dsdt, b"DSDT", 36 + s5.len() as u32)?;
    Ok(put(dsdt + 36, s5)?)
}

/// Sets the vCPU to the start of the program: 64-bit mode, flat segments, interrupts off.
fn enter(vcpu: &VcpuFd, entry: u64) -> Result<(), Box<dyn Error>> {
    let mut system = vcpu.get_sregs()?;
    let flat = kvm_segment { limit: 0xffff_ffff, present: 1, s: 1, g: 1, ..Default::default() };
    let data = kvm_segment { selector: 0x18, type_: 0x3, db: 1, ..flat };
    system.cs = kvm_segment { selector: 0x10, type_: 0xb, l: 1, ..flat };
    (system.ds, system.es, system.ss, system.fs, system.gs) = (data, data, data, data, data);
    system.tr = kvm_segment { selector: 0x20, type_: 0xb, s: 0, g: 0, limit: 0x67, ..flat };
    (system.gdt.base, system.gdt.limit) = (GDT, 5 * 8 - 1);
    system.cr0 = 1 << 31 | 1 << 5 | 1 << 4 | 1;
    system.cr3 = PAGE_TABLES;
    system.cr4 = 1 << 5;
    system.efer = 1 << 10 | 1 << 8;
    vcpu.set_sregs(&system)?;
    let mut registers = vcpu.get_regs()?;
    (registers.rip, registers.rsp, registers.rsi, registers.rflags) = (entry, STACK, BOOT_PARAMS, 2);
    Ok(vcpu.set_regs(&registers)?)
}

/// The one call that Rust can't check.
#[allow(unsafe_code)]
mod sys {
    use kvm_bindings::kvm_userspace_memory_region;
    use kvm_ioctls::VmFd;
    use vm_passthrough::vfio::Mapping;

    /// Puts memory into a slot, at a guest-physical address, or nothing.
    pub(super) fn set_memory(
        vm: &VmFd,
        slot: u32,
        guest: u64,
        memory: Option<&dyn Mapping>,
    ) -> Result<(), kvm_ioctls::Error> {
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: guest,
            memory_size: memory.map_or(0, Mapping::len),
            userspace_addr: memory.map_or(0, Mapping::address),
        };
        // SAFETY: a `Mapping` is mapped as long as it lives and may be written by guests, and the board keeps it until its slot
        // is empty again, or the guest is gone.
        unsafe { vm.set_user_memory_region(region) }
    }
}
