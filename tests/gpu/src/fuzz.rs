//! Random kernels on the device against the interpreter: the same bits, but any NaN for a NaN. And changed ones between canaries.
//!
//! Kernels are made, interpreted, compiled and assembled on all cores, many to a module. A number of the report makes
//! the same kernel again: `--seed N --fuzz 1`.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use vm_accel::{Launch, Limits, Worker};
use vm_cuda::CudaAccelerator;
use vm_ir::arbitrary::{self, Options, RowShapes, TileShapes};
use vm_ir::filetest::{Tolerance, compare};
use vm_ir::mutate::{Modules, Mutator};
use vm_ir::{Kernel, Module, Trust, ValidModule, interp, mutate, text, validate};
use vm_passthrough::accelerator::{AssembleError, CompileError, CompiledKernel, CudaJITCompiler};

use crate::arena::{Arena, Rows};
use crate::filetests::FILES;
use crate::gpu::{Gpu, TIMEOUT, named};
use crate::table::Report;
use crate::{Arguments, Test};

/// Kernels of one module.
const BATCH: u64 = 16;
/// Failures that are reported.
const TOLD: usize = 8;

/// Tile kernels are larger: of so many random kernels one.
const TILES: u64 = 8;
/// Changes that are tried until a kernel is valid and has a launch.
const TRIES: usize = 4096;
/// Of each thread of a changed kernel, as those often loop for ever.
const FUEL: u64 = 200;
/// When one is stopped that is slow all the same.
const TIME: Duration = Duration::from_secs(2);

/// The tests of this section.
pub(crate) fn tests(arguments: &Arguments) -> Vec<Test> {
    let (first, count) = (arguments.seed, arguments.fuzz);
    vec![Test::new(format!("{count} random kernels against the interpreter"), move |gpu, report| {
        run(gpu, case, first..first + count, [9, 10], report)
    })]
}

/// The same of tile kernels, and of changed ones.
pub(crate) fn of_tiles(arguments: &Arguments) -> Vec<Test> {
    let (first, count) = (arguments.seed, arguments.fuzz / TILES);
    let seeds = first..first + count;
    let (changed, known) = (seeds.clone(), Arc::new(OnceLock::new()));
    vec![
        Test::new(format!("{count} random tile kernels against the interpreter"), move |gpu, report| {
            run(gpu, tile_case, seeds.clone(), [1, 2], report)
        }),
        Test::new(format!("{count} changed tile kernels touch their own views only"), move |gpu, report| {
            let known: &Modules = known.get_or_init(tile_modules);
            run(gpu, |seed| changed_case(known, seed), changed.clone(), [1, 3], report)
        }),
    ]
}

struct Shared<M> {
    /// Makes the kernel of a seed.
    make: M,
    worker: Worker<CudaAccelerator>,
    compiler: CudaJITCompiler,
    next: AtomicU64,
    end: u64,
    stop: AtomicBool,
    ran: AtomicU64,
    rejected: AtomicU64,
    /// Kernels for which the assembler took longer than a guest's may.
    late: AtomicU64,
    /// Kernels that were stopped.
    stopped: AtomicU64,
    /// One is on the device at a time: who is told of its end is who launched it.
    device: Mutex<()>,
    /// Nanoseconds of all threads: interpreting, compiling, on the device.
    times: [AtomicU64; 3],
    failures: Mutex<Vec<String>>,
}

/// Runs the kernels of seeds; so many of so many must be compiled and run.
fn run(
    gpu: &Gpu,
    make: impl Fn(u64) -> anyhow::Result<Case> + Sync,
    seeds: Range<u64>,
    [least, of]: [u64; 2],
    report: &mut Report,
) -> anyhow::Result<()> {
    let count = seeds.end - seeds.start;
    let shared = Shared {
        make,
        worker: gpu.worker()?,
        compiler: gpu.compiler(Trust::Guest),
        next: AtomicU64::new(seeds.start),
        end: seeds.end,
        stop: AtomicBool::new(false),
        ran: AtomicU64::new(0),
        rejected: AtomicU64::new(0),
        late: AtomicU64::new(0),
        stopped: AtomicU64::new(0),
        device: Mutex::default(),
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
        "{ran} ran, {} of them stopped, {} rejected, {} too long for the assembler, in {taken:.1} s on {threads} threads; seconds of threads: {interpreted:.1} \
         interpreting, {compiled:.1} compiling, {device:.1} on the device",
        shared.stopped.into_inner(),
        shared.rejected.into_inner(),
        shared.late.into_inner(),
    ));
    ensure!(
        failures.is_empty(),
        "{} of {ran} failed:\n{}",
        failures.len(),
        failures[..failures.len().min(TOLD)].join("\n")
    );
    ensure!(ran >= count * least / of, "only {ran} of {count} ran");
    shared.worker.stop(TIMEOUT)?;
    Ok(())
}

type Compiled = (ValidModule, Vec<CompiledKernel>);

