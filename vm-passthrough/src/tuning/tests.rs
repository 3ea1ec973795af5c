//! Tuning of simulated GPUs of amdgpu: what is set, what is refused, and what becomes of the rest then.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::*;
use crate::host::SysfsWriter;
use crate::sim::{SimDrivers, SimFunction, SimHost};

const GPU: &str = "0000:03:00.0";
const SENSORS: &str = "hwmon/hwmon4";

fn address() -> PciAddress {
    GPU.parse().expect("an address")
}

fn amd() -> SimHost {
    let sim = SimHost::new().expect("a host");
    let gpu = SimFunction::new(address(), 0x1002, 0x744c, 0x03_0000).express(0).group(3);
    sim.add(&gpu.driver("amdgpu")).expect("a function");
    sim.add_amdgpu(address()).expect("files");
    sim
}

fn tuner(host: &Host) -> Tuner {
    let functions = crate::pci::scan(host).expect("functions");
    let function = functions.iter().find(|function| function.address == address()).expect("the GPU");
    Tuner::new(host, function).with_deadlines(Duration::from_secs(10), Duration::ZERO)
}

fn file(sim: &SimHost, name: &str) -> String {
    std::fs::read_to_string(sim.device_dir(address()).expect("its directory").join(name)).unwrap_or_default()
}

/// All that can be written.
fn written(sim: &SimHost) -> BTreeMap<&'static str, String> {
    const FILES: [&str; 7] = [
        "power_dpm_force_performance_level",
        "pp_od_clk_voltage",
        "pp_dpm_sclk",
        "pp_dpm_mclk",
        "hwmon/hwmon4/power1_cap",
        "hwmon/hwmon4/pwm1",
        "hwmon/hwmon4/pwm1_enable",
    ];
    FILES.into_iter().map(|name| (name, file(sim, name))).collect()
}

const CLOCKS: Change = Change::Clocks { core: 2300, memory: Some(1200) };

/// Core, memory, watts, fan and level that are read back.
type Seen = (Option<u32>, Option<u32>, Option<f64>, Option<(u32, FanMode)>, String);

fn seen(settings: &Settings) -> Seen {
    let limit = |clock: &Option<ClockSetting>| clock.as_ref().and_then(|clock| clock.limit);
    let fan = settings.fan.and_then(|fan| fan.percent.zip(fan.mode));
    let power = settings.power.and_then(|power| power.limit);
    let level = settings.performance_state.clone().unwrap_or_default();
    (limit(&settings.core_clock), limit(&settings.memory_clock), power, fan, level)
}

#[test]
fn what_it_is_set_to_and_may_be_set_to() {
    let sim = amd();
    let told = tuner(&sim.plain_host()).settings().expect("settings");
    let clock = |now, limit, min, max| {
        Some(ClockSetting { now: Some(now), limit: Some(limit), allowed: Clocks::Range(min, max) })
    };
    let expect = Settings {
        source: Source::Amdgpu,
        core_clock: clock(1725, 2500, 500, 3000),
        memory_clock: clock(1249, 1249, 97, 1500),
        power: Some(PowerSetting { limit: Some(303.0), default: Some(303.0), min: 200.0, max: 348.0 }),
        fan: Some(FanSetting { percent: Some(25), mode: Some(FanMode::Auto), min: 0, max: 100 }),
        performance_state: Some("auto".into()),
        is_persistent: None,
    };
    assert_eq!(told, expect);
    assert!(!sim.path("run/locks").exists(), "who only looks takes no lock");
}

