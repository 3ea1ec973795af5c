//! Sensors of a driver, by the Linux kernel's hwmon (Linux `Documentation/hwmon/sysfs-interface.rst`).

use std::path::{Path, PathBuf};

use super::{Source, Telemetry, number};
use crate::files;

/// Most sensors of one kind that are looked for.
const MAX_SENSORS: u32 = 16;

/// What the hwmon of any driver tells.
pub(super) fn read(dir: &Path, driver: &str) -> Telemetry {
    match directory(dir) {
        Some(sensors) => Telemetry { source: Source::Hwmon(driver.into()), ..sensors_of(&sensors) },
        None => Telemetry::unknown(format!("the driver {driver} shows no sensors")),
    }
}

/// The directory of a function's first hwmon.
pub(crate) fn directory(dir: &Path) -> Option<PathBuf> {
    let hwmon = dir.join("hwmon");
    let name = files::names(&hwmon).ok()?.into_iter().find(|name| name.starts_with("hwmon"))?;
    Some(hwmon.join(name))
}

/// Temperatures by their labels, and power, limit and fan.
pub(super) fn sensors_of(sensors: &Path) -> Telemetry {
    let mut telemetry = Telemetry::default();
    // Thousandths of a degree.
    let degrees = |index: u32| {
        Some(number::<i32>(&sensors.join(format!("temp{index}_input")))?).map(|of| f64::from(of) / 1e3)
    };
    for index in 1..=MAX_SENSORS {
        let Some(degrees) = degrees(index) else {
            // Those of some drivers begin at 2; none leaves out more than one.
            if index > 2 {
                break;
            }
            continue;
        };
        let place = match files::read_trimmed(&sensors.join(format!("temp{index}_label"))).as_deref() {
            Some("junction") => &mut telemetry.hot_spot,
            Some("mem" | "vram") => &mut telemetry.memory_temperature,
            _ => &mut telemetry.temperature,
        };
        place.get_or_insert(degrees);
    }
    // Millionths of a watt.
    let watts = |name: &str| Some(number::<u64>(&sensors.join(name))? as f64 / 1e6);
    // Newer GPUs have the power of now and no average.
    telemetry.power = watts("power1_average").or_else(|| watts("power1_input"));
    telemetry.power_limit = watts("power1_cap").or_else(|| watts("power1_max")).filter(|&limit| limit > 0.0);
    telemetry.fan_speed = number(&sensors.join("fan1_input"));
    let pwm = number::<u32>(&sensors.join("pwm1"));
    let most = number::<u32>(&sensors.join("pwm1_max")).unwrap_or(255).max(1);
    telemetry.fan_percent = pwm.map(|pwm| (pwm.min(most) * 100 + most / 2) / most);
    telemetry
}
