//! How the guest is, for those who look and ask through its control socket.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use vm_passthrough::PciAddress;

use crate::api::{
    self, AttachedDevice, Confinement, DetachRequest, DetachedDevice, DeviceState, EventKind, GuestDevice,
    GuestEvent, GuestState, GuestStatus, LeftFunction, PeerToPeer, Readiness, Refusal, RefusalCode,
    StoppedHow,
};
use crate::config::GuestConfig;
use crate::guest::control::{Answer, Controlled, Outbox};
use crate::guest::handle::{AttachRequest, DetachHow, DetachedHow, Refused};
use crate::guest::state::{Event, Phase};
use crate::guest::{Handle, Progress};
use crate::vmm::{End, PowerButton};

/// A guest that lives.
pub(super) struct Live {
    handle: Handle,
    button: PowerButton,
    now: Mutex<Now>,
}

struct Now {
    status: GuestStatus,
    /// Whether its VMM does not answer.
    hangs: bool,
    /// Where those hear of it who have subscribed.
    outbox: Option<Outbox>,
}

impl Live {
    /// The guest, before it starts. `console` is its pseudo-terminal.
    pub(super) fn new(
        config: &GuestConfig,
        console: Option<String>,
        handle: Handle,
        button: PowerButton,
    ) -> Arc<Self> {
        let since =
            SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let status = GuestStatus {
            name: config.name.clone(),
            pid: std::process::id(),
            state: GuestState::Starting,
            since,
            vcpus: config.vcpus,
            memory: config.memory,
            devices: Vec::new(),
            dma_bytes: None,
            peer_to_peer: (!config.peer_to_peer).then(PeerToPeer::off),
            console,
            how: None,
            confinement: None,
        };
        Arc::new(Self { handle, button, now: Mutex::new(Now { status, hangs: false, outbox: None }) })
    }

    /// Its machine is made, in a process that is confined so far.
    pub(super) fn made(&self, confinement: Confinement) {
        self.now().status.confinement = Some(confinement);
    }

    /// Its machine can't be made.
    pub(super) fn failed(&self, why: &impl fmt::Display) {
        let how = if self.handle.is_stopping() { StoppedHow::Cut } else { StoppedHow::Failed };
        self.now().end(how, why.to_string());
    }

    /// From here on what happens is reported through this.
    pub(super) fn tell(&self, outbox: Outbox) {
        self.now().outbox = Some(outbox);
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes note of what happened.
    pub(super) fn note(&self, progress: &Progress<'_>) {
        let mut now = self.now();
        let device = |(address, phase): (PciAddress, Phase)| {
            let state = match phase {
                Phase::Idle => return None,
                Phase::Attached => DeviceState::Attached,
                Phase::Claimed | Phase::Open => DeviceState::Claimed,
                _ => DeviceState::Detached,
            };
            Some(GuestDevice { address: address.to_string(), state, health: None })
        };
        now.status.devices = progress.state.functions().filter_map(device).collect();
        now.status.devices.sort_by(|one, other| one.address.cmp(&other.address));
        let loss = progress.event.loss();
        match progress.event {
            Event::Started(_) => {
                now.status.state = GuestState::Running;
                now.tell(EventKind::Started, None, None);
            }
            Event::Restarted => now.tell(EventKind::Reset, None, None),
            Event::Peers(report) if now.status.peer_to_peer != Some(PeerToPeer::off()) => {
                now.status.peer_to_peer = Some(report.into());
            }
            Event::Unresponsive => now.hang(true, EventKind::Unresponsive),
            Event::Responsive => now.hang(false, EventKind::Responsive),
            Event::Attached(address, Ok(())) => now.tell(EventKind::DeviceAttached, Some(*address), None),
            Event::Claimed(address, Err(error))
            | Event::Opened(address, Err(error))
            | Event::Attached(address, Err(error))
            | Event::Inserted(address, Err(error))
            | Event::Plugged(address, Err(error))
            | Event::Released(address, Err(error)) => {
                now.tell(EventKind::Failed, Some(*address), Some(error.clone()));
            }
            Event::WantedBack(address) => now.tell(EventKind::DeviceWanted, Some(*address), loss),
            Event::Lost(address, _) => now.tell(EventKind::DeviceLost, Some(*address), loss),
            Event::Erred(address, _) => now.tell(EventKind::DeviceError, Some(*address), loss),
            Event::Detached(address, detached) => {
                let text = detached.as_ref().err().cloned().or(loss);
                now.tell(EventKind::DeviceDetached, Some(*address), text);
            }
            Event::Ended(Ok(report)) => {
                let how = if progress.state.has_failed() { StoppedHow::Failed } else { report.end.into() };
                now.end(how, report.end.to_string());
            }
            Event::Ended(Err(error)) | Event::Booted(Err(error)) => {
                now.end(StoppedHow::Failed, error.clone())
            }
            _ => {}
        }
    }
}

impl Now {
    fn end(&mut self, how: StoppedHow, text: String) {
        (self.status.state, self.status.how) = (GuestState::Stopping, Some(how));
        self.tell(EventKind::Ended, None, Some(text));
    }

