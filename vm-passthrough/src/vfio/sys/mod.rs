//! Every system call that VFIO needs and rustix lacks: the ioctls of a container, a group, iommufd and a device,
//! and the memory that they work on. All unsafe code of [`vfio`](super) is here.
//!
//! The functions are thin: they fill in the structure, make one call and return the bytes or the number that
//! the Linux kernel answered. What the answer means, and whether it can be, is decided by the safe code above.

#![allow(unsafe_code)]

pub(super) mod device;
pub(super) mod group;
pub(super) mod iommufd;
mod memory;
mod request;

pub use memory::{HostMemory, load_u32, store_u32};
pub(super) use memory::{MappedRegion, page_size};
#[cfg(test)]
pub(super) use request::duplicate;
