//! Ends a command whose output nobody takes, once the operator has asked it to end.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::failure::{EXIT_FAILED, Failure};
use crate::log;
use crate::os::sys;
use crate::vmm::Stop;

/// How long the reader of standard output has after that.
const TIMEOUT: Duration = Duration::from_secs(3);
/// How often is seen whether the operator has asked.
const INTERVAL: Duration = Duration::from_millis(100);

/// Lives while the command only prints, and has nothing left to undo.
#[derive(Debug)]
pub(super) struct Overdue {
    _alive: Sender<()>,
}

impl Overdue {
    /// From here on this process ends soon after `stop` is requested, until the result is dropped.
    ///
    /// # Errors
    /// When there are no threads left.
    pub(super) fn start(stop: &Stop) -> Result<Self, Failure> {
        let (alive, ended) = channel();
        let stop = stop.clone();
        let watch = move || {
            let mut asked: Option<Instant> = None;
            // Nothing is ever sent.
            while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                if stop.requested() && asked.get_or_insert_with(Instant::now).elapsed() >= TIMEOUT {
                    let what = "standard output was not read; what was to be printed on it is lost";
                    log::say(format_args!("error: {what}\n"));
                    log::keep_fatal(module_path!(), what);
                    log::flush();
                    sys::exit_at_once(EXIT_FAILED);
                }
            }
        };
        std::thread::Builder::new().name("output".into()).spawn(watch).map_err(|error| {
            Failure::failed(format_args!("no thread can be started: {error}; raise `ulimit -u`"))
        })?;
        Ok(Self { _alive: alive })
    }
}
