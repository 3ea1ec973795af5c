//! Random kernels on the device against the interpreter: the same bits, but any NaN for a NaN.
//!
//! Kernels are made, interpreted, compiled and assembled on all cores, many to a module. A number of the report makes
//! the same kernel again: `--seed N --fuzz 1`.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use vm_accel::{Launch, Limits, Worker};
use vm_cuda::CudaAccelerator;
use vm_ir::arbitrary::{self, Options};
use vm_ir::filetest::{Tolerance, compare};
use vm_ir::{Kernel, Module, Trust, ValidModule, interp, text, validate};
use vm_passthrough::accelerator::{AssembleError, CompileError, CompiledKernel, CudaJITCompiler};

use crate::arena::{Arena, Rows};
use crate::gpu::{Gpu, TIMEOUT, named};
use crate::table::Report;
use crate::{Arguments, Test};

/// Kernels of one module.
const BATCH: u64 = 16;
/// Failures that are reported.
const TOLD: usize = 8;

/// The tests of this section.
pub(crate) fn tests(arguments: &Arguments) -> Vec<Test> {
    let (first, count) = (arguments.seed, arguments.fuzz);
    vec![Test::new(format!("{count} random kernels against the interpreter"), move |gpu, report| {
        run(gpu, first, count, report)
    })]
}

struct Shared {
    worker: Worker<CudaAccelerator>,
    compiler: CudaJITCompiler,
    next: AtomicU64,
    end: u64,
    stop: AtomicBool,
    ran: AtomicU64,
    rejected: AtomicU64,
    /// Kernels for which the assembler took longer than a guest's may.
    late: AtomicU64,
    /// Nanoseconds of all threads: interpreting, compiling, on the device.
    times: [AtomicU64; 3],
    failures: Mutex<Vec<String>>,
}

fn run(gpu: &Gpu, first: u64, count: u64, report: &mut Report) -> anyhow::Result<()> {
    let shared = Shared {
        worker: gpu.worker()?,
        compiler: gpu.compiler(Trust::Guest),
        next: AtomicU64::new(first),
        end: first.saturating_add(count),
        stop: AtomicBool::new(false),
        ran: AtomicU64::new(0),
        rejected: AtomicU64::new(0),
        late: AtomicU64::new(0),
        times: Default::default(),
        failures: Mutex::default(),
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| shared.work());
        }
    });
    let taken = begin.elapsed().as_secs_f64();
    let failures = shared.failures.into_inner().unwrap_or_else(PoisonError::into_inner);
    let ran = shared.ran.into_inner();
    let [interpreted, compiled, device] =
        shared.times.map(|time| Duration::from_nanos(time.into_inner()).as_secs_f64());
    report.note(format!(
        "{ran} ran, {} rejected, {} too long for the assembler, in {taken:.1} s on {threads} threads; seconds of threads: {interpreted:.1} \
         interpreting, {compiled:.1} compiling, {device:.1} on the device",
        shared.rejected.into_inner(),
        shared.late.into_inner(),
    ));
    ensure!(
        failures.is_empty(),
        "{} failed:\n{}",
        failures.len(),
        failures[..failures.len().min(TOLD)].join("\n")
    );
    ensure!(ran >= count * 9 / 10, "only {ran} of {count} ran");
    shared.worker.stop(TIMEOUT)?;
    Ok(())
}

type Compiled = (ValidModule, Vec<CompiledKernel>);

/// A kernel with its launch and what must come out.
struct Case {
    seed: u64,
    kernel: Kernel,
    launch: interp::Launch,
    expected: Vec<interp::Argument>,
}

impl Shared {
    fn work(&self) {
        while !self.stop.load(Ordering::Relaxed) {
            let from = self.next.fetch_add(BATCH, Ordering::Relaxed);
            if from >= self.end {
                return;
            }
            let seeds = from..self.end.min(from + BATCH);
            if let Err(error) = self.batch(seeds.clone()) {
                self.failed(format!("seeds {seeds:?}: {error:#}"));
            }
        }
    }

    fn failed(&self, reason: String) {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.push(reason);
        if failures.len() >= TOLD {
            self.stop.store(true, Ordering::Relaxed);
        }
    }

    fn timed<T>(&self, which: usize, f: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let result = f();
        self.times[which].fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result
    }

