//! What others own, and promise to keep.
#![allow(unsafe_code)]

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
