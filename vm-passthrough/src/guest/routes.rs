//! The guest's interrupt routing table in KVM: which message each global system interrupt (GSI) stands for; and what is
//! connected to lines of the I/O APIC.
//!
//! KVM replaces its whole table at once, so this keeps a copy: the routes of the in-kernel interrupt controllers,
//! which KVM made itself with `KVM_CREATE_IRQCHIP`, and behind them one per message-signalled interrupt. Only a
//! changed message writes the table; masking and unmasking attach and detach an irqfd.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KvmIrqRouting, kvm_irq_routing_entry,
};
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::EventFd;

use super::{MsiMessage, RouteId, VmmError, sys};

/// Pins of the I/O APIC, and with them the GSIs that are not free for messages.
const IOAPIC_PINS: u32 = 24;
/// Interrupt lines that reach both the I/O APIC and the two 8259s.
const ISA_LINES: u32 = 16;
/// Entries in the table for the interrupt controllers.
const CHIP_ENTRIES: u32 = IOAPIC_PINS + ISA_LINES;

/// All routes of one guest.
#[derive(Debug)]
pub(super) struct Routes {
    /// Most entries that KVM takes.
    capacity: u32,
    /// By GSI, from [`IOAPIC_PINS`] on.
    slots: Vec<Option<Route>>,
    free: Vec<u32>,
    /// By their names, of which none is a GSI.
    lines: BTreeMap<u32, Line>,
}

/// Something that is connected to a line of the I/O APIC.
#[derive(Debug)]
struct Line {
    gsi: u32,
    trigger: EventFd,
}

/// The first name of a line.
const FIRST_LINE: u32 = 1 << 31;

#[derive(Debug)]
struct Route {
    trigger: EventFd,
    /// What the table says, once it says anything.
    message: Option<MsiMessage>,
    /// Whether the irqfd is attached: the route is not masked.
    attached: bool,
}

impl Routes {
    /// No routes; KVM takes `capacity` table entries.
    pub(super) fn new(capacity: u32) -> Self {
        Self { capacity, slots: Vec::new(), free: Vec::new(), lines: BTreeMap::new() }
    }

    /// Connects eventfds to the I/O APIC's pin `gsi`, level-triggered.
    pub(super) fn add_line(
        &mut self,
        vm: &VmFd,
        gsi: u32,
        trigger: BorrowedFd<'_>,
        resample: BorrowedFd<'_>,
    ) -> Result<RouteId, VmmError> {
        let what = "connect an interrupt line";
        if gsi >= IOAPIC_PINS {
            return Err(VmmError::new(what, format!("the I/O APIC has no pin {gsi}")));
        }
        let eventfd = |file: BorrowedFd<'_>| {
            file.try_clone_to_owned().map(sys::eventfd).map_err(|error| VmmError::new(what, error))
        };
        let (trigger, resample) = (eventfd(trigger)?, eventfd(resample)?);
        vm.register_irqfd_with_resample(&trigger, &resample, gsi)
            .map_err(|error| VmmError::new(what, error))?;
        let name = (FIRST_LINE..).find(|name| !self.lines.contains_key(name)).unwrap_or(FIRST_LINE);
        self.lines.insert(name, Line { gsi, trigger });
        Ok(RouteId(name))
    }

    /// Adds a masked route.
    pub(super) fn add(&mut self, trigger: BorrowedFd<'_>) -> Result<RouteId, VmmError> {
        let trigger = trigger
            .try_clone_to_owned()
            .map_err(|error| VmmError::new("duplicate an interrupt's eventfd", error))?;
        let trigger = sys::eventfd(trigger);
        let route = Some(Route { trigger, message: None, attached: false });
        if let Some(index) = self.free.pop()
            && let Some(slot) = self.slots.get_mut(index as usize)
        {
            *slot = route;
            return Ok(RouteId(index + IOAPIC_PINS));
        }
        let index = self.slots.len() as u32;
        if index + CHIP_ENTRIES >= self.capacity {
            let reason = format!(
                "KVM takes {} routes and all are used; give the guest fewer devices or its drivers fewer queues",
                self.capacity
            );
            return Err(VmmError::new("add an interrupt route", reason));
        }
        self.slots.push(route);
        Ok(RouteId(index + IOAPIC_PINS))
    }

    /// Points a route at a message and unmasks it, or masks it.
    pub(super) fn set(
        &mut self,
        vm: &VmFd,
        id: RouteId,
        message: Option<MsiMessage>,
    ) -> Result<(), VmmError> {
        let route = self.get(id)?;
        let Some(message) = message else {
            if route.attached {
                vm.unregister_irqfd(&route.trigger, id.0)
                    .map_err(|error| VmmError::new("mask an interrupt route", error))?;
                route.attached = false;
            }
            return Ok(());
        };
        let before = route.message.replace(message);
        if before != Some(message)
            && let Err(error) = self.commit(vm)
        {
            // One bad message would make KVM refuse the table for ever.
            self.get(id)?.message = before;
            return Err(error);
        }
        let route = self.get(id)?;
        if !route.attached {
            vm.register_irqfd(&route.trigger, id.0)
                .map_err(|error| VmmError::new("attach an eventfd to an interrupt route", error))?;
            route.attached = true;
        }
        Ok(())
    }

    /// Removes a route. Its entry leaves KVM's table when the table is next written; until then nothing can
    /// trigger it.
    pub(super) fn remove(&mut self, vm: &VmFd, id: RouteId) -> Result<(), VmmError> {
        if let Some(line) = self.lines.get(&id.0) {
            vm.unregister_irqfd(&line.trigger, line.gsi)
                .map_err(|error| VmmError::new("disconnect an interrupt line", error))?;
            self.lines.remove(&id.0);
            return Ok(());
        }
        self.set(vm, id, None)?;
        let index = id.0 - IOAPIC_PINS;
        if let Some(slot) = self.slots.get_mut(index as usize) {
            *slot = None;
            self.free.push(index);
        }
        Ok(())
    }

    fn get(&mut self, id: RouteId) -> Result<&mut Route, VmmError> {
        id.0.checked_sub(IOAPIC_PINS)
            .and_then(|index| self.slots.get_mut(index as usize)?.as_mut())
            .ok_or_else(|| VmmError::new("find an interrupt route", format!("there is no route {}", id.0)))
    }

    fn commit(&self, vm: &VmFd) -> Result<(), VmmError> {
        let entries = self.entries();
        let table = KvmIrqRouting::from_entries(&entries)
            .map_err(|error| VmmError::new("build the interrupt routing table", format!("{error:?}")))?;
        vm.set_gsi_routing(&table).map_err(|error| VmmError::new("set the interrupt routing table", error))
    }

    fn entries(&self) -> Vec<kvm_irq_routing_entry> {
        let mut entries = chip_entries();
        for (index, route) in self.slots.iter().enumerate() {
            if let Some(message) = route.as_ref().and_then(|route| route.message) {
                entries.push(msi_entry(index as u32 + IOAPIC_PINS, message));
            }
        }
        entries
    }
}

