//! The boundary to a VMM: [`Vmm`] is what it gives, [`PassthroughDevice`] is what it gets.

use std::error::Error as StdError;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use thiserror::Error;

use crate::PciAddress;
use crate::pci::placement::{self, ConfigAccess};
use crate::vfio::{ErrorSeverity, Mapping, VfioError};

/// A piece of guest RAM.
#[derive(Clone, Debug)]
pub struct RamRegion {
    /// Guest-physical address.
    pub guest: u64,
    /// The memory in this process.
    pub memory: Arc<dyn Mapping>,
}

/// A message-signalled interrupt as the guest programmed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsiMessage {
    /// Address that the device would write to.
    pub address: u64,
    /// Value that it would write.
    pub data: u32,
}

/// Names one mapping made by [`Vmm::map`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MapId(pub u32);

/// Names one interrupt route made by [`Vmm::add_route`] or [`Vmm::add_line`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RouteId(pub u32);

/// Why a VMM could not do what a device needs.
#[derive(Debug, Error)]
#[error("the VMM could not {what}: {source}")]
pub struct VmmError {
    /// What was asked.
    pub what: &'static str,
    /// Why not.
    pub source: Box<dyn StdError + Send + Sync>,
}

impl VmmError {
    /// What was asked, and why not: an error, or a text.
    pub fn new(what: &'static str, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self { what, source: source.into() }
    }
}

/// A BAR that decodes, where the guest put it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodedBar {
    /// Its index; 6 for the expansion ROM.
    pub bar: u8,
    /// Guest-physical address, or port.
    pub address: u64,
    /// Size in bytes.
    pub size: u64,
    /// Whether it is port I/O.
    pub io: bool,
}

