//! What a guest's keeper and its VMM say to each other: one packet each, with descriptors beside it. Neither believes the other.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vm_passthrough::PciAddress;
use vm_passthrough::guest::PeerReport;
use vm_passthrough::pci::placement::{FunctionRequest, Windows};
use vm_passthrough::vfio::{
    DeviceInfo, ErrorSeverity, Presence, ResetEvidence, ResetReport, ResetStep, VfioError,
};

use crate::config::GuestConfig;
use crate::os::sandbox::Confinement;
use crate::vmm::{ExpectedFunction, GuestAnswer, GuestNuma, OnReboot, RunReport};

/// What the keeper orders. Each is [done](Report::Done), one after the other.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) enum Order {
    /// The first: make the machine. With the eventfds that end the guest, that reset it, and that are its power button, the socket on
    /// which the keeper starts workers, where the console's output goes, and where its input comes from if there is any.
    Make(Box<Make>),
    /// Let the guest run.
    Boot,
    /// Drop the machine.
    DropMachine,
    /// See where a device that comes could be.
    RoomFor(Vec<FunctionRequest>),
    /// Devices that come are open in this space. With its file; the number is iommufd's.
    Space(Option<u32>),
    /// Take an open device. With its file, the socket of its keeper, what is readable when the host wants it back if there is
    /// such, its group's file if it has a number, and that of its ROM if it has one.
    Open(Open),
    /// Attach it, and put it into the machine if that expects it; given up once the guest is stopped.
    Attach(PciAddress),
    /// Have the guest see that a device is in a free slot, where it gets ready; it is named by one of its functions.
    Insert(PciAddress, Vec<FunctionRequest>),
    /// Have these functions, which are that device, answer there.
    Plug(Vec<PciAddress>),
    /// Ask the guest to let go of a slot; it [answers](Report::Asked) later.
    Ask(PciAddress),
    /// Ask it no more.
    Unask(PciAddress),
    /// Empty a slot.
    Unplug(PciAddress),
    /// Show the guest that a device had an error.
    ReportError(PciAddress, ErrorSeverity),
    /// Stop a device.
    Stop(PciAddress),
    /// Detach it.
    Detach(PciAddress),
    /// Let go of it.
    Close(PciAddress),
    /// Say that you are [there](Report::Here), and how it is with peer-to-peer DMA. Not an order that is done.
    Ping,
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Make(_) => f.write_str("make the machine"),
            Self::Boot => f.write_str("boot the guest"),
            Self::DropMachine => f.write_str("drop the machine"),
            Self::RoomFor(_) => f.write_str("find room for a device"),
            Self::Space(_) => f.write_str("take the devices' address space"),
            Self::Open(Open { address, .. }) => write!(f, "take {address}"),
            Self::Attach(address) => write!(f, "attach {address}"),
            Self::Insert(address, _) => write!(f, "insert {address}"),
            Self::Plug(functions) => {
                f.write_str("plug")?;
                functions.iter().try_for_each(|address| write!(f, " {address}"))
            }
            Self::Ask(slot) => write!(f, "ask the guest for {slot}"),
            Self::Unask(slot) => write!(f, "stop asking the guest for {slot}"),
            Self::Unplug(slot) => write!(f, "unplug {slot}"),
            Self::ReportError(address, severity) => write!(f, "report a {severity} error of {address}"),
            Self::Stop(address) => write!(f, "stop {address}"),
            Self::Detach(address) => write!(f, "detach {address}"),
            Self::Close(address) => write!(f, "close {address}"),
            Self::Ping => f.write_str("answer"),
        }
    }
}

/// A guest, as its VMM makes it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Make {
    pub(super) config: GuestConfig,
    pub(super) kvm: PathBuf,
    pub(super) on_reboot: OnReboot,
    pub(super) numa: GuestNuma,
    pub(super) expected: Vec<ExpectedFunction>,
}

