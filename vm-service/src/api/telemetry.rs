//! What GPUs tell of themselves.

use schemars::JsonSchema;
use serde::Serialize;
use vm_passthrough::telemetry::{self, Answer, Source, Telemetry};

use super::DeviceErrors;
use super::usb4::INFERRED;
use crate::devices::gpus::Gpu;

/// A GPU, and what it tells of itself.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct GpuStatus {
    /// Its address.
    pub address: String,
    /// Its name.
    pub name: String,
    /// Whether it reaches the host through a tunnel of USB4 or Thunderbolt.
    pub tunnelled: bool,
    /// The router that it is in; null where it is behind no tunnel, or may be in one of several.
    pub router: Option<String>,
    /// How it is known that it is in that router: `inferred`, as Linux does not say it; null where it is in none.
    pub router_basis: Option<String>,
    /// Name of the enclosure, as it says itself.
    pub enclosure: Option<String>,
    /// UUID of the enclosure, which it keeps wherever it is connected.
    pub enclosure_id: Option<String>,
    /// Whether PCIe is tunnelled to the enclosure: `no`, `yes` or `challenged`; null where it is not known.
    pub authorized: Option<String>,
    /// The driver that has it.
    pub driver: Option<String>,
    /// The guest that has it.
    pub guest: Option<String>,
    /// Whether it answered.
    pub state: GpuState,
    /// What it tells; null when it did not answer.
    pub telemetry: Option<GpuTelemetry>,
}

/// Whether a GPU answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GpuState {
    /// It did, or it is known why nobody can be asked.
    There,
    /// It is not there any more.
    Gone,
    /// Its driver did not answer in time.
    NoAnswer,
}

/// What a GPU tells of itself. What it does not tell is null.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct GpuTelemetry {
    /// Who tells: `nvml`, `amdgpu`, `hwmon of DRIVER`, or `none`.
    pub source: String,
    /// Why nobody tells; null when somebody does.
    pub unknown: Option<String>,
    /// Temperature of the core, or of its edge.
    pub temperature_celsius: Option<f64>,
    /// Temperature where the core is hottest.
    pub hot_spot_celsius: Option<f64>,
    /// Temperature of the memory.
    pub memory_celsius: Option<f64>,
    /// What it draws.
    pub power_watts: Option<f64>,
    /// At which power it throttles itself.
    pub power_limit_watts: Option<f64>,
    /// Percent of its fan's highest speed.
    pub fan_percent: Option<u32>,
    /// Turns a minute of its fan.
    pub fan_rpm: Option<u32>,
    /// Clock of the core.
    pub core_mhz: Option<u32>,
    /// The highest clock of the core.
    pub core_max_mhz: Option<u32>,
    /// Clock of the memory.
    pub memory_mhz: Option<u32>,
    /// The highest clock of the memory.
    pub memory_max_mhz: Option<u32>,
    /// Performance state, by its driver's name: `P0` to `P15`, or the level that is forced on amdgpu, as in `auto`.
    pub performance_state: Option<String>,
    /// Percent of the time that it was busy, over the driver's last interval.
    pub busy_percent: Option<u32>,
    /// Bytes of its memory that are in use.
    pub memory_used_bytes: Option<u64>,
    /// Bytes of its memory.
    pub memory_bytes: Option<u64>,
    /// Its link to the host.
    pub link: Option<GpuLink>,
    /// Errors that it has reported since Linux found it (AER).
    pub errors: Option<DeviceErrors>,
    /// Packets that were sent again on PCI Express, since its driver has it.
    pub replays: Option<u64>,
    /// What holds its clocks down: `power-limit`, `current`, `temperature`, `hardware`, `setting`, `other`; empty for nothing.
    pub throttle: Option<Vec<String>>,
}

