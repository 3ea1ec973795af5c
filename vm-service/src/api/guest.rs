//! Guests that run: what they are, what happens to them, and why something asked of one was not done. The control socket of a
//! guest, the daemon's API and the commands speak of them in these terms.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;
use vm_passthrough::guest::PeerReport;

use super::{DeviceHealth, Readiness};
use crate::log;
use crate::os::sandbox;

/// A guest that runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GuestStatus {
    /// Its name.
    pub name: String,
    /// The process that runs it.
    pub pid: u32,
    /// How far it has come.
    pub state: GuestState,
    /// When its process began to run it, in seconds after 1970 began.
    pub since: u64,
    /// Number of its vCPUs.
    pub vcpus: u8,
    /// Its RAM in bytes.
    pub memory: u64,
    /// Its devices.
    pub devices: Vec<GuestDevice>,
    /// Bytes of its memory that Linux has pinned or locked, where devices may read and write; null where that is not known.
    #[serde(default)]
    pub dma_bytes: Option<u64>,
    /// How far its devices reach each other's BARs by DMA (peer to peer); null before its VMM has said.
    #[serde(default)]
    pub peer_to_peer: Option<PeerToPeer>,
    /// The pseudo-terminal that is its console; null where the console is elsewhere.
    pub console: Option<String>,
    /// How it ended, where that is its state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub how: Option<StoppedHow>,
    /// How far the process is confined in which it runs; null before it is, and where nobody answers.
    pub confinement: Option<Confinement>,
}

/// How far a guest's devices reach each other's BARs by DMA.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PeerToPeer {
    /// In a word.
    pub state: PeerState,
    /// Bytes of BARs that are mapped for it.
    pub mapped_bytes: u64,
    /// Bytes that can't be: transfers fail there, and drivers copy through RAM.
    pub refused_bytes: u64,
    /// Why not, of some of them.
    pub reason: Option<String>,
}

/// Whether a guest's devices reach each other's BARs by DMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PeerState {
    /// The guest's file turns it off.
    Off,
    /// There is nothing to map: the guest has fewer than two devices, or uses none of their memory.
    Idle,
    /// It is being mapped.
    Mapping,
    /// All is mapped.
    Mapped,
    /// Some or all of it can't be mapped.
    Refused,
    /// One that a newer version knows.
    #[serde(other)]
    Other,
}

impl PeerToPeer {
    /// That of a guest whose file turns it off.
    pub(crate) fn off() -> Self {
        Self { state: PeerState::Off, ..Self::from(&PeerReport::default()) }
    }
}

impl From<&PeerReport> for PeerToPeer {
    fn from(report: &PeerReport) -> Self {
        let PeerReport { mapped, waiting, refused, reason } = report.clone();
        let state = match (waiting, refused, mapped) {
            (1.., ..) => PeerState::Mapping,
            (_, 1.., _) => PeerState::Refused,
            (.., 1..) => PeerState::Mapped,
            _ => PeerState::Idle,
        };
        Self { state, mapped_bytes: mapped, refused_bytes: refused, reason }
    }
}

/// How far a guest's VMM is confined, beyond its system calls.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Confinement {
    /// The user that only it is; null where it has none.
    pub user: Option<u32>,
    /// Whether it can open no file, by Landlock.
    pub files: bool,
    /// Whether Landlock keeps it from sending signals.
    pub signals: bool,
    /// What it goes without, and why.
    pub missing: Vec<String>,
}

impl From<&sandbox::Confinement> for Confinement {
    fn from(confinement: &sandbox::Confinement) -> Self {
        // No VMM is without its list of system calls.
        let sandbox::Confinement { user, files, signals, missing, calls: _ } = confinement.clone();
        Self { user, files, signals, missing }
    }
}

impl GuestStatus {
    /// Whether its process has answered with what it is.
    pub(crate) fn is_known(&self) -> bool {
        self.vcpus > 0
    }