#[test]
fn what_is_set_is_read_back() {
    let sim = amd();
    let host = SimDrivers::new(&sim).host();
    let check = |change, expect: Seen, notes: usize| {
        let applied = tuner(&host).apply(change).expect("set");
        assert_eq!(seen(&applied.settings), expect, "{change:?}");
        assert_eq!(applied.notes.len(), notes, "{:?}", applied.notes);
    };
    let auto = Some((25, FanMode::Auto));
    check(Change::Power(250), (Some(2500), Some(1249), Some(250.0), auto, "auto".into()), 0);
    check(CLOCKS, (Some(2300), Some(1200), Some(250.0), auto, "manual".into()), 1);
    check(
        Change::Clocks { core: 2200, memory: None },
        (Some(2200), Some(1200), Some(250.0), auto, "manual".into()),
        0,
    );
    check(Change::DefaultPower, (Some(2200), Some(1200), Some(303.0), auto, "manual".into()), 0);
    let fixed = |percent| Some((percent, FanMode::Fixed));
    check(Change::Fan(60), (Some(2200), Some(1200), Some(303.0), fixed(60), "manual".into()), 1);
    check(Change::Fan(0), (Some(2200), Some(1200), Some(303.0), fixed(0), "manual".into()), 1);
    check(Change::Fan(100), (Some(2200), Some(1200), Some(303.0), fixed(100), "manual".into()), 1);
    check(Change::DefaultClocks, (Some(2500), Some(1249), Some(303.0), fixed(100), "auto".into()), 0);
    check(
        Change::AutoFan,
        (Some(2500), Some(1249), Some(303.0), Some((100, FanMode::Auto)), "auto".into()),
        0,
    );
    for level in <Level as strum::IntoEnumIterator>::iter() {
        let after = (Some(2500), Some(1249), Some(303.0), Some((100, FanMode::Auto)), level.to_string());
        check(Change::Level(level), after, 0);
    }
}

#[test]
fn without_overdrive_levels_are_chosen() {
    let sim = amd();
    let host = SimDrivers::new(&sim).host();
    std::fs::remove_file(sim.device_dir(address()).expect("its directory").join("pp_od_clk_voltage"))
        .expect("removed");
    let refused = tuner(&host).apply(Change::Clocks { core: 500, memory: None }).expect_err("refused");
    assert!(refused.to_string().contains("OverDrive, which is off"), "{refused}");
    sim.set(address(), "pp_dpm_sclk", "0: 300Mhz\n1: 466Mhz\n2: 751Mhz\n3: 1206Mhz *\n").expect("written");
    let clocks =
        |core, memory| tuner(&host).apply(Change::Clocks { core, memory }).map(|applied| applied.settings);
    let told = clocks(751, Some(456)).expect("set");
    let now = |clock: &Option<ClockSetting>| clock.as_ref().and_then(|clock| clock.now);
    assert_eq!((now(&told.core_clock), now(&told.memory_clock)), (Some(751), Some(456)));
    assert_eq!(told.core_clock.expect("a clock").allowed, Clocks::Steps(vec![300, 466, 751, 1206]));
    let none = clocks(752, None).expect_err("none of them").to_string();
    assert!(
        none.ends_with("its core clock can't be 752 MHz: it may be one of 300, 466, 751, 1206 MHz"),
        "{none}"
    );
    // The memory is refused: the core has all of its levels again.
    let drivers = SimDrivers::new(&sim);
    drivers.fail("pp_dpm_mclk", "", 1, libc::EINVAL);
    let half =
        tuner(&drivers.host()).apply(Change::Clocks { core: 466, memory: Some(97) }).expect_err("refused");
    assert!(half.to_string().contains("; all levels of its core clock are enabled again"), "{half}");
    assert!(drivers.writes().iter().any(|(path, value)| path.ends_with("pp_dpm_sclk") && value == "0 1 2 3"));
    tuner(&host).apply(Change::DefaultClocks).expect("reset");
    assert_eq!(file(&sim, "power_dpm_force_performance_level"), "auto\n");
}

