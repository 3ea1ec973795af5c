//! Waiting for more to print, until a signal comes or nobody reads it any more.

use std::io::{self, PipeReader, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::failure::{EXIT_OK, Failure};
use crate::log;
use crate::os::signals::StopSignals;
use crate::os::sys;

/// How long what was begun may be printed after a signal, where its reader does not read.
const UNREAD: Duration = Duration::from_secs(2);

/// Prints go on as long as this says so. A second signal ends the process at once, and so does the first where a reader does
/// not read what is printed for [`UNREAD`].
#[derive(Debug)]
pub(super) struct Following {
    /// Has something to read when a signal came.
    signalled: PipeReader,
    _signals: StopSignals,
}

impl Following {
    /// From here on signals end the wait, and not the process.
    ///
    /// # Errors
    /// When this process has no descriptors or threads left.
    pub(super) fn start() -> Result<Self, Failure> {
        let start = || -> io::Result<Self> {
            let (signalled, signal) = io::pipe()?;
            let is_second = AtomicBool::new(false);
            let on_signal = move |_| {
                if is_second.swap(true, Ordering::SeqCst) {
                    log::flush();
                    sys::exit_at_once(EXIT_OK);
                }
                // One byte always fits.
                let _ = (&signal).write_all(b"x");
                // Without a thread it takes the second signal.
                let _ = std::thread::Builder::new().name("unread".into()).spawn(|| {
                    std::thread::sleep(UNREAD);
                    log::flush();
                    sys::exit_at_once(EXIT_OK);
                });
            };
            Ok(Self { signalled, _signals: StopSignals::start(on_signal)? })
        };
        start().map_err(|error| Failure::failed(format_args!("signals can't be waited for: {error}")))
    }

    /// Waits, and answers whether to go on.
    ///
    /// # Errors
    /// When the Linux kernel can't wait.
    pub(super) fn wait(&self, time: Duration) -> Result<bool, Failure> {
        let time = Timespec::try_from(time).map_err(Failure::failed)?;
        let stdout = rustix::stdio::stdout();
        // Of a pipe that nobody reads it reports an error unasked.
        let mut waited =
            [PollFd::new(&self.signalled, PollFlags::IN), PollFd::new(&stdout, PollFlags::empty())];
        match poll(&mut waited, Some(&time)) {
            Ok(0) | Err(Errno::INTR) => Ok(true),
            Ok(_) => Ok(false),
            Err(error) => Err(Failure::failed(format_args!("can't wait for more: {error}"))),
        }
    }
}
