//! `tune`: measures the variants of a family on an accelerator, and keeps the fastest.

use std::fmt::Write as _;
use std::time::Duration;

use vm_ir::GuestAddr;
use vm_passthrough::accelerator::kernels::family::{Problem, Variant};
use vm_passthrough::accelerator::{Figure, Outcome, Tuned};

use super::compile::sizes;
use crate::api::{self, Body, VariantOutcome};
use crate::cli::context::Context;
use crate::cli::kernel::tune::{self, FamilyArgs, MeasureArgs, Ran, Task, TuneArgs};
use crate::cli::kernel::wait;
use crate::failure::Failure;
use crate::text::table::Table;

/// How long a device is waited for beyond the limit, which the tuner keeps by itself: opening it may take as long.
const GRACE: Duration = Duration::from_secs(20);

/// Tunes a family.
///
/// # Errors
/// When the device is not there or no variant can be measured.
pub(crate) fn run(context: &mut Context<'_>, arguments: &TuneArgs) -> Result<(), Failure> {
    match &arguments.family {
        FamilyArgs::Gemm(gemm) => tune(context, gemm.product(), &gemm.measure),
        FamilyArgs::Attention(attention) if attention.backward => {
            tune(context, attention.gradients()?, &attention.measure)
        }
        FamilyArgs::Attention(attention) => tune(context, attention.forward()?, &attention.measure),
        FamilyArgs::Decode(decode) => tune(context, decode.problem()?, &decode.measure),
    }
}

fn tune<P: Problem + Clone + Send + 'static>(
    context: &mut Context<'_>,
    problem: P,
    measure: &MeasureArgs,
) -> Result<(), Failure> {
    let MeasureArgs { device, limit, again } = *measure;
    let task = Task { problem: problem.clone(), limit, again, cache: context.cache.clone() };
    let host = context.host.clone();
    let what = format!("tuning {} for {}", problem.family(), problem.class());
    let ran = wait::run(&what, limit.saturating_add(GRACE), move || tune::run(&task, device, &host))?;
    context.print(|| Body::Tune(document(&problem, &ran)), || text(&problem, &ran))
}

fn outcome(outcome: &Outcome) -> VariantOutcome {
    match outcome {
        Outcome::Measured(_) => VariantOutcome::Measured,
        Outcome::Slower(_) => VariantOutcome::Slower,
        Outcome::Failed(_) => VariantOutcome::Failed,
        Outcome::Late => VariantOutcome::Late,
    }
}

/// Operations in a second, in units of 10^12.
fn rate(problem: &impl Problem, figure: &Figure) -> f64 {
    problem.operations() / figure.median.as_secs_f64() / 1e12
}

fn microseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e9).round() / 1e3
}

fn text<P: Problem>(problem: &P, ran: &Ran<P::Variant>) -> String {
    let tuned = &ran.tuned;
    let how = if tuned.cached { "kept from before, found" } else { "tuned" };
    let mut text = format!(
        "{} {} on {}: {how} in {:.1} ms\n",
        problem.family(),
        problem.class(),
        ran.device_name,
        api::milliseconds(tuned.elapsed)
    );
    let mut table =
        Table::new(["", "VARIANT", "MEDIAN µs", "LEAST", "GREATEST", "SAMPLES", "TERA-OPS/s", "OUTCOME"]);
    for candidate in &tuned.candidates {
        let dash = || "-".to_owned();
        let figure = candidate.outcome.figure();
        let time = |of: fn(&Figure) -> Duration| {
            figure.as_ref().map_or_else(dash, |figure| format!("{:.2}", microseconds(of(figure))))
        };
        let word: &'static str = outcome(&candidate.outcome).into();
        table.push([
            if candidate.name == tuned.name { "*".into() } else { String::new() },
            candidate.name.clone(),
            time(|figure| figure.median),
            time(|figure| figure.least),
            time(|figure| figure.greatest),
            figure.map_or_else(dash, |figure| figure.samples.to_string()),
            figure.as_ref().map_or_else(dash, |figure| format!("{:.1}", rate(problem, figure))),
            match &candidate.outcome {
                Outcome::Failed(reason) => format!("{word}: {reason}"),
                _ => word.to_owned(),
            },
        ]);
    }
    // Writing to a string does not fail.
    let _ = write!(text, "{table}");
    match &launches(tuned)[..] {
        [api::TunedLaunch { grid, .. }] => {
            let _ = writeln!(text, "chosen: {}, over {} blocks", tuned.name, sizes(*grid));
        }
        several => {
            let _ = writeln!(text, "chosen: {}, one behind the other:", tuned.name);
            for api::TunedLaunch { kernel, grid } in several {
                let _ = writeln!(text, "  @{kernel}, over {} blocks", sizes(*grid));
            }
        }
    }
    text
}

/// The kernels of a choice, and what they are launched over.
fn launches<V: Variant>(tuned: &Tuned<V>) -> Vec<api::TunedLaunch> {
    // It was compiled before it was chosen.
    let kernels = tuned.variant.kernels(GuestAddr(0)).unwrap_or_default();
    let launches = kernels.iter().zip(&tuned.steps);
    launches
        .map(|(kernel, step)| api::TunedLaunch { kernel: kernel.name().to_owned(), grid: step.grid })
        .collect()
}

fn document<P: Problem>(problem: &P, ran: &Ran<P::Variant>) -> api::Tuned {
    let tuned = &ran.tuned;
    let variants = tuned.candidates.iter().map(|candidate| {
        let figure = candidate.outcome.figure();
        api::Variant {
            name: candidate.name.clone(),
            outcome: outcome(&candidate.outcome),
            median_us: figure.map(|figure| microseconds(figure.median)),
            least_us: figure.map(|figure| microseconds(figure.least)),
            greatest_us: figure.map(|figure| microseconds(figure.greatest)),
            samples: figure.map_or(0, |figure| figure.samples),
            tera_operations: figure.map(|figure| rate(problem, &figure)),
            reason: match &candidate.outcome {
                Outcome::Failed(reason) => Some(reason.clone()),
                _ => None,
            },
        }
    });
    api::Tuned {
        family: problem.family().to_owned(),
        class: problem.class(),
        device: ran.device.clone(),
        device_name: ran.device_name.clone(),
        chosen: tuned.name.clone(),
        grid: tuned.grid,
        launches: launches(tuned),
        cached: tuned.cached,
        elapsed_ms: api::milliseconds(tuned.elapsed),
        variants: variants.collect(),
    }
}
