//! `egpu benchmark`: how fast a GPU is, and how much of what its link allows.

use std::cell::Cell;
use std::fmt::Write as _;
use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use vm_passthrough::sim::SimHost;
use vm_passthrough::{DeviceType, Host, PciAddress, pci};

use crate::api::{BenchmarkDirection, BenchmarkSpread, Body, EgpuBenchmark};
use crate::cli::benchmark::{self, Allowed, Measured, SIZES};
use crate::cli::context::Context;
use crate::cli::kernel::{engine, wait};
use crate::deadlines;
use crate::devices::gpus::{self, Gpu, GpuName};
use crate::failure::Failure;
use crate::text::table::Table;

/// Arguments of `egpu benchmark`.
#[derive(Debug, Args)]
pub(super) struct BenchmarkArgs {
    /// The GPU, as in 0000:65:00.0 or 65:00.0, or its enclosure: the UUID or the router, as in 0-1; without one, the only one behind a
    /// tunnel
    #[arg(value_name = "GPU")]
    name: Option<GpuName>,
    /// Copy with a check by CRC-32 at both ends as well, and report what arrived corrupted and what that costs
    #[arg(long)]
    checked: bool,
    /// Give up after SECONDS
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = deadlines::seconds)]
    deadline: Duration,
}

/// Measures a GPU.
///
/// # Errors
/// When there is no such GPU or several, it can't be used, a copy stays corrupted, a signal comes, or it takes too long.
pub(super) fn run(context: &mut Context<'_>, args: &BenchmarkArgs) -> Result<(), Failure> {
    let gpu = gpus::one(&context.host, args.name, "name one")?;
    let measured = match &context.sim {
        Some(sim) => simulated(sim, &gpu, args.checked)?,
        None => measured(&context.host, &gpu, args)?,
    };
    let report = report(&context.host, &gpu, measured);
    context.print(|| Body::EgpuBenchmark(report.clone()), || text(&report))
}

/// What the model of an enclosure's link makes of copies.
fn simulated(sim: &SimHost, gpu: &Gpu, checked: bool) -> Result<Measured, Failure> {
    match gpu.enclosure.as_ref().and_then(|router| Some((router.route, router.link?))) {
        Some((route, rates)) => benchmark::simulate(&gpu.name(), rates, &sim.link_of(route)?, checked),
        None => Err(Failure::failed(format_args!(
            "{} is simulated, and what is simulated of links are those of enclosures; connect one with `vm-service egpu connect`, and \
             leave out the address",
            gpu.address()
        ))),
    }
}

/// What the device itself makes of them, with progress on a terminal.
fn measured(host: &Host, gpu: &Gpu, args: &BenchmarkArgs) -> Result<Measured, Failure> {
    if let Some(guest) = &gpu.guest {
        let address = gpu.address();
        return Err(Failure::failed(format_args!(
            "guest {guest} has {address}; take it from there with `vm-service detach {address}`"
        )));
    }
    if let Some(refusal) = engine::refusal(&gpu.function) {
        return Err(refusal);
    }
    let bar = ProgressBar::new(benchmark::steps(args.checked, SIZES.len()));
    // The template is a constant; where it were wrong, the usual one would do.
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} {elapsed}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    let (host, address, checked, shown) = (host.clone(), gpu.address(), args.checked, bar.clone());
    let kind = gpu.function.device_type;
    let work = move || {
        let _lease = engine::lease(address, &host)?;
        let done = Cell::new(0);
        let step = |what: &str| {
            shown.set_position(done.replace(done.get() + 1));
            shown.set_message(what.to_owned());
        };
        match kind {
            DeviceType::GpuAmd => on_rocm(address, &host, checked, &step),
            _ => on_cuda(address, checked, &step),
        }
    };
    let what = format!("the benchmark of {address}");
    let told = |so_far: Duration| {
        if bar.is_hidden() {
            tracing::info!("{what}: {:.0} s so far", so_far.as_secs_f64());
        }
    };
    let outcome = wait::telling(&what, args.deadline, &told, work);
    bar.finish_and_clear();
    outcome
}

#[cfg(feature = "cuda")]
fn on_cuda(address: PciAddress, checked: bool, step: &dyn Fn(&str)) -> Result<Measured, Failure> {
    let (gpu, assembler) = engine::cuda(address)?;
    benchmark::measure(gpu, |compiler| compiler.assembler(assembler), &SIZES, checked, step)
}

#[cfg(not(feature = "cuda"))]
fn on_cuda(address: PciAddress, _: bool, _: &dyn Fn(&str)) -> Result<Measured, Failure> {
    Err(engine::without(address, "cuda"))
}

