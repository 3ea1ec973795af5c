//! Turns what the Linux kernel refused into an error that says what to do.

use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::interface::VfioError;
use super::parse::Malformed;
use crate::PciAddress;

/// The error for a system call on a node or function at `path`.
pub(super) fn system(operation: &'static str, path: &str, source: io::Error) -> VfioError {
    let remedy = remedy(operation, Errno::from_io_error(&source));
    VfioError::System { operation, path: path.into(), source, remedy }
}

/// The error for an answer that cannot be.
pub(super) fn invalid_response(operation: &'static str, path: &str, what: Malformed) -> VfioError {
    VfioError::InvalidResponse { operation, path: path.into(), what }
}

/// Checks what `VFIO_DEVICE_SET_IRQS` returned when `wanted` vectors were to be enabled. A positive number is how many the
/// host has, and none is enabled then (`vfio_msi_enable` in `drivers/vfio/pci/vfio_pci_intrs.c`).
pub(crate) fn check_vectors(address: PciAddress, wanted: u32, answer: u32) -> Result<(), VfioError> {
    match answer {
        0 => Ok(()),
        available => Err(VfioError::TooFewVectors { address, wanted, available }),
    }
}

fn remedy(operation: &str, errno: Option<Errno>) -> &'static str {
    match (operation, errno) {
        ("open", Some(Errno::ACCESS | Errno::PERM)) => {
            "run as root, or give this user the node (chown, or a udev rule)"
        }
        ("open" | "VFIO_GROUP_SET_CONTAINER" | "VFIO_DEVICE_BIND_IOMMUFD", Some(Errno::BUSY)) => {
            "another process has it open (fuser -v names it); stop that process first"
        }
        ("VFIO_GROUP_GET_DEVICE_FD" | "VFIO_DEVICE_BIND_IOMMUFD", Some(Errno::ACCESS)) => {
            "it is a virtual function whose physical one is a user-space driver's, which has set a VF token: give that one \
             (`vf_token` of the device in a guest file)"
        }
        ("VFIO_GROUP_GET_DEVICE_FD", Some(Errno::INVAL)) => {
            "if a VF token was given, leave it out: its physical function is not on vfio-pci, or it is no virtual function"
        }
        ("VFIO_DEVICE_BIND_IOMMUFD", Some(Errno::PERM)) => {
            "its IOMMU group is not viable: a driver of the host uses a function in it; explain names both"
        }
        ("open", Some(Errno::NOENT)) => "load the module vfio-pci and claim the function first",
        (
            "VFIO_SET_IOMMU" | "VFIO_GROUP_SET_CONTAINER" | "VFIO_DEVICE_ATTACH_IOMMUFD_PT",
            Some(Errno::PERM),
        ) => {
            "the platform does not isolate interrupts; turn on interrupt remapping in the firmware and on the Linux \
             kernel's command line"
        }
        (
            "VFIO_SET_IOMMU" | "VFIO_GROUP_SET_CONTAINER" | "VFIO_DEVICE_ATTACH_IOMMUFD_PT",
            Some(Errno::INVAL | Errno::ADDRINUSE),
        ) => {
            "its IOMMU may reserve addresses where memory is mapped already; compare reserved_regions of its group \
             in sysfs with the guest's RAM"
        }
        ("VFIO_IOMMU_MAP_DMA" | "IOMMU_IOAS_MAP" | "VFIO_DEVICE_ATTACH_IOMMUFD_PT", Some(Errno::NOMEM)) => {
            "raise the limit of locked memory (ulimit -l, LimitMEMLOCK= in systemd), or give the process CAP_IPC_LOCK"
        }
        ("VFIO_IOMMU_MAP_DMA", Some(Errno::NOSPC)) => {
            "map fewer, larger ranges, or raise dma_entry_limit of the module vfio_iommu_type1"
        }
        ("VFIO_IOMMU_MAP_DMA" | "IOMMU_IOAS_MAP", Some(Errno::FAULT)) => {
            "the memory is not mapped in this process, or can't be written"
        }
        ("VFIO_DEVICE_RESET", Some(Errno::NOTTY | Errno::INVAL)) => {
            "the function has no reset of its own; a hot reset of its whole slot or bus may do"
        }
        ("VFIO_DEVICE_GET_PCI_HOT_RESET_INFO" | "VFIO_DEVICE_PCI_HOT_RESET", Some(Errno::NODEV)) => {
            "there is no port above it by which its slot or bus could be reset, as on a root bus"
        }
        (_, Some(Errno::NODEV | Errno::NXIO | Errno::IO)) => {
            "the device is gone or does not answer; look at the Linux kernel's log, and detach it"
        }
        (_, Some(Errno::MFILE | Errno::NFILE)) => "raise the limit of open files (ulimit -n)",
        _ => "look at the Linux kernel's log (dmesg) for why",
    }
}

