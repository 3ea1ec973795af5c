//! Routes the guest's config and memory accesses to the functions of its PCI hierarchy.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::Instant;

use vm_passthrough::guest::{BarHit, BarMap, Vmm};
use vm_passthrough::pci::placement::{self, FunctionRequest, Windows};
use vm_passthrough::{PassthroughDevice, PciAddress};

use super::root_port::Inserted;
use super::{ExpectedFunction, Function, HostBridge, RootPort, place};
use crate::vmm::error::MachineError;
use crate::vmm::layout;
use crate::vmm::lifecycle::Lifecycle;

/// Slots of a bus.
pub(in crate::vmm) const SLOTS: usize = 32;

/// What is in a slot of a root bus.
#[derive(Clone)]
enum Slot {
    Own(Arc<dyn Function>),
    Port(Arc<RootPort>),
}

/// A slot, and where it is.
#[derive(Clone)]
struct Placed {
    /// The root bus, by its number among them.
    root: usize,
    device: u8,
    what: Slot,
}

/// The root complex: bus 0, and for each further NUMA node of the guest a root bus of its own, where the devices of that node are.
/// What they have is made before the guest runs and stays; what is behind its ports may change at any time. No lock
/// of it is held while a function serves an access, which may take long.
///
/// The guest may run before the functions that it is to have have arrived. Until all of them have, who reaches for one of them
/// is held, but for what identifies it: functions that can be reset only along with each other are attached before any of them
/// is used.
pub(in crate::vmm) struct PciRoot {
    vmm: Arc<dyn Vmm>,
    /// Where the BARs of what is behind the ports decode.
    bars: Arc<BarMap>,
    /// Of each root bus from slot 0 on, without gaps.
    slots: RwLock<Vec<Placed>>,
    /// The host's NUMA node of each root bus; empty where nothing is known of nodes.
    nodes: Vec<u16>,
    /// The number of each root bus, once they are numbered. One that has no port has none.
    buses: RwLock<Vec<Option<u8>>>,
    /// Held by who changes what is behind the ports.
    changing: Mutex<()>,
    /// What was unplugged, until it is dropped.
    unplugged: Mutex<Vec<Weak<dyn PassthroughDevice>>>,
    /// Whether functions are expected that have not arrived.
    awaits: AtomicBool,
    lifecycle: Arc<Lifecycle>,
    /// Address register of configuration mechanism 1 (PCI Local Bus 3.0, 3.2.2.3.2).
    address: AtomicU32,
}

impl PciRoot {
    /// A root complex with its host bridge, of the machine whose interrupts `vmm` delivers, and whose devices tell `bars`.
    pub(in crate::vmm) fn new(vmm: Arc<dyn Vmm>, bars: Arc<BarMap>, lifecycle: Arc<Lifecycle>) -> Self {
        let bridge = Slot::Own(Arc::new(HostBridge::new()));
        let slots = RwLock::new(vec![Placed { root: 0, device: 0, what: bridge }]);
        let buses = RwLock::new(vec![Some(0)]);
        let (nodes, changing, unplugged, awaits, address) = Default::default();
        Self { vmm, bars, slots, nodes, buses, changing, unplugged, awaits, lifecycle, address }
    }

    /// With a root bus for each of these NUMA nodes of the host, the first of which is bus 0's.
    pub(in crate::vmm) fn on_nodes(self, nodes: impl IntoIterator<Item = u16>) -> Self {
        Self { nodes: nodes.into_iter().collect(), ..self }
    }

    /// Puts a function of the VMM's own into the next slot.
    ///
    /// # Errors
    /// When the bus is full.
    pub(in crate::vmm) fn add(&self, function: Arc<dyn Function>) -> Result<(), MachineError> {
        self.add_slot(0, |_, _| Ok(Slot::Own(function)))
    }

    /// Puts a root port with nothing behind it into the next slot: room for a device that comes while the guest runs.
    ///
    /// # Errors
    /// When the bus is full, or there is no interrupt left for the port.
    pub(in crate::vmm) fn add_port(&self) -> Result<(), MachineError> {
        self.add_port_on(0)
    }

    fn add_port_on(&self, root: usize) -> Result<(), MachineError> {
        let port = |device, number| RootPort::new(device, number, self.vmm.clone());
        self.add_slot(root, |device, number| Ok(Slot::Port(Arc::new(port(device, number)?))))
    }