    /// One whose process does not answer.
    pub(crate) fn of_unresponsive(name: &str, pid: u32) -> Self {
        let state = GuestState::Unresponsive;
        let (name, devices, console, how, confinement) = (name.to_owned(), Vec::new(), None, None, None);
        let (since, vcpus, memory, dma_bytes, peer_to_peer) = (0, 0, 0, None, None);
        Self {
            name,
            pid,
            state,
            since,
            vcpus,
            memory,
            devices,
            dma_bytes,
            peer_to_peer,
            console,
            how,
            confinement,
        }
    }
}

/// How far a guest has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, IntoStaticStr)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum GuestState {
    /// Its machine is made, or its program loaded.
    Starting,
    /// It runs.
    Running,
    /// Its power is cut, or it has ended, and its devices go back.
    Stopping,
    /// Its VMM does not answer, or its process does not: then nothing but its name and its process is known.
    Unresponsive,
    /// One that a newer version knows.
    #[serde(other)]
    Other,
}

/// A device of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GuestDevice {
    /// Address on the host.
    pub address: String,
    /// How far it has come.
    pub state: DeviceState,
    /// Its state, as the daemon last saw it; null until it has.
    #[serde(default)]
    pub health: Option<DeviceHealth>,
}

/// How far a device has come on its way to the guest or back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceState {
    /// It is taken from its driver.
    Claimed,
    /// The guest has it.
    Attached,
    /// It is detached, and goes back to its driver.
    Detached,
    /// One that a newer version knows.
    #[serde(other)]
    Other,
}

/// What happened to a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GuestEvent {
    /// Its name.
    pub guest: String,
    /// What.
    pub event: EventKind,
    /// The device that it is about, by its address on the host.
    pub address: Option<String>,
    /// More of it, for people.
    pub text: Option<String>,
    /// How it ended, where it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub how: Option<StoppedHow>,
    /// When, in UTC, as RFC 3339 has it.
    pub time: String,
}

/// What may happen to a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, IntoStaticStr)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum EventKind {
    /// The daemon has found it.
    Found,
    /// It began to run.
    Started,
    /// Its machine was reset, and it runs again.
    Reset,
    /// Its VMM does not answer.
    Unresponsive,
    /// Its VMM answers again.
    Responsive,
    /// A device was attached.
    DeviceAttached,
    /// A device was detached.
    DeviceDetached,
    /// The host wants a device back.
    DeviceWanted,
    /// A device does not answer any more.
    DeviceLost,
    /// A device's link went down, lost lanes, or got them back.
    DeviceLink,
    /// A device has reported errors (AER).
    DeviceErrors,
    /// A device, or a port above it, had an uncorrectable error of PCI Express, which the guest is told of.
    DeviceError,
    /// Something failed.
    Failed,
    /// It does not run any more.
    Ended,
    /// Its process is gone.
    Gone,
    /// One that a newer version knows.
    #[serde(other)]
    Other,
}

impl EventKind {
    /// As it is written.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

impl GuestEvent {
    /// It happened just now.
    pub(crate) fn new(guest: &str, event: EventKind) -> Self {
        Self { guest: guest.to_owned(), event, address: None, text: None, how: None, time: log::now() }
    }
}

impl fmt::Display for GuestEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.guest, self.event.as_str())?;
        self.address.iter().try_for_each(|address| write!(f, " {address}"))?;
        self.text.iter().try_for_each(|text| write!(f, ": {text}"))
    }
}

/// A guest that has ended, and everything was released.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct StoppedGuest {
    /// Its name.
    pub guest: String,
    /// How it ended.
    pub how: StoppedHow,
}

/// How a guest ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum StoppedHow {
    /// It powered itself off.
    Orderly,
    /// Its power was cut: `stop` or a signal to its process wanted that.
    Cut,
    /// It was reset, or asked for a reboot, and was started to end then.
    Reset,
    /// It crashed (triple fault), and was started to end then.
    Crashed,
    /// Its process could not go on with it, and gave everything back; its log says why.
    Failed,
    /// Its process was killed, or died.
    Killed,
    /// One that a newer version knows.
    #[serde(other)]
    Other,
}

/// A part of a guest's log.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct GuestLog {
    /// The guest's name.
    pub guest: String,
    /// What its process logged.
    pub log: String,
    /// Where in the log what follows begins, in bytes.
    #[serde(default)]
    pub next: u64,
    /// Whether the guest had ended before this was read: nothing is logged any more.
    #[serde(default)]
    pub ended: bool,
}

