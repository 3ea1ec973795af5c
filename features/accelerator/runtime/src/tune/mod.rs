//! Chooses the fastest variant of a family on the device that is there, in a bounded time, and remembers it.
//!
//! ```text
//! problem ─▶ variants ─▶ kept choice? ──yes──▶ it
//!                             │ no
//!                             ▼
//!              compile, in parallel ─▶ warm up ─▶ rounds, slower ones dropped ─▶ choice, kept
//! ```
//!
//! All variants run on the same random data. A round times each once, for- and backwards in turn, so that clocks and caches favour none;
//! a short launch is timed in a graph of several, and launches take turns through several sets of arguments, so that what fits a
//! cache is not faster than it would be among others' work. A variant that is clearly slower than the best is dropped. The choice is
//! the least median of the later half of the samples, by when clocks have settled; of variants that are within half a per cent of it,
//! the first in the family's table.
//!
//! A variant that the target rejects or that does not load is left out. One that faults ends it all with an error that names it,
//! since what ran after it can't be trusted; so does one that hangs. A guarded one is cancelled, and left out.
//!
//! A choice is kept under the family, the shape class, the device's name, its compute units and shared memory, the target, the trust,
//! the names of the variants and the versions of this crate and of `vm-jit`, in a [`Cache`] like that of the code: each choice is one
//! small file, written as a whole, so folders of choices are merged by copying files.

mod choice;
mod compile;
mod data;
mod race;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use thiserror::Error;
use vm_accel::{DeviceInfo, Error, Worker, WorkerOptions};
use vm_ir::limits::MAX_SHARED_BYTES;
use vm_ir::{GuestAddr, Kernel};
use vm_jit::cache::Cache;
use vm_kernels::family::{Kind, Problem, Resources, Sample, Step, Variant as _};

use super::{CompileError, JitCompiler, JitTarget};

/// What of the time limit is measured in; the rest is for what ends it.
const MEASURED: f64 = 0.9;

/// What is told how far tuning is.
pub type TuneProgress = dyn Fn(&TuneEvent) + Send + Sync;

/// How a family is tuned.
#[derive(Clone)]
pub struct TuneOptions {
    /// How long it may take in all.
    pub limit: Duration,
    /// Whether it is measured even if there is a choice.
    pub again: bool,
    /// What ends it before.
    pub cancel: Cancel,
    /// Is told how far it is, on a thread of the tuner.
    pub progress: Option<Arc<TuneProgress>>,
}

impl Default for TuneOptions {
    /// Two seconds.
    fn default() -> Self {
        Self { limit: Duration::from_secs(2), again: false, cancel: Cancel::default(), progress: None }
    }
}

impl fmt::Debug for TuneOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TuneOptions")
            .field("limit", &self.limit)
            .field("again", &self.again)
            .finish_non_exhaustive()
    }
}

/// Ends the tuning that it was given to. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Ends it soon, with [`TuneError::Cancelled`].
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether it was asked to end.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// How far tuning is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TuneEvent {
    /// A variant was compiled, or will not be.
    Compiled {
        /// Its name.
        name: String,
        /// Why it was not.
        rejected: Option<String>,
    },
    /// A round of measurements has ended.
    Round {
        /// Its number, from 1 on.
        number: u32,
        /// How many variants are left.
        left: usize,
        /// The fastest so far.
        best: String,
        /// Its median.
        median: Duration,
    },
}

/// How long a launch of a variant took, of several kernels all of them, by the device's clock. The first half of the samples is left out, as clocks settle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figure {
    /// The median of the samples.
    pub median: Duration,
    /// The least.
    pub least: Duration,
    /// The greatest.
    pub greatest: Duration,
    /// How many there were.
    pub samples: u32,
}

/// What came of a variant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was measured to the end.
    Measured(Figure),
    /// It was clearly slower, and not measured further.
    Slower(Figure),
    /// It can't be compiled, loaded or launched here, or was cancelled as it did not end: why.
    Failed(String),
    /// There was no time left for it.
    Late,
}

