//! Setting and reading a GPU of NVIDIA's driver, by a library that stands in for NVIDIA's: what it takes, refuses, lies about, where it
//! hangs, and what it tells.
#![cfg(feature = "cuda")]

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use vm_passthrough::Host;
use vm_passthrough::tuning::{Change, Tuner, TuningError};

use super::gpu::{INSIDE, again, alive, build};
use super::host::{address, workstation};
use super::vm_service;

/// Where the library reads what it is to do.
struct Library(PathBuf);

impl Library {
    /// Beside it, which is where this process finds libraries.
    fn of_this_process() -> Self {
        Self(PathBuf::from(std::env::var_os("LD_LIBRARY_PATH").expect("its folder")).join("scenario"))
    }

    /// A GPU as it comes, of which this holds; `row` tells it from the one before.
    fn begin(&self, row: usize, says: &str) {
        let _ = std::fs::remove_file(self.log());
        std::fs::write(&self.0, format!("{says}\nrow {row}\n")).expect("written");
    }

    fn log(&self) -> PathBuf {
        self.0.with_added_extension("log")
    }

    /// What was set, each without what all their names have.
    fn calls(&self) -> String {
        let text = std::fs::read_to_string(self.log()).unwrap_or_default();
        text.lines().map(|line| line.trim_start_matches("nvmlDevice")).collect::<Vec<_>>().join(", ")
    }
}

/// Runs a test in a process that finds the library; `None` in the one that started it.
fn inside(test: &str) -> Option<Library> {
    if std::env::var_os(INSIDE).is_some() {
        return Some(Library::of_this_process());
    }
    let folder = tempfile::tempdir().expect("a folder");
    if build(include_str!("config_library.rs"), folder.path()) {
        let (passed, text) = again(&format!("config_nvml::{test}"), folder.path());
        assert!(passed, "{text}");
    }
    None
}

/// What a command does with such a library: its arguments, what the library does, exit status, what is said, and what was called.
type Row = (&'static str, &'static str, u8, &'static str, &'static str);

const CORE: &str = "SetGpuLockedClocks 210 1500";
const BOTH: &str = "SetMemoryLockedClocks 405 5001, SetGpuLockedClocks 210 1500";

