//! Measures variants side by side on the worker's thread, and drops those that are clearly slower.

use std::time::{Duration, Instant};

use vm_accel::{Error, Graph, Kernel, Launch, Limits, Session};

use super::compile::Compiled;
use super::data::Data;
use super::{Figure, Outcome, Task, TuneError, TuneEvent};
use crate::JitTarget;

/// A sample is of so many launches that it takes about this long.
const SAMPLE: Duration = Duration::from_micros(500);
/// Launches of a sample at most.
const LAUNCHES: u32 = 32;
/// Rounds at most, and those from which on it may end.
const ROUNDS: u32 = 200;
const ENOUGH: u32 = 8;
/// Variants that are close are measured for this part of the limit: a device that draws much power lowers its clocks after some tenths
/// of a second, and then others may be the fastest.
const SETTLED: f64 = 0.25;
/// A guarded launch that takes this part of the limit is cancelled.
const PART: f64 = 0.2;

/// What came of all variants.
pub(super) struct Raced {
    pub(super) outcomes: Vec<Outcome>,
    /// Whether nothing had to be cancelled, so that the worker can be used again.
    pub(super) clean: bool,
}

/// A variant that runs.
struct Runner<A: JitTarget> {
    index: usize,
    /// Its kernels and how they are launched, one behind the other.
    kernels: Vec<(Kernel<A>, Launch)>,
    /// How long all of them take.
    estimate: Duration,
    /// How often they are launched for a sample, in a graph if it is more than once.
    launches: u32,
    graph: Option<Graph<A>>,
    samples: Vec<Duration>,
}

/// What a sample came to.
enum Sampled {
    Took(Duration),
    Failed(String),
}

/// A session with what is measured.
struct Race<'a, A: JitTarget> {
    session: &'a Session<A>,
    task: &'a Task,
    data: &'a Data<A>,
}

/// Measures what was compiled.
pub(super) fn run<A: JitTarget>(
    session: &Session<A>,
    task: &Task,
    compiled: Vec<Compiled>,
    data: &Data<A>,
) -> Result<Raced, TuneError> {
    let race = Race { session, task, data };
    let mut outcomes = vec![Outcome::Late; compiled.len()];
    let mut clean = true;
    let mut runners = Vec::new();
    for (index, compiled) in compiled.into_iter().enumerate() {
        let artifacts = match compiled {
            Some(Ok(artifacts)) => artifacts,
            Some(Err(reason)) => {
                outcomes[index] = Outcome::Failed(reason);
                continue;
            }
            None => continue,
        };
        task.cancelled()?;
        if Instant::now() >= task.end {
            break;
        }
        task.doing(format!("loading {}", task.names[index]));
        let limits = Limits { fuel: u64::MAX >> 2, time: task.options.limit.mul_f64(PART) };
        let loaded = artifacts
            .iter()
            .zip(&task.steps[index])
            .map(|(artifact, step)| Ok((session.load(artifact)?, Launch::over(step.grid).within(limits))));
        let kernels = match loaded.collect::<Result<_, Error>>() {
            Ok(kernels) => kernels,
            Err(error) => {
                outcomes[index] = Outcome::Failed(race.failed(index, error)?);
                continue;
            }
        };
        let (estimate, samples) = (Duration::ZERO, Vec::new());
        let mut runner = Runner { index, kernels, estimate, launches: 1, graph: None, samples };
        match race.warm_up(&mut runner)? {
            Sampled::Took(_) => runners.push(runner),
            Sampled::Failed(reason) => {
                clean = false;
                outcomes[index] = Outcome::Failed(reason);
            }
        }
    }
    let settled = Instant::now().checked_add(task.options.limit.mul_f64(SETTLED));
    for round in 1..=ROUNDS {
        let in_time = race.round(round, &mut runners, &mut outcomes)?;
        race.drop_slower(round, &mut runners, &mut outcomes);
        let decided = runners.len() <= 1 || settled.is_none_or(|settled| Instant::now() >= settled);
        if !in_time || runners.is_empty() || (decided && round >= ENOUGH) {
            break;
        }
    }
    for runner in runners {
        if let Some(figure) = figure(&runner.samples) {
            outcomes[runner.index] = Outcome::Measured(figure);
        }
    }
    Ok(Raced { outcomes, clean })
}

