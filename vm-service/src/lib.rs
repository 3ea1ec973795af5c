//! The reference VMM and its command line: it boots KVM guests, passes the host's PCI devices to them, and runs kernels on its accelerators. What other
//! VMMs need too is in `vm-passthrough`, which does not use this crate.
//!
//! | module | does |
//! | --- | --- |
//! | [`cli`] | parses the command line and runs a command |
//! | [`daemon`] | answers the HTTP API, and starts the processes of guests |
//! | [`guest`] | runs a guest from its start until all is released, and answers on its control socket |
//! | [`vmm`] | is the machine: memory, vCPUs, PCI Express, ACPI, virtio, the serial console |
//! | `accelerators` | serves a GPU or an NPU to guests, in a process of its own |
//! | `cuda_bridge` | serves the calls of CUDA programs |
//! | `devices` | lists the host's GPUs and NPUs, and keeps what is configured of them |
//! | [`config`] | reads guest files |
//! | [`api`] | has the types of what `--json` prints, and the daemon and a guest answer |
//! | `log` | writes, rotates and reads logs |
//! | `text` | words values, and aligns tables |
//! | [`os`] | starts and confines processes; locks, sockets, signals, limits |
//!
//! `deadlines` has all deadlines, and `failure` the exit statuses.

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
