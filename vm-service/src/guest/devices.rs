//! The devices of a guest: claimed, opened and attached while it boots, detached and released after.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, sleep};
use std::time::{Duration, Instant};

use vm_passthrough::claim::{BindError, ClaimError, ClaimOptions};
use vm_passthrough::deadlines::FUNCTIONS;
use vm_passthrough::manager::{MadeClaim, ManagerError};
use vm_passthrough::pci::placement::FunctionRequest;
use vm_passthrough::readiness::{
    BlockerCode, ExplainOptions, Explainer, FILES_PER_VECTOR, Holder, RamPages, Readiness, Severity,
    VmmProcess, left_with_host,
};
use vm_passthrough::vfio::{
    self, AddressSpace as _, Backend, DeviceFile, DeviceParts, MSI_IRQ, MSIX_IRQ, Presence, Space,
    SpaceParts, VfToken, VfioDevice, VfioError,
};
use vm_passthrough::{PassthroughManager, PciAddress, PciFunction};

use super::arrivals::{self, Arrivals};
use super::handle::{AttachRequest, Attached, Message, Refused};
use super::keeper::{self, Served};
use super::process::Vmm;
use super::rom::RomFile;
use super::state::{Action, Detached, Event};
use super::watch::{self, Watch, Watched};
use super::wire::{self, Done, Open, Order, Room};
use crate::deadlines::CLOSE;
use crate::os::limits;
use crate::text::describe;
use crate::vmm::{ExpectedFunction, MachineError, Stop};

/// RAM that is pinned in less time than a guest waits for a device that is in its slot and does not answer yet.
const QUICKLY_PINNED: u64 = 1 << 30;

/// How devices are taken.
#[derive(Clone, Debug)]
pub(crate) struct DeviceOptions {
    /// How they are claimed.
    pub(crate) claim: ClaimOptions,
    /// `None` for the best that there is.
    pub(crate) backend: Option<Backend>,
    /// Whether a device is given to the guest although nothing resets it.
    pub(crate) without_reset: bool,
    /// What is in the place of expansion ROMs; a device that is not there has its own.
    pub(crate) roms: BTreeMap<PciAddress, RomFile>,
    /// What virtual functions are opened with.
    pub(crate) vf_tokens: BTreeMap<PciAddress, VfToken>,
}

/// A function that the guest has, or is to have.
struct Function {
    /// As it was found before it was claimed.
    found: PciFunction,
    /// What its BARs need, and the slot that it belongs into.
    request: FunctionRequest,
    options: DeviceOptions,
    /// How many interrupt vectors it has, once it is open.
    vectors: u64,
    /// What is needed to watch it, once it is open and until it is attached.
    watched: Option<Watched>,
    /// Readable once it is to be turned back, while it is on its way to a guest that runs.
    arrival: Option<Arc<OwnedFd>>,
}

impl Function {
    fn new(found: PciFunction, options: DeviceOptions) -> Self {
        let found = match options.roms.get(&found.address) {
            Some(rom) => PciFunction { rom: rom.bar(), ..found },
            None => found,
        };
        let request = FunctionRequest::of(&found, true);
        Self { found, request, options, vectors: 0, watched: None, arrival: None }
    }
}

/// An open function, which the VMM has, too.
struct Kept {
    file: Arc<VfioDevice>,
    /// How often it was reset at the VMM's request, and that was proved.
    proved: Arc<Mutex<u32>>,
    served: Served,
}

impl Kept {
    /// That number, while nothing resets it.
    fn proved(&self) -> MutexGuard<'_, u32> {
        self.proved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A guest's devices, and the manager that claims them. Dropping it gives them back too, and only logs what fails.
pub(crate) struct Devices {
    // The order matters: what is open is closed before its claim is released.
    open: BTreeMap<PciAddress, Kept>,
    /// What they are opened in, and the VMM maps their DMA in; there while a device is open.
    space: Option<Arc<Space>>,
    manager: PassthroughManager,
    functions: BTreeMap<PciAddress, Function>,
    /// How those that the guest starts with are taken; others by what their request says.
    options: DeviceOptions,
    /// What is to be known of the guest to explain what it can have.
    explain: ExplainOptions,
    /// Those that are on their way while the guest runs.
    arrivals: Arrivals,
    /// What has the machine.
    vmm: Option<Arc<Vmm>>,
    /// What watches the devices that are attached.
    watch: Option<Watch>,
    /// Receives claims that were made.
    events: Option<Sender<Message>>,
}

impl Devices {
    /// The devices that were found as `functions`, which `manager` claims; none is touched yet. What comes later must pass
    /// `explain`.
    pub(crate) fn new(
        manager: PassthroughManager,
        functions: Vec<PciFunction>,
        options: DeviceOptions,
        explain: ExplainOptions,
    ) -> Self {
        let functions = functions
            .into_iter()
            .map(|found| (found.address, Function::new(explain.sized(found), options.clone())))
            .collect();
        let (open, space, vmm, watch, events) = (BTreeMap::new(), None, None, None, None);
        let arrivals = Arrivals::default();
        Self { open, space, manager, functions, options, explain, arrivals, vmm, watch, events }
    }

