//! Turns what the Linux kernel refused into an error that says what to do.

use std::io;
use std::path::Path;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::interface::VfioError;
use super::parse::Malformed;
use crate::Host;

/// The error for a system call on a node or function at `path`.
pub(super) fn system(operation: &'static str, path: &str, source: io::Error) -> VfioError {
    let remedy = remedy(operation, Errno::from_io_error(&source));
    VfioError::System { operation, path: path.into(), source, remedy }
}

/// The error for an answer that cannot be.
pub(super) fn invalid_response(operation: &'static str, path: &str, what: Malformed) -> VfioError {
    VfioError::InvalidResponse { operation, path: path.into(), what }
}

fn remedy(operation: &str, errno: Option<Errno>) -> &'static str {
    match (operation, errno) {
        ("open", Some(Errno::ACCESS | Errno::PERM)) => {
            "run as root, or give this user the node (chown, or a udev rule)"
        }
        ("open" | "VFIO_GROUP_SET_CONTAINER" | "VFIO_DEVICE_BIND_IOMMUFD", Some(Errno::BUSY)) => {
            "another process has it open (fuser -v names it); stop that process first"
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

/// The error for a call that was to lock `needed` bytes for DMA and failed.
pub(super) fn map(
    host: &Host,
    operation: &'static str,
    path: &str,
    needed: u64,
    source: io::Error,
) -> VfioError {
    if source.raw_os_error() == Some(libc::ENOMEM)
        && let Some(limit) = getrlimit(Resource::Memlock).current
    {
        let locked = locked_bytes(&host.proc.join("self/status")).unwrap_or(0);
        if locked.saturating_add(needed) > limit {
            return VfioError::LockedMemory { needed, locked, limit };
        }
    }
    system(operation, path, source)
}

/// Bytes that this process has locked already, from procfs.
fn locked_bytes(status: &Path) -> Option<u64> {
    parse_locked(&std::fs::read_to_string(status).ok()?)
}

fn parse_locked(status: &str) -> Option<u64> {
    let mut total = None;
    for line in status.lines() {
        // Type 1 accounts to VmLck, iommufd to VmPin (and to the user, which procfs does not show).
        let Some(value) = line.strip_prefix("VmLck:").or_else(|| line.strip_prefix("VmPin:")) else {
            continue;
        };
        let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
        total = Some(kib.checked_mul(1024)?.checked_add(total.unwrap_or(0))?);
    }
    total
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
    }

    #[test]
    fn locked_memory_from_procfs() {
        fn check(status: &str, expect: Option<u64>) {
            assert_eq!(parse_locked(status), expect, "{status}");
        }
        check("VmPeak:\t 5 kB\nVmLck:\t       8 kB\nVmPin:\t       4 kB\n", Some(12 << 10));
        check("VmLck:\t       8 kB\n", Some(8 << 10));
        check("VmPeak:\t 5 kB\n", None);
        check("VmLck:\t 8 MB\n", None);
        check("VmLck:\t 18446744073709551615 kB\n", None);
        check("", None);
    }
}
