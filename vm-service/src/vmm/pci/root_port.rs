//! A PCI Express root port with a slot: a type 1 header, the functions of the device that is in the slot, if any, and what
//! tells the guest that one came or went (native PCI Express hot-plug, PCI Express Base 6.0, 6.7.3).
//!
//! The slot has neither button nor lock nor power controller: a device that comes or goes changes presence and link at once,
//! and the port interrupts. With nothing to control there are no commands to wait for, and the slot says so.

use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use vm_passthrough::PassthroughDevice;
use vm_passthrough::guest::{MsiMessage, Vmm, VmmError};

use super::vector::Vector;
use super::{ConfigSpace, reg};

/// Bridge control: secondary bus reset.
const SECONDARY_BUS_RESET: u16 = 1 << 6;
/// Header type: the device has several functions.
const MULTIFUNCTION: u8 = 1 << 7;

/// Offsets in the PCI Express capability.
const LINK_STATUS: u16 = 0x12;
const SLOT_CONTROL: u16 = 0x18;
const SLOT_STATUS: u16 = 0x1a;

/// The link says 16 GT/s and 16 lanes: no driver should think that the port holds its device back.
const LINK: u16 = SPEED_16GT | 16 << 4;
const SPEED_16GT: u16 = 4;
/// Link status: the data link layer is active.
const LINK_ACTIVE: u16 = 1 << 13;

/// Slot control: interrupt when presence changes, for hot-plug events at all, when the link's state changes.
const PRESENCE_ENABLE: u16 = 1 << 3;
const HOT_PLUG_INTERRUPT_ENABLE: u16 = 1 << 5;
const LINK_ENABLE: u16 = 1 << 12;
/// Slot status: presence changed, something is present, the link's state changed.
const PRESENCE_CHANGED: u16 = 1 << 3;
const PRESENT: u16 = 1 << 6;
const LINK_CHANGED: u16 = 1 << 8;

/// Offsets in the MSI capability, with a 64-bit address and a mask.
const MSI_CONTROL: u16 = 0x02;
const MSI_ADDRESS: u16 = 0x04;
const MSI_DATA: u16 = 0x0c;
const MSI_MASK: u16 = 0x10;
const MSI_PENDING: u16 = 0x14;

/// A root port and what is in its slot.
#[derive(Debug)]
pub(in crate::vmm) struct RootPort {
    /// The functions of the device in the slot, by their number on the host. Locked before `state`.
    functions: RwLock<Functions>,
    state: Mutex<State>,
    interrupt: Vector,
    /// Offsets of the capabilities.
    express: u16,
    msi: u16,
}

/// The functions of one device, or none.
pub(in crate::vmm) type Functions = Vec<Arc<dyn PassthroughDevice>>;

#[derive(Debug)]
struct State {
    config: ConfigSpace,
    /// Whether the guest was interrupted for the events that are set: it is again when none was, and one is.
    notified: bool,
}

