//! The files of the driver amdgpu on a simulated host, and what writes to them do (Linux `drivers/gpu/drm/amd/pm/amdgpu_pm.c`).

use std::fs;
use std::io;
use std::path::Path;

use super::SimHost;
use crate::PciAddress;

/// The lowest and the highest MHz that each clock can be set to.
const RANGES: [(&str, u32, u32); 2] = [("OD_SCLK", 500, 3000), ("OD_MCLK", 97, 1500)];
/// The highest MHz that each has by default.
const DEFAULTS: [u32; 2] = [2500, 1249];
/// Levels that can be forced.
const LEVELS: [&str; 9] = [
    "auto",
    "low",
    "high",
    "manual",
    "profile_standard",
    "profile_min_sclk",
    "profile_min_mclk",
    "profile_peak",
    "perf_determinism",
];

impl SimHost {
    /// Adds what `amdgpu` shows of a GPU that is at work: load, memory, clocks, sensors, metrics of version 1.3, and the error
    /// counters of AER. Where [`SimDrivers`](super::SimDrivers) commands the host, writes are answered as by the driver.
    ///
    /// # Errors
    /// When there is no such function or the file system refuses.
    pub fn add_amdgpu(&self, address: PciAddress) -> io::Result<()> {
        let dir = self.device_dir(address)?;
        let sensors = dir.join("hwmon/hwmon4");
        fs::create_dir_all(&sensors)?;
        for (name, text) in [
            ("gpu_busy_percent", "41\n".to_owned()),
            ("mem_info_vram_used", format!("{}\n", 3u64 << 30)),
            ("mem_info_vram_total", format!("{}\n", 24u64 << 30)),
            ("pcie_replay_count", "0\n".into()),
            ("power_dpm_force_performance_level", "auto\n".into()),
            ("pp_dpm_sclk", levels(&[500, 1725, DEFAULTS[0]], 1)),
            ("pp_dpm_mclk", levels(&[97, 456, DEFAULTS[1]], 2)),
            ("pp_od_clk_voltage", overdrive(DEFAULTS)),
            ("aer_dev_correctable", "RxErr 0\nBadTLP 0\nTOTAL_ERR_COR 0\n".into()),
            ("aer_dev_nonfatal", "Undefined 0\nTOTAL_ERR_NONFATAL 0\n".into()),
            ("aer_dev_fatal", "Undefined 0\nTOTAL_ERR_FATAL 0\n".into()),
        ] {
            fs::write(dir.join(name), text)?;
        }
        let mut metrics = [0; 120];
        metrics[..4].copy_from_slice(&[120, 0, 1, 3]);
        fs::write(dir.join("gpu_metrics"), metrics)?;
        for (name, text) in [
            ("name", "amdgpu"),
            ("temp1_label", "edge"),
            ("temp1_input", "52000"),
            ("temp2_label", "junction"),
            ("temp2_input", "63000"),
            ("temp3_label", "mem"),
            ("temp3_input", "58000"),
            ("power1_average", "87000000"),
            ("power1_cap", "303000000"),
            ("power1_cap_default", "303000000"),
            ("power1_cap_min", "200000000"),
            ("power1_cap_max", "348000000"),
            ("fan1_input", "1180"),
            ("pwm1", "64"),
            ("pwm1_enable", "2"),
            ("pwm1_min", "0"),
            ("pwm1_max", "255"),
            ("freq1_input", "1725000000"),
            ("freq2_input", "1249000000"),
        ] {
            fs::write(sensors.join(name), format!("{text}\n"))?;
        }
        Ok(())
    }
}

