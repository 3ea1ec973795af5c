//! What needs `unsafe` to show memory to a guest.
#![allow(unsafe_code)]

#[cfg(feature = "kvm")]
mod kvm;
#[cfg(feature = "vm-memory")]
mod memory;
mod part;

#[cfg(all(feature = "kvm", test))]
pub(super) use kvm::ioapic_irr;
#[cfg(feature = "kvm")]
pub(super) use kvm::{Slot, eventfd};
#[cfg(feature = "vm-memory")]
pub use memory::SharedMemory;
pub(super) use part::Part;
