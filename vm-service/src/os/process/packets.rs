//! Packets between processes: JSON over a Unix socket, with descriptors beside it.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The most bytes of a packet.
const PACKET: usize = 128 << 10;
/// The most descriptors beside one.
const DESCRIPTORS: usize = 8;

/// Sends a packet; waits until the other side has room for it.
///
/// # Errors
/// The Linux kernel's.
pub(crate) fn send(socket: impl AsFd, message: &impl Serialize, files: &[BorrowedFd<'_>]) -> io::Result<()> {
    packet(socket, message, files, SendFlags::NOSIGNAL)
}

/// Sends a packet if the other side has room for it.
///
/// # Errors
/// When it has not (`WouldBlock`); the Linux kernel's.
pub(crate) fn offer(socket: impl AsFd, message: &impl Serialize, files: &[BorrowedFd<'_>]) -> io::Result<()> {
    packet(socket, message, files, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
}

fn packet(
    socket: impl AsFd,
    message: &impl Serialize,
    files: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> io::Result<()> {
    let bytes = serde_json::to_vec(message).map_err(io::Error::other)?;
    if bytes.len() > PACKET || files.len() > DESCRIPTORS {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    loop {
        match sendmsg(&socket, &[IoSlice::new(&bytes)], &mut control, flags) {
            Err(rustix::io::Errno::INTR) => {}
            sent => return sent.map(drop).map_err(io::Error::from),
        }
    }
}

/// Receives a packet; `None` when the other side has gone.
///
/// # Errors
/// The Linux kernel's; for a packet that is no message.
pub(crate) fn receive<T: DeserializeOwned>(socket: impl AsFd) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut bytes = vec![0; PACKET];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(&socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::CONNRESET) => return Ok(None),
            received => break received?,
        }
    };
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            files.extend(descriptors);
        }
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    let message = serde_json::from_slice(&bytes[..received.bytes]).map_err(io::Error::other)?;
    Ok(Some((message, files)))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    #[test]
    fn packets_carry_descriptors() {
        let (left, right) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let (mut reader, writer) = std::io::pipe().unwrap();
        send(&left, &"ping", &[]).unwrap();
        send(&left, &["x"], &[writer.as_fd()]).unwrap();
        drop((left, writer));
        let (first, files) = receive::<String>(&right).unwrap().unwrap();
        assert_eq!((first.as_str(), files.len()), ("ping", 0));
        let (second, files) = receive::<[String; 1]>(&right).unwrap().unwrap();
        assert_eq!(second, ["x"]);
        std::fs::File::from(files.into_iter().next().unwrap()).write_all(b"through").unwrap();
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "through");
        assert!(receive::<String>(&right).unwrap().is_none(), "the other side has gone");
    }

    #[test]
    fn what_is_no_message_is_an_error() {
        let (left, right) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::io::write(&left, b"{").unwrap();
        assert!(receive::<String>(&right).is_err());
        assert!(send(&left, &"x".repeat(PACKET), &[]).is_err());
    }
}
