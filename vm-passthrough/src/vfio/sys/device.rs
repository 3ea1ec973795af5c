//! Ioctls of an open VFIO device.

use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use vfio_bindings::bindings::vfio as uapi;

use super::request::{Argument, Request, call, call_with_value};

const GET_INFO: Request = Request::new(uapi::VFIO_BASE + 7);
const GET_REGION_INFO: Request = Request::new(uapi::VFIO_BASE + 8);
const GET_IRQ_INFO: Request = Request::new(uapi::VFIO_BASE + 9);
const SET_IRQS: Request = Request::new(uapi::VFIO_BASE + 10);
const RESET: Request = Request::new(uapi::VFIO_BASE + 11);
const GET_PCI_HOT_RESET_INFO: Request = Request::new(uapi::VFIO_BASE + 12);
const PCI_HOT_RESET: Request = Request::new(uapi::VFIO_BASE + 13);
const FEATURE: Request = Request::new(uapi::VFIO_BASE + 17);

/// `VFIO_DEVICE_GET_INFO`.
pub(in super::super) fn info(device: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    let mut argument = Argument::new(size_of::<uapi::vfio_device_info>());
    // SAFETY: the request takes a vfio_device_info and what follows it up to its size; no addresses.
    unsafe { call(device, GET_INFO, &mut argument) }?;
    Ok(argument.into_bytes())
}

/// `VFIO_DEVICE_GET_REGION_INFO` with room for `len` bytes. The answer's size field says how many are wanted.
pub(in super::super) fn region_info(device: BorrowedFd<'_>, index: u32, len: usize) -> io::Result<Vec<u8>> {
    let mut argument = Argument::new(len.max(size_of::<uapi::vfio_region_info>()));
    argument.set_u32(offset_of!(uapi::vfio_region_info, index), index);
    // SAFETY: the request takes a vfio_region_info and what follows it up to its size; no addresses.
    unsafe { call(device, GET_REGION_INFO, &mut argument) }?;
    Ok(argument.into_bytes())
}

/// `VFIO_DEVICE_GET_IRQ_INFO`: flags and number of vectors.
pub(in super::super) fn irq_info(device: BorrowedFd<'_>, index: u32) -> io::Result<(u32, u32)> {
    let mut argument = Argument::new(size_of::<uapi::vfio_irq_info>());
    argument.set_u32(offset_of!(uapi::vfio_irq_info, index), index);
    // SAFETY: the request takes a vfio_irq_info, which has no addresses.
    unsafe { call(device, GET_IRQ_INFO, &mut argument) }?;
    Ok((
        argument.u32(offset_of!(uapi::vfio_irq_info, flags)),
        argument.u32(offset_of!(uapi::vfio_irq_info, count)),
    ))
}

/// What `VFIO_DEVICE_SET_IRQS` does by eventfds.
#[derive(Clone, Copy)]
#[repr(u32)]
pub(in super::super) enum Action {
    /// A vector that fires signals its eventfd.
    Trigger = uapi::VFIO_IRQ_SET_ACTION_TRIGGER,
    /// A vector is unmasked when its eventfd is signalled.
    Unmask = uapi::VFIO_IRQ_SET_ACTION_UNMASK,
}