impl Outcome {
    /// How long it took, if it was measured.
    pub fn figure(&self) -> Option<Figure> {
        match self {
            Outcome::Measured(figure) | Outcome::Slower(figure) => Some(*figure),
            Outcome::Failed(_) | Outcome::Late => None,
        }
    }
}

/// A variant that was to be measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its name.
    pub name: String,
    /// What came of it.
    pub outcome: Outcome,
}

/// A choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tuned<V> {
    /// The variant.
    pub variant: V,
    /// Its name.
    pub name: String,
    /// The blocks to launch its kernel over; of several the one that has most to do.
    pub grid: [u32; 3],
    /// The launches of all its kernels.
    pub steps: Vec<Step>,
    /// All variants, in the order of the family's table.
    pub candidates: Vec<Candidate>,
    /// Whether the choice was kept, and nothing was measured now.
    pub cached: bool,
    /// How long it took to find out.
    pub elapsed: Duration,
}

/// Why there is no choice. The first variant of the family's table is still as good a guess as any.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TuneError {
    /// The family has nothing for such a device.
    #[error(
        "family {family} has no variant of class {class} that {device} has room for: add one to its table, or use another type"
    )]
    NoVariant {
        /// The family.
        family: String,
        /// The shape class.
        class: String,
        /// The device's name.
        device: String,
    },
    /// None of the variants could be measured.
    #[error("no variant of family {family}, class {class}, could be measured on {device}; {reason}")]
    NoneMeasured {
        /// The family.
        family: String,
        /// The shape class.
        class: String,
        /// The device's name.
        device: String,
        /// The first variant that failed, and why.
        reason: String,
    },
    /// A variant faulted. What it did to the device is not known, so nothing is chosen.
    #[error(
        "variant {variant} of family {family}, class {class}, faulted: {cause}; report it, and use another"
    )]
    Faulted {
        /// The family.
        family: String,
        /// The shape class.
        class: String,
        /// The variant.
        variant: String,
        /// What the device said.
        cause: Box<Error>,
    },
    /// The device did not answer in time.
    #[error(
        "family {family}, class {class}, was not tuned within {limit:?}: it did not end {doing}; raise the limit if the device is \
         busy, or see whether it hangs"
    )]
    TimedOut {
        /// The family.
        family: String,
        /// The shape class.
        class: String,
        /// The limit.
        limit: Duration,
        /// What was waited for, as in "measuring gemm_…".
        doing: String,
    },
    /// [`Cancel::cancel`] was called.
    #[error("tuning was cancelled")]
    Cancelled,
    /// A variant is one that no kernel can be.
    #[error("variant {variant} of family {family} can't be written: {reason}")]
    Build {
        /// The family.
        family: String,
        /// The variant.
        variant: String,
        /// Why.
        reason: String,
    },
    /// A launch of a variant takes an argument that there is none of.
    #[error(
        "variant {variant} of family {family} can't be launched: {reason}; mend the `steps` of the family's problem"
    )]
    Steps {
        /// The family.
        family: String,
        /// The variant.
        variant: String,
        /// Which launch, and which argument.
        reason: String,
    },
    /// There is nothing to compile for.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The device can't be opened, or has no room for the arguments.
    #[error(transparent)]
    Device(#[from] Error),
}

/// Tunes families for one accelerator.
///
#[cfg_attr(feature = "cuda", doc = "```no_run")]
#[cfg_attr(not(feature = "cuda"), doc = "```ignore")]
/// # use std::sync::Arc;
/// # use vm_runtime::kernels::{family::Variant as _, gemm::Product};
/// # use vm_runtime::{CudaAccelerator, CudaJITCompiler, GuestAddr, TuneOptions, Tuner};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let compiler = CudaJITCompiler::new(Arc::new(CudaAccelerator::new(0)?));
/// let tuner = Tuner::new(compiler.clone());
/// let product = Product { b_transposed: true, ..Product::of(4096, 4096, 4096) };
/// let tuned = tuner.tune(&product, &TuneOptions::default())?;
/// let kernel = compiler.compile_kernel(tuned.variant.kernel(GuestAddr(0x1000))?)?;
/// println!("launch {} over {:?} blocks", kernel.name(), tuned.grid);
/// # Ok(())
/// # }
/// ```
///
/// Between calls it keeps a worker on the device, and no memory.
pub struct Tuner<A: JitTarget> {
    compiler: JitCompiler<A>,
    choices: Arc<Cache>,
    worker: Arc<Mutex<Option<Worker<A>>>>,
}

