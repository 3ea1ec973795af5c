//! Asks the drivers of GPUs what uses them.

mod drm;

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use vm_passthrough::{DeviceType, Host, PciAddress, PciFunction};

#[cfg(feature = "cuda")]
use crate::api::GpuProcess;
use crate::api::Usage;

/// How long all answers may take. A driver that wakes a GPU for it takes seconds.
const DEADLINE: Duration = Duration::from_secs(10);

/// What uses each of these functions; `None` for one of which no driver tells, or on a host that is only files.
pub(crate) fn of(host: &Host, functions: &[&PciFunction]) -> Vec<Option<Usage>> {
    let is_live = host.disk_probe().is_some();
    let teller = |function: &PciFunction| match function.device_type {
        DeviceType::GpuNvidia if is_live => Some("nvidia"),
        DeviceType::GpuAmd if is_live => Some("amdgpu"),
        _ => None,
    };
    let is_asked = |function: &&&PciFunction| {
        teller(function).is_some_and(|teller| function.driver.as_deref() == Some(teller))
    };
    let asked = functions.iter().filter(is_asked).map(|function| (function.address, function.device_type));
    let mut answers = answers(host, asked.collect());
    let answer = |function: &&PciFunction| {
        let teller = teller(function)?;
        let known = match (function.driver.as_deref(), answers.remove(&function.address)) {
            (_, Some(answer)) => answer,
            (Some(driver), None) if driver == teller => {
                Err(format!("its driver did not answer in {} s", DEADLINE.as_secs()))
            }
            (driver, None) => {
                Err(format!("the driver {teller} would tell, and it has {}", driver.unwrap_or("none")))
            }
        };
        let unknown = |why| Usage { unknown: Some(why), ..Usage::default() };
        Some(known.map_or_else(unknown, |usage| with_commands(host, usage)))
    };
    functions.iter().map(answer).collect()
}

/// The answers that come in time.
fn answers(host: &Host, asked: Vec<(PciAddress, DeviceType)>) -> BTreeMap<PciAddress, Result<Usage, String>> {
    let (send, receive) = mpsc::channel();
    let (mut answers, mut left) = (BTreeMap::new(), asked.len());
    // It may wait for a driver that does not answer, and is left behind then.
    let host = host.clone();
    let ask = move |(address, device_type)| match device_type {
        DeviceType::GpuAmd => (address, drm::of(&host, address)),
        _ => (address, ask_nvidia(address)),
    };
    let ask_all = move || asked.into_iter().try_for_each(|function| send.send(ask(function)));
    if let Err(error) = std::thread::Builder::new().name("usage".into()).spawn(ask_all) {
        tracing::warn!("no GPU is asked for its use: {error}");
    }
    let until = Instant::now() + DEADLINE;
    while left > 0
        && let Ok((address, answer)) = receive.recv_timeout(until.saturating_duration_since(Instant::now()))
    {
        answers.insert(address, answer);
        left -= 1;
    }
    answers
}

/// Names the processes.
fn with_commands(host: &Host, mut usage: Usage) -> Usage {
    for process in usage.processes.iter_mut().flatten() {
        let name = std::fs::read_to_string(host.proc.join(process.pid.to_string()).join("comm"));
        process.command = name.ok().map(|name| name.trim_end().to_owned());
    }
    usage
}

#[cfg(feature = "cuda")]
fn ask_nvidia(address: PciAddress) -> Result<Usage, String> {
    let usage =
        vm_passthrough::accelerator::cuda_usage(&address.to_string()).map_err(|error| error.to_string())?;
    Ok(Usage {
        unknown: None,
        busy_percent: usage.health.busy,
        memory_used_bytes: usage.health.memory_used,
        memory_bytes: usage.memory_bytes,
        temperature_celsius: usage.health.temperature,
        power_watts: usage.health.power,
        processes: usage.processes.map(|processes| {
            let of = processes.into_iter();
            of.map(|of| GpuProcess { pid: of.pid, command: None, memory_bytes: of.memory_bytes }).collect()
        }),
    })
}

#[cfg(not(feature = "cuda"))]
fn ask_nvidia(_: PciAddress) -> Result<Usage, String> {
    Err("this program was built without CUDA; build it with the cargo feature cuda".into())
}
