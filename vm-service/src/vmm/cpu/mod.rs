//! The guest's processors: what CPUID says of them, and the state that they start in.

pub(super) mod cpuid;
mod registers;
mod snapshot;
pub(super) mod tsc;

pub(super) use registers::{enter, write_tables};
pub(super) use snapshot::{IrqChips, ResetState};