/// `VFIO_DEVICE_SET_IRQS` with an eventfd, or none, for each vector from `start` on. Returns 0, or the number of vectors
/// that the host has when it has fewer; no vector is enabled then.
pub(in super::super) fn set_eventfds<'a>(
    device: BorrowedFd<'_>,
    action: Action,
    index: u32,
    start: u32,
    eventfds: impl ExactSizeIterator<Item = Option<BorrowedFd<'a>>>,
) -> io::Result<u32> {
    let header = offset_of!(uapi::vfio_irq_set, data);
    let count = u32::try_from(eventfds.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut argument = Argument::new(header + 4 * count as usize);
    let flags = uapi::VFIO_IRQ_SET_DATA_EVENTFD | action as u32;
    argument.set_u32(offset_of!(uapi::vfio_irq_set, flags), flags);
    argument.set_u32(offset_of!(uapi::vfio_irq_set, index), index);
    argument.set_u32(offset_of!(uapi::vfio_irq_set, start), start);
    argument.set_u32(offset_of!(uapi::vfio_irq_set, count), count);
    for (position, eventfd) in eventfds.enumerate() {
        let fd = eventfd.map_or(-1, |eventfd| eventfd.as_raw_fd());
        argument.set_u32(header + 4 * position, fd as u32);
    }
    // SAFETY: the request takes a vfio_irq_set followed by `count` file descriptors, all within its size.
    let answer = unsafe { call(device, SET_IRQS, &mut argument) }?;
    Ok(answer.unsigned_abs())
}

/// `VFIO_DEVICE_SET_IRQS` that disables all vectors of `index`.
pub(in super::super) fn disable_irqs(device: BorrowedFd<'_>, index: u32) -> io::Result<()> {
    let mut argument = Argument::new(size_of::<uapi::vfio_irq_set>());
    let flags = uapi::VFIO_IRQ_SET_DATA_NONE | uapi::VFIO_IRQ_SET_ACTION_TRIGGER;
    argument.set_u32(offset_of!(uapi::vfio_irq_set, flags), flags);
    argument.set_u32(offset_of!(uapi::vfio_irq_set, index), index);
    // SAFETY: the request takes a vfio_irq_set, here without data.
    unsafe { call(device, SET_IRQS, &mut argument) }.map(drop)
}

/// `VFIO_DEVICE_FEATURE` for a dma-buf of the bytes `part` of a BAR, in whole pages.
pub(in super::super) fn dma_buf(
    device: BorrowedFd<'_>,
    bar: u32,
    part: std::ops::Range<u64>,
) -> io::Result<OwnedFd> {
    let header = offset_of!(uapi::vfio_device_feature, data);
    let ranges = header + offset_of!(uapi::vfio_device_feature_dma_buf, dma_ranges);
    let mut argument = Argument::new(ranges + size_of::<uapi::vfio_region_dma_range>());
    let flags = uapi::VFIO_DEVICE_FEATURE_GET | uapi::VFIO_DEVICE_FEATURE_DMA_BUF;
    argument.set_u32(offset_of!(uapi::vfio_device_feature, flags), flags);
    argument.set_u32(header + offset_of!(uapi::vfio_device_feature_dma_buf, region_index), bar);
    let open_flags = (libc::O_RDWR | libc::O_CLOEXEC) as u32;
    argument.set_u32(header + offset_of!(uapi::vfio_device_feature_dma_buf, open_flags), open_flags);
    argument.set_u32(header + offset_of!(uapi::vfio_device_feature_dma_buf, nr_ranges), 1);
    argument.set_u64(ranges + offset_of!(uapi::vfio_region_dma_range, offset), part.start);
    let len = part.end.saturating_sub(part.start);
    argument.set_u64(ranges + offset_of!(uapi::vfio_region_dma_range, length), len);
    // SAFETY: the request takes a vfio_device_feature with a vfio_device_feature_dma_buf of one range in it, all within its
    // size; no addresses.
    let fd = unsafe { call(device, FEATURE, &mut argument) }?;
    // SAFETY: the answer is a new file descriptor, which nobody else has.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// `VFIO_DEVICE_RESET`.
pub(in super::super) fn reset(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the request takes nothing.
    unsafe { call_with_value(device, RESET, 0) }.map(drop)
}

/// `VFIO_DEVICE_GET_PCI_HOT_RESET_INFO` with room for `room` functions.
///
/// `Err(Ok(count))` when there are more.
pub(in super::super) fn hot_reset_info(
    device: BorrowedFd<'_>,
    room: u32,
) -> Result<Vec<u8>, Result<u32, io::Error>> {
    let header = offset_of!(uapi::vfio_pci_hot_reset_info, devices);
    let mut argument = Argument::new(header + room as usize * size_of::<uapi::vfio_pci_dependent_device>());
    // SAFETY: the request takes a vfio_pci_hot_reset_info and what follows it up to its size; no addresses.
    match unsafe { call(device, GET_PCI_HOT_RESET_INFO, &mut argument) } {
        Ok(_) => Ok(argument.into_bytes()),
        Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {
            Err(Ok(argument.u32(offset_of!(uapi::vfio_pci_hot_reset_info, count))))
        }
        Err(error) => Err(Err(error)),
    }
}

/// `VFIO_DEVICE_PCI_HOT_RESET`. `groups` prove that all functions of the set are ours; for a device that was opened
/// through iommufd they are empty, and the iommufd proves it.
pub(in super::super) fn hot_reset(device: BorrowedFd<'_>, groups: &[BorrowedFd<'_>]) -> io::Result<()> {
    let header = offset_of!(uapi::vfio_pci_hot_reset, group_fds);
    let count = u32::try_from(groups.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut argument = Argument::new(header + 4 * groups.len());
    argument.set_u32(offset_of!(uapi::vfio_pci_hot_reset, count), count);
    for (position, group) in groups.iter().enumerate() {
        argument.set_u32(header + 4 * position, group.as_raw_fd() as u32);
    }
    // SAFETY: the request takes a vfio_pci_hot_reset followed by `count` file descriptors, all within its size.
    unsafe { call(device, PCI_HOT_RESET, &mut argument) }.map(drop)
}
