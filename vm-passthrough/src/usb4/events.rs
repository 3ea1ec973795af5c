//! What the Linux kernel announces when something is connected or pulled (uevents, `lib/kobject_uevent.c`), by itself or as udev
//! passes it on (systemd's `src/libsystemd/sd-device/device-monitor.c`).

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recvfrom, socket_with};

/// The multicast group of the Linux kernel's own messages; udev's go to another.
const KERNEL: u32 = 1;
/// Bytes of a message at most (`UEVENT_BUFFER_SIZE`, with its header).
const LONGEST: usize = 8 << 10;

/// Announcements of what is connected to and pulled from USB4, Thunderbolt and PCI.
#[derive(Debug)]
pub struct HotplugEvents {
    socket: OwnedFd,
    /// Where it is bound, for others than the Linux kernel.
    path: Option<PathBuf>,
}

impl Drop for HotplugEvents {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // It may be gone with its directory.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl HotplugEvents {
    /// Listens from now on.
    ///
    /// # Errors
    /// When Linux has no such socket for this process, as in some containers.
    pub fn listen() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(KOBJECT_UEVENT))?;
        bind(&socket, &SocketAddrNetlink::new(0, KERNEL))?;
        Ok(Self { socket, path: None })
    }

    /// Listens at a UNIX datagram socket that is made at `path`, whoever sends there: as where the Linux kernel's announcements
    /// don't come, in a container, and something passes them on, or with a mock of udev. It goes with this; one that a process left
    /// which was killed is replaced.
    ///
    /// # Errors
    /// When it can't be made, as where another process listens there or a file is there that is no socket.
    pub fn at(path: &Path) -> io::Result<Self> {
        let is_left = || UnixDatagram::unbound()?.connect(path);
        if is_left().is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
            && std::fs::symlink_metadata(path)?.file_type().is_socket()
        {
            std::fs::remove_file(path)?;
        }
        let socket = UnixDatagram::bind(path)?;
        socket.set_nonblocking(true)?;
        Ok(Self { socket: socket.into(), path: Some(path.into()) })
    }

    /// Waits for something to be connected or pulled, and answers whether that came before the timeout. Announcements that were lost
    /// because nobody read them count as one.
    ///
    /// # Errors
    /// When the socket can't be read.
    pub fn wait(&self, timeout: Duration) -> io::Result<bool> {
        let until = Instant::now() + timeout;
        let mut message = [0; LONGEST];
        loop {
            match recvfrom(&self.socket, &mut message, RecvFlags::DONTWAIT) {
                Ok((len, _, from)) => {
                    // Another process may send here, too.
                    let sender = from.and_then(|from| SocketAddrNetlink::try_from(from).ok());
                    let is_trusted = self.path.is_some() || sender.is_some_and(|sender| sender.pid() == 0);
                    let message = message.get(..len).filter(|_| is_trusted).unwrap_or_default();
                    if is_hotplug(message) {
                        tracing::debug!("uevent {}", printable(message));
                        return Ok(true);
                    }
                }
                Err(Errno::NOBUFS) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Ok(false);
                    }
                    let left = Timespec::try_from(left).map_err(io::Error::other)?;
                    match poll(&mut [PollFd::new(&self.socket.as_fd(), PollFlags::IN)], Some(&left)) {
                        Ok(_) | Err(Errno::INTR) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                Err(error) => return Err(error.into()),
            }
            // A flood of messages does not extend the wait.
            if Instant::now() >= until {
                return Ok(false);
            }
        }
    }
}

/// The words of a message, as far as they are of characters that can be printed.
fn printable(message: &[u8]) -> String {
    let words = message.split(|&byte| byte == 0).filter(|word| word.iter().any(u8::is_ascii_graphic));
    let shown = |word: &[u8]| -> String {
        word.iter().filter(|byte| byte.is_ascii_graphic()).map(|&byte| char::from(byte)).collect()
    };
    words.map(shown).collect::<Vec<_>>().join(" ")
}

