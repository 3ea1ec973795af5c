//! An open function in another process than the one that opened it.
//!
//! Who opens a function is its keeper: it holds the claim, keeps the function open, and does what takes a path or rights. All
//! else takes the descriptors alone, so it can be done by a process that has no file system and no rights, as one should be in
//! which a guest's accesses end.
//!
//! ```text
//! keeper     VfioDevice::share ─▶ DeviceParts ─▶ VfioDevice::receive     regions, interrupts, DMA mappings of its own memory
//!            wake, reset and its proof, presence ◀─── Keeper ───
//! ```
//!
//! A reset is proved through `config` in sysfs, which goes past vfio-pci to registers that move BARs and send messages: with
//! that file, a guest that has taken over its process would reach further than with the function. The keeper's word is also the
//! one that the next guest relies on. So the file stays with the keeper, which resets by its own descriptor.
//!
//! Memory that the other process maps for DMA is locked by it: against its own limit (`RLIMIT_MEMLOCK`, unless it has
//! `CAP_IPC_LOCK`), on its own account with a container, and with iommufd on that of its user.

use std::fmt;
use std::os::fd::OwnedFd;

use super::interface::{DeviceFile, DeviceInfo, ResetReport, Result};
use super::{Presence, VfioDevice};
use crate::PciAddress;

/// An open function as another process can have it: descriptors, and what is known of it.
#[derive(Debug)]
pub struct DeviceParts {
    /// Which function.
    pub address: PciAddress,
    /// What it says of itself.
    pub info: DeviceInfo,
    /// Whether it is a virtual function.
    pub is_virtual: bool,
    /// That opening it reset it, if nothing was done with it since.
    pub reset_by_open: Option<ResetReport>,
    /// Its file.
    pub file: OwnedFd,
    /// Readable when the host wants it back; `None` where the Linux kernel does not say.
    pub wanted: Option<OwnedFd>,
    /// Its group's number and file, on that back end.
    pub group: Option<(u32, OwnedFd)>,
}

/// What is asked of who opened a function, by who has only its descriptors.
pub trait Keeper: fmt::Debug + Send + Sync {
    /// As [`DeviceFile::wake`].
    ///
    /// # Errors
    /// As there.
    fn wake(&self) -> Result<()>;
    /// As [`DeviceFile::reset_and_prove`].
    ///
    /// # Errors
    /// As there.
    fn reset_and_prove(&self) -> Result<ResetReport>;
    /// As [`DeviceFile::set_at_rest`].
    fn set_at_rest(&self, at_rest: bool);
    /// As [`VfioDevice::presence`].
    fn presence(&self) -> Presence;
}

impl Keeper for VfioDevice {
    fn wake(&self) -> Result<()> {
        DeviceFile::wake(self)
    }

    fn reset_and_prove(&self) -> Result<ResetReport> {
        DeviceFile::reset_and_prove(self)
    }

    fn set_at_rest(&self, at_rest: bool) {
        DeviceFile::set_at_rest(self, at_rest);
    }

    fn presence(&self) -> Presence {
        Self::presence(self)
    }
}

#[cfg(test)]
mod tests;
