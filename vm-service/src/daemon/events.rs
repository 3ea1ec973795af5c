//! What happens to guests, for all who listen.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::metrics::Metrics;
use crate::api::{EventKind, GuestEvent, Refusal, RefusalCode};

/// Most events that wait for a listener. One who leaves more is dropped, and may connect again.
const MAX_WAITING: usize = 256;

/// Most listeners, which hold a connection each: others are to be had beside them.
const MAX_LISTENERS: usize = 64;

/// Takes events from any thread, and hands them to all who listen.
#[derive(Clone, Debug, Default)]
pub(super) struct Events {
    listeners: Arc<Mutex<Vec<Sender<GuestEvent>>>>,
    /// What is counted.
    pub(super) metrics: Arc<Metrics>,
}

impl Events {
    /// Tells all who listen.
    pub(super) fn tell(&self, event: &GuestEvent) {
        // Messages from one place in the program are limited: a guest that restarts again and again must not hide how it ends.
        match event.event {
            EventKind::Ended | EventKind::Gone => tracing::info!(guest = event.guest, "{event}"),
            EventKind::Failed | EventKind::DeviceLost => tracing::info!(guest = event.guest, "{event}"),
            _ => tracing::info!(guest = event.guest, "{event}"),
        }
        self.metrics.count_event(event.event);
        let mut listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.retain(|listener| listener.try_send(event.clone()).is_ok());
    }

    /// What happens from now on.
    ///
    /// # Errors
    /// When there are as many listeners as there may be.
    pub(super) fn listen(&self) -> Result<Receiver<GuestEvent>, Refusal> {
        let (sender, receiver) = channel(MAX_WAITING);
        let mut listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.retain(|listener| !listener.is_closed());
        if listeners.len() >= MAX_LISTENERS {
            let busy =
                format!("{MAX_LISTENERS} clients listen to events already; end one, or try again later");
            return Err(Refusal::new(RefusalCode::Busy, busy));
        }
        listeners.push(sender);
        Ok(receiver)
    }
}
