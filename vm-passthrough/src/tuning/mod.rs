//! What a GPU is set to, what it may be set to, and setting it: clocks, power limit, fan, performance level.
//!
//! ```text
//! Tuner ─▶ the function's lock ─▶ asleep, no driver, at a guest?  ─▶ refused
//!                                 within what the device says?    ─▶ written, by NVML or amdgpu's files
//!                                                                 ─▶ read back ─▶ put back where it differs
//! ```
//!
//! Nothing is left half done: what fails after something was written puts that back, and the error says what became of it. Each
//! access has a deadline, as a driver may hang; past it nothing more is tried, and the function's lock stays taken until the
//! access has ended.
//!
//! What is set lasts until it is set again, or the driver lets go of the GPU. [`telemetry`](crate::telemetry) only reads.

mod amdgpu;
mod error;
#[cfg(feature = "cuda")]
mod nvidia;
mod overdrive;
mod undo;

use std::time::{Duration, Instant};

pub use error::{Cause, TuningError};

use crate::claim::{Cancel, FunctionLock};
use crate::telemetry::{self, Interface, Mute, Source};
use crate::{DeviceType, Host, PciAddress, PciFunction, deadlines};

type Result<T, E = TuningError> = std::result::Result<T, E>;

/// What a GPU is set to, and what it may be set to. What can't be set on it, or is not told, is `None`.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Who tells and sets.
    pub source: Source,
    /// The core's clock.
    pub core_clock: Option<ClockSetting>,
    /// The memory's clock.
    pub memory_clock: Option<ClockSetting>,
    /// The power limit.
    pub power: Option<PowerSetting>,
    /// The fans.
    pub fan: Option<FanSetting>,
    /// Performance state by its driver's name: `P0` to `P15` of NVIDIA's, or amdgpu's forced level.
    pub performance_state: Option<String>,
    /// Whether the driver keeps what was set while nobody uses the GPU (NVIDIA's persistence mode).
    pub is_persistent: Option<bool>,
}

/// MHz of a clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClockSetting {
    /// Now.
    pub now: Option<u32>,
    /// The highest that it may have, as it is set. NVML does not tell.
    pub limit: Option<u32>,
    /// To what that may be set.
    pub allowed: Clocks,
}

/// MHz that a clock may be limited to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Clocks {
    /// Any from the first to the second.
    Range(u32, u32),
    /// One of these, in ascending order.
    Steps(Vec<u32>),
}

/// Watts that a GPU is limited to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PowerSetting {
    /// Now.
    pub limit: Option<f64>,
    /// By default.
    pub default: Option<f64>,
    /// The least that it may be.
    pub min: f64,
    /// The most that it may be.
    pub max: f64,
}

/// The fans of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FanSetting {
    /// Percent of the highest speed, of the first.
    pub percent: Option<u32>,
    /// Who drives them.
    pub mode: Option<FanMode>,
    /// The least percent that they may be set to.
    pub min: u32,
    /// The most percent that they may be set to.
    pub max: u32,
}

/// Who drives fans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "kebab-case")]
pub enum FanMode {
    /// The driver or the GPU, by temperature.
    Auto,
    /// They have the speed that was set.
    Fixed,
    /// Nobody: they run at full speed.
    Uncontrolled,
}

/// Levels that amdgpu can be told to keep (Linux `Documentation/gpu/amdgpu/thermal.rst`). Which of them a GPU has, it says when
/// it is told.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames, strum::EnumIter,
)]
#[strum(serialize_all = "snake_case")]
pub enum Level {
    /// By load.
    Auto,
    /// The lowest clocks.
    Low,
    /// The highest clocks.
    High,
    /// By load, between clocks that are set.
    Manual,
    /// Fixed clocks, to profile.
    ProfileStandard,
    /// The lowest clock of the core, to profile.
    ProfileMinSclk,
    /// The lowest clock of the memory, to profile.
    ProfileMinMclk,
    /// The highest clocks, to profile.
    ProfilePeak,
    /// A clock of the core that performance does not vary with.
    PerfDeterminism,
}

/// What is to be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The highest clocks that it may have, in MHz; the memory's is left as it is without one.
    Clocks {
        /// The core's.
        core: u32,
        /// The memory's.
        memory: Option<u32>,
    },
    /// Its own clocks again.
    DefaultClocks,
    /// Watts that it is limited to.
    Power(u32),
    /// Its own power limit again.
    DefaultPower,
    /// Percent of its fans' highest speed.
    Fan(u32),
    /// Fans are driven by temperature again.
    AutoFan,
    /// A performance level.
    Level(Level),
}

