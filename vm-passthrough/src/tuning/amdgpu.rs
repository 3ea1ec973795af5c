//! Sets a GPU of amdgpu by its files in sysfs (Linux `Documentation/gpu/amdgpu/thermal.rst`).

use std::io;
use std::path::{Path, PathBuf};

use super::overdrive::{Highest, Levels, Overdrive, overdrive};
use super::undo::Undo;
use super::{
    Cause, Change, ClockSetting, Clocks, FAN_NOTE, FanMode, FanSetting, Level, PowerSetting, Result, Setting,
    Settings, Tuner, TuningError,
};
use crate::claim::FunctionLock;
use crate::telemetry::{self, Source};

const LEVEL: &str = "power_dpm_force_performance_level";
const OVERDRIVE: &str = "pp_od_clk_voltage";
/// Where the levels of the core's clock are, and of the memory's.
const LEVELS: [(Setting, &str); 2] =
    [(Setting::CoreClock, "pp_dpm_sclk"), (Setting::MemoryClock, "pp_dpm_mclk")];

const MANUAL: &str = "manual";
/// Values of `pwm1_enable`.
const FULL_SPEED: &str = "0";
const FIXED: &str = "1";
const AUTO: &str = "2";

/// A GPU of amdgpu.
pub(super) struct Amdgpu<'a> {
    tuner: &'a Tuner,
    dir: PathBuf,
    /// Its hwmon's directory.
    sensors: PathBuf,
    /// Held by who writes.
    lock: Option<&'a FunctionLock>,
}

impl<'a> Amdgpu<'a> {
    pub(super) fn new(tuner: &'a Tuner, lock: Option<&'a FunctionLock>) -> Self {
        let dir = tuner.host.pci_device(tuner.address);
        let sensors = telemetry::sensors(&dir).unwrap_or_else(|| dir.join("hwmon"));
        Self { tuner, dir, sensors, lock }
    }

    pub(super) fn settings(&self) -> Result<Settings> {
        self.ask("read what it is set to", || {
            let [core_clock, memory_clock] = self.clocks()?;
            Ok(Settings {
                source: Source::Amdgpu,
                core_clock,
                memory_clock,
                power: self.power()?,
                fan: self.fan()?,
                performance_state: self.read(&self.dir.join(LEVEL))?,
                is_persistent: None,
            })
        })
    }

    pub(super) fn apply(&self, change: Change) -> Result<Vec<String>> {
        match change {
            Change::Clocks { core, memory } => self.set_clocks(core, memory),
            Change::DefaultClocks => self.reset_clocks(),
            Change::Power(watts) => self.set_power(Some(watts)),
            Change::DefaultPower => self.set_power(None),
            Change::Fan(percent) => self.set_fan(percent),
            Change::AutoFan => self.release_fan(),
            Change::Level(level) => self.set_level(level),
        }
    }

    /// Text of a file without the white space around; `None` where it can't be read.
    fn read(&self, path: &Path) -> Result<Option<String>, Cause> {
        match self.tuner.host.writer().read(path, self.tuner.answer) {
            Ok(text) => Ok(Some(text.trim().to_owned())),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(Cause::NoAnswer(self.tuner.answer)),
            Err(_) => Ok(None),
        }
    }

    fn number(&self, path: &Path) -> Result<Option<u64>, Cause> {
        Ok(self.read(path)?.and_then(|text| text.parse().ok()))
    }