    fn hang(&mut self, hangs: bool, event: EventKind) {
        self.hangs = hangs;
        self.tell(event, None, None);
    }

    fn tell(&self, event: EventKind, address: Option<PciAddress>, text: Option<String>) {
        if let Some(outbox) = &self.outbox {
            let address = address.map(|address| address.to_string());
            let how = self.status.how.filter(|_| event == EventKind::Ended);
            outbox.event(GuestEvent { address, text, how, ..GuestEvent::new(&self.status.name, event) });
        }
    }
}

impl From<End> for StoppedHow {
    fn from(end: End) -> Self {
        match end {
            End::Shutdown => Self::Orderly,
            End::Reboot | End::Reset => Self::Reset,
            End::TripleFault => Self::Crashed,
            End::Stopped => Self::Cut,
        }
    }
}

impl Controlled for Live {
    fn status(&self) -> GuestStatus {
        let now = self.now();
        let state = match now.status.state {
            _ if self.handle.is_stopping() => GuestState::Stopping,
            GuestState::Starting | GuestState::Running if now.hangs => GuestState::Unresponsive,
            state => state,
        };
        GuestStatus { state, ..now.status.clone() }
    }

    fn power_button(&self) {
        tracing::info!("pressing the guest's power button, as its control socket asks");
        self.button.press();
    }

    fn stop(&self) {
        tracing::info!("stopping the guest, as its control socket asks");
        self.handle.stop();
    }

    fn reset(&self, answer: Answer) {
        tracing::info!("resetting the guest, as its control socket asks");
        self.handle.reset(|reset| answer.send(reset.map_err(Refusal::from)));
    }

    fn attach(&self, request: api::AttachRequest, answer: Answer) {
        let api::AttachRequest { address, options } = request;
        let others = options.others.iter().map(|other| other.0).filter(|other| *other != address.0);
        let functions: Vec<_> = std::iter::once(address.0).chain(others).collect();
        let request = AttachRequest {
            functions: functions.clone(),
            with_group: options.with_group,
            accept: options.accept.iter().map(Into::into).collect(),
            backend: options.backend.map(Into::into),
        };
        self.handle.attach(request, move |attached| {
            let devices = attached.map(|attached| {
                let guest = attached.guest.map(|guest| guest.to_string());
                let left = |(address, driver): (PciAddress, _)| LeftFunction {
                    address: address.to_string(),
                    driver,
                };
                let mut left: Vec<_> = attached.left.into_iter().map(left).collect();
                let mut device = |at: usize, function: PciAddress| AttachedDevice {
                    address: function.to_string(),
                    guest_address: guest.clone().filter(|_| at == 0),
                    left: std::mem::take(&mut left),
                };
                functions.iter().enumerate().map(|(at, &function)| device(at, function)).collect::<Vec<_>>()
            });
            answer.send(devices.map_err(Refusal::from));
        });
    }

    fn detach(&self, request: DetachRequest, answer: Answer) {
        let DetachRequest { address, options } = request;
        let deadline = Duration::from_millis(options.deadline_ms);
        let how = match options.how {
            api::DetachHow::Orderly => DetachHow::Orderly { deadline, then_surprise: false },
            api::DetachHow::OrderlyThenSurprise => DetachHow::Orderly { deadline, then_surprise: true },
            api::DetachHow::Surprise => DetachHow::Surprise,
        };
        self.handle.detach(address.0, how, move |detached| {
            let device = detached.map(|how| DetachedDevice {
                address: address.0.to_string(),
                how: match how {
                    DetachedHow::Orderly => api::DetachedHow::Orderly,
                    DetachedHow::Surprise => api::DetachedHow::Surprise,
                },
            });
            answer.send(device.map_err(Refusal::from));
        });
    }
}

impl From<Refused> for Refusal {
    fn from(refused: Refused) -> Self {
        let message = refused.to_string();
        match refused {
            Refused::NotFound(_) => Self::new(RefusalCode::NotFound, message),
            Refused::Conflict(_) => Self::new(RefusalCode::Conflict, message),
            Refused::Failed(_) => Self::failed(message),
            Refused::Blocked(readiness, _) => {
                let blockers = readiness.iter().map(Readiness::from).collect();
                Self { blockers, ..Self::new(RefusalCode::Blocked, message) }
            }
        }
    }
}
