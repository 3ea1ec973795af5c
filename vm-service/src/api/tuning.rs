//! What GPUs are set to.

use schemars::JsonSchema;
use serde::Serialize;
use vm_passthrough::telemetry::Source;
use vm_passthrough::tuning::{ClockSetting, Clocks, FanSetting, PowerSetting, Settings};

use crate::devices::gpus::Gpu;

/// A GPU, what it is set to and what it may be set to.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct GpuConfig {
    /// Its address.
    pub address: String,
    /// Its name.
    pub name: String,
    /// Whether it reaches the host through a tunnel of USB4 or Thunderbolt.
    pub tunnelled: bool,
    /// The driver that has it.
    pub driver: Option<String>,
    /// Who tells and sets: `nvml`, `amdgpu` or `none`.
    pub source: String,
    /// Why nothing can be set; null where something can.
    pub unknown: Option<String>,
    /// Clock of the core; null where it can't be limited, like the others.
    pub core_clock: Option<GpuClock>,
    /// Clock of the memory.
    pub memory_clock: Option<GpuClock>,
    /// Power limit.
    pub power: Option<GpuPower>,
    /// Fans.
    pub fan: Option<GpuFan>,
    /// Performance state, by its driver's name: `P0` to `P15`, or the level that is forced on amdgpu, as in `auto`.
    pub performance_state: Option<String>,
    /// Whether its driver keeps what was set while nobody uses the GPU; null where it does not say.
    pub persistent: Option<bool>,
    /// What else should be known of what was set.
    pub notes: Vec<String>,
}

/// A clock of a GPU.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct GpuClock {
    /// Now.
    pub mhz: Option<u32>,
    /// The highest that it may have, as it is set; null where its driver does not tell.
    pub limit_mhz: Option<u32>,
    /// The least that this may be set to.
    pub min_mhz: Option<u32>,
    /// The most that this may be set to.
    pub max_mhz: Option<u32>,
    /// All that it may be set to; empty where that is any between the two.
    pub steps_mhz: Vec<u32>,
}

/// The power limit of a GPU.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct GpuPower {
    /// Now.
    pub limit_watts: Option<f64>,
    /// By default.
    pub default_watts: Option<f64>,
    /// The least that it may be set to.
    pub min_watts: f64,
    /// The most that it may be set to.
    pub max_watts: f64,
}

/// The fans of a GPU.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct GpuFan {
    /// Percent of the highest speed, of the first.
    pub percent: Option<u32>,
    /// Who drives them: `auto`, `fixed` or `uncontrolled`, which is full speed.
    pub mode: Option<String>,
    /// The least percent that they may be set to.
    pub min_percent: u32,
    /// The most percent that they may be set to.
    pub max_percent: u32,
}

impl GpuConfig {
    /// A GPU and what it is set to, or why that is not known.
    pub(crate) fn new(gpu: &Gpu, settings: Result<&Settings, String>, notes: Vec<String>) -> Self {
        let told = settings.as_ref().ok();
        Self {
            address: gpu.address().to_string(),
            name: gpu.name(),
            tunnelled: gpu.tunnel.is_some(),
            driver: gpu.function.driver.clone(),
            source: told.map_or_else(|| "none".into(), |told| Source::to_string(&told.source)),
            core_clock: told.and_then(|told| told.core_clock.as_ref()).map(GpuClock::from),
            memory_clock: told.and_then(|told| told.memory_clock.as_ref()).map(GpuClock::from),
            power: told.and_then(|told| told.power).map(GpuPower::from),
            fan: told.and_then(|told| told.fan).map(GpuFan::from),
            performance_state: told.and_then(|told| told.performance_state.clone()),
            persistent: told.and_then(|told| told.is_persistent),
            unknown: settings.err(),
            notes,
        }
    }
}

impl From<&ClockSetting> for GpuClock {
    fn from(clock: &ClockSetting) -> Self {
        let (min_mhz, max_mhz, steps_mhz) = match &clock.allowed {
            Clocks::Range(min, max) => (Some(*min), Some(*max), Vec::new()),
            Clocks::Steps(steps) => (steps.first().copied(), steps.last().copied(), steps.clone()),
        };
        Self { mhz: clock.now, limit_mhz: clock.limit, min_mhz, max_mhz, steps_mhz }
    }
}

impl From<PowerSetting> for GpuPower {
    fn from(power: PowerSetting) -> Self {
        Self {
            limit_watts: power.limit,
            default_watts: power.default,
            min_watts: power.min,
            max_watts: power.max,
        }
    }
}

impl From<FanSetting> for GpuFan {
    fn from(fan: FanSetting) -> Self {
        Self {
            percent: fan.percent,
            mode: fan.mode.map(|mode| mode.to_string()),
            min_percent: fan.min,
            max_percent: fan.max,
        }
    }
}
