//! `vmhook bench`: what each call takes without the hook and with it.

use std::ffi::OsStr;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use serde::{Deserialize, Serialize};
use vm_hook::driver::GRANULE;

use crate::child::{self, Mode, Runner};
use crate::sys::{self, Driver, OUT_OF_MEMORY};
use crate::{output, units};

const MIB: u64 = 1 << 20;
/// How many blocks fill the device.
const BLOCKS: u64 = 64;
/// Calls before those that are measured.
const WARM_UP: u32 = 20;
/// After so many launches and copies the device is waited for, which is not measured.
const BATCH: u32 = 64;

/// Measure what each call takes without the hook and with it
#[derive(Args)]
pub(crate) struct Bench {
    #[command(flatten)]
    program: ProgramOptions,
    /// Write JSON instead of a table
    #[arg(long)]
    json: bool,
    /// The hook's library; beside this program, or in ../lib, without it
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// How long each of the two runs may take, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    timeout: u64,
}

/// What the program that is measured is told.
#[derive(Args)]
struct ProgramOptions {
    /// The device
    #[arg(long, default_value_t = 0)]
    device: u32,
    /// How often each call is made
    #[arg(long, default_value_t = 1000)]
    calls: u32,
}

/// The program that is measured.
#[derive(Args)]
pub(crate) struct Program {
    #[command(flatten)]
    options: ProgramOptions,
}

