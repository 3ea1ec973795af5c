//! The reference VMM: boots KVM guests, gives them the host's PCI devices, runs kernels on its accelerators, and is
//! driven by a command line.

mod accelerator;
mod benchmark;
mod bridge;
pub mod cli;
mod commands;
pub mod config;
pub mod console;
mod context;
#[doc(hidden)]
pub mod control;
#[doc(hidden)]
pub mod daemon;
mod deadlines;
mod describe;
mod failure;
mod flock;
mod gpus;
mod instance;
pub mod json;
mod kernel;
mod known_egpus;
mod limits;
mod log;
mod monitor;
mod npus;
mod output;
mod process;
mod sandbox;
mod saved;
pub mod signals;
mod socket;
#[cfg(test)]
mod sweep;
mod sys;
mod table;
mod usage;
pub mod vmm;

/// A document's snippets, compiled with the doc tests.
#[cfg(all(doctest, feature = "cuda"))]
#[doc = include_str!("../../docs/kernels.md")]
mod kernels {}
