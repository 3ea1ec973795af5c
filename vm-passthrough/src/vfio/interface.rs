//! The boundary to VFIO: what a device file and a DMA address space can do, whichever back end, or simulated
//! device, is behind it.

use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use thiserror::Error;

use crate::PciAddress;
use crate::iommu::IovaRange;
use crate::pci::ResetMethod;

/// How the Linux kernel exposes the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Backend {
    /// `/dev/iommu` and `/dev/vfio/devices/vfioN`.
    Iommufd,
    /// `/dev/vfio/vfio` and `/dev/vfio/GROUP`.
    Group,
}

/// Why VFIO could not do what was asked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VfioError {
    /// A system call failed.
    #[error("{operation} on {path} failed: {source}; {remedy}")]
    System {
        /// What was asked, as in `VFIO_DEVICE_RESET`.
        operation: &'static str,
        /// The device node or function.
        path: String,
        /// What the Linux kernel answered.
        source: io::Error,
        /// What to do about it.
        remedy: &'static str,
    },
    /// The kernel or the device gave an answer that cannot be.
    #[error("{path} answered {operation} with {what}; it is broken or hostile and was not used")]
    InvalidResponse {
        /// What was asked.
        operation: &'static str,
        /// The device node or function.
        path: String,
        /// What is wrong with the answer.
        what: String,
    },
    /// The range cannot be mapped for DMA.
    #[error("the DMA range {start:#x}..={end:#x} can't be mapped: {reason}")]
    Range {
        /// First I/O virtual address.
        start: u64,
        /// Last I/O virtual address.
        end: u64,
        /// Why not, and what to do.
        reason: String,
    },
    /// An access outside a region, or to a region that the device does not have.
    #[error("access of {len} bytes at {offset:#x} is outside region {region}")]
    OutOfRegion {
        /// Region index.
        region: u32,
        /// Offset within the region.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The device did not come out of reset, or none of its resets works.
    #[error("{address} was not reset: {reason}")]
    Reset {
        /// The function.
        address: PciAddress,
        /// What was tried and what was seen, and what to do.
        reason: String,
    },
    /// The host has fewer interrupt vectors left than were to be enabled. None of them is enabled.
    #[error(
        "cannot enable {wanted} interrupt vectors of {address}: the host has {available} left; turn on interrupt \
         remapping in the firmware and on the Linux kernel's command line, or stop other users of interrupts"
    )]
    TooFewVectors {
        /// The function.
        address: PciAddress,
        /// Vectors that were to be enabled, counted from the first.
        wanted: u32,
        /// Vectors that the host can enable.
        available: u32,
    },
    /// More memory would be locked than the process may lock.
    #[error(
        "{needed} more bytes can't be locked for DMA: {locked} of the limit of {limit} are locked already; raise the \
         limit to at least {total} (ulimit -l, LimitMEMLOCK= in systemd), or give the process CAP_IPC_LOCK",
        total = .needed.saturating_add(*.locked)
    )]
    LockedMemory {
        /// Bytes that were to be locked.
        needed: u64,
        /// Bytes that are locked for the address space already.
        locked: u64,
        /// Bytes that it may lock (`RLIMIT_MEMLOCK`).
        limit: u64,
    },
    /// More ranges would be mapped than the Linux kernel keeps account of.
    #[error(
        "mapping the guest's RAM for DMA takes {needed} entries at least, and {left} are left for its devices: raise the limit, \
         which holds for a guest from its first device on (echo 65535 > \
         /sys/module/vfio_iommu_type1/parameters/dma_entry_limit), or use iommufd, which has none"
    )]
    DmaEntries {
        /// How many ranges are to be mapped at least.
        needed: u64,
        /// How many can be (`VFIO_IOMMU_TYPE1_INFO_CAP_DMA_AVAIL`).
        left: u64,
    },
    /// It is still in use, or closed already.
    #[error("{what} can't be used so now: {reason}")]
    Busy {
        /// The device or address space.
        what: String,
        /// By whom, and what to do.
        reason: String,
    },
    /// The host takes it away: it is unplugged, removed or unbound.
    #[error(
        "the host wants {address} back, and the Linux kernel, which keeps it locked for whoever takes it away, does not reset \
         it meanwhile; close it"
    )]
    WantedBack {
        /// The function.
        address: PciAddress,
    },
    /// The function does not answer or can't be woken.
    #[error("{address} does not answer: {reason}")]
    Lost {
        /// The function.
        address: PciAddress,
        /// What was seen, and what to do.
        reason: String,
    },
    /// Neither back end can open the device.
    #[error("{address} can't be opened through VFIO: {reason}")]
    Unavailable {
        /// The function.
        address: PciAddress,
        /// Why, and what to do.
        reason: String,
    },
}