impl RootPort {
    /// The port in slot `slot` of bus 0, with nothing in its own slot.
    ///
    /// # Errors
    /// When there is no interrupt left for it.
    pub(in crate::vmm) fn new(slot: u8, vmm: Arc<dyn Vmm>) -> Result<Self, VmmError> {
        let mut config = ConfigSpace::new();
        // The id that QEMU registered for a generic root port.
        config.set(0, &[0x36, 0x1b, 0x0c, 0x00]);
        config.set(reg::REVISION, &[0, 0, 0x04, 0x06]);
        config.set(reg::HEADER_TYPE, &[1]);
        let command = reg::COMMAND_IO | reg::COMMAND_MEMORY | reg::COMMAND_MASTER | reg::COMMAND_OTHER;
        config.allow(reg::COMMAND, &command.to_le_bytes());
        config.allow(reg::PRIMARY_BUS, &[0xff; 3]);
        // Windows of whole 4 KiB (I/O) and 1 MiB (memory); the prefetchable one has 64 bits.
        config.allow(reg::IO_BASE, &[0xf0, 0xf0]);
        config.allow(reg::MEMORY_BASE, &[0xf0, 0xff, 0xf0, 0xff]);
        config.set(reg::PREFETCH_BASE, &[1, 0, 1, 0]);
        config.allow(reg::PREFETCH_BASE, &[0xf0, 0xff, 0xf0, 0xff]);
        config.allow(reg::PREFETCH_BASE_HIGH, &[0xff; 8]);
        config.allow(reg::INTERRUPT_LINE, &[0xff]);
        config.allow(reg::BRIDGE_CONTROL, &(1u16 | 1 << 1 | SECONDARY_BUS_RESET).to_le_bytes());
        // Windows are closed while base is above limit.
        config.set(reg::IO_BASE, &[0xf0, 0]);
        config.set(reg::MEMORY_BASE, &[0xf0, 0xff, 0, 0]);
        config.set(reg::PREFETCH_BASE, &[0xf1, 0xff, 1, 0]);
        let express = config.add_capability(0x10, &express_capability(slot));
        // Device, link, slot and root control; device control 2 and link control 2.
        config.allow(express + 0x08, &[0xff, 0x7f]);
        config.allow(express + 0x10, &[0xfb, 0x0f]);
        let slot_control = PRESENCE_ENABLE | HOT_PLUG_INTERRUPT_ENABLE | LINK_ENABLE;
        config.allow(express + SLOT_CONTROL, &slot_control.to_le_bytes());
        config.allow_clearing(express + SLOT_STATUS, &(PRESENCE_CHANGED | LINK_CHANGED).to_le_bytes());
        config.allow(express + 0x1c, &[0x1f, 0x00]);
        config.allow(express + 0x28, &[0x1f, 0x00]);
        config.allow(express + 0x30, &[0xff, 0x1f]);
        // One vector, a 64-bit address, a mask (PCI Express Base 6.0, 7.7.1).
        let msi = config.add_capability(0x05, &[&[0x80, 1][..], &[0; 20]].concat());
        config.allow(msi + MSI_CONTROL, &[1]);
        config.allow(msi + MSI_ADDRESS, &[0xfc, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
        config.allow(msi + MSI_DATA, &[0xff; 2]);
        config.allow(msi + MSI_MASK, &[1]);
        config.freeze();
        Ok(Self {
            functions: RwLock::default(),
            state: Mutex::new(State { config, notified: false }),
            interrupt: Vector::new(vmm)?,
            express,
            msi,
        })
    }

    /// The functions in the slot.
    pub(in crate::vmm) fn functions(&self) -> RwLockReadGuard<'_, Functions> {
        self.functions.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The function that the guest sees by this number: the host's number, and the first is function 0, without which there
    /// would be no device.
    pub(in crate::vmm) fn function(&self, number: u8) -> Option<Arc<dyn PassthroughDevice>> {
        let functions = self.functions();
        let found = match number {
            0 => functions.first(),
            _ => functions.iter().skip(1).find(|function| function.address().function() == number),
        };
        found.cloned()
    }

    /// Changes what is in the slot. A guest that runs is told when the slot was empty or is.
    pub(in crate::vmm) fn change<T>(&self, change: impl FnOnce(&mut Functions) -> T) -> T {
        let mut functions = self.functions.write().unwrap_or_else(PoisonError::into_inner);
        let was_present = !functions.is_empty();
        let answer = change(&mut functions);
        functions.sort_by_key(|function| function.address());
        if was_present == functions.is_empty() {
            let mut state = self.state();
            self.show(&mut state.config, !was_present, PRESENCE_CHANGED | LINK_CHANGED);
            self.notify(&mut state);
        }
        answer
    }

    /// The bus behind it, 0 while it has none.
    pub(in crate::vmm) fn secondary_bus(&self) -> u8 {
        self.state().config.u8(reg::SECONDARY_BUS)
    }

    /// Whether it forwards a memory access to the device.
    pub(in crate::vmm) fn forwards_memory(&self, address: u64) -> bool {
        let config = &self.state().config;
        config.u16(reg::COMMAND) & reg::COMMAND_MEMORY != 0
            && (memory_window(config).contains(&address) || prefetch_window(config).contains(&address))
    }

    /// Reads its own config space.
    pub(in crate::vmm) fn config_read(&self, offset: u16, data: &mut [u8]) {
        let mut state = self.state();
        if offset & !3 == self.msi + MSI_PENDING {
            state.config.set(self.msi + MSI_PENDING, &[self.interrupt.is_pending().into()]);
        }
        state.config.read(offset, data);
    }

    /// Writes its own config space.
    pub(in crate::vmm) fn config_write(&self, offset: u16, data: &[u8]) {
        let reset = {
            let mut state = self.state();
            let before = state.config.u16(reg::BRIDGE_CONTROL);
            state.config.write(offset, data);
            self.notify(&mut state);
            state.config.u16(reg::BRIDGE_CONTROL) & !before & SECONDARY_BUS_RESET != 0
        };
        if reset {
            self.reset_bus();
        }
    }

    /// Reads config space of a function in the slot; all ones where there is none.
    pub(in crate::vmm) fn function_read(&self, number: u8, offset: u16, data: &mut [u8]) {
        let Some(function) = self.function(number) else { return data.fill(0xff) };
        let several = self.functions().len() > 1;
        function.config_read(offset, data);
        let header_type = reg::HEADER_TYPE.checked_sub(offset).and_then(|at| data.get_mut(usize::from(at)));
        // One that is gone reads all ones.
        if let Some(header_type) = header_type.filter(|header_type| several && **header_type != 0xff) {
            *header_type |= MULTIFUNCTION;
        }
    }

    /// Resets what is in the slot. Functions that can be reset only along with each other need each other stopped.
    fn reset_bus(&self) {
        let functions = self.functions().clone();
        if functions.len() > 1 {
            for function in &functions {
                if let Err(error) = function.stop() {
                    tracing::debug!(device = %function.address(), %error, "it could not be stopped; resetting it tells");
                }
            }
        }
        for function in functions {
            if let Err(error) = function.reset() {
                tracing::warn!(device = %function.address(), %error, "the guest reset the bus, but the device was not reset");
            }
        }
    }

    /// Puts the port to its state after power-on, with what is in its slot; that is left alone.
    pub(in crate::vmm) fn reset(&self) {
        let functions = self.functions();
        let mut state = self.state();
        state.config.reset();
        self.show(&mut state.config, !functions.is_empty(), 0);
        self.notify(&mut state);
        self.interrupt.clear();
    }

    /// Shows whether something is in the slot, and what has changed with that.
    fn show(&self, config: &mut ConfigSpace, present: bool, changed: u16) {
        let (link, status) = if present { (LINK | LINK_ACTIVE, PRESENT) } else { (0, 0) };
        config.set(self.express + LINK_STATUS, &link.to_le_bytes());
        config.set(self.express + SLOT_STATUS, &(status | changed).to_le_bytes());
    }

    /// Lets the interrupt lead to where the guest wants it, and raises it for hot-plug events that the guest wants and was
    /// not interrupted for (PCI Express Base 6.0, 6.7.3.4).
    fn notify(&self, state: &mut State) {
        let config = &state.config;
        let enabled = config.u16(self.msi + MSI_CONTROL) & 1 != 0
            && config.u32(self.msi + MSI_MASK) & 1 == 0
            && config.u16(reg::COMMAND) & reg::COMMAND_MASTER != 0;
        let address = u64::from(config.u32(self.msi + MSI_ADDRESS))
            | u64::from(config.u32(self.msi + MSI_ADDRESS + 4)) << 32;
        let data = config.u16(self.msi + MSI_DATA).into();
        self.interrupt.set(enabled.then_some(MsiMessage { address, data }));

        let (control, status) =
            (config.u16(self.express + SLOT_CONTROL), config.u16(self.express + SLOT_STATUS));
        let wanted = |enable: u16, event: u16| control & enable != 0 && status & event != 0;
        let due = control & HOT_PLUG_INTERRUPT_ENABLE != 0
            && (wanted(PRESENCE_ENABLE, PRESENCE_CHANGED) || wanted(LINK_ENABLE, LINK_CHANGED));
        if due && !state.notified {
            self.interrupt.signal();
        }
        state.notified = due;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn memory_window(config: &ConfigSpace) -> RangeInclusive<u64> {
    let base = u64::from(config.u16(reg::MEMORY_BASE) & 0xfff0) << 16;
    let limit = u64::from(config.u16(reg::MEMORY_LIMIT) & 0xfff0) << 16 | 0xf_ffff;
    base..=limit
}

fn prefetch_window(config: &ConfigSpace) -> RangeInclusive<u64> {
    let end = |low, high| u64::from(config.u16(low) & 0xfff0) << 16 | u64::from(config.u32(high)) << 32;
    let base = end(reg::PREFETCH_BASE, reg::PREFETCH_BASE_HIGH);
    let limit = end(reg::PREFETCH_LIMIT, reg::PREFETCH_LIMIT_HIGH) | 0xf_ffff;
    base..=limit
}

/// PCI Express capability, version 2, of a root port with an empty slot (PCI Express Base 6.0, 7.5.3).
fn express_capability(slot: u8) -> [u8; 58] {
    let mut body = [0; 58];
    let mut put =
        |offset: usize, value: &[u8]| body[offset - 2..offset - 2 + value.len()].copy_from_slice(value);
    // Version 2, root port, slot implemented.
    put(0x02, &(2u16 | 4 << 4 | 1 << 8).to_le_bytes());
    // Role-based error reporting.
    put(0x04, &(1u32 << 15).to_le_bytes());
    // It reports whether the link is active; port number.
    put(0x0c, &(u32::from(LINK) | 1 << 20 | u32::from(slot) << 24).to_le_bytes());
    // Hot-plug, without a warning too, and without commands that complete; slot number.
    put(0x14, &(1u32 << 5 | 1 << 6 | 1 << 18 | u32::from(slot) << 19).to_le_bytes());
    // Supported speeds, 2.5 to 16 GT/s, and the target speed.
    put(0x2c, &0x1eu32.to_le_bytes());
    put(0x30, &SPEED_16GT.to_le_bytes());
    body
}

#[cfg(test)]
mod tests {
    use vm_passthrough::sim::{SimLog, SimVmm};

    use super::*;
    use crate::vmm::testing::FakeDevice;

    const EXPRESS: u16 = 0x40;
    const MSI: u16 = 0x7c;
    const MESSAGE: MsiMessage = MsiMessage { address: 0x1_fee0_1000, data: 0x41 };

    fn port() -> (RootPort, Arc<SimVmm>) {
        let vmm = SimVmm::new(&[], &SimLog::default()).unwrap();
        (RootPort::new(3, vmm.clone()).unwrap(), vmm)
    }

    fn put(port: &RootPort, function: u8) -> Arc<FakeDevice> {
        let device = Arc::new(FakeDevice::at(1, function));
        port.change(|functions| functions.push(device.clone()));
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
        port.config_write(reg::MEMORY_BASE, &[0x00, 0xc0, 0x10, 0xc0]);
        assert!(!opened(0xc000_0000), "memory decode is off");
        port.config_write(reg::COMMAND, &reg::COMMAND_MEMORY.to_le_bytes());
        assert!(opened(0xc000_0000) && opened(0xc01f_ffff));
        assert!(!opened(0xbfff_ffff) && !opened(0xc020_0000));
        port.config_write(reg::PREFETCH_BASE, &[0x01, 0x00, 0xf1, 0xff]);
        port.config_write(reg::PREFETCH_BASE_HIGH, &[0x40, 0, 0, 0, 0x41, 0, 0, 0]);
        assert!(opened(0x40_0000_0000) && opened(0x41_ffff_ffff) && !opened(0x42_0000_0000));
        port.reset();
        assert!(!opened(0xc000_0000) && !opened(0x40_0000_0000));
    }

    #[test]
    fn a_secondary_bus_reset_resets_every_function_once() {
        let (port, _) = port();
        let devices = [put(&port, 0), put(&port, 1)];
        for value in [0u16, SECONDARY_BUS_RESET, SECONDARY_BUS_RESET, 0, SECONDARY_BUS_RESET] {
            port.config_write(reg::BRIDGE_CONTROL, &value.to_le_bytes());
        }
        assert_eq!(devices.map(|device| device.resets()), [2, 2]);
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
        let status = || u16_of(&port, EXPRESS + SLOT_STATUS);
        let both = PRESENCE_CHANGED | LINK_CHANGED;

        put(&port, 0);
        assert_eq!(status(), PRESENT | both);
        assert_eq!(vmm.delivered(), [], "nobody asked for interrupts");
        port.reset();
        assert_eq!(status(), PRESENT, "what is there at the start is no event");
        assert_eq!(u16_of(&port, EXPRESS + LINK_STATUS), LINK | LINK_ACTIVE);

        port.config_write(reg::COMMAND, &reg::COMMAND_MASTER.to_le_bytes());
        port.config_write(MSI + MSI_ADDRESS, &(MESSAGE.address as u32).to_le_bytes());
        port.config_write(MSI + MSI_ADDRESS + 4, &((MESSAGE.address >> 32) as u32).to_le_bytes());
        port.config_write(MSI + MSI_DATA, &(MESSAGE.data as u16).to_le_bytes());
        port.config_write(MSI + MSI_CONTROL, &[1, 0]);
        let control = HOT_PLUG_INTERRUPT_ENABLE | LINK_ENABLE | PRESENCE_ENABLE;
        port.config_write(EXPRESS + SLOT_CONTROL, &control.to_le_bytes());
        assert_eq!(vmm.delivered(), []);

        port.change(Vec::clear);
        assert_eq!(status(), both);
        assert_eq!(u16_of(&port, EXPRESS + LINK_STATUS), 0);
        assert_eq!(vmm.delivered(), [MESSAGE]);
        // A second event is not told before the first is taken.
        put(&port, 0);
        put(&port, 1);
        assert_eq!((status(), vmm.delivered()), (PRESENT | both, vec![]));
        port.config_write(EXPRESS + SLOT_STATUS, &PRESENCE_CHANGED.to_le_bytes());
        assert_eq!((status(), vmm.delivered()), (PRESENT | LINK_CHANGED, vec![]));
        port.config_write(EXPRESS + SLOT_STATUS, &[0xff; 2]);
        assert_eq!((status(), vmm.delivered()), (PRESENT, vec![]));

        // What comes while the vector is masked is pending, and delivered when it no longer is.
        port.config_write(MSI + MSI_MASK, &[1]);
        port.change(Vec::clear);
        assert_eq!((vmm.delivered(), u16_of(&port, MSI + MSI_PENDING)), (vec![], 1));
        port.config_write(MSI + MSI_MASK, &[0]);
        assert_eq!((vmm.delivered(), u16_of(&port, MSI + MSI_PENDING)), (vec![MESSAGE], 0));
        port.reset();
        assert_eq!((status(), vmm.delivered(), vmm.routes()), (0, vec![], 1));
        drop(port);
        assert_eq!(vmm.routes(), 0);
    }
}