#[cfg(feature = "rocm")]
fn on_rocm(
    address: PciAddress,
    host: &Host,
    checked: bool,
    step: &dyn Fn(&str),
) -> Result<Measured, Failure> {
    benchmark::measure(engine::rocm(address, host)?, |compiler| compiler, &SIZES, checked, step)
}

#[cfg(not(feature = "rocm"))]
fn on_rocm(address: PciAddress, _: &Host, _: bool, _: &dyn Fn(&str)) -> Result<Measured, Failure> {
    Err(engine::without(address, "rocm"))
}

fn report(host: &Host, gpu: &Gpu, measured: Measured) -> EgpuBenchmark {
    let tunnel = gpu.tunnel.as_ref().map(|_| gpu.enclosure.as_ref().and_then(|router| router.link));
    // A link slows down soon after it was used, so it is asked now.
    let link = pci::read_function(host, gpu.address()).ok().and_then(|function| function.link);
    let allowed: Option<Allowed> = benchmark::allowed(tunnel, link);
    let mut transfers = measured.transfers;
    for transfer in &mut transfers {
        transfer.percent_of_link = allowed.as_ref().map(|allowed| {
            let most = match transfer.direction {
                BenchmarkDirection::ToDevice => allowed.to_device,
                BenchmarkDirection::FromDevice => allowed.from_device,
            };
            transfer.rate.median / most * 100.0
        });
    }
    EgpuBenchmark {
        address: gpu.address().to_string(),
        device: measured.device,
        enclosure: gpu.enclosure_name(),
        link: allowed.as_ref().map(Into::into),
        transfers,
        latencies: measured.latencies,
        f32_flops: measured.f32_flops,
        memory_bytes_per_second: measured.memory,
        checks: measured.checks,
    }
}

fn text(report: &EgpuBenchmark) -> String {
    let EgpuBenchmark { address, device, enclosure, link, .. } = report;
    let mut text = format!("{address} {device}");
    // A String takes any write, here and below.
    if let Some(enclosure) = enclosure {
        let _ = write!(text, " in {enclosure} (inferred)");
    }
    let _ = match link {
        None => writeln!(text, "; its link's rate is unknown"),
        Some(link) => {
            let (to, from) = (link.to_device / 1e9, link.from_device / 1e9);
            writeln!(text, "\nits link allows {to:.2} GB/s to it and {from:.2} GB/s from it: {}", link.basis)
        }
    };
    let columns =
        ["MEMORY", "DIRECTION", "SIZE", "GB/s", "10%..90%", "OF LINK", "CHECKED", "10%..90%", "TIME"];
    let mut table = Table::new(columns);
    for transfer in &report.transfers {
        let dash = || "-".to_owned();
        let checked = transfer.checked.as_ref();
        table.push([
            transfer.memory.to_string(),
            transfer.direction.to_string(),
            format!("{} MiB", transfer.bytes >> 20),
            format!("{:.2}", transfer.rate.median / 1e9),
            range(&transfer.rate, 1e9),
            transfer.percent_of_link.map_or_else(dash, |percent| format!("{percent:.0} %")),
            checked.map_or_else(dash, |rate| format!("{:.2}", rate.median / 1e9)),
            checked.map_or_else(dash, |rate| range(rate, 1e9)),
            transfer.checked_time_ratio.map_or_else(dash, |ratio| format!("{ratio:.2} times")),
        ]);
    }
    let _ = write!(text, "{table}");
    for latency in &report.latencies {
        let (median, range) = (latency.seconds.median * 1e6, range(&latency.seconds, 1e-6));
        let _ = writeln!(text, "{} bytes {}: {median:.2} µs ({range})", latency.bytes, latency.direction);
    }
    if let Some(flops) = &report.f32_flops {
        let _ = writeln!(text, "f32 FMA: {:.2} TFLOP/s ({})", flops.median / 1e12, range(flops, 1e12));
    }
    if let Some(memory) = &report.memory_bytes_per_second {
        let _ = writeln!(
            text,
            "memory, read and written: {:.1} GB/s ({})",
            memory.median / 1e9,
            range(memory, 1e9)
        );
    }
    if let Some(checks) = &report.checks {
        let (chunks, corrupted, resent) = (checks.chunks, checks.corrupted, checks.resent);
        let _ = writeln!(text, "checked copies: {chunks} chunks, {corrupted} corrupted, {resent} sent again");
    }
    text
}

fn range(spread: &BenchmarkSpread, unit: f64) -> String {
    format!("{:.2}..{:.2}", spread.low / unit, spread.high / unit)
}
