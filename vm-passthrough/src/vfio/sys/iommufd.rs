//! Ioctls of `/dev/iommu`, and those of a device's character device that tie it to an address space.

use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::{AsRawFd as _, BorrowedFd};

use iommufd_bindings::iommufd as uapi;
use vfio_bindings::bindings::vfio;

use super::super::interface::Mapping;
use super::request::{Argument, Request, call};

const DESTROY: Request = Request::new(uapi::IOMMUFD_CMD_DESTROY);
const IOAS_ALLOC: Request = Request::new(uapi::IOMMUFD_CMD_IOAS_ALLOC);
const IOAS_IOVA_RANGES: Request = Request::new(uapi::IOMMUFD_CMD_IOAS_IOVA_RANGES);
const IOAS_MAP: Request = Request::new(uapi::IOMMUFD_CMD_IOAS_MAP);
const IOAS_MAP_FILE: Request = Request::new(uapi::IOMMUFD_CMD_IOAS_MAP_FILE);
const IOAS_UNMAP: Request = Request::new(uapi::IOMMUFD_CMD_IOAS_UNMAP);
const BIND_IOMMUFD: Request = Request::new(vfio::VFIO_BASE + 18);
const ATTACH_IOMMUFD_PT: Request = Request::new(vfio::VFIO_BASE + 19);

/// `IOMMU_IOAS_ALLOC`: the number of a new I/O address space.
pub(in super::super) fn alloc_ioas(iommu: BorrowedFd<'_>) -> io::Result<u32> {
    let mut argument = Argument::new(size_of::<uapi::iommu_ioas_alloc>());
    // SAFETY: the request takes an iommu_ioas_alloc, which has no addresses.
    unsafe { call(iommu, IOAS_ALLOC, &mut argument) }?;
    Ok(argument.u32(offset_of!(uapi::iommu_ioas_alloc, out_ioas_id)))
}

/// `IOMMU_DESTROY`.
pub(in super::super) fn destroy(iommu: BorrowedFd<'_>, id: u32) -> io::Result<()> {
    let mut argument = Argument::new(size_of::<uapi::iommu_destroy>());
    argument.set_u32(offset_of!(uapi::iommu_destroy, id), id);
    // SAFETY: the request takes an iommu_destroy, which has no addresses.
    unsafe { call(iommu, DESTROY, &mut argument) }.map(drop)
}

/// What `IOMMU_IOAS_IOVA_RANGES` answered.
pub(in super::super) struct IovaRanges {
    /// First and last address of each range that fitted.
    pub(in super::super) ranges: Vec<(u64, u64)>,
    /// Number of ranges that there are.
    pub(in super::super) count: u32,
    /// Alignment of every mapping.
    pub(in super::super) alignment: u64,
}

/// `IOMMU_IOAS_IOVA_RANGES` with room for `room` ranges.
pub(in super::super) fn iova_ranges(iommu: BorrowedFd<'_>, ioas: u32, room: u32) -> io::Result<IovaRanges> {
    let mut pairs = vec![[0u64; 2]; room as usize];
    let mut argument = Argument::new(size_of::<uapi::iommu_ioas_iova_ranges>());
    argument.set_u32(offset_of!(uapi::iommu_ioas_iova_ranges, ioas_id), ioas);
    argument.set_u32(offset_of!(uapi::iommu_ioas_iova_ranges, num_iovas), room);
    argument.set_u64(
        offset_of!(uapi::iommu_ioas_iova_ranges, allowed_iovas),
        pairs.as_mut_ptr().expose_provenance() as u64,
    );
    // SAFETY: the request takes an iommu_ioas_iova_ranges, and writes at most num_iovas pairs of 64-bit numbers to
    // allowed_iovas, which is how many `pairs` has.
    let answer = unsafe { call(iommu, IOAS_IOVA_RANGES, &mut argument) };
    match answer {
        Ok(_) => {}
        // The count is right and the ranges that fitted are there.
        Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) => {}
        Err(error) => return Err(error),
    }
    let count = argument.u32(offset_of!(uapi::iommu_ioas_iova_ranges, num_iovas));
    let ranges = pairs.iter().take(count as usize).map(|&[start, last]| (start, last)).collect();
    let alignment = argument.u64(offset_of!(uapi::iommu_ioas_iova_ranges, out_iova_alignment));
    Ok(IovaRanges { ranges, count, alignment })
}

