//! What NVIDIA's management library tells. It knows no hot spot, and nothing of PCI Express that is not in sysfs but replays.

use vm_runtime::nvml;

use super::{Clock, Source, Telemetry, Throttle};
use crate::PciAddress;

pub(super) fn read(address: PciAddress) -> Telemetry {
    let told = match nvml::telemetry(&address.to_string()) {
        Ok(told) => told,
        Err(error) => return Telemetry::unknown(error.to_string()),
    };
    let clock = |[now, max]: [Option<u32>; 2]| Clock { now, max };
    Telemetry {
        source: Source::Nvml,
        temperature: told.health.temperature.map(f64::from),
        power: told.health.power,
        power_limit: told.health.power_limit,
        fan_percent: told.fan_percent,
        core_clock: clock(told.core_clock),
        memory_clock: clock(told.memory_clock),
        performance_state: told.performance_state.map(|state| format!("P{state}")),
        busy: told.health.busy,
        memory_used: told.health.memory_used,
        memory_total: told.memory_bytes,
        replays: told.replays.map(u64::from),
        throttle: told.throttle_reasons.map(Throttle::of_nvml),
        ..Telemetry::default()
    }
}
