//! Takes what has an enclosure away from it, in the order of a drain.

use super::super::EgpuError;
use super::{HostEnclosure, Result, built, step, wait};
use crate::claim::{self, ClaimError, FunctionLocks};
use crate::pci::PciIds;
use crate::usb4::Route;
use crate::{Host, PciAddress, deadlines, files};

impl HostEnclosure {
    pub(super) fn detach(&self, force: bool) -> Result<()> {
        let functions = self.functions();
        if functions.is_empty() {
            return Ok(());
        }
        let detached = self.guests.detach(&functions, force);
        detached.map_err(|reason| step("take it from its guest", reason))
    }

    /// Ends claims that no process holds, and leaves their functions without a driver.
    pub(super) fn release(&self) -> Result<()> {
        let mut failed = Vec::new();
        for (address, _) in &self.functions {
            match claim::release_unbound(&self.host, *address, self.deadlines.unbinding) {
                // One that is held is a use, which the next step sees.
                Ok(()) | Err(ClaimError::NotClaimed(_) | ClaimError::Taken { .. }) => {}
                Err(error) => failed.push(error.to_string()),
            }
        }
        if failed.is_empty() { Ok(()) } else { Err(step("release its claims", failed.join("; "))) }
    }

    /// Takes its functions from their drivers.
    pub(super) fn unbind(&mut self, force: bool) -> Result<()> {
        match FunctionLocks::take_all(&self.host, &self.functions(), self.deadlines.unbinding, force) {
            Ok(locks) => self.locks = Some(locks),
            Err(error) => return Err(step("keep others from it", error)),
        }
        // Whoever has begun to use it since it was free keeps it.
        let users = if force { Vec::new() } else { self.users()? };
        if !users.is_empty() {
            return Err(EgpuError::Used { what: "it".into(), users });
        }
        let mut failed = Vec::new();
        for (address, _) in &self.functions {
            match claim::unbind(&self.host, *address, self.locks.as_ref(), self.deadlines.unbinding) {
                Ok(()) | Err(claim::BindError::Vanished(_)) => {}
                Err(error) => failed.push(error.to_string()),
            }
        }
        if failed.is_empty() { Ok(()) } else { Err(step("take it from its driver", failed.join("; "))) }
    }

    pub(super) fn deauthorise(&mut self) -> Result<()> {
        let router = self.router()?;
        if let Some((domain, router)) = router.as_ref().filter(|(_, router)| router.is_authorised()) {
            if !domain.deauthorization {
                return Err(step(
                    "take its tunnel down",
                    format!(
                        "domain{} can't (its `deauthorization` is 0); no driver of the host has it any more, so pull its cable",
                        domain.number
                    ),
                ));
            }
            self.set_authorized(router, "0")?;
        }
        // From here on nobody builds it again unasked.
        built::forget(&self.host, self.id);
        // Also where somebody else took it down, or has pulled it. What undoes is not given up.
        let there = |(address, ids): &&(PciAddress, PciIds)| is_there(&self.host, *address, ids);
        let mut are_gone = || Ok((!self.functions.iter().any(|function| there(&function))).then_some(()));
        if router.is_some() && wait(deadlines::ENUMERATION, &mut are_gone)?.is_none() {
            // Linux may not have noticed that the port lost its link.
            for (address, _) in self.functions.iter().filter(there) {
                let path = self.host.pci_device(*address).join("remove");
                tracing::warn!("{address} is there without its tunnel: write 1 to {}", path.display());
                if let Err(error) = self.host.writer().write(&path, "1", deadlines::TUNNEL) {
                    tracing::warn!("{}: {error}", path.display());
                }
            }
        }
        wait(deadlines::ENUMERATION, are_gone)?.ok_or_else(|| {
            step("take its tunnel down", "its functions are there still; see dmesg for what holds them")
        })?;
        if self.router()?.is_some_and(|(_, router)| router.is_authorised()) {
            return Err(step(
                "take its tunnel down",
                "its `authorized` does not read 0 afterwards; see dmesg, or pull its cable",
            ));
        }
        self.locks = None;
        self.settle()
    }

    /// Takes a tunnel down that was just built, unless somebody uses what came through it.
    pub(super) fn give_up_tunnel(&mut self, route: Route) {
        let functions = self.endpoints(route).unwrap_or_default();
        self.functions = functions.iter().map(|function| (function.address, function.ids)).collect();
        let taken_down = self.unbind(false).and_then(|()| self.deauthorise());
        self.locks = None;
        if let Err(error) = taken_down {
            tracing::warn!(enclosure = %self.id, "its new tunnel stays: {error}");
        }
    }

    /// Ends what the ledger notes of functions that are gone. Those of which that fails, or that are not gone yet, are kept for
    /// the next try.
    pub(super) fn settle(&mut self) -> Result<()> {
        let mut failed = Vec::new();
        self.functions.retain(|(address, ids)| {
            if is_there(&self.host, *address, ids) {
                failed.push(format!("{address} is there still; see dmesg for what holds it"));
                return true;
            }
            match claim::release_persistent(&self.host, *address, claim::DEADLINE) {
                // Whoever has it hears of it, and releases it.
                Ok(()) | Err(ClaimError::NotClaimed(_) | ClaimError::Taken { .. }) => false,
                Err(error) => {
                    failed.push(error.to_string());
                    true
                }
            }
        });
        if failed.is_empty() { Ok(()) } else { Err(step("settle the ledger", failed.join("; "))) }
    }
}

/// Whether the host has a function still. Another may have come to its address since.
fn is_there(host: &Host, address: PciAddress, ids: &PciIds) -> bool {
    let dir = host.pci_device(address);
    let says = |file: &str, id: u16| {
        files::read_trimmed(&dir.join(file)).is_none_or(|text| text == format!("{id:#06x}"))
    };
    dir.exists() && says("vendor", ids.vendor) && says("device", ids.device)
}
