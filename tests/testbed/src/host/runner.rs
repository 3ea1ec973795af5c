//! Runs scenarios, several at once and those of one machine in one L1, and tells how each went.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::image::make_l1;
use super::machine::{Files, Machine, Next};
use super::{Programs, workspace};
use crate::provision::{LinuxKernel, say};
use crate::report::Report;
use crate::scenario::{Contents, Scenario, Variant};
use crate::sweep::Sweep;

/// One scenario on one variant, and the Linux kernel for it or why there is none.
#[derive(Clone, Debug)]
pub struct Run {
    /// The scenario.
    pub scenario: &'static Scenario,
    /// The variant.
    pub variant: Variant,
    /// L1's processors.
    pub processors: u8,
    /// How much of its sweeps is taken.
    pub sweep: Sweep,
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
    /// Why it failed the first time, where it passed the second.
    pub flaky: Option<String>,
    /// How long it took.
    pub took: Duration,
    /// How long processors ran for its machine.
    pub processor: Duration,
    /// What was checked and held.
    pub proved: Vec<String>,
    /// What was measured: name, value, unit.
    pub figures: Vec<(String, f64, String)>,
    /// What could not be measured, and why.
    pub unmeasured: Vec<(String, String)>,
    /// Where its logs are.
    pub logs: PathBuf,
}

/// How many scenarios one L1 runs at most: the last batch runs alone once the others have ended.
const BATCH: usize = 4;

/// How scenarios are run.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How many at once.
    pub jobs: usize,
    /// Run what failed once more: QEMU's emulation of nested virtualisation seems to lose interrupts.
    pub retry: bool,
    /// Print every step.
    pub verbose: bool,
}

