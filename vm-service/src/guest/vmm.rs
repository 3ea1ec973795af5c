//! A guest's VMM: the process in which the guest runs. It opens all that the guest is made of, gives up its rights, and only then
//! boots. What takes rights later its keeper does, which also gives it the devices.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use vm_passthrough::claim::Cancel;
use vm_passthrough::guest::{self, DeviceError, KvmVmm, PeerDma, VfioPciDevice};
use vm_passthrough::pci::RomImage;
use vm_passthrough::vfio::{DeviceParts, Space, SpaceParts, VfioDevice};
use vm_passthrough::{PassthroughDevice, PciAddress};

use super::arrivals;
use super::keeper::Remote;
use super::wire::{self, Done, Failed, Make, Open, Order, Report, Room};
use crate::os::limits;
use crate::os::process::{packets, starter};
use crate::os::sandbox::{self, Confinement, Measure, Measures, Nodes, Profile};
use crate::vmm::memory::Prefault;
use crate::vmm::{Console, Machine, MachineError, MachineHandle, MachineOptions, Opened, PowerButton, Stop};

/// What a VMM locks beside the guest's RAM.
const LOCKED: u64 = 64 << 20;

/// Is the VMM of the keeper that is standard input, until that has gone.
///
/// # Errors
/// When it can't be confined, or does not understand its keeper.
pub(crate) fn main() -> Result<(), String> {
    // For who looks at processes; nothing depends on it.
    let _ = rustix::thread::set_name(c"guest-vmm");
    let keeper = Arc::new(sandbox::enter(None)?);
    let gone = |error| format!("the keeper can't be heard: {error}");
    let (make, files) = match packets::receive(&*keeper).map_err(gone)? {
        Some((Order::Make(make), files)) => (make, files),
        Some((other, _)) => return Err(format!("the first order is to {other}")),
        None => return Ok(()),
    };
    let made = Vmm::make(*make, files, keeper.clone());
    let (mut vmm, made) = match made {
        Ok((vmm, confinement)) => (Some(vmm), Ok(Done::Made(confinement))),
        Err(failed) => (None, Err(failed)),
    };
    packets::send(&*keeper, &Report::Done(made), &[]).map_err(gone)?;
    while let Some((order, files)) = packets::receive(&*keeper).map_err(gone)? {
        let Some(vmm) = &mut vmm else { break };
        let report = match order {
            Order::Ping => Report::Here(vmm.peers.as_ref().map(PeerDma::report).unwrap_or_default()),
            order => Report::Done(vmm.perform(order, files).map_err(Failed::from)),
        };
        packets::send(&*keeper, &report, &[]).map_err(gone)?;
    }
    Ok(())
}

/// Gives up what is not needed once all is open; other threads begin after that. What the guest has as `memory` devices may
/// have locked.
fn settle(memory: u64, unconfined: &[Measure]) -> Result<Confinement, String> {
    let locked = sandbox::limit_locked(memory.saturating_add(LOCKED));
    let measures = Measures::without(unconfined);
    // Landlock holds for this thread and those that it begins. The test harness has a thread of its own.
    if measures.files && !cfg!(test) && !sandbox::is_alone() {
        return Err(Measure::Files.refused(&"other threads run already"));
    }
    let mut confinement = sandbox::settle(Profile::Vmm, measures, Nodes::None, &[])?;
    if let (Err(reason), Some(_)) = (locked, confinement.user) {
        confinement.missing.push(format!("the right to lock the guest's RAM for devices ({reason})"));
    }
    Ok(confinement)
}

/// Has a thread reset the guest whenever `event` says so.
fn hear_resets(event: OwnedFd, machine: MachineHandle) -> std::io::Result<()> {
    let hear = move || {
        loop {
            match poll(&mut [PollFd::new(&event, PollFlags::IN)], None) {
                Err(Errno::INTR) => continue,
                Err(_) => return,
                Ok(_) => {}
            }
            // Only this thread reads it.
            let _ = rustix::io::read(&event, &mut [0; 8]);
            machine.reset();
        }
    };
    Builder::new().name("reset".into()).spawn(hear).map(drop)
}

struct Vmm {
    keeper: Arc<OwnedFd>,
    stop: Stop,
    /// `None` while the guest runs, and once it is dropped.
    machine: Option<Machine>,
    handle: MachineHandle,
    shared: Arc<KvmVmm>,
    /// Bytes that this process may lock for devices; `None` without a limit.
    memlock: Option<u64>,
    running: Option<JoinHandle<Machine>>,
    open: BTreeMap<PciAddress, Arc<VfioPciDevice>>,
    /// What gives up those of them that come to the guest while it runs, until they are attached.
    arriving: BTreeMap<PciAddress, Cancel>,
    /// What maps their BARs for each other, unless the guest's file says otherwise.
    peers: Option<PeerDma>,
    /// What they are open in.
    space: Option<Arc<Space>>,
}

