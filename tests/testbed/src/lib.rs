//! The testbed: Linux in QEMU with an emulated IOMMU, emulated PCI devices and emulated nested virtualisation, in
//! which the real `vm-service` uses the real KVM and the real VFIO.
//!
//! ```text
//! this machine ── QEMU, software emulation ──▶ L1: Linux, vm-service ── KVM, VFIO ──▶ L2: the guest, with the device
//! ```
//!
//! Two programs share this crate. `testbed` runs on this machine: it provisions QEMU and the Linux kernels
//! ([`provision`]), builds what goes inside, boots L1 once per scenario and variant and judges it ([`host`]).
//! `testbed-agent` is the init process of L1 and of Linux guests in L2: it sets the machine up, runs its side of the
//! scenario, reports and powers off ([`agent`]). A scenario is one file under [`scenarios`]: the devices, what L1
//! does, what L2 does.

pub mod agent;
pub mod cpio;
pub mod host;
pub mod provision;
pub mod report;
pub mod scenario;
pub mod scenarios;
pub mod sweep;
