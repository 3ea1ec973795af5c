//! The machine: made from a guest's configuration, given devices, and run.

use std::fmt;
use std::io::{self, Write};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use vm_memory::GuestMemoryMmap;
use vm_passthrough::guest::KvmVmm;
use vm_passthrough::pci::placement::{FunctionRequest, Windows};
use vm_passthrough::vfio::ErrorSeverity;
use vm_passthrough::{PassthroughDevice, PciAddress};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::acpi::{self, Platform};
use super::boot::{BootError, BootFiles, Program};
use super::cpu::{self, IrqChips, ResetState};
use super::error::MachineError;
use super::exits::ExitCounts;
use super::io::Io;
use super::layout::{self, Layout};
use super::lifecycle::{End, Event, Lifecycle, OnReboot};
use super::loading::Loading;
use super::memory::{Backing, Prefault};
use super::numa::{GuestNuma, VcpuPlace};
use super::pci::{self, ExpectedFunction, GuestAnswer, PciRoot};
use super::power_button::PowerButton;
use super::quiesced::Quiesced;
use super::restarts::Restarts;
use super::serial::{Input, SerialConsole};
use super::stop::Stop;
use super::vcpu::{Halted, VcpuThreads};
use super::virtio::{AcceleratorDevice, BlockDevice, NetDevice, VirtioDevice, VirtioPci, VsockDevice};
use super::{memory, sys, vcpu};
use crate::config::{self, Boot, GuestConfig, MacAddress};
use crate::deadlines::VCPU_STOP;
use crate::os::output::Standard;
use crate::os::process::ChildProgram;

/// What the guest's serial console is connected to.
pub struct Console {
    /// Where its output goes, from a thread of its own. A writer that is slow slows the guest; one that never returns keeps
    /// its thread, and one that fails loses the output.
    pub output: Box<dyn Write + Send>,
    /// Where its input comes from, until the end of file.
    pub input: Option<OwnedFd>,
}

impl Default for Console {
    /// Output to standard output, no input.
    fn default() -> Self {
        Self { output: Box::new(Standard::Output), input: None }
    }
}

impl fmt::Debug for Console {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Console").field("input", &self.input).finish_non_exhaustive()
    }
}

/// Linux touches its first device well within a second, on emulated processors too.
const SILENCE: Duration = Duration::from_secs(10);

/// How many slots a guest has for devices that come while it runs, if its file does not say it and there is room.
const HOT_PLUG_SLOTS: usize = 4;

/// What is not in the guest's file.
#[derive(Debug)]
pub struct MachineOptions {
    /// The KVM device node.
    pub kvm: PathBuf,
    /// The serial console.
    pub console: Console,
    /// What a reboot does.
    pub on_reboot: OnReboot,
    /// The host's NUMA nodes for its RAM, its vCPUs and its devices.
    pub numa: GuestNuma,
    /// The program that serves an accelerator which the guest shares.
    pub worker: ChildProgram,
    /// The guest's power button, where somebody has it already.
    pub power_button: Option<PowerButton>,
    /// Ends [`Machine::new`], which waits for the storage of the guest's program, and for the accelerators that the guest
    /// shares: a GPU may take long to wake.
    pub stop: Option<Stop>,
    /// Called by [`Machine::new`] once, when all that the guest's file names is open and no thread has begun: a process of which
    /// this is all gives up its rights here, on all threads that it will have.
    pub opened: Opened,
}

/// What [`MachineOptions::opened`] calls.
#[derive(Default)]
pub struct Opened(pub Option<Box<dyn FnOnce() -> Result<(), MachineError> + Send>>);

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Opened").finish_non_exhaustive()
    }
}

impl Default for MachineOptions {
    fn default() -> Self {
        Self {
            kvm: "/dev/kvm".into(),
            console: Console::default(),
            on_reboot: OnReboot::default(),
            numa: GuestNuma::default(),
            worker: ChildProgram::worker("/proc/self/exe"),
            power_button: None,
            stop: None,
            opened: Opened::default(),
        }
    }
}

