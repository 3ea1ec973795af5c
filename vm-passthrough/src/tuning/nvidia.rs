//! Sets a GPU of the driver nvidia by its management library (NVML).

use std::fmt::Display;
use std::sync::mpsc::{RecvTimeoutError, channel};

use vm_runtime::Error;
use vm_runtime::nvml::{self, ClockLimits, Controls, FanLimits};

use super::undo::Undo;
use super::{
    Cause, Change, ClockSetting, Clocks, FAN_NOTE, FanMode, FanSetting, PowerSetting, Result, Setting,
    Settings, Tuner, TuningError,
};
use crate::claim::FunctionLock;
use crate::telemetry::Source;

/// How far above what it is limited to a clock may read, in MHz: it is rounded to steps, of 15 MHz as a rule.
const NEAR: u32 = 30;

/// A GPU of NVIDIA's driver.
pub(super) struct Nvidia<'a> {
    tuner: &'a Tuner,
    /// Held by who writes.
    lock: Option<&'a FunctionLock>,
}

impl<'a> Nvidia<'a> {
    pub(super) fn new(tuner: &'a Tuner, lock: Option<&'a FunctionLock>) -> Self {
        Self { tuner, lock }
    }

    pub(super) fn settings(&self) -> Result<Settings> {
        Ok(settings(self.controls()?))
    }

    pub(super) fn apply(&self, change: Change) -> Result<Vec<String>> {
        let before = self.controls()?;
        let set_something = !matches!(change, Change::DefaultClocks | Change::DefaultPower | Change::AutoFan);
        let mut notes = match change {
            Change::Clocks { core, memory } => self.set_clocks(&before, core, memory)?,
            Change::DefaultClocks => self.reset_clocks()?,
            Change::Power(watts) => self.set_power(&before, Some(watts))?,
            Change::DefaultPower => self.set_power(&before, None)?,
            Change::Fan(percent) => self.set_fans(&before, Some(percent))?,
            Change::AutoFan => self.set_fans(&before, None)?,
            Change::Level(_) => {
                return Err(self.tuner.not_offered(
                    Setting::Level,
                    "NVIDIA's driver chooses performance states (P0 to P15) by load, and NVML has nothing to set one; limit its clocks: \
                     `vm-service egpu config clock MHZ`, or its power: `vm-service egpu config power WATTS`",
                ));
            }
        };
        if set_something && before.is_persistent == Some(false) {
            notes.push(
                "the driver forgets it once nobody uses the GPU: run nvidia-persistenced, or `nvidia-smi -pm 1`, to keep it".into(),
            );
        }
        Ok(notes)
    }

    fn controls(&self) -> Result<Controls> {
        self.call(None, nvml::controls).map_err(|cause| TuningError::Failed {
            address: self.tuner.address,
            what: "ask NVML what it is set to".into(),
            cause: cause.into(),
            after: "nothing was changed".into(),
        })
    }

    /// Calls NVML on a thread, which is left behind at the deadline. It shares the function's lock as long as it lives.
    fn call<T: Send + 'static>(
        &self,
        setting: Option<Setting>,
        call: impl FnOnce(&str) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Cause> {
        let refused = |reason: String, remedy: &str| Cause::Refused {
            by: "NVML".into(),
            reason,
            remedy: remedy.into(),
        };
        let no_more = |error: std::io::Error| refused(error.to_string(), "end other processes of this user");
        let lock = self.lock.map(|lock| lock.file().try_clone_to_owned()).transpose().map_err(no_more)?;
        let (address, answer) = (self.tuner.address.to_string(), self.tuner.answer);
        let (send, receive) = channel();
        let work = move || {
            let result = call(&address);
            drop(lock);
            let _ = send.send(result);
        };
        std::thread::Builder::new()
            .name(format!("nvml {}", self.tuner.address))
            .spawn(work)
            .map_err(no_more)?;
        match receive.recv_timeout(answer) {
            Ok(result) => result.map_err(|error| cause(setting, error)),
            Err(RecvTimeoutError::Timeout) => Err(Cause::NoAnswer(answer)),
            Err(RecvTimeoutError::Disconnected) => {
                Err(refused("the thread that asked it has panicked".into(), ""))
            }
        }
    }

