//! GPUs below their drivers: which chip one is, its registers, and what can be done with them without a driver.
//!
//! * [`identify`](mod@identify): the chip of an NVIDIA GPU, from registers that every one of them has.
//! * [`Registers`]: 32-bit registers of a BAR, through VFIO ([`RegionRegisters`]) or, read-only, through sysfs while the host's
//!   driver has the function ([`ResourceRegisters`]).
//!
//! What is here reads what NVIDIA publishes of its registers, in headers and manuals that each item names. It loads no firmware,
//! and no chip computes by it.

pub mod identify;
mod look;
mod registers;
mod resource;
mod sys;

pub use identify::{Architecture, BootRegisters, Chip, Revision, Unidentified, chip_by_name, identify};
pub use look::{ChipReport, NoChip, report_chip};
pub use registers::{RegionRegisters, RegisterError, Registers};
pub use resource::{NotReadable, ResourceRegisters};

#[cfg(test)]
mod tests;
