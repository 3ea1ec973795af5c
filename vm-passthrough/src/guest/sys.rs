//! What needs `unsafe` to show memory to a guest: memory slots of KVM, and RAM of vm-memory as a [`Mapping`].
#![allow(unsafe_code)]

use std::fmt;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::Arc;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vm_memory::MmapRegion;
use vmm_sys_util::eventfd::EventFd;

use crate::vfio::Mapping;

/// An `mmap` of vm-memory, kept for as long as this lives.
pub(crate) struct SharedMemory(Arc<MmapRegion>);

impl SharedMemory {
    /// Shares `region`.
    pub(crate) fn new(region: Arc<MmapRegion>) -> Self {
        Self(region)
    }
}

impl fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedMemory({:#x}, {:#x})", self.address(), self.len())
    }
}

// SAFETY: the region is mapped until the last `Arc` is gone, `mmap` aligns it to pages, and vm-memory gives out no
// references into it: all its accesses are volatile.
unsafe impl Mapping for SharedMemory {
    fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    fn len(&self) -> u64 {
        self.0.size() as u64
    }
}

/// A memory slot of KVM. What the guest reaches through it lives as long as it does, and for ever where KVM does not delete
/// it.
pub(crate) struct Slot {
    vm: Arc<VmFd>,
    number: u32,
    guest: u64,
    /// `None` once the slot is deleted.
    memory: Option<Arc<dyn Mapping>>,
}

impl Slot {
    /// Makes the `range` of `memory` the content of slot `number`, at guest-physical address `guest`.
    pub(crate) fn new(
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
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Guest-physical address.
    pub(crate) fn guest(&self) -> u64 {
        self.guest
    }

    /// Takes the memory from the guest, which can't reach it once this returned `Ok`. When KVM refuses, it is as it was.
    pub(crate) fn clear(&mut self) -> Result<(), kvm_ioctls::Error> {
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

/// An eventfd of vmm-sys-util as a borrowed file descriptor.
pub(super) fn borrow(eventfd: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor is open for as long as `eventfd` lives, which outlives the result.
    unsafe { BorrowedFd::borrow_raw(eventfd.as_raw_fd()) }
}

/// The I/O APIC's interrupt request register.
#[cfg(test)]
pub(super) fn ioapic_irr(chip: &kvm_bindings::kvm_irqchip) -> u32 {
    // SAFETY: `KVM_GET_IRQCHIP` fills this variant for chip 2, and every bit pattern is valid for it.
    unsafe { chip.chip.ioapic.irr }
}
