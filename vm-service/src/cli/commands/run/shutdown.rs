//! How a signal ends a guest: the first presses its power button, and a second, or a deadline, cuts its power.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::guest::Progress;
use crate::guest::state::{Event, Phase};
use crate::vmm::{PowerButton, Stop};

/// What signals do to a guest.
#[derive(Debug)]
pub(super) struct Shutdown {
    stop: Stop,
    button: PowerButton,
    timeout: Duration,
    started: AtomicBool,
    /// Whether the guest runs, and has had all the devices that it starts with: before that it has nothing to lose.
    runs: AtomicBool,
    is_pressed: AtomicBool,
}

impl Shutdown {
    /// A guest has `timeout` to power itself off; zero cuts its power at once.
    pub(super) fn new(stop: Stop, button: PowerButton, timeout: Duration) -> Arc<Self> {
        let [started, runs, is_pressed] = [false; 3].map(AtomicBool::new);
        Arc::new(Self { stop, button, timeout, started, runs, is_pressed })
    }

    /// Takes note of what happened.
    pub(super) fn note(&self, progress: &Progress<'_>) {
        match progress.event {
            Event::Started(_) => self.started.store(true, Ordering::SeqCst),
            Event::Attached(_, Ok(())) => {}
            Event::Ended(_) => return self.runs.store(false, Ordering::SeqCst),
            _ => return,
        }
        let is_there = |(_, phase)| phase == Phase::Attached;
        if self.started.load(Ordering::SeqCst) && progress.state.functions().all(is_there) {
            self.runs.store(true, Ordering::SeqCst);
        }
    }

    /// A signal has come.
    pub(super) fn signalled(self: &Arc<Self>, signal: &str) {
        let runs = self.runs.load(Ordering::SeqCst);
        let is_first = !self.is_pressed.swap(true, Ordering::SeqCst);
        // A terminal that is closed, and a session that ends, send one behind another signal.
        if runs && !is_first && signal == "SIGHUP" {
            return;
        }
        if !runs || !is_first || self.timeout.is_zero() {
            tracing::info!("{signal}: stopping the guest");
            return self.stop.request();
        }
        let timeout = self.timeout.as_secs_f64();
        tracing::info!(
            "{signal}: pressing the guest's power button; its power is cut after {timeout} s, or by another signal"
        );
        self.button.press();
        let this = self.clone();
        let cut = move || {
            std::thread::sleep(this.timeout);
            if this.runs.load(Ordering::SeqCst) {
                tracing::warn!(
                    "the guest has not powered itself off within {timeout} s, so its power is cut: nothing in it listens to \
                     its power button, or it takes longer (`--shutdown-timeout`)"
                );
                this.stop.request();
            }
        };
        if let Err(error) = std::thread::Builder::new().name("shutdown".into()).spawn(cut) {
            tracing::warn!("no thread can wait for the guest: {error}; its power is cut");
            self.stop.request();
        }
    }
}