/// Result of a VFIO operation.
pub type Result<T, E = VfioError> = std::result::Result<T, E>;

/// What a device file says of itself (`VFIO_DEVICE_GET_INFO`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct DeviceInfo {
    /// Number of regions.
    pub regions: u32,
    /// Number of interrupt indexes.
    pub irqs: u32,
    /// Whether the device can be reset on its own.
    pub reset: bool,
}

/// One region of the device (`VFIO_DEVICE_GET_REGION_INFO`): a BAR, the ROM or config space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionInfo {
    /// Index, as in `VFIO_PCI_BAR0_REGION_INDEX`.
    pub index: u32,
    /// Size in bytes, 0 when the device has no such region.
    pub size: u64,
    /// Whether reads are allowed.
    pub readable: bool,
    /// Whether writes are allowed.
    pub writable: bool,
    /// Parts that may be mapped into memory, as offset and length within the region, page-aligned, sorted, not
    /// overlapping. Empty when the region must be accessed by read and write.
    pub mappable: Vec<(u64, u64)>,
}

/// One interrupt index of the device (`VFIO_DEVICE_GET_IRQ_INFO`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IrqInfo {
    /// Number of vectors.
    pub count: u32,
    /// Whether vectors can be signalled through an eventfd.
    pub eventfd: bool,
    /// Whether vectors can be masked.
    pub maskable: bool,
    /// Whether the set of enabled vectors can grow only by disabling all first.
    pub noresize: bool,
}

/// What happens when a vector fires.
#[derive(Clone, Copy, Debug)]
pub enum IrqTrigger<'a> {
    /// An eventfd is signalled.
    Eventfd(BorrowedFd<'a>),
    /// Nothing: the vector is masked where the function can mask it. Where it can't (MSI without per-vector masking),
    /// its message goes to address 0, which may be the guest's memory: there, leave an eventfd in place.
    None,
}

