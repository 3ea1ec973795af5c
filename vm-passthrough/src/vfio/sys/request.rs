//! How an ioctl of VFIO or iommufd is made: its number and its argument.
//!
//! Arguments are plain byte buffers filled at the offsets of the bindings' structures. The Linux kernel copies them
//! in and out, so they need no alignment, and structures with a variable tail need no cast.

use std::ffi::{c_int, c_ulong};
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

#[cfg(test)]
use super::super::tests::kernel;

/// Number of an ioctl of VFIO (from 100) or of iommufd (from 0x80): `_IO(';', number)`.
///
/// Both families pass every size in the structure itself, so direction and size are not part of the number.
#[derive(Clone, Copy)]
pub(super) struct Request(c_ulong);

impl Request {
    pub(super) const fn new(number: u32) -> Self {
        Self((vfio_bindings::bindings::vfio::VFIO_TYPE as c_ulong) << 8 | number as c_ulong)
    }
}

/// The argument of an ioctl: a structure whose first field is a 32-bit size of the whole.
#[derive(Clone, Debug)]
pub(super) struct Argument(Vec<u8>);

impl Argument {
    /// A zeroed argument of `len` bytes, with the size field filled in. At least 4 bytes are made.
    pub(super) fn new(len: usize) -> Self {
        let len = len.clamp(4, u32::MAX as usize);
        let mut argument = Self(vec![0; len]);
        argument.set_u32(0, len as u32);
        argument
    }

    /// Sets the 32-bit field at `offset`; nothing if it lies outside.
    pub(super) fn set_u32(&mut self, offset: usize, value: u32) {
        if let Some(field) = self.0.get_mut(offset..).and_then(|rest| rest.first_chunk_mut()) {
            *field = value.to_ne_bytes();
        }
    }

    /// Sets the 64-bit field at `offset`; nothing if it lies outside.
    pub(super) fn set_u64(&mut self, offset: usize, value: u64) {
        if let Some(field) = self.0.get_mut(offset..).and_then(|rest| rest.first_chunk_mut()) {
            *field = value.to_ne_bytes();
        }
    }

    /// The 32-bit field at `offset`, 0 if it lies outside.
    pub(super) fn u32(&self, offset: usize) -> u32 {
        self.0.get(offset..).and_then(|rest| rest.first_chunk()).map_or(0, |field| u32::from_ne_bytes(*field))
    }

    /// The 64-bit field at `offset`, 0 if it lies outside.
    pub(super) fn u64(&self, offset: usize) -> u64 {
        self.0.get(offset..).and_then(|rest| rest.first_chunk()).map_or(0, |field| u64::from_ne_bytes(*field))
    }

    /// All of it.
    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

/// Makes an ioctl that takes a sized structure.
///
/// # Safety
/// `request` must take a structure that starts with its size, and write no more than that size into it. Addresses
/// in the structure must be good for what the request does with them.
pub(super) unsafe fn call(
    fd: BorrowedFd<'_>,
    request: Request,
    argument: &mut Argument,
) -> io::Result<c_int> {
    #[cfg(test)]
    if let Some(answer) = kernel::ioctl(fd, request.0, kernel::Argument::Sized(&mut argument.0)) {
        return answer;
    }
    // SAFETY: the pointer is to a buffer as long as its size field says, which the caller vouches is all that the
    // kernel reads and writes.
    let answer = unsafe { libc::ioctl(fd.as_raw_fd(), request.0 as _, argument.0.as_mut_ptr()) };
    check(answer)
}

/// Makes an ioctl that takes a number, or nothing.
///
/// # Safety
/// `request` must not take an address.
pub(super) unsafe fn call_with_value(
    fd: BorrowedFd<'_>,
    request: Request,
    value: c_ulong,
) -> io::Result<c_int> {
    #[cfg(test)]
    if let Some(answer) = kernel::ioctl(fd, request.0, kernel::Argument::Value(value)) {
        return answer;
    }
    // SAFETY: the caller vouches that the kernel takes the value as a number.
    let answer = unsafe { libc::ioctl(fd.as_raw_fd(), request.0 as _, value) };
    check(answer)
}

/// Makes an ioctl that reads `argument`, whose length the kernel finds in it, or knows.
///
/// # Safety
/// `request` must read no more than `argument`'s length and write nothing.
pub(super) unsafe fn call_with_bytes(
    fd: BorrowedFd<'_>,
    request: Request,
    argument: &[u8],
) -> io::Result<c_int> {
    #[cfg(test)]
    if let Some(answer) = kernel::ioctl(fd, request.0, kernel::Argument::Bytes(argument)) {
        return answer;
    }
    // SAFETY: the caller vouches that the kernel only reads, and not past the end.
    let answer = unsafe { libc::ioctl(fd.as_raw_fd(), request.0 as _, argument.as_ptr()) };
    check(answer)
}

fn check(answer: c_int) -> io::Result<c_int> {
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}

/// Duplicates a descriptor that an ioctl passed as a number to a test's fake.
#[cfg(test)]
pub(in super::super) fn duplicate(fd: c_int) -> io::Result<std::os::fd::OwnedFd> {
    // SAFETY: the caller of the ioctl keeps the file open until the ioctl returns.
    unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()
}
