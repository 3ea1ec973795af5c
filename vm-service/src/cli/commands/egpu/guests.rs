//! What enclosures have to do with guests.

use std::time::Duration;

use hyper::Method;
use serde_json::Value;
use vm_passthrough::egpu::{Guests, is_accelerator};
use vm_passthrough::{Host, PciAddress, ledger, pci};

use crate::api::AttachedDevice;
use crate::api::{Address, AttachOptions, DetachHow, DetachOptions};
use crate::cli::commands::asking::{Asking, NOTHING, path};
use crate::daemon::{Api, ApiError};
use crate::deadlines::{GUEST_ATTACH, GUEST_DETACH};
use crate::failure::Failure;

/// How long a guest has to let go of its device.
const LET_GO: Duration = Duration::from_secs(30);

/// That a guest did not get an eGPU.
pub(super) fn not_given(guest: &str, error: ApiError) -> Failure {
    let failure = Failure::from(error);
    Failure { message: format!("it was not given to {guest}: {}", failure.message), ..failure }
}

/// The guests of the daemon.
pub(super) struct DaemonGuests {
    host: Host,
    asking: Asking,
}

impl std::fmt::Debug for DaemonGuests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DaemonGuests").finish_non_exhaustive()
    }
}

impl DaemonGuests {
    pub(super) fn of(host: &Host) -> Result<Self, Failure> {
        Ok(Self { host: host.clone(), asking: Asking(Api::new(host, None)?) })
    }

    /// Gives a guest the accelerators among these functions, with what shares their slots.
    ///
    /// # Errors
    /// When no such guest runs, or it can't have one; it keeps the others.
    pub(super) fn attach(&self, functions: &[PciAddress], guest: &str) -> Result<(), ApiError> {
        let accelerators = functions.iter().filter(|&&function| {
            pci::read_function(&self.host, function).is_ok_and(|function| is_accelerator(&function))
        });
        let mut slots: Vec<Vec<PciAddress>> = Vec::new();
        for accelerator in accelerators {
            if slots.iter().flatten().any(|other| other == accelerator) {
                continue;
            }
            let others = functions.iter().filter(|other| *other != accelerator);
            let others = others.filter(|other| other.same_slot(*accelerator));
            slots.push(std::iter::once(accelerator).chain(others).copied().collect());
        }
        for slot in slots {
            let Some((address, others)) = slot.split_first() else { continue };
            let options = AttachOptions {
                others: others.iter().copied().map(Address).collect(),
                ..AttachOptions::default()
            };
            let path = path(guest, &format!("/devices/{address}")).map_err(ApiError::Failed)?;
            let _: Vec<AttachedDevice> =
                self.asking.call(Method::PUT, &path, &NOTHING, Some(&options), GUEST_ATTACH)?;
        }
        Ok(())
    }

    /// Who has these functions, as the ledger says it.
    fn holders(&self, functions: &[PciAddress]) -> Result<Vec<String>, String> {
        let claims = ledger::claims(&self.host, vm_passthrough::deadlines::LEDGER_READ)
            .map_err(|error| error.to_string())?;
        let of = |claim: &ledger::LedgerEntry| {
            functions.iter().any(|&function| claim.entry.function(function).is_some())
        };
        let held = claims.iter().flatten().filter(|claim| claim.alive && !claim.void && of(claim));
        Ok(held.map(|claim| claim.entry.user.as_ref().unwrap_or(&claim.entry.owner).to_string()).collect())
    }
}

impl Guests for DaemonGuests {
    fn detach(&self, functions: &[PciAddress], force: bool) -> Result<(), String> {
        // Without one that is held no daemon is needed.
        if self.holders(functions)?.is_empty() {
            return Ok(());
        }
        let how = if force { DetachHow::Surprise } else { DetachHow::Orderly };
        let query = DetachOptions { how, deadline_ms: LET_GO.as_millis() as u64 };
        let said = |error: ApiError| Failure::from(error).message;
        for guest in self.asking.guests().map_err(said)? {
            for device in &guest.devices {
                let is_its = |function: &PciAddress| device.address == function.to_string();
                // What shares its slot went with the first.
                let is_held = || self.holders(functions).is_ok_and(|holders| !holders.is_empty());
                if !functions.iter().any(is_its) || !is_held() {
                    continue;
                }
                tracing::info!("take {} from {}", device.address, guest.name);
                let path = path(&guest.name, &format!("/devices/{}", device.address))
                    .map_err(|failure| failure.message)?;
                let deadline = LET_GO.saturating_add(GUEST_DETACH);
                self.asking
                    .call::<Value>(Method::DELETE, &path, &query, None::<&Value>, deadline)
                    .map_err(said)?;
            }
        }
        match &*self.holders(functions)? {
            [] => Ok(()),
            left => Err(format!("{} has it still; end that", left.join(", "))),
        }
    }
}