impl Vmm {
    fn make(make: Make, files: Vec<OwnedFd>, keeper: Arc<OwnedFd>) -> Result<(Self, Confinement), Failed> {
        let failed = |reason: &dyn std::fmt::Display| Failed::from(reason.to_string());
        let Make { config, kvm, on_reboot, numa, expected } = make;
        let (memory, unconfined) = (config.memory, config.unconfined.clone());
        let mut files = files.into_iter();
        let mut file = || files.next().ok_or_else(|| failed(&"a descriptor is missing"));
        let stop = Stop::received(file()?);
        let reset = file()?;
        let power_button = Some(PowerButton::received(file()?));
        starter::ask_keeper(file()?);
        let console = Console { output: Box::new(File::from(file()?)), input: files.next() };
        let (tell, confined) = channel();
        let follows = stop.clone();
        let opened = move || {
            // Who waits for it waits below.
            let _ = tell.send(settle(memory, &unconfined));
            // For those who look at no event.
            follows.hear(Stop::request).map_err(|source| MachineError::Thread { what: "stop", source })
        };
        let options = MachineOptions {
            kvm,
            console,
            on_reboot,
            numa,
            power_button,
            stop: Some(stop.clone()),
            opened: Opened(Some(Box::new(opened))),
            ..MachineOptions::default()
        };
        let machine = Machine::new(&config, options).map_err(|error| Failed {
            is_boot: matches!(error, MachineError::Boot(_)),
            reason: error.to_string(),
        })?;
        expected
            .into_iter()
            .try_for_each(|function| machine.expect(function))
            .map_err(|error| failed(&error))?;
        let confinement = confined.recv().map_err(|error| failed(&error))?;
        let confinement = confinement
            .map_err(|reason| failed(&format_args!("the guest's VMM cannot be confined: {reason}")))?;
        let memlock = limits::memlock();
        if !config.devices.is_empty() {
            limits::check_locked(memory, memlock)?;
        }
        let (handle, shared) = (machine.handle(), machine.vmm());
        let peers = config.peer_to_peer.then(PeerDma::new).transpose().map_err(|error| failed(&error))?;
        hear_resets(reset, machine.handle()).map_err(|error| failed(&error))?;
        sandbox::confine(Profile::Vmm, &confinement)?;
        let (open, machine) = (BTreeMap::new(), Some(machine));
        let (running, space) = (None, None);
        Ok((
            Self {
                keeper,
                stop,
                machine,
                handle,
                shared,
                memlock,
                running,
                open,
                arriving: BTreeMap::new(),
                peers,
                space,
            },
            confinement,
        ))
    }

    /// Carries out an order.
    fn perform(&mut self, order: Order, files: Vec<OwnedFd>) -> Result<Done, String> {
        match order {
            Order::Make(_) | Order::Ping => Err(format!("the machine can't {order}")),
            Order::Boot => self.boot().map(|()| Done::It),
            Order::DropMachine => {
                drop(self.running.take().map(JoinHandle::join));
                self.machine = None;
                Ok(Done::It)
            }
            Order::RoomFor(device) => {
                let slot = self.handle.room_for(&device).map_err(|error| error.to_string());
                Ok(Done::Room(Room { slot, memlock: self.memlock }))
            }
            Order::Space(number) => match (files.into_iter().next(), number) {
                (None, _) => Err("a descriptor is missing".into()),
                (Some(file), None) => Ok(SpaceParts::Group(file)),
                (Some(file), Some(number)) => Ok(SpaceParts::Iommufd(file, number)),
            }
            .map(|parts| {
                self.space = Some(Space::receive(parts));
                Done::It
            }),
            Order::Open(open) => self.open(open, files).map(|()| Done::It),
            Order::Attach(address) => self.attach(address),
            Order::Insert(name, device) => {
                self.handle.insert(name, &device).map(|()| Done::It).map_err(|error| error.to_string())
            }
            Order::Plug(functions) => {
                let device = functions.iter().filter_map(|address| self.open.get(address));
                let device = device.map(|device| device.clone() as Arc<dyn PassthroughDevice>).collect();
                self.handle.plug(device).map(Done::Plugged).map_err(|error| error.to_string())
            }
            Order::Ask(slot) => {
                let keeper = self.keeper.clone();
                // A vCPU never waits for the keeper, which waits for this, too.
                let answer = move |answer| drop(packets::offer(&*keeper, &Report::Asked(slot, answer), &[]));
                self.handle.ask(slot, answer).map(|()| Done::It).map_err(|error| error.to_string())
            }
            Order::Unask(slot) => {
                self.handle.unask(slot);
                Ok(Done::It)
            }
            Order::Unplug(slot) => {
                self.handle.unplug(slot).map(|_| Done::It).map_err(|error| error.to_string())
            }
            Order::ReportError(address, severity) => {
                let reported = self.handle.report_error(address, severity);
                reported.map(|()| Done::It).map_err(|error| error.to_string())
            }
            Order::Stop(address) => self.of(address, VfioPciDevice::stop).map(|()| Done::It),
            Order::Detach(address) => self.of(address, |device| {
                device.detach()?;
                Ok(Done::Detached { unreset: device.was_left_unreset() })
            }),
            Order::Close(address) => {
                self.open.remove(&address);
                self.arriving.remove(&address);
                self.space = self.space.take().filter(|_| !self.open.is_empty());
                Ok(Done::It)
            }
        }
    }