/// How a run ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunReport {
    /// Why.
    pub end: End,
    /// How often the guest was restarted in place.
    pub restarts: u32,
    /// What made it leave to user space.
    pub exits: ExitCounts,
}

type Loaded = Result<(Program, Quiesced), BootError>;

/// A virtual machine that is not running.
pub struct Machine {
    vm: Arc<VmFd>,
    vmm: Arc<KvmVmm>,
    memory: GuestMemoryMmap,
    layout: Layout,
    boot: Boot,
    files: Arc<BootFiles>,
    /// Until the guest's program is loaded for the first time.
    unstarted: Option<Quiesced>,
    /// The guest's program on its way into RAM, where that was stopped.
    loading: Option<Loading<Loaded>>,
    /// What makes RAM present that devices will pin.
    prefault: Option<Prefault>,
    on_reboot: OnReboot,
    /// `None` once one of them is stuck.
    vcpus: Option<Halted>,
    reset_states: Vec<ResetState>,
    vcpu_places: Vec<VcpuPlace>,
    numa: GuestNuma,
    /// Which of its nodes has which RAM.
    ram: Vec<(u8, Range<u64>)>,
    chips: IrqChips,
    io: Arc<Io>,
    console_input: Option<OwnedFd>,
    power_button: PowerButton,
    /// How long vCPUs may take to leave the guest.
    pub(super) vcpu_stop: Duration,
    /// When a guest that has never exited is reported.
    pub(super) silence: Duration,
}

