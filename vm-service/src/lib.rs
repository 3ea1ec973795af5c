//! The reference VMM: boots KVM guests, gives them the host's PCI devices, and is driven by a command line.

pub mod config;
pub mod console;
pub mod signals;