#[test]
fn what_it_can_not_be_set_to_is_refused_before_anything_is_written() {
    let sim = amd();
    let drivers = SimDrivers::new(&sim);
    let tuner = tuner(&drivers.host());
    let check = |change, expect: &str| {
        let error = tuner.apply(change).expect_err("refused");
        assert!(matches!(error, TuningError::OutOfRange { .. }), "{error:?}");
        assert_eq!(error.to_string(), format!("0000:03:00.0: its {expect}"));
    };
    let clocks = |core, memory| Change::Clocks { core, memory };
    check(clocks(3001, None), "core clock can't be 3001 MHz: it may be from 500 to 3000 MHz");
    check(clocks(499, Some(1000)), "core clock can't be 499 MHz: it may be from 500 to 3000 MHz");
    check(clocks(2000, Some(96)), "memory clock can't be 96 MHz: it may be from 97 to 1500 MHz");
    check(clocks(u32::MAX, None), "core clock can't be 4294967295 MHz: it may be from 500 to 3000 MHz");
    check(Change::Power(199), "power limit can't be 199 W: it may be from 200 to 348 W");
    check(Change::Power(u32::MAX), "power limit can't be 4294967295 W: it may be from 200 to 348 W");
    check(Change::Fan(101), "fan can't be 101 %: it may be from 0 to 100 %, or driven by temperature (auto)");
    sim.set(address(), "hwmon/hwmon4/pwm1_min", "52\n").expect("written");
    check(Change::Fan(20), "fan can't be 20 %: it may be from 21 to 100 %, or driven by temperature (auto)");
    assert_eq!(drivers.writes(), []);
}

#[test]
fn who_can_not_be_set_now() {
    let check = |prepare: &dyn Fn(&SimHost), expect: &str| {
        let sim = amd();
        let drivers = SimDrivers::new(&sim);
        let tuner = tuner(&drivers.host());
        prepare(&sim);
        for change in
            [CLOCKS, Change::DefaultClocks, Change::Power(250), Change::Fan(50), Change::Level(Level::Low)]
        {
            let error = tuner.apply(change).expect_err("refused").to_string();
            assert!(error.contains(expect), "{error}");
        }
        assert!(tuner.settings().expect_err("nor asked").to_string().contains(expect));
        assert_eq!(drivers.writes(), []);
        assert!(!sim.path("run/locks").exists());
    };
    let driver = |name: &'static str| {
        move |sim: &SimHost| {
            sim.add_driver(name).expect("a driver");
            sim.set_driver(address(), Some(name)).expect("bound");
        }
    };
    check(
        &|sim| sim.set(address(), "power/runtime_status", "suspended\n").expect("written"),
        "asleep, and is not woken",
    );
    check(&|sim| sim.set_driver(address(), None).expect("unbound"), "no driver has it");
    check(&driver("vfio-pci"), "vfio-pci has it: only its guest can ask; release it from its guest");
    check(&driver("nvidia"), "NVML");
    check(&driver("xe"), "only nvidia and amdgpu can be told");
    check(&|sim| sim.remove(address()).expect("removed"), "0000:03:00.0 is gone");
}

