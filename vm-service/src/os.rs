//! What this program asks of the operating system: processes and what confines them, locks, sockets, signals and limits.

pub(crate) mod flock;
pub(crate) mod limits;
pub(crate) mod output;
pub(crate) mod process;
pub(crate) mod sandbox;
pub mod signals;
pub(crate) mod socket;
pub(crate) mod sys;
