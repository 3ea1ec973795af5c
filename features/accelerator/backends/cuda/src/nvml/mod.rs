//! NVIDIA's management library (NVML): how a device does, who uses it, and what it may be set to.
//! <https://docs.nvidia.com/deploy/nvml-api/>
//!
//! It needs no context of CUDA and takes no memory of the device. A call may wait for the driver, as for a device that was
//! pulled out: whoever can't wait asks from a thread of its own.

mod control;
mod sys;

use vm_accel::Result;

pub use control::{
    ClockLimits, Controls, Fan, FanLimits, PowerLimits, controls, lock_core_clock, lock_memory_clock,
    set_fan, set_power_limit, unlock_core_clock, unlock_memory_clock,
};

use sys::Device;

/// The core's sensor, and its clock.
const CORE: u32 = 0;
/// The memory's clock.
const MEMORY: u32 = 2;

/// How a device does. What it does not tell is `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Health {
    /// Degrees Celsius.
    pub temperature: Option<u32>,
    /// Watts drawn.
    pub power: Option<f64>,
    /// The watts at which it throttles itself.
    pub power_limit: Option<f64>,
    /// Percent of the time that kernels ran, over the driver's last interval.
    pub busy: Option<u32>,
    /// Bytes of device memory in use, by anybody.
    pub memory_used: Option<u64>,
    /// Memory errors that were corrected since the last reset.
    pub corrected_errors: Option<u64>,
    /// Memory errors that were not, since the last reset.
    pub uncorrected_errors: Option<u64>,
    /// Whether rows of memory wait to be remapped, which needs a reset.
    pub reset_needed: Option<bool>,
}

/// What uses a device. What it does not tell is `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Usage {
    /// How it does.
    pub health: Health,
    /// Bytes of its memory.
    pub memory_bytes: Option<u64>,
    /// The processes that have it open to compute or to draw, by their IDs.
    pub processes: Option<Vec<Process>>,
}

/// A process that uses a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its ID.
    pub pid: u32,
    /// Bytes of the device's memory that it has.
    pub memory_bytes: Option<u64>,
}

/// What a device tells of itself now. What it does not tell is `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Telemetry {
    /// How it does.
    pub health: Health,
    /// Bytes of its memory.
    pub memory_bytes: Option<u64>,
    /// Percent of the highest speed that its first fan is to have.
    pub fan_percent: Option<u32>,
    /// MHz of the core, now and at most.
    pub core_clock: [Option<u32>; 2],
    /// MHz of the memory, now and at most.
    pub memory_clock: [Option<u32>; 2],
    /// Performance state, 0 for the fastest to 15.
    pub performance_state: Option<u32>,
    /// Packets that were sent again on PCI Express, since the driver has it.
    pub replays: Option<u32>,
    /// Why its clocks are held down, a bit for each reason (`nvmlClocksThrottleReasons`).
    pub throttle_reasons: Option<u64>,
}

/// What a device is, as its driver has it. What it does not tell is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// The product's name.
    pub name: Option<String>,
    /// Its generation, by NVML's number (`nvmlDeviceArchitecture_t`): 9 for Hopper.
    pub architecture: Option<u32>,
    /// Its compute capability, as 9 and 0.
    pub compute_capability: Option<(u32, u32)>,
}

/// What the device at a PCI address is.
///
/// # Errors
/// When the library is missing, or does not know the device.
pub fn identity(address: &str) -> Result<Identity> {
    let device = Device::at(address)?;
    Ok(Identity {
        name: device.name().ok(),
        architecture: device.architecture().ok(),
        compute_capability: device.compute_capability().ok(),
    })
}

/// What uses the device at a PCI address. It needs no context of CUDA, and takes no memory of the device.
///
/// # Errors
/// When the library is missing, or does not know the device.
pub fn usage(address: &str) -> Result<Usage> {
    let device = Device::at(address)?;
    Ok(Usage {
        health: health(&device),
        memory_bytes: device.memory().map(|(_, all)| all),
        processes: device.processes(),
    })
}

/// What the device at a PCI address tells of itself.
///
/// # Errors
/// When the library is missing, or does not know the device.
pub fn telemetry(address: &str) -> Result<Telemetry> {
    let device = Device::at(address)?;
    Ok(Telemetry {
        health: health(&device),
        memory_bytes: device.memory().map(|(_, all)| all),
        fan_percent: device.fan_speed().ok(),
        core_clock: [device.clock(CORE).ok(), device.max_clock(CORE).ok()],
        memory_clock: [device.clock(MEMORY).ok(), device.max_clock(MEMORY).ok()],
        performance_state: device.performance_state().ok().filter(|&state| state < 16),
        replays: device.replays().ok(),
        throttle_reasons: device.throttle_reasons().ok(),
    })
}

/// What a device does not tell (a consumer card has no ECC) is left out.
fn health(device: &Device) -> Health {
    let watts = |milliwatts: u32| f64::from(milliwatts) / 1e3;
    Health {
        temperature: device.temperature(CORE).ok(),
        power: device.power_usage().ok().map(watts),
        power_limit: device.enforced_power_limit().ok().map(watts),
        busy: device.busy(),
        memory_used: device.memory().map(|(used, _)| used),
        corrected_errors: device.memory_errors(0),
        uncorrected_errors: device.memory_errors(1),
        reset_needed: device.reset_needed(),
    }
}
