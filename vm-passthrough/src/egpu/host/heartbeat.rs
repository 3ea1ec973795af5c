//! Reads the identity of functions, without waiting for one that never answers.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

use super::super::EgpuError;
use crate::pci::config::ConfigState;
use crate::pci::{PciIds, regs};
use crate::telemetry::xids;
use crate::{Host, PciAddress, deadlines, files, pci};

/// The reads that are under way: one for each function at most, as one that is stuck in the Linux kernel can't be ended.
#[derive(Debug, Default)]
pub(super) struct Heartbeat {
    asked: BTreeMap<PciAddress, Receiver<Result<Vec<u8>, String>>>,
    /// How many errors the Linux kernel's log had of each function when it came.
    errors: BTreeMap<PciAddress, usize>,
}

impl Heartbeat {
    /// Notes what the Linux kernel's log has of functions that have just come: that is no reason for what happens later.
    pub(super) fn begin(&mut self, host: &Host, functions: &[(PciAddress, PciIds)]) {
        let count = |(address, _): &(PciAddress, PciIds)| (*address, xids(host, *address).len());
        self.errors = functions.iter().map(count).collect();
    }

    /// Reads each function, unless it sleeps: that would wake it, and keep its tunnel up.
    ///
    /// # Errors
    /// When one does not answer in time, or is another; with what NVIDIA's driver has reported of it since it came.
    pub(super) fn beat(&mut self, host: &Host, functions: &[(PciAddress, PciIds)]) -> Result<(), EgpuError> {
        self.asked.retain(|address, _| functions.iter().any(|(function, _)| function == address));
        for (address, ids) in functions {
            let before = self.errors.get(address).copied().unwrap_or(0);
            let unsound = |what: String| {
                let reported = xids(host, *address).into_iter().skip(before).last();
                let reported =
                    reported.map(|xid| format!("; its driver reported Xid {}: {}", xid.number, xid.text));
                EgpuError::Unsound { address: *address, what: what + &reported.unwrap_or_default() }
            };
            let sleeps = files::read_trimmed(&host.pci_device(*address).join("power/runtime_status"));
            if sleeps.as_deref() == Some("suspended") && !self.asked.contains_key(address) {
                continue;
            }
            let config = self.config(host, *address).map_err(unsound)?;
            check_ids(&config, ids).map_err(unsound)?;
        }
        Ok(())
    }

    fn config(&mut self, host: &Host, address: PciAddress) -> Result<Vec<u8>, String> {
        let asked = match self.asked.remove(&address) {
            Some(asked) => asked,
            None => {
                let (send, receive) = channel();
                let host = host.clone();
                let read = move || {
                    let config = pci::read_config(&host, address).map_err(|error| error.to_string());
                    // Nobody may want to know any more.
                    let _ = send.send(config);
                };
                let thread = std::thread::Builder::new().name("heartbeat".into()).spawn(read);
                thread.map_err(|error| format!("it can't be asked: {error}"))?;
                receive
            }
        };
        match asked.recv_timeout(deadlines::HEARTBEAT) {
            Ok(config) => config,
            Err(RecvTimeoutError::Timeout) => {
                self.asked.insert(address, asked);
                Err(silent())
            }
            Err(RecvTimeoutError::Disconnected) => {
                Err("it can't be asked: the thread that asks has ended".into())
            }
        }
    }
}

/// The reason of one that stalls.
pub(super) fn silent() -> String {
    format!("it did not answer within {} s", deadlines::HEARTBEAT.as_secs())
}

/// Whether config space is that of an endpoint with this identity.
pub(super) fn check_ids(config: &[u8], ids: &PciIds) -> Result<(), String> {
    let word = |at: u16| {
        let at = usize::from(at);
        config.get(at..at + 2).and_then(|bytes| bytes.try_into().ok()).map(u16::from_le_bytes)
    };
    let found = || {
        Some(PciIds {
            vendor: word(regs::VENDOR_ID)?,
            device: word(regs::VENDOR_ID + 2)?,
            subsystem_vendor: word(regs::SUBSYSTEM_VENDOR_ID)?,
            subsystem_device: word(regs::SUBSYSTEM_VENDOR_ID + 2)?,
            revision: word(regs::CLASS_REVISION)? as u8,
        })
    };
    // A virtual function has no place in an enclosure.
    if let Some(state) = ConfigState::of(config, false).filter(|&state| state != ConfigState::Alive) {
        return Err(match state {
            ConfigState::Retry => format!("its config space {state}"),
            _ => format!("its config space {state}: it is off the bus"),
        });
    }
    match found() {
        Some(found) if found == *ids => Ok(()),
        Some(found) => Err(format!("it is {found} now, and was {ids}")),
        None => Err("its config space ends before its IDs".into()),
    }
}