/// `IOMMU_IOAS_MAP`: lets devices reach memory.
///
/// The Linux kernel pins the pages that are there now. What a [`Mapping`] promises of them makes this sound, whatever is
/// mapped at the address later.
pub(in super::super) fn map(
    iommu: BorrowedFd<'_>,
    ioas: u32,
    iova: u64,
    memory: &dyn Mapping,
    writable: bool,
) -> io::Result<()> {
    let flags = uapi::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA
        | uapi::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE
        | if writable { uapi::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE } else { 0 };
    let mut argument = Argument::new(size_of::<uapi::iommu_ioas_map>());
    argument.set_u32(offset_of!(uapi::iommu_ioas_map, flags), flags);
    argument.set_u32(offset_of!(uapi::iommu_ioas_map, ioas_id), ioas);
    argument.set_u64(offset_of!(uapi::iommu_ioas_map, user_va), memory.address());
    argument.set_u64(offset_of!(uapi::iommu_ioas_map, length), memory.len());
    argument.set_u64(offset_of!(uapi::iommu_ioas_map, iova), iova);
    // SAFETY: the request takes an iommu_ioas_map. The range is that of a `Mapping`, whose contract says that devices may
    // write to its pages for as long as they have them.
    unsafe { call(iommu, IOAS_MAP, &mut argument) }.map(drop)
}

/// `IOMMU_IOAS_MAP_FILE`: lets devices reach the bytes `part` of a memfd, or from Linux 6.19 on of a dma-buf of VFIO's, for
/// reading and writing. The Linux kernel keeps the file until they are unmapped.
pub(in super::super) fn map_file(
    iommu: BorrowedFd<'_>,
    ioas: u32,
    iova: u64,
    file: BorrowedFd<'_>,
    part: std::ops::Range<u64>,
) -> io::Result<()> {
    let flags = uapi::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA
        | uapi::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE
        | uapi::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE;
    let mut argument = Argument::new(size_of::<uapi::iommu_ioas_map_file>());
    argument.set_u32(offset_of!(uapi::iommu_ioas_map_file, flags), flags);
    argument.set_u32(offset_of!(uapi::iommu_ioas_map_file, ioas_id), ioas);
    argument.set_u32(offset_of!(uapi::iommu_ioas_map_file, fd), file.as_raw_fd() as u32);
    argument.set_u64(offset_of!(uapi::iommu_ioas_map_file, start), part.start);
    argument.set_u64(offset_of!(uapi::iommu_ioas_map_file, length), part.end.saturating_sub(part.start));
    argument.set_u64(offset_of!(uapi::iommu_ioas_map_file, iova), iova);
    // SAFETY: the request takes an iommu_ioas_map_file, which has no addresses of this process.
    unsafe { call(iommu, IOAS_MAP_FILE, &mut argument) }.map(drop)
}

/// `IOMMU_IOAS_UNMAP`: how many bytes were unmapped.
pub(in super::super) fn unmap(iommu: BorrowedFd<'_>, ioas: u32, iova: u64, len: u64) -> io::Result<u64> {
    let mut argument = Argument::new(size_of::<uapi::iommu_ioas_unmap>());
    argument.set_u32(offset_of!(uapi::iommu_ioas_unmap, ioas_id), ioas);
    argument.set_u64(offset_of!(uapi::iommu_ioas_unmap, iova), iova);
    argument.set_u64(offset_of!(uapi::iommu_ioas_unmap, length), len);
    // SAFETY: the request takes an iommu_ioas_unmap, which has no addresses of this process.
    unsafe { call(iommu, IOAS_UNMAP, &mut argument) }?;
    Ok(argument.u64(offset_of!(uapi::iommu_ioas_unmap, length)))
}

/// `VFIO_DEVICE_BIND_IOMMUFD`, with a VF token if there is one.
pub(in super::super) fn bind(
    device: BorrowedFd<'_>,
    iommu: BorrowedFd<'_>,
    token: Option<&[u8; 16]>,
) -> io::Result<()> {
    let mut argument = Argument::new(size_of::<vfio::vfio_device_bind_iommufd>());
    argument.set_u32(offset_of!(vfio::vfio_device_bind_iommufd, iommufd), iommu.as_raw_fd() as u32);
    if let Some(token) = token {
        argument
            .set_u32(offset_of!(vfio::vfio_device_bind_iommufd, flags), vfio::VFIO_DEVICE_BIND_FLAG_TOKEN);
        let address = token.as_ptr().expose_provenance() as u64;
        argument.set_u64(offset_of!(vfio::vfio_device_bind_iommufd, token_uuid_ptr), address);
    }
    // SAFETY: the request takes a vfio_device_bind_iommufd; with the token's flag it reads 16 bytes at its address, which are there
    // until this returns, and without it does not use the address.
    unsafe { call(device, BIND_IOMMUFD, &mut argument) }.map(drop)
}

/// `VFIO_DEVICE_ATTACH_IOMMUFD_PT`.
pub(in super::super) fn attach(device: BorrowedFd<'_>, ioas: u32) -> io::Result<()> {
    let mut argument = Argument::new(size_of::<vfio::vfio_device_attach_iommufd_pt>());
    argument.set_u32(offset_of!(vfio::vfio_device_attach_iommufd_pt, pt_id), ioas);
    // SAFETY: the request takes a vfio_device_attach_iommufd_pt, which has no addresses.
    unsafe { call(device, ATTACH_IOMMUFD_PT, &mut argument) }.map(drop)
}
