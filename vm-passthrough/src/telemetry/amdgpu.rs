//! Files of the driver amdgpu (Linux `Documentation/gpu/amdgpu/thermal.rst` and `driver-misc.rst`).

use std::io::Read as _;
use std::path::Path;

use super::{Clock, Source, Telemetry, Throttle, hwmon, number};
use crate::files;

pub(super) fn read(dir: &Path) -> Telemetry {
    let sensors = hwmon::directory(dir);
    let mut telemetry = sensors.as_deref().map(hwmon::sensors_of).unwrap_or_default();
    let busy = number::<u32>(&dir.join("gpu_busy_percent")).map(|busy| busy.min(100));
    let total = number(&dir.join("mem_info_vram_total"));
    if sensors.is_none() && busy.is_none() && total.is_none() {
        return Telemetry::unknown(format!(
            "amdgpu shows neither sensors nor load nor memory in {}",
            dir.display()
        ));
    }
    let clock = |hertz: &str, levels: &str| {
        let (starred, max) =
            files::read_trimmed(&dir.join(levels)).map(|text| self::levels(&text)).unwrap_or_default();
        let now = sensors.as_ref().and_then(|sensors| number::<u64>(&sensors.join(hertz)));
        let now = now.and_then(|hertz| u32::try_from(hertz / 1_000_000).ok());
        Clock { now: now.or(starred), max }
    };
    telemetry.core_clock = clock("freq1_input", "pp_dpm_sclk");
    telemetry.memory_clock = clock("freq2_input", "pp_dpm_mclk");
    telemetry.performance_state = files::read_trimmed(&dir.join("power_dpm_force_performance_level"));
    telemetry.busy = busy;
    telemetry.memory_used = number(&dir.join("mem_info_vram_used"));
    telemetry.memory_total = total;
    telemetry.replays = number(&dir.join("pcie_replay_count"));
    telemetry.throttle = metrics(&dir.join("gpu_metrics")).and_then(|bytes| throttle(&bytes));
    Telemetry { source: Source::Amdgpu, ..telemetry }
}

/// More than the driver has, of any version.
const MAX_METRICS: u64 = 64 << 10;

fn metrics(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    files::open(path).ok()?.take(MAX_METRICS).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// MHz of the level that a clock is at, which has a star, and of the highest: lines as `1: 2394Mhz *`.
fn levels(text: &str) -> (Option<u32>, Option<u32>) {
    let (mut starred, mut max) = (None, None);
    for line in text.lines() {
        let Some((_, level)) = line.split_once(':') else { continue };
        let level = level.trim();
        let digits = level.bytes().take_while(u8::is_ascii_digit).count();
        let Ok(mhz) = level[..digits].parse::<u32>() else { continue };
        max = max.max(Some(mhz));
        if level.ends_with('*') {
            starred = Some(mhz);
        }
    }
    (starred, max)
}

/// Why clocks are held down, of `gpu_metrics` in its version 1.3 (Linux `drivers/gpu/drm/amd/include/kgd_pp_interface.h`): the
/// one for GPUs of which bits are the same for all of them (`SMU_THROTTLER_*`).
fn throttle(bytes: &[u8]) -> Option<Vec<Throttle>> {
    const VERSION: [u8; 2] = [1, 3];
    /// Bytes before `indep_throttle_status`, the last field.
    const AT: usize = 112;
    if bytes.get(2..4)? != VERSION {
        return None;
    }
    let status = u64::from_le_bytes(bytes.get(AT..AT + 8)?.try_into().ok()?);
    // A field that the GPU does not have is all ones.
    (status != u64::MAX).then(|| Throttle::of_amd(status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_of_a_clock() {
        let check = |text, expect| assert_eq!(levels(text), expect, "{text}");
        check("0: 500Mhz\n1: 2394Mhz *\n2: 2500Mhz\n", (Some(2394), Some(2500)));
        check("0: 96Mhz *\n", (Some(96), Some(96)));
        check("S: 19Mhz *\n0: 500Mhz\n", (Some(19), Some(500)));
        check("", (None, None));
        check("0: \u{e9}Mhz\n1 9\n: *\n2: 99999999999Mhz", (None, None));
    }

    #[test]
    fn throttling_is_read_of_one_version_only() {
        let metrics = |revision: [u8; 2], status: u64| {
            let mut bytes = vec![0; 120];
            bytes[..4].copy_from_slice(&[120, 0, revision[0], revision[1]]);
            bytes[112..].copy_from_slice(&status.to_le_bytes());
            bytes
        };
        let check = |bytes: &[u8], expect: Option<&[Throttle]>| {
            assert_eq!(throttle(bytes).as_deref(), expect, "{bytes:?}")
        };
        check(&metrics([1, 3], 0), Some(&[]));
        check(&metrics([1, 3], 1 << 36 | 1), Some(&[Throttle::PowerLimit, Throttle::Temperature]));
        check(&metrics([1, 3], 1 << 16 | 1 << 56), Some(&[Throttle::Current, Throttle::Other]));
        check(&metrics([1, 3], u64::MAX), None);
        check(&metrics([1, 1], 1), None);
        check(&metrics([1, 3], 1)[..119], None);
        check(&[], None);
    }
}
