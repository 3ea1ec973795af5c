//! `[[accelerators]]` of a guest file: accelerators of the host that the guest shares.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use toml::de::DeValue;
use vm_passthrough::PciAddress;

use super::read::{Entry, GUEST_WAIVERS, Reader, Section, printable, shorten};
use super::{MAX_ACCELERATORS, MAX_MEMORY, parse_size};
use crate::os::sandbox::Measure;

/// An accelerator of the host that a guest shares with others, and what it may use of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedAccelerator {
    /// Which.
    pub device: AcceleratorDevice,
    /// The most bytes of its memory that the guest may hold.
    pub memory: u64,
    /// The longest that one launch may take.
    pub deadline: Duration,
    /// How much of every [`TIME_PERIOD`] the guest may keep it busy.
    pub time_slice: Duration,
    /// The longest that its worker polls for the guest's next batch, or for the end of one, before it sleeps.
    pub poll: Duration,
    /// Bytes of the window that programs of the guest share with it, a power of two; `None` where the guest's driver has
    /// a queue instead.
    pub window: Option<u64>,
    /// What is trusted to keep the guest's code in its bounds.
    pub trust: Trust,
    /// Measures of its workers' confinement that the operator waived.
    pub unconfined: Vec<Measure>,
}

/// What keeps a guest's code on an accelerator in its bounds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Trust {
    /// The checks of its kernels, which it sends in the IR.
    Kernels,
    /// The CUDA driver, and the device's own address spaces: its programs send PTX and machine code.
    Driver {
        /// The driver's library; `None` for the one that is the device's own.
        library: Option<PathBuf>,
        /// The most host memory that the worker of each program may hold for it; `None` for as much as `memory`.
        host_memory: Option<u64>,
    },
}

/// Which accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AcceleratorDevice {
    /// The host's CPU.
    Cpu,
    /// The GPU at a PCI address.
    Pci(PciAddress),
    /// An NPU, by its number in the list of them.
    Npu(u32),
}

impl fmt::Display for AcceleratorDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Pci(address) => address.fmt(f),
            Self::Npu(number) => write!(f, "npu:{number}"),
        }
    }
}

/// What a guest's time slice is a part of.
pub const TIME_PERIOD: Duration = Duration::from_millis(100);

/// The least time slice.
const MIN_SLICE: Duration = Duration::from_millis(1);
/// What a launch may take when the file does not say.
const DEFAULT_DEADLINE: Duration = Duration::from_secs(2);
const MIN_DEADLINE: Duration = Duration::from_millis(10);
const MAX_DEADLINE: Duration = Duration::from_secs(60 * 60);
/// What the worker polls when the file does not say.
const DEFAULT_POLL: Duration = Duration::from_micros(200);
const MAX_POLL: Duration = Duration::from_millis(10);
/// The least memory: a page table's granule of GPUs.
const MIN_QUOTA: u64 = 2 << 20;

/// The least host memory that the worker of a CUDA program holds for it.
pub const MIN_HOST_MEMORY: u64 = 32 << 20;