#[rustfmt::skip]
const ROWS: &[Row] = &[
    // What it takes.
    ("clock 1500", "", 0, "  core clock       1500 MHz, 210 to 1980 in 119 steps\n  memory clock     9501 MHz, 405 to 9501 in 3 steps\n", CORE),
    ("clock 1500 5001", "", 0, "  memory clock     5001 MHz, 405 to 9501 in 3 steps\n", BOTH),
    ("clock --reset", "", 0, "  core clock       1980 MHz", "ResetGpuLockedClocks, ResetMemoryLockedClocks"),
    ("clock --reset", "nvmlDeviceResetMemoryLockedClocks refuse 3", 0, "", "ResetGpuLockedClocks, ResetMemoryLockedClocks"),
    ("power 250", "", 0, "  power limit      250 W, 100 to 350, by default 300\n", "SetPowerManagementLimit 250000"),
    ("power --reset", "", 0, "  power limit      300 W", "SetPowerManagementLimit 300000"),
    ("fan 60", "", 0, "  fan              60 % fixed, 30 to 100\n", "SetFanSpeed_v2/0 60, SetFanSpeed_v2/1 60"),
    ("fan auto", "", 0, "  fan              31 % auto", "SetDefaultFanSpeed_v2/0, SetDefaultFanSpeed_v2/1"),
    ("power 250", "nvmlDeviceGetPersistenceMode is 0", 0, "  kept             no, once nobody uses it\n", "SetPowerManagementLimit 250000"),
    // A card that lists no clocks has its highest as a bound.
    ("clock 1501", "nvmlDeviceGetSupportedMemoryClocks refuse 3", 0, "1501 MHz, 1 to 1980\n", "SetGpuLockedClocks 0 1501"),
    // What is out of range, or none of its clocks.
    ("clock 1501", "", 2, "its core clock can't be 1501 MHz: it may be one of 119 clocks, of which 1500, 1515 MHz are next to that\n", ""),
    ("clock 15", "", 2, "it may be one of 119 clocks from 210 to 1980 MHz\n", ""),
    ("clock 1500 5000", "", 2, "its memory clock can't be 5000 MHz: it may be one of 405, 5001, 9501 MHz\n", ""),
    ("clock 1981", "nvmlDeviceGetSupportedMemoryClocks refuse 3", 2, "it may be from 1 to 1980 MHz\n", ""),
    ("power 351", "", 2, "its power limit can't be 351 W: it may be from 100 to 350 W\n", ""),
    ("power 99", "", 2, "it may be from 100 to 350 W\n", ""),
    ("fan 29", "", 2, "its fan can't be 29 %: it may be from 30 to 100 %, or driven by temperature (auto)\n", ""),
    // What it does not have.
    ("pstate low", "", 1, "NVML has nothing to set one; limit its clocks: `vm-service egpu config clock MHZ`", ""),
    ("power 250", "nvmlDeviceGetPowerManagementLimitConstraints refuse 3", 1, "it is fixed on GPUs of laptops", ""),
    ("power --reset", "nvmlDeviceGetPowerManagementDefaultLimit refuse 3", 1, "does not tell its default; say how many watts", ""),
    ("fan 50", "nvmlDeviceGetNumFans is 0", 1, "its fan can't be set: NVML tells of none; its board drives them", ""),
    ("fan auto", "nvmlDeviceGetNumFans refuse 3", 1, "its fan can't be set", ""),
    // What it refuses: the first step leaves all as it is, a later one has those before put back.
    ("power 250", "nvmlDeviceSetPowerManagementLimit refuse 4", 1, "Insufficient Permissions (4); be root; in a container or a guest, do it on its host; nothing was changed\n", "SetPowerManagementLimit 250000"),
    ("clock 1500", "nvmlDeviceSetGpuLockedClocks refuse 3", 1, "Not Supported (3); clocks can be limited from Volta on, and not on every board; nothing was changed\n", CORE),
    ("clock 1500 5001", "nvmlDeviceSetMemoryLockedClocks refuse 3", 1, "from Ampere on, and not on every card for consumers: leave it out, and limit the core's alone; nothing was changed\n", "SetMemoryLockedClocks 405 5001"),
    ("clock 1500 5001", "nvmlDeviceSetGpuLockedClocks refuse 15", 1, "GPU is lost (15); it may have fallen off the bus: `vm-service egpu diag`", "SetMemoryLockedClocks 405 5001, SetGpuLockedClocks 210 1500, ResetMemoryLockedClocks"),
    ("clock 1500 5001", "nvmlDeviceSetGpuLockedClocks refuse 4", 1, "; its memory clock is not limited any more\n", "SetMemoryLockedClocks 405 5001, SetGpuLockedClocks 210 1500, ResetMemoryLockedClocks"),
    ("clock 1500 5001", "nvmlDeviceSetGpuLockedClocks refuse 4\nnvmlDeviceResetMemoryLockedClocks refuse 4", 1, "; it was NOT put back (wanted: its memory clock is not limited any more): nvmlDeviceResetMemoryLockedClocks: Insufficient", "SetMemoryLockedClocks 405 5001, SetGpuLockedClocks 210 1500, ResetMemoryLockedClocks"),
    ("clock --reset", "nvmlDeviceResetMemoryLockedClocks refuse 4", 1, "; its core clock is not limited any more\n", "ResetGpuLockedClocks, ResetMemoryLockedClocks"),
    ("clock --reset", "nvmlDeviceResetGpuLockedClocks refuse 3", 1, "; nothing was changed\n", "ResetGpuLockedClocks"),
    ("fan 60", "nvmlDeviceSetFanSpeed_v2/1 refuse 3", 1, "; its fan 0 is driven by temperature again\n", "SetFanSpeed_v2/0 60, SetFanSpeed_v2/1 60, SetDefaultFanSpeed_v2/0"),
    ("fan 60", "nvmlDeviceSetFanSpeed_v2/1 refuse 4\nnvmlDeviceGetFanControlPolicy_v2 is 1", 1, "; its fan 0 is at 31 % again\n", "SetFanSpeed_v2/0 60, SetFanSpeed_v2/1 60, SetFanSpeed_v2/0 31"),
    ("power 250", "nvmlDeviceGetHandleByPciBusId_v2 refuse 15", 1, "can't ask NVML what it is set to: nvmlDeviceGetHandleByPciBusId: GPU is lost (15)", ""),
    // What it accepts and does not do.
    ("power 250", "nvmlDeviceSetPowerManagementLimit forget", 1, "the driver accepted 250 W, and 300 W is read back; its power limit is 300 W again\n", "SetPowerManagementLimit 250000, SetPowerManagementLimit 300000"),
    ("fan 60", "nvmlDeviceSetFanSpeed_v2/1 forget", 1, "accepted 60 %, and driven by temperature of fan 1 is read back; its fan 1 is driven by temperature again; its fan 0 is", "SetFanSpeed_v2/0 60, SetFanSpeed_v2/1 60, SetDefaultFanSpeed_v2/1, SetDefaultFanSpeed_v2/0"),
    ("fan auto", "nvmlDeviceGetFanControlPolicy_v2 is 1", 1, "accepted driven by temperature, and 31 % of fan 0 is read back", "SetDefaultFanSpeed_v2/0, SetDefaultFanSpeed_v2/1, SetFanSpeed_v2/1 31, SetFanSpeed_v2/0 31"),
];