/// The error for a call that was to lock `needed` bytes for DMA and failed, with `locked` locked for it already.
pub(super) fn map(
    operation: &'static str,
    path: &str,
    needed: u64,
    locked: u64,
    source: io::Error,
) -> VfioError {
    if source.raw_os_error() == Some(libc::ENOMEM)
        && let Some(limit) = getrlimit(Resource::Memlock).current
        && locked.saturating_add(needed) > limit
    {
        return VfioError::LockedMemory { needed, locked, limit };
    }
    system(operation, path, source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_number_means_what_it_means_for_the_call() {
        fn check(operation: &'static str, errno: Errno, expect: &str) {
            let error = system(operation, "0000:00:03.0", errno.into()).to_string();
            assert!(error.contains(expect), "{error}");
        }
        check("VFIO_DEVICE_GET_PCI_HOT_RESET_INFO", Errno::NODEV, "no port above it");
        check("VFIO_DEVICE_PCI_HOT_RESET", Errno::NODEV, "no port above it");
        check("VFIO_DEVICE_RESET", Errno::NOTTY, "no reset of its own");
        check("VFIO_DEVICE_RESET", Errno::NODEV, "the device is gone");
        check("VFIO_DEVICE_GET_PCI_HOT_RESET_INFO", Errno::IO, "the device is gone");
        check("VFIO_DEVICE_BIND_IOMMUFD", Errno::PERM, "not viable");
        check("VFIO_GROUP_GET_DEVICE_FD", Errno::ACCESS, "vf_token");
        check("VFIO_GROUP_GET_DEVICE_FD", Errno::INVAL, "leave it out");
        for (operations, errors, expect) in [
            (&["open"][..], &[Errno::ACCESS, Errno::PERM][..], "give this user the node"),
            (
                &["open", "VFIO_GROUP_SET_CONTAINER", "VFIO_DEVICE_BIND_IOMMUFD"],
                &[Errno::BUSY],
                "another process has it open",
            ),
            (&["open"], &[Errno::NOENT], "load the module vfio-pci"),
            (
                &["VFIO_SET_IOMMU", "VFIO_GROUP_SET_CONTAINER", "VFIO_DEVICE_ATTACH_IOMMUFD_PT"],
                &[Errno::PERM],
                "interrupt remapping",
            ),
            (
                &["VFIO_SET_IOMMU", "VFIO_GROUP_SET_CONTAINER", "VFIO_DEVICE_ATTACH_IOMMUFD_PT"],
                &[Errno::INVAL, Errno::ADDRINUSE],
                "reserved_regions",
            ),
            (
                &["VFIO_IOMMU_MAP_DMA", "IOMMU_IOAS_MAP", "VFIO_DEVICE_ATTACH_IOMMUFD_PT"],
                &[Errno::NOMEM],
                "raise the limit of locked memory",
            ),
            (&["VFIO_IOMMU_MAP_DMA"], &[Errno::NOSPC], "dma_entry_limit"),
            (&["VFIO_IOMMU_MAP_DMA", "IOMMU_IOAS_MAP"], &[Errno::FAULT], "not mapped in this process"),
            (&["open", "eventfd"], &[Errno::MFILE, Errno::NFILE], "the limit of open files"),
            (&["open", "VFIO_DEVICE_GET_INFO"], &[Errno::TXTBSY], "(dmesg) for why"),
        ] {
            for operation in operations {
                errors.iter().for_each(|&errno| check(operation, errno, expect));
            }
        }
    }

    #[test]
    fn only_what_is_over_the_limit_of_locked_memory_is_told_so() {
        let Some(limit) = getrlimit(Resource::Memlock).current else { return };
        let check = |needed: u64, locked: u64, errno: Errno, over: bool| {
            let error = map("VFIO_IOMMU_MAP_DMA", "/dev/vfio/vfio", needed, locked, errno.into());
            match error {
                VfioError::LockedMemory { needed: by, locked: at, limit: of } => {
                    assert_eq!((by, at, of, true), (needed, locked, limit, over));
                }
                VfioError::System { operation, .. } => {
                    assert_eq!((operation, over), ("VFIO_IOMMU_MAP_DMA", false));
                }
                other => panic!("{other}"),
            }
        };
        check(1, limit, Errno::NOMEM, true);
        check(limit, 1, Errno::NOMEM, true);
        check(u64::MAX, 1, Errno::NOMEM, true);
        check(0, limit, Errno::NOMEM, false);
        check(limit, 0, Errno::NOMEM, false);
        check(0, 0, Errno::NOMEM, false);
        check(1, limit, Errno::NOSPC, false);
        check(1, limit, Errno::FAULT, false);
    }
}