/// Whether a message is of USB4, Thunderbolt or PCI: `NAME=VALUE` each ended by a zero byte, after `ACTION@PATH` from the Linux
/// kernel, and after a binary header from udev, which says in its fifth word where they begin.
fn is_hotplug(message: &[u8]) -> bool {
    let properties = match message.strip_prefix(b"libudev\0") {
        Some(header) => {
            let at = header.get(8..12).and_then(|bytes| bytes.try_into().ok()).map(u32::from_ne_bytes);
            at.and_then(|at| message.get(usize::try_from(at).ok()?..))
        }
        None => {
            let header = message.iter().position(|&byte| byte == 0);
            header.filter(|&end| message[..end].contains(&b'@')).map(|end| &message[end..])
        }
    };
    let mut properties = properties.unwrap_or_default().split(|&byte| byte == 0);
    properties.any(|property| property == b"SUBSYSTEM=thunderbolt" || property == b"SUBSYSTEM=pci")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hotplug_counts() {
        let header = "add@/devices/pci0000:00/0000:00:0d.2/domain0/0-0/0-1";
        for (message, is) in [
            (format!("{header}\0ACTION=add\0SUBSYSTEM=thunderbolt\0SEQNUM=1\0"), true),
            ("remove@/devices/pci0000:00/0000:00:07.0\0SUBSYSTEM=pci\0".to_owned(), true),
            (format!("{header}\0SUBSYSTEM=block\0"), false),
            (format!("{header}\0XSUBSYSTEM=pci\0"), false),
            ("SUBSYSTEM=pci\0".to_owned(), false),
            ("libudev\0SUBSYSTEM=pci\0".to_owned(), false),
            (String::new(), false),
        ] {
            assert_eq!(is_hotplug(message.as_bytes()), is, "{message:?}");
        }
        let udev = |at: u32, properties: &str| {
            let mut message = b"libudev\0\xfe\xed\xca\xfe".to_vec();
            message.extend([40, at, 0, 0, 0, 0, 0].map(u32::to_ne_bytes).concat());
            message.extend(properties.as_bytes());
            is_hotplug(&message)
        };
        assert!(udev(40, "ACTION=add\0SUBSYSTEM=thunderbolt\0"));
        assert!(!udev(40, "ACTION=add\0SUBSYSTEM=block\0"));
        assert!(!udev(41, "SUBSYSTEM=pci\0"));
        assert!(!udev(u32::MAX, "SUBSYSTEM=pci\0"));
    }

    /// An announcement ends a wait, and nothing else does before its time.
    #[test]
    fn a_wait_ends_by_an_announcement_or_in_time() {
        const SOON: Duration = Duration::from_secs(600);
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("uevents");
        let events = HotplugEvents::at(&path).expect("a socket");
        assert!(HotplugEvents::at(&path).is_err(), "two listen there");
        let sender = UnixDatagram::unbound().expect("a socket");
        let send = |message: &[u8]| assert_eq!(sender.send_to(message, &path).expect("sent"), message.len());
        let wait = |timeout| events.wait(timeout).expect("it is read");
        assert!(!wait(Duration::from_millis(1)));
        send(b"add@/devices/x\0SUBSYSTEM=block\0");
        assert!(!wait(Duration::from_millis(1)));
        send(b"add@/devices/x\0SUBSYSTEM=block\0");
        send(b"add@/devices/x\0SUBSYSTEM=thunderbolt\0");
        assert!(wait(SOON));
        assert!(!wait(Duration::ZERO), "it is taken once");
        // One whose process was killed is replaced, and whatever else is there is not.
        let left = folder.path().join("left");
        drop(UnixDatagram::bind(&left).expect("a socket"));
        assert!(left.exists() && HotplugEvents::at(&left).is_ok());
        let file = folder.path().join("file");
        std::fs::write(&file, "").expect("written");
        assert!(HotplugEvents::at(&file).is_err() && file.exists());
    }
}
