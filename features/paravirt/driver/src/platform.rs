//! What the client needs of the machine that it runs on.
#![allow(unsafe_code)]

use core::time::Duration;

/// The machine, as one PCI function's driver sees it.
///
/// # Safety
/// [`map`](Platform::map) gives addresses at which the device's registers can be accessed for as long as the program
/// runs, and [`physical`](Platform::physical) the address by which the device reaches memory of the program.
pub unsafe trait Platform {
    /// Reads 32 bits of the function's config space at an offset that is a multiple of 4.
    fn config_read(&self, offset: u16) -> u32;

    /// Writes 32 bits of the function's config space at an offset that is a multiple of 4.
    fn config_write(&self, offset: u16, value: u32);

    /// Where the program can access `bytes` bytes of device registers at a physical address; `None` where it can't.
    fn map(&self, physical: u64, bytes: u64) -> Option<*mut u8>;

    /// The physical address of memory of the program, which is contiguous there. `None` where it is not.
    fn physical(&self, memory: *const u8, bytes: usize) -> Option<u64>;

    /// The time since some fixed moment.
    fn now(&self) -> Duration;

    /// Called again and again while the client looks for an answer.
    fn relax(&self) {
        core::hint::spin_loop();
    }

    /// How long the client looks for an answer before it wants an interrupt and [sleeps](Self::sleep). The host is asked to
    /// send none meanwhile: an interrupt takes longer than a small launch.
    fn poll(&self) -> Duration {
        Duration::from_micros(100)
    }

    /// Called again and again once the client has looked for long enough: sleeps until an interrupt comes, for at most
    /// `limit`. It may return sooner, and by itself it only [relaxes](Self::relax).
    ///
    /// The interrupt may come before this is called. So who sleeps holds interrupts back, asks `answered`, and only if
    /// that says no, sleeps and lets interrupts through in one step: `sti` and `hlt` on x86.
    fn sleep(&self, limit: Duration, answered: &dyn Fn() -> bool) {
        let _ = (limit, answered);
        self.relax();
    }

    /// The interrupt message that the device is to send when batches are completed; `None` for no interrupts, and then
    /// the client never sleeps.
    fn interrupt(&self) -> Option<Message> {
        None
    }
}

/// An interrupt message (PCI Local Bus 3.0, 6.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Where it is written.
    pub address: u64,
    /// What is written.
    pub data: u32,
}
