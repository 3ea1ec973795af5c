//! Kernels of vm-ir's filetests at sizes that matter: whether they are right there, and how fast they are beside
//! PyTorch's and a device copy.

mod measure;
pub(crate) mod peers;
mod work;

use std::time::Duration;

use anyhow::Context;

use crate::table::{Aim, Figure, Report, Sample};
use crate::{Arguments, Gpu, Test};
use measure::Bench;
use work::Work;

/// How long a launch and what is timed with it may take.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The tests of this section.
pub(crate) fn tests(_: &Arguments) -> Vec<Test> {
    let mut tests = Vec::new();
    for work in Work::all() {
        tests.push(Test::new(format!("{} of other sizes", work.name()), move |gpu, report| {
            ragged(gpu, work, report)
        }));
        tests.push(Test::new(work.to_string(), move |gpu, report| run(gpu, work, report)));
    }
    tests
}

/// Small sizes, and such as leave a rest.
fn ragged(gpu: &Gpu, work: Work, report: &mut Report) -> anyhow::Result<()> {
    let sizes = work.ragged();
    for size in &sizes {
        let bench = Bench::new(gpu, *size, 1)?;
        bench.check().with_context(|| size.to_string())?;
        bench.end()?;
    }
    report.note(format!("{} sizes, a guest's and the host's own", sizes.len()));
    Ok(())
}

/// The size of the figures.
fn run(gpu: &Gpu, work: Work, report: &mut Report) -> anyhow::Result<()> {
    let bench = Bench::new(gpu, work, measure::SETS)?;
    bench.check()?;
    let times = bench.time()?;
    bench.end()?;
    let speed = |seconds: &[f64], bytes: u64| {
        Sample::of(seconds.iter().map(|seconds| bytes as f64 / seconds / 1e12).collect())
    };
    let own = speed(&times.trusted, work.bytes());
    let mut figure = |name: &str, peer: Sample, aim: f64| {
        report.figure(Figure {
            name: work.to_string(),
            unit: "TB/s".into(),
            ours: own.clone(),
            peer: Some((name.into(), peer)),
            aim: Some(Aim::RatioAtLeast(aim)),
        });
    };
    let (of_copy, of_peer) = if work.is_row() { (0.95, 1.0) } else { (0.98, 0.98) };
    figure("device copy", speed(&times.copy, work.copied()), of_copy);
    match peers::of(work) {
        Ok(peers) => {
            for (name, seconds) in peers {
                figure(&format!("PyTorch {name}"), speed(seconds, work.bytes()), of_peer);
            }
        }
        Err(reason) => report.note(format!("without PyTorch: {reason}")),
    }
    let micro = |seconds: &[f64]| Sample::of(seconds.iter().map(|seconds| seconds * 1e6).collect());
    report.figure(Figure {
        name: format!("{work}, as a guest's"),
        unit: "µs".into(),
        ours: micro(&times.guest),
        peer: Some(("the host's own".into(), micro(&times.trusted))),
        aim: Some(Aim::RatioAtMost(1.03)),
    });
    Ok(())
}
