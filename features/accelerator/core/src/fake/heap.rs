//! The memory of all simulated devices: real allocations, of which it knows which live. As on real ones, each device may
//! copy from and to another's.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What fresh memory holds, so that a test sees when nobody wrote it.
const FRESH: u8 = 0xa5;

/// The live allocations, by address. Registered host memory has no layout: it is not freed.
pub(super) struct Heap {
    live: BTreeMap<u64, (u64, Option<Layout>)>,
}

static HEAP: Mutex<Heap> = Mutex::new(Heap { live: BTreeMap::new() });

/// The heap of this process.
pub(super) fn heap() -> MutexGuard<'static, Heap> {
    HEAP.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Heap {
    pub(super) fn allocate(&mut self, bytes: u64) -> Option<u64> {
        let layout = Layout::from_size_align(usize::try_from(bytes).ok()?.max(1), 256).ok()?;
        // SAFETY: the layout has at least one byte.
        let start = unsafe { alloc(layout) };
        if start.is_null() {
            return None;
        }
        // SAFETY: the allocation has as many bytes.
        unsafe { start.write_bytes(FRESH, layout.size()) };
        self.live.insert(start as u64, (bytes, Some(layout)));
        Some(start as u64)
    }

    /// Takes in host memory. False if it overlaps what is there.
    pub(super) fn register(&mut self, address: u64, bytes: u64) -> bool {
        let before = self.live.range(..address.saturating_add(bytes)).next_back();
        if before.is_some_and(|(start, (length, _))| start + length > address) {
            return false;
        }
        self.live.insert(address, (bytes, None));
        true
    }

    /// Frees what starts at `address`. False if nothing does.
    pub(super) fn free(&mut self, address: u64) -> bool {
        let Some((_, layout)) = self.live.remove(&address) else { return false };
        if let Some(layout) = layout {
            // SAFETY: it was allocated with this layout and was live until now.
            unsafe { dealloc(address as *mut u8, layout) };
        }
        true
    }

    fn holds(&self, address: u64, bytes: u64) -> bool {
        self.live.range(..=address).next_back().is_some_and(|(start, (length, _))| {
            address - start <= *length && bytes <= length - (address - start)
        })
    }

    /// Reads bytes; `None` if they are not all in one live allocation.
    pub(super) fn read(&self, address: u64, bytes: u64) -> Option<Vec<u8>> {
        if !self.holds(address, bytes) {
            return None;
        }
        let mut out = vec![0; usize::try_from(bytes).ok()?];
        // SAFETY: the range lies in a live allocation, and nobody holds a reference to it.
        unsafe { std::ptr::copy_nonoverlapping(address as *const u8, out.as_mut_ptr(), out.len()) };
        Some(out)
    }

    /// Writes bytes; `None` if they are not all in one live allocation.
    pub(super) fn write(&self, address: u64, bytes: &[u8]) -> Option<()> {
        if !self.holds(address, bytes.len() as u64) {
            return None;
        }
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
        Some(())
    }

    /// Reads a number of `bytes` bytes, 4 or 8; `None` if it is not all in one live allocation.
    pub(super) fn get(&self, address: u64, bytes: u64) -> Option<u64> {
        if !self.holds(address, bytes) || !address.is_multiple_of(bytes) {
            return None;
        }
        // The host may write a cancel flag at the same time, so these are atomic.
        Some(match bytes {
            // SAFETY: the number lies in a live allocation, aligned.
            4 => u64::from(unsafe { AtomicU32::from_ptr(address as *mut u32) }.load(Ordering::Acquire)),
            // SAFETY: as above.
            _ => unsafe { AtomicU64::from_ptr(address as *mut u64) }.load(Ordering::Acquire),
        })
    }

    /// Writes the low `bytes` bytes, 4 or 8, of a number; `None` if they are not all in one live allocation.
    pub(super) fn set(&self, address: u64, bytes: u64, value: u64) -> Option<()> {
        if !self.holds(address, bytes) || !address.is_multiple_of(bytes) {
            return None;
        }
        match bytes {
            // SAFETY: as in `get`.
            4 => unsafe { AtomicU32::from_ptr(address as *mut u32) }.store(value as u32, Ordering::Release),
            // SAFETY: as in `get`.
            _ => unsafe { AtomicU64::from_ptr(address as *mut u64) }.store(value, Ordering::Release),
        }
        Some(())
    }
}
