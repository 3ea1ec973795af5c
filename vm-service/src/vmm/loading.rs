//! The guest's program on its way into RAM, on a thread of its own: reading files takes as long as their storage takes, and
//! whoever wants the guest to end does not wait for that.

use std::io;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::error::MachineError;
use super::stop::Stop;
use super::sys;
use crate::deadlines::LOADING_STOP;

/// A thread that loads. Dropping this stops it between two pieces.
#[derive(Debug)]
pub(super) struct Loading<T> {
    thread: JoinHandle<T>,
    stop: RequestOnDrop,
    done: Stop,
}

/// Requests when it goes, however that comes.
#[derive(Debug)]
struct RequestOnDrop(Stop);

impl Drop for RequestOnDrop {
    fn drop(&mut self) {
        self.0.request();
    }
}

impl<T: Send + 'static> Loading<T> {
    /// Starts `load`, which looks now and then whether it is to stop.
    ///
    /// # Errors
    /// When there are no file descriptors or threads left.
    pub(super) fn start(load: impl FnOnce(&Stop) -> T + Send + 'static) -> Result<Self, MachineError> {
        let failed = |source| MachineError::Thread { what: "loading", source };
        let (stop, done) = (Stop::new().map_err(failed)?, Stop::new().map_err(failed)?);
        let (stops, ends) = (stop.clone(), RequestOnDrop(done.clone()));
        let work = move || {
            let _ends = ends;
            load(&stops)
        };
        let thread = std::thread::Builder::new().name("load".into()).spawn(work).map_err(failed)?;
        Ok(Self { thread, stop: RequestOnDrop(stop), done })
    }

    /// Waits until it has ended, by itself or as `stop` was requested.
    ///
    /// # Errors
    /// When it was asked to stop and does not.
    pub(super) fn wait(&self, stop: &Stop) -> Result<(), MachineError> {
        self.wait_within(stop, LOADING_STOP)
    }

    fn wait_within(&self, stop: &Stop, deadline: Duration) -> Result<(), MachineError> {
        let (done, asked) = (sys::borrow(self.done.event()), sys::borrow(stop.event()));
        let either = &mut [PollFd::new(&done, PollFlags::IN), PollFd::new(&asked, PollFlags::IN)];
        while !self.done.requested() && !stop.requested() {
            wait_for(either, None)?;
        }
        if !self.done.requested() {
            self.stop.0.request();
            wait_for(&mut [PollFd::new(&done, PollFlags::IN)], Some(deadline))?;
        }
        if self.done.requested() { Ok(()) } else { Err(MachineError::Loading { deadline }) }
    }

    /// What it made. Waits until it has ended.
    ///
    /// # Errors
    /// When it panicked.
    pub(super) fn join(self) -> Result<T, MachineError> {
        let Self { thread, stop: _stop, done: _ } = self;
        thread.join().map_err(|_| MachineError::Panicked { what: "loading" })
    }
}

/// Waits for one of `fds`, at most so long.
fn wait_for(fds: &mut [PollFd<'_>], deadline: Option<Duration>) -> Result<(), MachineError> {
    let failed = |source| MachineError::Thread { what: "loading", source };
    let until = deadline.map(|deadline| Instant::now() + deadline);
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left =
            left.map(Timespec::try_from).transpose().map_err(|error| failed(io::Error::other(error)))?;
        match poll(fds, left.as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(failed(error.into())),
            Ok(_) => return Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn it_is_waited_for_until_it_is_to_stop() {
        let (never, stop) = (Stop::new().unwrap(), Stop::new().unwrap());
        let loading = Loading::start(|_| 7).unwrap();
        loading.wait(&never).unwrap();
        assert_eq!(loading.join().unwrap(), 7);
        let panics = Loading::start(|_| panic!("as it should")).unwrap();
        panics.wait(&never).unwrap();
        assert!(matches!(panics.join(), Err::<(), _>(MachineError::Panicked { .. })));
        let looks = Loading::start(|stop: &Stop| {
            while !stop.requested() {
                std::thread::yield_now();
            }
        })
        .unwrap();
        let (release, released) = mpsc::channel::<()>();
        let stuck = Loading::start(move |_| released.recv().is_err()).unwrap();
        stop.request();
        looks.wait(&stop).unwrap();
        let error = stuck.wait_within(&stop, Duration::from_millis(10)).unwrap_err();
        assert!(error.to_string().contains("did not end within 10ms"), "{error}");
        // It is not given up, and can be waited for again.
        drop(release);
        stuck.wait(&stop).unwrap();
    }
}