    fn write(&self, path: &Path, value: &str) -> Result<(), Cause> {
        tracing::info!(address = %self.tuner.address, "write {value} to {}", path.display());
        let (writer, answer) = (self.tuner.host.writer(), self.tuner.answer);
        let written = match self.lock {
            Some(lock) => writer.write_locked(path, value, answer, lock.file()),
            None => writer.write(path, value, answer),
        };
        written.map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => Cause::NoAnswer(answer),
            _ => Cause::Refused {
                by: path.display().to_string(),
                remedy: remedy(&error).into(),
                reason: error.to_string(),
            },
        })
    }

    /// Whether a file reads as it was written.
    fn verify(&self, path: &Path, wanted: &str) -> Result<(), Cause> {
        match self.read(path)? {
            Some(found) if found == wanted => Ok(()),
            found => Err(not_taken(wanted, found)),
        }
    }

    /// Does what only reads.
    fn ask<T>(&self, what: &str, ask: impl FnOnce() -> Result<T, Cause>) -> Result<T> {
        ask().map_err(|cause| TuningError::Failed {
            address: self.tuner.address,
            what: what.into(),
            cause: cause.into(),
            after: "nothing was changed".into(),
        })
    }

    fn table(&self) -> Result<Overdrive, Cause> {
        Ok(self.read(&self.dir.join(OVERDRIVE))?.map_or(Overdrive::Off, |text| overdrive(&text)))
    }

    fn levels(&self, file: &str) -> Result<Levels, Cause> {
        Ok(self.read(&self.dir.join(file))?.map_or_else(Levels::default, |text| Levels::parse(&text)))
    }

    /// Of the core and of the memory.
    fn clocks(&self) -> Result<[Option<ClockSetting>; 2], Cause> {
        let table = self.table()?;
        let setting = |index: usize| {
            let levels = self.levels(LEVELS[index].1)?;
            Ok(match table {
                Overdrive::Clocks { core, memory } => [core, memory][index].map(|clock| ClockSetting {
                    now: levels.now,
                    limit: Some(clock.now),
                    allowed: Clocks::Range(clock.min, clock.max),
                }),
                Overdrive::Off if is_chosen(index, &levels) => {
                    Some(ClockSetting { now: levels.now, limit: None, allowed: Clocks::Steps(levels.mhz()) })
                }
                _ => None,
            })
        };
        Ok([setting(0)?, setting(1)?])
    }

    fn set_clocks(&self, core: u32, memory: Option<u32>) -> Result<Vec<String>> {
        let wanted: Vec<(usize, u32)> = [Some(core), memory]
            .into_iter()
            .enumerate()
            .filter_map(|(index, mhz)| Some((index, mhz?)))
            .collect();
        let (table, clocks) = self.ask("read its clocks", || Ok((self.table()?, self.clocks()?)))?;
        for &(index, mhz) in &wanted {
            let setting = LEVELS[index].0;
            match &clocks[index] {
                Some(clock) => self.tuner.check_clock(setting, &clock.allowed, mhz)?,
                None => return Err(self.tuner.not_offered(setting, why_no_clock(table))),
            }
        }
        match table {
            Overdrive::Clocks { core, memory } => self.edit(&[core, memory], &wanted),
            _ => self.choose(&wanted),
        }
    }

    /// Has the performance level be `manual`, as clocks are only taken then; what it was before.
    fn begin<'b>(&'b self, undo: &mut Undo<'b>) -> Result<Option<String>, Cause> {
        let path = self.dir.join(LEVEL);
        let before = self.read(&path)?;
        if before.as_deref() != Some(MANUAL) {
            self.write(&path, MANUAL)?;
            if let Some(before) = before.clone() {
                let back = format!("its performance level is {before} again");
                let path = path.clone();
                undo.push(back, move || self.write(&path, &before));
            }
            self.verify(&path, MANUAL)?;
        }
        Ok(before)
    }

    /// Edits the table of OverDrive, in which all clocks change at once.
    fn edit(&self, now: &[Option<Highest>; 2], wanted: &[(usize, u32)]) -> Result<Vec<String>> {
        let path = &self.dir.join(OVERDRIVE);
        let mut undo = Undo::default();
        let mut before = None;
        let result = (|| {
            before = self.begin(&mut undo)?;
            for (done, &(index, mhz)) in wanted.iter().enumerate() {
                let letter = ["s", "m"][index];
                self.write(path, &format!("{letter} 1 {mhz}"))?;
                if done == 0 {
                    undo.push("", move || self.write(path, "c"));
                }
                if let Some(old) = now[index] {
                    let back = format!("its {} is at most {} MHz again", LEVELS[index].0, old.now);
                    undo.push(back, move || self.write(path, &format!("{letter} 1 {}", old.now)));
                }
            }
            self.write(path, "c")?;
            let found = match self.table()? {
                Overdrive::Clocks { core, memory } => {
                    [core, memory].map(|clock| clock.map(|clock| clock.now))
                }
                _ => [None; 2],
            };
            match wanted.iter().find(|&&(index, mhz)| found[index] != Some(mhz)) {
                None => Ok(()),
                Some(&(index, mhz)) => {
                    Err(not_taken(&format!("{mhz} MHz"), found[index].map(|found| format!("{found} MHz"))))
                }
            }
        })();
        undo.finish(self.tuner.address, "set its clocks", result)?;
        Ok(manual_note(before.as_deref()))
    }

    /// Enables only levels up to those that are wanted.
    fn choose(&self, wanted: &[(usize, u32)]) -> Result<Vec<String>> {
        let mut undo = Undo::default();
        let mut before = None;
        let result = (|| {
            before = self.begin(&mut undo)?;
            for &(index, mhz) in wanted {
                let (setting, file) = LEVELS[index];
                let (path, levels) = (self.dir.join(file), self.levels(file)?);
                self.write(&path, &levels.up_to(mhz))?;
                // Otherwise the former level enables them all.
                if before.as_deref() == Some(MANUAL) {
                    let back = format!("all levels of its {setting} are enabled again");
                    undo.push(back, move || self.write(&path, &levels.up_to(u32::MAX)));
                }
            }
            for &(index, mhz) in wanted {
                let look = || Ok(self.levels(LEVELS[index].1)?.now);
                match self.tuner.settled(look, |now| now.is_none_or(|now| now <= mhz))? {
                    Some(now) if now > mhz => {
                        return Err(not_taken(&format!("{mhz} MHz at most"), Some(format!("{now} MHz"))));
                    }
                    _ => {}
                }
            }
            Ok(())
        })();
        undo.finish(self.tuner.address, "set its clocks", result)?;
        Ok(manual_note(before.as_deref()))
    }

    fn reset_clocks(&self) -> Result<Vec<String>> {
        let table = self.ask("read its clocks", || self.table())?;
        let (path, level) = (&self.dir.join(OVERDRIVE), &self.dir.join(LEVEL));
        let auto = Level::Auto.to_string();
        let mut undo = Undo::default();
        let result = (|| {
            let before = match table {
                Overdrive::Off => self.read(level)?,
                _ => Some(self.reset_table(table, path, &mut undo)?),
            };
            self.write(level, &auto)?;
            if let Some(before) = before {
                let back = match table {
                    Overdrive::Off => format!("its performance level is {before} again"),
                    _ => String::new(),
                };
                undo.push(back, move || self.write(level, &before));
            }
            self.verify(level, &auto)
        })();
        undo.finish(self.tuner.address, "reset its clocks", result)?;
        Ok(Vec::new())
    }

    /// Resets the table of OverDrive; the performance level that it has then, in which edits are taken.
    fn reset_table<'b>(
        &'b self,
        table: Overdrive,
        path: &'b Path,
        undo: &mut Undo<'b>,
    ) -> Result<String, Cause> {
        self.begin(undo)?;
        self.write(path, "r")?;
        undo.push("", move || self.write(path, "c"));
        if let Overdrive::Clocks { core, memory } = table {
            for (index, clock) in [core, memory].into_iter().enumerate() {
                let Some(Highest { now, .. }) = clock else { continue };
                let back = format!("its {} is at most {now} MHz again", LEVELS[index].0);
                let letter = ["s", "m"][index];
                undo.push(back, move || self.write(path, &format!("{letter} 1 {now}")));
            }
        }
        self.write(path, "c")?;
        Ok(MANUAL.into())
    }

    fn power(&self) -> Result<Option<PowerSetting>, Cause> {
        let watts =
            |name| Ok(self.number(&self.sensors.join(name))?.map(|microwatts| microwatts as f64 / 1e6));
        let (min, max) = (watts("power1_cap_min")?, watts("power1_cap_max")?);
        let (Some(limit), Some(min), Some(max)) = (watts("power1_cap")?, min, max) else { return Ok(None) };
        let power = PowerSetting { limit: Some(limit), default: watts("power1_cap_default")?, min, max };
        Ok((min <= max).then_some(power))
    }

    /// Limits the power; to its default without watts.
    fn set_power(&self, watts: Option<u32>) -> Result<Vec<String>> {
        let tuner = self.tuner;
        let dir = self.sensors.display();
        let Some(power) = self.ask("read its power limit", || self.power())? else {
            let why = format!(
                "amdgpu tells of none, or not of its range, in {dir} (power1_cap, power1_cap_min, power1_cap_max)"
            );
            return Err(tuner.not_offered(Setting::Power, why));
        };
        let microwatts = match watts {
            Some(watts) => {
                tuner.check_power(&power, watts)?;
                u64::from(watts) * 1_000_000
            }
            None => {
                let default = self
                    .ask("read its power limit", || self.number(&self.sensors.join("power1_cap_default")))?;
                let default = default
                    .filter(|_| power.default.is_some_and(|watts| (power.min..=power.max).contains(&watts)));
                default.ok_or_else(|| {
                    let why = format!(
                        "amdgpu does not tell its default in {dir} (power1_cap_default); say how many watts"
                    );
                    tuner.not_offered(Setting::Power, why)
                })?
            }
        };
        let path = &self.sensors.join("power1_cap");
        let mut undo = Undo::default();
        let result = (|| {
            let before = self.read(path)?;
            self.write(path, &microwatts.to_string())?;
            if let (Some(before), Some(limit)) = (before, power.limit) {
                undo.push(format!("its power limit is {limit} W again"), move || self.write(path, &before));
            }
            // The driver keeps whole watts.
            match self.number(path)? {
                Some(found) if found.abs_diff(microwatts) < 1_000_000 => Ok(()),
                found => {
                    let watts = |microwatts: u64| format!("{} W", microwatts as f64 / 1e6);
                    Err(not_taken(&watts(microwatts), found.map(watts)))
                }
            }
        })();
        undo.finish(tuner.address, "set its power limit", result)?;
        Ok(Vec::new())
    }

    /// Steps of a fan's speed up to the highest.
    fn fan_steps(&self) -> Result<(u64, u64), Cause> {
        const MOST: u64 = 255;
        let max = self.number(&self.sensors.join("pwm1_max"))?.filter(|max| (1..=MOST).contains(max));
        let max = max.unwrap_or(MOST);
        Ok((self.number(&self.sensors.join("pwm1_min"))?.unwrap_or(0).min(max), max))
    }

    fn fan(&self) -> Result<Option<FanSetting>, Cause> {
        let (min, max) = self.fan_steps()?;
        let Some(mode) = self.read(&self.sensors.join("pwm1_enable"))? else { return Ok(None) };
        let Some(pwm) = self.number(&self.sensors.join("pwm1"))? else { return Ok(None) };
        let percent = |pwm: u64| ((pwm.min(max) * 100 + max / 2) / max) as u32;
        let mode = match mode.as_str() {
            FULL_SPEED => Some(FanMode::Uncontrolled),
            FIXED => Some(FanMode::Fixed),
            AUTO => Some(FanMode::Auto),
            _ => None,
        };
        let min = (min * 100).div_ceil(max) as u32;
        Ok(Some(FanSetting { percent: Some(percent(pwm)), mode, min, max: 100 }))
    }

    fn no_fan(&self) -> TuningError {
        let curve = self.dir.join("gpu_od/fan_ctrl/fan_curve");
        let why = match curve.exists() {
            true => format!("amdgpu has a curve for it instead, {}", curve.display()),
            false => {
                let dir = self.sensors.display();
                format!("amdgpu shows none that can be set in {dir} (pwm1, pwm1_enable)")
            }
        };
        self.tuner.not_offered(Setting::Fan, why)
    }

    fn set_fan(&self, percent: u32) -> Result<Vec<String>> {
        /// Of 255: the driver rounds, and reads what the fan was measured at.
        const NEAR: u64 = 8;
        let Some(fan) = self.ask("read its fan", || self.fan())? else { return Err(self.no_fan()) };
        self.tuner.check_fan(&fan, percent)?;
        let (pwm, enable) = (&self.sensors.join("pwm1"), &self.sensors.join("pwm1_enable"));
        let mut undo = Undo::default();
        let result = (|| {
            let (_, max) = self.fan_steps()?;
            let wanted = (u64::from(percent) * max + 50) / 100;
            let (mode, before) = (self.read(enable)?, self.read(pwm)?);
            if mode.as_deref() != Some(FIXED) {
                self.write(enable, FIXED)?;
                let mode = mode.unwrap_or_else(|| AUTO.into());
                let back = match mode.as_str() {
                    FULL_SPEED => "its fan runs at full speed again",
                    _ => "its fan is driven by temperature again",
                };
                undo.push(back, move || self.write(enable, &mode));
                self.verify(enable, FIXED)?;
            }
            self.write(pwm, &wanted.to_string())?;
            if let (Some(FanMode::Fixed), Some(before), Some(percent)) = (fan.mode, before, fan.percent) {
                undo.push(format!("its fan is at {percent} % again"), move || self.write(pwm, &before));
            }
            let is_near = |found: &Option<u64>| found.is_some_and(|found| found.abs_diff(wanted) <= NEAR);
            let found = self.tuner.settled(|| self.number(pwm), is_near)?;
            if !is_near(&found) {
                return Err(not_taken(&format!("{wanted} of {max}"), found.map(|found| found.to_string())));
            }
            self.verify(enable, FIXED)
        })();
        undo.finish(self.tuner.address, "set its fan", result)?;
        Ok(vec![FAN_NOTE.into()])
    }

    fn release_fan(&self) -> Result<Vec<String>> {
        if self.ask("read its fan", || self.fan())?.is_none() {
            return Err(self.no_fan());
        }
        let enable = &self.sensors.join("pwm1_enable");
        let result = self.write(enable, AUTO).and_then(|()| self.verify(enable, AUTO));
        Undo::default().finish(self.tuner.address, "give its fan back", result)?;
        Ok(Vec::new())
    }

    fn set_level(&self, level: Level) -> Result<Vec<String>> {
        let (path, wanted) = (&self.dir.join(LEVEL), level.to_string());
        let Some(before) = self.ask("read its performance level", || self.read(path))? else {
            let why = format!("amdgpu does not show it in {}", path.display());
            return Err(self.tuner.not_offered(Setting::Level, why));
        };
        let mut undo = Undo::default();
        let result = (|| {
            self.write(path, &wanted)?;
            let back = format!("its performance level is {before} again");
            undo.push(back, move || self.write(path, &before));
            self.verify(path, &wanted)
        })();
        undo.finish(self.tuner.address, format!("set its performance level to {wanted}"), result)?;
        Ok(Vec::new())
    }
}

