//! What happens to guests, for all who listen.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::metrics::Metrics;
use crate::json::GuestEvent;

/// Most events that wait for a listener. One who leaves more is dropped, and may connect again.
const MAX_WAITING: usize = 256;

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
        tracing::info!("{event}");
        self.metrics.count_event(event.event);
        let mut listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.retain(|listener| listener.try_send(event.clone()).is_ok());
    }

    /// What happens from now on.
    pub(super) fn listen(&self) -> Receiver<GuestEvent> {
        let (sender, receiver) = channel(MAX_WAITING);
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner).push(sender);
        receiver
    }
}
