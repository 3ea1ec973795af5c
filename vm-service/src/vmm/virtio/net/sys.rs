//! Requests to taps and network interfaces.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};

/// A request that is about an interface.
fn named(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: all zeros is a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays 0.
    if name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    Ok(request)
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Makes an open `/dev/net/tun` an end of the interface `name` (`TUNSETIFF`).
pub(super) fn attach(tun: &File, name: &str, flags: c_int) -> io::Result<()> {
    let mut request = named(name)?;
    request.ifr_ifru.ifru_flags = flags as i16;
    // SAFETY: the request reads and writes one ifreq.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })
}

/// Sets how many bytes stand before each frame.
pub(super) fn set_header_len(tap: &File, len: c_int) -> io::Result<()> {
    // SAFETY: the request reads one int.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const len) })
}

/// Sets what whoever reads the tap does by itself (`TUN_F_CSUM` and the like).
pub(super) fn set_offloads(tap: &File, offloads: c_uint) -> io::Result<()> {
    // SAFETY: the request takes a number.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(offloads)) })
}

/// The MTU of an interface.
pub(super) fn mtu(socket: &OwnedFd, name: &str) -> io::Result<c_int> {
    let mut request = named(name)?;
    // SAFETY: the request reads and writes one ifreq.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU as libc::Ioctl, &raw mut request) })?;
    // SAFETY: SIOCGIFMTU has filled this member.
    Ok(unsafe { request.ifr_ifru.ifru_mtu })
}

/// Whether an interface is turned on.
pub(super) fn is_up(socket: &OwnedFd, name: &str) -> io::Result<bool> {
    let mut request = named(name)?;
    // SAFETY: the request reads and writes one ifreq.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS as libc::Ioctl, &raw mut request) })?;
    // SAFETY: SIOCGIFFLAGS has filled this member.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    Ok(c_int::from(flags) & libc::IFF_UP != 0)
}

/// Gives the calling thread, and programs that it starts, a network of their own.
#[cfg(test)]
pub(super) fn leave_network() -> io::Result<()> {
    // SAFETY: it takes a number, and concerns this thread's network alone.
    check(unsafe { libc::unshare(libc::CLONE_NEWNET) })
}
