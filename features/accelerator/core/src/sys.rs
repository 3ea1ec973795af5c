//! What others own, and promise to keep.
#![allow(unsafe_code)]

use std::any::Any;
use std::ffi::c_void;
use std::fmt;

use crate::memory::{Memory, MemoryKind};

/// Memory that somebody else allocated and frees: a tensor of PyTorch's, say.
#[derive(Debug)]
pub struct BorrowedMemory(Memory);

impl BorrowedMemory {
    /// The `bytes` bytes that the device sees at `address`. For a CPU that is the address in this process.
    ///
    /// # Safety
    /// * The device of the session that it is given to may read and write all of it, from the first command with a view of it
    ///   until the last has run; graphs with such commands are replayed only as long.
    /// * What else uses it at that time, as other streams or the host, leaves it alone or is ordered with these commands; no Rust
    ///   reference to it is live.
    pub unsafe fn new(address: u64, bytes: u64) -> Self {
        // SAFETY: no queue gets it back, and the caller promises that it is there as long as commands use it.
        Self(unsafe { Memory::from_raw(MemoryKind::Device, address, 0, bytes) })
    }

    pub(crate) fn into_memory(self) -> Memory {
        self.0
    }
}

/// A resource of graphics that a device's driver knows by its address in this process: an `ID3D11Resource`.
pub struct BorrowedResource {
    address: *mut c_void,
    keeper: Box<dyn Any + Send + Sync>,
}

// SAFETY: whoever makes one promises that any thread may hand the address to the driver.
unsafe impl Send for BorrowedResource {}
// SAFETY: as above.
unsafe impl Sync for BorrowedResource {}

impl BorrowedResource {
    /// The resource at `address`, which is there as long as the keeper is.
    ///
    /// # Safety
    /// * It is a resource of the kind that the driver takes, and nothing else.
    /// * The API that made it lets the driver use it on another thread, as a Direct3D device that is protected for such.
    pub unsafe fn new(address: *mut c_void, keeper: impl Any + Send + Sync) -> Self {
        Self { address, keeper: Box::new(keeper) }
    }

    /// The address, and what keeps it.
    pub fn into_parts(self) -> (*mut c_void, Box<dyn Any + Send + Sync>) {
        (self.address, self.keeper)
    }
}

impl fmt::Debug for BorrowedResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BorrowedResource").field("address", &self.address).finish_non_exhaustive()
    }
}
