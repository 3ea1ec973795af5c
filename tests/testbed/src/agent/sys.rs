//! System calls that neither the standard library nor rustix has: interface ioctls, namespaces, VFIO group ioctls, ptrace.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::net::{AddressFamily, SocketType, socket};
use rustix::process::{Pid, Signal};

/// Gives an interface its IPv4 address and netmask.
pub(super) fn set_interface_address(interface: &str, address: Ipv4Addr, netmask: Ipv4Addr) -> io::Result<()> {
    for (request, value) in [(libc::SIOCSIFADDR, address), (libc::SIOCSIFNETMASK, netmask)] {
        let mut ifreq = named(interface)?;
        let sockaddr = libc::sockaddr_in {
            sin_family: libc::AF_INET as libc::sa_family_t,
            sin_port: 0,
            sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(value.octets()) },
            sin_zero: [0; 8],
        };
        // SAFETY: both are plain structs of 16 bytes, and the family says which of them it is.
        ifreq.ifr_ifru.ifru_addr =
            unsafe { std::mem::transmute::<libc::sockaddr_in, libc::sockaddr>(sockaddr) };
        interface_ioctl(request, &mut ifreq)?;
    }
    Ok(())
}

/// Turns an interface on.
pub(super) fn turn_interface_on(interface: &str) -> io::Result<()> {
    let mut ifreq = named(interface)?;
    interface_ioctl(libc::SIOCGIFFLAGS, &mut ifreq)?;
    // SAFETY: SIOCGIFFLAGS has filled this member.
    let flags = unsafe { ifreq.ifr_ifru.ifru_flags };
    ifreq.ifr_ifru.ifru_flags = flags | libc::IFF_UP as libc::c_short;
    interface_ioctl(libc::SIOCSIFFLAGS, &mut ifreq)
}

/// Makes a tap that belongs to root, as `ip tuntap add … user root` does. One that belongs to nobody takes CAP_NET_ADMIN to open.
pub(super) fn make_tap(name: &str) -> io::Result<()> {
    let tun = File::options().read(true).write(true).open("/dev/net/tun")?;
    let mut ifreq = named(name)?;
    ifreq.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the request reads and writes one ifreq.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw mut ifreq) })?;
    const ROOT: libc::c_ulong = 0;
    // SAFETY: the request takes a number.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETOWNER, ROOT) })?;
    // SAFETY: the request takes a number.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETPERSIST, 1) })?;
    Ok(())
}

fn named(interface: &str) -> io::Result<libc::ifreq> {
    // SAFETY: all zeros is a valid ifreq.
    let mut ifreq: libc::ifreq = unsafe { std::mem::zeroed() };
    if interface.len() >= ifreq.ifr_name.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the interface's name is too long"));
    }
    for (to, from) in ifreq.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = from.cast_signed();
    }
    Ok(ifreq)
}

