//! What the environment says: devices, memory, version, delays, faults and the trace.

use crate::named::Named;
use std::{collections::BTreeMap, env, fs, fs::OpenOptions, io::Write, sync::Mutex, time::Duration};

/// The most devices that there can be.
pub(crate) const DEVICES: usize = 16;

/// The environment, read once.
pub(crate) struct Config {
    /// `VM_CUDA_FAKE_DEVICES`: how many devices.
    pub(crate) devices: usize,
    /// `VM_CUDA_FAKE_MEMORY`: bytes of each.
    pub(crate) memory: u64,
    /// `VM_CUDA_FAKE_VERSION`: what `cuDriverGetVersion` says.
    pub(crate) version: i32,
    /// `VM_CUDA_FAKE_ATTRIBUTES`: what devices say of all that is 0 else.
    pub(crate) attributes: i32,
    /// `VM_CUDA_FAKE_DELAY_US`: how long each operation of a stream waits before it runs.
    pub(crate) delay: Duration,
    /// `VM_CUDA_FAKE_KERNELS`: the kernels of a file, where it can be read.
    pub(crate) kernels: Option<Named>,
    /// `VM_CUDA_FAKE_SECONDS`: how long a kernel may run.
    #[cfg(feature = "cpu")]
    pub(crate) kernel_time: Duration,
    faults: Vec<(String, u64, i32)>,
    trace: Option<String>,
    calls: Mutex<BTreeMap<&'static str, u64>>,
}

fn number<T: std::str::FromStr>(name: &str, otherwise: T) -> T {
    env::var(name).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(otherwise)
}

impl Config {
    /// Reads the environment; what does not parse is as if it were not set.
    pub(crate) fn read() -> Self {
        let faults = env::var("VM_CUDA_FAKE_FAIL").unwrap_or_default();
        Self {
            devices: number("VM_CUDA_FAKE_DEVICES", 1).min(DEVICES),
            memory: number("VM_CUDA_FAKE_MEMORY", 1 << 30),
            version: number("VM_CUDA_FAKE_VERSION", 13000),
            attributes: number("VM_CUDA_FAKE_ATTRIBUTES", 0),
            delay: Duration::from_micros(number("VM_CUDA_FAKE_DELAY_US", 0)),
            kernels: env::var("VM_CUDA_FAKE_KERNELS")
                .ok()
                .and_then(|path| fs::read_to_string(path).ok())
                .map(|text| Named::read(&text)),
            #[cfg(feature = "cpu")]
            kernel_time: Duration::from_secs(number("VM_CUDA_FAKE_SECONDS", 60)),
            faults: faults.split(',').filter_map(fault).collect(),
            trace: env::var("VM_CUDA_FAKE_TRACE").ok(),
            calls: Mutex::default(),
        }
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
        self.trace.is_some()
    }

    /// Appends a line to the trace, if there is one.
    pub(crate) fn trace(&self, line: impl FnOnce() -> String) {
        let Some(path) = &self.trace else { return };
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
