//! Gives an eGPU that has come to the guest that it is known to be for.

use std::sync::mpsc::{Receiver, TryRecvError, channel};

use vm_passthrough::Host;
use vm_passthrough::egpu::{Change, HostEnclosure, Manager, State};
use vm_passthrough::usb4::UniqueId;

use super::guests::{DaemonGuests, not_given};
use crate::daemon::ApiError;
use crate::json::RefusalCode;
use crate::known_egpus::EgpuStore;

/// Whether an eGPU is to be given to its guest, and how far that is.
#[derive(Debug, Default)]
pub(super) struct Gift {
    /// It has come, or is well again, and nobody got it since.
    is_due: bool,
    /// A thread that gives it: the guest may take its time, and heartbeats go on.
    giving: Option<Receiver<(String, Result<(), ApiError>)>>,
    /// What was said of the last try that can be made again.
    said: Option<String>,
}

impl Gift {
    /// Notes a step in its life.
    pub(super) fn note(&mut self, change: &Change) {
        self.is_due = match (change.from, change.to) {
            (State::Verifying | State::Recovering(_), State::Ready) => true,
            // Somebody has it, or it is not there to be given.
            (_, State::Ready | State::Degraded { in_use: false, .. }) => self.is_due,
            _ => false,
        };
    }

    /// Gives it, if that is due; a guest that does not run gets it when it does.
    pub(super) fn give(&mut self, host: &Host, id: UniqueId, manager: &mut Manager<HostEnclosure>) {
        match self.giving.as_ref().map(Receiver::try_recv) {
            Some(Err(TryRecvError::Empty)) => return,
            Some(Ok((guest, Ok(())))) => {
                tracing::info!(enclosure = %id, "given to {guest}");
                (self.is_due, self.said) = (false, None);
            }
            Some(Ok((guest, Err(error)))) => {
                self.is_due &= may_pass(&error);
                let said = Some(not_given(&guest, error).message);
                if self.said != said {
                    tracing::warn!(enclosure = %id, "{}", said.as_deref().unwrap_or_default());
                    self.said = said;
                }
            }
            Some(Err(TryRecvError::Disconnected)) | None => {}
        }
        self.giving = None;
        if !self.is_due || manager.state() != State::Ready {
            return;
        }
        let guest = EgpuStore::read(host).map(|mut store| store.known.remove(&id)?.guest);
        let guests = DaemonGuests::of(host);
        let (Ok(Some(guest)), Ok(guests)) = (guest, guests) else { return };
        let functions = manager.enclosure().functions();
        let (send, receive) = channel();
        let give = move || {
            let given = guests.attach(&functions, &guest);
            // Who watched over it may have ended.
            let _ = send.send((guest, given));
        };
        match std::thread::Builder::new().name("egpu to guest".into()).spawn(give) {
            Ok(_) => self.giving = Some(receive),
            Err(error) => tracing::warn!(enclosure = %id, "it is not given to its guest: {error}"),
        }
    }
}

/// Whether another try may succeed though nobody does anything about it: the guest or the daemon may not run yet.
fn may_pass(error: &ApiError) -> bool {
    match error {
        ApiError::Failed(_) => true,
        ApiError::Refused(refusal) => matches!(refusal.code, RefusalCode::NotFound | RefusalCode::Busy),
    }
}