    /// Makes what is in the next slot of a root bus, by its device number there and its number among all slots.
    fn add_slot(
        &self,
        root: usize,
        make: impl FnOnce(u8, u8) -> Result<Slot, MachineError>,
    ) -> Result<(), MachineError> {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let device = slots.iter().filter(|slot| slot.root == root).count();
        if device >= SLOTS {
            return Err(MachineError::BusFull { limit: SLOTS - 1 });
        }
        // There are no more nodes than buses have room for.
        let (device, number) = (device as u8, slots.len() as u8);
        slots.push(Placed { root, device, what: make(device, number)? });
        Ok(())
    }

    /// The root bus for devices of a NUMA node of the host.
    fn root_of(&self, node: Option<u16>) -> usize {
        self.nodes.iter().position(|&other| Some(other) == node).unwrap_or(0)
    }

    /// Makes room for a function before the guest runs: with the others of the same device of the host, or behind a port of
    /// its own.
    ///
    /// # Errors
    /// When the bus is full, or the function is expected already.
    pub(in crate::vmm) fn expect(&self, function: ExpectedFunction) -> Result<(), MachineError> {
        let _changing = self.changing();
        let is_expected = |expected: &ExpectedFunction| expected.address == function.address;
        if self.ports().iter().any(|port| port.slot().expected.iter().any(is_expected)) {
            return Err(MachineError::Twice { address: function.address });
        }
        let same =
            |port: &Arc<RootPort>| port.slot().expected.iter().any(|other| other.slot() == function.slot());
        let port = match self.ports().into_iter().find(same) {
            Some(port) => port,
            None => {
                // One more, and the first free one: what the guest starts with has the same buses however many ports are free.
                let root = self.root_of(function.node);
                self.add_port_on(root)?;
                let mut ports = self.ports_by_root().into_iter().filter(|(other, _)| *other == root);
                let free = ports.find(|(_, port)| !port.slot().is_occupied());
                free.map(|(_, port)| port).ok_or(MachineError::NoPort)?
            }
        };
        port.change(|slot| slot.expected.push(function));
        self.note_awaited();
        Ok(())
    }

    /// Puts a function that is expected, and attached, where the guest expects it. Who waits goes on with the last of them.
    ///
    /// # Errors
    /// When it is not expected or has arrived before, or its BARs don't fit where they were expected.
    pub(in crate::vmm) fn arrive(&self, device: Arc<dyn PassthroughDevice>) -> Result<(), MachineError> {
        let _changing = self.changing();
        self.check_new(&device)?;
        let address = device.address();
        let awaits = |port: &Arc<RootPort>| port.slot().awaited().any(|expected| expected.address == address);
        let port = self.ports().into_iter().find(awaits).ok_or(MachineError::NotThere { address })?;
        device.connect_pins(port.slot().lines);
        port.change(|slot| slot.functions.push(device));
        let settled = place::settle(&port);
        if settled.is_err() {
            port.change(|slot| slot.functions.retain(|device| device.address() != address));
        }
        self.note_awaited();
        settled
    }

    /// Whether a function is expected that has not arrived.
    pub(in crate::vmm) fn expects(&self, address: PciAddress) -> bool {
        self.ports().iter().any(|port| port.slot().awaited().any(|expected| expected.address == address))
    }

    /// Looks whether something is awaited, after what is behind the ports was changed.
    fn note_awaited(&self) {
        let awaits = self.ports().iter().any(|port| port.slot().awaited().next().is_some());
        self.awaits.store(awaits, Ordering::SeqCst);
        self.lifecycle.wake_held();
    }

    /// Whether functions are expected that have not arrived. The guest has reached none of them then.
    pub(in crate::vmm) fn awaits(&self) -> bool {
        self.awaits.load(Ordering::SeqCst)
    }

    /// Holds an access to what is behind a port until all that is expected has arrived. `false` when vCPUs are to leave before:
    /// the access must not be made.
    fn hold(&self) -> bool {
        !self.awaits() || self.lifecycle.hold(|| self.awaits())
    }

    /// Where the BARs of a device would be that is [plugged](Self::plug): the windows of that port, once they are decided.
    ///
    /// # Errors
    /// When no port is free.
    pub(in crate::vmm) fn room_for(
        &self,
        device: &[FunctionRequest],
    ) -> Result<Option<Windows>, MachineError> {
        let _changing = self.changing();
        Ok(place::room(&self.free_port(device)?.slot()))
    }