/// A GPU's link to the host: of PCI Express, or of the router that its tunnel ends at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct GpuLink {
    /// Whether it carries nothing.
    pub down: bool,
    /// Megatransfers a second of each lane of PCI Express; null of a tunnel, like the three below.
    pub speed: Option<u32>,
    /// Lanes.
    pub width: Option<u8>,
    /// Highest speed that the GPU can do.
    pub max_speed: Option<u32>,
    /// Most lanes that the GPU can use.
    pub max_width: Option<u8>,
    /// Mbit/s from the router to the host; null without a tunnel.
    pub receive_megabits: Option<u32>,
    /// Mbit/s from the host to the router; null without a tunnel.
    pub transmit_megabits: Option<u32>,
}

/// A GPU at one moment of `egpu monitor`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct GpuSample {
    /// The GPU, and what it tells.
    #[serde(flatten)]
    pub status: GpuStatus,
    /// Errors a second since the moment before; null where that is not known, as when a counter began again.
    pub rates: GpuRates,
    /// What is to be looked after, in words.
    pub alarms: Vec<String>,
}

/// Events a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct GpuRates {
    /// Errors that the hardware corrected.
    pub correctable: Option<f64>,
    /// Errors that lost a transaction, but left the link reliable.
    pub nonfatal: Option<f64>,
    /// Errors after which the link is not reliable.
    pub fatal: Option<f64>,
    /// Packets that were sent again on PCI Express.
    pub replays: Option<f64>,
}

impl GpuStatus {
    /// A GPU and its answer.
    pub(crate) fn new(gpu: &Gpu, answer: &Answer) -> Self {
        let (state, telemetry) = match answer {
            Answer::Told(_, told) => (GpuState::There, Some(GpuTelemetry::from(&**told))),
            Answer::Gone => (GpuState::Gone, None),
            Answer::Waiting(_) => (GpuState::NoAnswer, None),
        };
        let enclosure = gpu.enclosure.as_ref();
        Self {
            address: gpu.address().to_string(),
            name: gpu.name(),
            tunnelled: gpu.tunnel.is_some(),
            router: enclosure.map(|router| router.route.to_string()),
            router_basis: enclosure.map(|_| INFERRED.into()),
            enclosure: gpu.enclosure_name(),
            enclosure_id: enclosure.and_then(|router| router.unique_id).map(|id| id.to_string()),
            authorized: enclosure.and_then(|router| router.authorization).map(|is| is.to_string()),
            driver: gpu.function.driver.clone(),
            guest: gpu.guest.clone(),
            state,
            telemetry,
        }
    }
}

impl From<&Telemetry> for GpuTelemetry {
    fn from(told: &Telemetry) -> Self {
        Self {
            source: told.source.to_string(),
            unknown: match &told.source {
                Source::None(why) => Some(why.clone()),
                _ => None,
            },
            temperature_celsius: told.temperature,
            hot_spot_celsius: told.hot_spot,
            memory_celsius: told.memory_temperature,
            power_watts: told.power,
            power_limit_watts: told.power_limit,
            fan_percent: told.fan_percent,
            fan_rpm: told.fan_speed,
            core_mhz: told.core_clock.now,
            core_max_mhz: told.core_clock.max,
            memory_mhz: told.memory_clock.now,
            memory_max_mhz: told.memory_clock.max,
            performance_state: told.performance_state.clone(),
            busy_percent: told.busy,
            memory_used_bytes: told.memory_used,
            memory_bytes: told.memory_total,
            link: told.link.map(GpuLink::from),
            errors: told.errors.as_ref().map(DeviceErrors::from),
            replays: told.replays,
            throttle: told.throttle.as_ref().map(|all| all.iter().map(ToString::to_string).collect()),
        }
    }
}

impl From<telemetry::GpuLink> for GpuLink {
    fn from(link: telemetry::GpuLink) -> Self {
        let down = link.is_down();
        match link {
            telemetry::GpuLink::Pcie(link) => Self {
                down,
                speed: Some(link.speed),
                width: Some(link.width),
                max_speed: Some(link.max_speed),
                max_width: Some(link.max_width),
                ..Self::default()
            },
            telemetry::GpuLink::Tunnel { rates, .. } => Self {
                down,
                receive_megabits: rates.map(|rates| rates.receive.rate()),
                transmit_megabits: rates.map(|rates| rates.transmit.rate()),
                ..Self::default()
            },
        }
    }
}
