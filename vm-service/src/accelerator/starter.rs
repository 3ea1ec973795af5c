//! Starts workers' processes and ends them, in a thread that stays and that may.
//!
//! A worker ends with the thread that started it, by its own wish (`PR_SET_PDEATHSIG`), so that one that was taken over
//! does not outlive its VMM. That thread must not end before the process does. And whoever serves a guest's accelerator may
//! neither make sockets, nor start processes, nor send signals.

use std::io;
use std::os::fd::OwnedFd;
use std::process::{Child, ChildStderr, Command, ExitStatus};
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

type Order = Box<dyn FnOnce() + Send>;

/// A process that was started.
#[derive(Clone, Debug)]
pub(super) struct Process {
    id: u32,
    child: Arc<Mutex<Child>>,
}

impl Process {
    /// Starts a process.
    ///
    /// # Errors
    /// The Linux kernel's, and when there is no thread for it.
    pub(super) fn start(mut command: Command) -> io::Result<Self> {
        let child = ask(move || command.spawn())??;
        Ok(Self { id: child.id(), child: Arc::new(Mutex::new(child)) })
    }

    /// Its number.
    pub(super) fn id(&self) -> u32 {
        self.id
    }

    /// Where it writes its messages. Once.
    pub(super) fn take_stderr(&self) -> Option<ChildStderr> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner).stderr.take()
    }

    /// Kills it, unless it has ended.
    ///
    /// # Errors
    /// The Linux kernel's, and when there is no thread for it.
    pub(super) fn kill(&self) -> io::Result<()> {
        self.with_child(Child::kill)
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// The Linux kernel's, and when there is no thread for it.
    pub(super) fn try_wait(&self) -> io::Result<Option<ExitStatus>> {
        self.with_child(Child::try_wait)
    }

    fn with_child<T: Send + 'static>(&self, act: fn(&mut Child) -> io::Result<T>) -> io::Result<T> {
        let child = self.child.clone();
        ask(move || act(&mut child.lock().unwrap_or_else(PoisonError::into_inner)))?
    }
}

/// A pair of sockets for packets.
///
/// # Errors
/// The Linux kernel's, and when there is no thread for it.
pub(super) fn socketpair() -> io::Result<(OwnedFd, OwnedFd)> {
    let pair =
        || rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    Ok(ask(pair)??)
}

/// Has the thread do something, and waits for that.
fn ask<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    static STARTER: OnceLock<Option<Sender<Order>>> = OnceLock::new();
    let none = || io::Error::other("the thread that starts workers can't be had");
    let starter = STARTER.get_or_init(|| {
        let (sender, orders) = channel::<Order>();
        let serve = move || orders.into_iter().for_each(|order| order());
        std::thread::Builder::new().name("starter".into()).spawn(serve).ok().map(|_| sender)
    });
    let (answer, answered) = sync_channel(1);
    // Whoever asked waits for it.
    let order: Order = Box::new(move || drop(answer.send(work())));
    starter.as_ref().and_then(|starter| starter.send(order).ok()).ok_or_else(none)?;
    answered.recv().map_err(|_| none())
}
