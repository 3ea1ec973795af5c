//! The driver's settings: devices, memory, version; for tests also delays, faults and a trace.

use crate::named::Named;
use std::{
    collections::BTreeMap, env, fs::OpenOptions, io::Write, sync::Mutex, sync::OnceLock, time::Duration,
    time::Instant,
};

/// The most devices that there can be.
pub(crate) const DEVICES: usize = 16;

/// The settings that a library gives the driver.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The name of its devices.
    pub name: &'static str,
    /// How many devices there are: 16 at most.
    pub devices: usize,
    /// Bytes of memory of each device.
    pub memory: u64,
    /// What `cuDriverGetVersion` returns: 13000 is CUDA 13.0.
    pub version: i32,
    /// How long a kernel of PTX may run.
    pub kernel_time: Duration,
    /// How long a call waits for the device, if there is a limit.
    pub patience: Option<Duration>,
    /// Facilities for tests.
    pub tests: Option<Tests>,
}

/// Facilities for tests of programs.
#[derive(Clone, Debug, Default)]
pub struct Tests {
    /// The value of device attributes that are 0 otherwise.
    pub attributes: i32,
    /// How long each operation of a stream waits before it runs.
    pub delay: Duration,
    /// The text of a file of kernels, which do nothing: every image has these then.
    pub kernels: Option<String>,
    /// Calls that fail, as in `cuMemMap:3=2,cuMemCreate:1=2`: the third `cuMemMap` returns 2.
    pub failures: String,
    /// A file that each call appends a line to.
    pub trace: Option<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            name: "CUDA on the CPU",
            devices: 1,
            memory: 1 << 30,
            version: 13000,
            kernel_time: Duration::from_secs(60),
            patience: None,
            tests: None,
        }
    }
}

static SETTINGS: OnceLock<fn() -> Settings> = OnceLock::new();

/// Sets the function that returns the settings. Only the first call counts.
pub fn configure(settings: fn() -> Settings) {
    let _ = SETTINGS.set(settings);
}

/// Returns the number that a variable of the environment has, or another where it has none.
pub fn number<T: std::str::FromStr>(name: &str, otherwise: T) -> T {
    env::var(name).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(otherwise)
}

/// The settings, read once.
pub(crate) struct Config {
    pub(crate) settings: Settings,
    /// Those for tests, or their defaults.
    pub(crate) tests: Tests,
    pub(crate) kernels: Option<Named>,
    faults: Vec<(String, u64, i32)>,
    calls: Mutex<BTreeMap<&'static str, u64>>,
}

impl Config {
    pub(crate) fn read() -> Self {
        let mut settings = SETTINGS.get().map_or_else(Settings::default, |settings| settings());
        settings.devices = settings.devices.min(DEVICES);
        let tests = settings.tests.clone().unwrap_or_default();
        Self {
            kernels: tests.kernels.as_deref().map(Named::read),
            faults: tests.failures.split(',').filter_map(fault).collect(),
            tests,
            settings,
            calls: Mutex::default(),
        }
    }

    /// Returns when a call that begins now gives up.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.settings.patience.map(|patience| Instant::now() + patience)
    }

    /// Counts a call, and says which result it was asked to fail with.
    pub(crate) fn fault(&self, symbol: &'static str) -> Option<i32> {
        if self.faults.is_empty() {
            return None;
        }
        let base = crate::names::base(symbol);
        let mut calls = self.calls.lock().unwrap_or_else(|poison| poison.into_inner());
        let count = calls.entry(base).or_default();
        *count += 1;
        let matches = |(name, nth, _): &&(String, u64, i32)| (name == symbol || name == base) && nth == count;
        self.faults.iter().find(matches).map(|&(.., code)| code)
    }

    /// Whether there is a trace.
    pub(crate) fn traced(&self) -> bool {
        self.tests.trace.is_some()
    }

    /// Appends a line to the trace, if there is one.
    pub(crate) fn trace(&self, line: impl FnOnce() -> String) {
        let Some(path) = &self.tests.trace else { return };
        // One write per line: whole lines, also where several processes append. A trace that can't be written is not the
        // program's failure; its test misses the lines.
        if let Ok(mut file) = OpenOptions::new().create(true).append(true).open(path) {
            let _ = file.write_all(line().as_bytes());
        }
    }
}

/// `cuMemMap:3=2`: the third call returns 2.
fn fault(text: &str) -> Option<(String, u64, i32)> {
    let (call, code) = text.trim().split_once('=')?;
    let (name, nth) = call.split_once(':')?;
    Some((name.to_owned(), nth.parse().ok()?, code.parse().ok()?))
}
