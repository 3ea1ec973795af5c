//! This machine, as the accelerator's client sees it.
#![allow(unsafe_code)]

use core::time::Duration;

use vm_paravirt_guest::{Message, Platform};

use crate::pci::Function;
use crate::sys;

/// A function on a machine without an operating system: memory is mapped to its own addresses.
#[derive(Clone)]
pub(super) struct Machine {
    function: Function,
    hz: u64,
    poll: Duration,
}

impl Machine {
    /// The machine, with the accelerator's function and the speed of its time stamp counter.
    pub(super) fn new(function: Function, hz: u64) -> Self {
        Self { function, hz: hz.max(1), poll: Duration::from_micros(100) }
    }

    /// The same machine, where waiting is halting, from the start.
    pub(super) fn halting(self) -> Self {
        Self { poll: Duration::ZERO, ..self }
    }

    /// Cycles in a second.
    pub(super) fn hz(&self) -> u64 {
        self.hz
    }

    /// Nanoseconds of N cycles.
    pub(super) fn nanoseconds(&self, cycles: u64) -> u64 {
        (u128::from(cycles) * 1_000_000_000 / u128::from(self.hz)) as u64
    }
}

// SAFETY: all physical memory below 4 GiB is mapped to its own address, and `map_registers` does so for what lies above.
unsafe impl Platform for Machine {
    fn config_read(&self, offset: u16) -> u32 {
        self.function.read(offset)
    }

    fn config_write(&self, offset: u16, value: u32) {
        self.function.write(offset, value);
    }

    fn map(&self, physical: u64, _bytes: u64) -> Option<*mut u8> {
        sys::map_registers(physical).then_some(physical as *mut u8)
    }

    fn physical(&self, memory: *const u8, _bytes: usize) -> Option<u64> {
        Some(memory as u64)
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.nanoseconds(sys::cycles()))
    }

    fn poll(&self) -> Duration {
        self.poll
    }

    fn sleep(&self, limit: Duration, answered: &dyn Fn() -> bool) {
        sys::halt_for(limit.as_nanos() as u64, answered);
    }

    fn interrupt(&self) -> Option<Message> {
        Some(Message { address: sys::MSI_ADDRESS.into(), data: sys::INTERRUPT_VECTOR.into() })
    }
}