/// Whether a clock is limited by its levels. A core that lists up to three can have any clock between the first and the last.
fn is_chosen(index: usize, levels: &Levels) -> bool {
    levels.all.len() > if index == 0 { 3 } else { 0 }
}

fn why_no_clock(table: Overdrive) -> String {
    match table {
        Overdrive::Off => {
            "that is for OverDrive, which is off: boot with amdgpu.ppfeaturemask=0xffffffff, at your own risk"
                .into()
        }
        Overdrive::Other(what) => format!("its {OVERDRIVE} has {what}; edit it by hand"),
        Overdrive::Clocks { .. } => format!("its {OVERDRIVE} does not have it"),
    }
}

fn manual_note(before: Option<&str>) -> Vec<String> {
    let note = |before: &str| {
        format!(
            "its performance level is manual now, and was {before}: amdgpu takes clocks only then; `vm-service egpu config clock --reset` ends that"
        )
    };
    before.filter(|&before| before != MANUAL).map(note).into_iter().collect()
}

fn not_taken(wanted: &str, found: Option<String>) -> Cause {
    Cause::NotTaken { wanted: wanted.into(), found: found.unwrap_or_else(|| "nothing".into()) }
}

/// What to do where a write was refused.
fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => "be root; in a container, do it on its host",
        Some(libc::EROFS) => "sysfs can only be read here, as in a container: do it on its host",
        Some(libc::EINVAL) => "amdgpu does not take that on this GPU; dmesg may say why",
        Some(libc::EOPNOTSUPP) => "this GPU does not have it",
        Some(libc::ENOENT) => "this GPU does not have it, or is gone",
        Some(libc::ENODEV | libc::ENXIO | libc::EIO) => {
            "it may be gone: `vm-service egpu diag` says more of one in an enclosure"
        }
        _ => "dmesg may say why",
    }
}