    /// Calls what sets something, and logs it.
    fn set(
        &self,
        what: impl Display,
        setting: Setting,
        call: impl FnOnce(&str) -> Result<(), Error> + Send + 'static,
    ) -> Result<(), Cause> {
        tracing::info!(address = %self.tuner.address, "NVML: {what}");
        self.call(Some(setting), call)
    }

    fn set_clocks(&self, before: &Controls, core: u32, memory: Option<u32>) -> Result<Vec<String>> {
        let tuner = self.tuner;
        let check = |setting, limits: &Option<ClockLimits>, mhz| match limits {
            Some(limits) => {
                tuner.check_clock(setting, &clock(limits.clone()).allowed, mhz).map(|()| lowest(limits))
            }
            None => {
                Err(tuner.not_offered(setting, format!("NVML tells of no clock; {}", unsupported(setting))))
            }
        };
        let core_min = check(Setting::CoreClock, &before.core_clock, core)?;
        let memory = match memory {
            Some(mhz) => Some((check(Setting::MemoryClock, &before.memory_clock, mhz)?, mhz)),
            None => None,
        };
        let mut undo = Undo::default();
        let result = (|| {
            // The memory first: fewer GPUs take that, and what the core was locked to, NVML does not tell.
            if let Some((min, mhz)) = memory {
                let what = format_args!("keep the memory clock from {min} to {mhz} MHz");
                self.set(what, Setting::MemoryClock, move |at| nvml::lock_memory_clock(at, min, mhz))?;
                undo.push("its memory clock is not limited any more", || self.unlock(Setting::MemoryClock));
            }
            let what = format_args!("keep the core clock from {core_min} to {core} MHz");
            self.set(what, Setting::CoreClock, move |at| nvml::lock_core_clock(at, core_min, core))?;
            undo.push("its core clock is not limited any more", || self.unlock(Setting::CoreClock));
            let wanted = [Some(core), memory.map(|(_, mhz)| mhz)];
            let over = |now: &[Option<u32>; 2]| {
                let pairs = now.iter().zip(wanted);
                let over = |(now, most): (&Option<u32>, Option<u32>)| {
                    Some(((*now)?, most?)).filter(|(now, most)| *now > most.saturating_add(NEAR))
                };
                pairs.filter_map(over).next()
            };
            let now = tuner.settled(|| self.clocks_now(), |now| over(now).is_none())?;
            match over(&now) {
                None => Ok(()),
                Some((now, most)) => Err(Cause::NotTaken {
                    wanted: format!("{most} MHz at most"),
                    found: format!("{now} MHz"),
                }),
            }
        })();
        undo.finish(tuner.address, "set its clocks", result)?;
        Ok(Vec::new())
    }

    /// Of the core and of the memory.
    fn clocks_now(&self) -> Result<[Option<u32>; 2], Cause> {
        self.call(None, nvml::telemetry).map(|told| [told.core_clock[0], told.memory_clock[0]])
    }

    fn unlock(&self, setting: Setting) -> Result<(), Cause> {
        self.set(format_args!("limit the {setting} no more"), setting, move |at| match setting {
            Setting::MemoryClock => nvml::unlock_memory_clock(at),
            _ => nvml::unlock_core_clock(at),
        })
    }

    fn reset_clocks(&self) -> Result<Vec<String>> {
        let mut undo = Undo::default();
        let result = (|| {
            self.unlock(Setting::CoreClock)?;
            // What it was limited to, NVML does not tell.
            undo.push("its core clock is not limited any more", || Ok(()));
            self.set("limit the memory clock no more", Setting::MemoryClock, |at| {
                match nvml::unlock_memory_clock(at) {
                    // One that can't be limited is not.
                    Err(error) if code(&error) == Some(NOT_SUPPORTED) => Ok(()),
                    result => result,
                }
            })
        })();
        undo.finish(self.tuner.address, "reset its clocks", result)?;
        Ok(Vec::new())
    }