/// A kernel with its launch and what must come out; nothing of one that was changed.
struct Case {
    seed: u64,
    kernel: Kernel,
    launch: interp::Launch,
    expected: Option<Vec<interp::Argument>>,
}

impl<M: Fn(u64) -> anyhow::Result<Case> + Sync> Shared<M> {
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
                .map(|seed| (self.make)(seed).with_context(|| format!("seed {seed}")))
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
        let launch = Launch::over(case.launch.grid);
        let arena = Arena::new(&case.launch.arguments, Rows::Packed);
        let _alone = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(expected) = &case.expected else {
            let launch = launch.within(Limits { fuel: FUEL, time: TIME });
            let ran = arena.run_or_stop(&self.worker, &loaded, kernel, launch)?;
            self.stopped.fetch_add(u64::from(ran.is_none()), Ordering::Relaxed);
            return Ok(());
        };
        let results = arena.run(&self.worker, &loaded, kernel, launch.within(Limits::default()))?;
        for ((result, expected), parameter) in results.iter().zip(expected).zip(kernel.params()) {
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

/// The random kernel of a seed: every third is one of rows.
fn case(seed: u64) -> anyhow::Result<Case> {
    if seed.is_multiple_of(3) {
        let shapes = RowShapes::ALL[(seed / 3 % 3) as usize];
        return interpreted(seed, arbitrary::row_kernel("random", seed, shapes));
    }
    // Every other kernel has ops between threads, which leave the others fewer ops of their own.
    let options = Options { together: seed.is_multiple_of(2), ..Options::default() };
    interpreted(seed, arbitrary::kernel(seed, options))
}

/// The random tile kernel of a seed.
fn tile_case(seed: u64) -> anyhow::Result<Case> {
    let shapes = if seed.is_multiple_of(4) { TileShapes::Odd } else { TileShapes::Whole };
    interpreted(seed, arbitrary::tile_kernel(seed, shapes))
}

/// Tile kernels that are changed.
fn tile_modules() -> Modules {
    let mut modules = Modules::default();
    let files = FILES.iter().map(|(_, source)| *source).filter(|source| source.contains(" tile("));
    files.for_each(|source| modules.take_text(source));
    for seed in 0..24 {
        modules.take(&arbitrary::tile_kernel(seed, TileShapes::Odd).0);
        modules.take(&arbitrary::tile_kernel(seed, TileShapes::Whole).0);
    }
    modules
}

/// A changed kernel that is valid still.
fn changed_case(modules: &Modules, seed: u64) -> anyhow::Result<Case> {
    let mut mutator = Mutator::new(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let found = (0..TRIES).find_map(|_| {
        let module = modules.changed(&mut mutator)?;
        let valid = validate(module, Trust::Guest).ok()?;
        let kernel = valid.kernels().iter().find(|kernel| kernel.tile().is_some())?.clone();
        let launch = mutate::launch(&kernel, &mut mutator)?;
        Some((Module::from(kernel), launch))
    });
    let (module, launch) = found.context("no change is valid")?;
    let (kernel, launch) = renamed(seed, &module, launch)?;
    Ok(Case { seed, kernel, launch, expected: None })
}

/// A kernel under a name that no other has, and what the interpreter makes of its launch.
fn interpreted(seed: u64, (module, launch): (Module, interp::Launch)) -> anyhow::Result<Case> {
    let (kernel, launch) = renamed(seed, &module, launch)?;
    let module = validate(Module::from(kernel.clone()), Trust::Guest)?;
    let mut after = launch.clone();
    interp::run(&module, &mut after, &interp::Limits { races: false, ..interp::Limits::default() })?;
    Ok(Case { seed, kernel, launch, expected: Some(after.arguments) })
}

/// The first kernel of a module, under a name that no other has.
fn renamed(
    seed: u64,
    module: &Module,
    mut launch: interp::Launch,
) -> anyhow::Result<(Kernel, interp::Launch)> {
    let name = format!("random_{seed}");
    let from = format!("kernel @{}(", module.kernels().first().context("a kernel")?.name());
    let renamed = text::parse(&text::print(module).replacen(&from, &format!("kernel @{name}("), 1))?;
    launch.kernel = name;
    Ok((renamed.kernels().first().cloned().context("a kernel")?, launch))
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
        assert!(cases.iter().any(|case| case.expected.as_ref() != Some(&case.launch.arguments)));
    }

    #[test]
    fn changed_tile_kernels_are_found_for_each_seed() {
        let modules = tile_modules();
        let compiles = |target: &str| {
            let target = target.parse().unwrap();
            let cases = (0..32).map(|seed| changed_case(&modules, seed).unwrap());
            let modules = cases.map(|case| validate(Module::from(case.kernel), Trust::Guest).unwrap());
            modules.filter(|module| vm_jit::compile(module, &target).is_ok()).count()
        };
        for target in ["ptx:sm_90a", "ptx:sm_80"] {
            assert!(compiles(target) > 12, "{target}");
        }
    }
}