/// What a write to one of these files does; `name` is its path below the function's directory, `dir`.
pub(super) fn write(dir: &Path, name: &str, value: &str) -> io::Result<()> {
    let (path, value) = (dir.join(name), value.trim_end());
    let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
    // Its files are its own: no link leads a write out of it, and the reader of a FIFO is not waited for.
    if fs::canonicalize(&path)? != path || !path.is_file() {
        return Err(io::Error::from_raw_os_error(libc::EACCES));
    }
    let put = |path: &Path, text: String| fs::write(path, text + "\n");
    let number = |path: &Path| {
        let text = fs::read_to_string(path)?;
        text.trim_end().parse::<u64>().map_err(|_| invalid())
    };
    match name.rsplit('/').next().unwrap_or(name) {
        "power_dpm_force_performance_level" if LEVELS.contains(&value) => put(&path, value.into()),
        "pp_od_clk_voltage" => edit(dir, &path, value),
        "pp_dpm_sclk" | "pp_dpm_mclk" => choose(dir, &path, value),
        "power1_cap" => {
            let microwatts: u64 = value.parse().map_err(|_| invalid())?;
            let limit = |name| number(&path.with_file_name(name));
            if !(limit("power1_cap_min")?..=limit("power1_cap_max")?).contains(&microwatts) {
                return Err(invalid());
            }
            // The driver keeps whole watts.
            put(&path, (microwatts / 1_000_000 * 1_000_000).to_string())
        }
        "pwm1_enable" if ["0", "1", "2"].contains(&value) => put(&path, value.into()),
        "pwm1" if number(&path.with_file_name("pwm1_enable"))? == 1 => {
            let pwm: u64 = value.parse().map_err(|_| invalid())?;
            put(&path, pwm.min(255).to_string())
        }
        _ => Err(invalid()),
    }
}

/// A command to `pp_od_clk_voltage`: the highest clock (`s 1 2300`, `m 1 1200`), commit (`c`), defaults (`r`).
fn edit(dir: &Path, path: &Path, command: &str) -> io::Result<()> {
    let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
    let level = fs::read_to_string(dir.join("power_dpm_force_performance_level"))?;
    if level.trim_end() != "manual" {
        return Err(invalid());
    }
    let mut clocks = highest(&fs::read_to_string(path)?).ok_or_else(invalid)?;
    match command.split(' ').collect::<Vec<_>>()[..] {
        ["r"] => fs::write(path, overdrive(DEFAULTS)),
        ["c"] => {
            fs::write(dir.join("pp_dpm_sclk"), levels(&[500, clocks[0].min(1725), clocks[0]], 1))?;
            fs::write(dir.join("pp_dpm_mclk"), levels(&[97, clocks[1].min(456), clocks[1]], 2))
        }
        [clock @ ("s" | "m"), "1", mhz] => {
            let index = usize::from(clock == "m");
            let mhz: u32 = mhz.parse().map_err(|_| invalid())?;
            let (_, min, max) = RANGES[index];
            if !(min..=max).contains(&mhz) {
                return Err(invalid());
            }
            clocks[index] = mhz;
            fs::write(path, overdrive(clocks))
        }
        _ => Err(invalid()),
    }
}

/// Levels of a clock that are enabled, by their numbers: it is at the highest of them, or where it was below that.
fn choose(dir: &Path, path: &Path, numbers: &str) -> io::Result<()> {
    let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
    let level = fs::read_to_string(dir.join("power_dpm_force_performance_level"))?;
    let text = fs::read_to_string(path)?;
    let shown: Vec<&str> = text.lines().map(|line| line.trim_end_matches(" *")).collect();
    let numbers: Vec<usize> = numbers.split_whitespace().filter_map(|number| number.parse().ok()).collect();
    let highest = numbers.iter().copied().max().filter(|&highest| highest < shown.len());
    let (Some(highest), "manual") = (highest, level.trim_end()) else { return Err(invalid()) };
    let now = text.lines().position(|line| line.ends_with('*')).unwrap_or(highest).min(highest);
    let line = |(at, line): (usize, &&str)| format!("{line}{}\n", if at == now { " *" } else { "" });
    fs::write(path, shown.iter().enumerate().map(line).collect::<String>())
}

/// The table as the driver shows it, with these highest clocks.
fn overdrive(highest: [u32; 2]) -> String {
    let clocks: String = RANGES
        .iter()
        .zip(highest)
        .map(|((name, min, _), max)| format!("{name}:\n0: {min}Mhz\n1: {max}Mhz\n"))
        .collect();
    let ranges: String =
        RANGES.iter().map(|(name, min, max)| format!("{}: {min:>7}Mhz {max:>10}Mhz\n", &name[3..])).collect();
    format!("{clocks}OD_RANGE:\n{ranges}")
}

/// The highest clocks of a table.
fn highest(table: &str) -> Option<[u32; 2]> {
    let mut found =
        table.lines().filter_map(|line| line.strip_prefix("1: ")?.strip_suffix("Mhz")?.parse().ok());
    Some([found.next()?, found.next()?])
}

/// Levels of a clock, of which it has one.
fn levels(mhz: &[u32], now: usize) -> String {
    mhz.iter()
        .enumerate()
        .map(|(level, mhz)| format!("{level}: {mhz}Mhz{}\n", if level == now { " *" } else { "" }))
        .collect()
}
