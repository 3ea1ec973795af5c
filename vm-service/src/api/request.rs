//! What may be asked of a guest and of the daemon.

use std::time::Duration;

use clap::ValueEnum;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use vm_passthrough::PciAddress;
use vm_passthrough::pci::ParsePciAddressError;
use vm_passthrough::readiness::BlockerCode;
use vm_passthrough::vfio::Backend;

use crate::deadlines::SHUTDOWN;
use crate::os::sandbox::Measure;

/// How a guest is started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct StartOptions {
    /// Take every function of the devices' IOMMU groups, also those of other devices
    pub(crate) with_group: bool,
    /// Go on although this stands in the way; it is reported as a warning
    pub(crate) accept: Vec<Accept>,
    /// How to open devices; without it, iommufd where the Linux kernel has it
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) backend: Option<VfioBackend>,
    /// End when the guest asks for a reboot, or crashes into one, instead of restarting it
    pub(crate) no_reboot: bool,
    /// Run although the guest's processes cannot have these parts of their confinement: user, files
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) unconfined: Vec<Measure>,
    /// How long the guest has to power itself off when a signal comes, before its power is cut; 0 cuts it at once, 30 when left out
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) shutdown_timeout_ms: Option<u64>,
}

impl StartOptions {
    /// How long the guest has to power itself off when a signal comes.
    pub(crate) fn shutdown_timeout(&self) -> Duration {
        self.shutdown_timeout_ms.map_or(SHUTDOWN, Duration::from_millis)
    }

    /// As arguments of `run`.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let flags = [(self.with_group, "--with-group"), (self.no_reboot, "--no-reboot")];
        let flags = flags.into_iter().filter(|(set, _)| *set).map(|(_, flag)| flag.to_owned());
        let accept = self.accept.iter().filter_map(|accept| value("--accept", accept));
        let backend = self.backend.iter().filter_map(|backend| value("--backend", backend));
        let timeout = self
            .shutdown_timeout_ms
            .map(|time| format!("--shutdown-timeout={}", Duration::from_millis(time).as_secs_f64()));
        let unconfined = Some(&self.unconfined).filter(|waived| !waived.is_empty());
        let unconfined = unconfined.map(|waived| format!("--unconfined={}", Measure::names(waived)));
        flags.chain(accept).chain(backend).chain(unconfined).chain(timeout).collect()
    }
}

fn value(option: &str, value: &impl ValueEnum) -> Option<String> {
    Some(format!("{option}={}", value.to_possible_value()?.get_name()))
}

/// How devices are opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum VfioBackend {
    /// /dev/iommu and /dev/vfio/devices
    Iommufd,
    /// /dev/vfio/vfio and /dev/vfio/GROUP
    Group,
}

impl From<VfioBackend> for Backend {
    fn from(backend: VfioBackend) -> Self {
        match backend {
            VfioBackend::Iommufd => Self::Iommufd,
            VfioBackend::Group => Self::Group,
        }
    }
}

/// A blocker that an operator may accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Accept {
    /// Nothing can reset the device: it may hold what its last user left, and keep what this guest leaves
    NoReset,
}

impl From<&Accept> for BlockerCode {
    fn from(accept: &Accept) -> Self {
        match accept {
            Accept::NoReset => Self::NoReset,
        }
    }
}

/// The address of a function of the host, as in `0000:65:00.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(inline)]
pub(crate) struct Address(#[schemars(with = "String")] pub(crate) PciAddress);

impl TryFrom<String> for Address {
    type Error = ParsePciAddressError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse().map(Self)
    }
}

impl From<Address> for String {
    fn from(Address(address): Address) -> Self {
        address.to_string()
    }
}

/// A device that a guest is to get.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AttachRequest {
    /// Which: a function of it.
    pub(crate) address: Address,
    /// How.
    #[serde(flatten)]
    pub(crate) options: AttachOptions,
}

/// How a device is given to a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct AttachOptions {
    /// Other functions of the same device of the host that the guest gets with it.
    #[serde(rename = "with")]
    pub(crate) others: Vec<Address>,
    /// Take every function of the devices' IOMMU groups, also those of other devices
    pub(crate) with_group: bool,
    /// Go on although this stands in the way; it is reported as a warning
    pub(crate) accept: Vec<Accept>,
    /// How to open devices; without it, as the guest's others are, or iommufd where the Linux kernel has it
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) backend: Option<VfioBackend>,
}

/// A device that a guest is to lose.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DetachRequest {
    /// Which.
    pub(crate) address: Address,
    /// How.
    #[serde(flatten)]
    pub(crate) options: DetachOptions,
}

/// How a device is taken from a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct DetachOptions {
    /// Whether the guest is asked first.
    pub(crate) how: DetachHow,
    /// How long the guest has to let go of it, in milliseconds.
    #[serde(deserialize_with = "crate::deadlines::milliseconds")]
    #[schemars(range(max = 86_400_000))]
    pub(crate) deadline_ms: u64,
}

impl Default for DetachOptions {
    fn default() -> Self {
        Self { how: DetachHow::Orderly, deadline_ms: 30_000 }
    }
}

/// Whether a guest is asked before a device is taken from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DetachHow {
    /// It is asked, and keeps the device when it does not let go of it in time.
    #[default]
    Orderly,
    /// It is asked, and loses the device at the deadline whatever it says.
    OrderlyThenSurprise,
    /// It loses the device at once.
    Surprise,
}
