//! Orders over a session's connection ([`control`]), which may have files with them.

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::wire::{Reader, control};

/// An order's words.
pub type Order = [u64; control::WORDS];

/// The most files with one.
const FILES: usize = 2;

/// Files that came with one.
pub type Files = [Option<OwnedFd>; FILES];

/// Gives an order with what follows it, and waits for its answer, 0 or what the driver would say.
///
/// # Errors
/// When the connection fails or ends, or no answer comes within its timeout.
pub fn give(
    mut connection: &UnixStream,
    order: Order,
    more: &[u8],
    files: &[BorrowedFd<'_>],
) -> io::Result<u64> {
    let mut bytes: Vec<u8> = order.iter().flat_map(|word| word.to_ne_bytes()).collect();
    bytes.extend_from_slice(more);
    send(connection, &bytes, files)?;
    let mut answer = [0; 8];
    connection.read_exact(&mut answer)?;
    Ok(u64::from_ne_bytes(answer))
}

/// The next order, with the files that came; `None` when there are no more.
///
/// # Errors
/// When the connection fails, or ends within an order.
pub fn receive(connection: &UnixStream) -> io::Result<Option<(Order, Files)>> {
    let mut bytes = [0; control::SIZE];
    let Some(files) = take(connection, &mut bytes)? else { return Ok(None) };
    let mut reader = Reader(&bytes);
    let mut order = [0; control::WORDS];
    for word in &mut order {
        *word = reader.word().map_err(io::Error::other)?;
    }
    Ok(Some((order, files)))
}

/// Sends bytes with files.
pub(crate) fn send(connection: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let sent = sendmsg(connection.as_fd(), &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Waits for so many bytes, and takes the files that came with the first; `None` when there are no more.
pub(crate) fn take(mut connection: &UnixStream, bytes: &mut [u8]) -> io::Result<Option<Files>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let buffer = &mut [IoSliceMut::new(bytes)];
    let received = loop {
        match recvmsg(connection.as_fd(), buffer, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?,
        }
    };
    let came = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let mut files = Files::default();
    for (to, file) in files.iter_mut().zip(came.flatten()) {
        *to = Some(file);
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    connection.read_exact(&mut bytes[received.bytes..])?;
    Ok(Some(files))
}