    /// A port with nothing behind it: the first that has room for a device, or the first of all.
    fn free_port(&self, device: &[FunctionRequest]) -> Result<Arc<RootPort>, MachineError> {
        let mut free = self.ports();
        free.retain(|port| !port.slot().is_occupied());
        let fits = |port: &&Arc<RootPort>| {
            place::room(&port.slot()).is_none_or(|room| placement::plan(device, &room).is_ok())
        };
        free.iter().find(fits).or(free.first()).cloned().ok_or(MachineError::NoPort)
    }

    /// Shows a guest that may run that a device is behind a port that had none, which answers once it is
    /// [plugged](Self::plug).
    ///
    /// # Errors
    /// When no port is free or large enough.
    pub(in crate::vmm) fn insert(
        &self,
        name: PciAddress,
        device: &[FunctionRequest],
    ) -> Result<(), MachineError> {
        let _changing = self.changing();
        let port = self.free_port(device)?;
        check_room(&port, device)?;
        port.change(|slot| slot.inserted = Some(Inserted { name, since: Instant::now() }));
        Ok(())
    }

    /// Puts all functions of one device behind the port where it was inserted, or one that has none, for a guest that may run:
    /// it is told. Returns where it sees the first, if it has numbered the bus.
    ///
    /// # Errors
    /// When no port is free or large enough, a function was added before, or the functions are not of one device.
    pub(in crate::vmm) fn plug(
        &self,
        device: Vec<Arc<dyn PassthroughDevice>>,
    ) -> Result<Option<PciAddress>, MachineError> {
        let _changing = self.changing();
        for (index, function) in device.iter().enumerate() {
            self.check_new(function)?;
            if device[..index].iter().any(|other| other.address() == function.address()) {
                return Err(MachineError::Twice { address: function.address() });
            }
            if function.slot() != device[0].slot() {
                return Err(MachineError::OtherDevice {
                    address: function.address(),
                    other: device[0].address(),
                });
            }
        }
        let requests: Vec<_> = device.iter().map(place::request_of).collect();
        let is_inserted =
            |port: &Arc<RootPort>| device.iter().any(|function| port.slot().has_inserted(function.address()));
        let inserted = self.ports().into_iter().find(is_inserted);
        let port = inserted.map_or_else(|| self.free_port(&requests), Ok)?;
        // The guest may have restarted since somebody asked for room.
        check_room(&port, &requests)?;
        for function in &device {
            function.connect_pins(port.slot().lines);
        }
        port.fill(device);
        let bus = port.secondary_bus();
        Ok(PciAddress::new(0, bus, 0, 0).filter(|_| bus != 0))
    }

    /// The port that a function is behind, or is expected behind.
    ///
    /// # Errors
    /// When no such function is there.
    pub(in crate::vmm) fn port_of(&self, address: PciAddress) -> Result<Arc<RootPort>, MachineError> {
        let has = |port: &Arc<RootPort>| {
            let slot = port.slot();
            slot.functions.iter().any(|device| device.address() == address)
                || slot.expected.iter().any(|expected| expected.address == address)
                || slot.has_inserted(address)
        };
        self.ports().into_iter().find(has).ok_or(MachineError::NotThere { address })
    }

    /// Takes the device that a function belongs to out of its slot, with all of its functions, from a guest that may run: it
    /// is notified, and reaches them no more by config space; what is mapped into it goes when they are detached.
    ///
    /// # Errors
    /// When no such function is there.
    pub(in crate::vmm) fn unplug(
        &self,
        address: PciAddress,
    ) -> Result<Vec<Arc<dyn PassthroughDevice>>, MachineError> {
        let _changing = self.changing();
        let port = self.port_of(address)?;
        let mut unplugged = self.unplugged.lock().unwrap_or_else(PoisonError::into_inner);
        let functions = port.change(|slot| {
            slot.expected.clear();
            slot.inserted = None;
            std::mem::take(&mut slot.functions)
        });
        unplugged.retain(|device| device.strong_count() > 0);
        unplugged.extend(functions.iter().map(Arc::downgrade));
        drop(unplugged);
        self.note_awaited();
        Ok(functions)
    }

    /// Keeps others from changing what is behind the ports.
    pub(super) fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_new(&self, device: &Arc<dyn PassthroughDevice>) -> Result<(), MachineError> {
        let address = device.address();
        match self.devices().iter().any(|other| other.address() == address) {
            true => Err(MachineError::Twice { address }),
            false => Ok(()),
        }
    }