/// Memory mapped into this process: a part of a device, or a guest's RAM. Whoever gives it to a guest or a device
/// keeps the value for as long as they can reach the memory.
///
/// It is what memory must be to be given to a device, so memory of Rust's own can't be. A slice is not one:
///
/// ```compile_fail,E0200
/// #[derive(Debug)]
/// struct Slice(Vec<u8>);
/// impl vm_passthrough::vfio::Mapping for Slice {
///     fn address(&self) -> u64 {
///         self.0.as_ptr() as u64
///     }
///     fn len(&self) -> u64 {
///         self.0.len() as u64
///     }
/// }
/// ```
///
/// # Safety
/// All of `address()..address() + len()` must stay mapped in this process for as long as the value lives, must be
/// page-aligned, and nothing that relies on Rust's aliasing rules may live there: guests and devices write to it. Nor may
/// its pages come to hold such things later: once the value is dropped they are unmapped, or stay as they are for ever. A
/// device to which they were given reaches those pages, which the Linux kernel keeps for it, until it is unmapped.
#[allow(unsafe_code)]
pub unsafe trait Mapping: fmt::Debug + Send + Sync {
    /// Address in this process.
    fn address(&self) -> u64;
    /// Length in bytes.
    fn len(&self) -> u64;
    /// Whether it has no bytes, which no mapping has.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// A new dma-buf of the same bytes, and the offset in it where they begin. It is how iommufd maps a device's memory,
    /// which has no pages. RAM keeps the provided method.
    ///
    /// # Errors
    /// [`Unsupported`](io::ErrorKind::Unsupported) where it is no device's memory; else what the Linux kernel answered, which
    /// makes no dma-bufs of BARs before 6.19.
    fn dma_buf(&self) -> io::Result<(OwnedFd, u64)> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// An open VFIO device. Offsets are within the region, and accesses are checked against its size.
pub trait DeviceFile: fmt::Debug + Send + Sync {
    /// Which function it is.
    fn address(&self) -> PciAddress;
    /// Whether it is a virtual function (SR-IOV): a device of its own, whatever its address.
    fn is_virtual(&self) -> bool {
        false
    }
    /// The address space that it is open in, which its DMA reaches.
    fn space(&self) -> Arc<dyn AddressSpace>;
    /// What the device says of itself.
    fn info(&self) -> DeviceInfo;
    /// Region `index`; a region of size 0 when the device has none there.
    ///
    /// # Errors
    /// When the kernel refuses or its answer is invalid.
    fn region(&self, index: u32) -> Result<RegionInfo>;
    /// Reads from a region.
    ///
    /// # Errors
    /// When out of the region, or when the device is gone. A short read is an error too.
    fn read(&self, region: u32, offset: u64, data: &mut [u8]) -> Result<()>;
    /// Writes to a region.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    fn write(&self, region: u32, offset: u64, data: &[u8]) -> Result<()>;
    /// Maps a part of a region, which must lie in one of [`RegionInfo::mappable`], into this process. For huge pages its
    /// address should be congruent to `offset` modulo the region's size, or modulo 1 GiB where that is larger.
    ///
    /// # Errors
    /// When the part is not mappable or the kernel refuses.
    fn map(&self, region: u32, offset: u64, len: u64) -> Result<Arc<dyn Mapping>>;
    /// Interrupt index `index` (`VFIO_PCI_MSIX_IRQ_INDEX` …).
    ///
    /// # Errors
    /// When the kernel refuses or its answer is invalid.
    fn irq(&self, index: u32) -> Result<IrqInfo>;
    /// Sets the triggers of the vectors from `start` on.
    ///
    /// # Errors
    /// [`VfioError::TooFewVectors`] when the host has fewer to spare; otherwise when the function has fewer vectors or the
    /// Linux kernel refuses.
    fn set_triggers(&self, index: u32, start: u32, triggers: &[IrqTrigger<'_>]) -> Result<()>;
    /// Has the first vector of an interrupt index, which masks itself when it fires as INTx does, unmasked whenever `event` is
    /// signalled. The vector must have a trigger; disabling it undoes this too.
    ///
    /// # Errors
    /// When the vector can't be masked, has no trigger, or the kernel refuses.
    fn set_unmask_event(&self, index: u32, event: BorrowedFd<'_>) -> Result<()>;
    /// Disables all vectors of an interrupt index. Does nothing when none is enabled.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn disable_irqs(&self, index: u32) -> Result<()>;
    /// Asks the Linux kernel to reset the function, as it sees fit (`VFIO_DEVICE_RESET`).
    ///
    /// # Errors
    /// When the function has no reset, or it failed.
    fn reset(&self) -> Result<()>;
    /// Whether the host takes the function away: it is unplugged, removed or unbound. The Linux kernel keeps it locked until
    /// it is closed, so that no reset works, and whoever takes it waits.
    ///
    /// A device that nobody takes away keeps the provided method.
    fn is_wanted_back(&self) -> bool {
        false
    }
    /// Makes sure that the function is in D0 and answers.
    ///
    /// A device that cannot be anything else, as a simulated one, keeps the provided method, which does nothing.
    ///
    /// # Errors
    /// When it does not wake up in time, or is gone.
    fn wake(&self) -> Result<()> {
        Ok(())
    }
    /// Resets the function by the first of its methods that works, and tells what shows that it did.
    /// Interrupts are disabled first. Afterwards the function is in D0, with its BARs where the host put them.
    ///
    /// The provided method believes [`reset`](Self::reset).
    ///
    /// # Errors
    /// [`VfioError::Reset`] when it has no method, none works, or what should be gone after a reset is still there;
    /// [`VfioError::WantedBack`] when the host takes it away.
    fn reset_and_prove(&self) -> Result<ResetReport> {
        self.reset()?;
        Ok(ResetReport { method: None, evidence: ResetEvidence::LinuxReport })
    }
    /// Says whether the function is at rest: it does no DMA, raises no interrupt and decodes nothing, and is reset before it
    /// is used again. While it is, a hot reset for another function of its slot or bus may reset it too.
    ///
    /// A device that nothing resets along with another keeps the provided method, which does nothing.
    fn set_at_rest(&self, at_rest: bool) {
        let _ = at_rest;
    }
    /// The file to tell KVM of (`KVM_DEV_VFIO_FILE_ADD`): the device's or its group's.
    fn kvm_file(&self) -> Option<BorrowedFd<'_>>;
}

/// How a function was reset, and how that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResetReport {
    /// The method; `None` when the Linux kernel chose it and does not say which.
    pub method: Option<ResetStep>,
    /// What shows that the function was reset.
    pub evidence: ResetEvidence,
}

/// A step of the reset ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum ResetStep {
    /// A reset of this function alone, or of the bus that it has to itself, by this method.
    Function(ResetMethod),
    /// A reset of the whole slot or bus with all functions on it (`VFIO_DEVICE_PCI_HOT_RESET`).
    Hot,
}

impl fmt::Display for ResetStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Function(method) => method.fmt(f),
            Self::Hot => f.write_str("hot reset"),
        }
    }
}

