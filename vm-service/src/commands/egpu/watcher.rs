//! Watches over one enclosure, on a thread of its own: what takes long for one keeps no other waiting.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vm_passthrough::claim::Cancel;
use vm_passthrough::egpu::{Change, Enclosure as _, Event, HostEnclosure, Manager, State};
use vm_passthrough::ledger::EnclosureLock;
use vm_passthrough::usb4::UniqueId;
use vm_passthrough::{Host, PciAddress, pci};

use super::enclosure::log;
use super::gift::Gift;
use crate::log::now;

/// How long a look may wait for a command on the same enclosure. The next one comes soon.
const LOCK: Duration = Duration::from_millis(500);
/// How soon a signal is seen.
const SLICE: Duration = Duration::from_millis(100);

/// A step in the life of an enclosure.
pub(super) struct Told {
    pub(super) id: UniqueId,
    /// Its name.
    pub(super) name: String,
    pub(super) change: Change,
    /// When, as RFC 3339 has it.
    pub(super) time: String,
}

/// What one is watched over with.
pub(super) struct Work {
    pub(super) host: Host,
    pub(super) id: UniqueId,
    pub(super) name: String,
    pub(super) manager: Manager<HostEnclosure>,
    /// Whether the policy asks for it to be connected.
    pub(super) is_asked: bool,
    /// Why the policy asks for it to be disconnected.
    pub(super) breach: Option<String>,
    pub(super) interval: Duration,
    pub(super) cancel: Cancel,
    pub(super) tell: Sender<Told>,
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
        let thread = std::thread::Builder::new().name(format!("egpu {}", work.name));
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
        let (mut gift, mut said, mut left) = (Gift::default(), None, None);
        while !self.cancel.is_requested() {
            // Another command is at work on it, as a rule, which looks after it.
            let looked = match EnclosureLock::of(&self.host, self.id, LOCK) {
                Ok(_lock) => self.look(&mut gift),
                Err(error) => Err(error.to_string()),
            };
            self.say_leftover(&mut left);
            match looked {
                Ok(()) if self.manager.state() == State::Absent => return self.settle(woken, &mut left),
                Ok(()) => said = None,
                Err(why) => self.say(&mut said, why),
            }
            gift.give(&self.host, self.id, &mut self.manager);
            self.wait(woken);
        }
    }

    /// Looks at it once.
    ///
    /// # Errors
    /// Why it can't be looked at.
    fn look(&mut self, gift: &mut Gift) -> Result<(), String> {
        let (id, name, tell) = (self.id, &self.name, &self.tell);
        let mut told = |change: &Change| {
            log(id, change);
            gift.note(change);
            // Nobody may want to know any more.
            let _ = tell.send(Told { id, name: name.clone(), change: change.clone(), time: now() });
        };
        let looked = self.manager.poll(&mut told);
        if self.is_asked && self.manager.state() == State::Disconnected {
            self.manager.take(Event::Connect, &mut told);
        }
        self.is_asked = false;
        if self.manager.state() == State::Ready
            && let Some(breach) = &self.breach
        {
            if self
                .manager
                .enclosure()
                .functions()
                .iter()
                .any(|function| is_boot_display(&self.host, *function))
            {
                tracing::warn!(enclosure = %id, "{name} has the boot display, and stays connected: {breach}");
                self.breach = None;
            } else {
                self.manager.take(Event::Disconnect { force: false }, &mut told);
            }
        }
        looked.map_err(|error| error.to_string())
    }

    /// Reports what is left of a tunnel that is gone, once until nothing is or it is something else.
    fn say_leftover(&self, left: &mut Option<String>) {
        let leftover = self.manager.leftover();
        if let Some(leftover) = leftover.filter(|leftover| Some(*leftover) != left.as_deref()) {
            tracing::warn!(enclosure = %self.id, "{} left something behind, which is tried again: {leftover}", self.name);
        }
        *left = leftover.map(str::to_owned);
    }

    /// Reports why it can't be looked at, once until it can or the reason is another.
    fn say(&self, said: &mut Option<String>, why: String) {
        // The time that was waited is in some.
        let is_new = said.as_ref().is_none_or(|said| said.split(" s;").next() != why.split(" s;").next());
        if is_new {
            tracing::warn!(enclosure = %self.id, "{} is not looked at: {why}", self.name);
            *said = Some(why);
        }
    }

    /// Undoes what is left of one that is gone, until nothing is or it is back: then it is another matter.
    fn settle(&mut self, woken: &Receiver<()>, left: &mut Option<String>) {
        while !self.cancel.is_requested() && !self.manager.settled() {
            self.say_leftover(left);
            if self.manager.enclosure().observe().is_ok_and(|seen| seen.route.is_some()) {
                return;
            }
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

/// Whether the console of the host is on a function, which no process shows.
fn is_boot_display(host: &Host, function: PciAddress) -> bool {
    pci::read_attributes(host, function).is_ok_and(|function| function.boot_display)
}