    fn batch(&self, seeds: std::ops::Range<u64>) -> anyhow::Result<()> {
        let cases = self.timed(0, || {
            seeds
                .map(|seed| case(seed).with_context(|| format!("seed {seed}")))
                .collect::<anyhow::Result<Vec<_>>>()
        })?;
        match self.compiled(&cases)? {
            Ok((module, compiled)) => self.launched(&cases, &module, &compiled),
            // Some of them are not compiled: each for itself.
            Err(_) => {
                for case in &cases {
                    let case = std::slice::from_ref(case);
                    match self.compiled(case)? {
                        Ok((module, compiled)) => self.launched(case, &module, &compiled)?,
                        Err(why) => {
                            why.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
                Ok(())
            }
        }
    }

    /// The kernels of the cases, compiled together; where one is not, what is counted of such.
    fn compiled(&self, cases: &[Case]) -> anyhow::Result<Result<Compiled, &AtomicU64>> {
        self.timed(1, || {
            let kernels = cases.iter().map(|case| case.kernel.clone()).collect();
            let module = validate(Module::new(kernels), Trust::Guest)?;
            match self.compiler.compile_module(&module) {
                Ok(compiled) => Ok(Ok((module, compiled))),
                Err(CompileError::Rejected(_)) => Ok(Err(&self.rejected)),
                Err(CompileError::Assemble { cause, .. }) if is_late(&cause) => Ok(Err(&self.late)),
                Err(error) => Err(error.into()),
            }
        })
    }

    fn launched(
        &self,
        cases: &[Case],
        module: &ValidModule,
        compiled: &[CompiledKernel],
    ) -> anyhow::Result<()> {
        for case in cases {
            let result = self.timed(2, || self.one(case, module, compiled));
            self.ran.fetch_add(1, Ordering::Relaxed);
            if let Err(error) = result {
                let lost = error.downcast_ref::<vm_accel::Error>().is_some_and(vm_accel::Error::is_lost);
                self.failed(format!("seed {}: {error:#}", case.seed));
                if lost {
                    self.stop.store(true, Ordering::Relaxed);
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn one(&self, case: &Case, module: &ValidModule, compiled: &[CompiledKernel]) -> anyhow::Result<()> {
        let (kernel, _) = module.find(case.kernel.name()).context("the kernel")?;
        let loaded = self.worker.load(named(compiled, kernel.name())?.artifact())?;
        let launch = Launch::over(case.launch.grid).within(Limits::default());
        let arguments = &case.launch.arguments;
        let results = Arena::new(arguments, Rows::Packed).run(&self.worker, &loaded, kernel, launch)?;
        for ((result, expected), parameter) in results.iter().zip(&case.expected).zip(kernel.params()) {
            if let (Some(result), Some(expected)) = (result.tensor(), expected.tensor()) {
                compare(result, expected, Tolerance::Exact)
                    .with_context(|| format!("@{}", parameter.name))?;
            }
        }
        Ok(())
    }
}

fn is_late(error: &AssembleError) -> bool {
    matches!(error.downcast_ref(), Some(vm_cuda::assemble::AssembleError::Late { .. }))
}

/// The kernel of a seed, under a name that no other has, run by the interpreter.
fn case(seed: u64) -> anyhow::Result<Case> {
    // Every other kernel has ops between threads, which leave the others fewer ops of their own.
    let options = Options { together: seed.is_multiple_of(2), ..Options::default() };
    let (module, mut launch) = arbitrary::kernel(seed, options);
    let name = format!("random_{seed}");
    let renamed = text::print(&module).replacen("@random(", &format!("@{name}("), 1);
    let module = validate(text::parse(&renamed)?, Trust::Guest)?;
    launch.kernel = name;
    let mut after = launch.clone();
    interp::run(&module, &mut after, &interp::Limits { races: false, ..interp::Limits::default() })?;
    let kernel = module.into_module().kernels().first().cloned().context("a kernel")?;
    Ok(Case { seed, kernel, launch, expected: after.arguments })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_share_a_module() {
        let target = "ptx:sm_90".parse().unwrap();
        let cases: Vec<Case> = (0..BATCH).map(|seed| case(seed).unwrap()).collect();
        let module =
            validate(Module::new(cases.iter().map(|case| case.kernel.clone()).collect()), Trust::Guest);
        let compiled = vm_jit::compile(&module.unwrap(), &target).unwrap();
        assert_eq!(compiled.entries.len(), BATCH as usize);
        assert!(cases.iter().any(|case| case.expected != case.launch.arguments));
    }
}
