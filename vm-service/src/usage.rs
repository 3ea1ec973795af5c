//! Asks the drivers of GPUs what uses them.

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use vm_passthrough::{DeviceType, Host, PciAddress, PciFunction};

#[cfg(feature = "cuda")]
use crate::json::GpuProcess;
use crate::json::Usage;

/// How long all answers may take. A driver that wakes a GPU for it takes seconds.
const DEADLINE: Duration = Duration::from_secs(10);

/// What uses each of these functions; `None` for one of which no driver tells, or on a host that is only files.
pub(crate) fn of(host: &Host, functions: &[&PciFunction]) -> Vec<Option<Usage>> {
    let is_told = |function: &&PciFunction| {
        function.device_type == DeviceType::GpuNvidia && host.disk_probe().is_some()
    };
    let is_asked =
        |function: &&&PciFunction| is_told(function) && function.driver.as_deref() == Some("nvidia");
    let asked: Vec<_> = functions.iter().filter(is_asked).map(|function| function.address).collect();
    let mut answers = answers(asked);
    let answer = |function: &&PciFunction| {
        let known = match (&function.driver, answers.remove(&function.address)) {
            (_, Some(answer)) => answer,
            (Some(driver), None) if driver == "nvidia" => {
                Err(format!("its driver did not answer in {} s", DEADLINE.as_secs()))
            }
            (Some(driver), None) => Err(format!("the driver nvidia would tell, and it has {driver}")),
            (None, None) => Err("the driver nvidia would tell, and it has none".into()),
        };
        let unknown = |why| Usage { unknown: Some(why), ..Usage::default() };
        is_told(function).then(|| known.map_or_else(unknown, |usage| with_commands(host, usage)))
    };
    functions.iter().map(answer).collect()
}

/// The answers that come in time.
fn answers(asked: Vec<PciAddress>) -> BTreeMap<PciAddress, Result<Usage, String>> {
    let (send, receive) = mpsc::channel();
    let (mut answers, mut left) = (BTreeMap::new(), asked.len());
    // It may wait for a driver that does not answer, and is left behind then.
    let ask_all = move || asked.into_iter().try_for_each(|address| send.send((address, ask(address))));
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
fn ask(address: PciAddress) -> Result<Usage, String> {
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
fn ask(_: PciAddress) -> Result<Usage, String> {
    Err("this program was built without CUDA; build it with the cargo feature cuda".into())
}