    /// The functions that it has, those of each slot together.
    pub(super) fn slots(&self) -> Vec<Vec<PciAddress>> {
        let mut slots: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (&address, function) in &self.functions {
            slots.entry(function.request.slot).or_default().push(address);
        }
        slots.into_values().collect()
    }

    /// The host's NUMA nodes that they are on, ascending.
    pub(crate) fn numa_nodes(&self) -> BTreeSet<u16> {
        self.functions.values().filter_map(|function| function.found.numa_node).collect()
    }

    /// What the guest's machine is to make room for. `stop` gives up the claim that is under way; until then another command is
    /// waited for that has one of its functions locked, as the guest runs already. Those that come later are noted in `arrivals`.
    pub(super) fn announce(&mut self, stop: &Stop, arrivals: Arrivals) -> Vec<ExpectedFunction> {
        self.arrivals = arrivals;
        let options =
            self.functions.values_mut().map(|function| &mut function.options).chain([&mut self.options]);
        for options in options {
            options.claim.cancel = Some(stop.cancel());
            options.claim.lock_deadline = FUNCTIONS;
        }
        self.functions.values().map(|function| ExpectedFunction::of(&function.found)).collect()
    }

    /// They come to this VMM.
    pub(super) fn enter(&mut self, vmm: Arc<Vmm>) {
        self.vmm = Some(vmm);
    }

    /// Watches them, from when they are attached.
    ///
    /// # Errors
    /// When this process has no threads or descriptors left.
    pub(super) fn watch(&mut self, events: Sender<Message>) -> Result<(), String> {
        self.events = Some(events.clone());
        let watch = Watch::start(events);
        let failed =
            |error| format!("the devices can't be watched: {error}; raise `ulimit -n` and `ulimit -u`");
        self.watch = Some(watch.map_err(failed)?);
        Ok(())
    }

    /// Watches them no more, as the machine is dropped.
    pub(super) fn leave(&mut self) {
        if let Some(watch) = self.watch.take() {
            watch.end();
        }
    }

    /// Does what is to be done with a device, and returns the result. That of a claim comes later, as a message.
    pub(super) fn perform(&mut self, action: Action) -> Option<Event> {
        Some(match action {
            Action::Explain(request) => {
                let explained = self.explain(&request);
                Event::Explained(request, explained)
            }
            Action::Claim(address) => return self.claim(address),
            Action::Open(address) => Event::Opened(address, self.open(address)),
            Action::Attach(address) => self.attach(address),
            Action::Insert(slot) => Event::Inserted(slot, self.insert(slot)),
            Action::Plug(slot) => Event::Plugged(slot, self.plug(slot)),
            Action::Unplug(slot) => {
                // One of which nothing has come yet is not there.
                if let Err(error) = self.order(&Order::Unplug(slot), &[]) {
                    tracing::debug!(%error, "nothing was unplugged");
                }
                Event::Unplugged(slot)
            }
            Action::Stop(address) => {
                if let Err(error) = self.order(&Order::Stop(address), &[]) {
                    tracing::debug!("{error}; detaching tells what is left");
                    self.put_at_rest(address);
                }
                let wanted = self.open.get(&address).is_some_and(|kept| kept.file.is_wanted_back());
                Event::Stopped(address, wanted)
            }
            Action::Detach(address) => Event::Detached(address, self.detach(address)),
            Action::Close(address) => {
                if let Some(watch) = &self.watch {
                    watch.remove(address);
                }
                // A VMM that keeps it all the same is ended when it is released.
                let _ = self.order(&Order::Close(address), &[]);
                self.open.remove(&address);
                self.functions.remove(&address);
                self.space = self.space.take().filter(|_| !self.open.is_empty());
                Event::Closed(address)
            }
            Action::Release(target) => {
                Event::Released(target, self.release(target).map_err(|error| error.to_string()))
            }
            Action::Boot
            | Action::StopGuest
            | Action::DropMachine
            | Action::Ask(..)
            | Action::Unask(_)
            | Action::ReportError(..)
            | Action::Answer(..) => return None,
        })
    }

