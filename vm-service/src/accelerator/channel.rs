//! The messages between the VMM and a worker: one packet of a Unix socket each, with descriptors beside it.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::sandbox::{Confinement, Measures};

/// A message of the VMM to a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Order {
    /// The first: open the accelerator. With a descriptor for each part of the guest's memory, and the file that keeps its
    /// time.
    Open(Open),
    /// The guest's driver is ready. With the doorbell's and, if it wants interrupts, the interrupt's eventfd.
    Start(Start),
    /// A program of the guest has connected. With its socket.
    Connect,
    /// Say that you are there.
    Ping,
}

/// Which accelerator, and what the guest may use of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Open {
    /// The guest's name, for messages.
    pub(crate) guest: String,
    /// `cpu`, or a PCI address.
    pub(crate) device: String,
    /// The most bytes of the accelerator's memory.
    pub(crate) memory: u64,
    /// The longest that a launch may take, in microseconds.
    pub(crate) deadline_us: u64,
    /// How much of every [`TIME_PERIOD`](crate::config::TIME_PERIOD) the guest may keep it busy, in microseconds.
    pub(crate) time_slice_us: u64,
    /// The longest that the worker polls for something before it sleeps, in microseconds.
    pub(crate) poll_us: u64,
    /// The parts of the guest's memory that buffers can be made over: address and length. That is the RAM with its
    /// guest-physical addresses, or the window, which begins at 0.
    pub(crate) ram: Vec<(u64, u64)>,
    /// What the worker gives up beyond what it must.
    pub(crate) measures: Measures,
    /// The vsock port at which programs of the guest connect; `None` where its driver has a queue.
    pub(crate) port: Option<u32>,
}

/// The queue as the driver set it up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Start {
    /// Entries.
    pub(crate) size: u16,
    /// Where the descriptor table lies.
    pub(crate) descriptors: u64,
    /// Where the available ring lies.
    pub(crate) available: u64,
    /// Where the used ring lies.
    pub(crate) used: u64,
    /// Whether the driver says when it wants interrupts (`VIRTIO_F_EVENT_IDX`).
    pub(crate) event_index: bool,
}

/// A message of a worker to the VMM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Report {
    /// The accelerator is open.
    Ready {
        /// Its name.
        name: String,
        /// What code is compiled for.
        target: String,
        /// How far the worker is confined.
        confinement: Confinement,
    },
    /// It could not be opened, and why; the worker ends.
    Failed(String),
    /// The worker serves this guest no further, and why.
    Broken(String),
    /// Something takes longer than it may, and can't be stopped but by ending the worker.
    Overdue(String),
    /// The answer to a ping.
    Here,
}

/// The most bytes of a packet.
const PACKET: usize = 16 << 10;
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
        send(&left, &Order::Ping, &[]).unwrap();
        send(&left, &Report::Broken("x".into()), &[writer.as_fd()]).unwrap();
        drop((left, writer));
        let (order, files) = receive::<Order>(&right).unwrap().unwrap();
        assert_eq!((order, files.len()), (Order::Ping, 0));
        let (report, files) = receive::<Report>(&right).unwrap().unwrap();
        assert_eq!(report, Report::Broken("x".into()));
        std::fs::File::from(files.into_iter().next().unwrap()).write_all(b"through").unwrap();
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "through");
        assert!(receive::<Order>(&right).unwrap().is_none(), "the other side has gone");
    }

    #[test]
    fn what_is_no_message_is_an_error() {
        let (left, right) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::io::write(&left, b"{").unwrap();
        assert!(receive::<Order>(&right).is_err());
        assert!(send(&left, &Report::Broken("x".repeat(PACKET)), &[]).is_err());
    }
}