impl Machine {
    /// Makes the machine of a guest: RAM, vCPUs, console, disks and network interfaces. The passed-through devices of `config` are not
    /// opened: [expect](Self::expect) them. When there are any, RAM is made present meanwhile, as they pin all of it. The guest's
    /// program is loaded when it [runs](Self::run).
    ///
    /// # Errors
    /// When KVM is absent or refuses, there is too little memory, the guest's program can't be booted as far as its headers
    /// tell, or a disk or a tap can't be opened.
    pub fn new(config: &GuestConfig, options: MachineOptions) -> Result<Self, MachineError> {
        if config.vcpus == 0 {
            return Err(MachineError::Config { what: "vcpus", value: 0, reason: "it must be 1 to 255" });
        }
        let kvm = open_kvm(&options.kvm)?;
        let supported = cpu::cpuid::supported(&kvm)?;
        let bits = cpu::cpuid::phys_bits(&supported);
        let no_room = || {
            let reason =
                format_args!("the processor's {bits} address bits leave no room for it; lower `memory`");
            memory::failed(config.memory, reason)
        };
        let reserved = cpu::cpuid::reserved(&supported);
        let layout = Layout::new(config.memory, bits, reserved).ok_or_else(no_room)?;
        let vcpu_places = options.numa.vcpus(config.vcpus)?;
        let ram = options.numa.ram(&layout.ram, config.ram_page())?;
        let thread = |source| MachineError::Thread { what: "loading", source };
        let stop = options.stop.map_or_else(Stop::new, Ok).map_err(thread)?;
        let files = Arc::new(open_files(&layout, &config.boot, &stop)?);
        let vm = Arc::new(kvm.create_vm().map_err(MachineError::kvm("KVM_CREATE_VM"))?);
        vm.set_identity_map_address(layout::KVM_IDENTITY_MAP)
            .map_err(MachineError::kvm("KVM_SET_IDENTITY_MAP_ADDR"))?;
        vm.set_tss_address(layout::KVM_TSS).map_err(MachineError::kvm("KVM_SET_TSS_ADDR"))?;
        vm.create_irq_chip().map_err(MachineError::kvm("KVM_CREATE_IRQCHIP"))?;
        // Where programs of the guest share a window, the workers need no RAM.
        let shares = config.accelerators.iter().any(|shared| shared.window.is_none());
        let backing = match config.hugepages {
            Some(size) => Backing::Huge(size),
            None if shares => Backing::Shared,
            None => Backing::Private,
        };
        let memory = memory::create(&layout, backing)?;
        memory::place(&memory, &ram, &options.numa);
        let vmm = KvmVmm::new(vm.clone(), memory.clone())
            .map_err(|error| memory::failed(config.memory, format_args!("{error}; lower `memory`")))?;

        let vcpus: Vec<VcpuFd> = vcpu_places
            .iter()
            .map(|place| vm.create_vcpu(place.apic_id.into()))
            .collect::<Result<_, _>>()
            .map_err(MachineError::kvm("KVM_CREATE_VCPU"))?;
        let tsc_runs = cpu::tsc::ensure_running(&vcpus)?;
        let tsc_deadline = tsc_runs && kvm.check_extension(Cap::TscDeadlineTimer);
        for (vcpu, &place) in vcpus.iter().zip(&vcpu_places) {
            let cpuid = cpu::cpuid::for_vcpu(&supported, place, tsc_deadline)?;
            vcpu.set_cpuid2(&cpuid).map_err(MachineError::kvm("KVM_SET_CPUID2"))?;
        }
        let reset_states = vcpus
            .iter()
            .enumerate()
            .map(|(index, vcpu)| ResetState::take(&kvm, vcpu, index == 0))
            .collect::<Result<_, _>>()?;
        let chips = IrqChips::take(&vm)?;

        let resources = |source| MachineError::Thread { what: "console", source };
        let interrupt = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(resources)?;
        vm.register_irqfd(&interrupt, layout::SERIAL_GSI).map_err(MachineError::kvm("KVM_IRQFD"))?;
        let power_button = options.power_button.map_or_else(PowerButton::new, Ok).map_err(resources)?;
        vm.register_irqfd(power_button.event(), layout::POWER_BUTTON_GSI)
            .map_err(MachineError::kvm("KVM_IRQFD"))?;
        let windows = config.accelerators.iter().any(|shared| shared.window.is_some());
        let vsock = (windows || config.vsock.is_some())
            .then(|| VsockDevice::open(config.vsock, vmm.memory()))
            .transpose()?;
        let disks = config.disks.iter().map(BlockDevice::open).collect::<Result<Vec<_>, _>>()?;
        let net = |(index, net): (usize, &config::Net)| {
            let mac = net.mac.unwrap_or_else(|| MacAddress::of(&config.name, index));
            NetDevice::open(net, mac, vmm.memory())
        };
        let nets = config.nets.iter().enumerate().map(net).collect::<Result<Vec<_>, _>>()?;
        options.opened.0.map_or(Ok(()), |opened| opened())?;

        let prefault = (!config.devices.is_empty()).then(|| Prefault::start(&memory, None));
        let serial = SerialConsole::new(interrupt, options.console.output).map_err(resources)?;
        let lifecycle = Arc::new(Lifecycle::new().map_err(resources)?);
        let pci = PciRoot::new(vmm.clone(), vmm.bars().clone(), lifecycle.clone());
        let pci = pci.on_nodes(options.numa.hosts());
        let mut devices: Vec<Box<dyn VirtioDevice>> = Vec::new();
        let peer = vsock.as_ref().map(VsockDevice::peer);
        for shared in &config.accelerators {
            let (memory, peer) = (vmm.memory(), peer.clone());
            let device = AcceleratorDevice::open(&config.name, shared, memory, peer, &options.worker, &stop)?;
            devices.push(Box::new(device));
        }
        devices.extend(vsock.map(|device| Box::new(device) as Box<dyn VirtioDevice>));
        devices.extend(disks.into_iter().map(|device| Box::new(device) as Box<dyn VirtioDevice>));
        devices.extend(nets.into_iter().map(|device| Box::new(device) as Box<dyn VirtioDevice>));
        // Beside the host bridge and what is to come.
        let left = pci::SLOTS.saturating_sub(1 + devices.len() + config.devices.len());
        for device in devices {
            pci.add(Arc::new(VirtioPci::new(vmm.clone(), device)?))?;
        }
        for _ in 0..config.hot_plug_slots.map_or(left.min(HOT_PLUG_SLOTS), usize::from) {
            pci.add_port()?;
        }
        let io = Arc::new(Io { lifecycle, serial, pci });
        Ok(Self {
            vm,
            vmm,
            memory,
            layout,
            boot: config.boot.clone(),
            files,
            unstarted: Some(Quiesced::unstarted()),
            loading: None,
            prefault,
            on_reboot: options.on_reboot,
            vcpus: Some(Halted::unstarted(vcpus)),
            reset_states,
            vcpu_places,
            numa: options.numa,
            ram,
            chips,
            io,
            console_input: options.console.input,
            power_button,
            vcpu_stop: VCPU_STOP,
            silence: SILENCE,
        })
    }

