//! Ioctls of `/dev/vfio/vfio` (a container, with the type 1 IOMMU driver) and of `/dev/vfio/GROUP`.

use std::ffi::CString;
use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use vfio_bindings::bindings::vfio as uapi;

use super::super::interface::Mapping;
use super::request::{Argument, Request, call, call_with_bytes, call_with_value};

const GET_API_VERSION: Request = Request::new(uapi::VFIO_BASE);
const CHECK_EXTENSION: Request = Request::new(uapi::VFIO_BASE + 1);
const SET_IOMMU: Request = Request::new(uapi::VFIO_BASE + 2);
const GROUP_GET_STATUS: Request = Request::new(uapi::VFIO_BASE + 3);
const GROUP_SET_CONTAINER: Request = Request::new(uapi::VFIO_BASE + 4);
const GROUP_UNSET_CONTAINER: Request = Request::new(uapi::VFIO_BASE + 5);
const GROUP_GET_DEVICE_FD: Request = Request::new(uapi::VFIO_BASE + 6);
const IOMMU_GET_INFO: Request = Request::new(uapi::VFIO_BASE + 12);
const IOMMU_MAP_DMA: Request = Request::new(uapi::VFIO_BASE + 13);
const IOMMU_UNMAP_DMA: Request = Request::new(uapi::VFIO_BASE + 14);

/// `VFIO_GET_API_VERSION`.
pub(in super::super) fn api_version(container: BorrowedFd<'_>) -> io::Result<i32> {
    // SAFETY: the request takes nothing.
    unsafe { call_with_value(container, GET_API_VERSION, 0) }
}

/// `VFIO_CHECK_EXTENSION`.
pub(in super::super) fn has_extension(container: BorrowedFd<'_>, extension: u32) -> io::Result<bool> {
    // SAFETY: the request takes a number.
    unsafe { call_with_value(container, CHECK_EXTENSION, extension.into()) }.map(|answer| answer > 0)
}

/// `VFIO_SET_IOMMU`.
pub(in super::super) fn set_iommu(container: BorrowedFd<'_>, kind: u32) -> io::Result<()> {
    // SAFETY: the request takes a number.
    unsafe { call_with_value(container, SET_IOMMU, kind.into()) }.map(drop)
}

/// Flags of `VFIO_GROUP_GET_STATUS`.
pub(in super::super) fn group_status(group: BorrowedFd<'_>) -> io::Result<u32> {
    let mut argument = Argument::new(size_of::<uapi::vfio_group_status>());
    // SAFETY: the request takes a vfio_group_status, which has no addresses.
    unsafe { call(group, GROUP_GET_STATUS, &mut argument) }?;
    Ok(argument.u32(offset_of!(uapi::vfio_group_status, flags)))
}

/// `VFIO_GROUP_SET_CONTAINER`.
pub(in super::super) fn set_container(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the request reads one 32-bit file descriptor.
    unsafe { call_with_bytes(group, GROUP_SET_CONTAINER, &container.as_raw_fd().to_ne_bytes()) }.map(drop)
}

/// `VFIO_GROUP_UNSET_CONTAINER`.
pub(in super::super) fn unset_container(group: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the request takes nothing.
    unsafe { call_with_value(group, GROUP_UNSET_CONTAINER, 0) }.map(drop)
}

/// `VFIO_GROUP_GET_DEVICE_FD`: opens the device that sysfs calls `name`.
pub(in super::super) fn open_device(group: BorrowedFd<'_>, name: &str) -> io::Result<OwnedFd> {
    let name = CString::new(name).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // SAFETY: the request reads a string up to its terminating zero.
    let fd = unsafe { call_with_bytes(group, GROUP_GET_DEVICE_FD, name.as_bytes_with_nul()) }?;
    // SAFETY: the kernel just made this file descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// `VFIO_IOMMU_GET_INFO` with room for `len` bytes. The answer's size field says how many are wanted.
pub(in super::super) fn iommu_info(container: BorrowedFd<'_>, len: usize) -> io::Result<Vec<u8>> {
    let mut argument = Argument::new(len.max(size_of::<uapi::vfio_iommu_type1_info>()));
    // SAFETY: the request takes a vfio_iommu_type1_info and what follows it up to its size; no addresses.
    unsafe { call(container, IOMMU_GET_INFO, &mut argument) }?;
    Ok(argument.into_bytes())
}

/// `VFIO_IOMMU_MAP_DMA`: lets devices reach memory.
///
/// The Linux kernel pins the pages that are there now. What a [`Mapping`] promises of them makes this sound, whatever is
/// mapped at the address later.
pub(in super::super) fn map_dma(
    container: BorrowedFd<'_>,
    iova: u64,
    memory: &dyn Mapping,
    writable: bool,
) -> io::Result<()> {
    let flags = uapi::VFIO_DMA_MAP_FLAG_READ | if writable { uapi::VFIO_DMA_MAP_FLAG_WRITE } else { 0 };
    let mut argument = Argument::new(size_of::<uapi::vfio_iommu_type1_dma_map>());
    argument.set_u32(offset_of!(uapi::vfio_iommu_type1_dma_map, flags), flags);
    argument.set_u64(offset_of!(uapi::vfio_iommu_type1_dma_map, vaddr), memory.address());
    argument.set_u64(offset_of!(uapi::vfio_iommu_type1_dma_map, iova), iova);
    argument.set_u64(offset_of!(uapi::vfio_iommu_type1_dma_map, size), memory.len());
    // SAFETY: the request takes a vfio_iommu_type1_dma_map. The range is that of a `Mapping`, whose contract says that
    // devices may write to its pages for as long as they have them.
    unsafe { call(container, IOMMU_MAP_DMA, &mut argument) }.map(drop)
}

/// `VFIO_IOMMU_UNMAP_DMA`: how many bytes were unmapped.
pub(in super::super) fn unmap_dma(container: BorrowedFd<'_>, iova: u64, len: u64) -> io::Result<u64> {
    let mut argument = Argument::new(size_of::<uapi::vfio_iommu_type1_dma_unmap>());
    argument.set_u64(offset_of!(uapi::vfio_iommu_type1_dma_unmap, iova), iova);
    argument.set_u64(offset_of!(uapi::vfio_iommu_type1_dma_unmap, size), len);
    // SAFETY: the request takes a vfio_iommu_type1_dma_unmap; without flags there is no tail and no address.
    unsafe { call(container, IOMMU_UNMAP_DMA, &mut argument) }?;
    Ok(argument.u64(offset_of!(uapi::vfio_iommu_type1_dma_unmap, size)))
}
