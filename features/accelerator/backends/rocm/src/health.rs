//! What `amdgpu` tells of how a device does, by files of sysfs: Linux `Documentation/gpu/amdgpu/thermal.rst`, `driver-misc.rst` and
//! `ras.rst`. It needs no ROCm.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;
use std::str::FromStr;

use crate::Roots;

/// Most bytes of a file; each has a line or two.
const MAX_BYTES: u64 = 4096;
/// Most entries of a directory that are looked at.
const MAX_ENTRIES: usize = 256;

/// How a device does. What it does not tell is `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Health {
    /// Degrees Celsius at its edge; of GPUs without that sensor, at the hottest point.
    pub temperature: Option<f64>,
    /// Watts drawn.
    pub power: Option<f64>,
    /// The watts at which it throttles itself.
    pub power_limit: Option<f64>,
    /// Percent of the time that it worked.
    pub busy: Option<u32>,
    /// Bytes of device memory in use, by anybody.
    pub memory_used: Option<u64>,
    /// Bytes of device memory.
    pub memory_bytes: Option<u64>,
    /// Errors that were corrected, over all of the blocks that count them (RAS), since the driver has the device.
    pub corrected_errors: Option<u64>,
    /// Errors that were not.
    pub uncorrected_errors: Option<u64>,
    /// Packets that were sent again on PCI Express.
    pub replays: Option<u64>,
}

/// How the device at a PCI address does; all is `None` where amdgpu does not drive it.
pub fn health(roots: &Roots, address: &str) -> Health {
    // An address is no path.
    if !address.bytes().all(|byte| byte.is_ascii_hexdigit() || matches!(byte, b':' | b'.')) {
        return Health::default();
    }
    let directory = roots.sys.join("bus/pci/devices").join(address);
    let number = |name: &str| number::<u64>(&directory.join(name));
    let hwmon = entries(&directory.join("hwmon")).into_iter().find(|name| name.starts_with("hwmon"));
    let hwmon = hwmon.map(|name| directory.join("hwmon").join(name));
    let sensor = |name: &str, units: f64| {
        let value: i64 = self::number(&hwmon.as_ref()?.join(name))?;
        Some(value as f64 / units)
    };
    let (corrected_errors, uncorrected_errors) = errors(&directory.join("ras"));
    Health {
        temperature: sensor("temp1_input", 1e3).or_else(|| sensor("temp2_input", 1e3)),
        // Newer GPUs have the power of now and no average.
        power: sensor("power1_average", 1e6).or_else(|| sensor("power1_input", 1e6)),
        power_limit: sensor("power1_cap", 1e6).filter(|&watts| watts > 0.0),
        busy: number("gpu_busy_percent").map(|percent| percent.min(100) as u32),
        memory_used: number("mem_info_vram_used"),
        memory_bytes: number("mem_info_vram_total"),
        corrected_errors,
        uncorrected_errors,
        replays: number("pcie_replay_count"),
    }
}

/// Corrected and uncorrected errors of all files `*_err_count`, which have a line `ce: N` and a line `ue: N`.
fn errors(directory: &Path) -> (Option<u64>, Option<u64>) {
    let mut counts: [Option<u64>; 2] = [None; 2];
    for name in entries(directory).into_iter().filter(|name| name.ends_with("_err_count")) {
        let text = read(&directory.join(name)).unwrap_or_default();
        for (count, key) in counts.iter_mut().zip(["ce:", "ue:"]) {
            let value =
                text.lines().find_map(|line| line.trim().strip_prefix(key)?.trim().parse::<u64>().ok());
            if let Some(value) = value {
                *count = Some(count.unwrap_or(0).saturating_add(value));
            }
        }
    }
    counts.into()
}

fn entries(directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let mut names: Vec<_> = entries
        .take(MAX_ENTRIES)
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort_unstable();
    names
}

fn read(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

fn number<T: FromStr>(path: &Path) -> Option<T> {
    read(path)?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_files_tell() {
        let check = |files: &[(&str, &str)], expect: Health| {
            let root = tempfile::tempdir().unwrap();
            let device = root.path().join("bus/pci/devices/0000:65:00.0");
            for (path, text) in files {
                let path = device.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            let roots = Roots { sys: root.path().into(), dev: "/dev".into() };
            assert_eq!(health(&roots, "0000:65:00.0"), expect, "{files:?}");
            assert_eq!(health(&roots, "../0000:65:00.0"), Health::default());
        };
        check(&[], Health::default());
        check(&[("gpu_busy_percent", "many"), ("hwmon/hwmon3/temp1_input", "")], Health::default());
        check(
            &[
                ("hwmon/hwmon3/temp2_input", "61000\n"),
                ("hwmon/hwmon3/power1_input", "412500000\n"),
                ("hwmon/hwmon3/power1_cap", "750000000\n"),
                ("gpu_busy_percent", "99\n"),
                ("mem_info_vram_used", "1048576\n"),
                ("mem_info_vram_total", "205822885888\n"),
                ("pcie_replay_count", "2\n"),
                ("ras/umc_err_count", "ue: 1\nce: 3\n"),
                ("ras/sdma_err_count", "ue: 0\nce: 4\n"),
                ("ras/gfx_err_count", "query interface is not there"),
                ("ras/features", "feature mask: 0x7"),
            ],
            Health {
                temperature: Some(61.0),
                power: Some(412.5),
                power_limit: Some(750.0),
                busy: Some(99),
                memory_used: Some(1 << 20),
                memory_bytes: Some(205_822_885_888),
                corrected_errors: Some(7),
                uncorrected_errors: Some(1),
                replays: Some(2),
            },
        );
    }
}