impl<A: JitTarget> fmt::Debug for Tuner<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tuner").field("compiler", &self.compiler).finish_non_exhaustive()
    }
}

/// What all parts of a tuning know.
struct Task {
    family: String,
    class: String,
    device: String,
    options: TuneOptions,
    names: Vec<String>,
    /// By variant: its kernels, and their launches.
    kernels: Vec<Vec<Kernel>>,
    steps: Vec<Vec<Step>>,
    samples: Vec<Sample>,
    start: Instant,
    /// When the last measurement is to end.
    end: Instant,
    /// What is done now, for who waits in vain.
    doing: Mutex<String>,
}

impl Task {
    fn doing(&self, what: impl Into<String>) {
        *self.doing.lock().unwrap_or_else(PoisonError::into_inner) = what.into();
    }

    fn done_now(&self) -> String {
        self.doing.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn tell(&self, event: &TuneEvent) {
        if let Some(progress) = &self.options.progress {
            progress(event);
        }
    }

    fn cancelled(&self) -> Result<(), TuneError> {
        if self.options.cancel.is_cancelled() { Err(TuneError::Cancelled) } else { Ok(()) }
    }

    fn timed_out(&self) -> TuneError {
        let doing = self.done_now();
        let (family, class) = (self.family.clone(), self.class.clone());
        TuneError::TimedOut { family, class, limit: self.options.limit, doing }
    }

    /// An error of the device: one that is late is told as such.
    fn device(&self, error: Error) -> TuneError {
        if matches!(error, Error::Deadline { .. }) { self.timed_out() } else { TuneError::Device(error) }
    }

    /// A point between now and the end of the limit.
    fn part(&self, of_limit: f64) -> Instant {
        self.start.checked_add(self.options.limit.mul_f64(of_limit)).unwrap_or(self.start)
    }
}

impl<A: JitTarget> Tuner<A> {
    /// A tuner that keeps choices in the compiler's own cache, beside the code.
    pub fn new(compiler: JitCompiler<A>) -> Self {
        let choices = Arc::clone(compiler.kept());
        Self { compiler, choices, worker: Arc::default() }
    }

    /// With another cache for choices, such as one on disk whose files are copied between machines.
    #[must_use]
    pub fn choices(self, choices: Arc<Cache>) -> Self {
        Self { choices, ..self }
    }

    /// What a family is told of the device.
    pub fn resources(&self) -> Resources {
        resources(self.compiler.accelerator().info())
    }

    /// The choice that is kept for a problem, without measuring anything.
    ///
    /// # Errors
    /// [`TuneError::NoVariant`]; [`TuneError::Steps`]; [`TuneError::Compile`] for a device without a target.
    pub fn kept<P: Problem>(&self, problem: &P) -> Result<Option<Tuned<P::Variant>>, TuneError> {
        let start = Instant::now();
        let resources = self.resources();
        let variants = self.variants(problem, &resources)?;
        let names: Vec<String> = variants.iter().map(|variant| variant.name()).collect();
        let subject = self.subject(problem)?;
        let Some(choice) = choice::read(&self.choices, &subject, &names) else { return Ok(None) };
        let chosen = choice.chosen;
        let Some(variant) = variants.into_iter().nth(chosen) else { return Ok(None) };
        Ok(Some(Tuned {
            grid: problem.grid(&variant, &resources),
            steps: steps(problem, &variant, &resources)?,
            name: names[chosen].clone(),
            variant,
            candidates: choice.candidates,
            cached: true,
            elapsed: start.elapsed(),
        }))
    }

