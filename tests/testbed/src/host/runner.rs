//! Runs scenarios, several at once, and tells how each went.

use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::image::make_l1;
use super::machine::{Files, Machine, Next};
use super::{Programs, workspace};
use crate::provision::{LinuxKernel, say};
use crate::report::Report;
use crate::scenario::{Scenario, Variant};

/// One scenario on one variant, and the Linux kernel for it or why there is none.
#[derive(Clone, Debug)]
pub struct Run {
    /// The scenario.
    pub scenario: &'static Scenario,
    /// The variant.
    pub variant: Variant,
    /// L1's processors.
    pub processors: u8,
    /// The Linux kernel of L1 and of Linux guests.
    pub kernel: Result<LinuxKernel, String>,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All that it checks held.
    Passed,
    /// Something did not hold, and what.
    Failed(String),
    /// It could not run here, and why.
    Skipped(String),
}

/// What came of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The scenario's name.
    pub scenario: &'static str,
    /// The variant.
    pub variant: Variant,
    /// How it ended.
    pub verdict: Verdict,
    /// How long it took.
    pub took: Duration,
    /// What was checked and held.
    pub proved: Vec<String>,
    /// What was measured: name, value, unit.
    pub figures: Vec<(String, f64, String)>,
    /// What could not be measured, and why.
    pub unmeasured: Vec<(String, String)>,
    /// Where its logs are.
    pub logs: PathBuf,
}

/// Runs all of `runs`, `jobs` at once. `verbose` prints every step.
pub fn run_all(runs: &[Run], programs: &Programs, jobs: usize, verbose: bool) -> Vec<Outcome> {
    let next = AtomicUsize::new(0);
    let outcomes = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..jobs.clamp(1, runs.len().max(1)) {
            scope.spawn(|| {
                while let Some(run) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let outcome = run_one(run, programs, verbose);
                    announce(&outcome);
                    outcomes.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(outcome);
                }
            });
        }
    });
    let mut outcomes = outcomes.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    let place = |outcome: &Outcome| {
        runs.iter().position(|run| run.scenario.name == outcome.scenario && run.variant == outcome.variant)
    };
    outcomes.sort_by_key(place);
    outcomes
}

fn announce(outcome: &Outcome) {
    let name = format!("{} ({})", outcome.scenario, outcome.variant);
    let seconds = outcome.took.as_secs_f64();
    match &outcome.verdict {
        Verdict::Passed => {
            say(format_args!("ok      {name} in {seconds:.1} s, {} checks", outcome.proved.len()))
        }
        Verdict::Skipped(reason) => say(format_args!("skipped {name}: {reason}")),
        Verdict::Failed(reason) => {
            say(format_args!(
                "FAILED  {name} in {seconds:.1} s: {reason}\n  logs: {}",
                outcome.logs.display()
            ));
        }
    }
}

fn run_one(run: &Run, programs: &Programs, verbose: bool) -> Outcome {
    let start = Instant::now();
    let logs = workspace().join("target/testbed").join(format!("{}-{}", run.scenario.name, run.variant));
    let mut outcome = Outcome {
        scenario: run.scenario.name,
        variant: run.variant,
        verdict: Verdict::Passed,
        took: Duration::ZERO,
        proved: Vec::new(),
        figures: Vec::new(),
        unmeasured: Vec::new(),
        logs: logs.clone(),
    };
    outcome.verdict = match &run.kernel {
        Err(reason) => Verdict::Failed(format!("there is no Linux kernel for it: {reason}")),
        Ok(kernel) => {
            let files = Files { directory: logs };
            boot(run, kernel, programs, verbose, &files, &mut outcome)
                .unwrap_or_else(|error| Verdict::Failed(format!("{error:#}")))
        }
    };
    outcome.took = start.elapsed();
    outcome
}

fn boot(
    run: &Run,
    kernel: &LinuxKernel,
    programs: &Programs,
    verbose: bool,
    files: &Files,
    outcome: &mut Outcome,
) -> Result<Verdict> {
    if files.directory.exists() {
        fs::remove_dir_all(&files.directory)
            .with_context(|| format!("can't remove {}", files.directory.display()))?;
    }
    fs::create_dir_all(&files.directory)
        .with_context(|| format!("can't make {}", files.directory.display()))?;
    make_l1(&files.initrd(), programs, kernel, run.scenario.contents)?;
    let mut machine = Machine::start(run, &kernel.image, files)?;
    let start = Instant::now();
    let mut last = "booting L1".to_owned();
    let verdict = loop {
        match machine.next() {
            Next::Report(report) => {
                if verbose {
                    say(format_args!(
                        "{} ({}) {:6.2} s  {}",
                        run.scenario.name,
                        run.variant,
                        start.elapsed().as_secs_f64(),
                        report.line()
                    ));
                }
                match report {
                    Report::Up { level, kernel } => last = format!("L{level} runs Linux {kernel}"),
                    Report::Step { what } => last = what,
                    Report::Proved { what } => outcome.proved.push(what),
                    Report::Figure { name, value, unit } => outcome.figures.push((name, value, unit)),
                    Report::Unmeasured { name, reason } => outcome.unmeasured.push((name, reason)),
                    Report::Value { .. } => {}
                    Report::Monitor { command } => machine.command(&command)?,
                    Report::Passed => break Verdict::Passed,
                    Report::Skipped { reason } => break Verdict::Skipped(reason),
                    Report::Failed { reason } => {
                        break Verdict::Failed(format!("{last}: {reason}{}", evidence(files)));
                    }
                }
            }
            Next::Ended => {
                break Verdict::Failed(format!("L1 ended without a verdict, at: {last}{}", evidence(files)));
            }
            Next::TooLate => {
                let seconds = run.scenario.deadline.as_secs();
                break Verdict::Failed(format!(
                    "no verdict within {seconds} s, at: {last}{}",
                    evidence(files)
                ));
            }
        }
    };
    let powered_off = machine.end()?;
    if verdict == Verdict::Passed && !powered_off {
        let reason = format!("all checks held, but L1 did not power off{}", evidence(files));
        return Ok(Verdict::Failed(reason));
    }
    if verdict == Verdict::Passed {
        // They are large, and made anew by each run.
        for large in [files.initrd(), files.directory.join("guest.cpio")] {
            let _ = fs::remove_file(large);
        }
    }
    Ok(verdict)
}

/// The ends of the run's logs, for people.
fn evidence(files: &Files) -> String {
    let mut text = String::new();
    for (what, path) in [("console", files.console()), ("QEMU", files.qemu())] {
        let tail = crate::provision::tail(&path, 20);
        if !tail.trim().is_empty() {
            text.push_str(&format!("\n  --- the end of L1's {what} log ---\n{tail}"));
        }
    }
    text
}