    /// What devices need of this machine.
    pub fn vmm(&self) -> Arc<KvmVmm> {
        self.vmm.clone()
    }

    /// Makes room for a function of the host before the guest runs: behind a root port, along with the functions that were
    /// expected of the same device. The guest may run before it [arrives](Slots::arrive).
    ///
    /// # Errors
    /// When there is no slot left, or the function is expected already.
    pub fn expect(&self, function: ExpectedFunction) -> Result<(), MachineError> {
        if self.vcpus.is_none() {
            return Err(MachineError::Unusable);
        }
        self.io.pci.expect(function)
    }

    /// What others do to the guest, also while it runs.
    pub fn handle(&self) -> MachineHandle {
        MachineHandle(Arc::downgrade(&self.io))
    }

    /// What asks the guest to power itself off.
    pub fn power_button(&self) -> PowerButton {
        self.power_button.clone()
    }

    /// Runs the guest until it ends or `stop` is requested. vCPUs are not in the guest afterwards, disks and accelerators
    /// have stopped, as at a loss of power, and the devices that were added are as the guest left them: detach them.
    ///
    /// # Errors
    /// When the guest can't be loaded, KVM can't run it on, or a vCPU or device is stuck. A disk that is
    /// [busy](MachineError::Busy) stays open and locked by the machine, also when that is dropped, until its storage answers.
    pub fn run(&mut self, stop: &Stop) -> Result<RunReport, MachineError> {
        self.run_and_tell(stop, |_| ())
    }

