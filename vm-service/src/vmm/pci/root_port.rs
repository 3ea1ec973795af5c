//! A PCI Express root port with a slot: a type 1 header, the functions of the device that is in the slot, if any, and what
//! tells the guest that one came or went (native PCI Express hot-plug, PCI Express Base 6.0, 6.7.3).
//!
//! A device that comes or goes changes presence and link at once, and the port interrupts: nobody has to wait for what comes. One
//! may be in the slot before it answers, as real ones are after they were reset: the guest waits for the link meanwhile anyway.
//! The slot has an attention button, by which the guest is asked to let go of a device, and a power indicator, by which it tells:
//! blinking while it is about to, off when it has, on again when it keeps the device (6.7.1.1.2, 6.7.1.5). It has no power
//! controller, as what comes would wait for the guest to switch it on; and with nothing to control there are no commands to wait
//! for, which the slot says.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use vm_passthrough::guest::{MsiMessage, Vmm, VmmError};
use vm_passthrough::pci::placement::PortWindows;
use vm_passthrough::pci::regs;
use vm_passthrough::vfio::ErrorSeverity;
use vm_passthrough::{PassthroughDevice, PciAddress};

use super::link::{self, DeviceLink};
use super::vector::Vector;
use super::{COMMAND_OTHER, ConfigSpace, ExpectedFunction, root_errors};
use crate::vmm::layout;

/// 32 GT/s.
const TARGET_SPEED: u16 = 5;
/// What changes when a device comes or goes.
const CHANGED: u16 = regs::EXP_SLTSTA_PDC | regs::EXP_SLTSTA_DLLSC;

/// How long a device may be in its slot without an answer. Software waits for 100 ms after the link is up, and for as long as
/// 1 s before it gives a device up (PCI Express Base 6.0, 6.6.1); Linux for both together.
pub(super) const READY: Duration = Duration::from_millis(900);

/// What a guest answers who asks it to let go of the device in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum GuestAnswer {
    /// It has.
    LetGo,
    /// It was about to, and keeps the device all the same.
    Kept,
    /// It has no ear for the button: nothing in it drives its slots.
    Deaf,
}

/// The guest was asked to let go of the device.
struct Asked {
    stage: Stage,
    answer: Box<dyn FnOnce(GuestAnswer) + Send>,
}

/// How far the guest has come in that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The indicator blinks for another reason: the button is pressed when that is over.
    Busy,
    /// The button was pressed.
    Pressed,
    /// The guest blinks.
    Blinking,
}

impl fmt::Debug for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Asked").field(&self.stage).finish()
    }
}

/// A root port and what is in its slot.
#[derive(Debug)]
pub(in crate::vmm) struct RootPort {
    /// Locked before `state`.
    slot: RwLock<Slot>,
    state: Mutex<State>,
    interrupt: Vector,
    /// Offsets of the capabilities.
    express: u16,
    msi: u16,
}

/// What is in a port's slot: the functions of one device, or none.
#[derive(Debug)]
pub(in crate::vmm) struct Slot {
    /// The interrupt lines that their pins lead to. The port's own slot decides that: behind it is device 0, whose pins are not
    /// swizzled (PCI-to-PCI Bridge 1.2, 9.1).
    pub(super) lines: [u32; 4],
    /// Those that are there, by their address on the host.
    pub(in crate::vmm) functions: Vec<Arc<dyn PassthroughDevice>>,
    /// Those that the guest starts with, whether they have arrived or not, likewise.
    pub(super) expected: Vec<ExpectedFunction>,
    /// What comes, and does not answer yet.
    pub(super) inserted: Option<Inserted>,
    /// Where BARs have their place, once that is decided.
    pub(super) windows: Option<PortWindows>,
}

/// A device that is in a slot, and does not answer yet.
#[derive(Debug)]
pub(super) struct Inserted {
    /// One of its functions, on the host.
    pub(super) name: PciAddress,
    pub(super) since: Instant,
}

impl Slot {
    /// Whether the guest sees a device.
    pub(super) fn is_occupied(&self) -> bool {
        !self.functions.is_empty() || !self.expected.is_empty() || self.inserted.is_some()
    }

    /// Whether the device of this name comes.
    pub(super) fn has_inserted(&self, name: PciAddress) -> bool {
        self.inserted.as_ref().is_some_and(|inserted| inserted.name == name)
    }

    /// The functions that are expected and not there.
    pub(super) fn awaited(&self) -> impl Iterator<Item = &ExpectedFunction> {
        let is_there = |address| self.functions.iter().any(|function| function.address() == address);
        self.expected.iter().filter(move |expected| !is_there(expected.address))
    }
}

/// What the guest sees by this number of what is sorted by its address on the host: the host's number, and the first is
/// function 0, without which there would be no device.
fn numbered<T>(functions: &[T], number: u8, address: impl Fn(&T) -> PciAddress) -> Option<&T> {
    match number {
        0 => functions.first(),
        _ => functions.iter().skip(1).find(|function| address(function).function() == number),
    }
}

#[derive(Debug)]
struct State {
    config: ConfigSpace,
    /// Whether the guest was interrupted for the events that are set, of hot-plug and of errors: it is again when none was, and
    /// one is.
    notified: [bool; 2],
    /// Who asked for the device.
    asked: Option<Asked>,
}

