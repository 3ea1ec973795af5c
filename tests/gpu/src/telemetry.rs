//! What the GPU tells of itself through `vm_passthrough::telemetry`, and through `vm-service egpu status`. It is only read.

use anyhow::{Context, ensure};
use serde_json::Value;
use vm_accel::Accelerator as _;
use vm_passthrough::Host;
use vm_passthrough::telemetry::{Clock, GpuLink, Reader, Source, Telemetry};

use crate::Report;
use crate::chip::function;
use crate::gpu::Gpu;
use crate::service::{Files, address};
use crate::skip::skip;

/// How often the command is compared with what was read before and after it: a GPU may wake in that moment.
const TRIES: u32 = 5;

/// Reads it, and compares what the command says.
pub(crate) fn check(gpu: &Gpu, report: &mut Report) -> anyhow::Result<()> {
    let host = Host::system();
    let function = function(&host, address(gpu)?)?;
    let reader = Reader::new(&host, &function, None);
    let read = || reader.read().context("the GPU has gone");
    let told = read()?;
    match &told.source {
        Source::Nvml => {}
        Source::None(why) => return skip(format!("nobody tells of the GPU: {why}")),
        source => anyhow::bail!("{source} tells of it, not NVML"),
    }
    report.note(format!("{told:?}"));
    is_sane(&told, gpu.accelerator.info().memory_bytes)?;

    let files = Files::new()?;
    let mut differs = None;
    for _ in 0..TRIES {
        let before = read()?;
        let answer = files.vm_service(gpu, "egpu status ADDR --json")?;
        ensure!(answer.exit == 0, "{}{}", answer.out, answer.err);
        let said: Value = serde_json::from_str(&answer.out)?;
        let said = &said["gpus"][0];
        ensure!(said["address"] == function.address.to_string() && said["state"] == "there", "{said}");
        if said["tunnelled"] == true {
            return skip("it is behind a tunnel, of which the reader here does not know");
        }
        match is_same(&said["telemetry"], &before, &read()?) {
            Ok(()) => return Ok(()),
            Err(error) => differs = Some(error),
        }
    }
    differs.map_or(Ok(()), Err)
}

/// That it is what a GPU at work or at rest tells. What it does not tell is left out, but for what each GPU of NVIDIA's has.
fn is_sane(told: &Telemetry, memory: u64) -> anyhow::Result<()> {
    let temperature = told.temperature.context("no temperature")?;
    ensure!((1.0..120.0).contains(&temperature), "{temperature} °C");
    let (power, limit) = (told.power.context("no power")?, told.power_limit.context("no power limit")?);
    ensure!(power > 0.0 && limit > 0.0 && power < limit * 1.5, "{power} W of {limit} W");
    for (name, Clock { now, max }) in [("core", told.core_clock), ("memory", told.memory_clock)] {
        let (now, max) = (now.context("no clock")?, max.context("no highest clock")?);
        ensure!(now > 0 && now <= max && max < 50_000, "{name}: {now} MHz of {max} MHz");
    }
    let (used, total) = (told.memory_used.context("no memory")?, told.memory_total.context("no memory")?);
    ensure!(used <= total && total >= memory, "{used} bytes of {total}, and CUDA has {memory}");
    ensure!(told.busy.is_none_or(|busy| busy <= 100), "{:?} % busy", told.busy);
    let state = told.performance_state.as_deref().and_then(|state| state.strip_prefix('P')?.parse().ok());
    ensure!(state.is_some_and(|state: u32| state < 16), "performance state {:?}", told.performance_state);
    if let Some(GpuLink::Pcie(link)) = told.link {
        let speeds = [2_500, 5_000, 8_000, 16_000, 32_000, 64_000];
        ensure!(speeds.contains(&link.speed) && speeds.contains(&link.max_speed), "{link:?}");
        ensure!(link.speed <= link.max_speed && (1..=link.max_width).contains(&link.width), "{link:?}");
    }
    Ok(())
}

/// That the command says what was read before and after it: what changes lies between, with what a sensor may be off by.
fn is_same(said: &Value, before: &Telemetry, after: &Telemetry) -> anyhow::Result<()> {
    let fixed = |name: &str, value: Value| -> anyhow::Result<()> {
        ensure!(said[name] == value, "{name} is {} by the command, {value} by the library", said[name]);
        Ok(())
    };
    let close = |name: &str, of: fn(&Telemetry) -> Option<f64>, off: f64| -> anyhow::Result<()> {
        let (before, after) = (of(before), of(after));
        let holds = match (said[name].as_f64(), before, after) {
            (Some(said), Some(before), Some(after)) => {
                (before.min(after) - off..=before.max(after) + off).contains(&said)
            }
            (None, None, None) => true,
            _ => false,
        };
        ensure!(holds, "{name} is {} by the command, {before:?}, then {after:?} by the library", said[name]);
        Ok(())
    };
    fixed("source", "nvml".into())?;
    fixed("unknown", Value::Null)?;
    fixed("power_limit_watts", after.power_limit.into())?;
    fixed("core_max_mhz", after.core_clock.max.into())?;
    fixed("memory_max_mhz", after.memory_clock.max.into())?;
    fixed("memory_bytes", after.memory_total.into())?;
    if let Some(GpuLink::Pcie(link)) = after.link {
        let Value::Object(said) = &said["link"] else { anyhow::bail!("the command says no link") };
        let expect = [Value::from(link.max_speed), link.max_width.into(), Value::Null];
        let names = ["max_speed", "max_width", "receive_megabits"];
        ensure!(names.map(|name| said.get(name)) == expect.each_ref().map(Some), "{said:?}, {link:?}");
    } else {
        fixed("link", Value::Null)?;
    }
    close("temperature_celsius", |told| told.temperature, 3.0)?;
    close("power_watts", |told| told.power, 20.0)?;
    close("core_mhz", |told| told.core_clock.now.map(f64::from), 300.0)?;
    close("memory_mhz", |told| told.memory_clock.now.map(f64::from), 0.0)?;
    close("memory_used_bytes", |told| told.memory_used.map(|bytes| bytes as f64), f64::from(1 << 30))
}
