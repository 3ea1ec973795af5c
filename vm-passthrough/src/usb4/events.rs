//! What the Linux kernel announces when something is connected or pulled (uevents, `lib/kobject_uevent.c`).

use std::io;
use std::os::fd::OwnedFd;
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
        Ok(Self { socket })
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
                    let is_linux = sender.is_some_and(|sender| sender.pid() == 0);
                    if is_linux && message.get(..len).is_some_and(is_hotplug) {
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
                    match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&left)) {
                        Ok(_) | Err(Errno::INTR) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                Err(error) => return Err(error.into()),
            }
            // Whoever sends more than can be read is not waited for either.
            if Instant::now() >= until {
                return Ok(false);
            }
        }
    }
}

/// Whether a message is of USB4, Thunderbolt or PCI: `ACTION@PATH`, then `NAME=VALUE` each, all ended by a zero byte.
fn is_hotplug(message: &[u8]) -> bool {
    let mut parts = message.split(|&byte| byte == 0);
    parts.next().is_some_and(|header| header.contains(&b'@'))
        && parts.any(|part| part == b"SUBSYSTEM=thunderbolt" || part == b"SUBSYSTEM=pci")
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
    }

    #[test]
    fn a_wait_ends() {
        match HotplugEvents::listen() {
            Ok(events) => drop(events.wait(Duration::from_millis(1)).expect("it is read")),
            Err(error) => println!("skipped: no uevents here: {error}"),
        }
    }
}
