//! Why a machine could not be made or run.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;
use vm_passthrough::PciAddress;
use vm_passthrough::guest::{DeviceError, VmmError};
use vm_passthrough::pci::placement::PlacementError;

use super::boot::BootError;
use super::exits::HotSpot;
use super::numa::NumaError;

/// Why a machine could not be made or run: what, where, and what to do.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MachineError {
    /// `/dev/kvm` could not be opened.
    #[error(
        "{path} can't be opened: {source}; load kvm_intel or kvm_amd, and be root or in the group that owns it (as a rule `kvm`)"
    )]
    NoKvm {
        /// The device node.
        path: PathBuf,
        /// What the Linux kernel answered.
        source: io::Error,
    },
    /// The host's KVM lacks something that every guest needs.
    #[error("the host's KVM lacks {what}; Linux 5.10 or newer on x86-64 has it")]
    KvmLacks {
        /// The missing capability.
        what: &'static str,
    },
    /// A KVM call failed.
    #[error("{operation} failed: {source}")]
    Kvm {
        /// The call, as in `KVM_CREATE_VM`.
        operation: &'static str,
        /// What the Linux kernel answered.
        source: io::Error,
    },
    /// The guest's RAM could not be made.
    #[error("{size} of guest RAM can't be made on a host that has {host}: {reason}")]
    Memory {
        /// Size that was asked for.
        size: String,
        /// What the host has.
        host: String,
        /// Why not, and what to do.
        reason: String,
    },
    /// The guest can't have its NUMA nodes.
    #[error(transparent)]
    Numa(#[from] NumaError),
    /// A number in the guest's configuration is out of range.
    #[error("the guest's {what} is {value}: {reason}")]
    Config {
        /// Which.
        what: &'static str,
        /// Its value.
        value: u64,
        /// What it may be.
        reason: &'static str,
    },
    /// The guest's program could not be loaded.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// A disk could not be opened.
    #[error("the disk {path} can't be used: {reason}")]
    Disk {
        /// The image or block device.
        path: PathBuf,
        /// Why not, and what to do.
        reason: String,
    },
    /// An accelerator that the guest shares could not be had.
    #[error("the guest can't share the accelerator {device}: {reason}")]
    Accelerator {
        /// Which.
        device: String,
        /// Why not, and what to do.
        reason: String,
    },
    /// A network interface could not be had.
    #[error("the guest can't have a network interface at the tap {tap}: {reason}")]
    Net {
        /// Name of the tap.
        tap: String,
        /// Why not, and what to do.
        reason: String,
    },
    /// The guest can't have a vsock device.
    #[error("the guest can't have a vsock device: {reason}")]
    Vsock {
        /// Why not, and what to do.
        reason: String,
    },
    /// There is no slot left on the guest's PCI bus 0.
    #[error("the guest's PCI bus 0 is full: it has room for {limit} devices; remove one")]
    BusFull {
        /// How many fit.
        limit: usize,
    },
    /// The BARs of the devices could not be placed in the guest's address space.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// The same function was added twice.
    #[error("{address} was already added to this guest")]
    Twice {
        /// The host's function.
        address: PciAddress,
    },
    /// The functions are not of one device, and so can't be in one slot.
    #[error("{address} and {other} are not functions of one device; add each by itself")]
    OtherDevice {
        /// One of them.
        address: PciAddress,
        /// Another.
        other: PciAddress,
    },
    /// No port is free for a device.
    #[error(
        "no hot-plug slot of the guest is free; detach a device, or start the guest with more: `hot_plug_slots` in its file"
    )]
    NoPort,
    /// The function is not in this guest.
    #[error("{address} is not in this guest")]
    NotThere {
        /// The host's function.
        address: PciAddress,
    },
    /// The VMM side of a device failed.
    #[error(transparent)]
    Vmm(#[from] VmmError),
    /// A device failed.
    #[error("{address} failed: {source}")]
    Device {
        /// The host's function.
        address: PciAddress,
        /// What it said.
        source: DeviceError,
    },
    /// A thread could not be started.
    #[error("the {what} thread can't be started: {source}; raise the limit on threads (ulimit -u)")]
    Thread {
        /// Which.
        what: &'static str,
        /// What the Linux kernel answered.
        source: io::Error,
    },
    /// A thread of this program failed in a way that it should not be able to.
    #[error("the {what} thread panicked; this is a bug of this program")]
    Panicked {
        /// Which.
        what: &'static str,
    },
    /// Loading the guest's program did not stop in time.
    #[error(
        "reading the guest's kernel or initrd did not end within {deadline:?} of being asked to; see whether the storage that \
         they are on still answers"
    )]
    Loading {
        /// How long was waited.
        deadline: Duration,
    },
    /// A vCPU did not stop in time.
    #[error(
        "vCPU {vcpu} did not stop within {deadline:?}: it is stuck in {}; this process may still use the guest's devices until it ends",
        access.map_or("the Linux kernel (KVM_RUN); see dmesg and the storage that the host swaps to".into(), |access| format!(
            "its {access}, which what is there does not answer"
        ))
    )]
    Stuck {
        /// Index of the vCPU.
        vcpu: usize,
        /// What the guest accesses; `None` when it has not left to this process.
        access: Option<HotSpot>,
        /// How long was waited.
        deadline: Duration,
    },
    /// A vCPU was [stuck](Self::Stuck) in an earlier run.
    #[error(
        "this machine can't be used any more, as a vCPU of it is stuck since an earlier run; make a new one"
    )]
    Unusable,
    /// A device of the VMM did not stop in time. The machine keeps it, with what it uses, until it has.
    #[error("{what} did not stop within {deadline:?} and is still in use by this process; {remedy}")]
    Busy {
        /// The device.
        what: String,
        /// What to look at.
        remedy: &'static str,
        /// How long was waited.
        deadline: Duration,
    },
    /// KVM could not run the guest further.
    #[error("vCPU {vcpu} can't run on: {reason}")]
    Vcpu {
        /// Index of the vCPU.
        vcpu: usize,
        /// What KVM said.
        reason: String,
    },
}

impl MachineError {
    /// A failed KVM call.
    pub(super) fn kvm(operation: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |error| Self::Kvm { operation, source: io::Error::from_raw_os_error(error.errno()) }
    }
}
