//! The thread that serves a device's queues.

use std::io;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use vmm_sys_util::eventfd::EventFd;

use super::Busy;
use crate::os::sandbox;
use crate::vmm::{Stop, sys};

/// A running worker. Ending it is asking, then waiting: the thread first comes to where it looks at that.
pub(in crate::vmm) struct Worker {
    end: Stop,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Runs `serve` whenever one of `kicks` is signalled, with its index, until it returns `false` or the worker is
    /// ended. Once at the start it runs for each: a driver may have filled a queue before it could notify.
    ///
    /// # Errors
    /// When there are no file descriptors or threads left.
    pub(super) fn start(
        name: &str,
        kicks: Vec<EventFd>,
        mut serve: impl FnMut(usize, &Stop) -> bool + Send + 'static,
    ) -> io::Result<Self> {
        Self::run(name, move |end| {
            if (0..kicks.len()).all(|index| serve(index, end)) {
                wait(&kicks, end, serve);
            }
        })
    }

    /// Runs `work` once. It must return soon after it was asked to, and with it ends all that it does to RAM and storage.
    ///
    /// # Errors
    /// When there are no file descriptors or threads left.
    pub(super) fn run(name: &str, work: impl FnOnce(&Stop) + Send + 'static) -> io::Result<Self> {
        let end = Stop::new()?;
        let watch = end.clone();
        let thread = sandbox::spawn(name, move || work(&watch))?;
        Ok(Self { end, thread: Some(thread) })
    }

    /// Asks the thread to end.
    pub(super) fn ask_to_end(&self) {
        self.end.request();
    }

    /// Whether the thread has ended.
    pub(super) fn ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Asks the thread to end and waits for it.
    ///
    /// # Errors
    /// When it has not ended by then.
    pub(super) fn end(&self, until: Instant) -> Result<(), Busy> {
        self.ask_to_end();
        while !self.ended() {
            if Instant::now() >= until {
                return Err(Busy);
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.ask_to_end();
        // A thread that still waits for its storage ends by itself; all that it uses is its own.
        if let Some(thread) = self.thread.take().filter(JoinHandle::is_finished)
            && thread.join().is_err()
        {
            tracing::error!("a virtio worker panicked");
        }
    }
}

fn wait(kicks: &[EventFd], end: &Stop, mut serve: impl FnMut(usize, &Stop) -> bool) {
    let events: Vec<_> = std::iter::once(end.event()).chain(kicks).map(sys::borrow).collect();
    loop {
        let mut fds: Vec<PollFd<'_>> = events.iter().map(|event| PollFd::new(event, PollFlags::IN)).collect();
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => {
                tracing::error!(%error, "a virtio worker can't wait any more");
                return;
            }
            Ok(_) => {}
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if ready[0] {
            return;
        }
        for (index, kick) in kicks.iter().enumerate().filter(|(index, _)| ready[index + 1]) {
            // It fails when another reader was faster, and there is none.
            let _ = kick.read();
            if !serve(index, end) {
                return;
            }
        }
    }
}