    /// As [`run`](Self::run); calls `on_start` whenever the guest has started, with how often it was restarted.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn run_and_tell(
        &mut self,
        stop: &Stop,
        on_start: impl FnMut(u32),
    ) -> Result<RunReport, MachineError> {
        let input = self
            .console_input
            .take()
            .map(|source| Input::start(self.io.serial.clone(), source))
            .transpose()
            .map_err(|source| MachineError::Thread { what: "console input", source })?;
        let ran = self.run_until_the_end(stop, on_start);
        // However it ended, no thread of the machine goes on with a disk, and no worker with RAM.
        let stopped = self.io.pci.stop();
        drop(input);
        self.io.serial.finish();
        match (ran, stopped) {
            (Ok(report), Ok(())) => Ok(report),
            (Ok(_), Err(error)) | (Err(error), Ok(())) => Err(error),
            (Err(error), Err(left)) => {
                tracing::error!("{left}");
                Err(error)
            }
        }
    }

    fn run_until_the_end(
        &mut self,
        stop: &Stop,
        mut on_start: impl FnMut(u32),
    ) -> Result<RunReport, MachineError> {
        let mut report = RunReport { end: End::Stopped, restarts: 0, exits: ExitCounts::default() };
        let mut restarts = Restarts::default();
        loop {
            let Some(quiesced) = self.prepare(stop)? else {
                report.end = End::Stopped;
                break;
            };
            let vcpus = self.vcpus.take().ok_or(MachineError::Unusable)?;
            let cpus: Vec<_> = self.vcpu_places.iter().map(|place| self.numa.cpus(place.node)).collect();
            let threads = vcpu::start(vcpus, &cpus, &self.io, quiesced)?;
            let started = Instant::now();
            on_start(report.restarts);
            self.wait(stop, &threads);
            let (vcpus, exits) = threads.stop(&self.io.lifecycle, self.vcpu_stop)?;
            self.vcpus = Some(vcpus);
            report.exits.add(&exits);
            let event = self.io.lifecycle.take();
            report.end = match event {
                Some(Event::Failed(error)) => return Err(error),
                Some(Event::Shutdown) => End::Shutdown,
                Some(Event::Reboot) => End::Reboot,
                Some(Event::Reset) => End::Reset,
                Some(Event::TripleFault) => End::TripleFault,
                None => End::Stopped,
            };
            let restart = matches!(report.end, End::Reboot | End::Reset | End::TripleFault)
                && self.on_reboot == OnReboot::Restart;
            if !restart {
                break;
            }
            let delay = restarts.after(started.elapsed());
            match restarts.to_tell() {
                Some(in_a_row @ 2..) => tracing::warn!(
                    reason = %report.end,
                    "the guest ended {in_a_row} times in a row within seconds; it restarts in {:.1} s",
                    delay.as_secs_f64()
                ),
                Some(_) => tracing::info!(reason = %report.end, "the guest restarts"),
                None => tracing::debug!(reason = %report.end, "the guest restarts"),
            }
            if stop.requested_within(delay) {
                report.end = End::Stopped;
                break;
            }
            report.restarts += 1;
        }
        Ok(report)
    }

    /// Puts the machine into the state in which a guest starts; `None` when `stop` was requested before it is.
    fn prepare(&mut self, stop: &Stop) -> Result<Option<Quiesced>, MachineError> {
        let vcpus = self.vcpus.as_ref().ok_or(MachineError::Unusable)?;
        if !self.io.pci.awaits() {
            // What devices pin is present by now, and without any nothing needs to be.
            self.prefault = None;
        }
        let loading = match self.loading.take() {
            Some(loading) => loading,
            None => {
                let stop = || Quiesced::stop_all(vcpus, &self.io.pci);
                let quiesced = self.unstarted.take().map_or_else(stop, Ok)?;
                load(&self.memory, &self.layout, &self.boot, &self.files, quiesced)?
            }
        };
        let loading = self.loading.insert(loading);
        loading.wait(stop)?;
        let Some(loaded) = self.loading.take().map(Loading::join).transpose()? else { return Ok(None) };
        let (program, quiesced) = match loaded {
            Err(BootError::Stopped) => return Ok(None),
            loaded => loaded?,
        };
        self.io.reset()?;
        let roots = self.io.pci.place(&self.layout.mem64)?;
        let (vcpu_places, numa, ram) = (self.vcpu_places.clone(), self.numa.clone(), self.ram.clone());
        let platform = Platform { vcpus: vcpu_places, roots, numa, ram };
        let rsdp = acpi::write(&self.memory, &platform)?;
        cpu::write_tables(&self.memory)?;
        let entry = program.describe(&self.memory, &self.layout, &self.boot, rsdp)?;
        self.chips.restore(&self.vm)?;
        for (vcpu, state) in vcpus.vcpus().iter().zip(&self.reset_states) {
            state.restore(vcpu)?;
        }
        cpu::enter(vcpus.vcpus().first().ok_or(MachineError::Unusable)?, entry)?;
        Ok(Some(quiesced))
    }

    /// Waits until the guest ends or is to be ended.
    fn wait(&self, stop: &Stop, threads: &VcpuThreads) {
        let mut silence = Timespec::try_from(self.silence).ok();
        let (wake, stop) = (sys::borrow(self.io.lifecycle.wake()), sys::borrow(stop.event()));
        loop {
            let mut fds = [PollFd::new(&wake, PollFlags::IN), PollFd::new(&stop, PollFlags::IN)];
            match poll(&mut fds, silence.as_ref()) {
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "waiting for the guest failed; it is ended");
                    return;
                }
                Ok(0) => {
                    silence = None;
                    if !threads.have_exited() {
                        tracing::warn!(
                            "the guest has touched no device for {:?}, not even its console: see whether {} is for such a \
                             machine (x86-64), and which KVM the host has: kvm_pvm (see /sys/module/kvm_pvm) runs only Linux kernels that are \
                             built for it (CONFIG_PVM_GUEST)",
                            self.silence,
                            self.boot.kernel.display()
                        );
                    }
                }
                Ok(_) => return,
            }
        }
    }
}