    fn slots(&self) -> Vec<Placed> {
        self.slots.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The root ports, in the order of their slots.
    pub(in crate::vmm) fn ports(&self) -> Vec<Arc<RootPort>> {
        self.ports_by_root().into_iter().map(|(_, port)| port).collect()
    }

    /// The same, each with its root bus, in the order of these.
    pub(super) fn ports_by_root(&self) -> Vec<(usize, Arc<RootPort>)> {
        let port = |slot: Placed| match slot.what {
            Slot::Port(port) => Some((slot.root, port)),
            Slot::Own(_) => None,
        };
        let mut ports: Vec<_> = self.slots().into_iter().filter_map(port).collect();
        ports.sort_by_key(|(root, _)| *root);
        ports
    }

    /// Numbers the root buses.
    pub(super) fn number(&self, buses: Vec<Option<u8>>) {
        *self.buses.write().unwrap_or_else(PoisonError::into_inner) = buses;
    }

    /// The VMM's own functions.
    pub(in crate::vmm) fn functions(&self) -> Vec<Arc<dyn Function>> {
        let own = |slot: Placed| match slot.what {
            Slot::Own(function) => Some(function),
            Slot::Port(_) => None,
        };
        self.slots().into_iter().filter_map(own).collect()
    }

    /// The passed-through devices.
    pub(in crate::vmm) fn devices(&self) -> Vec<Arc<dyn PassthroughDevice>> {
        self.ports().iter().flat_map(|port| port.slot().functions.clone()).collect()
    }

    /// All that may still reach the guest's RAM: its devices, and those that were unplugged and may not be detached yet.
    pub(in crate::vmm) fn all_devices(&self) -> Vec<Arc<dyn PassthroughDevice>> {
        // Held by who moves them from one to the other.
        let unplugged = self.unplugged.lock().unwrap_or_else(PoisonError::into_inner);
        let mut devices = self.devices();
        devices.extend(unplugged.iter().filter_map(Weak::upgrade));
        devices
    }

    /// Asks the VMM's own functions to end what they do of their own accord.
    pub(in crate::vmm) fn ask_to_stop(&self) {
        for function in self.functions() {
            function.ask_to_stop();
        }
    }

    /// Ends what the VMM's own functions do of their own accord, all at the same time.
    ///
    /// # Errors
    /// The first that does not stop in time. The others have stopped then.
    pub(in crate::vmm) fn stop(&self) -> Result<(), MachineError> {
        self.ask_to_stop();
        self.functions().iter().map(|function| function.stop()).fold(Ok(()), Result::and)
    }

    /// Puts everything but the passed-through devices to its state after power-on, once it has stopped.
    ///
    /// # Errors
    /// When a device can't be made ready again.
    pub(in crate::vmm) fn reset(&self) -> Result<(), MachineError> {
        self.address.store(0, Ordering::Relaxed);
        for slot in self.slots() {
            match slot.what {
                Slot::Own(function) => function.reset()?,
                Slot::Port(port) => port.reset(),
            }
        }
        Ok(())
    }

    /// Reads config space; all ones where no function is.
    pub(in crate::vmm) fn config_read(&self, bus: u8, devfn: u8, offset: u16, data: &mut [u8]) {
        data.fill(0xff);
        if !in_config(offset, data.len()) {
            return;
        }
        match self.find(bus, devfn) {
            Some(Target::Own(function)) => function.config_read(offset, data),
            Some(Target::Port(port)) => port.config_read(offset, data),
            Some(Target::Behind(port, number)) => {
                let is_read = self.awaits() && port.early_read(number, offset, data);
                if !is_read && self.hold() {
                    port.function_read(number, offset, data);
                }
            }
            None => {}
        }
    }

    /// Writes config space; nothing happens where no function is.
    pub(in crate::vmm) fn config_write(&self, bus: u8, devfn: u8, offset: u16, data: &[u8]) {
        if !in_config(offset, data.len()) {
            return;
        }
        match self.find(bus, devfn) {
            Some(Target::Own(function)) => function.config_write(offset, data),
            Some(Target::Port(port)) => {
                let resets = port.config_write(offset, data);
                if resets && self.hold() {
                    port.reset_bus(|| self.lifecycle.stopping());
                }
            }
            Some(Target::Behind(port, number)) => {
                if self.hold()
                    && let Some(device) = port.function(number)
                {
                    device.config_write(offset, data);
                }
            }
            None => {}
        }
    }

    fn find(&self, bus: u8, devfn: u8) -> Option<Target> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        let (device, function) = (devfn >> 3, devfn & 7);
        let buses = self.buses.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(root) = buses.iter().position(|root| *root == Some(bus)) {
            let mut slots = slots.iter().filter(|_| function == 0);
            return slots.find(|slot| slot.root == root && slot.device == device).map(|slot| {
                match &slot.what {
                    Slot::Own(function) => Target::Own(function.clone()),
                    Slot::Port(port) => Target::Port(port.clone()),
                }
            });
        }
        if device != 0 {
            return None;
        }
        slots.iter().find_map(|slot| match &slot.what {
            Slot::Port(port) if port.secondary_bus() == bus => Some(Target::Behind(port.clone(), function)),
            _ => None,
        })
    }