#[test]
fn what_nvml_takes_refuses_and_lies_about() {
    let Some(library) = inside("what_nvml_takes_refuses_and_lies_about") else { return };
    let sim = workstation();
    let host = alive(sim.plain_host());
    for (row, (args, says, exit, expect, calls)) in ROWS.iter().enumerate() {
        library.begin(row, says);
        let got = vm_service(&host, &format!("egpu config {args} --gpu 01:00.0"));
        let text = format!("{}{}", got.out, got.err);
        assert!(got.exit == *exit && text.contains(expect), "{args} with {says}: {} {text}", got.exit);
        assert_eq!(library.calls(), *calls, "{args} with {says}");
    }
    library.begin(ROWS.len(), "");
    let shown = vm_service(&host, "egpu config show 01:00.0").out;
    let expect = "
  set by           nvml
  core clock       1980 MHz, 210 to 1980 in 119 steps
  memory clock     9501 MHz, 405 to 9501 in 3 steps
  power limit      300 W, 100 to 350, by default 300
  fan              31 % auto, 30 to 100
  performance      P2
  kept             yes
";
    assert!(shown.ends_with(expect), "{shown}");
    assert_eq!(library.calls(), "", "what only shows sets nothing");
    library.begin(ROWS.len(), "nvmlDeviceGetPersistenceMode is 0");
    let json = vm_service(&host, "egpu config clock 1500 --gpu 01:00.0 --json").out;
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let gpu = &json["gpus"][0];
    assert_eq!(
        (&gpu["core_clock"]["limit_mhz"], &gpu["core_clock"]["steps_mhz"][1]),
        (&serde_json::Value::Null, &225.into())
    );
    assert!(gpu["notes"][0].as_str().is_some_and(|note| note.contains("nvidia-persistenced")), "{gpu}");
}

#[test]
fn what_nvml_does_not_do_in_time() {
    let Some(library) = inside("what_nvml_does_not_do_in_time") else { return };
    let tuner = |host: &Host, answer: u64| {
        let mut manager = vm_passthrough::PassthroughManager::with_host(host.clone()).expect("a manager");
        manager.scan_devices().expect("functions");
        let function = manager.devices().iter().find(|function| function.address == address("01:00.0"));
        let tuner = Tuner::new(host, function.expect("the GPU"));
        tuner.with_deadlines(Duration::from_millis(answer), Duration::from_millis(200))
    };
    const LONG: u64 = 60_000;
    // A clock that does not follow.
    let sim = workstation();
    let host = alive(sim.plain_host());
    let clocks = Change::Clocks { core: 1500, memory: Some(5001) };
    library.begin(0, "nvmlDeviceSetGpuLockedClocks forget");
    let error = tuner(&host, LONG).apply(clocks).expect_err("it lies").to_string();
    let expect = "the driver accepted 1500 MHz at most, and 1980 MHz is read back; its core clock is not limited any more; its memory clock is not \
                  limited any more";
    assert!(error.ends_with(expect), "{error}");
    let calls = library.calls();
    assert!(calls.ends_with("ResetGpuLockedClocks, ResetMemoryLockedClocks"), "{calls}");

    // A driver that hangs: nothing more is asked of it, and nobody else changes the GPU before it has ended.
    library.begin(1, "nvmlDeviceSetGpuLockedClocks hang");
    let error = tuner(&host, 500).apply(clocks).expect_err("it hangs").to_string();
    assert!(error.contains("did not answer within 0.5 s, and may still do it"), "{error}");
    assert!(error.ends_with("; what was set before that stays set"), "{error}");
    assert_eq!(library.calls(), "SetMemoryLockedClocks 405 5001, SetGpuLockedClocks 210 1500");
    assert!(matches!(tuner(&host, 1).apply(Change::Power(250)), Err(TuningError::Busy { .. })));
    library.begin(2, "");
    tuner(&host, LONG).apply(Change::Power(250)).expect("it goes on");
    library.begin(3, "nvmlDeviceGetHandleByPciBusId_v2 hang");
    for error in [
        tuner(&host, 100).settings().expect_err("it hangs"),
        tuner(&host, 100).apply(Change::Power(250)).expect_err("it hangs"),
    ] {
        let error = error.to_string();
        assert!(
            error.contains("did not answer within 0.1 s") && error.ends_with("; nothing was changed"),
            "{error}"
        );
    }
    assert_eq!(library.calls(), "");
}

