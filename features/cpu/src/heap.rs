//! Host memory that a queue allocated.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc, dealloc};
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use vm_accel::{Memory, MemoryKind};

/// What allocations are aligned to.
const ALIGN: usize = 256;

/// The allocations of a queue. They end with it.
#[derive(Debug, Default)]
pub(crate) struct Heap {
    live: Mutex<HashMap<u64, Layout>>,
}

impl Heap {
    fn live(&self) -> MutexGuard<'_, HashMap<u64, Layout>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory whose content is whatever was there; `None` if there is not so much.
    pub(crate) fn allocate(&self, kind: MemoryKind, bytes: u64) -> Option<Memory> {
        let size = usize::try_from(bytes).ok()?.max(1);
        let layout = Layout::from_size_align(size, ALIGN).ok()?;
        // SAFETY: the size is not 0.
        let address = unsafe { alloc(layout) } as u64;
        if address == 0 {
            return None;
        }
        self.live().insert(address, layout);
        let host = if kind.host_visible() { address } else { 0 };
        // SAFETY: it stays until it is freed or the heap ends, which the queue keeps until its last command has run.
        Some(unsafe { Memory::from_raw(kind, address, host, bytes) })
    }

    /// Frees what begins at `address`; nothing if nothing does.
    ///
    /// # Safety
    /// Nobody uses that memory any more.
    pub(crate) unsafe fn free(&self, address: u64) {
        if let Some(layout) = self.live().remove(&address) {
            // SAFETY: it was allocated with this layout, and is no longer among the live.
            unsafe { dealloc(address as *mut u8, layout) };
        }
    }

    /// Bytes of all allocations.
    pub(crate) fn bytes(&self) -> u64 {
        self.live().values().map(|layout| layout.size() as u64).sum()
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        for (address, layout) in self.live().drain() {
            // SAFETY: as in `free`.
            unsafe { dealloc(address as *mut u8, layout) };
        }
    }
}

/// Sets bytes of memory that the accelerator allocated or was given.
///
/// # Safety
/// The memory is there, and no Rust reference to it is live.
pub(crate) unsafe fn fill(address: u64, bytes: u64, value: u8) {
    // SAFETY: as the caller promises.
    unsafe { std::ptr::write_bytes(address as *mut u8, value, bytes as usize) };
}

/// Copies such bytes, which may overlap.
///
/// # Safety
/// Both are there, and no Rust reference to either is live.
pub(crate) unsafe fn copy(target: u64, source: u64, bytes: u64) {
    // SAFETY: as the caller promises.
    unsafe { std::ptr::copy(source as *const u8, target as *mut u8, bytes as usize) };
}
