//! The signals that ask a guest's process to end.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

const SIGNALS: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// While it lives, SIGINT, SIGTERM and SIGHUP are handed on instead of killing this process. Before and behind, they kill it.
#[derive(Debug)]
pub struct StopSignals {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

/// Whether signals do what they do by default. A handler that was once installed stays, and would swallow them.
static DEFAULT: AtomicBool = AtomicBool::new(true);

/// How many [`StopSignals`] live; `None` before the first.
static LIVING: Mutex<Option<usize>> = Mutex::new(None);

/// Notes that there is one more.
fn begin() -> io::Result<()> {
    let mut living = LIVING.lock().unwrap_or_else(PoisonError::into_inner);
    if living.is_none() {
        for signal in SIGNALS {
            signal_hook::flag::register_conditional_default(signal, &DEFAULT)?;
        }
    }
    *living = Some(living.unwrap_or(0) + 1);
    DEFAULT.store(false, Ordering::SeqCst);
    Ok(())
}

/// Notes that there is one less.
fn end() {
    let mut living = LIVING.lock().unwrap_or_else(PoisonError::into_inner);
    *living = living.map(|living| living.saturating_sub(1));
    DEFAULT.store(*living == Some(0), Ordering::SeqCst);
}

impl StopSignals {
    /// Calls `on_signal` with the name of each signal that comes.
    ///
    /// # Errors
    /// When this process has no descriptors or threads left.
    pub fn start(on_signal: impl Fn(&'static str) + Send + 'static) -> io::Result<Self> {
        let mut signals = Signals::new(SIGNALS)?;
        begin()?;
        // From here on its end is noted.
        let mut this = Self { handle: signals.handle(), thread: None };
        this.thread = Some(std::thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever() {
                on_signal(match signal {
                    SIGINT => "SIGINT",
                    SIGHUP => "SIGHUP",
                    _ => "SIGTERM",
                });
            }
        })?);
        Ok(this)
    }

    /// Has them handed on until this process ends.
    pub fn stay(self) {
        std::mem::forget(self);
    }
}

impl Drop for StopSignals {
    fn drop(&mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that waits for signals panicked");
        }
        end();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn hands_on_signals() {
        let (send, receive) = mpsc::channel();
        let signals = StopSignals::start(move |name| {
            let _ = send.send(name);
        })
        .expect("a thread");
        let signal = rustix::process::Signal::HUP;
        rustix::process::kill_process(rustix::process::getpid(), signal).expect("sent");
        assert_eq!(receive.recv_timeout(Duration::from_secs(10)), Ok("SIGHUP"));
        drop(signals);
    }
}