fn interface_ioctl(request: libc::Ioctl, ifreq: &mut libc::ifreq) -> io::Result<()> {
    let socket = socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    // SAFETY: the requests used here read and write one ifreq.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), request, std::ptr::from_mut(ifreq)) })?;
    Ok(())
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Gives this process mounts of its own, and its children processes of their own.
pub(super) fn unshare_processes_and_mounts() -> io::Result<()> {
    // SAFETY: it takes no pointers, and leaves descriptors and memory as they are.
    check(unsafe { libc::unshare(libc::CLONE_NEWPID | libc::CLONE_NEWNS) }).map(drop)
}

/// Has this process use the mounts of another, and its children be among the other's processes.
pub(super) fn enter_processes_and_mounts(pid: i32) -> io::Result<()> {
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    let process = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?;
    // SAFETY: it takes no pointers, and leaves descriptors and memory as they are.
    check(unsafe { libc::setns(process.as_raw_fd(), libc::CLONE_NEWPID | libc::CLONE_NEWNS) }).map(drop)
}

// From include/uapi/linux/vfio.h: type ';', base 100.
const VFIO_SET_IOMMU: libc::Ioctl = 0x3b66;
const VFIO_GROUP_GET_STATUS: libc::Ioctl = 0x3b67;
const VFIO_GROUP_SET_CONTAINER: libc::Ioctl = 0x3b68;
const VFIO_GROUP_GET_DEVICE_FD: libc::Ioctl = 0x3b6a;
const VFIO_DEVICE_BIND_IOMMUFD: libc::Ioctl = 0x3b76;
const VFIO_GROUP_FLAGS_VIABLE: u32 = 1;
const VFIO_TYPE1V2_IOMMU: libc::c_ulong = 3;

/// Whether a group can be used, as VFIO says.
pub(super) fn group_is_viable(group: &File) -> io::Result<bool> {
    // A vfio_group_status: its size, its flags.
    let mut status = [8u32, 0];
    // SAFETY: it writes a vfio_group_status, which is as large.
    check(unsafe { libc::ioctl(group.as_raw_fd(), VFIO_GROUP_GET_STATUS, status.as_mut_ptr()) })?;
    Ok(status[1] & VFIO_GROUP_FLAGS_VIABLE != 0)
}

/// Opens a device for who opened its cdev, which takes the DMA of its group from the host.
pub(super) fn bind_to_iommufd(device: &File, iommu: &File) -> io::Result<()> {
    // A vfio_device_bind_iommufd: its size, flags, the descriptor, and the number that comes back.
    let mut bind = [16i32, 0, iommu.as_raw_fd(), 0];
    // SAFETY: it reads and writes a vfio_device_bind_iommufd, which is as large.
    check(unsafe { libc::ioctl(device.as_raw_fd(), VFIO_DEVICE_BIND_IOMMUFD, bind.as_mut_ptr()) })?;
    Ok(())
}

/// Opens a device through its group; all files must stay open as long as the device.
pub(super) fn open_group_device(container: &File, group: &File, address: &str) -> io::Result<OwnedFd> {
    let fd = container.as_raw_fd();
    // SAFETY: it reads the descriptor.
    check(unsafe { libc::ioctl(group.as_raw_fd(), VFIO_GROUP_SET_CONTAINER, &raw const fd) })?;
    // SAFETY: it takes a number.
    check(unsafe { libc::ioctl(container.as_raw_fd(), VFIO_SET_IOMMU, VFIO_TYPE1V2_IOMMU) })?;
    let name = std::ffi::CString::new(address)?;
    // SAFETY: it reads the C string.
    let device = check(unsafe { libc::ioctl(group.as_raw_fd(), VFIO_GROUP_GET_DEVICE_FD, name.as_ptr()) })?;
    // SAFETY: the Linux kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(device) })
}

/// A page of a file that can be mapped, as of a BAR in sysfs.
#[derive(Debug)]
pub struct Registers(*mut libc::c_void);

impl Registers {
    const LEN: usize = 4096;

    /// The first page.
    ///
    /// # Errors
    /// When it can't be mapped.
    pub fn map(file: &File) -> io::Result<Self> {
        Self::map_page(file, 0)
    }

    fn map_page(file: &File, offset: u64) -> io::Result<Self> {
        let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a mapping at an address of the Linux kernel's choice disturbs nothing that exists.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                Self::LEN,
                protection,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                offset,
            )
        };
        if page == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Self(page)) }
    }

    /// The word at an offset, rounded down to a multiple of 4, within the page.
    fn word(&self, offset: usize) -> *mut u32 {
        self.0.wrapping_byte_add((offset % Self::LEN) & !3).cast()
    }

    /// Reads the word there.
    pub fn read(&self, offset: usize) -> u32 {
        // SAFETY: the page is mapped, the word lies in it and is aligned, and no reference into it exists.
        unsafe { self.word(offset).read_volatile() }
    }

    /// Writes the word there.
    pub fn write(&self, offset: usize, value: u32) {
        // SAFETY: as above, and it is writable.
        unsafe { self.word(offset).write_volatile(value) }
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: it was mapped as long as this was there, and nothing uses it any more.
        unsafe { libc::munmap(self.0, Self::LEN) };
    }
}

/// Exchanges the word at `offset`, a multiple of 4, of a file that can be mapped: a BAR in sysfs.
pub(super) fn exchange_word(file: &File, offset: u64, word: Option<u32>) -> io::Result<u32> {
    let within = offset % Registers::LEN as u64;
    let registers = Registers::map_page(file, offset - within)?;
    let before = registers.read(within as usize);
    if let Some(word) = word {
        registers.write(within as usize, word);
    }
    Ok(before)
}

