//! Watches the guests: which there are, what happens to them, and what those that died have left.
//!
//! A thread looks for new guests, and each guest has a thread that hears of it until its control socket closes. Its process has
//! ended then, or ends: the claims that it leaves are given back as soon as the Linux kernel has let go of their records.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use vm_passthrough::PassthroughManager;

use super::guests::Guests;
use crate::control::{Connection, names};
use crate::json::{EventKind, GuestEvent};

/// How often new guests are looked for.
pub(super) const INTERVAL: Duration = Duration::from_millis(500);
/// How often a dead guest's claims are looked for, an interval each.
const LOOKS: u32 = 10;

/// Watches until it is dropped.
pub(super) struct Watch {
    shared: Arc<Shared>,
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    guests: Arc<Guests>,
    /// The connections to the guests that are watched.
    watched: Mutex<BTreeMap<String, UnixStream>>,
    /// How often claims of dead guests are still to be looked for.
    looks: AtomicU32,
}

impl Watch {
    /// Begins to watch, with a look for new guests as often. Guests that are there are found before it returns.
    ///
    /// # Errors
    /// When this process has no threads left.
    pub(super) fn every(interval: Duration, guests: Arc<Guests>) -> io::Result<Self> {
        let (end, ended) = channel();
        // The first look is for guests that died while nobody watched.
        let shared = Arc::new(Shared { guests, watched: Mutex::default(), looks: AtomicU32::new(1) });
        shared.look();
        let own = shared.clone();
        let thread = Builder::new().name("watch".into()).spawn(move || own.watch(interval, &ended))?;
        Ok(Self { shared, end: Some(end), thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.end.take());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that looks for guests panicked");
        }
        for stream in self.shared.watched().values() {
            // It fails only when the guest has just ended.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

impl Shared {
    fn watched(&self) -> MutexGuard<'_, BTreeMap<String, UnixStream>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(self: &Arc<Self>, interval: Duration, ended: &Receiver<()>) {
        loop {
            if self.looks.load(Ordering::SeqCst) > 0 {
                self.looks.fetch_sub(1, Ordering::SeqCst);
                self.recover();
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
        let found = names(self.guests.host()).unwrap_or_else(|error| {
            tracing::warn!("the guests can't be listed: {error}");
            Vec::new()
        });
        for name in found {
            if !self.watched().contains_key(&name)
                && let Err(error) = self.begin(&name)
            {
                tracing::debug!("{error}");
            }
        }
    }

    fn begin(self: &Arc<Self>, name: &str) -> Result<(), String> {
        let text = |error: &dyn std::error::Error| format!("{name} is not watched yet: {error}");
        let mut connection = Connection::open(self.guests.host(), name).map_err(|error| text(&error))?;
        connection.subscribe().map_err(|error| text(&error))?;
        let stream = connection.stream().map_err(|error| text(&error))?;
        self.watched().insert(name.to_owned(), stream);
        let (own, name) = (self.clone(), name.to_owned());
        let spawned = Builder::new().name("guest".into()).spawn(move || own.follow(&name, connection));
        spawned.map(drop).map_err(|error| error.to_string())
    }

    /// Hears of a guest until it has ended.
    fn follow(&self, name: &str, mut connection: Connection) {
        let tell = |event| {
            self.guests.events().tell(&GuestEvent {
                guest: name.to_owned(),
                event,
                address: None,
                text: None,
            });
        };
        tell(EventKind::Found);
        while let Ok(event) = connection.next_event() {
            self.guests.events().tell(&event);
        }
        self.watched().remove(name);
        self.looks.store(LOOKS, Ordering::SeqCst);
        tell(EventKind::Gone);
    }

    /// Gives back what guests that died had claimed.
    fn recover(&self) {
        let host = self.guests.host();
        if !host.state.join("ledger").exists() {
            return;
        }
        let recovered = PassthroughManager::with_host(host.clone()).and_then(|mut manager| manager.recover());
        match recovered {
            Ok(recovery) => {
                recovery
                    .failed
                    .iter()
                    .for_each(|error| tracing::warn!("a dead guest's claim is not given back: {error}"));
                let functions = recovery.recovered.iter().flat_map(|entry| &entry.functions);
                for function in functions {
                    tracing::info!("{} was claimed by a guest that died; it is given back", function.address);
                    self.guests.events().metrics.count_recovered();
                }
            }
            Err(error) => tracing::warn!("dead guests' claims can't be looked for: {error}"),
        }
    }
}