/// What can be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum Setting {
    /// The core's clock.
    #[strum(to_string = "core clock")]
    CoreClock,
    /// The memory's clock.
    #[strum(to_string = "memory clock")]
    MemoryClock,
    /// The power limit.
    #[strum(to_string = "power limit")]
    Power,
    /// The fans.
    Fan,
    /// The performance level.
    #[strum(to_string = "performance level")]
    Level,
}

/// What was set.
#[derive(Clone, Debug, PartialEq)]
pub struct Applied {
    /// What the GPU is set to now, as it was read back.
    pub settings: Settings,
    /// What else should be known.
    pub notes: Vec<String>,
}

/// By what a GPU is set.
enum By {
    Nvml,
    Amdgpu,
}

/// Sets one GPU.
#[derive(Clone, Debug)]
pub struct Tuner {
    host: Host,
    address: PciAddress,
    kind: DeviceType,
    /// How long one access is waited for.
    answer: Duration,
    /// How long a clock or a fan has to follow.
    settle: Duration,
    cancel: Cancel,
}

impl Tuner {
    /// One for `function`.
    pub fn new(host: &Host, function: &PciFunction) -> Self {
        Self {
            host: host.clone(),
            address: function.address,
            kind: function.device_type,
            answer: deadlines::DRIVERS,
            settle: deadlines::SETTLE,
            cancel: Cancel::default(),
        }
    }

    /// The same, that waits `answer` for one access, and `settle` for a clock or a fan to follow.
    #[must_use]
    pub fn with_deadlines(self, answer: Duration, settle: Duration) -> Self {
        Self { answer, settle, ..self }
    }

    /// The same, that sets nothing once that was asked for. What it has begun then, it ends.
    #[must_use]
    pub fn with_cancel(self, cancel: Cancel) -> Self {
        Self { cancel, ..self }
    }

    /// What it is set to, and what it may be set to. It is not woken for that.
    ///
    /// # Errors
    /// When nobody can be asked, or the driver does not answer.
    pub fn settings(&self) -> Result<Settings> {
        match self.by()? {
            By::Amdgpu => amdgpu::Amdgpu::new(self, None).settings(),
            By::Nvml => self.nvml_settings(),
        }
    }

    /// Sets it, and reads it back.
    ///
    /// # Errors
    /// When it can't be set now, is to be set to what it can't be, or the driver refuses or does not answer. What was written is
    /// put back then.
    pub fn apply(&self, change: Change) -> Result<Applied> {
        // Before anything is written, even a lock.
        self.by()?;
        let lock = FunctionLock::take(&self.host, self.address, self.answer)?;
        let lock = lock.ok_or(TuningError::Busy { address: self.address, deadline: self.answer })?;
        if self.cancel.is_requested() {
            return Err(TuningError::Cancelled(self.address));
        }
        let notes = match self.by()? {
            By::Amdgpu => amdgpu::Amdgpu::new(self, Some(&lock)).apply(change)?,
            By::Nvml => self.nvml_apply(change, &lock)?,
        };
        let unread = |error| TuningError::Unread {
            address: self.address,
            why: match error {
                TuningError::Failed { cause, .. } => cause.to_string(),
                error => error.to_string(),
            },
        };
        Ok(Applied { settings: self.settings().map_err(unread)?, notes })
    }

    /// By what it is set, as things are now.
    fn by(&self) -> Result<By> {
        let address = self.address;
        if !self.host.pci_device(address).exists() {
            return Err(TuningError::Gone(address));
        }
        let (why, remedy) = match telemetry::interface(&self.host, address, self.kind) {
            Ok(Interface::Amdgpu) => return Ok(By::Amdgpu),
            Ok(Interface::Nvml) => return Ok(By::Nvml),
            Ok(Interface::Hwmon(driver)) => {
                (format!("the driver {driver} has it"), "only nvidia and amdgpu can be told to set something")
            }
            Err(mute) => (
                mute.to_string(),
                match mute {
                    Mute::Asleep => {
                        "start what uses it, or keep it awake: echo on > power/control in its directory"
                    }
                    Mute::NoDriver => "load its driver, nvidia or amdgpu",
                    Mute::Vfio(_) => "release it from its guest, or set it there",
                    Mute::OnlyFiles => "set it on the machine that has it",
                    Mute::NoCuda => "or use nvidia-smi",
                },
            ),
        };
        Err(TuningError::NotSettable { address, why, remedy })
    }

