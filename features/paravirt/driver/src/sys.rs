//! The accesses that Rust can't check: device registers, and memory that the device writes.
#![allow(unsafe_code)]

use core::cell::UnsafeCell;
use core::sync::atomic::{Ordering, fence};

/// Registers of the device, `bytes` of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registers {
    base: *mut u8,
    bytes: usize,
}

macro_rules! access {
    ($($read:ident $write:ident $type:ty;)*) => {$(
        /// Reads a register; all ones outside of them.
        pub(crate) fn $read(&self, offset: usize) -> $type {
            match self.at(offset, size_of::<$type>()) {
                // SAFETY: `at` saw that the register lies in the mapping, which `Registers::new` was promised, and is
                // aligned.
                Some(register) => unsafe { register.cast::<$type>().read_volatile() },
                None => <$type>::MAX,
            }
        }

        /// Writes a register; nothing outside of them.
        pub(crate) fn $write(&self, offset: usize, value: $type) {
            if let Some(register) = self.at(offset, size_of::<$type>()) {
                // SAFETY: as for reading.
                unsafe { register.cast::<$type>().write_volatile(value) }
            }
        }
    )*};
}

impl Registers {
    /// The registers that a [`Platform`](crate::Platform) mapped.
    ///
    /// # Safety
    /// `bytes` bytes at `base` are device registers for as long as the program runs.
    pub(crate) unsafe fn new(base: *mut u8, bytes: usize) -> Self {
        Self { base, bytes }
    }

    fn at(&self, offset: usize, bytes: usize) -> Option<*mut u8> {
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        let register = self.base.wrapping_add(offset);
        (fits && (register as usize).is_multiple_of(bytes)).then_some(register)
    }

    access! {
        read8 write8 u8;
        read16 write16 u16;
        read32 write32 u32;
    }

    /// Writes a 64-bit register in halves, as virtio allows (section 4.1.3.1).
    pub(crate) fn write64(&self, offset: usize, value: u64) {
        self.write32(offset, value as u32);
        self.write32(offset + 4, (value >> 32) as u32);
    }
}

/// Memory that the device reads and writes at any time.
#[repr(C, align(4096))]
pub(crate) struct Shared<const N: usize>(UnsafeCell<[u8; N]>);

// SAFETY: it is reached by volatile accesses of plain integers only, and by one owner at a time.
unsafe impl<const N: usize> Sync for Shared<N> {}

impl<const N: usize> Shared<N> {
    pub(crate) const fn new() -> Self {
        Self(UnsafeCell::new([0; N]))
    }

    pub(crate) fn address(&self) -> *const u8 {
        self.0.get().cast_const().cast()
    }

    fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
        // Offsets come from this crate and are constant or masked.
        assert!(offset.is_multiple_of(bytes) && offset + bytes <= N, "an offset outside of the queue");
        self.0.get().cast::<u8>().wrapping_add(offset)
    }

    pub(crate) fn read16(&self, offset: usize) -> u16 {
        // SAFETY: `at` saw that it lies within and is aligned; the memory is never borrowed.
        u16::from_le(unsafe { self.at(offset, 2).cast::<u16>().read_volatile() })
    }

    pub(crate) fn read32(&self, offset: usize) -> u32 {
        // SAFETY: as for `read16`.
        u32::from_le(unsafe { self.at(offset, 4).cast::<u32>().read_volatile() })
    }

    pub(crate) fn write16(&self, offset: usize, value: u16) {
        // SAFETY: as for `read16`.
        unsafe { self.at(offset, 2).cast::<u16>().write_volatile(value.to_le()) }
    }

    pub(crate) fn write32(&self, offset: usize, value: u32) {
        // SAFETY: as for `read16`.
        unsafe { self.at(offset, 4).cast::<u32>().write_volatile(value.to_le()) }
    }

    pub(crate) fn write64(&self, offset: usize, value: u64) {
        // SAFETY: as for `read16`.
        unsafe { self.at(offset, 8).cast::<u64>().write_volatile(value.to_le()) }
    }

    pub(crate) fn clear(&self) {
        for offset in (0..N).step_by(8) {
            self.write64(offset, 0);
        }
    }
}

/// Orders all that was written before against all accesses after.
pub(crate) fn barrier() {
    fence(Ordering::SeqCst);
}

/// Orders all that was written before against what is written after.
pub(crate) fn publish() {
    fence(Ordering::Release);
}

/// Orders what was read before against all accesses after.
pub(crate) fn acquire() {
    fence(Ordering::Acquire);
}