    /// The fastest variant for a problem's class: the choice that is kept, or else what is measured now and kept.
    ///
    /// It ends within the limit of `options`, also where the device hangs: what hangs is then left to itself.
    ///
    /// # Errors
    /// Every [`TuneError`].
    pub fn tune<P: Problem>(
        &self,
        problem: &P,
        options: &TuneOptions,
    ) -> Result<Tuned<P::Variant>, TuneError> {
        let start = Instant::now();
        if !options.again
            && let Some(kept) = self.kept(problem)?
        {
            return Ok(kept);
        }
        let resources = self.resources();
        let variants = self.variants(problem, &resources)?;
        let (family, class) = (problem.family().to_owned(), problem.class());
        let kernels = variants.iter().map(|variant| {
            variant.kernels(GuestAddr(0)).map_err(|error| TuneError::Build {
                family: family.clone(),
                variant: variant.name(),
                reason: error.to_string(),
            })
        });
        let all = variants.iter().map(|variant| steps(problem, variant, &resources));
        let task = Arc::new(Task {
            kernels: kernels.collect::<Result<_, _>>()?,
            names: variants.iter().map(|variant| variant.name()).collect(),
            steps: all.collect::<Result<_, _>>()?,
            samples: problem.arguments(),
            family,
            class,
            device: self.compiler.accelerator().info().name.clone(),
            options: options.clone(),
            start,
            end: start.checked_add(options.limit.mul_f64(MEASURED)).unwrap_or(start),
            doing: Mutex::default(),
        });
        let subject = self.subject(problem)?;
        let (candidates, chosen) = self.measure(&task)?;
        choice::keep(&self.choices, &subject, &task.names, &candidates, chosen);
        let (name, steps) = (task.names[chosen].clone(), task.steps[chosen].clone());
        let variant = variants.into_iter().nth(chosen).ok_or(TuneError::Cancelled)?;
        let grid = problem.grid(&variant, &resources);
        Ok(Tuned { variant, name, grid, steps, candidates, cached: false, elapsed: start.elapsed() })
    }

    fn variants<P: Problem>(&self, problem: &P, resources: &Resources) -> Result<Vec<P::Variant>, TuneError> {
        let variants = problem.variants(resources);
        if variants.is_empty() {
            return Err(TuneError::NoVariant {
                family: problem.family().to_owned(),
                class: problem.class(),
                device: self.compiler.accelerator().info().name.clone(),
            });
        }
        Ok(variants)
    }

    fn subject<P: Problem>(&self, problem: &P) -> Result<choice::Subject, TuneError> {
        let accelerator = self.compiler.accelerator();
        let info = accelerator.info();
        Ok(choice::Subject {
            family: problem.family().to_owned(),
            class: problem.class(),
            device: format!(
                "{} {}, {} units, {} bytes",
                info.backend, info.name, info.compute_units, info.shared_bytes
            ),
            target: self.compiler.compiled_for()?.to_string(),
            trust: format!("{:?}", self.compiler.trust()),
        })
    }

    /// Measures on a thread of its own, which is left to itself when it is late. Gives all variants and which is chosen.
    fn measure(&self, task: &Arc<Task>) -> Result<(Vec<Candidate>, usize), TuneError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let (theirs, compiler, place) = (Arc::clone(task), self.compiler.clone(), Arc::clone(&self.worker));
        std::thread::Builder::new()
            .name("tuner".into())
            .spawn(move || {
                // Who waited may be gone.
                let _ = sender.send(run(&theirs, &compiler, &place));
            })
            .map_err(|error| Error::Host { what: "starting the tuner's thread", cause: error.to_string() })?;
        let left = task.part(1.0).saturating_duration_since(Instant::now());
        match receiver.recv_timeout(left) {
            Ok(result) => result,
            Err(mpsc::RecvTimeoutError::Timeout) => Err(task.timed_out()),
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(TuneError::Device(Error::Panicked {
                message: format!("the tuner's thread ended {}", task.done_now()),
            })),
        }
    }
}