impl<A: JitTarget> Race<'_, A> {
    /// What an error of a variant means: a reason to leave it out, or the end.
    fn failed(&self, index: usize, error: Error) -> Result<String, TuneError> {
        match error {
            Error::Lost { .. } => Err(TuneError::Faulted {
                family: self.task.family.clone(),
                class: self.task.class.clone(),
                variant: self.task.names[index].clone(),
                cause: Box::new(error),
            }),
            Error::Deadline { .. } => Err(self.task.timed_out()),
            error => Ok(error.to_string()),
        }
    }

    /// Launches it twice, the first time as code and memory come; then it is known how many launches make a sample.
    fn warm_up(&self, runner: &mut Runner<A>) -> Result<Sampled, TuneError> {
        self.task.doing(format!("warming up {}", self.task.names[runner.index]));
        for _ in 0..2 {
            match self.sample(runner)? {
                Sampled::Took(time) => runner.estimate = time.max(Duration::from_nanos(500)),
                failed => return Ok(failed),
            }
        }
        let wanted = SAMPLE.as_nanos() / runner.estimate.as_nanos().max(1);
        let launches = u32::try_from(wanted).unwrap_or(LAUNCHES).clamp(1, LAUNCHES);
        // All sets as often.
        let sets = self.data.sets() as u32;
        let launches = if launches > 1 { launches.next_multiple_of(sets) } else { 1 };
        if launches > 1 {
            let captured = self.session.capture(|_| self.launch(runner, launches));
            match captured {
                Ok(graph) => runner.graph = Some(graph),
                // Then they are launched one by one.
                Err(Error::Unsupported { .. } | Error::Capturing { .. }) => {}
                Err(error) => return Ok(Sampled::Failed(self.failed(runner.index, error)?)),
            }
            runner.launches = launches;
        }
        Ok(Sampled::Took(runner.estimate))
    }

    fn launch(&self, runner: &Runner<A>, launches: u32) -> Result<(), Error> {
        (0..launches).try_for_each(|number| {
            // Single launches take turns too.
            let set = if launches == 1 { runner.samples.len() } else { number as usize };
            runner.kernels.iter().zip(&self.task.steps[runner.index]).try_for_each(
                |((kernel, launch), step)| {
                    self.session.launch(kernel, *launch, &self.data.arguments(set, &step.arguments)?)
                },
            )
        })
    }

    /// The time of one launch, or of a sequence.
    fn sample(&self, runner: &Runner<A>) -> Result<Sampled, TuneError> {
        self.task.cancelled()?;
        let timed = self.session.timed(self.task.part(1.0), |session| match &runner.graph {
            Some(graph) => session.replay(graph),
            None => self.launch(runner, runner.launches),
        });
        let cancelled = self.task.options.limit.mul_f64(PART);
        match timed {
            Ok(time) if time >= cancelled => {
                Ok(Sampled::Failed(format!("it did not end within {cancelled:?}, and was cancelled")))
            }
            Ok(time) => Ok(Sampled::Took(time / runner.launches)),
            Err(error) => Ok(Sampled::Failed(self.failed(runner.index, error)?)),
        }
    }

    /// One sample of each, every other time from the last to the first. False when the time is up.
    fn round(
        &self,
        round: u32,
        runners: &mut Vec<Runner<A>>,
        outcomes: &mut [Outcome],
    ) -> Result<bool, TuneError> {
        let mut order: Vec<usize> = (0..runners.len()).collect();
        if round.is_multiple_of(2) {
            order.reverse();
        }
        let mut failed = Vec::new();
        let mut in_time = true;
        for place in order {
            let runner = &mut runners[place];
            let next = Instant::now().checked_add(runner.estimate.saturating_mul(runner.launches));
            if next.is_none_or(|next| next >= self.task.end) {
                in_time = false;
                break;
            }
            self.task.doing(format!("measuring {}", self.task.names[runner.index]));
            match self.sample(runner)? {
                Sampled::Took(time) => runner.samples.push(time),
                Sampled::Failed(reason) => {
                    outcomes[runner.index] = Outcome::Failed(reason);
                    failed.push(runner.index);
                }
            }
        }
        runners.retain(|runner| !failed.contains(&runner.index));
        Ok(in_time)
    }

    /// Drops what is half as slow again as the best after a round, or whose least is a tenth above its median after two.
    fn drop_slower(&self, round: u32, runners: &mut Vec<Runner<A>>, outcomes: &mut [Outcome]) {
        let figures = runners.iter().filter_map(|runner| Some((runner.index, figure(&runner.samples)?)));
        let Some((best, Figure { median, .. })) = figures.min_by_key(|(_, figure)| figure.median) else {
            return;
        };
        let bound = median.mul_f64(if round == 1 { 1.5 } else { 1.1 });
        runners.retain(|runner| match figure(&runner.samples) {
            Some(figure) if figure.least > bound => {
                outcomes[runner.index] = Outcome::Slower(figure);
                false
            }
            _ => true,
        });
        let best = self.task.names[best].clone();
        self.task.tell(&TuneEvent::Round { number: round, left: runners.len(), best, median });
    }
}

/// What samples come to, if there are any: the later half, by when clocks have settled.
fn figure(samples: &[Duration]) -> Option<Figure> {
    let mut sorted = samples.get(samples.len() / 2..)?.to_vec();
    sorted.sort_unstable();
    let (least, greatest) = (*sorted.first()?, *sorted.last()?);
    // The lower one of two in the middle.
    let median = sorted[(sorted.len() - 1) / 2];
    Some(Figure { median, least, greatest, samples: u32::try_from(sorted.len()).unwrap_or(u32::MAX) })
}
