//! Gives an eGPU that has come to the guest that it is known to be for.

use std::sync::mpsc::{Receiver, TryRecvError, channel};

use vm_passthrough::Host;
use vm_passthrough::egpu::{Change, HostEnclosure, Manager, State};
use vm_passthrough::usb4::UniqueId;

use super::guests::{DaemonGuests, not_given};
use super::warning::{Teller, Warning};
use crate::api::RefusalCode;
use crate::daemon::ApiError;
use crate::devices::known_egpus::EgpuStore;

/// Whether an eGPU is to be given to its guest, and how far that is.
#[derive(Debug, Default)]
pub(super) struct Gift {
    /// It has come, or is well again, and nobody got it since.
    is_due: bool,
    /// A thread that gives it: the guest may take its time, and heartbeats go on.
    giving: Option<Receiver<(String, Result<(), ApiError>)>>,
    /// Why the last try failed.
    refused: Warning,
}

impl Gift {
    /// Notes a step in its life.
    pub(super) fn note(&mut self, change: &Change, teller: &Teller) {
        self.is_due = match (change.from, change.to) {
            (State::Verifying | State::Recovering(_), State::Ready) => true,
            // Somebody has it, or it is not there to be given.
            (_, State::Ready | State::Degraded { in_use: false, .. }) => self.is_due,
            _ => false,
        };
        if !matches!(change.to, State::Ready | State::Degraded { in_use: false, .. }) {
            self.refused.update(None, teller);
        }
    }

    /// Gives it, if that is due; a guest that does not run gets it when it does.
    pub(super) fn give(
        &mut self,
        host: &Host,
        id: UniqueId,
        manager: &mut Manager<HostEnclosure>,
        teller: &Teller,
    ) {
        match self.giving.as_ref().map(Receiver::try_recv) {
            Some(Err(TryRecvError::Empty)) => return,
            Some(Ok((guest, Ok(())))) => {
                tracing::info!(enclosure = %id, "given to {guest}");
                self.is_due = false;
                self.refused.update(None, teller);
            }
            Some(Ok((guest, Err(error)))) => {
                self.is_due &= may_pass(&error);
                // Another guest may have taken it meanwhile.
                let is_free = manager.state() == State::Ready;
                self.refused.update(is_free.then(|| not_given(&guest, error).message), teller);
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
            Err(error) => {
                self.refused.update(Some(format!("it is not given to its guest: {error}")), teller);
            }
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