    /// Limits the power; to its default without watts.
    fn set_power(&self, before: &Controls, watts: Option<u32>) -> Result<Vec<String>> {
        let tuner = self.tuner;
        let not_offered = |why: &str| tuner.not_offered(Setting::Power, why);
        let limits = before.power.filter(|power| power.min <= power.max);
        let Some(limits) = limits else {
            return Err(not_offered(&format!("NVML tells no range of it; {}", unsupported(Setting::Power))));
        };
        let milliwatts = match watts {
            Some(watts) => {
                tuner.check_power(&power(limits), watts)?;
                // Within what 32 bits say.
                watts.saturating_mul(1000)
            }
            None => limits
                .default
                .ok_or_else(|| not_offered("NVML does not tell its default; say how many watts"))?,
        };
        let mut undo = Undo::default();
        let result = (|| {
            let set = |milliwatts: u32| {
                let what = format_args!("limit the power to {milliwatts} mW");
                self.set(what, Setting::Power, move |at| nvml::set_power_limit(at, milliwatts))
            };
            set(milliwatts)?;
            if let Some(now) = limits.now {
                undo.push(format!("its power limit is {} W again", f64::from(now) / 1e3), move || set(now));
            }
            match self.call(None, nvml::controls)?.power.and_then(|power| power.now) {
                Some(now) if now.abs_diff(milliwatts) < 1000 => Ok(()),
                found => {
                    let watts = |milliwatts: u32| format!("{} W", f64::from(milliwatts) / 1e3);
                    Err(Cause::NotTaken {
                        wanted: watts(milliwatts),
                        found: found.map_or_else(|| "nothing".into(), watts),
                    })
                }
            }
        })();
        undo.finish(tuner.address, "set its power limit", result)?;
        Ok(Vec::new())
    }

    /// Sets all fans; without a speed the driver drives them again.
    fn set_fans(&self, before: &Controls, percent: Option<u32>) -> Result<Vec<String>> {
        let tuner = self.tuner;
        let Some(limits) = before.fan.as_ref().filter(|limits| !limits.fans.is_empty()) else {
            return Err(
                tuner.not_offered(Setting::Fan, format!("NVML tells of none; {}", unsupported(Setting::Fan)))
            );
        };
        if let Some(percent) = percent {
            tuner.check_fan(&fan(limits), percent)?;
        }
        let set = |index: u32, percent: Option<u32>| {
            let to = percent.map_or("by temperature".into(), |percent| format!("at {percent} %"));
            self.set(format_args!("run fan {index} {to}"), Setting::Fan, move |at| {
                nvml::set_fan(at, index, percent)
            })
        };
        let mut undo = Undo::default();
        let result = (|| {
            for (index, fan) in (0..).zip(&limits.fans) {
                set(index, percent)?;
                let former = fan.percent.filter(|_| fan.is_automatic == Some(false));
                let back = match former {
                    Some(percent) => format!("its fan {index} is at {percent} % again"),
                    None => format!("its fan {index} is driven by temperature again"),
                };
                undo.push(back, move || set(index, former));
            }
            let now = self.call(None, nvml::controls)?.fan.map(|limits| limits.fans).unwrap_or_default();
            for (index, fan) in now.iter().enumerate() {
                let is = match percent {
                    Some(percent) => {
                        fan.percent.is_none_or(|now| now == percent) && fan.is_automatic != Some(true)
                    }
                    None => fan.is_automatic != Some(false),
                };
                if !is {
                    let text = |percent: Option<u32>| {
                        percent.map_or("driven by temperature".into(), |of| format!("{of} %"))
                    };
                    let found = text(fan.percent.filter(|_| fan.is_automatic != Some(true)));
                    return Err(Cause::NotTaken {
                        wanted: text(percent),
                        found: format!("{found} of fan {index}"),
                    });
                }
            }
            Ok(())
        })();
        undo.finish(tuner.address, "set its fans", result)?;
        Ok(percent.map(|_| FAN_NOTE.into()).into_iter().collect())
    }
}

