//! Watches over one enclosure, on a thread of its own: what takes long for one keeps no other waiting.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vm_passthrough::claim::Cancel;
use vm_passthrough::egpu::{Change, Enclosure as _, Event, HostEnclosure, Manager, State};
use vm_passthrough::ledger::EnclosureLock;
use vm_passthrough::usb4::UniqueId;
use vm_passthrough::{Host, pci};

use super::enclosure::log;
use super::gift::Gift;
use super::warning::{Teller, Warning, What};

/// How long a look may wait for a command on the same enclosure. The next one comes soon.
const LOCK: Duration = Duration::from_millis(500);
/// How soon a signal is seen.
const SLICE: Duration = Duration::from_millis(100);

/// What one is watched over with.
pub(super) struct Work {
    pub(super) host: Host,
    pub(super) id: UniqueId,
    pub(super) manager: Manager<HostEnclosure>,
    /// Whether the policy asks for it to be connected.
    pub(super) is_asked: bool,
    /// Why the policy asks for it to be disconnected, which may change while it is watched over.
    pub(super) breach: Breach,
    pub(super) interval: Duration,
    pub(super) cancel: Cancel,
    pub(super) teller: Teller,
}

/// Why the policy asks for an enclosure to be disconnected; `None` where it does not.
pub(super) type Breach = Arc<Mutex<Option<String>>>;

/// The warnings about an enclosure that is watched over.
#[derive(Default)]
struct Warnings {
    unseen: Warning,
    leftover: Warning,
    display: Warning,
    blind: Warning,
}

/// A thread that watches over an enclosure until that is gone and nothing is left of it.
pub(super) struct Watcher {
    thread: JoinHandle<()>,
    wake: Sender<()>,
}

impl Watcher {
    /// # Errors
    /// When this process has no threads left.
    pub(super) fn start(work: Work) -> io::Result<Self> {
        let (wake, woken) = channel();
        let thread = std::thread::Builder::new().name(format!("egpu {}", work.teller.name));
        let thread = thread.spawn(move || work.run(&woken))?;
        Ok(Self { thread, wake })
    }

    pub(super) fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Has it look now, as something has come or gone.
    pub(super) fn wake(&self) {
        // It may have ended.
        let _ = self.wake.send(());
    }

    /// Waits for its end, which the cancel of its work asks for.
    pub(super) fn end(self) {
        if self.thread.join().is_err() {
            tracing::error!("a thread that watched over an enclosure has panicked");
        }
    }
}

impl Work {
    fn run(mut self, woken: &Receiver<()>) {
        let (mut gift, mut warnings) = (Gift::default(), Warnings::default());
        while !self.cancel.is_requested() {
            // Another command is at work on it, as a rule, which looks after it.
            let looked = match EnclosureLock::of(&self.host, self.id, LOCK) {
                Ok(_lock) => self.look(&mut gift),
                Err(error) => Err(error.to_string()),
            };
            let is_absent = looked.is_ok() && self.manager.state() == State::Absent;
            self.warn(&mut warnings, looked.err());
            if is_absent {
                return self.settle(woken, &mut warnings);
            }
            gift.give(&self.host, self.id, &mut self.manager, &self.teller);
            self.wait(woken);
        }
    }

    /// Looks at it once.
    ///
    /// # Errors
    /// Why it can't be looked at.
    fn look(&mut self, gift: &mut Gift) -> Result<(), String> {
        let (id, teller) = (self.id, &self.teller);
        let mut told = |change: &Change| {
            log(id, change);
            teller.tell(What::Changed(change.clone()));
            gift.note(change, teller);
        };
        let looked = self.manager.poll(&mut told);
        if self.is_asked && self.manager.state() == State::Disconnected {
            self.manager.take(Event::Connect, &mut told);
        }
        self.is_asked = false;
        let is_breach = self.breach().is_some() && !has_boot_display(&self.host, &mut self.manager);
        if self.manager.state() == State::Ready && is_breach {
            self.manager.take(Event::Disconnect { force: false }, &mut told);
        }
        looked.map_err(|error| error.to_string())
    }

    fn breach(&self) -> Option<String> {
        self.breach.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Raises and withdraws warnings after a look, which failed for the reason `unseen`.
    fn warn(&mut self, warnings: &mut Warnings, unseen: Option<String>) {
        let unseen = unseen.map(|why| format!("it is not looked at: {why}"));
        warnings.unseen.update(unseen, &self.teller);
        self.warn_of_leftover(warnings);
        let is_watched = self.manager.state().is_watched();
        let breach = self.breach().filter(|_| is_watched && has_boot_display(&self.host, &mut self.manager));
        let display = breach.map(|breach| format!("it has the boot display, and stays connected: {breach}"));
        warnings.display.update(display, &self.teller);
        let blind = self.manager.enclosure().unwatched().filter(|_| is_watched);
        let blind = blind.map(|why| {
            format!("its temperature is not watched ({why}): it is not stopped when it gets too hot")
        });
        warnings.blind.update(blind, &self.teller);
    }

    fn warn_of_leftover(&self, warnings: &mut Warnings) {
        let left = |leftover| format!("it left something behind, which is tried again: {leftover}");
        warnings.leftover.update(self.manager.leftover().map(left), &self.teller);
    }

    /// Undoes what is left of one that is gone, until nothing is or it is back: then it is another matter.
    fn settle(&mut self, woken: &Receiver<()>, warnings: &mut Warnings) {
        while !self.cancel.is_requested() {
            let is_over = self.manager.settled()
                || self.manager.enclosure().observe().is_ok_and(|seen| seen.route.is_some());
            if is_over {
                warnings.leftover.update(None, &self.teller);
                return;
            }
            self.warn_of_leftover(warnings);
            self.wait(woken);
        }
    }

    /// Waits for the next look: until it is woken, a signal comes, or the interval has passed.
    fn wait(&self, woken: &Receiver<()>) {
        let until = Instant::now() + self.interval;
        while !self.cancel.is_requested() {
            let left = until.saturating_duration_since(Instant::now());
            match woken.recv_timeout(left.min(SLICE)) {
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) if left.is_zero() => return,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

/// Whether the console of the host is on a function of the enclosure, which no process shows.
fn has_boot_display(host: &Host, manager: &mut Manager<HostEnclosure>) -> bool {
    let functions = manager.enclosure().functions();
    let mut read = functions.iter().filter_map(|function| pci::read_attributes(host, *function).ok());
    read.any(|function| function.boot_display)
}