    /// Reads a port of configuration mechanism 1, from 0xcf8 to 0xcff.
    pub(in crate::vmm) fn port_read(&self, port: u16, data: &mut [u8]) {
        let address = self.address.load(Ordering::Relaxed);
        if port == layout::port::PCI_ADDRESS && data.len() == 4 {
            data.copy_from_slice(&address.to_le_bytes());
        } else if let Some((bus, devfn, offset)) = mechanism_1(address, port) {
            self.config_read(bus, devfn, offset, data);
        } else {
            data.fill(0xff);
        }
    }

    /// Writes a port of configuration mechanism 1, from 0xcf8 to 0xcff.
    pub(in crate::vmm) fn port_write(&self, port: u16, data: &[u8]) {
        if port == layout::port::PCI_ADDRESS {
            if let Ok(address) = data.try_into().map(u32::from_le_bytes) {
                self.address.store(address & 0x80ff_fffc, Ordering::Relaxed);
            }
        } else if let Some((bus, devfn, offset)) = mechanism_1(self.address.load(Ordering::Relaxed), port) {
            self.config_write(bus, devfn, offset, data);
        }
    }

    /// Reads memory in the ECAM window at `offset`; all ones for what is no config access.
    pub(in crate::vmm) fn ecam_read(&self, offset: u64, data: &mut [u8]) {
        let (bus, devfn, register) = ecam(offset);
        match data.len() {
            // The guest may read a quadword; the bus does that in two.
            8 => {
                let (low, high) = data.split_at_mut(4);
                self.config_read(bus, devfn, register, low);
                self.config_read(bus, devfn, register.saturating_add(4), high);
            }
            _ => self.config_read(bus, devfn, register, data),
        }
    }

    /// Writes memory in the ECAM window at `offset`.
    pub(in crate::vmm) fn ecam_write(&self, offset: u64, data: &[u8]) {
        let (bus, devfn, register) = ecam(offset);
        match data.len() {
            8 => {
                self.config_write(bus, devfn, register, &data[..4]);
                self.config_write(bus, devfn, register.saturating_add(4), &data[4..]);
            }
            _ => self.config_write(bus, devfn, register, data),
        }
    }

    /// Reads memory that is neither RAM nor mapped into the guest; `false` when no function decodes it.
    pub(in crate::vmm) fn memory_read(&self, address: u64, data: &mut [u8]) -> bool {
        data.fill(0xff);
        if let Some((device, bar, offset)) = self.find_device_bar(address) {
            if let Err(error) = device.bar_read(bar, offset, data) {
                tracing::debug!(device = %device.address(), %error, "a guest's read failed");
            }
            return true;
        }
        match self.find_own_bar(address) {
            Some((function, offset)) => {
                function.bar_read(offset, data);
                true
            }
            None => false,
        }
    }

    /// Writes memory that is neither RAM nor mapped into the guest; `false` when no function decodes it.
    pub(in crate::vmm) fn memory_write(&self, address: u64, data: &[u8]) -> bool {
        if let Some((device, bar, offset)) = self.find_device_bar(address) {
            if let Err(error) = device.bar_write(bar, offset, data) {
                tracing::debug!(device = %device.address(), %error, "a guest's write failed");
            }
            return true;
        }
        match self.find_own_bar(address) {
            Some((function, offset)) => {
                function.bar_write(offset, data);
                true
            }
            None => false,
        }
    }

    fn find_device_bar(&self, address: u64) -> Option<(Arc<dyn PassthroughDevice>, u8, u64)> {
        self.device_of(self.bars.find(address)?, |port| port.forwards_memory(address))
    }

