//! The back end of iommufd: `/dev/iommu` and a device's own node, `/dev/vfio/devices/vfioN`.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;

use super::failure::{invalid_response, system};
use super::group::open_node;
use super::interface::{DmaPermission, Mapping, Result, VfioError};
use super::parse::{self, IommuInfo};
use super::sys;
use super::token::VfToken;
use crate::{Host, PciAddress};

/// An I/O address space of iommufd. It keeps its mappings with or without devices.
#[derive(Debug)]
pub(super) struct Ioas {
    fd: OwnedFd,
    path: String,
    id: u32,
    /// Whether this process made it, and destroys it.
    is_own: bool,
}

impl Ioas {
    pub(super) fn open(host: &Host) -> Result<Self> {
        let node = host.dev.join("iommu");
        let path = node.display().to_string();
        let fd = open_node(&node).map_err(|error| system("open", &path, error))?;
        let id =
            sys::iommufd::alloc_ioas(fd.as_fd()).map_err(|error| system("IOMMU_IOAS_ALLOC", &path, error))?;
        Ok(Self { fd, path, id, is_own: true })
    }

    /// One that another process made.
    pub(super) fn received(fd: OwnedFd, id: u32) -> Self {
        Self { fd, path: "an address space of iommufd".into(), id, is_own: false }
    }

    /// What another process needs to use it.
    pub(super) fn share(&self) -> io::Result<(OwnedFd, u32)> {
        Ok((self.fd.try_clone()?, self.id))
    }

    pub(super) fn path(&self) -> &str {
        &self.path
    }

    pub(super) fn info(&self) -> Result<IommuInfo> {
        const OPERATION: &str = "IOMMU_IOAS_IOVA_RANGES";
        /// Most ranges that an answer may have.
        const MAX_RANGES: u32 = (parse::MAX_ANSWER / 16) as u32;
        let mut room = 16;
        for _ in 0..8 {
            let answer = sys::iommufd::iova_ranges(self.fd.as_fd(), self.id, room)
                .map_err(|error| system(OPERATION, &self.path, error))?;
            if answer.count > MAX_RANGES {
                return Err(invalid_response(OPERATION, &self.path, format!("{} ranges", answer.count)));
            }
            if answer.count > room {
                room = answer.count;
                continue;
            }
            let ranges = parse::iova_ranges(answer.ranges)
                .map_err(|what| invalid_response(OPERATION, &self.path, what))?;
            if answer.alignment > 1 && !answer.alignment.is_power_of_two() {
                return Err(invalid_response(
                    OPERATION,
                    &self.path,
                    format!("an alignment of {:#x}", answer.alignment),
                ));
            }
            return Ok(IommuInfo {
                page: answer.alignment.max(sys::page_size()),
                ranges,
                entries_left: None,
            });
        }
        Err(invalid_response(OPERATION, &self.path, "a count that grows with every question".into()))
    }

    /// Maps in the Linux kernel, which has `locked` bytes locked for it already.
    pub(super) fn map(
        &self,
        iova: u64,
        memory: &dyn Mapping,
        permission: DmaPermission,
        locked: u64,
    ) -> Result<()> {
        let writable = permission == DmaPermission::ReadWrite;
        let error = match sys::iommufd::map(self.fd.as_fd(), self.id, iova, memory, writable) {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        // A device's memory has no pages, and is mapped by a dma-buf of it.
        if writable
            && error.raw_os_error() == Some(libc::EFAULT)
            && let Ok((file, start)) = memory.dma_buf()
        {
            let part = start..start.saturating_add(memory.len());
            return sys::iommufd::map_file(self.fd.as_fd(), self.id, iova, file.as_fd(), part)
                .map_err(|error| system("IOMMU_IOAS_MAP_FILE", &self.path, error));
        }
        Err(super::failure::map("IOMMU_IOAS_MAP", &self.path, memory.len(), locked, error))
    }

    pub(super) fn unmap(&self, iova: u64, len: u64) -> Result<()> {
        const OPERATION: &str = "IOMMU_IOAS_UNMAP";
        let unmapped = sys::iommufd::unmap(self.fd.as_fd(), self.id, iova, len)
            .map_err(|error| system(OPERATION, &self.path, error))?;
        if unmapped != len {
            return Err(invalid_response(
                OPERATION,
                &self.path,
                format!("{unmapped:#x} bytes instead of {len:#x}"),
            ));
        }
        Ok(())
    }

    /// Opens a function by its own node, binds it to the iommufd and attaches it to the address space, where `mapped`
    /// bytes are mapped. The first function's attaching locks them.
    ///
    /// Before Linux 6.18 this back end knows no tokens, and asks for none.
    pub(super) fn open_device(
        &self,
        host: &Host,
        address: PciAddress,
        token: Option<&VfToken>,
        mapped: u64,
    ) -> Result<OwnedFd> {
        let node = device_node(host, address).ok_or_else(|| VfioError::Unavailable {
            address,
            reason: "it has no node of its own (vfio-dev in its sysfs directory): claim it for vfio-pci first, or \
                     use the group back end where the Linux kernel is built without CONFIG_VFIO_DEVICE_CDEV"
                .into(),
        })?;
        let path = node.display().to_string();
        let file = open_node(&node).map_err(|error| system("open", &path, error))?;
        let bind = |token| sys::iommufd::bind(file.as_fd(), self.fd.as_fd(), token);
        bind(token.map(VfToken::bytes))
            .or_else(|error| match error.raw_os_error() {
                Some(libc::EINVAL) if token.is_some() => bind(None),
                _ => Err(error),
            })
            .map_err(|error| system("VFIO_DEVICE_BIND_IOMMUFD", &path, error))?;
        sys::iommufd::attach(file.as_fd(), self.id)
            .map_err(|error| super::failure::map("VFIO_DEVICE_ATTACH_IOMMUFD_PT", &path, mapped, 0, error))?;
        Ok(file)
    }

    /// Releases the address space, which refuses while a device is attached. Whoever made it does.
    pub(super) fn destroy(&self) -> Result<()> {
        if !self.is_own {
            return Ok(());
        }
        sys::iommufd::destroy(self.fd.as_fd(), self.id)
            .map_err(|error| system("IOMMU_DESTROY", &self.path, error))
    }
}

/// A function's own node, `/dev/vfio/devices/vfioN`; `None` where it is not bound to a VFIO driver or the Linux
/// kernel makes none.
pub(super) fn device_node(host: &Host, address: PciAddress) -> Option<PathBuf> {
    let entries = std::fs::read_dir(host.pci_device(address).join("vfio-dev")).ok()?;
    entries.flatten().find_map(|entry| {
        let name = entry.file_name();
        let number = name.to_str()?.strip_prefix("vfio")?;
        let node = host.dev.join("vfio/devices").join(&name);
        // Without the character device the directory exists, but neither its number nor the node.
        (number.parse::<u32>().is_ok() && entry.path().join("dev").exists() && node.exists()).then_some(node)
    })
}
