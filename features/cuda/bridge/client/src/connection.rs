//! A connection to the server: any stream socket, and TLS over it where it leaves this machine.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{SendFlags, Shutdown, send, shutdown};
use vm_bridge::orders::{self, Order};

use crate::tls::Tls;

/// A connection.
pub(crate) enum Connection {
    /// Of whatever family: only what all of them have is used.
    Plain(UnixStream),
    Tls(Box<Tls>),
}

impl Connection {
    pub(crate) fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Plain(stream) => stream.set_read_timeout(timeout),
            Self::Tls(stream) => stream.sock.set_read_timeout(timeout),
        }
    }

    /// Ends it on both sides, whoever has it too.
    pub(crate) fn end(&self) {
        // It may have ended already.
        let _ = shutdown(self.as_fd(), Shutdown::Both);
    }

    /// Gives an order, and waits for the first word of its answer.
    pub(crate) fn give(&mut self, order: Order, more: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<u64> {
        match self {
            Self::Plain(stream) => orders::give(stream, order, more, files),
            Self::Tls(_) if !files.is_empty() => Err(io::ErrorKind::Unsupported.into()),
            Self::Tls(_) => {
                let mut bytes: Vec<u8> = order.iter().flat_map(|word| word.to_ne_bytes()).collect();
                bytes.extend_from_slice(more);
                self.write_all(&bytes)?;
                self.word()
            }
        }
    }

    /// Gives an order that is answered with words: these, or what the driver would say.
    pub(crate) fn give_for_words<const N: usize>(
        &mut self,
        order: Order,
    ) -> io::Result<Result<[u64; N], u32>> {
        let code = self.give(order, &[], &[])?;
        if code != 0 {
            return Ok(Err(code as u32));
        }
        let mut words = [0; N];
        for word in &mut words {
            *word = self.word()?;
        }
        Ok(Ok(words))
    }

    /// The next word that comes.
    pub(crate) fn word(&mut self) -> io::Result<u64> {
        let mut word = [0; 8];
        self.read_exact(&mut word)?;
        Ok(u64::from_ne_bytes(word))
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Plain(stream) => stream.as_fd(),
            Self::Tls(stream) => stream.sock.as_fd(),
        }
    }
}

impl Read for Connection {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read(to),
            Self::Tls(stream) => stream.read(to),
        }
    }
}

/// A server that is gone is an error, and no signal.
impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => Ok(send(&*stream, bytes, SendFlags::NOSIGNAL)?),
            Self::Tls(stream) => {
                let written = stream.write(bytes)?;
                // What it holds back it would send with the next bytes, which may never come.
                stream.flush()?;
                Ok(written)
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