impl Reader<'_> {
    pub(super) fn accelerators(&mut self, root: &Section<'_, '_>) -> Vec<SharedAccelerator> {
        const RULE: &str =
            "write [[accelerators]] with device = \"0000:65:00.0\", \"npu:0\" or \"cpu\" for each";
        const DEVICE: &str = "write device = \"0000:65:00.0\", device = \"npu:0\", or device = \"cpu\"";
        let mut accelerators: Vec<SharedAccelerator> = Vec::new();
        for entry in self.list(root, "accelerators", MAX_ACCELERATORS, RULE) {
            let Some(section) = self.section(&entry, RULE) else { continue };
            let keys = [
                "device",
                "memory",
                "deadline",
                "time_slice",
                "poll",
                "window",
                "trust",
                "driver",
                "host_memory",
                "unconfined",
            ];
            self.known(&section, &keys);
            let device = self
                .required(&section, "device", DEVICE)
                .and_then(|entry| self.accelerator_device(&entry, &accelerators));
            let memory = self
                .required(&section, "memory", "write memory = \"2G\"")
                .and_then(|entry| self.quota(&entry));
            let deadline = match self.optional(&section, "deadline") {
                Some(entry) => {
                    self.duration(&entry, MIN_DEADLINE, MAX_DEADLINE, "from 10ms to 3600s, as in \"2s\"")
                }
                None => Some(DEFAULT_DEADLINE),
            };
            let time_slice = match self.optional(&section, "time_slice") {
                Some(entry) => {
                    self.duration(&entry, MIN_SLICE, TIME_PERIOD, "from 1ms to 100ms, as in \"20ms\"")
                }
                None => Some(TIME_PERIOD),
            };
            let poll = match self.optional(&section, "poll") {
                Some(entry) => {
                    self.duration(&entry, Duration::ZERO, MAX_POLL, "from 0us to 10ms, as in \"100us\"")
                }
                None => Some(DEFAULT_POLL),
            };
            let window = match self.optional(&section, "window") {
                Some(entry) => self.window(&entry).map(Some),
                None => Some(None),
            };
            let trust = self.trust(&section, device, window.is_none_or(|window| window.is_some()));
            let (Some(device), Some(memory), Some(deadline), Some(time_slice), Some(poll), Some(window)) =
                (device, memory, deadline, time_slice, poll, window)
            else {
                continue;
            };
            let Some(trust) = trust else { continue };
            let may: &[_] = match trust {
                Trust::Kernels => &GUEST_WAIVERS,
                Trust::Driver { .. } => &Measure::ALL,
            };
            let Some(unconfined) = self.unconfined(&section, may) else { continue };
            accelerators.push(SharedAccelerator {
                device,
                memory,
                deadline,
                time_slice,
                poll,
                window,
                trust,
                unconfined,
            });
        }
        accelerators
    }

    fn accelerator_device(
        &mut self,
        entry: &Entry<'_, '_>,
        others: &[SharedAccelerator],
    ) -> Option<AcceleratorDevice> {
        let text = self.string(entry, "write an address as in \"0000:65:00.0\", \"npu:0\" or \"cpu\"")?;
        let device = match (text, text.strip_prefix("npu:")) {
            ("cpu", _) => AcceleratorDevice::Cpu,
            (_, Some(number)) => match npu_number(number) {
                Some(number) => AcceleratorDevice::Npu(number),
                None => {
                    const RULE: &str = "write npu: and its number in `vm-service list`, as in \"npu:0\"";
                    return self.wrong(entry, &format!("is \"{}\", which names no NPU", shorten(text)), RULE);
                }
            },
            _ => match text.parse() {
                Ok(address) => AcceleratorDevice::Pci(address),
                Err(error) => {
                    let error = printable(&format!("{error}"));
                    let message = format!("`{}`: {error}, or \"npu:0\" or \"cpu\"", entry.key);
                    self.problem(entry.at.clone(), message);
                    return None;
                }
            },
        };
        if others.iter().any(|other| other.device == device) {
            return self.wrong(
                entry,
                &format!("is {device}, which is there already"),
                "name each device once",
            );
        }
        Some(device)
    }

    /// `trust`, `driver` and `host_memory`, of an accelerator that has a window or not.
    fn trust(
        &mut self,
        section: &Section<'_, '_>,
        device: Option<AcceleratorDevice>,
        has_window: bool,
    ) -> Option<Trust> {
        const RULE: &str = "write \"kernels\", for kernels of the IR, or \"driver\", for CUDA programs";
        const ALONE: &str = "is there without trust = \"driver\"";
        let driver = self.optional(section, "driver");
        let host = self.optional(section, "host_memory");
        let entry = self.optional(section, "trust");
        let text = match &entry {
            Some(entry) => self.string(entry, RULE)?,
            None => "kernels",
        };
        let host_memory = match &host {
            Some(entry) if text == "kernels" => {
                return self.wrong(entry, ALONE, "write that as well, or leave it out");
            }
            Some(entry) => Some(self.size(entry, MIN_HOST_MEMORY, "32M")?),
            None => None,
        };
        match (text, &entry, driver) {
            ("kernels", _, None) => Some(Trust::Kernels),
            ("kernels", _, Some(driver)) => self.wrong(&driver, ALONE, "write that as well, or leave it out"),
            ("driver", Some(entry), _) if matches!(device, Some(AcceleratorDevice::Npu(_))) => {
                self.wrong(entry, "is \"driver\", and an NPU has no CUDA driver", "leave it out")
            }
            ("driver", Some(entry), _) if !has_window => {
                self.wrong(entry, "is \"driver\" without a window", "write window = \"256M\" as well")
            }
            ("driver", _, Some(driver)) => {
                self.path(&driver).map(|library| Trust::Driver { library: Some(library), host_memory })
            }
            ("driver", ..) => Some(Trust::Driver { library: None, host_memory }),
            (other, Some(entry), _) => self.wrong(entry, &format!("is \"{}\"", shorten(other)), RULE),
            (_, None, _) => None,
        }
    }

    fn quota(&mut self, entry: &Entry<'_, '_>) -> Option<u64> {
        self.size(entry, MIN_QUOTA, "2M")
    }

    /// A size of at least so many bytes, which are written so.
    fn size(&mut self, entry: &Entry<'_, '_>, least: u64, from: &str) -> Option<u64> {
        let rule = format!("write a size from {from} to 16T, as in \"512M\" or \"4G\"");
        let text = self.string(entry, &rule)?;
        let what = match parse_size(text) {
            Err(what) => what,
            Ok(bytes) if bytes < least => "is too small",
            Ok(bytes) if bytes > MAX_MEMORY => "is too large",
            Ok(bytes) => return Some(bytes),
        };
        self.wrong(entry, &format!("is \"{}\", which {what}", shorten(text)), &rule)
    }

    fn window(&mut self, entry: &Entry<'_, '_>) -> Option<u64> {
        const RULE: &str = "write a power of two from 2M to 16T, as in \"64M\" or \"1G\"";
        let text = self.string(entry, RULE)?;
        let what = match parse_size(text) {
            Err(what) => what,
            Ok(bytes) if bytes < MIN_QUOTA => "is too small",
            Ok(bytes) if bytes > MAX_MEMORY => "is too large",
            Ok(bytes) if !bytes.is_power_of_two() => "is not a power of two",
            Ok(bytes) => return Some(bytes),
        };
        self.wrong(entry, &format!("is \"{}\", which {what}", shorten(text)), RULE)
    }

    fn duration(
        &mut self,
        entry: &Entry<'_, '_>,
        least: Duration,
        most: Duration,
        rule: &str,
    ) -> Option<Duration> {
        let rule = format!("write a time {rule}");
        let text = match entry.value {
            DeValue::String(_) => self.string(entry, &rule)?,
            _ => return self.wrong_type(entry, &rule),
        };
        let what = match parse_duration(text) {
            Err(what) => what,
            Ok(time) if time < least => "is too short",
            Ok(time) if time > most => "is too long",
            Ok(time) => return Some(time),
        };
        self.wrong(entry, &format!("is \"{}\", which {what}", shorten(text)), &rule)
    }
}

