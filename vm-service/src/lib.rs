//! The reference VMM: boots KVM guests, gives them the host's PCI devices, runs kernels on its accelerators, and is
//! driven by a command line.

mod accelerators;
pub mod api;
pub mod cli;
pub mod config;
mod cuda_bridge;
#[doc(hidden)]
pub mod daemon;
mod deadlines;
mod devices;
mod failure;
#[doc(hidden)]
pub mod guest;
mod log;
pub mod os;
#[cfg(test)]
mod sweep;
mod text;
pub mod vmm;

/// A document's snippets, compiled with the doc tests.
#[cfg(all(doctest, feature = "cuda"))]
#[doc = include_str!("../../docs/kernels.md")]
mod kernels {}
