//! Asks functions who they are, without waiting for one that never answers.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

use super::super::EgpuError;
use crate::pci::PciIds;
use crate::{Host, PciAddress, deadlines, files, pci};

/// The reads that are under way: one for each function at most, as one that is stuck in the Linux kernel can't be ended.
#[derive(Debug, Default)]
pub(super) struct Heartbeat {
    asked: BTreeMap<PciAddress, Receiver<Result<Vec<u8>, String>>>,
}

impl Heartbeat {
    /// Asks each function, unless it sleeps: asking would wake it, and keep its tunnel up.
    ///
    /// # Errors
    /// When one does not answer in time, or is another.
    pub(super) fn beat(&mut self, host: &Host, functions: &[(PciAddress, PciIds)]) -> Result<(), EgpuError> {
        self.asked.retain(|address, _| functions.iter().any(|(function, _)| function == address));
        for (address, ids) in functions {
            let unsound = |what: String| EgpuError::Unsound { address: *address, what };
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
                Err(format!("it did not answer within {} s", deadlines::HEARTBEAT.as_secs()))
            }
            Err(RecvTimeoutError::Disconnected) => {
                Err("it can't be asked: the thread that asks has ended".into())
            }
        }
    }
}

/// Whether config space is that of a function with these IDs.
pub(super) fn check_ids(config: &[u8], ids: &PciIds) -> Result<(), String> {
    let word =
        |at: usize| config.get(at..at + 2).and_then(|bytes| bytes.try_into().ok()).map(u16::from_le_bytes);
    match (word(0), word(2)) {
        (Some(vendor), Some(device)) if (vendor, device) == (ids.vendor, ids.device) => Ok(()),
        (Some(0xffff), _) => Err("its config space reads all ones: it is off the bus".into()),
        (Some(vendor), Some(device)) => Err(format!(
            "it says that it is {vendor:04x}:{device:04x}, and was {:04x}:{:04x}",
            ids.vendor, ids.device
        )),
        _ => Err("its config space ends before its IDs".into()),
    }
}
