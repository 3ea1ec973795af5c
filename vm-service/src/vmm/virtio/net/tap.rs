//! Taps of the host: network interfaces whose frames this process reads and writes.

use std::ffi::c_int;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;

use rustix::io::Errno;
use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
};

use super::{HEADER, sys};

const TUN: &str = "/dev/net/tun";
/// Most frames that are thrown away at once. A tap has room for 500 to 1,000 of them, unless it was given more.
const MOST_DRAINED: usize = 1 << 16;

/// A tap that this process has to itself.
pub(super) struct Tap {
    file: File,
    name: String,
    mtu: u16,
}

impl Tap {
    /// Takes a tap that is there; none is made.
    ///
    /// # Errors
    /// Why it can't be had, and what to do.
    pub(super) fn open(name: &str) -> Result<Self, String> {
        let make = format!("`ip tuntap add dev {name} mode tap user USER && ip link set {name} up`");
        let failed = |error: io::Error| error.to_string();
        let any = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
            .map_err(|error| failed(error.into()))?;
        // Linux would make one for root, which ends with this process and has no address and no bridge.
        name_to_index(&any, name).map_err(|error| match error {
            Errno::NODEV => format!("the host has no network interface {name}; make it with {make}"),
            error => failed(error.into()),
        })?;
        let tun = || OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(TUN);
        let mut file = tun().map_err(|error| {
            format!(
                "{TUN} can't be opened: {error}; load its module (`modprobe tun`), and let this user open it"
            )
        })?;
        let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        let mut attached = sys::attach(&file, name, flags);
        if attached.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL)) {
            // One that was made for several queues has to be asked for as such.
            file = tun().map_err(failed)?;
            attached = sys::attach(&file, name, flags | libc::IFF_MULTI_QUEUE);
        }
        attached.map_err(|error| match error.raw_os_error() {
            Some(libc::EINVAL) => format!("{name} is no tap; name another interface, or make one with {make}"),
            Some(libc::EBUSY) => "another process uses it; end that, or name another tap".to_owned(),
            Some(libc::EPERM) => format!(
                "it belongs to another user or to none; delete it (`ip link del {name}`) and make it with {make} for the user \
                 that runs this, or run this with CAP_NET_ADMIN"
            ),
            _ => failed(error),
        })?;
        sys::set_header_len(&file, HEADER as c_int).map_err(failed)?;
        let mtu = sys::mtu(&any, name).map_err(failed)?;
        if !sys::is_up(&any, name).map_err(failed)? {
            tracing::warn!("{name} is down, so that the guest reaches nobody; `ip link set {name} up`");
        }
        Ok(Self { file, name: name.to_owned(), mtu: u16::try_from(mtu).unwrap_or(u16::MAX) })
    }

    /// Something else that takes and gives whole frames.
    #[cfg(test)]
    pub(super) fn of(file: File) -> Self {
        Self { file, name: "fake".into(), mtu: 1500 }
    }

    /// What it is called.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The longest packet that it carries whole.
    pub(super) fn mtu(&self) -> u16 {
        self.mtu
    }

    /// The file of its frames.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Lets it give frames that a driver takes who has accepted these features.
    ///
    /// # Errors
    /// When the Linux kernel refuses.
    pub(super) fn set_offloads(&self, features: u64) -> io::Result<()> {
        let flag = |bit: u32, flag| if features >> bit & 1 != 0 { flag } else { 0 };
        let checksums = flag(VIRTIO_NET_F_GUEST_CSUM, libc::TUN_F_CSUM);
        // Large segments come without their checksums.
        let segments = match checksums {
            0 => 0,
            _ => {
                flag(VIRTIO_NET_F_GUEST_TSO4, libc::TUN_F_TSO4)
                    | flag(VIRTIO_NET_F_GUEST_TSO6, libc::TUN_F_TSO6)
            }
        };
        let congestion = if segments == 0 { 0 } else { flag(VIRTIO_NET_F_GUEST_ECN, libc::TUN_F_TSO_ECN) };
        sys::set_offloads(&self.file, checksums | segments | congestion)
    }

    /// Throws away what has come.
    pub(super) fn drain(&self) {
        let mut header = [0; HEADER];
        // What does not fit of a frame is gone.
        for _ in 0..MOST_DRAINED {
            if self.receive(&mut header).is_err() {
                return;
            }
        }
    }

    /// The next frame with its header, as far as there is room; whatever its length it is taken.
    ///
    /// # Errors
    /// [`Errno::AGAIN`] when there is none.
    pub(super) fn receive(&self, frame: &mut [u8]) -> Result<usize, Errno> {
        rustix::io::retry_on_intr(|| rustix::io::read(&self.file, &mut *frame))
    }

    /// Sends a frame with its header.
    ///
    /// # Errors
    /// When it was not sent.
    pub(super) fn send(&self, frame: &[u8]) -> Result<(), Errno> {
        rustix::io::retry_on_intr(|| rustix::io::write(&self.file, frame)).map(drop)
    }
}