impl RootPort {
    /// The port that is device `device` of a root bus, with nothing in its own slot, which has the number `slot`.
    ///
    /// # Errors
    /// When there is no interrupt left for it.
    pub(in crate::vmm) fn new(device: u8, slot: u8, vmm: Arc<dyn Vmm>) -> Result<Self, VmmError> {
        let mut config = ConfigSpace::new();
        // The id that QEMU registered for a generic root port.
        config.set(0, &[0x36, 0x1b, 0x0c, 0x00]);
        config.set(regs::CLASS_REVISION, &[0, 0, 0x04, 0x06]);
        config.set(regs::HEADER_TYPE, &[1]);
        let command = regs::COMMAND_IO | regs::COMMAND_MEMORY | regs::COMMAND_MASTER | COMMAND_OTHER;
        config.allow(regs::COMMAND, &command.to_le_bytes());
        config.allow(regs::PRIMARY_BUS, &[0xff; 3]);
        // Windows of whole 4 KiB (I/O) and 1 MiB (memory); the prefetchable one has 64 bits.
        config.allow(regs::IO_BASE, &[0xf0, 0xf0]);
        config.allow(regs::MEMORY_BASE, &[0xf0, 0xff, 0xf0, 0xff]);
        config.set(regs::PREF_MEMORY_BASE, &[1, 0, 1, 0]);
        config.allow(regs::PREF_MEMORY_BASE, &[0xf0, 0xff, 0xf0, 0xff]);
        config.allow(regs::PREF_BASE_UPPER32, &[0xff; 8]);
        config.allow(regs::INTERRUPT_LINE, &[0xff]);
        config.allow(
            regs::BRIDGE_CONTROL,
            &(1 | regs::BRIDGE_CTL_SERR | regs::BRIDGE_CTL_BUS_RESET).to_le_bytes(),
        );
        // Windows are closed while base is above limit.
        config.set(regs::IO_BASE, &[0xf0, 0]);
        config.set(regs::MEMORY_BASE, &[0xf0, 0xff, 0, 0]);
        config.set(regs::PREF_MEMORY_BASE, &[0xf1, 0xff, 1, 0]);
        let express = config.add_capability(0x10, &express_capability(slot));
        // Device, link, slot and root control; device control 2 and link control 2.
        config.allow(express + regs::EXP_DEVCTL, &[0xff, 0x7f]);
        config.allow(express + regs::EXP_LNKCTL, &[0xfb, 0x0f]);
        let reports = regs::EXP_SLTCTL_ABPE | regs::EXP_SLTCTL_PDCE | regs::EXP_SLTCTL_DLLSCE;
        let slot_control = reports | regs::EXP_SLTCTL_HPIE | regs::EXP_SLTCTL_PIC;
        config.allow(express + regs::EXP_SLTCTL, &slot_control.to_le_bytes());
        config.allow_clearing(express + regs::EXP_SLTSTA, &(CHANGED | regs::EXP_SLTSTA_ABP).to_le_bytes());
        config.allow(express + regs::EXP_RTCTL, &[0x1f, 0x00]);
        config.allow(express + regs::EXP_DEVCTL2, &[0x1f, 0x00]);
        config.allow(express + regs::EXP_LNKCTL2, &[0xff, 0x1f]);
        // One vector, a 64-bit address, a mask (PCI Express Base 6.0, 7.7.1).
        let msi = config.add_capability(0x05, &[&[0x80, 1][..], &[0; 20]].concat());
        config.allow(msi + regs::MSI_FLAGS, &[1]);
        config.allow(msi + regs::MSI_ADDRESS_LO, &[0xfc, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
        config.allow(msi + regs::MSI_DATA_64, &[0xff; 2]);
        config.allow(msi + regs::MSI_MASK_64, &[1]);
        root_errors::add(&mut config);
        link::show(&mut config, express, false, None);
        config.freeze();
        Ok(Self {
            slot: RwLock::new(Slot {
                lines: layout::intx_lines(device),
                functions: Vec::new(),
                expected: Vec::new(),
                inserted: None,
                windows: None,
            }),
            state: Mutex::new(State { config, notified: [false; 2], asked: None }),
            interrupt: Vector::new(vmm)?,
            express,
            msi,
        })
    }

    /// What is in the slot.
    pub(in crate::vmm) fn slot(&self) -> RwLockReadGuard<'_, Slot> {
        self.slot.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The function that is there by this number.
    pub(in crate::vmm) fn function(&self, number: u8) -> Option<Arc<dyn PassthroughDevice>> {
        numbered(&self.slot().functions, number, |function| function.address()).cloned()
    }

    /// Changes what is in the slot. A guest that runs is notified when the slot was empty or is.
    pub(in crate::vmm) fn change<T>(&self, change: impl FnOnce(&mut Slot) -> T) -> T {
        let mut slot = self.slot.write().unwrap_or_else(PoisonError::into_inner);
        let was_occupied = slot.is_occupied();
        let answer = change(&mut slot);
        slot.functions.sort_by_key(|function| function.address());
        slot.expected.sort_by_key(|expected| expected.address);
        if was_occupied != slot.is_occupied() {
            let mut state = self.state();
            state.asked = None;
            self.show(&mut state.config, !was_occupied, CHANGED);
            self.notify(&mut state);
        }
        answer
    }

    /// Has a device answer in the slot, which has none that does. A guest that may have waited for it in vain sees it come again.
    pub(in crate::vmm) fn fill(&self, device: Vec<Arc<dyn PassthroughDevice>>) {
        let since = self.slot().inserted.as_ref().map(|inserted| inserted.since);
        if since.is_some_and(|since| since.elapsed() >= READY) {
            self.change(|slot| slot.inserted = None);
        }
        self.change(|slot| (slot.functions, slot.inserted) = (device, None));
    }

    /// Asks the guest to let go of the device, by the button. `answer` is called at most once, soon or when the guest answers;
    /// it is dropped when the slot is emptied. Who asks again only has the answer come there.
    pub(in crate::vmm) fn ask(&self, answer: Box<dyn FnOnce(GuestAnswer) + Send>) {
        let mut state = self.state();
        let control = state.config.u16(self.express + regs::EXP_SLTCTL);
        if control & regs::EXP_SLTCTL_ABPE == 0 {
            state.asked = None;
            return answer(GuestAnswer::Deaf);
        }
        match (&mut state.asked, control & regs::EXP_SLTCTL_PIC) {
            (Some(asked), _) => asked.answer = answer,
            (None, regs::EXP_SLTCTL_PWR_IND_OFF) => answer(GuestAnswer::LetGo),
            (None, regs::EXP_SLTCTL_PWR_IND_BLINK) => {
                state.asked = Some(Asked { stage: Stage::Busy, answer })
            }
            (None, _) => {
                state.asked = Some(Asked { stage: Stage::Pressed, answer });
                self.press(&mut state);
            }
        }
    }

    /// Asks the guest no more: takes the button's press back, by another one if the guest has seen the first. One that has let
    /// its driver go by then goes on.
    pub(in crate::vmm) fn unask(&self) {
        let mut state = self.state();
        let Some(asked) = state.asked.take() else { return };
        let at = self.express + regs::EXP_SLTSTA;
        let status = state.config.u16(at);
        if status & regs::EXP_SLTSTA_ABP != 0 {
            state.config.set(at, &(status & !regs::EXP_SLTSTA_ABP).to_le_bytes());
            // What happens next interrupts the guest again.
            self.notify(&mut state);
        } else if asked.stage != Stage::Busy {
            self.press(&mut state);
        }
    }

    /// Presses the button.
    fn press(&self, state: &mut State) {
        let at = self.express + regs::EXP_SLTSTA;
        let status = state.config.u16(at) | regs::EXP_SLTSTA_ABP;
        state.config.set(at, &status.to_le_bytes());
        self.notify(state);
    }

    /// Follows the indicator, which is how the guest answers.
    fn follow(&self, state: &mut State) {
        let indicator = state.config.u16(self.express + regs::EXP_SLTCTL) & regs::EXP_SLTCTL_PIC;
        let Some(asked) = &mut state.asked else { return };
        let answer = match (asked.stage, indicator) {
            (_, regs::EXP_SLTCTL_PWR_IND_OFF) => GuestAnswer::LetGo,
            (Stage::Blinking, regs::EXP_SLTCTL_PWR_IND_ON) => GuestAnswer::Kept,
            (Stage::Pressed, regs::EXP_SLTCTL_PWR_IND_BLINK) => return asked.stage = Stage::Blinking,
            (Stage::Busy, regs::EXP_SLTCTL_PWR_IND_ON) => {
                asked.stage = Stage::Pressed;
                return self.press(state);
            }
            _ => return,
        };
        if let Some(asked) = state.asked.take() {
            (asked.answer)(answer);
        }
    }

    /// The bus behind it, 0 while it has none.
    pub(in crate::vmm) fn secondary_bus(&self) -> u8 {
        self.state().config.u8(regs::SECONDARY_BUS)
    }

    /// Whether it forwards a memory access to the device.
    pub(in crate::vmm) fn forwards_memory(&self, address: u64) -> bool {
        let config = &self.state().config;
        config.u16(regs::COMMAND) & regs::COMMAND_MEMORY != 0
            && (memory_window(config).contains(&address) || prefetch_window(config).contains(&address))
    }

    /// Whether it forwards an access to a port to the device.
    pub(in crate::vmm) fn forwards_port(&self, port: u16) -> bool {
        let config = &self.state().config;
        config.u16(regs::COMMAND) & regs::COMMAND_IO != 0 && io_window(config).contains(&port)
    }

    /// Reads its own config space.
    pub(in crate::vmm) fn config_read(&self, offset: u16, data: &mut [u8]) {
        let registers = [regs::EXP_LNKCAP, regs::EXP_LNKSTA & !3, regs::EXP_LNKCAP2];
        // The device is asked while nothing is locked.
        let is_of_link = registers.contains(&(offset & !3).wrapping_sub(self.express));
        let device = if is_of_link { self.link() } else { None };
        let mut state = self.state();
        if is_of_link {
            let active = state.config.u16(self.express + regs::EXP_LNKSTA) & regs::EXP_LNKSTA_DLLLA != 0;
            link::show(&mut state.config, self.express, active, device);
        }
        if offset & !3 == self.msi + regs::MSI_PENDING_64 {
            state.config.set(self.msi + regs::MSI_PENDING_64, &[self.interrupt.is_pending().into()]);
        }
        state.config.read(offset, data);
    }

    /// The link of the device in the slot, by its first function, or what was found of it where it has not arrived.
    fn link(&self) -> Option<DeviceLink> {
        let slot = self.slot();
        if slot.awaited().next().is_some() {
            return slot.expected.first()?.link;
        }
        let function = slot.functions.first()?.clone();
        drop(slot);
        DeviceLink::of(&*function)
    }

    /// Has the payload of the device in the slot, the least of its functions', which the host has set.
    pub(super) fn take_payload(&self) {
        let functions = self.slot().functions.clone();
        let payload = functions.iter().map(|function| link::payload_of(&**function)).min();
        link::set_payload(&mut self.state().config, self.express, payload.unwrap_or_default());
    }

    /// Writes its own config space; whether that asks for a [reset](Self::reset_bus) of what is in the slot.
    pub(in crate::vmm) fn config_write(&self, offset: u16, data: &[u8]) -> bool {
        let mut state = self.state();
        let before = state.config.u16(regs::BRIDGE_CONTROL);
        state.config.write(offset, data);
        self.notify(&mut state);
        self.follow(&mut state);
        state.config.u16(regs::BRIDGE_CONTROL) & !before & regs::BRIDGE_CTL_BUS_RESET != 0
    }

    /// Reads config space of a function in the slot; all ones where there is none.
    pub(in crate::vmm) fn function_read(&self, number: u8, offset: u16, data: &mut [u8]) {
        let Some(function) = self.function(number) else { return data.fill(0xff) };
        function.config_read(offset, data);
        show_several(self.slot().functions.len(), offset, data);
    }

    /// As [`function_read`](Self::function_read), without what has not arrived; `false` when that is needed.
    pub(in crate::vmm) fn early_read(&self, number: u8, offset: u16, data: &mut [u8]) -> bool {
        let slot = self.slot();
        match numbered(&slot.expected, number, |expected| expected.address) {
            Some(expected) => {
                let known = expected.read(offset, data);
                show_several(slot.expected.len(), offset, data);
                known
            }
            None => {
                data.fill(0xff);
                slot.functions.is_empty() || !slot.expected.is_empty()
            }
        }
    }

    /// Resets what is in the slot, until vCPUs are `stopping`: whoever stops them waits for one function then, and not for all.
    /// Functions that can be reset only along with each other need each other stopped.
    pub(in crate::vmm) fn reset_bus(&self, stopping: impl Fn() -> bool) {
        let functions = self.slot().functions.clone();
        if functions.len() > 1 {
            for function in functions.iter().take_while(|_| !stopping()) {
                if let Err(error) = function.stop() {
                    tracing::debug!(device = %function.address(), %error, "it could not be stopped; resetting it tells");
                }
            }
        }
        for function in functions.iter().take_while(|_| !stopping()) {
            if let Err(error) = function.reset() {
                tracing::warn!(device = %function.address(), %error, "the guest reset the bus, but the device was not reset");
            }
        }
    }

    /// Shows the guest that a function in the slot had an uncorrectable error, and interrupts it if it wants that.
    pub(in crate::vmm) fn report_error(&self, address: PciAddress, severity: ErrorSeverity) {
        let slot = self.slot();
        let Some(at) = slot.functions.iter().position(|function| function.address() == address) else {
            return;
        };
        let (function, number) = (slot.functions[at].clone(), if at == 0 { 0 } else { address.function() });
        drop(slot);
        if function.report_error(severity) {
            let mut state = self.state();
            let source = u16::from(state.config.u8(regs::SECONDARY_BUS)) << 8 | u16::from(number);
            root_errors::receive(&mut state.config, source, severity);
            self.notify(&mut state);
        }
    }

    /// Puts the port to its state after power-on, with what is in its slot; that is left alone.
    pub(in crate::vmm) fn reset(&self) {
        let mut slot = self.slot.write().unwrap_or_else(PoisonError::into_inner);
        slot.windows = None;
        // Whoever starts now may look for it but once.
        slot.inserted = None;
        let mut state = self.state();
        state.config.reset();
        let occupied = slot.is_occupied();
        self.show(&mut state.config, occupied, 0);
        let indicator = if occupied { regs::EXP_SLTCTL_PWR_IND_ON } else { regs::EXP_SLTCTL_PWR_IND_OFF };
        state.config.set(self.express + regs::EXP_SLTCTL, &indicator.to_le_bytes());
        self.notify(&mut state);
        self.interrupt.clear();
        // The guest that was asked is no more, and has let go of everything.
        if let Some(asked) = state.asked.take() {
            (asked.answer)(GuestAnswer::LetGo);
        }
    }

    /// Shows whether something is in the slot, and what has changed with that.
    fn show(&self, config: &mut ConfigSpace, present: bool, changed: u16) {
        // What is read of the link, the device is asked then.
        link::show(config, self.express, present, None);
        let status = if present { regs::EXP_SLTSTA_PDS } else { 0 };
        config.set(self.express + regs::EXP_SLTSTA, &(status | changed).to_le_bytes());
    }

    /// Lets the interrupt lead to where the guest wants it, and raises it for hot-plug events and errors that the guest wants and
    /// was not interrupted for (PCI Express Base 6.0, 6.7.3.4 and 6.2.4.1.2).
    fn notify(&self, state: &mut State) {
        let config = &state.config;
        let enabled = config.u16(self.msi + regs::MSI_FLAGS) & 1 != 0
            && config.u32(self.msi + regs::MSI_MASK_64) & 1 == 0
            && config.u16(regs::COMMAND) & regs::COMMAND_MASTER != 0;
        let address = u64::from(config.u32(self.msi + regs::MSI_ADDRESS_LO))
            | u64::from(config.u32(self.msi + regs::MSI_ADDRESS_HI)) << 32;
        let data = config.u16(self.msi + regs::MSI_DATA_64).into();
        self.interrupt.set(enabled.then_some(MsiMessage { address, data }));

        let (control, status) =
            (config.u16(self.express + regs::EXP_SLTCTL), config.u16(self.express + regs::EXP_SLTSTA));
        let wanted = |enable: u16, event: u16| control & enable != 0 && status & event != 0;
        let hot_plug = control & regs::EXP_SLTCTL_HPIE != 0
            && (wanted(regs::EXP_SLTCTL_ABPE, regs::EXP_SLTSTA_ABP)
                || wanted(regs::EXP_SLTCTL_PDCE, regs::EXP_SLTSTA_PDC)
                || wanted(regs::EXP_SLTCTL_DLLSCE, regs::EXP_SLTSTA_DLLSC));
        let due = [hot_plug, root_errors::is_due(config)];
        if due.iter().zip(state.notified).any(|(&due, notified)| due && !notified) {
            self.interrupt.signal();
        }
        state.notified = due;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sets the multifunction bit in what was read, where there are several functions. One that is gone reads all ones.
fn show_several(count: usize, offset: u16, data: &mut [u8]) {
    let header_type = regs::HEADER_TYPE.checked_sub(offset).and_then(|at| data.get_mut(usize::from(at)));
    if let Some(header_type) = header_type.filter(|header_type| count > 1 && **header_type != 0xff) {
        *header_type |= regs::HEADER_TYPE_MFD;
    }
}

fn io_window(config: &ConfigSpace) -> RangeInclusive<u16> {
    let end = |register| u16::from(config.u8(register) & 0xf0) << 8;
    end(regs::IO_BASE)..=end(regs::IO_LIMIT) | 0xfff
}

fn memory_window(config: &ConfigSpace) -> RangeInclusive<u64> {
    let base = u64::from(config.u16(regs::MEMORY_BASE) & 0xfff0) << 16;
    let limit = u64::from(config.u16(regs::MEMORY_LIMIT) & 0xfff0) << 16 | 0xf_ffff;
    base..=limit
}

fn prefetch_window(config: &ConfigSpace) -> RangeInclusive<u64> {
    let end = |low, high| u64::from(config.u16(low) & 0xfff0) << 16 | u64::from(config.u32(high)) << 32;
    let base = end(regs::PREF_MEMORY_BASE, regs::PREF_BASE_UPPER32);
    let limit = end(regs::PREF_MEMORY_LIMIT, regs::PREF_LIMIT_UPPER32) | 0xf_ffff;
    base..=limit
}

/// PCI Express capability, version 2, of a root port with an empty slot (PCI Express Base 6.0, 7.5.3).
fn express_capability(slot: u8) -> [u8; 58] {
    let mut body = [0; 58];
    let mut put = |offset: u16, value: &[u8]| {
        let at = usize::from(offset) - 2;
        body[at..at + value.len()].copy_from_slice(value);
    };
    // Version 2.
    put(regs::EXP_FLAGS, &(2 | regs::EXP_TYPE_ROOT_PORT << 4 | regs::EXP_FLAGS_SLOT).to_le_bytes());
    // Role-based error reporting.
    put(regs::EXP_DEVCAP, &(1u32 << 15).to_le_bytes());
    // With the port's number.
    put(regs::EXP_LNKCAP, &(regs::EXP_LNKCAP_DLLLARC | u32::from(slot) << 24).to_le_bytes());
    // With the slot's number.
    let hot_plug = regs::EXP_SLTCAP_HPS | regs::EXP_SLTCAP_HPC | regs::EXP_SLTCAP_NCCS;
    let controls = regs::EXP_SLTCAP_ABP | regs::EXP_SLTCAP_PIP;
    put(regs::EXP_SLTCAP, &(hot_plug | controls | u32::from(slot) << 19).to_le_bytes());
    put(regs::EXP_SLTCTL, &regs::EXP_SLTCTL_PWR_IND_OFF.to_le_bytes());
    put(regs::EXP_LNKCTL2, &TARGET_SPEED.to_le_bytes());
    body
}

#[cfg(test)]
mod tests {
    use vm_passthrough::sim::{SimLog, SimVmm};

    use super::super::root_errors::AER;
    use super::*;
    use crate::vmm::testing::FakeDevice;

    const EXPRESS: u16 = 0x40;
    const MSI: u16 = 0x7c;
    const MESSAGE: MsiMessage = MsiMessage { address: 0x1_fee0_1000, data: 0x41 };

    fn port() -> (RootPort, Arc<SimVmm>) {
        let vmm = SimVmm::new(&[], &SimLog::default()).unwrap();
        (RootPort::new(3, 3, vmm.clone()).unwrap(), vmm)
    }

    fn put(port: &RootPort, function: u8) -> Arc<FakeDevice> {
        let device = Arc::new(FakeDevice::at(1, function));
        port.change(|slot| slot.functions.push(device.clone()));
        device
    }

    fn u16_of(port: &RootPort, offset: u16) -> u16 {
        let mut data = [0; 2];
        port.config_read(offset, &mut data);
        u16::from_le_bytes(data)
    }

    #[test]
    fn windows_filter() {
        let (port, _) = port();
        let opened = |address| port.forwards_memory(address);
        assert!(!opened(0xc000_0000));
        port.config_write(regs::MEMORY_BASE, &[0x00, 0xc0, 0x10, 0xc0]);
        assert!(!opened(0xc000_0000), "memory decode is off");
        port.config_write(regs::COMMAND, &regs::COMMAND_MEMORY.to_le_bytes());
        assert!(opened(0xc000_0000) && opened(0xc01f_ffff));
        assert!(!opened(0xbfff_ffff) && !opened(0xc020_0000));
        port.config_write(regs::PREF_MEMORY_BASE, &[0x01, 0x00, 0xf1, 0xff]);
        port.config_write(regs::PREF_BASE_UPPER32, &[0x40, 0, 0, 0, 0x41, 0, 0, 0]);
        assert!(opened(0x40_0000_0000) && opened(0x41_ffff_ffff) && !opened(0x42_0000_0000));
        let ports = |number| port.forwards_port(number);
        assert!(!ports(0) && !ports(0x3f8) && !ports(0xffff));
        port.config_write(regs::IO_BASE, &[0x20, 0x3f]);
        assert!(!ports(0x2000), "I/O decode is off");
        port.config_write(regs::COMMAND, &regs::COMMAND_IO.to_le_bytes());
        assert!(ports(0x2000) && ports(0x3fff) && !ports(0x1fff) && !ports(0x4000) && !opened(0xc000_0000));
        port.config_write(regs::COMMAND, &(regs::COMMAND_IO | regs::COMMAND_MEMORY).to_le_bytes());
        port.reset();
        assert!(!opened(0xc000_0000) && !opened(0x40_0000_0000) && !ports(0x2000));
    }

    #[test]
    fn a_secondary_bus_reset_resets_every_function_once() {
        let (port, _) = port();
        let devices = [put(&port, 0), put(&port, 1)];
        for value in
            [0u16, regs::BRIDGE_CTL_BUS_RESET, regs::BRIDGE_CTL_BUS_RESET, 0, regs::BRIDGE_CTL_BUS_RESET]
        {
            if port.config_write(regs::BRIDGE_CONTROL, &value.to_le_bytes()) {
                port.reset_bus(|| false);
            }
        }
        let resets = || devices.each_ref().map(|device| device.resets());
        assert_eq!(resets(), [2, 2]);
        // vCPUs are to leave while the first is reset.
        port.reset_bus(|| resets() == [3, 2]);
        assert_eq!(resets(), [3, 2]);
    }

    #[test]
    fn function_0_is_there_and_says_whether_there_are_more() {
        fn check(host: &[u8], guest: &[u8], multifunction: bool) {
            let (port, _) = port();
            for &function in host {
                put(&port, function);
            }
            let seen: Vec<u8> = (0..8).filter(|&number| port.function(number).is_some()).collect();
            assert_eq!(seen, guest, "{host:?}");
            for number in 0..8 {
                for (offset, len) in [(0x0c, 4), (0x0e, 1), (0x0e, 2)] {
                    let mut data = vec![0; len];
                    port.function_read(number, offset, &mut data);
                    let header_type = data[usize::from(0x0e - offset)];
                    let expect = if seen.contains(&number) { u8::from(multifunction) << 7 } else { 0xff };
                    assert_eq!(header_type, expect, "{host:?} {number} {offset:#x}");
                }
            }
        }
        check(&[], &[], false);
        check(&[0], &[0], false);
        check(&[5], &[0], false);
        check(&[1, 0], &[0, 1], true);
        check(&[3, 2, 7], &[0, 3, 7], true);
    }

    #[test]
    fn a_change_of_the_slot_is_seen_and_interrupts_the_guest_that_asked() {
        let (port, vmm) = port();
        assert_eq!(u16_of(&port, EXPRESS), 0x7c10, "the capabilities are where the test looks");
        assert_eq!(u16_of(&port, MSI) & 0xff, 0x05);
        let status = || u16_of(&port, EXPRESS + regs::EXP_SLTSTA);
        let both = CHANGED;

        put(&port, 0);
        assert_eq!(status(), regs::EXP_SLTSTA_PDS | both);
        assert_eq!(vmm.delivered(), [], "nobody asked for interrupts");
        port.reset();
        assert_eq!(status(), regs::EXP_SLTSTA_PDS, "what is there at the start is no event");
        assert_eq!(u16_of(&port, EXPRESS + regs::EXP_LNKSTA), 0x105 | regs::EXP_LNKSTA_DLLLA);

        listen(&port);
        let control = regs::EXP_SLTCTL_HPIE | regs::EXP_SLTCTL_DLLSCE | regs::EXP_SLTCTL_PDCE;
        port.config_write(EXPRESS + regs::EXP_SLTCTL, &control.to_le_bytes());
        assert_eq!(vmm.delivered(), []);

        port.change(|slot| slot.functions.clear());
        assert_eq!(status(), both);
        assert_eq!(u16_of(&port, EXPRESS + regs::EXP_LNKSTA), 0);
        assert_eq!(vmm.delivered(), [MESSAGE]);
        // A second event is not signalled before the first is taken.
        put(&port, 0);
        put(&port, 1);
        assert_eq!((status(), vmm.delivered()), (regs::EXP_SLTSTA_PDS | both, vec![]));
        port.config_write(EXPRESS + regs::EXP_SLTSTA, &regs::EXP_SLTSTA_PDC.to_le_bytes());
        assert_eq!((status(), vmm.delivered()), (regs::EXP_SLTSTA_PDS | regs::EXP_SLTSTA_DLLSC, vec![]));
        port.config_write(EXPRESS + regs::EXP_SLTSTA, &[0xff; 2]);
        assert_eq!((status(), vmm.delivered()), (regs::EXP_SLTSTA_PDS, vec![]));

        // What comes while the vector is masked is pending, and delivered when it no longer is.
        port.config_write(MSI + regs::MSI_MASK_64, &[1]);
        port.change(|slot| slot.functions.clear());
        assert_eq!((vmm.delivered(), u16_of(&port, MSI + regs::MSI_PENDING_64)), (vec![], 1));
        port.config_write(MSI + regs::MSI_MASK_64, &[0]);
        assert_eq!((vmm.delivered(), u16_of(&port, MSI + regs::MSI_PENDING_64)), (vec![MESSAGE], 0));
        port.reset();
        assert_eq!((status(), vmm.delivered(), vmm.routes()), (0, vec![], 1));
        drop(port);
        assert_eq!(vmm.routes(), 0);
    }

    #[test]
    fn the_port_has_the_link_and_the_payload_of_its_device() {
        let (port, _) = port();
        let most = || u16_of(&port, EXPRESS + regs::EXP_LNKCAP) & 0x3ff;
        let now = || u16_of(&port, EXPRESS + regs::EXP_LNKSTA);
        assert_eq!((most(), now()), (0x105, 0));
        // 64 GT/s and 8 lanes, which it does not always have.
        let device = put(&port, 2);
        device.set_link(0x086, 0x086);
        assert_eq!((most(), now()), (0x106, 0x086 | regs::EXP_LNKSTA_DLLLA));
        assert_eq!(u16_of(&port, EXPRESS + regs::EXP_LNKCAP2), 0x7e);
        device.set_link(0x086, 0x041);
        assert_eq!(now(), 0x041 | regs::EXP_LNKSTA_DLLLA);
        // That of the guest's function 0 counts; in functions of one device it is the same.
        put(&port, 1).set_link(0x083, 0x043);
        assert_eq!((most(), now()), (0x105, 0x043 | regs::EXP_LNKSTA_DLLLA));

        port.take_payload();
        let payload = || u16_of(&port, EXPRESS + regs::EXP_DEVCTL) >> 5 & 7;
        assert_eq!((u16_of(&port, EXPRESS + regs::EXP_DEVCAP) & 7, payload()), (1, 1));
        // Another function sends less.
        put(&port, 4);
        port.take_payload();
        assert_eq!(payload(), 0);

        // What does not answer yet is known by what was found.
        let expected = ExpectedFunction::like(&*device);
        port.change(|slot| slot.functions.clear());
        assert_eq!((most(), now()), (0x105, 0));
        port.change(|slot| slot.expected.push(expected));
        assert_eq!((most(), now()), (0x106, 0x041 | regs::EXP_LNKSTA_DLLLA));
    }

    #[test]
    fn an_error_of_a_function_interrupts_the_guest_that_asked() {
        let (port, vmm) = port();
        let devices = [put(&port, 2), put(&port, 3)];
        port.reset();
        listen(&port);
        port.config_write(regs::SECONDARY_BUS, &[5]);
        port.config_write(regs::BRIDGE_CONTROL, &regs::BRIDGE_CTL_SERR.to_le_bytes());
        let [command, status, source] =
            [regs::ERR_ROOT_COMMAND, regs::ERR_ROOT_STATUS, regs::ERR_ROOT_ERR_SRC].map(|at| AER + at);
        port.config_write(command, &7u32.to_le_bytes());
        // The lowest is the guest's function 0.
        for (device, id) in devices.iter().zip([0x0500, 0x0503]) {
            port.report_error(device.address(), ErrorSeverity::NonFatal);
            assert_eq!((u16_of(&port, status), vmm.delivered()), (0x24, vec![MESSAGE]));
            assert_eq!(u16_of(&port, source + 2), id);
            // No second one before the first is taken.
            port.report_error(device.address(), ErrorSeverity::NonFatal);
            assert_eq!((u16_of(&port, status), vmm.delivered()), (0x2c, vec![]));
            port.config_write(status, &u32::MAX.to_le_bytes());
            assert_eq!((u16_of(&port, status), vmm.delivered()), (0, vec![]));
        }
    }

    /// Makes the port's interrupt lead to the guest.
    fn listen(port: &RootPort) {
        port.config_write(regs::COMMAND, &regs::COMMAND_MASTER.to_le_bytes());
        port.config_write(MSI + regs::MSI_ADDRESS_LO, &(MESSAGE.address as u32).to_le_bytes());
        port.config_write(MSI + regs::MSI_ADDRESS_HI, &((MESSAGE.address >> 32) as u32).to_le_bytes());
        port.config_write(MSI + regs::MSI_DATA_64, &(MESSAGE.data as u16).to_le_bytes());
        port.config_write(MSI + regs::MSI_FLAGS, &[1, 0]);
    }

    #[test]
    fn a_guest_is_asked_by_the_button_and_answers_by_the_indicator() {
        /// What is to be seen of `steps`: `!` is an interrupt for the button that was pressed, and what the guest answered.
        fn check(steps: &str, expect: &str) {
            let (port, vmm) = port();
            put(&port, 0);
            port.reset();
            listen(&port);
            let (sender, answers) = std::sync::mpsc::channel();
            let (mut seen, mut control) = (Vec::new(), regs::EXP_SLTCTL_ABPE | regs::EXP_SLTCTL_HPIE);
            for step in steps.split_whitespace() {
                let indicator = match step {
                    "on" => regs::EXP_SLTCTL_PWR_IND_ON,
                    "blink" => regs::EXP_SLTCTL_PWR_IND_BLINK,
                    "off" => regs::EXP_SLTCTL_PWR_IND_OFF,
                    "dark" => 0,
                    _ => control & regs::EXP_SLTCTL_PIC,
                };
                control = control & !regs::EXP_SLTCTL_PIC | indicator;
                match step {
                    "deaf" => control &= !regs::EXP_SLTCTL_ABPE,
                    "ask" => {
                        let sender = sender.clone();
                        port.ask(Box::new(move |answer| sender.send(answer).unwrap()));
                    }
                    "unask" => port.unask(),
                    "sees" => {
                        port.config_write(EXPRESS + regs::EXP_SLTSTA, &regs::EXP_SLTSTA_ABP.to_le_bytes());
                    }
                    "reset" => port.reset(),
                    "pull" => port.change(|slot| slot.functions.clear()),
                    _ => {}
                }
                if !matches!(step, "ask" | "unask" | "reset" | "pull") {
                    port.config_write(EXPRESS + regs::EXP_SLTCTL, &control.to_le_bytes());
                }
                let pressed = u16_of(&port, EXPRESS + regs::EXP_SLTSTA) & regs::EXP_SLTSTA_ABP != 0;
                seen.extend(
                    (vmm.delivered() == [MESSAGE]).then(|| if pressed { "!" } else { "?" }.to_owned()),
                );
                seen.extend(answers.try_iter().map(|answer| format!("{answer:?}")));
            }
            assert_eq!(seen.join(" "), expect, "{steps}");
        }
        // As Linux does: it blinks for 5 s, lets its driver go, and the light is off.
        check("on ask sees blink off", "! LetGo");
        check("on ask sees off", "! LetGo");
        // A user of the guest presses the button too, or a driver does not let go.
        check("on ask sees blink on", "! Kept");
        check("on ask on on blink blink on off", "! Kept");
        // Nobody listens, or has let go before; nothing is pressed.
        check("deaf ask off", "Deaf");
        check("off ask", "LetGo");
        check("on ask deaf ask blink off", "! Deaf");
        // What came a moment ago blinks: a press would turn it back.
        check("blink ask on sees blink off", "! LetGo");
        check("blink ask off on", "LetGo");
        check("blink ask unask on", "");
        // It is asked no more: before it has seen that, the press is taken back, and then there is another.
        check("on ask unask sees blink off", "!");
        check("on ask sees unask", "! !");
        check("on ask sees blink unask sees on off", "! !");
        check("on unask", "");
        // Asking again presses nothing.
        check("on ask sees ask blink ask off", "! LetGo");
        check("on ask sees blink on ask sees blink off", "! Kept ! LetGo");
        // A guest that restarts has let go of everything. It is not asked any more, nor after the device is gone.
        check("on ask sees blink reset on", "! LetGo");
        check("on ask reset sees blink off", "! LetGo");
        check("on ask sees blink pull off", "!");
        // Bits that do not exist, and what is reserved.
        check("on ask sees dark blink dark off", "! LetGo");
    }

    #[test]
    fn the_slot_says_what_it_can_do() {
        let (port, _) = port();
        let mut capabilities = [0; 4];
        port.config_read(EXPRESS + regs::EXP_SLTCAP, &mut capabilities);
        // Button, power indicator, surprise, hot-plug, no notices of commands; no power controller, latch or lock. Slot 3.
        assert_eq!(u32::from_le_bytes(capabilities), 1 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 18 | 3 << 19);
        let indicator = || u16_of(&port, EXPRESS + regs::EXP_SLTCTL) & regs::EXP_SLTCTL_PIC;
        assert_eq!(indicator(), regs::EXP_SLTCTL_PWR_IND_OFF);
        put(&port, 0);
        port.reset();
        assert_eq!(indicator(), regs::EXP_SLTCTL_PWR_IND_ON);
        // The guest writes what it enables and the indicator, and nothing else.
        port.config_write(EXPRESS + regs::EXP_SLTCTL, &[0xff; 2]);
        assert_eq!(u16_of(&port, EXPRESS + regs::EXP_SLTCTL), 0x1329);
    }
}
