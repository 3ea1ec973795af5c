//! What a device may be set to, and setting it. All of it needs rights: root, or what the administrator has opened.

use vm_accel::Result;

use super::sys::Device;
use super::{CORE, MEMORY};

/// Most fans that are asked for; GPUs have up to four.
const MAX_FANS: u32 = 16;

/// What a device can be set to. What it can't is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Controls {
    /// The core's clock.
    pub core_clock: Option<ClockLimits>,
    /// The memory's clock.
    pub memory_clock: Option<ClockLimits>,
    /// The power limit.
    pub power: Option<PowerLimits>,
    /// The fans.
    pub fan: Option<FanLimits>,
    /// Performance state, 0 for the fastest to 15.
    pub performance_state: Option<u32>,
    /// Whether the driver keeps what was set while nobody uses the device (persistence mode).
    pub is_persistent: Option<bool>,
}

/// MHz of a clock. Within which a clock is locked, the library does not tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClockLimits {
    /// Now.
    pub now: Option<u32>,
    /// All that it can have, in ascending order; empty where the library tells only the highest.
    pub clocks: Vec<u32>,
    /// The highest that it can have.
    pub max: u32,
}

/// Milliwatts that a device is limited to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PowerLimits {
    /// Now.
    pub now: Option<u32>,
    /// By default.
    pub default: Option<u32>,
    /// The least that it may be.
    pub min: u32,
    /// The most that it may be.
    pub max: u32,
}

/// Percent of the highest speed that fans are to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FanLimits {
    /// Each fan.
    pub fans: Vec<Fan>,
    /// The least that they may be set to.
    pub min: u32,
    /// The most that they may be set to.
    pub max: u32,
}

/// A fan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fan {
    /// Percent of its highest speed that it is to have.
    pub percent: Option<u32>,
    /// Whether the driver drives it, and not a speed that was set.
    pub is_automatic: Option<bool>,
}

/// What the device at a PCI address can be set to.
///
/// # Errors
/// When the library is missing, or does not know the device.
pub fn controls(address: &str) -> Result<Controls> {
    let device = Device::at(address)?;
    let limits = |clock, mut clocks: Vec<u32>| {
        clocks.sort_unstable();
        clocks.dedup();
        let max = clocks.last().copied().or_else(|| device.max_clock(clock).ok())?;
        Some(ClockLimits { now: device.clock(clock).ok(), clocks, max })
    };
    let memory = device.memory_clocks().unwrap_or_default();
    // With the memory at its fastest the core has all of its clocks.
    let core = memory.iter().max().and_then(|&fastest| device.core_clocks(fastest).ok());
    let power = device.power_limits().ok().map(|(min, max)| PowerLimits {
        now: device.power_limit().ok(),
        default: device.default_power_limit().ok(),
        min,
        max,
    });
    let fan = device.fans().ok().filter(|&fans| fans > 0).map(|fans| {
        let (min, max) = device.fan_limits().unwrap_or((0, 100));
        let fan = |index| Fan {
            percent: device.fan_target(index).ok(),
            is_automatic: device.fan_policy(index).ok().map(|policy| policy != MANUAL),
        };
        FanLimits { fans: (0..fans.min(MAX_FANS)).map(fan).collect(), min, max }
    });
    Ok(Controls {
        core_clock: limits(CORE, core.unwrap_or_default()),
        memory_clock: limits(MEMORY, memory),
        power,
        fan,
        performance_state: device.performance_state().ok().filter(|&state| state < 16),
        is_persistent: device.persistence_mode().ok().map(|mode| mode != 0),
    })
}

/// `NVML_FAN_POLICY_MANUAL`.
const MANUAL: u32 = 1;

/// Keeps the core's clock between `min` and `max` MHz, until it is unlocked or the driver lets go of the device.
///
/// # Errors
/// When the library, the driver or the device refuses.
pub fn lock_core_clock(address: &str, min: u32, max: u32) -> Result<()> {
    Device::at(address)?.lock_core_clock(min, max)
}

/// Lets the core have any clock again.
///
/// # Errors
/// As for [`lock_core_clock`].
pub fn unlock_core_clock(address: &str) -> Result<()> {
    Device::at(address)?.unlock_core_clock()
}

/// As [`lock_core_clock`], of the memory.
///
/// # Errors
/// As for [`lock_core_clock`].
pub fn lock_memory_clock(address: &str, min: u32, max: u32) -> Result<()> {
    Device::at(address)?.lock_memory_clock(min, max)
}

/// Lets the memory have any clock again.
///
/// # Errors
/// As for [`lock_core_clock`].
pub fn unlock_memory_clock(address: &str) -> Result<()> {
    Device::at(address)?.unlock_memory_clock()
}

/// Limits what the device draws, in milliwatts.
///
/// # Errors
/// As for [`lock_core_clock`].
pub fn set_power_limit(address: &str, milliwatts: u32) -> Result<()> {
    Device::at(address)?.set_power_limit(milliwatts)
}

/// Sets a fan, by its number, to N percent of its highest speed; `None` has the driver drive it again.
///
/// # Errors
/// As for [`lock_core_clock`].
pub fn set_fan(address: &str, fan: u32, percent: Option<u32>) -> Result<()> {
    let device = Device::at(address)?;
    match percent {
        Some(percent) => device.set_fan(fan, percent),
        None => device.default_fan(fan),
    }
}
