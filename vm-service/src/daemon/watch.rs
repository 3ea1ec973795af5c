//! Watches the guests: which there are, what happens to them, and what those that died have left.
//!
//! Each guest has a thread that hears of it until its process has ended: the claims that it leaves are released as soon as the
//! Linux kernel has let go of their records. One that the daemon starts is heard of before its process is made; a thread looks for
//! others.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use vm_passthrough::{Host, PassthroughManager};

use super::events::Events;
use super::monitor::Monitor;
use crate::api::{DeviceState, EventKind, GuestEvent, GuestState, StoppedHow};
use crate::deadlines::GUEST_KILL;
use crate::guest::control::{Connection, GuestHome, names};

/// How often new guests are looked for.
pub(super) const INTERVAL: Duration = Duration::from_millis(500);
/// How often a dead guest's claims are looked for, each time after twice as long, up to [`INTERVAL`]: for a moment a record may be
/// locked by somebody who looks at it, or by a child that inherited that.
const LOOKS: u32 = 10;

/// Looks for guests until it is dropped.
pub(super) struct Watch {
    watched: Arc<Watched>,
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Begins to look for new guests as often. Guests that are there are found before it returns.
    ///
    /// # Errors
    /// When this process has no threads left.
    pub(super) fn every(interval: Duration, watched: Arc<Watched>) -> io::Result<Self> {
        let (end, ended) = channel();
        watched.look();
        let own = watched.clone();
        let thread = Builder::new().name("watch".into()).spawn(move || own.watch(interval, &ended))?;
        Ok(Self { watched, end: Some(end), thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.end.take());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that looks for guests panicked");
        }
        for stream in self.watched.guests().values().flatten() {
            // It fails only when the guest has just ended.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// The guests that are watched.
pub(super) struct Watched {
    host: Host,
    events: Events,
    /// The connections to them; none yet to those that are about to be.
    guests: Mutex<BTreeMap<String, Option<UnixStream>>>,
    /// The state of their devices.
    monitor: Arc<Monitor>,
    /// Wakes those who wait for a name.
    left: Condvar,
    /// How often claims of dead guests are still to be looked for.
    looks: AtomicU32,
}

impl Watched {
    /// Those of `host`; `events` tells what happens to them.
    pub(super) fn new(host: Host, events: Events) -> Self {
        // For guests that died while nobody watched.
        let looks = AtomicU32::new(LOOKS);
        let monitor = Arc::new(Monitor::new(host.clone(), events.clone()));
        Self { host, events, guests: Mutex::default(), monitor, left: Condvar::new(), looks }
    }

    /// The state of their devices.
    pub(super) fn monitor(&self) -> &Arc<Monitor> {
        &self.monitor
    }

    fn guests(&self) -> MutexGuard<'_, BTreeMap<String, Option<UnixStream>>> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a guest of this name watched, once an earlier one is not any more; `None` when that takes longer than `deadline`.
    pub(super) fn place(self: &Arc<Self>, name: &str, deadline: Duration) -> Option<Place> {
        let waited =
            self.left.wait_timeout_while(self.guests(), deadline, |guests| guests.contains_key(name));
        let (mut guests, late) = waited.unwrap_or_else(PoisonError::into_inner);
        if late.timed_out() {
            return None;
        }
        guests.insert(name.to_owned(), None);
        Some(Place { watched: self.clone(), name: name.to_owned() })
    }

    fn watch(self: &Arc<Self>, interval: Duration, ended: &Receiver<()>) {
        let (mut pause, mut next) = (interval, Instant::now());
        loop {
            let left = self.looks.load(Ordering::SeqCst);
            if left == LOOKS {
                (pause, next) = (interval, Instant::now());
            }
            if left > 0 && Instant::now() >= next {
                self.looks.fetch_sub(1, Ordering::SeqCst);
                self.recover();
                next = Instant::now() + pause;
                pause = (2 * pause).min(INTERVAL);
            }
            // Nothing is ever sent.
            if ended.recv_timeout(interval) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            self.look();
        }
    }

    /// Looks for guests that are not watched yet.
    fn look(self: &Arc<Self>) {
        let found = names(&self.host).unwrap_or_else(|error| {
            tracing::warn!("the guests can't be listed: {error}");
            Vec::new()
        });
        for name in found {
            let Some(place) = self.place(&name, Duration::ZERO) else { continue };
            match Connection::reach(&self.host, &name) {
                Ok(connection) => place.follow(connection),
                Err(error) => tracing::trace!("{name} is not watched yet: {error}"),
            }
        }
    }

    /// Gives back what guests that died had claimed.
    pub(super) fn recover(&self) {
        if !self.host.state.join("ledger").exists() {
            return;
        }
        let manager = PassthroughManager::with_host(self.host.clone());
        match manager.and_then(|mut manager| manager.recover()) {
            Ok(recovery) => {
                recovery
                    .failed
                    .iter()
                    .for_each(|error| tracing::warn!("a dead guest's claim is not released: {error}"));
                let functions = recovery.recovered.iter().flat_map(|entry| &entry.functions);
                for function in functions {
                    tracing::info!("{} was claimed by a guest that died; it is released", function.address);
                    self.events.metrics.count_recovered();
                }
            }
            Err(error) => tracing::warn!("dead guests' claims can't be looked for: {error}"),
        }
    }
}

/// The place of a guest among those that are watched, until this is dropped.
pub(super) struct Place {
    watched: Arc<Watched>,
    name: String,
}

impl Place {
    /// Hears of the guest until it has ended.
    pub(super) fn follow(self, connection: Connection) {
        let name = self.name.clone();
        let followed = connection.stream().and_then(|stream| {
            self.watched.guests().insert(name.clone(), Some(stream));
            Builder::new().name("guest".into()).spawn(move || self.hear(connection))
        });
        if let Err(error) = followed {
            tracing::warn!(guest = name, "{name} is not watched: {error}");
        }
    }

    fn hear(&self, mut connection: Connection) {
        let (events, name) = (&self.watched.events, &*self.name);
        events.tell(&GuestEvent::new(name, EventKind::Found));
        // A guest that is slow now is subscribed to once it answers.
        let subscribed = connection.subscribe(None);
        let mut ran = subscribed.as_ref().is_ok_and(|status| status.state == GuestState::Running);
        let monitor = &self.watched.monitor;
        let devices = subscribed.iter().flat_map(|status| &status.devices);
        devices
            .filter(|device| device.state == DeviceState::Attached)
            .for_each(|device| monitor.attached(name, &device.address));
        let id = GuestHome::id_of(&self.watched.host, name);
        while let Ok(event) = connection.next_event() {
            ran |= event.event == EventKind::Started;
            match (event.event, &event.address) {
                (EventKind::DeviceAttached, Some(address)) => monitor.attached(name, address),
                (EventKind::DeviceDetached | EventKind::DeviceLost, Some(address)) => {
                    monitor.detached(name, address);
                }
                _ => {}
            }
            events.tell(&event);
        }
        // Its name is free then.
        let has_ended = GuestHome::has_ended(&self.watched.host, name, id, GUEST_KILL);
        if ran && connection.how().is_none() && has_ended {
            let text = Some("its process was killed, or died".to_owned());
            let how = Some(StoppedHow::Killed);
            events.tell(&GuestEvent { text, how, ..GuestEvent::new(name, EventKind::Ended) });
        }
        monitor.ended(name);
        self.watched.looks.store(LOOKS, Ordering::SeqCst);
        events.tell(&GuestEvent::new(name, EventKind::Gone));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.watched.guests().remove(&self.name);
        self.watched.left.notify_all();
    }
}
