//! What enclosures have to do with guests.

use std::time::Duration;

use hyper::Method;
use serde_json::Value;
use vm_passthrough::egpu::{Guests, Thermometer};
use vm_passthrough::{Host, PciAddress, ledger, pci};

use crate::commands::asking::{Asking, path};
use crate::context::Context;
use crate::control::{DetachHow, DetachOptions};
use crate::daemon::ApiError;
use crate::deadlines::GUEST_DEVICE;
use crate::failure::Failure;
use crate::usage;

/// How long a guest has to let go of its device.
const LET_GO: Duration = Duration::from_secs(30);

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
    pub(super) fn of(context: &Context<'_>) -> Result<Self, Failure> {
        let asking = Asking::of(context, &crate::commands::serve::DaemonArgs { socket: None })?;
        Ok(Self { host: context.host.clone(), asking })
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
                let deadline = LET_GO.saturating_add(GUEST_DEVICE);
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

/// Who tells temperatures: what Linux's drivers of sensors show, and else the GPU's own driver.
#[derive(Debug)]
pub(super) struct Sensors(pub(super) Host);

impl Thermometer for Sensors {
    fn temperature(&self, function: PciAddress) -> Option<i32> {
        let sensors =
            std::fs::read_dir(self.0.pci_device(function).join("hwmon")).into_iter().flatten().flatten();
        let read = |sensor: std::fs::DirEntry| {
            std::fs::read_to_string(sensor.path().join("temp1_input")).ok()?.trim().parse::<i32>().ok()
        };
        sensors.filter_map(read).max().or_else(|| {
            let function = pci::read_function(&self.0, function).ok()?;
            let usage = usage::of(&self.0, &[&function]).pop()??;
            usage.temperature_celsius.and_then(|celsius| i32::try_from(celsius).ok()?.checked_mul(1000))
        })
    }
}