/// The number of an NPU, written in one way alone: the worker reads it again.
fn npu_number(text: &str) -> Option<u32> {
    text.parse().ok().filter(|number: &u32| number.to_string() == text)
}

/// Parses a deadline, as a guest's file has one.
///
/// # Errors
/// What is wrong with it.
pub fn parse_deadline(text: &str) -> Result<Duration, &'static str> {
    match parse_duration(text)? {
        time if time < MIN_DEADLINE => Err("is less than 10ms"),
        time if time > MAX_DEADLINE => Err("is more than 3600s"),
        time => Ok(time),
    }
}

/// Parses a time slice, as a guest's file has one.
///
/// # Errors
/// What is wrong with it.
pub fn parse_time_slice(text: &str) -> Result<Duration, &'static str> {
    match parse_duration(text)? {
        time if time < MIN_SLICE => Err("is less than 1ms"),
        time if time > TIME_PERIOD => Err("is more than 100ms"),
        time => Ok(time),
    }
}

/// Parses a whole number with a unit, `us`, `ms` or `s`.
fn parse_duration(text: &str) -> Result<Duration, &'static str> {
    const UNITS: [(&str, u64); 3] = [("us", 1), ("ms", 1000), ("s", 1_000_000)];
    let (digits, unit) = UNITS
        .into_iter()
        .find_map(|(name, unit)| text.strip_suffix(name).map(|digits| (digits, unit)))
        .ok_or("does not end in us, ms or s")?;
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err("is not a whole number before its unit");
    }
    let number: u64 = digits.parse().map_err(|_| "is too long")?;
    number.checked_mul(unit).map(Duration::from_micros).ok_or("is too long")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_times() {
        fn check(text: &str, expect: Result<u64, &str>) {
            assert_eq!(parse_duration(text), expect.map(Duration::from_micros), "{text}");
        }
        check("20us", Ok(20));
        check("20ms", Ok(20_000));
        check("2s", Ok(2_000_000));
        check("0s", Ok(0));
        check("20", Err("does not end in us, ms or s"));
        check("", Err("does not end in us, ms or s"));
        check("us", Err("is not a whole number before its unit"));
        check("s", Err("is not a whole number before its unit"));
        check("1.5s", Err("is not a whole number before its unit"));
        check("-1s", Err("is not a whole number before its unit"));
        check("18446744073709551615s", Err("is too long"));
        check("99999999999999999999ms", Err("is too long"));
    }
}