    /// Whether the guest can have what is asked for, beside what it has. Nothing is touched.
    fn explain(&mut self, request: &AttachRequest) -> Result<(), Refused> {
        let failed = |error: &dyn std::fmt::Display| Refused::Failed(error.to_string());
        let host = self.manager.host().clone();
        let all = self.manager.scan_devices().map_err(|error| failed(&error))?;
        let find = |address: &PciAddress| {
            let not_there = || Refused::NotFound(describe::not_there(*address));
            all.iter().find(|function| function.address == *address).cloned().ok_or_else(not_there)
        };
        let found = request.functions.iter().map(|address| Ok(self.explain.sized(find(address)?)));
        let found = found.collect::<Result<Vec<_>, Refused>>()?;
        // What did not come as far as being opened is turned back by now.
        self.functions.retain(|address, _| self.open.contains_key(address));
        let requests: Vec<_> = found.iter().map(|function| FunctionRequest::of(function, true)).collect();
        let slot = requests.first().and_then(|request| request.slot);
        if requests.iter().any(|request| request.slot != slot) {
            return Err(Refused::Conflict(
                "the functions are of several devices; attach one device after the other".into(),
            ));
        }
        if let Some((address, _)) = self.functions.iter().find(|(_, other)| other.request.slot == slot) {
            return Err(Refused::Conflict(format!(
                "the guest has {address} of the same device, which share a slot: detach that, and attach all of them at once"
            )));
        }
        if let (Some(space), Some(backend)) = (&self.space, request.backend)
            && space.backend() != backend
        {
            return Err(Refused::Conflict(format!(
                "the guest's devices are open through {}, and this one can't be through {backend}; leave the back end out",
                space.backend()
            )));
        }
        let Room { slot, memlock } =
            match self.order(&Order::RoomFor(requests), &[]).map_err(Refused::Conflict)? {
                Done::Room(room) => room,
                _ => return Err(failed(&self.misunderstood())),
            };
        let mut options = self.explain.clone();
        options.vmm = self.vmm.as_ref().map(|vmm| VmmProcess { pid: vmm.id(), memlock });
        options.beside = self.functions.keys().copied().collect();
        let (slot, no_slot) = match slot {
            Ok(slot) => (slot, None),
            Err(reason) => (None, Some(reason)),
        };
        options.slot = slot;
        options.ram_is_pinned = self.space.is_some();
        if let RamPages::Huge(_) = options.pages {
            options.pages = RamPages::HugeReserved;
        }
        options.with_group = request.with_group;
        options.accept = request.accept.clone();
        let vectors: u64 = self.functions.values().map(|function| function.vectors).sum();
        options.open_files += vectors * FILES_PER_VECTOR;
        let judged = Explainer::new(&host).explain_guest(&found.iter().collect::<Vec<_>>(), &options);
        let (ready, blocked): (Vec<_>, Vec<_>) =
            judged.map_err(|error| failed(&error))?.into_iter().partition(Readiness::is_ready);
        match (blocked.is_empty(), no_slot) {
            (true, None) => {}
            (true, Some(reason)) => return Err(Refused::Conflict(reason)),
            (false, no_slot) => return Err(Refused::Blocked(blocked, no_slot)),
        }
        for warning in ready.iter().flat_map(|readiness| &readiness.blockers) {
            if warning.severity == Severity::Warning {
                tracing::warn!("{warning}");
            }
        }
        let mut options = DeviceOptions { backend: request.backend, ..self.options.clone() };
        options.claim.with_group = request.with_group;
        options.without_reset = request.accept.contains(&BlockerCode::NoReset);
        let arrival = self.arrivals.add(&request.functions);
        let arrival = arrival.map_err(|error| failed(&format!("no eventfd: {error}; raise `ulimit -n`")))?;
        options.claim.cancel = options.claim.cancel.map(|stop| arrivals::cancel(&stop, arrival.clone()));
        let function = |found: PciFunction| {
            let arrival = Some(arrival.clone());
            (found.address, Function { arrival, ..Function::new(found, options.clone()) })
        };
        self.functions.extend(found.into_iter().map(function));
        Ok(())
    }