#[test]
fn what_is_refused_is_put_back() {
    const LEVEL: &str = "power_dpm_force_performance_level";
    // Which write is refused, and how, and what is said.
    let check = |change, (path, value): (&str, &str), errno, expect: &[&str]| {
        let sim = amd();
        let before = written(&sim);
        let drivers = SimDrivers::new(&sim);
        drivers.fail(path, value, 1, errno);
        let error = tuner(&drivers.host()).apply(change).expect_err("refused").to_string();
        expect.iter().for_each(|expect| assert!(error.contains(expect), "{expect}: {error}"));
        assert_eq!(written(&sim), before, "{error}");
    };
    check(CLOCKS, (LEVEL, "manual"), libc::EACCES, &["be root", "; nothing was changed"]);
    check(
        CLOCKS,
        ("pp_od_clk_voltage", "s 1"),
        libc::EINVAL,
        &["amdgpu does not take", "; its performance level is auto again"],
    );
    let both = ["; its core clock is at most 2500 MHz again; its performance level is auto again"];
    check(CLOCKS, ("pp_od_clk_voltage", "m 1"), libc::EINVAL, &both);
    let all = [
        "its memory clock is at most 1249 MHz again; its core clock is at most 2500 MHz again; its performance",
    ];
    check(CLOCKS, ("pp_od_clk_voltage", "c"), libc::EIO, &all);
    check(Change::DefaultClocks, ("pp_od_clk_voltage", "r"), libc::EINVAL, &["level is auto again"]);
    check(
        Change::DefaultClocks,
        ("pp_od_clk_voltage", "c"),
        libc::EINVAL,
        &["at most 2500 MHz again", "auto again"],
    );
    check(Change::DefaultClocks, (LEVEL, "auto"), libc::EBUSY, &["dmesg may say why", "auto again"]);
    check(
        Change::Power(250),
        ("power1_cap", ""),
        libc::EPERM,
        &["be root; in a container", "nothing was changed"],
    );
    check(Change::Power(250), ("power1_cap", ""), libc::EROFS, &["sysfs can only be read here"]);
    check(Change::DefaultPower, ("power1_cap", ""), libc::EOPNOTSUPP, &["this GPU does not have it"]);
    check(Change::Fan(50), ("pwm1_enable", "1"), libc::EINVAL, &["; nothing was changed"]);
    check(Change::Fan(50), ("pwm1", "128"), libc::EINVAL, &["; its fan is driven by temperature again"]);
    check(Change::AutoFan, ("pwm1_enable", "2"), libc::ENODEV, &["may be gone", "nothing was changed"]);
    check(
        Change::Level(Level::PerfDeterminism),
        (LEVEL, "perf"),
        libc::EINVAL,
        &["does not take that on this GPU"],
    );
}

/// A writer to files that forgets what is written to some, and never answers of others.
#[derive(Debug)]
struct Odd {
    forgets: &'static str,
    hangs: &'static str,
    files: SimDrivers,
    /// Reads of this never end, once something was written.
    late: &'static str,
}

impl SysfsWriter for Odd {
    fn write(&self, path: &Path, value: &str, deadline: Duration) -> io::Result<()> {
        let is = |name: &str| !name.is_empty() && path.ends_with(name);
        match () {
            () if is(self.hangs) => Err(io::ErrorKind::TimedOut.into()),
            () if is(self.forgets) => Ok(()),
            () => self.files.write(path, value, deadline),
        }
    }

    fn read(&self, path: &Path, deadline: Duration) -> io::Result<String> {
        match !self.late.is_empty() && path.ends_with(self.late) && !self.files.writes().is_empty() {
            true => Err(io::ErrorKind::TimedOut.into()),
            false => self.files.read(path, deadline),
        }
    }

    fn write_locked(
        &self,
        path: &Path,
        value: &str,
        deadline: Duration,
        _: BorrowedFd<'_>,
    ) -> io::Result<()> {
        self.write(path, value, deadline)
    }
}

#[test]
fn what_lies_is_found_out_and_what_hangs_is_left() {
    let check = |change, (forgets, hangs), expect: &str, is_left: bool| {
        let sim = amd();
        let before = written(&sim);
        let host = sim.host_with(Arc::new(Odd { forgets, hangs, files: SimDrivers::new(&sim), late: "" }));
        let error = tuner(&host).apply(change).expect_err("found out").to_string();
        assert!(error.contains(expect), "{error}");
        assert_eq!(written(&sim) != before, is_left, "{error}");
    };
    const LEVEL: &str = "power_dpm_force_performance_level";
    check(
        Change::Power(250),
        ("power1_cap", ""),
        "accepted 250 W, and 303 W is read back; its power limit is 303 W again",
        false,
    );
    check(
        Change::Fan(80),
        ("pwm1", ""),
        "accepted 204 of 255, and 64 is read back; its fan is driven by temp",
        false,
    );
    check(Change::Fan(80), ("pwm1_enable", ""), "accepted 1, and 2 is read back", false);
    check(CLOCKS, ("pp_od_clk_voltage", ""), "accepted 2300 MHz, and 2500 MHz is read back", false);
    check(CLOCKS, (LEVEL, ""), "accepted manual, and auto is read back", false);
    check(
        Change::Level(Level::High),
        (LEVEL, ""),
        "accepted high, and auto is read back; its performance level",
        false,
    );
    check(Change::Power(250), ("", "power1_cap"), "did not answer within 10 s", false);
    check(CLOCKS, ("", "pp_od_clk_voltage"), "; what was set before that stays set", true);
    check(Change::Fan(80), ("", "pwm1_enable"), "; nothing else was changed", false);
}

