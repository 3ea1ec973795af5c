//! Tells how a guest's instance goes, and times it.

use std::time::{Duration, Instant};

use vm_passthrough::PciAddress;
use vm_passthrough::vfio::Backend;

use super::console::ConsoleService;
use crate::api::{self, RunDevice};
use crate::guest::Progress;
use crate::guest::state::Event;

/// How far a guest has come, and when.
#[derive(Debug)]
pub(super) struct Timeline<'a> {
    /// The guest's name.
    pub(super) guest: &'a str,
    /// When the command was started.
    pub(super) started: Instant,
    /// Until the guest started, if it did.
    pub(super) startup: Option<Duration>,
    /// What serves its console, until it ends.
    pub(super) console: Option<ConsoleService>,
    /// How the devices are opened, once one is.
    pub(super) backend: Option<Backend>,
    /// The devices that it got, with the time of each step.
    pub(super) devices: Vec<RunDevice>,
}

impl Timeline<'_> {
    /// Takes note of what happened to an instance.
    pub(super) fn note(&mut self, progress: Progress<'_>) {
        let Progress { event, took, is_retried, .. } = progress;
        let ms = api::milliseconds(took);
        if let Some(loss) = event.loss() {
            tracing::warn!("{loss}");
        }
        match event {
            Event::Started(at) => {
                let startup = *self.startup.insert(at.duration_since(self.started));
                tracing::info!("the guest {} starts after {:.1} ms", self.guest, api::milliseconds(startup));
            }
            Event::Claimed(address, Ok(_)) => {
                tracing::info!("{address} claimed in {ms:.1} ms");
                // One that has come before is reported as it came last.
                self.devices.retain(|device| device.address != address.to_string());
                self.devices.push(RunDevice::new(*address, took));
            }
            Event::Opened(address, Ok(backend)) => {
                self.backend = Some(*backend);
                self.time(*address, |device| device.open_ms = ms);
            }
            Event::Attached(address, Ok(())) => {
                let opened =
                    self.time(*address, |device| device.attach_ms = ms).map_or(0.0, |device| device.open_ms);
                let backend = self.backend.map_or_else(String::new, |backend| backend.to_string());
                tracing::info!("{address} opened through {backend} and attached in {:.1} ms", opened + ms);
            }
            Event::Plugged(slot, Ok(attached)) => {
                let place = attached.guest.map_or_else(String::new, |guest| format!(", where it is {guest}"));
                tracing::info!("{slot} came to the guest{place}");
            }
            Event::Unresponsive => {
                tracing::warn!(
                    "the guest's VMM does not answer; it is killed if it does not carry out its next order"
                );
            }
            Event::Responsive => tracing::info!("the guest's VMM answers again"),
            Event::LetGo(slot) => tracing::info!("the guest let go of {slot}"),
            Event::Kept(_, why) => tracing::warn!("{why}"),
            Event::Ended(_) | Event::MachineDropped => self.console = None,
            Event::Detached(address, detached) => {
                self.time(*address, |device| device.detach_ms = ms);
                match detached {
                    Ok(_) => {}
                    Err(error) if is_retried => {
                        tracing::warn!("{error}; it is tried again when {address} is released");
                    }
                    Err(error) => tracing::error!("{error}"),
                }
            }
            Event::Released(address, released) => {
                self.time(*address, |device| device.release_ms = ms);
                match released {
                    Ok(()) => tracing::info!("{address} released in {ms:.1} ms"),
                    Err(error) if is_retried => tracing::warn!("{error}; it is tried once more"),
                    Err(error) => tracing::error!("{error}"),
                }
            }
            _ => {}
        }
    }

    /// Notes a time of a device.
    fn time(&mut self, address: PciAddress, note: impl FnOnce(&mut RunDevice)) -> Option<&RunDevice> {
        let address = address.to_string();
        let device = self.devices.iter_mut().find(|device| device.address == address)?;
        note(device);
        Some(device)
    }
}
