//! The signals that ask a guest's process to end.

use std::io;
use std::thread::JoinHandle;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

/// While it lives, SIGINT, SIGTERM and SIGHUP are handed on instead of killing this process.
#[derive(Debug)]
pub struct StopSignals {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl StopSignals {
    /// Calls `on_signal` with the name of each signal that comes.
    ///
    /// # Errors
    /// When this process has no descriptors or threads left.
    pub fn start(on_signal: impl Fn(&'static str) + Send + 'static) -> io::Result<Self> {
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
        let handle = signals.handle();
        let thread = std::thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever() {
                on_signal(match signal {
                    SIGINT => "SIGINT",
                    SIGHUP => "SIGHUP",
                    _ => "SIGTERM",
                });
            }
        })?;
        Ok(Self { handle, thread: Some(thread) })
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