/// What a VMM gives to the devices passed to its guest, whatever its hypervisor. `KvmVmm`, behind the cargo feature `kvm`,
/// implements it for kvm-ioctls and vm-memory. A VMM whose interrupt controller has to know which device sends a message,
/// as Arm's does, gives each device a `Vmm` of its own.
pub trait Vmm: fmt::Debug + Send + Sync {
    /// The guest's RAM now, sorted by guest-physical address. A device that is attached learns of changes by
    /// [`PassthroughDevice::ram_added`] and [`PassthroughDevice::ram_removed`].
    fn ram(&self) -> Vec<RamRegion>;
    /// Makes `memory` appear at guest-physical address `guest`, so that the guest reaches the device with no exit,
    /// and keeps it until [`unmap`](Self::unmap).
    ///
    /// # Errors
    /// When the range overlaps another or there are no slots left.
    fn map(&self, guest: u64, memory: Arc<dyn Mapping>) -> Result<MapId, VmmError>;
    /// Undoes [`map`](Self::map).
    ///
    /// # Errors
    /// When the hypervisor refuses.
    fn unmap(&self, id: MapId) -> Result<(), VmmError>;
    /// Makes a route from an eventfd to the guest's interrupt controller, masked at first.
    ///
    /// # Errors
    /// When there are no routes left.
    fn add_route(&self, trigger: BorrowedFd<'_>) -> Result<RouteId, VmmError>;
    /// Points a route at a message, or masks it with `None`. While it is masked the eventfd collects what comes,
    /// and it is delivered on unmasking.
    ///
    /// # Errors
    /// When the hypervisor refuses.
    fn set_route(&self, route: RouteId, message: Option<MsiMessage>) -> Result<(), VmmError>;
    /// Connects eventfds to a line of the guest's interrupt controller, one of those that a device was
    /// [given](PassthroughDevice::connect_pins): level-triggered, and shared by any number of devices. Whenever `trigger` is
    /// signalled the line is asserted. When the guest has ended the interrupt (EOI), it is deasserted, and then each `resample`
    /// of the line is signalled: a device that still wants service signals `trigger` again. A VMM whose interrupt controller
    /// is its own waits for the one eventfd and signals the other.
    ///
    /// A VMM that connects no pins keeps the provided method, which fails.
    ///
    /// # Errors
    /// When there is no such line, or the hypervisor refuses.
    fn add_line(
        &self,
        line: u32,
        trigger: BorrowedFd<'_>,
        resample: BorrowedFd<'_>,
    ) -> Result<RouteId, VmmError> {
        let _ = (trigger, resample);
        Err(VmmError::new("connect an interrupt line", format!("it has no line {line}")))
    }
    /// Removes a route. A line that nothing is connected to any more is deasserted.
    ///
    /// # Errors
    /// When the hypervisor refuses.
    fn remove_route(&self, route: RouteId) -> Result<(), VmmError>;
    /// Notes all BARs of a device that decode now, whenever one may have moved or was turned on or off. An access to memory or
    /// a port that exits to the VMM and falls into one is for [`PassthroughDevice::bar_read`] or [`PassthroughDevice::bar_write`]. The
    /// guest may put BARs over each other, and over anything else. The device must not be called from here: it is locked.
    fn bars_changed(&self, device: PciAddress, bars: &[DecodedBar]);
    /// Tells the hypervisor of a VFIO file, which some devices need; nothing to do by default.
    ///
    /// # Errors
    /// When the hypervisor refuses.
    fn add_vfio_file(&self, _file: BorrowedFd<'_>) -> Result<(), VmmError> {
        Ok(())
    }
    /// Undoes [`add_vfio_file`](Self::add_vfio_file).
    ///
    /// # Errors
    /// When the hypervisor refuses.
    fn remove_vfio_file(&self, _file: BorrowedFd<'_>) -> Result<(), VmmError> {
        Ok(())
    }
}

/// Why a device could not serve its guest. A guest whose access fails sees all ones, or nothing written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The access is outside the BAR, or there is no such BAR.
    #[error("the guest accessed {len} bytes at {offset:#x} of BAR {bar}, which is outside it")]
    OutOfRange {
        /// BAR index.
        bar: u8,
        /// Offset within the BAR.
        offset: u64,
        /// Length in bytes.
        len: usize,
    },
    /// An access to the device does not end.
    #[error(
        "an access of the guest to the device did not end within {deadline:?}: the device or the Linux kernel is stuck in \
         it; look at the Linux kernel's log"
    )]
    Stuck {
        /// How long was waited.
        deadline: std::time::Duration,
    },
    /// RAM would be discarded that a device reaches.
    #[error(
        "{len} bytes of RAM at {guest:#x} can't be discarded: {device} has them pinned for DMA, and would go on with the old pages; \
         turn ballooning, free page reporting and virtio-mem off for a guest with devices, or detach {device} first"
    )]
    Pinned {
        /// Guest-physical address.
        guest: u64,
        /// How many bytes from there on.
        len: u64,
        /// The device's function.
        device: PciAddress,
    },
    /// The guest's other devices may still reach it.
    #[error(
        "a BAR of the device is still mapped for the DMA of the guest's other devices: {reason}; it is tried again when the device \
         is detached, and ends with the guest"
    )]
    PeersReach {
        /// Why it could not be unmapped.
        reason: String,
    },
    /// It was asked to give up attaching it.
    #[error("attaching the device was given up, as was asked")]
    Cancelled,
    /// The device failed.
    #[error(transparent)]
    Device(#[from] VfioError),
    /// The VMM failed.
    #[error(transparent)]
    Vmm(#[from] VmmError),
}

/// A device that a guest owns: one PCI function on the guest's bus.
///
/// The VMM routes the guest's config and BAR accesses here, from any vCPU's thread. None of the methods may
/// panic or block on the guest, whatever the guest writes.
pub trait PassthroughDevice: fmt::Debug + Send + Sync {
    /// The host's function behind it.
    fn address(&self) -> PciAddress;
    /// Names the slot that a guest sees it in: functions with the same answer are functions of one device there. It is
    /// function 0 of the host's device that it is a function of; a virtual function, a device of its own, is named by itself.
    fn slot(&self) -> PciAddress {
        placement::slot_of(self.address(), false)
    }
    /// Says which of the guest's interrupt lines the pins of its slot lead to, INTA's first, as [`Vmm::add_line`] names them.
    /// Until then the guest is shown no interrupt pin. A bridge above the slot changes the order (PCI-to-PCI Bridge 1.2, 9.1).
    ///
    /// A device without a pin keeps the provided method, which does nothing.
    fn connect_pins(&self, lines: [u32; 4]) {
        let _ = lines;
    }
    /// Makes it usable by the guest: powered, reset, able to reach the guest's RAM.
    ///
    /// # Errors
    /// When the device or the VMM fails; the device is then as it was. Where that could not be undone,
    /// [`detach`](Self::detach) does the rest.
    fn attach(&self) -> Result<(), DeviceError>;
    /// Stops it, of a guest that does not run: no interrupts, no DMA, nothing decoded. [`reset`](Self::reset) or
    /// [`detach`](Self::detach) follows. A function that can be reset only along with another of its slot or bus needs
    /// that other one to be stopped.
    ///
    /// A device that needs no other for its reset keeps the provided method, which does nothing.
    ///
    /// # Errors
    /// When the device fails. All that could be stopped is stopped even then.
    fn stop(&self) -> Result<(), DeviceError> {
        Ok(())
    }
    /// Takes it from the guest: no interrupts, no DMA, nothing mapped, reset. Does nothing on a device that is
    /// not attached. One that the host takes away meanwhile is not reset, as nothing can, and that is no error.
    ///
    /// # Errors
    /// When the device fails, or its reset can't be proved. All that could be undone is undone even then, the guest
    /// reaches the device no more, and what could not be undone stays owed: calling it again does the rest, and
    /// succeeds only once nothing is left.
    fn detach(&self) -> Result<(), DeviceError>;
    /// Reads 1, 2 or 4 bytes of config space at `offset`, below 4096; all ones where nothing is.
    fn config_read(&self, offset: u16, data: &mut [u8]);
    /// Writes 1, 2 or 4 bytes of config space at `offset`. Moving or enabling a BAR, or programming an interrupt,
    /// takes effect before it returns.
    fn config_write(&self, offset: u16, data: &[u8]);
    /// Lets it reach RAM that the guest gets while it is attached. [`Vmm::ram`] has the region by then. Does nothing when it
    /// reaches it already, or is not attached.
    ///
    /// A device that does no DMA keeps the provided method, which does nothing.
    ///
    /// # Errors
    /// When the region can't be mapped for DMA: the device does not reach it, and the guest should not get it.
    fn ram_added(&self, region: &RamRegion) -> Result<(), DeviceError> {
        let _ = region;
        Ok(())
    }
    /// Keeps it from RAM that the guest loses, the region that starts at guest-physical address `guest`. Does nothing when it
    /// does not reach it.
    ///
    /// A device that does no DMA keeps the provided method, which does nothing.
    ///
    /// # Errors
    /// When the region can't be unmapped: the device still reaches it, and it must stay what it is.
    fn ram_removed(&self, guest: u64) -> Result<(), DeviceError> {
        let _ = guest;
        Ok(())
    }
    /// Checks that the VMM may discard the content of RAM that the guest keeps, as a balloon, free page reporting or virtio-mem
    /// would: from guest-physical address `guest` on, `len` bytes. Linux would give the guest other pages there, and the device
    /// would go on with those that it has pinned: the guest's memory would be corrupted. RAM that the guest loses for good is
    /// [removed](Self::ram_removed).
    ///
    /// A device that does no DMA keeps the provided method, which allows it.
    ///
    /// # Errors
    /// [`DeviceError::Pinned`] while the device reaches some of it.
    fn check_discard(&self, guest: u64, len: u64) -> Result<(), DeviceError> {
        let _ = (guest, len);
        Ok(())
    }
    /// Reads 1 to 8 bytes of a BAR. On an error `data` is all ones.
    ///
    /// # Errors
    /// When the access is out of range or the device fails.
    fn bar_read(&self, bar: u8, offset: u64, data: &mut [u8]) -> Result<(), DeviceError>;
    /// Writes 1 to 8 bytes of a BAR.
    ///
    /// # Errors
    /// When the access is out of range or the device fails.
    fn bar_write(&self, bar: u8, offset: u64, data: &[u8]) -> Result<(), DeviceError>;
    /// Shows the guest that the function had an uncorrectable error, in its capability Advanced Error Reporting. Answers whether the
    /// function sends a message of it to the port above, as the guest may have enabled (PCI Express Base 6.0, 6.2.6).
    ///
    /// A device without the capability keeps the provided method, which shows nothing.
    fn report_error(&self, severity: ErrorSeverity) -> bool {
        let _ = severity;
        false
    }
    /// Resets the function, for a guest that reboots.
    ///
    /// # Errors
    /// When the reset fails or cannot be proved.
    fn reset(&self) -> Result<(), DeviceError>;
}

impl<D: PassthroughDevice + ?Sized> ConfigAccess for D {
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.config_read(offset, data);
    }

    fn write_config(&self, offset: u16, data: &[u8]) {
        self.config_write(offset, data);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Implements the required methods only.
    #[derive(Debug)]
    struct Minimal;

    impl PassthroughDevice for Minimal {
        fn address(&self) -> PciAddress {
            "0000:65:00.0".parse().unwrap()
        }
        fn attach(&self) -> Result<(), DeviceError> {
            Ok(())
        }
        fn detach(&self) -> Result<(), DeviceError> {
            Ok(())
        }
        fn config_read(&self, _offset: u16, data: &mut [u8]) {
            data.fill(0xff);
        }
        fn config_write(&self, _offset: u16, _data: &[u8]) {}
        fn bar_read(&self, _bar: u8, _offset: u64, data: &mut [u8]) -> Result<(), DeviceError> {
            data.fill(0xff);
            Ok(())
        }
        fn bar_write(&self, _bar: u8, _offset: u64, _data: &[u8]) -> Result<(), DeviceError> {
            Ok(())
        }
        fn reset(&self) -> Result<(), DeviceError> {
            Ok(())
        }
    }

    #[test]
    fn a_device_without_error_reporting_sends_no_message() {
        for severity in [ErrorSeverity::NonFatal, ErrorSeverity::Fatal] {
            assert!(!Minimal.report_error(severity), "{severity}");
        }
    }
}