    #[cfg(feature = "cuda")]
    fn nvml_settings(&self) -> Result<Settings> {
        nvidia::Nvidia::new(self, None).settings()
    }

    #[cfg(feature = "cuda")]
    fn nvml_apply(&self, change: Change, lock: &FunctionLock) -> Result<Vec<String>> {
        nvidia::Nvidia::new(self, Some(lock)).apply(change)
    }

    #[cfg(not(feature = "cuda"))]
    fn nvml_settings(&self) -> Result<Settings> {
        Err(self.no_cuda())
    }

    #[cfg(not(feature = "cuda"))]
    fn nvml_apply(&self, _: Change, _: &FunctionLock) -> Result<Vec<String>> {
        Err(self.no_cuda())
    }

    #[cfg(not(feature = "cuda"))]
    fn no_cuda(&self) -> TuningError {
        let (address, why) = (self.address, Mute::NoCuda.to_string());
        TuningError::NotSettable { address, why, remedy: "or use nvidia-smi" }
    }

    fn not_offered(&self, setting: Setting, why: impl Into<String>) -> TuningError {
        TuningError::NotOffered { address: self.address, setting, why: why.into() }
    }

    /// Whether a clock may be limited to this.
    fn check_clock(&self, setting: Setting, clocks: &Clocks, mhz: u32) -> Result<()> {
        let allowed = match clocks {
            Clocks::Range(min, max) if (*min..=*max).contains(&mhz) => return Ok(()),
            Clocks::Steps(steps) if steps.contains(&mhz) => return Ok(()),
            Clocks::Range(min, max) => format!("it may be from {min} to {max} MHz"),
            Clocks::Steps(steps) => nearest(steps, mhz),
        };
        Err(self.out_of_range(setting, format!("{mhz} MHz"), allowed))
    }

    /// Whether the power may be limited to this.
    fn check_power(&self, power: &PowerSetting, watts: u32) -> Result<()> {
        match (power.min..=power.max).contains(&f64::from(watts)) {
            true => Ok(()),
            false => {
                let allowed = format!("it may be from {} to {} W", power.min, power.max);
                Err(self.out_of_range(Setting::Power, format!("{watts} W"), allowed))
            }
        }
    }

    /// Whether fans may be set to this.
    fn check_fan(&self, fan: &FanSetting, percent: u32) -> Result<()> {
        match (fan.min..=fan.max).contains(&percent) {
            true => Ok(()),
            false => {
                let allowed =
                    format!("it may be from {} to {} %, or driven by temperature (auto)", fan.min, fan.max);
                Err(self.out_of_range(Setting::Fan, format!("{percent} %"), allowed))
            }
        }
    }

    fn out_of_range(&self, setting: Setting, wanted: String, allowed: String) -> TuningError {
        TuningError::OutOfRange { address: self.address, setting, wanted, allowed }
    }

    /// Looks until what is seen is as it should be, and answers what was seen last.
    fn settled<T>(
        &self,
        mut look: impl FnMut() -> Result<T, Cause>,
        is: impl Fn(&T) -> bool,
    ) -> Result<T, Cause> {
        const POLL: Duration = Duration::from_millis(50);
        let until = Instant::now() + self.settle;
        loop {
            let seen = look()?;
            let left = until.saturating_duration_since(Instant::now());
            if is(&seen) || left.is_zero() {
                return Ok(seen);
            }
            std::thread::sleep(POLL.min(left));
        }
    }
}

/// What is said of a clock that is not among those that there are.
fn nearest(steps: &[u32], mhz: u32) -> String {
    const FEW: usize = 12;
    let text = |steps: &[u32]| steps.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let at = steps.partition_point(|&step| step < mhz);
    match steps {
        [] => "it has none".into(),
        _ if steps.len() <= FEW => format!("it may be one of {} MHz", text(steps)),
        [min, .., max] if at == 0 || at == steps.len() => {
            format!("it may be one of {} clocks from {min} to {max} MHz", steps.len())
        }
        _ => format!("it may be one of {} clocks, of which {} MHz are next to that", steps.len(), {
            text(&steps[at - 1..=at])
        }),
    }
}

/// What is said of a GPU whose fan is fixed.
const FAN_NOTE: &str = "its driver does not raise it any more when the GPU gets hot: watch it with `vm-service egpu monitor`, and give it back \
     with `vm-service egpu config fan auto`";

#[cfg(test)]
mod tests;