    /// Does something with an open device.
    fn of<T>(
        &self,
        address: PciAddress,
        act: impl FnOnce(&VfioPciDevice) -> Result<T, DeviceError>,
    ) -> Result<T, String> {
        let device = self.open.get(&address).ok_or_else(|| format!("{address} is not open"))?;
        act(device).map_err(|error| format!("{address}: {error}"))
    }

    fn open(&mut self, open: Open, files: Vec<OwnedFd>) -> Result<(), String> {
        let Open {
            address,
            info,
            is_virtual,
            reset_by_open,
            is_heard,
            can_turn_back,
            group,
            without_reset,
            rom,
        } = open;
        let mut files = files.into_iter();
        let mut next = || files.next().ok_or_else(|| "a descriptor is missing".to_owned());
        let (file, socket) = (next()?, next()?);
        let wanted = is_heard.then(&mut next).transpose()?;
        let cancel = match can_turn_back.then(&mut next).transpose()? {
            Some(event) => {
                let cancel = arrivals::cancel(&self.stop.cancel(), Arc::new(event));
                self.arriving.insert(address, cancel.clone());
                cancel
            }
            None => self.stop.cancel(),
        };
        let group = group.map(|number| Ok::<_, String>((number, next()?))).transpose()?;
        let rom = match rom {
            wire::Rom::Device => guest::Rom::Device,
            wire::Rom::Hidden => guest::Rom::Hidden,
            wire::Rom::File => {
                let image = RomImage::read(&File::from(next()?));
                guest::Rom::Image(image.map_err(|error| format!("the ROM for {address} {error}"))?)
            }
        };
        let reset_by_open = reset_by_open.map(Into::into);
        let parts = DeviceParts { address, info, is_virtual, reset_by_open, file, wanted, group };
        let space = self.space.as_ref().ok_or("there is no address space")?;
        let keeper = Arc::new(Remote { address, socket: Mutex::new(socket) });
        let file = VfioDevice::receive(parts, space, keeper).map_err(|error| error.to_string())?;
        let options =
            guest::DeviceOptions::default().without_reset(without_reset).cancel(Some(cancel)).rom(rom);
        let options = options.peers(self.peers.clone());
        let device = VfioPciDevice::with_options(file, self.shared.clone(), options)
            .map_err(|error| format!("{address}: {error}"))?;
        self.open.insert(address, device);
        Ok(())
    }

    fn attach(&mut self, address: PciAddress) -> Result<Done, String> {
        // The first one has all of the guest's RAM pinned, which is faster where it is present.
        let is_first = self.arriving.len() == self.open.len();
        if let Some(cancel) = self.arriving.remove(&address).filter(|_| is_first) {
            Prefault::start(self.shared.memory(), Some(cancel)).wait();
        }
        let device = self.open.get(&address).ok_or_else(|| format!("{address} is not open"))?;
        match device.attach() {
            Err(DeviceError::Cancelled) => return Ok(Done::GivenUp),
            attached => attached.map_err(|error| format!("{address}: {error}"))?,
        }
        if self.handle.expects(address) {
            self.handle.arrive(device.clone()).map_err(|error| error.to_string())?;
        }
        Ok(Done::It)
    }

    /// Has the guest run in a thread of its own.
    fn boot(&mut self) -> Result<(), String> {
        let (keeper, stop) = (self.keeper.clone(), self.stop.clone());
        let mut machine = self.machine.take().ok_or_else(|| MachineError::Unusable.to_string())?;
        let run = move || {
            // Without its keeper this process ends.
            let tell = |report| drop(packets::send(&*keeper, &report, &[]));
            let ran = catch_unwind(AssertUnwindSafe(|| {
                machine.run_and_tell(&stop, |restarts| tell(Report::Started { restarts }))
            }));
            let ran = ran.unwrap_or(Err(MachineError::Panicked { what: "guest's" }));
            tell(Report::Ended(ran.map_err(|error| error.to_string())));
            machine
        };
        let thread = Builder::new().name("guest".into()).spawn(run);
        let no_thread = |source| MachineError::Thread { what: "guest's", source }.to_string();
        self.running = Some(thread.map_err(no_thread)?);
        Ok(())
    }
}