/// Why nothing is measured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The driver refuses.
    #[error(transparent)]
    Driver(#[from] sys::Error),
    /// The program gives no answer.
    #[error(transparent)]
    Child(#[from] child::Error),
    /// What was found can't be told.
    #[error(transparent)]
    Output(#[from] output::Error),
    /// No folder for it can be made.
    #[error("can't make a folder for answers: {0}")]
    Folder(#[from] io::Error),
}

/// A call's times, in nanoseconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Call {
    call: String,
    p50: u64,
    p99: u64,
}

/// What was measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Answer {
    device: String,
    calls: Vec<Call>,
    launches_per_second: f64,
    /// Of what is free, the share that the largest allocation has: on an empty device, and once every other block of a full one is freed.
    largest_before: f64,
    largest_after: f64,
}

/// Both.
#[derive(Debug, Serialize)]
struct Report {
    without: Answer,
    with: Answer,
}

impl Program {
    /// Measures, and writes the answer.
    ///
    /// # Errors
    /// [`Error`].
    pub(crate) fn run(self) -> Result<(), Error> {
        let answer = measured(&Driver::open(self.options.device)?, self.options.calls.max(1))?;
        Ok(output::say(&serde_json::json!(answer).to_string())?)
    }
}

/// Times of a call that is made so often; in between something else is done, which is not measured.
fn timed(
    name: &str,
    calls: u32,
    mut call: impl FnMut() -> sys::Result<()>,
    mut between: impl FnMut(u32) -> sys::Result<()>,
) -> sys::Result<Call> {
    let mut times = Vec::with_capacity(calls as usize);
    for at in 0..calls.saturating_add(WARM_UP) {
        let start = Instant::now();
        call()?;
        let time = start.elapsed().as_nanos() as u64;
        if at >= WARM_UP {
            times.push(time);
        }
        between(at)?;
    }
    Ok(summary(name.into(), times))
}

fn summary(call: String, mut times: Vec<u64>) -> Call {
    times.sort_unstable();
    let at =
        |percent: usize| times.get((times.len() * percent / 100).min(times.len().saturating_sub(1))).copied();
    Call { call, p50: at(50).unwrap_or(0), p99: at(99).unwrap_or(0) }
}

fn measured(driver: &Driver, count: u32) -> sys::Result<Answer> {
    let device = driver.device_name()?;
    let mut calls = Vec::new();
    let each = |at: u32| if at % BATCH == BATCH - 1 { driver.synchronize() } else { Ok(()) };
    for bytes in [512, MIB, 64 * MIB] {
        let (mut allocate, mut free) = (Vec::new(), Vec::new());
        // Large ones take long.
        let count = if bytes > MIB { count.div_ceil(4) } else { count };
        for at in 0..count.saturating_add(WARM_UP) {
            let start = Instant::now();
            let memory = driver.allocate(bytes)?;
            let middle = Instant::now();
            driver.free(memory)?;
            let end = middle.elapsed();
            if at >= WARM_UP {
                allocate.push((middle - start).as_nanos() as u64);
                free.push(end.as_nanos() as u64);
            }
        }
        let bytes = units::bytes(bytes);
        calls.extend([
            summary(format!("cuMemAlloc {bytes}"), allocate),
            summary(format!("cuMemFree {bytes}"), free),
        ]);
    }
    // Of virtual memory, where the hook is on.
    let (from, to) = (driver.allocate(4 * MIB)?, driver.allocate(4 * MIB)?);
    calls.push(timed("cuMemcpyDtoD 1 MiB", count, || driver.copy(&to, &from, MIB), each)?);
    calls.push(timed("cuMemGetInfo", count, || driver.memory().map(|_| ()), |_| Ok(()))?);
    calls.push(timed("cuPointerGetAttribute", count, || driver.ask(&from), |_| Ok(()))?);
    let kernel = driver.empty()?;
    calls.push(timed("cuLaunchKernel", count, || driver.launch(&kernel), each)?);
    driver.synchronize()?;
    let start = Instant::now();
    for _ in 0..count {
        driver.launch(&kernel)?;
    }
    driver.synchronize()?;
    let launches_per_second = f64::from(count) / start.elapsed().as_secs_f64().max(1e-9);
    driver.free(from)?;
    driver.free(to)?;
    let (largest_before, largest_after) = fragmentation(driver)?;
    Ok(Answer { device, calls, launches_per_second, largest_before, largest_after })
}

/// The share of what is free that the largest allocation has, before and after every other block of a full device is freed.
fn fragmentation(driver: &Driver) -> sys::Result<(f64, f64)> {
    let before = largest(driver)?;
    let (free, _) = driver.memory()?;
    // The driver needs some itself.
    let block = (free - free / 20) / BLOCKS / GRANULE * GRANULE;
    let mut kept = Vec::new();
    let blocks = (0..BLOCKS).map(|_| driver.allocate(block.max(GRANULE))).collect::<sys::Result<Vec<_>>>()?;
    for (at, memory) in blocks.into_iter().enumerate() {
        if at % 2 == 0 { kept.push(memory) } else { driver.free(memory)? }
    }
    let after = largest(driver)?;
    kept.into_iter().try_for_each(|memory| driver.free(memory))?;
    Ok((before, after))
}

/// The largest allocation that there is now, to the granule, as a share of what is free.
fn largest(driver: &Driver) -> sys::Result<f64> {
    let (free, _) = driver.memory()?;
    // So many granules are had, and so many not.
    let (mut had, mut not) = (0, free / GRANULE + 1);
    while had + 1 < not {
        let middle = had + (not - had) / 2;
        match driver.allocate(middle * GRANULE) {
            Ok(memory) => {
                driver.free(memory)?;
                had = middle;
            }
            Err(sys::Error::Call { code: OUT_OF_MEMORY, .. }) => not = middle,
            Err(error) => return Err(error),
        }
    }
    Ok((had * GRANULE) as f64 / free.max(1) as f64)
}

impl Bench {
    /// Measures without the hook and with it, and writes both.
    ///
    /// # Errors
    /// [`Error`].
    pub(crate) fn run(self) -> Result<(), Error> {
        let folder = tempfile::tempdir()?;
        let timeout = Duration::from_secs(self.timeout);
        let runner = Runner { library: self.library.as_deref(), folder: folder.path(), timeout };
        let (device, calls) = (self.program.device.to_string(), self.program.calls.to_string());
        let arguments = ["bench-program", "--device", &device, "--calls", &calls].map(OsStr::new);
        let without: Answer = runner.ask(Mode::Off, None, &arguments)?;
        let with: Answer = runner.ask(Mode::Vmm, None, &arguments)?;
        let report = Report { without, with };
        match self.json {
            true => output::say(&serde_json::json!(report).to_string())?,
            false => output::say(&table(&report))?,
        }
        Ok(())
    }
}

fn table(Report { without, with }: &Report) -> String {
    let mut lines = vec![
        without.device.clone(),
        String::new(),
        "| call | without, p50 | p99 | with, p50 | p99 | ratio of p50 |".into(),
        "| --- | --- | --- | --- | --- | --- |".into(),
    ];
    let time = |nanoseconds| units::time(Duration::from_nanos(nanoseconds));
    for (one, other) in without.calls.iter().zip(&with.calls) {
        let ratio = other.p50 as f64 / one.p50.max(1) as f64;
        let [a, b, c, d] = [one.p50, one.p99, other.p50, other.p99].map(time);
        lines.push(format!("| {} | {a} | {b} | {c} | {d} | {ratio:.2} |", one.call));
    }
    let both =
        |name: &str, of: &dyn Fn(&Answer) -> String| format!("| {name} | {} | {} |", of(without), of(with));
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    lines.extend([
        String::new(),
        "| | without | with |".into(),
        "| --- | --- | --- |".into(),
        both("empty launches in a second", &|of| format!("{:.0}", of.launches_per_second)),
        both("largest allocation of what is free", &|of| percent(of.largest_before)),
        both("once every other block is freed", &|of| percent(of.largest_after)),
    ]);
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_what_was_measured() {
        let check = |times: Vec<u64>, p50: u64, p99: u64| {
            let of = summary("call".into(), times.clone());
            assert_eq!((of.p50, of.p99), (p50, p99), "{times:?}");
        };
        check(vec![], 0, 0);
        check(vec![3], 3, 3);
        check((0..100).rev().collect(), 50, 99);
        check((0..1000).collect(), 500, 990);
    }
}