/// An open device.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Open {
    pub(super) address: PciAddress,
    pub(super) info: DeviceInfo,
    pub(super) is_virtual: bool,
    pub(super) reset_by_open: Option<Reset>,
    pub(super) is_heard: bool,
    /// Whether it comes to a guest that runs, and can be turned back.
    pub(super) can_turn_back: bool,
    pub(super) group: Option<u32>,
    pub(super) without_reset: bool,
    pub(super) rom: Rom,
}

/// What is in the place of a device's expansion ROM.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Rom {
    /// Its own.
    Device,
    /// None.
    Hidden,
    /// What is in the last file beside the order.
    File,
}

/// What the VMM reports.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) enum Report {
    /// An order was carried out.
    Done(Result<Done, Failed>),
    /// The guest has started, for the first time or after a reset.
    Started { restarts: u32 },
    /// It does not run any more.
    Ended(Result<RunReport, String>),
    /// What it answers who asks it to let go of a slot.
    Asked(PciAddress, GuestAnswer),
    /// The answer to a ping, and how far BARs are mapped for other devices.
    Here(PeerReport),
}

/// What came of an order.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) enum Done {
    /// Nothing that is to be told.
    It,
    /// The machine is made, and its process is confined so far.
    Made(Confinement),
    /// Attaching was given up, as the guest is stopped or the device is to be turned back.
    GivenUp,
    /// The slot for the device, and the limit of locked memory of the VMM.
    Room(Room),
    /// Where the guest sees it.
    Plugged(Option<PciAddress>),
    /// Whether the device was given up without a reset.
    Detached { unreset: bool },
}

/// What the VMM has for a device that is to be attached.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Room {
    /// The windows of its slot, `None` while the guest is about to start; or why no slot is free.
    pub(super) slot: Result<Option<Windows>, String>,
    /// Bytes that the VMM may lock for devices; `None` without a limit.
    pub(super) memlock: Option<u64>,
}

/// Why an order was not carried out.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Failed {
    pub(super) reason: String,
    /// Whether what the guest is to boot is at fault.
    pub(super) is_boot: bool,
}

impl From<String> for Failed {
    fn from(reason: String) -> Self {
        Self { reason, is_boot: false }
    }
}

/// What the VMM asks of a device's keeper.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) enum Call {
    Wake,
    Reset,
    SetAtRest(bool),
    Presence,
}

/// What it is answered.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) enum Reply {
    Done,
    Reset(Reset),
    Present,
    Asleep,
    Gone(String),
    /// The host wants the device back.
    WantedBack,
    Failed(String),
}

/// How a device was reset.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Reset {
    method: Option<ResetStep>,
    register: Option<String>,
}

impl From<ResetReport> for Reset {
    fn from(report: ResetReport) -> Self {
        let register = match report.evidence {
            ResetEvidence::Register(register) => Some(register.to_owned()),
            ResetEvidence::LinuxReport => None,
        };
        Self { method: report.method, register }
    }
}

impl From<Reset> for ResetReport {
    fn from(reset: Reset) -> Self {
        const KNOWN: [&str; 2] = ["MSI Mask", "MSI-X Function Mask"];
        let register = |text: String| KNOWN.into_iter().find(|known| *known == text).unwrap_or("a register");
        let evidence =
            reset.register.map_or(ResetEvidence::LinuxReport, |text| ResetEvidence::Register(register(text)));
        Self { method: reset.method, evidence }
    }
}

impl From<Presence> for Reply {
    fn from(presence: Presence) -> Self {
        match presence {
            Presence::Present => Self::Present,
            Presence::Asleep => Self::Asleep,
            Presence::Gone(evidence) => Self::Gone(evidence),
        }
    }
}

impl From<VfioError> for Reply {
    fn from(error: VfioError) -> Self {
        match error {
            VfioError::WantedBack { .. } => Self::WantedBack,
            error => Self::Failed(error.to_string()),
        }
    }
}
