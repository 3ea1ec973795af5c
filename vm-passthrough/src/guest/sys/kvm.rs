//! Memory slots and eventfds of KVM.

use std::ops::Range;
use std::os::fd::{FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::sync::Arc;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::EventFd;

use crate::vfio::Mapping;

/// A memory slot of KVM. What the guest reaches through it lives as long as it does, and for ever where KVM does not delete
/// it.
pub(in crate::guest) struct Slot {
    vm: Arc<VmFd>,
    number: u32,
    guest: u64,
    /// `None` once the slot is deleted.
    memory: Option<Arc<dyn Mapping>>,
}

impl Slot {
    /// Makes the `range` of `memory` the content of slot `number`, at guest-physical address `guest`.
    pub(in crate::guest) fn new(
        vm: &Arc<VmFd>,
        number: u32,
        guest: u64,
        memory: Arc<dyn Mapping>,
        range: Range<u64>,
    ) -> Result<Self, kvm_ioctls::Error> {
        if range.end > memory.len() || range.start > range.end {
            return Err(kvm_ioctls::Error::new(libc::EINVAL));
        }
        let region = kvm_userspace_memory_region {
            slot: number,
            flags: 0,
            guest_phys_addr: guest,
            memory_size: range.end - range.start,
            userspace_addr: memory.address() + range.start,
        };
        // SAFETY: the contract of `Mapping` says that all of it is mapped for as long as the value lives and that guests may
        // write to it, the range is a part of it, and the value is dropped only after the slot was deleted.
        unsafe { vm.set_user_memory_region(region) }?;
        Ok(Self { vm: vm.clone(), number, guest, memory: Some(memory) })
    }

    /// Its number.
    pub(in crate::guest) fn number(&self) -> u32 {
        self.number
    }

    /// Guest-physical address.
    pub(in crate::guest) fn guest(&self) -> u64 {
        self.guest
    }

    /// Takes the memory from the guest, which can't reach it once this returned `Ok`. When KVM refuses, it is as it was.
    pub(in crate::guest) fn clear(&mut self) -> Result<(), kvm_ioctls::Error> {
        if self.memory.is_none() {
            return Ok(());
        }
        let region = kvm_userspace_memory_region {
            slot: self.number,
            flags: 0,
            guest_phys_addr: self.guest,
            memory_size: 0,
            userspace_addr: 0,
        };
        // SAFETY: size 0 deletes the slot; no memory is named.
        unsafe { self.vm.set_user_memory_region(region) }?;
        self.memory = None;
        Ok(())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // A vCPU or a device may still hold the guest open; it must not reach addresses that this process reuses.
        if let Err(error) = self.clear() {
            tracing::error!(%error, guest = self.guest, "the guest's memory could not be taken from it; it is kept mapped");
            std::mem::forget(self.memory.take());
        }
    }
}

/// An eventfd as kvm-ioctls takes it.
pub(in crate::guest) fn eventfd(file: OwnedFd) -> EventFd {
    // SAFETY: the descriptor is open, and nobody else's from here on.
    unsafe { EventFd::from_raw_fd(file.into_raw_fd()) }
}

/// The I/O APIC's interrupt request register.
#[cfg(test)]
pub(in crate::guest) fn ioapic_irr(chip: &kvm_bindings::kvm_irqchip) -> u32 {
    // SAFETY: `KVM_GET_IRQCHIP` fills this variant for chip 2, and every bit pattern is valid for it.
    unsafe { chip.chip.ioapic.irr }
}