/// Runs all of `runs`.
pub fn run_all(runs: &[Run], programs: &Programs, options: Options) -> Vec<Outcome> {
    let batches = batches(runs);
    let next = AtomicUsize::new(0);
    let outcomes = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..options.jobs.clamp(1, batches.len().max(1)) {
            scope.spawn(|| {
                while let Some(batch) = batches.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let done = run_batch(batch, programs, options);
                    outcomes.lock().unwrap_or_else(std::sync::PoisonError::into_inner).extend(done);
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

/// Those that one L1 can run one after the other.
fn batches(runs: &[Run]) -> Vec<Vec<&Run>> {
    let mut batches: Vec<Vec<&Run>> = Vec::new();
    for run in runs {
        let joins = |batch: &&mut Vec<&Run>| {
            let same =
                |other: &&Run| other.variant == run.variant && other.scenario.has_machine_of(run.scenario);
            batch.first().is_some_and(same) && batch.len() < BATCH
        };
        match batches.iter_mut().find(joins) {
            Some(batch) => batch.push(run),
            None => batches.push(vec![run]),
        }
    }
    batches
}

fn announce(outcome: &Outcome) {
    let name = format!("{} ({})", outcome.scenario, outcome.variant);
    let seconds = outcome.took.as_secs_f64();
    match &outcome.verdict {
        Verdict::Passed if outcome.flaky.is_some() => {
            say(format_args!("FLAKY   {name}: it failed the first time, and passed the second"));
        }
        Verdict::Passed => {
            let processor = outcome.processor.as_secs_f64();
            let checks = outcome.proved.len();
            say(format_args!(
                "ok      {name} in {seconds:.1} s ({processor:.1} s of processor), {checks} checks"
            ));
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

/// Runs a batch. What comes after one that failed has an L1 of its own, as that may have left anything behind.
fn run_batch(batch: &[&Run], programs: &Programs, options: Options) -> Vec<Outcome> {
    let mut outcomes: Vec<Outcome> = Vec::new();
    while let Some(rest) = batch.get(outcomes.len()..).filter(|rest| !rest.is_empty()) {
        outcomes.extend(run_in_one(rest, programs, options.verbose, ""));
        let Some(last) = outcomes.last_mut().filter(|_| options.retry) else { continue };
        let Verdict::Failed(reason) = &last.verdict else { continue };
        let reason = reason.clone();
        let again =
            batch.iter().filter(|run| run.scenario.name == last.scenario).copied().collect::<Vec<_>>();
        if let Some(mut again) = run_in_one(&again, programs, options.verbose, "-again").pop()
            && again.verdict == Verdict::Passed
        {
            again.flaky = Some(reason);
            announce(&again);
            *last = again;
        }
    }
    outcomes
}

/// Runs scenarios in one L1, until one fails.
fn run_in_one(batch: &[&Run], programs: &Programs, verbose: bool, suffix: &str) -> Vec<Outcome> {
    let name = batch.iter().map(|run| run.scenario.name).collect::<Vec<_>>().join("+");
    let variant = batch.first().map_or("", |run| run.variant.name());
    let name = format!("{name}-{variant}{suffix}");
    let files = Files { directory: workspace().join("target/testbed").join(name) };
    let mut machine = None;
    let mut outcomes = Vec::new();
    for (at, run) in batch.iter().enumerate() {
        let start = Instant::now();
        let mut outcome = Outcome {
            scenario: run.scenario.name,
            variant: run.variant,
            verdict: Verdict::Passed,
            flaky: None,
            took: Duration::ZERO,
            processor: Duration::ZERO,
            proved: Vec::new(),
            figures: Vec::new(),
            unmeasured: Vec::new(),
            logs: files.directory.clone(),
        };
        let verdict = match &mut machine {
            None => boot(batch, programs, &files).map(|booted| machine.insert(booted)),
            Some(machine) => Ok(machine),
        };
        let verdict = verdict.and_then(|machine| {
            machine.begin(run.scenario.deadline);
            let before = machine.processor_time();
            let verdict = follow(machine, verbose, &files, &mut outcome);
            outcome.processor = machine.processor_time().saturating_sub(before);
            verdict
        });
        outcome.verdict = verdict.unwrap_or_else(|error| Verdict::Failed(format!("{error:#}")));
        let failed = matches!(outcome.verdict, Verdict::Failed(_));
        if !failed && at + 1 == batch.len() {
            let ended = machine.take().is_none_or(|machine| machine.end().unwrap_or(false));
            if !ended {
                let reason = format!("all checks held, but L1 did not power off{}", evidence(&files));
                outcome.verdict = Verdict::Failed(reason);
            }
            // They are large, and made again by each run.
            for large in [files.initrd(), files.directory.join("guest.cpio")] {
                let _ = fs::remove_file(large);
            }
        }
        outcome.took = start.elapsed();
        announce(&outcome);
        outcomes.push(outcome);
        if failed {
            break;
        }
    }
    outcomes
}

/// Boots L1 for a batch.
fn boot(batch: &[&Run], programs: &Programs, files: &Files) -> Result<Machine> {
    let kernel = match batch.first().map(|run| &run.kernel) {
        Some(Ok(kernel)) => kernel,
        Some(Err(reason)) => bail!("there is no Linux kernel for it: {reason}"),
        None => bail!("there is no scenario for it"),
    };
    let directory = &files.directory;
    if directory.exists() {
        fs::remove_dir_all(directory).with_context(|| format!("can't remove {}", directory.display()))?;
    }
    fs::create_dir_all(directory).with_context(|| format!("can't make {}", directory.display()))?;
    let contents = batch.iter().fold(Contents::NONE, |all, run| all.union(run.scenario.contents));
    make_l1(&files.initrd(), programs, kernel, contents)?;
    if let Some(cupy) = programs.cupy.as_ref().filter(|_| contents.cupy) {
        symlink(cupy, files.cupy()).context("can't link the disk with CuPy")?;
    }
    Machine::start(batch, &kernel.image, files)
}

/// Follows a scenario to its verdict.
fn follow(machine: &mut Machine, verbose: bool, files: &Files, outcome: &mut Outcome) -> Result<Verdict> {
    let start = Instant::now();
    let mut last = "booting L1".to_owned();
    loop {
        let reason = match machine.next() {
            Next::Report(report) => {
                if verbose {
                    say(format_args!(
                        "{} ({}) {:6.2} s {:6.2} s  {}",
                        outcome.scenario,
                        outcome.variant,
                        start.elapsed().as_secs_f64(),
                        machine.processor_time().as_secs_f64(),
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
                    Report::Passed => return Ok(Verdict::Passed),
                    Report::Skipped { reason } => return Ok(Verdict::Skipped(reason)),
                    Report::Failed { reason } => {
                        return Ok(Verdict::Failed(format!("{last}: {reason}{}", evidence(files))));
                    }
                }
                continue;
            }
            Next::Ended => "L1 ended without a verdict".to_owned(),
            Next::TooLate(deadline) => format!("no verdict within {} s", deadline.as_secs()),
        };
        return Ok(Verdict::Failed(format!("{reason}, at: {last}{}", evidence(files))));
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scenarios_of_one_machine_share_an_l1() {
        let all = crate::scenarios::ALL.iter();
        let runs: Vec<Run> = all
            .flat_map(|scenario| scenario.variants.all().iter().map(move |variant| (scenario, *variant)))
            .map(|(scenario, variant)| Run {
                scenario,
                variant,
                processors: 1,
                sweep: Sweep::default(),
                kernel: Err("it is not booted".to_owned()),
            })
            .collect();
        let batches = batches(&runs);
        assert_eq!(batches.iter().map(Vec::len).sum::<usize>(), runs.len());
        for batch in &batches {
            let alike = |run: &&Run| {
                run.variant == batch[0].variant && run.scenario.has_machine_of(batch[0].scenario)
            };
            assert!(batch.len() <= BATCH && batch[1..].iter().all(alike));
        }
        // Two batches that are not full have not the same machine.
        let open: Vec<_> = batches.iter().filter(|batch| batch.len() < BATCH).map(|batch| batch[0]).collect();
        for (at, one) in open.iter().enumerate() {
            let joins =
                |other: &&Run| one.variant == other.variant && one.scenario.has_machine_of(other.scenario);
            assert!(!open[at + 1..].iter().any(joins), "{}", one.scenario.name);
        }
        println!("{} runs in {} machines", runs.len(), batches.len());
    }
}