/// What others do to a machine, from any thread, also while its guest runs. It does not keep the machine, nor its devices.
#[derive(Clone)]
pub struct MachineHandle(Weak<Io>);

impl MachineHandle {
    /// Gives the guest a function that it is to [have](Machine::expect), which must be attached. A guest that runs reaches none
    /// of them before all have arrived; until then who tries is held, unless the guest ends.
    ///
    /// # Errors
    /// When it is not expected or has arrived before, or is not what was expected.
    pub fn arrive(&self, device: Arc<dyn PassthroughDevice>) -> Result<(), MachineError> {
        let gone = MachineError::NotThere { address: device.address() };
        self.0.upgrade().ok_or(gone)?.pci.arrive(device)
    }

    /// Whether the guest is to [have](Machine::expect) a function that has not arrived.
    pub fn expects(&self, address: PciAddress) -> bool {
        self.0.upgrade().is_some_and(|io| io.pci.expects(address))
    }

    /// Where the BARs of a device that comes while the guest runs will be: the windows of a free slot, one that they fit if
    /// there is any. These are `None` while the guest is about to start.
    ///
    /// # Errors
    /// When no slot is free.
    pub fn room_for(&self, device: &[FunctionRequest]) -> Result<Option<Windows>, MachineError> {
        self.0.upgrade().ok_or(MachineError::NoPort)?.pci.room_for(device)
    }

    /// Shows the guest that a device is in a slot that was free. It does not answer until it is [plugged](Self::plug): a guest
    /// waits for the link, and then for a second at least, which is time to open it in. `name` is one of its functions.
    ///
    /// # Errors
    /// When no slot is free or large enough.
    pub fn insert(&self, name: PciAddress, device: &[FunctionRequest]) -> Result<(), MachineError> {
        self.0.upgrade().ok_or(MachineError::NoPort)?.pci.insert(name, device)
    }

    /// Puts a device, as all of its functions that the guest is to have, into the slot where it was
    /// [inserted](Self::insert), or else into a free one, and the guest is notified at once. They should be attached before.
    /// Returns where the guest sees the first; `None` while it has not numbered its buses.
    ///
    /// # Errors
    /// When no slot is free, a function is there already, or the functions are not of one device of the host.
    pub fn plug(&self, device: Vec<Arc<dyn PassthroughDevice>>) -> Result<Option<PciAddress>, MachineError> {
        self.0.upgrade().ok_or(MachineError::NoPort)?.pci.plug(device)
    }

    /// Asks the guest to let go of the device that a function belongs to, by the button of its slot. `answer` is called at most
    /// once, soon or when the guest answers, and must neither wait nor use the machine. It is dropped when the device is
    /// unplugged or the machine goes; asking again only replaces it.
    ///
    /// # Errors
    /// When the function is not in this guest.
    pub fn ask(
        &self,
        address: PciAddress,
        answer: impl FnOnce(GuestAnswer) + Send + 'static,
    ) -> Result<(), MachineError> {
        let io = self.0.upgrade().ok_or(MachineError::NotThere { address })?;
        io.pci.port_of(address)?.ask(Box::new(answer));
        Ok(())
    }

    /// Asks the guest no more, which may still let go of the device if it has begun to.
    pub fn unask(&self, address: PciAddress) {
        if let Some(port) = self.0.upgrade().and_then(|io| io.pci.port_of(address).ok()) {
            port.unask();
        }
    }