/// What shows that a function was reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetEvidence {
    /// This register held a value that the reset must undo, and it was undone.
    Register(&'static str),
    /// The Linux kernel reports success, and the function has no register that would show it.
    LinuxReport,
}

/// What a device may do to a DMA range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmaPermission {
    /// Read and write.
    ReadWrite,
    /// Read only.
    Read,
}

/// A DMA address space that the devices of one guest share: what they can reach, and nothing else.
pub trait AddressSpace: fmt::Debug + Send + Sync {
    /// Which back end it is made of. Devices open only in a space of the same back end.
    fn backend(&self) -> Backend;
    /// The I/O virtual addresses that can be mapped, sorted: the IOMMU's width less the reserved ranges. It may
    /// shrink when a device joins.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn iova_ranges(&self) -> Result<Vec<IovaRange>>;
    /// How many more ranges can be mapped; `None` where there is no limit.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn entries_left(&self) -> Result<Option<u64>>;
    /// How many bytes the mapping that starts at `iova` has; `None` where none starts. A range that several devices of a guest map is so
    /// divided alike by all.
    ///
    /// A space that does not say keeps the provided method.
    fn mapped_from(&self, iova: u64) -> Option<u64> {
        let _ = iova;
        None
    }
    /// Maps all of `memory` for DMA at `iova`, and keeps it until [`unmap`](Self::unmap). Mapping the same memory
    /// there again, as each device of a guest does, only counts; it is unmapped when all have unmapped it.
    ///
    /// # Errors
    /// When the range is not mappable, too much memory is locked, or the kernel refuses. Nothing is mapped
    /// then.
    fn map(&self, iova: u64, memory: Arc<dyn Mapping>, permission: DmaPermission) -> Result<()>;
    /// [Maps](Self::map) several ranges, each to be unmapped by itself. A space that gains by mapping them at the same time does so; the
    /// provided method maps one after the other.
    ///
    /// # Errors
    /// As for [`map`](Self::map), of one of them; none is mapped then.
    fn map_all(&self, ranges: &[(u64, Arc<dyn Mapping>)], permission: DmaPermission) -> Result<()> {
        map_in_turn(self, ranges, permission)
    }
    /// Unmaps what [`map`](Self::map) mapped at `iova`.
    ///
    /// # Errors
    /// When nothing is mapped there, or the kernel refuses or unmapped another size.
    fn unmap(&self, iova: u64) -> Result<()>;
}

/// Maps ranges one after the other, all or none.
pub(super) fn map_in_turn<S: AddressSpace + ?Sized>(
    space: &S,
    ranges: &[(u64, Arc<dyn Mapping>)],
    permission: DmaPermission,
) -> Result<()> {
    for (at, (iova, memory)) in ranges.iter().enumerate() {
        if let Err(error) = space.map(*iova, memory.clone(), permission) {
            for (iova, _) in ranges[..at].iter().rev() {
                if let Err(error) = space.unmap(*iova) {
                    tracing::error!(%error, "a range stays mapped for DMA");
                }
            }
            return Err(error);
        }
    }
    Ok(())
}