#[test]
fn what_was_set_and_can_not_be_read_again_is_said_to_be_set() {
    let sim = amd();
    let files = SimDrivers::new(&sim);
    let host = sim.host_with(Arc::new(Odd { forgets: "", hangs: "", files, late: "pp_dpm_mclk" }));
    let error = tuner(&host).apply(Change::Power(250)).expect_err("it can't be read").to_string();
    let expect = "0000:03:00.0 was set, and what it is set to now can't be read: the driver did not answer within 10 s";
    assert!(error.starts_with(expect), "{error}");
    assert_eq!(file(&sim, "hwmon/hwmon4/power1_cap"), "250000000\n");
}

#[test]
fn two_never_change_it_at_once() {
    let sim = amd();
    let host = SimDrivers::new(&sim).host();
    let lock = FunctionLock::take(&host, address(), Duration::ZERO).expect("a file").expect("the lock");
    let hurried = tuner(&host).with_deadlines(Duration::ZERO, Duration::ZERO);
    assert!(matches!(hurried.apply(CLOCKS), Err(TuningError::Busy { .. })));
    drop(lock);
    let cancel = crate::claim::Cancel::default();
    let cancelled = hurried.clone().with_cancel(cancel.clone());
    cancel.request();
    assert!(matches!(cancelled.apply(CLOCKS), Err(TuningError::Cancelled(_))));
    assert_eq!(file(&sim, "power_dpm_force_performance_level"), "auto\n");
    assert!(hurried.apply(CLOCKS).is_ok());
}

#[test]
fn hostile_files_are_no_settings() {
    let sensor = |name: &str| format!("{SENSORS}/{name}");
    let odd = [
        "",
        "\n",
        "-1",
        "99999999999999999999999999",
        "18446744073709551615",
        "NaN",
        "1e9",
        "0x10",
        "\u{fffd}",
        "OD_SCLK:\nOD_RANGE:\nSCLK: 4294967295Mhz 4294967295Mhz",
        "OD_SCLK:\n0: 9Mhz\n1: 0Mhz\nOD_RANGE:\nSCLK: 0Mhz 4294967295Mhz",
        "0: 0Mhz *\n0: 0Mhz *\n1: 4294967295Mhz\n31: 1Mhz\n32: 1Mhz",
        "a\u{1b}[2J\nb",
    ];
    let names = [
        "power1_cap",
        "power1_cap_min",
        "power1_cap_max",
        "power1_cap_default",
        "pwm1",
        "pwm1_enable",
        "pwm1_min",
        "pwm1_max",
    ];
    let files = ["power_dpm_force_performance_level", "pp_od_clk_voltage", "pp_dpm_sclk", "pp_dpm_mclk"]
        .map(str::to_owned);
    for file in files.into_iter().chain(names.map(sensor)) {
        for text in odd {
            let sim = amd();
            sim.set(address(), &file, text).expect("written");
            let tuner = tuner(&SimDrivers::new(&sim).host());
            let told = tuner.settings().expect("settings");
            if let Some(power) = told.power {
                assert!(power.min <= power.max, "{file} {text}");
            }
            // Whatever is answered, nothing panics, and what is said to be set is.
            for change in [
                CLOCKS,
                Change::DefaultClocks,
                Change::Power(250),
                Change::DefaultPower,
                Change::Fan(50),
                Change::AutoFan,
            ] {
                let Ok(applied) = tuner.apply(change) else { continue };
                match change {
                    Change::Power(watts) => {
                        assert_eq!(seen(&applied.settings).2, Some(f64::from(watts)), "{file} {text}")
                    }
                    Change::Clocks { core, .. } => {
                        assert_eq!(seen(&applied.settings).0, Some(core), "{file} {text}")
                    }
                    _ => {}
                }
            }
        }
    }
}