    /// Takes the device that a function belongs to from its slot: the guest is notified at once. All of its functions are returned;
    /// detach them.
    ///
    /// # Errors
    /// When the function is not in this guest.
    pub fn unplug(&self, address: PciAddress) -> Result<Vec<Arc<dyn PassthroughDevice>>, MachineError> {
        self.0.upgrade().ok_or(MachineError::NotThere { address })?.pci.unplug(address)
    }

    /// Shows the guest that a function had an uncorrectable error, in the capabilities of the function and of the port above it.
    ///
    /// # Errors
    /// When the function is not in this guest.
    pub fn report_error(&self, address: PciAddress, severity: ErrorSeverity) -> Result<(), MachineError> {
        let io = self.0.upgrade().ok_or(MachineError::NotThere { address })?;
        io.pci.port_of(address)?.report_error(address, severity);
        Ok(())
    }

    /// Resets the guest, as its button would.
    pub fn reset(&self) {
        if let Some(io) = self.0.upgrade() {
            io.lifecycle.announce(Event::Reset);
        }
    }
}

impl fmt::Debug for MachineHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let devices = self.0.upgrade().map(|io| io.pci.devices()).unwrap_or_default();
        let devices: Vec<_> = devices.iter().map(|device| device.address()).collect();
        f.debug_tuple("MachineHandle").field(&devices).finish()
    }
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine")
            .field("layout", &self.layout)
            .field("boot", &self.boot)
            .field("vcpus", &self.reset_states.len())
            .finish_non_exhaustive()
    }
}

/// Opens the files of a guest's program, and checks what their headers tell, on a thread of its own, as their storage may not
/// answer.
fn open_files(layout: &Layout, boot: &Boot, stop: &Stop) -> Result<BootFiles, MachineError> {
    let (layout, boot) = (layout.clone(), boot.clone());
    let opening = Loading::start(move |_| BootFiles::open(&layout, &boot))?;
    opening.wait(stop)?;
    Ok(opening.join()??)
}

/// Starts to load a guest's program into its RAM.
fn load(
    memory: &GuestMemoryMmap,
    layout: &Layout,
    boot: &Boot,
    files: &Arc<BootFiles>,
    quiesced: Quiesced,
) -> Result<Loading<Loaded>, MachineError> {
    let (memory, layout, cmdline, files) =
        (memory.clone(), layout.clone(), boot.cmdline.clone(), files.clone());
    Loading::start(move |stop| {
        let program = Program::load(&memory, &layout, &files, &cmdline, &quiesced, &|| stop.requested())?;
        Ok((program, quiesced))
    })
}

pub(super) fn open_kvm(path: &std::path::Path) -> Result<Kvm, MachineError> {
    let no_kvm = |source| MachineError::NoKvm { path: path.to_owned(), source };
    let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes())
        .map_err(|_| no_kvm(io::ErrorKind::InvalidInput.into()))?;
    let kvm =
        Kvm::new_with_path(name).map_err(|error| no_kvm(io::Error::from_raw_os_error(error.errno())))?;
    for (cap, what) in [
        (Cap::Irqchip, "in-kernel interrupt controllers (KVM_CAP_IRQCHIP)"),
        // Linux built without it has interrupt controllers all the same.
        (Cap::Pit2, "an I/O APIC (KVM_CAP_PIT2; CONFIG_KVM_IOAPIC of Linux)"),
        (Cap::UserMemory, "guest memory in user space (KVM_CAP_USER_MEMORY)"),
        (Cap::Irqfd, "interrupts from eventfds (KVM_CAP_IRQFD)"),
        (Cap::Ioeventfd, "notifications through eventfds (KVM_CAP_IOEVENTFD)"),
        (Cap::ImmediateExit, "exits on demand (KVM_CAP_IMMEDIATE_EXIT)"),
    ] {
        if !kvm.check_extension(cap) {
            return Err(MachineError::KvmLacks { what });
        }
    }
    Ok(kvm)
}