/// What a function of the library refuses to tell is not known, and all else is.
#[test]
fn what_nvml_tells_is_what_status_and_monitor_say() {
    let Some(library) = inside("what_nvml_tells_is_what_status_and_monitor_say") else { return };
    let sim = workstation();
    let host = alive(sim.plain_host());
    // What a command says of the GPU, without what sysfs has.
    let said = |args: &str| {
        let got = vm_service(&host, args);
        assert_eq!((got.exit, got.err.as_str()), (0, ""), "{args}");
        let document: Value = serde_json::from_str(&got.out).expect("a document");
        let mut telemetry = document["gpus"][0]["telemetry"].clone();
        for field in ["link", "errors"] {
            telemetry.as_object_mut().expect("telemetry").remove(field);
        }
        telemetry
    };
    let all = json!({
        "source": "nvml", "unknown": null, "temperature_celsius": 61.0, "hot_spot_celsius": null, "memory_celsius": null,
        "power_watts": 123.4, "power_limit_watts": 300.0, "fan_percent": 31, "fan_rpm": null, "core_mhz": 1980, "core_max_mhz": 1980,
        "memory_mhz": 9501, "memory_max_mhz": 9501, "performance_state": "P2", "busy_percent": 83,
        "memory_used_bytes": 5u64 << 30, "memory_bytes": 24u64 << 30, "replays": 7, "throttle": ["power-limit"],
    });
    let rows = [
        ("", &[][..]),
        ("GetTemperature refuse 3", &["temperature_celsius"]),
        ("GetPowerUsage refuse 3", &["power_watts"]),
        ("GetEnforcedPowerLimit refuse 3", &["power_limit_watts"]),
        ("GetFanSpeed refuse 3", &["fan_percent"]),
        ("GetClockInfo refuse 3", &["core_mhz", "memory_mhz"]),
        ("GetMaxClockInfo refuse 3", &["core_max_mhz", "memory_max_mhz"]),
        // NVML_PSTATE_UNKNOWN.
        ("GetPerformanceState is 32", &["performance_state"]),
        ("GetUtilizationRates refuse 15", &["busy_percent"]),
        ("GetMemoryInfo refuse 3", &["memory_used_bytes", "memory_bytes"]),
        ("GetPcieReplayCounter refuse 3", &["replays"]),
        ("GetCurrentClocksThrottleReasons refuse 3", &["throttle"]),
    ];
    for (row, (refused, unknown)) in rows.into_iter().enumerate() {
        library.begin(row, &format!("nvmlDevice{refused}"));
        let mut expect = all.clone();
        for field in unknown {
            expect[field] = Value::Null;
        }
        for command in ["egpu status 01:00.0 --json", "egpu monitor 01:00.0 -n 1 --json"] {
            assert_eq!(said(command), expect, "{command} where {refused:?}");
        }
    }
    library.begin(rows.len(), "nvmlDeviceGetHandleByPciBusId_v2 refuse 15");
    for command in ["egpu status 01:00.0 --json", "egpu monitor 01:00.0 -n 1 --json"] {
        let said = said(command);
        let unknown = said["unknown"].as_str().unwrap_or_default();
        assert!(said["source"] == "none" && unknown.contains("NVML (15), GPU is lost"), "{command}: {said}");
    }
    assert_eq!(library.calls(), "", "what only reads sets nothing");
}