/// The routes that KVM makes with its interrupt controllers (`default_routing` in the Linux kernel's
/// `arch/x86/kvm`): every GSI to the I/O APIC's pin of the same number, the first 16 to the 8259s too.
fn chip_entries() -> Vec<kvm_irq_routing_entry> {
    chip_pins().into_iter().map(chip_entry).collect()
}

/// GSI, interrupt controller and its pin for each of these routes.
fn chip_pins() -> Vec<(u32, u32, u32)> {
    let mut pins = Vec::with_capacity(CHIP_ENTRIES as usize);
    for gsi in 0..IOAPIC_PINS {
        pins.push((gsi, KVM_IRQCHIP_IOAPIC, gsi));
        if gsi < ISA_LINES {
            let chip = if gsi < 8 { KVM_IRQCHIP_PIC_MASTER } else { KVM_IRQCHIP_PIC_SLAVE };
            pins.push((gsi, chip, gsi % 8));
        }
    }
    pins
}

fn chip_entry((gsi, irqchip, pin): (u32, u32, u32)) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_IRQCHIP, ..Default::default() };
    entry.u.irqchip.irqchip = irqchip;
    entry.u.irqchip.pin = pin;
    entry
}

fn msi_entry(gsi: u32, message: MsiMessage) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
    entry.u.msi.address_lo = message.address as u32;
    entry.u.msi.address_hi = (message.address >> 32) as u32;
    entry.u.msi.data = message.data;
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupt_controllers_have_the_routes_that_kvm_gives_them() {
        let pins_of = |chip| {
            let pins = chip_pins().into_iter().filter(move |(_, of, _)| *of == chip);
            pins.map(|(gsi, _, pin)| (gsi, pin)).collect::<Vec<_>>()
        };
        let from = |first: u32, count: u32| (0..count).map(|pin| (first + pin, pin)).collect::<Vec<_>>();
        assert_eq!(pins_of(KVM_IRQCHIP_IOAPIC), from(0, 24));
        assert_eq!(pins_of(KVM_IRQCHIP_PIC_MASTER), from(0, 8));
        assert_eq!(pins_of(KVM_IRQCHIP_PIC_SLAVE), from(8, 8));
        assert_eq!(chip_entries().len(), 40);
    }
}
