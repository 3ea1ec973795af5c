//! Host memory that a queue allocated.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc, dealloc};
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::mm::{Advice, madvise};
use vm_accel::{Memory, MemoryKind};

/// What allocations are aligned to.
const ALIGN: usize = 256;
/// Bytes of a huge page, to which those of some of them are aligned: an access then misses few entries of the TLB.
const HUGE: usize = 2 << 20;

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
        let huge = size >= 2 * HUGE;
        let layout = Layout::from_size_align(size, if huge { HUGE } else { ALIGN }).ok()?;
        // SAFETY: the size is not 0.
        let address = unsafe { alloc(layout) };
        if address.is_null() {
            return None;
        }
        if huge {
            // Where the system has none, small ones will do.
            // SAFETY: these pages lie within what was just allocated, and nothing is in them yet.
            let _ = unsafe { madvise(address.cast(), size / HUGE * HUGE, Advice::LinuxHugepage) };
        }
        let address = address as u64;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_large_lies_in_huge_pages_of_its_own() {
        let heap = Heap::default();
        for (bytes, align) in [(1, ALIGN), (2 * HUGE - 1, ALIGN), (2 * HUGE, HUGE), (2 * HUGE + 1, HUGE)] {
            let memory = heap.allocate(MemoryKind::Pinned, bytes as u64).unwrap();
            assert!(memory.address().is_multiple_of(align as u64), "{bytes}");
            memory.region().write_host(&vec![7; bytes]).unwrap();
            // SAFETY: nobody uses it.
            unsafe { heap.free(memory.address()) };
        }
        assert_eq!(heap.bytes(), 0);
    }
}