/// The launches of a variant's kernels, of arguments that there are.
fn steps<P: Problem>(
    problem: &P,
    variant: &P::Variant,
    resources: &Resources,
) -> Result<Vec<Step>, TuneError> {
    let (steps, count) = (problem.steps(variant, resources), problem.arguments().len());
    let mut places =
        steps.iter().enumerate().flat_map(|(at, step)| step.arguments.iter().map(move |to| (at, *to)));
    match places.find(|(_, place)| *place >= count) {
        None => Ok(steps),
        Some((at, place)) => Err(TuneError::Steps {
            family: problem.family().to_owned(),
            variant: variant.name(),
            reason: format!("launch {at} takes argument {place}, and there are {count}, from 0 on"),
        }),
    }
}

/// Compiles, measures and chooses.
fn run<A: JitTarget>(
    task: &Arc<Task>,
    compiler: &JitCompiler<A>,
    place: &Mutex<Option<Worker<A>>>,
) -> Result<(Vec<Candidate>, usize), TuneError> {
    task.doing("opening the device");
    let compiling = compile::begin(task, compiler);
    let kept = place.lock().unwrap_or_else(PoisonError::into_inner).take();
    let worker = match kept {
        Some(worker) => worker,
        None => {
            let mut options = WorkerOptions { name: "tuner".into(), ..WorkerOptions::default() };
            options.queue.timeout = task.options.limit;
            Worker::start(Arc::clone(compiler.accelerator()), options).map_err(|error| task.device(error))?
        }
    };
    task.doing("writing the arguments");
    let data = data::Data::prepare(&worker, &task.samples).map_err(|error| task.device(error))?;
    task.doing("compiling");
    let compiled = compiling.wait(task)?;
    let theirs = Arc::clone(task);
    let raced = worker
        .submit(move |session| Ok(race::run(session, &theirs, compiled, &data)))
        .and_then(|job| job.wait(task.part(1.0)))
        .map_err(|error| task.device(error))??;
    if raced.clean {
        task.doing("freeing the arguments");
        match worker.trim() {
            Ok(()) => *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(worker),
            Err(error) => tracing::warn!(%error, "the tuner's worker is not used again"),
        }
    }
    choose(task, raced.outcomes)
}

/// What the functions and families of `vm-kernels` are told of a device. A processor has more memory for a block than a kernel's arrays may
/// take on any target.
pub fn resources(info: &DeviceInfo) -> Resources {
    // A device's own target, as `sm_90`, or the one that a guest's host compiles for, as `ptx:sm_90a`.
    let architecture = info.target.trim_start_matches("ptx:").strip_prefix("sm_");
    let architecture =
        architecture.and_then(|number| number.trim_end_matches(char::is_alphabetic).parse().ok());
    Resources {
        compute_units: info.compute_units.max(1),
        shared_bytes: info.shared_bytes.min(MAX_SHARED_BYTES as u32),
        kind: if info.target.starts_with("cpu") { Kind::Cpu } else { Kind::Gpu },
        cluster: if architecture.is_some_and(|number: u32| number >= 90) { 8 } else { 1 },
    }
}

/// The variants with what came of them, and which is best.
fn choose(task: &Task, outcomes: Vec<Outcome>) -> Result<(Vec<Candidate>, usize), TuneError> {
    let measured = |outcome: &Outcome| match outcome {
        Outcome::Measured(figure) => Some(figure.median),
        _ => None,
    };
    let candidates: Vec<Candidate> = task
        .names
        .iter()
        .zip(outcomes)
        .map(|(name, outcome)| Candidate { name: name.clone(), outcome })
        .collect();
    let best = candidates.iter().filter_map(|candidate| measured(&candidate.outcome)).min();
    let near = best.map(|best| best.mul_f64(1.005));
    let chosen = candidates
        .iter()
        .position(|candidate| measured(&candidate.outcome).is_some_and(|it| Some(it) <= near));
    match chosen {
        Some(chosen) => Ok((candidates, chosen)),
        None => {
            let failed = candidates.iter().find_map(|candidate| match &candidate.outcome {
                Outcome::Failed(reason) => Some(format!("{}: {reason}", candidate.name)),
                _ => None,
            });
            let Some(reason) = failed else { return Err(task.timed_out()) };
            let (family, class, device) = (task.family.clone(), task.class.clone(), task.device.clone());
            Err(TuneError::NoneMeasured { family, class, device, reason })
        }
    }
}

#[cfg(test)]
mod tests;