    /// Reads ports; all ones where no function decodes them.
    pub(in crate::vmm) fn io_read(&self, first: u16, data: &mut [u8]) {
        data.fill(0xff);
        if let Some((device, bar, offset)) = self.find_device_ports(first)
            && let Err(error) = device.bar_read(bar, offset, data)
        {
            tracing::debug!(device = %device.address(), %error, "a guest's read failed");
        }
    }

    /// Writes ports; nothing happens where no function decodes them.
    pub(in crate::vmm) fn io_write(&self, first: u16, data: &[u8]) {
        if let Some((device, bar, offset)) = self.find_device_ports(first)
            && let Err(error) = device.bar_write(bar, offset, data)
        {
            tracing::debug!(device = %device.address(), %error, "a guest's write failed");
        }
    }

    /// What decodes a port. The host bridge forwards those of its window alone: what the VMM has below keeps its ports, wherever
    /// the guest puts BARs.
    fn find_device_ports(&self, first: u16) -> Option<(Arc<dyn PassthroughDevice>, u8, u64)> {
        let hit =
            self.bars.find_port(first).filter(|_| layout::port::PCI_WINDOW.contains(&u32::from(first)))?;
        self.device_of(hit, |port| port.forwards_port(first))
    }

    /// The device of a BAR, if the port that it is behind forwards to it.
    fn device_of(
        &self,
        hit: BarHit,
        forwards: impl Fn(&RootPort) -> bool,
    ) -> Option<(Arc<dyn PassthroughDevice>, u8, u64)> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        slots.iter().find_map(|slot| match &slot.what {
            Slot::Port(port) if forwards(port) => {
                let slot = port.slot();
                let device = slot.functions.iter().find(|device| device.address() == hit.device)?.clone();
                Some((device, hit.bar, hit.offset))
            }
            _ => None,
        })
    }

    fn find_own_bar(&self, address: u64) -> Option<(Arc<dyn Function>, u64)> {
        self.functions().into_iter().find_map(|function| {
            let offset = function.find_bar(address)?;
            Some((function, offset))
        })
    }
}

/// Where a config access goes.
enum Target {
    Own(Arc<dyn Function>),
    Port(Arc<RootPort>),
    /// The function of this number behind a port.
    Behind(Arc<RootPort>, u8),
}

/// Checks that the BARs of a device fit behind a port, once it has its windows.
fn check_room(port: &RootPort, device: &[FunctionRequest]) -> Result<(), MachineError> {
    place::room(&port.slot())
        .map_or(Ok(()), |room| placement::plan(device, &room).map(drop))
        .map_err(Into::into)
}

/// Whether an access is one that a bus can make: 1, 2 or 4 bytes, aligned, in config space.
fn in_config(offset: u16, len: usize) -> bool {
    matches!(len, 1 | 2 | 4) && usize::from(offset).is_multiple_of(len) && usize::from(offset) + len <= 4096
}

fn mechanism_1(address: u32, port: u16) -> Option<(u8, u8, u16)> {
    let byte = port.checked_sub(layout::port::PCI_DATA).filter(|&byte| byte < 4)?;
    let enabled = address >> 31 != 0;
    enabled.then_some(((address >> 16) as u8, (address >> 8) as u8, (address & 0xfc) as u16 | byte))
}

fn ecam(offset: u64) -> (u8, u8, u16) {
    ((offset >> 20) as u8, (offset >> 12) as u8, (offset & 0xfff) as u16)
}

#[cfg(test)]
mod tests {
    use vm_passthrough::guest::DecodedBar;
    use vm_passthrough::pci::placement::PortWindows;
    use vm_passthrough::pci::regs;
    use vm_passthrough::sim::{SimLog, SimVmm};

    use super::*;
    use crate::vmm::testing::{FakeDevice, add};

    fn empty() -> PciRoot {
        let vmm = SimVmm::new(&[], &SimLog::default()).unwrap();
        PciRoot::new(vmm.clone(), vmm.bars().clone(), Arc::new(Lifecycle::new().unwrap()))
    }

    fn root() -> PciRoot {
        let root = empty();
        add(&root, Arc::new(FakeDevice::new(0))).unwrap();
        add(&root, Arc::new(FakeDevice::new(1))).unwrap();
        root
    }

