//! The users of an enclosure's functions: claims, and processes of the host.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::super::EgpuError;
use super::{HostEnclosure, Result, step, wait};
use crate::host::Ending;
use crate::readiness::Holder;
use crate::{Host, PciAddress, deadlines, files, ledger, readiness};

/// How long processes are remembered while the functions stay as they are: finding them takes a look at every process of the host.
const REMEMBERED: Duration = Duration::from_secs(10);

/// What changes with the use of a function: its driver, and whether it sleeps.
type Signs = Vec<(PciAddress, Option<String>, Option<String>)>;

/// The processes that used functions when they were last looked for.
#[derive(Debug, Default)]
pub(super) struct Processes {
    seen: Option<(Instant, Signs)>,
    holders: Vec<Holder>,
}

impl Processes {
    /// Those of now, or of some seconds ago if nothing has changed since.
    fn of(&mut self, host: &Host, functions: &[PciAddress]) -> &[Holder] {
        let signs = |&function: &PciAddress| {
            let dir = host.pci_device(function);
            let status = files::read_trimmed(&dir.join("power/runtime_status"));
            (function, files::link_name(&dir.join("driver")), status)
        };
        let signs: Signs = functions.iter().map(signs).collect();
        let is_fresh = |(at, before): &(Instant, Signs)| at.elapsed() < REMEMBERED && *before == signs;
        if !self.seen.as_ref().is_some_and(is_fresh) {
            self.holders = processes(host, functions);
            self.seen = Some((Instant::now(), signs));
        }
        &self.holders
    }

    /// Has them looked for the next time.
    pub(super) fn forget(&mut self) {
        self.seen = None;
    }
}

fn processes(host: &Host, functions: &[PciAddress]) -> Vec<Holder> {
    functions.iter().flat_map(|function| readiness::users(host, *function)).collect()
}

/// Texts of holders.
fn texts(holders: &[Holder]) -> Vec<String> {
    let mut texts: Vec<String> = holders.iter().map(ToString::to_string).collect();
    texts.dedup();
    texts
}

impl HostEnclosure {
    /// The owners of live claims of its functions, and the functions that none has.
    fn claims(&self) -> Result<(Vec<String>, Vec<PciAddress>)> {
        let claims = ledger::claims(&self.host, deadlines::LEDGER_READ)
            .map_err(|error| step("read its claims", error))?;
        let (mut owners, mut free) = (Vec::new(), Vec::new());
        for address in self.functions() {
            let is_live = |claim: &&ledger::LedgerEntry| {
                claim.alive && !claim.void && claim.entry.function(address).is_some()
            };
            match claims.iter().flatten().find(is_live) {
                Some(claim) => {
                    owners.push(claim.entry.user.as_ref().unwrap_or(&claim.entry.owner).to_string());
                }
                None => free.push(address),
            }
        }
        owners.dedup();
        Ok((owners, free))
    }

    /// Its users now: guests, and processes of the host.
    pub(super) fn users(&self) -> Result<Vec<String>> {
        let (mut users, free) = self.claims()?;
        users.extend(texts(&processes(&self.host, &free)));
        Ok(users)
    }

    /// As [`users`](Self::users), but processes that began to use it, or ended, may be seen some seconds later.
    pub(super) fn remembered_users(&mut self) -> Result<Vec<String>> {
        let (mut users, free) = self.claims()?;
        users.extend(texts(self.processes.of(&self.host, &free)));
        Ok(users)
    }

    /// Waits for the processes of the host that use it, or ends them.
    pub(super) fn stop_work(&mut self, force: bool) -> Result<()> {
        self.processes.forget();
        if force {
            return self.end_work();
        }
        let mut users = Vec::new();
        let idle = self.wait(deadlines::WORK, || {
            users = texts(&processes(&self.host, &self.claims()?.1));
            Ok(users.is_empty().then_some(()))
        })?;
        idle.ok_or(EgpuError::Used { what: "it".into(), users })
    }

    /// Ends the processes of the host that use it: SIGTERM, then SIGKILL. The first process and this one are left alone.
    fn end_work(&mut self) -> Result<()> {
        let (_, free) = self.claims()?;
        let mut ended = BTreeMap::new();
        for ending in [Ending::Asked, Ending::Killed] {
            for holder in processes(&self.host, &free) {
                let Holder::Process { pid, .. } = holder else { continue };
                let is_it = || processes(&self.host, &free).contains(&holder);
                match self.host.processes() {
                    Some(processes) if pid > 1 => match processes.end(pid, ending, &is_it) {
                        Ok(()) => _ = ended.insert(pid, format!("{holder}: {ending}")),
                        Err(error) => tracing::warn!("{holder}: {ending} is refused: {error}"),
                    },
                    _ => tracing::warn!("{holder}, and is not ended"),
                }
            }
            let is_idle = || Ok(processes(&self.host, &free).is_empty().then_some(()));
            if wait(deadlines::SIGNAL, is_idle)?.is_some() {
                break;
            }
        }
        let ended: Vec<String> = ended.into_values().collect();
        self.ended = (!ended.is_empty()).then(|| ended.join("; "));
        let users = texts(&processes(&self.host, &free));
        if users.is_empty() { Ok(()) } else { Err(EgpuError::Used { what: "it".into(), users }) }
    }
}