fn settings(told: Controls) -> Settings {
    Settings {
        source: Source::Nvml,
        core_clock: told.core_clock.map(clock),
        memory_clock: told.memory_clock.map(clock),
        power: told.power.filter(|limits| limits.min <= limits.max).map(power),
        fan: told.fan.as_ref().filter(|limits| !limits.fans.is_empty()).map(fan),
        performance_state: told.performance_state.map(|state| format!("P{state}")),
        is_persistent: told.is_persistent,
    }
}

fn clock(limits: ClockLimits) -> ClockSetting {
    let ClockLimits { now, clocks, max } = limits;
    let allowed = if clocks.is_empty() { Clocks::Range(1, max) } else { Clocks::Steps(clocks) };
    ClockSetting { now, limit: None, allowed }
}

/// The lowest clock that one is left when it is limited.
fn lowest(limits: &ClockLimits) -> u32 {
    limits.clocks.first().copied().unwrap_or(0)
}

fn power(limits: nvml::PowerLimits) -> PowerSetting {
    let watts = |milliwatts: u32| f64::from(milliwatts) / 1e3;
    PowerSetting {
        limit: limits.now.map(watts),
        default: limits.default.map(watts),
        min: watts(limits.min),
        max: watts(limits.max),
    }
}

fn fan(limits: &FanLimits) -> FanSetting {
    let first = limits.fans.first().copied().unwrap_or_default();
    let mode = first.is_automatic.map(|is| if is { FanMode::Auto } else { FanMode::Fixed });
    FanSetting { percent: first.percent, mode, min: limits.min, max: limits.max.min(100) }
}

/// What it means that NVML does not support a setting.
fn unsupported(setting: Setting) -> &'static str {
    match setting {
        Setting::CoreClock => "clocks can be limited from Volta on, and not on every board",
        Setting::MemoryClock => {
            "the memory's clock can be limited from Ampere on, and not on every card for consumers: leave it out, and limit the core's alone"
        }
        Setting::Power => {
            "it is fixed on GPUs of laptops and on some cards for consumers: limit the core's clock, with `vm-service egpu config clock MHZ`"
        }
        Setting::Fan => "its board drives them by itself, or it has none, as GPUs of servers",
        Setting::Level => "NVML has nothing to set it",
    }
}

/// `NVML_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: i64 = 3;

/// NVML's own number of an error.
fn code(error: &Error) -> Option<i64> {
    match error {
        Error::Driver { code, .. } => Some(*code),
        _ => None,
    }
}

/// What NVML's error means for a setting.
fn cause(setting: Option<Setting>, error: Error) -> Cause {
    let Error::Driver { call, code, message, .. } = error else {
        return Cause::Refused { by: "NVML".into(), reason: error.to_string(), remedy: String::new() };
    };
    // Numbers of nvmlReturn_t.
    let remedy = match (code, setting) {
        (2, _) => "the GPU does not take this value",
        (NOT_SUPPORTED, Some(setting)) => unsupported(setting),
        (4, _) => "be root; in a container or a guest, do it on its host",
        (8, _) => "see whether its power cables are plugged in",
        (10 | 15, _) => {
            "it may have fallen off the bus: `vm-service egpu diag` says more of one in an enclosure, and `vm-service egpu reset \
             --reconnect` may bring it back"
        }
        (13, _) => "install a newer driver",
        (16, _) => "it needs a reset: `nvidia-smi --gpu-reset`",
        (19, _) => "end what uses it; `vm-service list --usage` names it",
        _ => "dmesg may say why",
    };
    Cause::Refused { by: call.into(), reason: format!("{message} ({code})"), remedy: remedy.into() }
}