/// A device that a guest got while it ran.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct AttachedDevice {
    /// Address on the host.
    pub address: String,
    /// Where the guest sees it; null while it has not numbered its buses.
    pub guest_address: Option<String>,
    /// Functions of its slot that stay with the host, as they are in other IOMMU groups; of the device's first function.
    #[serde(default)]
    pub left: Vec<LeftFunction>,
}

/// A function of the same slot that a claim leaves with the host.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct LeftFunction {
    /// Its address.
    pub address: String,
    /// Its driver.
    pub driver: Option<String>,
}

impl std::fmt::Display for LeftFunction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { address, driver } = self;
        let driver =
            driver.as_ref().map_or_else(|| "without a driver".into(), |driver| format!("on {driver}"));
        write!(f, "{address} of the same slot stays with the host, {driver}")
    }
}

/// A device that a guest lost while it ran.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct DetachedDevice {
    /// Address on the host.
    pub address: String,
    /// Which of the two happened.
    pub how: DetachedHow,
}

/// How a device was taken from a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DetachedHow {
    /// The guest let go of it.
    Orderly,
    /// The guest lost it.
    Surprise,
    /// One that a newer version knows.
    #[serde(other)]
    Other,
}

/// A problem document (RFC 9457): why something was not done.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "Problem")]
pub struct Problem {
    /// `urn:vm-service:` and the code.
    #[serde(rename = "type")]
    pub kind: String,
    /// The code in words.
    pub title: String,
    /// HTTP status.
    pub status: u16,
    /// What, where and what to do.
    pub detail: String,
    /// What kind of reason.
    pub code: RefusalCode,
    /// The part of the request that is wrong, as in `boot.kernel`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// What keeps the devices from being passed to the guest.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blockers: Vec<Readiness>,
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Self {
        let Refusal { code, message, field, blockers } = refusal;
        let (name, title, status) = match code {
            RefusalCode::Invalid => ("invalid", "invalid request", 400),
            RefusalCode::NotFound => ("not-found", "not found", 404),
            RefusalCode::Conflict => ("conflict", "conflict", 409),
            RefusalCode::Blocked => ("blocked", "device blocked", 409),
            RefusalCode::Timeout => ("timeout", "timeout", 504),
            RefusalCode::Busy => ("busy", "busy", 503),
            RefusalCode::Failed | RefusalCode::Other => ("failed", "failed", 500),
        };
        let kind = format!("urn:vm-service:{name}");
        Self { kind, title: title.to_owned(), status, detail: message, code, field, blockers }
    }
}

/// Why something that was asked of a guest, or of the daemon, was not done.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Refusal {
    /// What kind of reason.
    pub code: RefusalCode,
    /// What, where and what to do.
    pub message: String,
    /// The part of the request that is wrong, as in `boot.kernel`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// What keeps the devices from being passed to the guest.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blockers: Vec<Readiness>,
}

/// A kind of reason; scripts may rely on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RefusalCode {
    /// The request is wrong; nothing was touched.
    Invalid,
    /// There is no such guest or device.
    NotFound,
    /// It does not fit what is there, as a second guest of one name.
    Conflict,
    /// A device can't be passed to a guest as things are; nothing was touched.
    Blocked,
    /// It failed; what was begun was undone, or the message says what was not.
    Failed,
    /// The guest did not answer in time.
    Timeout,
    /// The daemon serves as many as it can; nothing was touched.
    Busy,
    /// One that a newer version knows.
    #[serde(other)]
    Other,
}

impl Refusal {
    /// One that has no more to say than its message.
    pub(crate) fn new(code: RefusalCode, message: impl fmt::Display) -> Self {
        Self { code, message: message.to_string(), field: None, blockers: Vec::new() }
    }

    /// A part of the request is wrong.
    pub(crate) fn invalid(field: impl Into<String>, message: impl fmt::Display) -> Self {
        Self { field: Some(field.into()), ..Self::new(RefusalCode::Invalid, message) }
    }

    /// It failed.
    pub(crate) fn failed(message: impl fmt::Display) -> Self {
        Self::new(RefusalCode::Failed, message)
    }
}