#[test]
fn files_that_are_none_and_links_lead_nowhere() {
    let path = |sim: &SimHost, name: &str| -> PathBuf {
        sim.device_dir(address()).expect("its directory").join(name)
    };
    // Text that is not UTF-8, a directory, a FIFO: not told, and not waited for.
    let sim = amd();
    std::fs::write(path(&sim, "pp_od_clk_voltage"), b"OD_SCLK:\n1: \xff\xfe").expect("written");
    let cap = path(&sim, "hwmon/hwmon4/power1_cap");
    std::fs::remove_file(&cap).expect("removed");
    std::fs::create_dir(&cap).expect("a directory");
    let pwm = path(&sim, "hwmon/hwmon4/pwm1");
    std::fs::remove_file(&pwm).expect("removed");
    rustix::fs::mknodat(rustix::fs::CWD, &pwm, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0)
        .expect("a FIFO");
    for host in [sim.plain_host(), SimDrivers::new(&sim).host()] {
        let told = tuner(&host).settings().expect("settings");
        assert_eq!((told.core_clock, told.power, told.fan), (None, None, None));
    }
    // What is read of one is no level, and nobody waits to write to it.
    let sim = amd();
    let level = path(&sim, "power_dpm_force_performance_level");
    std::fs::remove_file(&level).expect("removed");
    rustix::fs::mknodat(rustix::fs::CWD, &level, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0)
        .expect("a FIFO");
    for change in [Change::Level(Level::Low), CLOCKS, Change::DefaultClocks] {
        tuner(&SimDrivers::new(&sim).host()).apply(change).expect_err("refused");
    }
    // Nor is a link written through, of a file, of its sensors or of the GPU itself.
    let check = |link: &dyn Fn(&SimHost, &Path)| {
        let (sim, other) = (amd(), tempfile::tempdir().expect("a folder"));
        let outside = other.path().join("gpu");
        let dir = sim.device_dir(address()).expect("its directory");
        assert!(
            std::process::Command::new("cp").arg("-a").args([&dir, &outside]).status().expect("cp").success()
        );
        link(&sim, &outside);
        let tuner = tuner(&SimDrivers::new(&sim).host());
        for change in [Change::Power(250), CLOCKS, Change::Fan(9), Change::Level(Level::Low)] {
            let _ = tuner.apply(change);
        }
        let read = |name: &str| std::fs::read_to_string(outside.join(name)).expect("read");
        assert_eq!(
            (read("hwmon/hwmon4/power1_cap").as_str(), read("hwmon/hwmon4/pwm1").as_str()),
            ("303000000\n", "64\n")
        );
        assert_eq!(read("power_dpm_force_performance_level"), "auto\n");
    };
    let replace = |sim: &SimHost, outside: &Path, name: &str| {
        let path = path(sim, name);
        if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) }
            .expect("removed");
        std::os::unix::fs::symlink(outside.join(name), path).expect("a link");
    };
    check(&|sim, outside| replace(sim, outside, "hwmon/hwmon4/power1_cap"));
    check(&|sim, outside| replace(sim, outside, "hwmon/hwmon4"));
    check(&|sim, outside| replace(sim, outside, "power_dpm_force_performance_level"));
    check(&|sim, outside| {
        let link = sim.path("sys/bus/pci/devices").join(GPU);
        std::fs::remove_file(&link).expect("removed");
        std::os::unix::fs::symlink(outside, link).expect("a link");
    });
}
