//! What an implementation of a queue promises of its memory.
#![allow(unsafe_code)]

use vm_accel::{Memory, MemoryKind};

/// Memory of the device, at an address that only this crate reads.
pub(crate) fn device(address: u64, bytes: u64) -> Memory {
    // SAFETY: the number in the address is that of a buffer which nobody else was given, and which is destroyed when the queue gets
    // this back or its context ends. The host does not reach it.
    unsafe { Memory::from_raw(MemoryKind::Device, address, 0, bytes) }
}

/// A part of the window, which is mapped at `address`.
pub(crate) fn pinned(address: u64, bytes: u64) -> Memory {
    // SAFETY: the part is this connection's alone, and is given back when the queue gets this back or its context ends. The
    // connection keeps the window mapped, whose bytes Rust code reaches by copies only.
    unsafe { Memory::from_raw(MemoryKind::Pinned, address, address, bytes) }
}