/// Takes a context id of vsock for an open `/dev/vhost-vsock`, as a VMM does for its guest.
pub(super) fn take_context_id(vhost: &File, cid: u64) -> io::Result<()> {
    const VHOST_SET_OWNER: libc::Ioctl = 0xaf01;
    const VHOST_VSOCK_SET_GUEST_CID: libc::Ioctl = 0x4008_af60;
    // SAFETY: the request takes no argument.
    check(unsafe { libc::ioctl(vhost.as_raw_fd(), VHOST_SET_OWNER) })?;
    // SAFETY: the request reads a number of 8 bytes.
    check(unsafe { libc::ioctl(vhost.as_raw_fd(), VHOST_VSOCK_SET_GUEST_CID, &raw const cid) })?;
    Ok(())
}

/// Makes the command's process stop for its parent before its program begins.
pub(super) fn trace_me(command: &mut Command) {
    let stop = || {
        // SAFETY: it only marks the calling process as traced by its parent.
        if unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
    unsafe { command.pre_exec(stop) };
}

/// What a traced process has stopped for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// It ended, with this exit status unless a signal ended it.
    Ended(Option<i32>),
    /// A system call begins or ends.
    Call,
    /// A new process or thread.
    Born,
    /// A signal, which it is to get.
    Signal(i32),
}

/// Waits for the next stop of any process that this thread traces, or end of any that it started; `None` when none is left.
pub(super) fn wait_for_stop() -> io::Result<Option<(Pid, Stop)>> {
    let mut status = 0;
    // SAFETY: it writes one status.
    let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL | libc::__WNOTHREAD) };
    if pid < 0 {
        let error = io::Error::last_os_error();
        return if error.raw_os_error() == Some(libc::ECHILD) { Ok(None) } else { Err(error) };
    }
    let Some(pid) = Pid::from_raw(pid) else { return Ok(None) };
    if !libc::WIFSTOPPED(status) {
        let code = libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status));
        return Ok(Some((pid, Stop::Ended(code))));
    }
    let stop = match (status >> 16, libc::WSTOPSIG(status)) {
        (0, signal) if signal == libc::SIGTRAP | 0x80 => Stop::Call,
        (0, libc::SIGSTOP | libc::SIGTRAP) => Stop::Born,
        (0, signal) => Stop::Signal(signal),
        _ => Stop::Born,
    };
    Ok(Some((pid, stop)))
}

/// Follows a traced process into its children, and marks its stops at system calls.
pub(super) fn follow(pid: Pid) -> io::Result<()> {
    let options = libc::PTRACE_O_TRACESYSGOOD
        | libc::PTRACE_O_TRACEFORK
        | libc::PTRACE_O_TRACEVFORK
        | libc::PTRACE_O_TRACECLONE
        | libc::PTRACE_O_TRACEEXEC;
    ptrace(libc::PTRACE_SETOPTIONS, pid, options as usize)
}

/// Lets it run to its next system call, with a signal or with none (0).
pub(super) fn go_on(pid: Pid, signal: i32) -> io::Result<()> {
    ptrace(libc::PTRACE_SYSCALL, pid, signal as usize)
}

/// The system call that a stopped process is about to make, with its arguments.
pub(super) fn system_call(pid: Pid) -> io::Result<Option<(u64, [u64; 6])>> {
    // SAFETY: all zeros is a valid value.
    let mut info: libc::ptrace_syscall_info = unsafe { std::mem::zeroed() };
    let size = size_of_val(&info);
    let raw = pid.as_raw_nonzero().get();
    // SAFETY: it writes at most `size` bytes of `info`.
    let got = unsafe { libc::ptrace(libc::PTRACE_GET_SYSCALL_INFO, raw, size, &raw mut info) };
    if got < 0 {
        return Err(io::Error::last_os_error());
    }
    if info.op != libc::PTRACE_SYSCALL_INFO_ENTRY {
        return Ok(None);
    }
    // SAFETY: at an entry this member is filled.
    let entry = unsafe { info.u.entry };
    Ok(Some((entry.nr, entry.args)))
}

fn ptrace(request: libc::c_uint, pid: Pid, data: usize) -> io::Result<()> {
    // SAFETY: the requests used here take a number, and touch no memory of this process.
    let result = unsafe { libc::ptrace(request, pid.as_raw_nonzero().get(), 0, data) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Asks a process to end.
pub(super) fn ask(pid: Pid) {
    // It fails only on a process that has ended.
    let _ = rustix::process::kill_process(pid, Signal::TERM);
}

/// Ends a process at once.
pub(super) fn kill(pid: Pid) {
    // It fails only on a process that has ended.
    let _ = rustix::process::kill_process(pid, Signal::KILL);
}