    fn read32(root: &PciRoot, bus: u8, devfn: u8, offset: u16) -> u32 {
        let mut data = [0; 4];
        root.config_read(bus, devfn, offset, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn buses_follow_the_bridge_registers() {
        let root = root();
        assert_eq!(read32(&root, 0, 0, 0), 0x0008_1b36);
        assert_eq!(read32(&root, 0, 1 << 3, 0), 0x000c_1b36);
        assert_eq!(read32(&root, 0, 3 << 3, 0), u32::MAX);
        assert_eq!(read32(&root, 0, 1 << 3 | 1, 0), u32::MAX);
        assert_eq!(read32(&root, 7, 0, 0), u32::MAX);
        root.config_write(0, 2 << 3, regs::SECONDARY_BUS, &[7]);
        assert_eq!(read32(&root, 7, 0, 0), FakeDevice::ID);
        assert_eq!(read32(&root, 7, 1 << 3, 0), u32::MAX, "only device 0 is behind a port");
        root.reset().unwrap();
        assert_eq!(read32(&root, 7, 0, 0), u32::MAX);
    }

    #[test]
    fn both_mechanisms_reach_the_same_space() {
        let root = root();
        root.port_write(0xcf8, &0x8000_0800u32.to_le_bytes());
        let mut data = [0; 2];
        root.port_read(0xcfe, &mut data);
        assert_eq!(u16::from_le_bytes(data), 0x000c);
        let mut data = [0; 8];
        root.ecam_read(1 << 15, &mut data);
        assert_eq!(data[..4], 0x000c_1b36u32.to_le_bytes());
        root.port_write(0xcf8, &0u32.to_le_bytes());
        let mut data = [0; 4];
        root.port_read(0xcfc, &mut data);
        assert_eq!(data, [0xff; 4], "the enable bit is off");
    }

    #[test]
    fn no_access_panics() {
        let root = root();
        for offset in [0, 1, 3, 0xfc, 0xfd, 0xff, 0x100, 0xffc, 0xffd, 0xfff, 0xf_ffff, u64::MAX] {
            for len in 0..=8 {
                let mut data = vec![0; len];
                root.ecam_read(offset, &mut data);
                root.ecam_write(offset, &data);
                root.memory_read(offset, &mut data);
                root.memory_write(offset, &data);
                root.port_read(offset as u16, &mut data);
                root.port_write(offset as u16, &data);
            }
        }
    }

    #[test]
    fn a_full_bus_says_so() {
        let root = empty();
        for index in 1..SLOTS {
            add(&root, Arc::new(FakeDevice::new(index as u8 - 1))).unwrap();
        }
        let full = |result| assert!(matches!(result, Err(MachineError::BusFull { limit: 31 })), "{result:?}");
        full(add(&root, Arc::new(FakeDevice::new(31))));
        full(root.add_port());
        // A function of a device that is there needs no slot.
        add(&root, Arc::new(FakeDevice::at(30, 1))).unwrap();
    }

    #[test]
    fn functions_of_one_device_share_a_slot() {
        let root = empty();
        for (device, function) in [(4, 1), (5, 0), (4, 0)] {
            add(&root, Arc::new(FakeDevice::at(device, function))).unwrap();
        }
        assert_eq!(root.ports().len(), 2);
        root.config_write(0, 1 << 3, regs::SECONDARY_BUS, &[7]);
        for (number, found) in [(0, true), (1, true), (2, false)] {
            assert_eq!(read32(&root, 7, number, 0) == FakeDevice::ID, found, "{number}");
        }
        let twice = add(&root, Arc::new(FakeDevice::at(4, 1)));
        assert!(matches!(twice, Err(MachineError::Twice { .. })));
    }

    #[test]
    fn free_ports_come_after_those_of_devices() {
        let root = empty();
        root.add_port().unwrap();
        root.add_port().unwrap();
        for device in 0..2 {
            add(&root, Arc::new(FakeDevice::new(device))).unwrap();
        }
        let occupied: Vec<_> = root.ports().iter().map(|port| port.slot().is_occupied()).collect();
        assert_eq!(occupied, [true, true, false, false]);
    }

    #[test]
    fn a_device_comes_and_goes() {
        let root = root();
        let whole = |device| {
            let function =
                |function| Arc::new(FakeDevice::at(device, function)) as Arc<dyn PassthroughDevice>;
            vec![function(1), function(0)]
        };
        assert!(matches!(root.plug(whole(9)), Err(MachineError::NoPort)));
        root.add_port().unwrap();
        assert!(matches!(root.plug(whole(1)), Err(MachineError::Twice { .. })));
        let mixed = vec![whole(8).remove(0), whole(9).remove(0)];
        assert!(matches!(root.plug(mixed), Err(MachineError::OtherDevice { .. })));
        let double = vec![whole(8).remove(0), whole(8).remove(0)];
        assert!(matches!(root.plug(double), Err(MachineError::Twice { .. })));
        let port = root.ports().remove(2);
        port.change(|slot| slot.windows = Some(PortWindows::default()));
        assert!(matches!(root.plug(whole(9)), Err(MachineError::Placement(_))));
        port.change(|slot| slot.windows = None);
        root.config_write(0, 3 << 3, regs::SECONDARY_BUS, &[9]);
        assert_eq!(read32(&root, 9, 0, 0), u32::MAX);
        root.plug(whole(9)).unwrap();
        assert_eq!((read32(&root, 9, 0, 0), read32(&root, 9, 1, 0)), (FakeDevice::ID, FakeDevice::ID));
        let address = |device| FakeDevice::at(device, 1).address();
        assert!(matches!(root.unplug(address(8)), Err(MachineError::NotThere { .. })));
        assert_eq!(root.unplug(address(9)).unwrap().len(), 2);
        assert_eq!((read32(&root, 9, 0, 0), root.devices().len()), (u32::MAX, 2));
        root.plug(whole(9)).unwrap();
    }

    #[test]
    fn ports_reach_a_device_through_the_window_of_its_port_alone() {
        let vmm = SimVmm::new(&[], &SimLog::default()).unwrap();
        let root = PciRoot::new(vmm.clone(), vmm.bars().clone(), Arc::new(Lifecycle::new().unwrap()));
        let device = Arc::new(FakeDevice::new(1));
        add(&root, device.clone()).unwrap();
        let put = |address: u64| {
            let ports = DecodedBar { bar: 0, address, size: 0x20, io: true };
            vmm.bars().set(device.address(), &[ports]);
        };
        let read = |port, len: usize| {
            let mut data = vec![0; len];
            root.io_read(port, &mut data);
            data
        };
        put(0x2000);
        assert_eq!(read(0x2000, 4), [0xff; 4], "the port forwards nothing");
        root.config_write(0, 1 << 3, regs::IO_BASE, &[0x00, 0x20]);
        root.config_write(0, 1 << 3, regs::COMMAND, &regs::COMMAND_IO.to_le_bytes());
        for (port, len, reached) in
            [(0x2000, 4, true), (0x2010, 1, true), (0x2020, 1, false), (0x1fff, 2, false)]
        {
            assert_eq!(read(port, len) == vec![0xa5; len], reached, "{port:#x}");
        }
        // Over what the VMM has: config space, its console, ACPI.
        for port in [0xcf8, 0x3f8, 0x600, 0] {
            put(port);
            assert_eq!(read(port as u16, 1), [0xff], "{port:#x}");
        }
        // Past the window of its port.
        put(0x2fe0);
        assert_eq!(read(0x2fff, 1), [0xa5]);
        put(0x3000);
        assert_eq!(read(0x3000, 1), [0xff]);
    }

    #[test]
    fn pins_lead_to_the_lines_of_the_slot_above() {
        for slot in 0..32 {
            let lines = layout::intx_lines(slot);
            assert!(lines.iter().all(|line| (16..layout::IO_APIC_PINS).contains(line)), "{lines:?}");
            // A bridge swizzles by the number of the device behind it: 0.
            assert_eq!(lines[1], layout::intx_lines(slot + 1)[0]);
        }
        let root = empty();
        root.add_port().unwrap();
        let started =
            [(0, 0), (0, 1), (1, 0)].map(|(device, function)| Arc::new(FakeDevice::at(device, function)));
        for device in &started {
            add(&root, device.clone()).unwrap();
        }
        root.reset().unwrap();
        root.place(&(1 << 32..1 << 40)).unwrap();
        // Firmware notes the line of each function's pin.
        for (bus, number, slot, pin) in [(1, 0, 1, 0), (1, 1, 1, 1), (2, 0, 2, 0)] {
            let line = layout::intx_lines(slot)[pin];
            assert_eq!(read32(&root, bus, number, regs::INTERRUPT_LINE), (pin as u32 + 1) << 8 | line);
        }
        // One that comes while the guest runs.
        let comes = Arc::new(FakeDevice::new(9));
        assert_eq!(comes.lines(), None);
        root.plug(vec![comes.clone()]).unwrap();
        let lines = [&started[0], &started[2], &comes].map(|device| device.lines());
        assert_eq!(lines, [1, 2, 3].map(|slot| Some(layout::intx_lines(slot))));
    }
}