    /// Orders something of the VMM.
    fn order(&self, order: &Order, files: &[BorrowedFd<'_>]) -> Result<Done, String> {
        self.vmm.as_ref().ok_or_else(|| MachineError::Unusable.to_string())?.order(order, files)
    }

    /// Whether the machine is dropped, and a VMM only releases what it has.
    fn is_over(&self) -> bool {
        self.watch.is_none()
    }

    fn vmm_is_gone(&self) -> bool {
        self.vmm.as_ref().is_none_or(|vmm| vmm.is_gone())
    }

    /// Stops a device in the place of a VMM that has gone, so that it can be reset along with another.
    fn put_at_rest(&self, address: PciAddress) {
        let Some(kept) = self.open.get(&address).filter(|_| self.vmm_is_gone()) else { return };
        kept.served.end();
        if let (_resets, Err(error)) = (kept.proved(), kept.file.put_at_rest()) {
            tracing::debug!("{error}; its reset tells what is left");
        }
    }

    fn misunderstood(&self) -> String {
        self.vmm.as_ref().map_or_else(|| MachineError::Unusable.to_string(), |vmm| vmm.misunderstood())
    }

    /// Detaches a device, and sees that it was reset: a VMM that says so is not believed, and one that has gone reset nothing.
    fn detach(&self, address: PciAddress) -> Result<Detached, String> {
        let kept = self.open.get(&address).ok_or_else(|| format!("{address} is not open"))?;
        let before = *kept.proved();
        let detached = self.order(&Order::Detach(address), &[]);
        if let (Err(error), Some(vmm)) = (&detached, &self.vmm)
            && !vmm.is_gone()
        {
            if !self.is_over() {
                return Err(error.clone());
            }
            tracing::warn!("{error}; the guest's VMM is ended");
            vmm.end();
        }
        // A VMM that was taken over could ask for resets for ever.
        kept.served.end();
        let proved = kept.proved();
        if detached.is_ok() && *proved > before {
            return Ok(Detached::Reset);
        }
        let function = self.functions.get(&address);
        match kept.file.put_at_rest().and_then(|()| kept.file.reset_and_prove()) {
            Ok(report) => {
                let method = report.method.map_or_else(|| "a reset".into(), |method| method.to_string());
                tracing::info!(
                    "{address} was reset in the place of the guest's VMM ({method}, {:?})",
                    report.evidence
                );
                Ok(Detached::Reset)
            }
            Err(VfioError::WantedBack { .. }) => Ok(Detached::Unreset),
            Err(_) if function.is_some_and(|function| function.options.without_reset) => Ok(Detached::Reset),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Claims a function, unless an earlier claim covers it. The claim waits for drivers and for other processes, so a separate
    /// thread makes it, and [`claimed`](Self::claimed) takes the result.
    fn claim(&mut self, address: PciAddress) -> Option<Event> {
        let pending = match (self.manager.claimed(address), self.functions.get(&address)) {
            (Some(claimed), _) => return Some(Event::Claimed(address, Ok(claimed.target))),
            (None, Some(function)) => self.manager.begin_claim(address, &function.options.claim),
            (None, None) => return Some(Event::Claimed(address, Err(unknown(address)))),
        };
        let started = pending.map_err(|error| error.to_string()).and_then(|pending| {
            let events = self.events.clone().ok_or_else(|| MachineError::Unusable.to_string())?;
            let make = move || {
                let begun = Instant::now();
                let made = pending.make();
                // An instance that has ended drops the claim, which releases it.
                drop(events.send(Message::Claimed(address, made, begun.elapsed())));
            };
            let thread = Builder::new().name("claim".into()).spawn(make);
            thread
                .map(drop)
                .map_err(|error| format!("{address} can't be claimed: {error}; raise `ulimit -u`"))
        });
        started.err().map(|error| Event::Claimed(address, Err(error)))
    }

    /// Adopts a claim that was made, and returns its event.
    pub(super) fn claimed(&mut self, address: PciAddress, made: Result<MadeClaim, ManagerError>) -> Event {
        match made.map(|made| self.manager.adopt(made)) {
            Err(ManagerError::Claim(ClaimError::Failed { cause }))
                if matches!(*cause, BindError::Cancelled(_)) =>
            {
                Event::NotClaimed(address)
            }
            claimed => {
                let target = claimed.map(|claimed| claimed.target).map_err(|error| error.to_string());
                Event::Claimed(address, target)
            }
        }
    }

    /// Releases a claim. A call of the VMM, or the watch, may have it open for a moment more. A VMM that keeps open what it said it
    /// had closed is killed.
    fn release(&mut self, target: PciAddress) -> Result<(), ManagerError> {
        if let Some(vmm) = self.vmm.as_ref().filter(|_| self.is_over() && self.open.is_empty()) {
            vmm.end();
        }
        let until = Instant::now() + CLOSE;
        let mut is_ended = false;
        loop {
            let claimed = self.manager.find_claim(target)?;
            match (self.manager.release(&claimed), &self.vmm) {
                (Err(ManagerError::Open(_)), _) if Instant::now() < until => sleep(Duration::from_millis(1)),
                (Err(error), Some(vmm)) if !is_ended && !vmm.is_gone() && self.is_kept(&error, vmm.id()) => {
                    vmm.end_for(format!("kept {target} open after it was detached"));
                    is_ended = true;
                }
                (released, _) => return released,
            }
        }
    }

    /// Whether a release failed because somebody has a function open, who may be the VMM: it was unbound, and that does not end.
    fn is_kept(&self, error: &ManagerError, vmm: u32) -> bool {
        let ManagerError::Claim(ClaimError::HalfReleased { left, .. }) = error else { return false };
        left.iter().any(|error| {
            let BindError::Stuck { address, holders, .. } = error else { return false };
            let driver = self.manager.host().pci_device(*address).join("driver");
            let is_vmm = |holder: &Holder| matches!(holder, Holder::Process { pid, .. } if *pid == vmm);
            driver.symlink_metadata().is_err() && (holders.is_empty() || holders.iter().any(is_vmm))
        })
    }

    /// Opens a claimed device.
    fn open(&mut self, address: PciAddress) -> Result<Backend, String> {
        let host = self.manager.host();
        let addresses: Vec<_> = self.functions.keys().copied().collect();
        let options = self.functions.get(&address).ok_or_else(|| unknown(address))?.options.clone();
        let no_files =
            |error: std::io::Error| format!("{address} can't be kept open: {error}; raise `ulimit -n`");
        let space = match &self.space {
            Some(space) => space.clone(),
            None => vfio::open_space(host, &addresses, options.backend).map_err(|error| error.to_string())?,
        };
        if self.space.is_none() {
            let (file, number) = match space.share().map_err(no_files)? {
                SpaceParts::Group(file) => (file, None),
                SpaceParts::Iommufd(file, number) => (file, Some(number)),
            };
            self.order(&Order::Space(number), &[file.as_fd()])?;
        }
        let claimed = self.manager.claimed(address).ok_or_else(|| format!("{address} is not claimed"))?;
        let opened = match options.vf_tokens.get(&address) {
            Some(token) => claimed.open_with_token(&space, token),
            None => claimed.open(&space),
        };
        let opened = opened.map_err(|error| error.to_string())?;
        let (watched, wanted) = watch_over(&opened)?;
        let vectors = vectors_of(&*opened).map_err(|error| error.to_string())?;
        let function = self.functions.get_mut(&address).ok_or_else(|| unknown(address))?;
        (function.watched, function.vectors) = (Some(watched), vectors);
        let arrival = function.arrival.clone();
        limits::check_vectors(self.functions.values().map(|function| function.vectors).sum())?;
        let DeviceParts { info, is_virtual, reset_by_open, file, group, .. } =
            opened.share().map_err(no_files)?;
        let proved = Arc::<Mutex<u32>>::default();
        let refuse = self.vmm.as_ref().ok_or_else(|| MachineError::Unusable.to_string())?.refuses();
        let (served, socket) = keeper::serve(opened.clone(), proved.clone(), refuse).map_err(no_files)?;
        let (group, group_file) = group.unzip();
        let mut files = vec![file.as_fd(), socket.as_fd()];
        files.extend(wanted.iter().chain(arrival.as_deref()).chain(&group_file).map(OwnedFd::as_fd));
        let rom = match options.roms.get(&address) {
            None => wire::Rom::Device,
            Some(RomFile::Hidden) => wire::Rom::Hidden,
            Some(RomFile::Open(rom, _)) => {
                files.push(rom.as_fd());
                wire::Rom::File
            }
        };
        let order = Order::Open(Open {
            address,
            info,
            is_virtual,
            reset_by_open: reset_by_open.map(Into::into),
            is_heard: wanted.is_some(),
            can_turn_back: arrival.is_some(),
            group,
            without_reset: options.without_reset,
            rom,
        });
        self.order(&order, &files)?;
        let backend = space.backend();
        self.open.insert(address, Kept { file: opened, proved, served });
        self.space = Some(space);
        Ok(backend)
    }

    /// Attaches an open device, puts it into the machine if that expects it, and watches it.
    fn attach(&mut self, address: PciAddress) -> Event {
        match self.order(&Order::Attach(address), &[]) {
            Ok(Done::GivenUp) => return Event::NotAttached(address),
            Ok(_) => {}
            Err(error) => return Event::Attached(address, Err(error)),
        }
        let watched = self.functions.get_mut(&address).and_then(|function| function.watched.take());
        if let (Some(watch), Some(watched)) = (&self.watch, watched) {
            watch.add(watched);
        }
        Event::Attached(address, Ok(()))
    }

    /// The functions that share a slot with this one, among them.
    fn in_slot_of(&self, slot: PciAddress) -> Result<impl Iterator<Item = (&PciAddress, &Function)>, String> {
        let named = self.functions.get(&slot).ok_or_else(|| unknown(slot))?.request.slot;
        Ok(self.functions.iter().filter(move |(_, function)| function.request.slot == named))
    }

    /// Has the guest see that a device is in a slot, and wait for it: unless it would wait too long, as much RAM is to be pinned
    /// before.
    fn insert(&self, slot: PciAddress) -> Result<(), String> {
        if self.space.is_none() && self.explain.memory() > QUICKLY_PINNED {
            return Ok(());
        }
        let requests = self.in_slot_of(slot)?.map(|(_, function)| function.request.clone()).collect();
        self.order(&Order::Insert(slot, requests), &[]).map(drop)
    }

    /// Has a device, whose functions are attached, answer in a slot of the guest.
    fn plug(&mut self, slot: PciAddress) -> Result<Attached, String> {
        let functions: Vec<_> = self.in_slot_of(slot)?.map(|(&address, _)| address).collect();
        let first = functions.first().and_then(|address| self.functions.get(address));
        let left = first.map(|first| left_with_host(self.manager.host(), &first.found, &functions));
        let left = left.unwrap_or_default().into_iter().map(|left| (left.address, left.driver)).collect();
        for address in &functions {
            self.functions.get_mut(address).map(|function| function.arrival.take());
        }
        match self.order(&Order::Plug(functions), &[])? {
            Done::Plugged(guest) => Ok(Attached { guest, left }),
            _ => Err(self.misunderstood()),
        }
    }
}

/// What is said of a function that nobody has announced.
fn unknown(address: PciAddress) -> String {
    format!("{address} is none of the guest's devices")
}

/// What to watch of a device: that it is there, and that the host does not want it back; with what tells the VMM of that, which
/// could read from what the Linux kernel writes to.
fn watch_over(file: &Arc<VfioDevice>) -> Result<(Watched, Option<OwnedFd>), String> {
    let address = file.address();
    let no_event = |error| format!("no eventfd can be had: {error}; raise `ulimit -n`");
    let wanted = file.wanted_back().map(|event| event.try_clone_to_owned()).transpose().map_err(no_event)?;
    let told = wanted.is_some().then(watch::event).transpose().map_err(no_event)?;
    let tell = told.as_ref().map(OwnedFd::try_clone).transpose().map_err(no_event)?;
    // The device is closed when it is let go of, whatever the watch does.
    let (file, same, erring) = (Arc::downgrade(file), Arc::downgrade(file), Arc::downgrade(file));
    let presence = move || file.upgrade().map_or(Presence::Present, |file| file.presence());
    let is_wanted = move || same.upgrade().is_some_and(|file| file.is_wanted_back());
    let error = move || erring.upgrade()?.take_error();
    let (is_wanted, error, presence) = (Box::new(is_wanted), Box::new(error), Box::new(presence));
    Ok((Watched { address, wanted, is_wanted, tell, error, presence }, told))
}

/// Interrupt vectors that a driver of a device may use.
fn vectors_of(file: &impl DeviceFile) -> Result<u64, VfioError> {
    Ok(u64::from(file.irq(MSI_IRQ)?.count.max(file.irq(MSIX_IRQ)?.count)))
}
