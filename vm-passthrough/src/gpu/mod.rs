//! GPUs below their drivers: which chip one is, its registers, and what can be done with them without a driver.
//!
//! * [`identify`](mod@identify): the chip of an NVIDIA GPU, from registers that every one of them has.
//! * [`Registers`]: 32-bit registers of a BAR, through VFIO ([`RegionRegisters`]) or, read-only, through sysfs while the host's
//!   driver has the function ([`ResourceRegisters`]).
//!
//! * [`power_state`] and [`set_power_state`], by the power management capability; [`bring_up`], from a reset to a GPU that may do DMA. Each
//!   step is verified, and each can fail and say at what.
//! * [`ring`]: submissions in memory, a doorbell, fences and interrupts. It runs against a modelled function alone.
//!
//! What is here reads what NVIDIA publishes of its registers, in headers and manuals that each item names. It loads no firmware,
//! and no chip computes by it.

mod bring_up;
mod clock;
pub mod identify;
mod interrupt;
mod look;
mod power;
mod registers;
mod resource;
pub mod ring;
mod sequence;
mod sys;

pub use bring_up::{BroughtUp, bring_up};
#[cfg(feature = "sim")]
pub(crate) use clock::take as take_signal;
pub use clock::{Clock, HostClock};
pub use identify::{Architecture, BootRegisters, Chip, Revision, Unidentified, chip_by_name, identify};
pub use interrupt::Interrupt;
pub use look::{ChipReport, NoChip, report_chip};
pub use power::{PowerChange, power_state, set_power_state};
pub use registers::{RegionRegisters, RegisterError, Registers};
pub use resource::{NotReadable, ResourceRegisters};
pub use ring::{ChannelSetup, Command, Completion, DOORBELL, Layout, Ring, RingError, RingFailure, Ticket};
pub use sequence::{Problem, SequenceError, Step};

#[cfg(test)]
mod tests;
