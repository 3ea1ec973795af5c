//! Accelerators of the host that guests share.
//!
//! Each guest has a worker: a process of its own that owns the accelerator's context, and serves the virtqueue by
//! itself. The VMM gives it, once, the guest's RAM as memfds, and at each start of the guest's driver the queue's
//! addresses and two eventfds: the doorbell, which KVM signals (ioeventfd), and the interrupt, which KVM delivers
//! (irqfd). From then on nothing passes through the VMM: a doorbell wakes the worker, and its answer interrupts the
//! guest.
//!
//! ```text
//! guest ──doorbell──▶ KVM ──eventfd──▶ worker ──▶ accelerator
//!   ▲   ◀─interrupt── KVM ◀──eventfd──   │ ▲
//!   └─────────── RAM (memfd) ────────────┘ │ socket: start, ping ▶ ◀ broken, overdue
//!                                         VMM (supervises, SIGKILL)
//! ```
//!
//! The other way, a queue in the VMM's process that hands operations on to the worker, would copy each batch once more and
//! wake two processes for each, and a guest's bytes would be decoded by the process that holds `/dev/kvm`.
//!
//! A reset of the device ends the worker with SIGKILL, and the next start gets a fresh one: whatever a guest did to its
//! context, the reset undoes it.

#[cfg(feature = "rocm")]
mod assembler;
mod meter;
mod process;
mod sys;
mod wire;
mod worker;

#[cfg(feature = "rocm")]
pub(crate) use assembler::main as assembler_main;
pub(crate) use meter::Meter;
pub(crate) use process::{Ready, WorkerError, WorkerProcess};
pub(crate) use wire::{Open, Order, Report, Start};
pub(crate) use worker::main as worker_main;
