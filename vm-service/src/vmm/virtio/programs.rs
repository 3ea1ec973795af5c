//! The programs of a guest that connect to its accelerator over vsock: they are listened for, and handed to the worker.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};

use rustix::event::{PollFd, PollFlags, poll};
use vsock::{VMADDR_CID_HOST, VsockListener};

use super::supervisor::{Maker, supervise};
use crate::accelerator::WorkerProcess;
use crate::vmm::{Stop, sys};

/// Stands for a port that is free.
const PORT_ANY: u32 = u32::MAX;

/// A listening socket, for one guest.
#[derive(Debug)]
pub(super) struct Programs {
    listener: VsockListener,
    /// The guest's context id.
    cid: u32,
}

impl Programs {
    /// Listens at a port that is free. Answers with the port too.
    ///
    /// # Errors
    /// The Linux kernel's.
    pub(super) fn listen(cid: u32) -> io::Result<(Self, u32)> {
        let listener = VsockListener::bind_with_cid_port(VMADDR_CID_HOST, PORT_ANY)?;
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        Ok((Self { listener, cid }, port))
    }

    /// Readable when a program wants to connect.
    pub(super) fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Takes one connection, if there is one, and gives it to `hand` if it comes from the guest. One that does not, or is
    /// not taken, is closed.
    pub(super) fn accept(&self, hand: impl FnOnce(BorrowedFd<'_>) -> io::Result<()>) {
        match self.listener.accept() {
            Ok((socket, from)) if from.cid() == self.cid => {
                if let Err(error) = hand(socket.as_fd()) {
                    tracing::debug!(%error, cid = self.cid, "a program of the guest is not served");
                }
            }
            Ok((_, from)) => {
                tracing::debug!(cid = from.cid(), "a connection that is not the guest's was closed");
            }
            Err(error) => tracing::debug!(%error, "a program of the guest did not connect"),
        }
    }

    /// Serves programs until it is asked to end, first with `worker`. Another is made when there is none and the next
    /// program connects.
    pub(super) fn run(&self, maker: &Maker, mut worker: Option<WorkerProcess>, end: &Stop) {
        loop {
            if let Some(worker) = worker.take() {
                match supervise(worker, end, Some(self)) {
                    Ok(()) => return,
                    Err(reason) => maker.tell_end(&reason),
                }
            }
            let (end, listener) = (sys::borrow(end.event()), self.listener());
            let mut fds = [PollFd::new(&end, PollFlags::IN), PollFd::new(&listener, PollFlags::IN)];
            match poll(&mut fds, None) {
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => {
                    tracing::error!(%error, "a guest's programs can't be listened for any more");
                    return;
                }
                Ok(_) => {}
            }
            if !fds[0].revents().is_empty() {
                return;
            }
            match maker.make() {
                Ok((made, _)) => worker = Some(made),
                Err(error) => {
                    maker.tell_end(&error.to_string());
                    self.accept(|_| Err(io::Error::other("there is no worker")));
                }
            }
        }
    }
}
