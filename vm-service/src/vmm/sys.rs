//! The calls that Rust cannot check.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, IntoRawFd as _, OwnedFd};

use kvm_bindings::kvm_xsave;
use kvm_ioctls::{VcpuExit, VcpuFd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vm_memory::MmapRegion;
use vmm_sys_util::eventfd::EventFd;

/// An eventfd that another process made.
pub(super) fn event_of(event: OwnedFd) -> EventFd {
    // SAFETY: the descriptor is open, and nobody else's from here on.
    unsafe { EventFd::from_raw_fd(event.into_raw_fd()) }
}

/// Advises the Linux kernel to back RAM with huge pages.
pub(super) fn advise_huge_pages(region: &MmapRegion) -> io::Result<()> {
    // SAFETY: the range is exactly one live mapping, and the advice does not change its contents.
    unsafe {
        rustix::mm::madvise(region.as_ptr().cast(), region.size(), rustix::mm::Advice::LinuxHugepage)?;
    }
    Ok(())
}

/// Keeps RAM from the children of this process.
pub(super) fn advise_no_fork(region: &MmapRegion) -> io::Result<()> {
    // SAFETY: the range is exactly one live mapping, and the advice does not change its contents here.
    unsafe {
        rustix::mm::madvise(region.as_ptr().cast(), region.size(), rustix::mm::Advice::LinuxDontFork)?;
    }
    Ok(())
}

/// Has a part of RAM come from this NUMA node of the host, as long as that has memory left.
pub(super) fn prefer_node(region: &MmapRegion, offset: usize, len: usize, node: u16) -> io::Result<()> {
    if offset.checked_add(len).is_none_or(|end| end > region.size()) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    const WORD: usize = u64::BITS as usize;
    let mut mask = vec![0u64; usize::from(node) / WORD + 1];
    mask[usize::from(node) / WORD] = 1 << (usize::from(node) % WORD);
    // The Linux kernel takes one bit less than it is told.
    let bits = mask.len() * WORD + 1;
    let start = region.as_ptr().wrapping_add(offset);
    let (mode, flags) = (libc::MPOL_PREFERRED, 0);
    // SAFETY: the range lies in one live mapping, as was checked, whose contents the call does not change; the mask has that many
    // bits but for the last, which is not read.
    let answer = unsafe { libc::syscall(libc::SYS_mbind, start, len, mode, mask.as_ptr(), bits, flags) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Makes a part of RAM present as if it was written to, without changing it.
pub(super) fn populate(region: &MmapRegion, offset: usize, len: usize) -> io::Result<()> {
    if offset.checked_add(len).is_none_or(|end| end > region.size()) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let start = region.as_ptr().wrapping_add(offset).cast();
    loop {
        // SAFETY: the range lies in one live mapping, as was checked, and the advice does not change its contents.
        match unsafe { rustix::mm::madvise(start, len, rustix::mm::Advice::LinuxPopulateWrite) } {
            Err(rustix::io::Errno::INTR) => {}
            answer => return Ok(answer?),
        }
    }
}

/// An eventfd as a borrowed descriptor.
pub(crate) fn borrow(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor is open for as long as the eventfd that the result borrows from.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

/// Whether an eventfd is signalled; it stays so.
pub(super) fn signalled(event: &EventFd) -> bool {
    let event = borrow(event);
    let mut fds = [PollFd::new(&event, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|count| count > 0)
}

/// Sets the extended processor state of a vCPU.
pub(super) fn set_xsave(vcpu: &VcpuFd, xsave: &kvm_xsave) -> Result<(), kvm_ioctls::Error> {
    // SAFETY: `kvm_xsave` holds 4 KiB, and the state was read from a vCPU of this VM that has no larger state
    // enabled: this process asks for no dynamically enabled feature (AMX).
    unsafe { vcpu.set_xsave(xsave) }
}

/// Runs a vCPU until it leaves the guest. If that is for port I/O, each access has as many bytes as come with it: `rep ins` makes
/// several to one port at once.
pub(super) fn run(vcpu: &mut VcpuFd) -> (Result<VcpuExit<'_>, kvm_ioctls::Error>, usize) {
    let run = std::ptr::from_mut(vcpu.get_kvm_run());
    // SAFETY: this only computes an address in the structure, which is mapped for as long as the vCPU lives.
    let size = unsafe { &raw const (*run).__bindgen_anon_1.io.size };
    let exit = vcpu.run();
    // SAFETY: the vCPU is borrowed, so that it lives; KVM has left the structure; every bit pattern is valid for the byte, which the
    // data of an exit is not in.
    let size = unsafe { size.read_volatile() };
    (exit, usize::from(size).max(1))
}

/// The processor's time stamp counter.
pub(super) fn timestamp() -> u64 {
    // SAFETY: every x86-64 processor has RDTSC, and it reads nothing but the counter.
    unsafe { std::arch::x86_64::_rdtsc() }
}
