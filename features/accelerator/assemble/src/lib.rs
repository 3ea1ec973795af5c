//! Assemblers and linkers of a device's vendor, in processes of their own with limits.
//!
//! They are programs of millions of lines. What a guest sent becomes the code that they read, so they run outside the
//! caller's process, with a deadline, a limit on memory and on output, and no descriptors but their own; their files are
//! memory.
//!
//! * [`find`]: where a program is.
//! * [`end_all`]: for a process that exits in the middle of one.
//! * [`Job`]: one run of it. [`Program`] says what is run, [`Scratch`] is a file of it.
//! * [`elf`]: a look at what it wrote, before anyone gives that to a driver.
//! * [`AssembleError`]: why there is no code.
//!
//! `vm-cuda` has `ptxas` in this way, and `vm-rocm` LLVM.

//!
//! On Windows there are only [`elf`] and the limits.

pub mod elf;
#[cfg(unix)]
mod error;
#[cfg(unix)]
pub mod find;
#[cfg(unix)]
mod job;
#[cfg(unix)]
mod process;
#[cfg(unix)]
mod spawn;

use std::time::{Duration, Instant};

#[cfg(unix)]
pub use error::{AssembleError, failed};
#[cfg(unix)]
pub use job::Job;
#[cfg(unix)]
pub use process::{Memory, Program, Scratch};
#[cfg(unix)]
pub use spawn::end_all;

/// What an assembler's process may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Until it is killed; its processor time is limited to as much, in whole seconds. All processes that one piece of code
    /// needs share it.
    pub time: Duration,
    /// Bytes of memory, as `Memory` counts them.
    pub memory: u64,
    /// Bytes of each file that it writes: the code, the messages.
    pub output: u64,
}

impl Default for Limits {
    /// 20 seconds, 2 GiB of memory, 64 MiB of output.
    fn default() -> Self {
        Self { time: Duration::from_secs(20), memory: 2 << 30, output: 64 << 20 }
    }
}

impl Limits {
    /// When what begins now must have ended.
    pub fn deadline(&self) -> Instant {
        let now = Instant::now();
        // A time that no clock can count to is as good as a year.
        now.checked_add(self.time).unwrap_or(now + Duration::from_secs(365 * 86_400))
    }
}
