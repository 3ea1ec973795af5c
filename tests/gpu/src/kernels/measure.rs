//! A kernel's arguments on the device, its results, and the time it takes.

use std::time::Instant;

use anyhow::{Context, ensure};
use vm_accel::{Argument, Buffer, Kernel, Worker};
use vm_cuda::CudaAccelerator;
use vm_ir::{Module, Trust, text, validate};

use super::TIMEOUT;
use super::work::{EPSILON, FACTOR, Op, Work};
use crate::gpu::{Gpu, named};

/// Sets of arguments that launches take in turn, so that none finds its own in a cache.
pub(super) const SETS: usize = 3;
/// Measurements of each kind, which take turns, and launches of each, one behind the other. So many more launches
/// before them are not counted: what ran before leaves the caches and the memory in another state.
const ROUNDS: usize = 15;
const LAUNCHES: usize = 6;
const WARM: usize = 3;
/// The files.
const FILES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/filetests.rs"));

/// The module in a file of vm-ir's filetests.
pub(super) fn kernel(name: &str) -> anyhow::Result<Module> {
    let (_, source) =
        FILES.iter().find(|(file, _)| *file == name).with_context(|| format!("no file {name}.vir"))?;
    Ok(text::parse(source)?)
}

/// The buffers of one launch.
struct Set {
    inputs: Vec<Buffer<CudaAccelerator>>,
    output: Buffer<CudaAccelerator>,
}

/// A kernel as a guest's and as the host's own, with arguments on the device.
pub(super) struct Bench {
    work: Work,
    worker: Worker<CudaAccelerator>,
    /// By trust: the guest's, the host's own.
    kernels: [Kernel<CudaAccelerator>; 2],
    blocks: u32,
    data: Data,
    weights: Buffer<CudaAccelerator>,
    sets: Vec<Set>,
}

/// The inputs on the host.
struct Data {
    inputs: Vec<Vec<f32>>,
    weights: Vec<f32>,
}

/// Seconds that a launch of each kind took, by measurement.
pub(super) struct Times {
    pub(super) guest: Vec<f64>,
    pub(super) trusted: Vec<f64>,
    pub(super) copy: Vec<f64>,
}

/// Numbers from −4 to 4, always the same for a seed and an index.
fn number(seed: u64, index: u64) -> f32 {
    let mut x = index.wrapping_add(seed << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x >> 40) as f32 / (1 << 24) as f32 - 0.5) * 8.0
}

/// Does `f` to parts of a slice on all processors; each part begins at a multiple of `unit`.
fn in_parts<T: Send, R: Send>(
    slice: &mut [T],
    unit: usize,
    f: impl Fn(usize, &mut [T]) -> R + Sync,
) -> Vec<R> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let part = slice.len().div_ceil(threads).next_multiple_of(unit).max(unit);
    std::thread::scope(|scope| {
        let handles: Vec<_> = slice
            .chunks_mut(part)
            .enumerate()
            .map(|(i, chunk)| {
                let f = &f;
                scope.spawn(move || f(i * part, chunk))
            })
            .collect();
        handles
            .into_iter()
            .map(|handle| handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

fn numbers(seed: u64, count: u64) -> Vec<f32> {
    let mut all = vec![0.0; count as usize];
    in_parts(&mut all, 1, |from, part| {
        for (i, x) in part.iter_mut().enumerate() {
            *x = number(seed, (from + i) as u64);
        }
    });
    all
}

impl Bench {
    /// Compiles, and puts N sets of arguments onto the device.
    pub(super) fn new(gpu: &Gpu, work: Work, sets: usize) -> anyhow::Result<Bench> {
        let worker = gpu.worker()?;
        // Of a row that only a cluster holds, the kernel for clusters where there are such.
        let target = gpu.target()?;
        let fits = |module: &Module| vm_jit::legal::rejects(module, &target).is_empty();
        let of_cluster = kernel(&format!("{}_cluster", work.name())).ok().filter(fits);
        let module = of_cluster.map_or_else(|| kernel(&work.name()), Ok)?;
        let entry = module.kernels().first().context("a file without a kernel")?;
        let (name, block, cluster) = (entry.name().to_owned(), entry.threads(), entry.cluster());
        let load = |trust| -> anyhow::Result<_> {
            let compiled = gpu.compile(&validate(module.clone(), trust)?)?;
            Ok(worker.load(named(&compiled, &name)?.artifact())?)
        };
        let kernels = [load(Trust::Guest)?, load(Trust::Trusted)?];
        let inputs: Vec<Vec<f32>> = (0..work.inputs()).map(|i| numbers(i as u64, work.elements())).collect();
        let data = Data { inputs, weights: numbers(9, work.columns.min(1 << 20)) };
        let upload = |values: &[f32]| -> anyhow::Result<_> {
            let buffer = worker.allocate(4 * values.len() as u64)?;
            worker.write(&buffer, values)?;
            Ok(buffer)
        };
        let sets = (0..sets)
            .map(|_| {
                let inputs =
                    data.inputs.iter().map(|values| upload(values)).collect::<anyhow::Result<_>>()?;
                Ok(Set { inputs, output: worker.allocate(4 * work.elements())? })
            })
            .collect::<anyhow::Result<_>>()?;
        let weights = upload(&data.weights)?;
        Ok(Bench {
            work,
            kernels,
            blocks: work.blocks(block).saturating_mul(cluster),
            data,
            weights,
            sets,
            worker,
        })
    }

    /// The arguments of a set, in the kernel's order.
    fn arguments<'a>(&'a self, set: &'a Set) -> vm_accel::Result<Vec<Argument<'a, CudaAccelerator>>> {
        let extents = self.work.extents();
        let mut all = Vec::new();
        for input in &set.inputs {
            all.push(Argument::from(input.shaped(&extents)?));
        }
        if self.work.op == Op::RmsNorm {
            all.push(Argument::from(self.weights.shaped(&[self.work.columns])?));
        }
        all.push(Argument::from(set.output.shaped(&extents)?));
        match self.work.op {
            Op::RmsNorm => all.push(Argument::from(EPSILON)),
            Op::Scale => all.push(Argument::from(FACTOR)),
            _ => {}
        }
        Ok(all)
    }

    /// Runs it as a guest's and as the host's own, and looks at every element that comes out.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        let set = self.sets.first().context("no arguments")?;
        let mut got = vec![0f32; self.work.elements() as usize];
        for (kernel, whose) in self.kernels.iter().zip(["a guest's", "the host's own"]) {
            // Not a number, wherever it writes nothing.
            self.worker.fill(&set.output, 0xff)?;
            self.worker.launch(kernel, [self.blocks, 1, 1], &self.arguments(set)?)?;
            self.worker.read(&set.output, &mut got)?;
            self.compare(&mut got).with_context(|| format!("as {whose}"))?;
        }
        Ok(())
    }

    fn compare(&self, got: &mut [f32]) -> anyhow::Result<()> {
        let (work, data) = (self.work, &self.data);
        let unit = if work.is_row() { work.columns as usize } else { 1 };
        let empty = Vec::new();
        let (a, b) = (&data.inputs[0], data.inputs.get(1).unwrap_or(&empty));
        let parts = in_parts(got, unit, |start, part| {
            // In stretches, for the expected values take memory too.
            let stretch = (1usize << 16).next_multiple_of(unit);
            let mut wrong = (0u64, None);
            for (i, got) in part.chunks(stretch).enumerate() {
                let from = start + i * stretch;
                let range = from..from + got.len();
                let expected = work.expected(&a[range.clone()], b.get(range).unwrap_or(&[]), &data.weights);
                for (at, (got, want)) in got.iter().zip(&expected).enumerate() {
                    // Below the normal numbers there are fewer digits.
                    let most = (want.abs() * work.tolerance()).max(f64::from(f32::MIN_POSITIVE));
                    let off = (f64::from(*got) - want).abs();
                    if off.is_nan() || off > most {
                        wrong.0 += 1;
                        wrong.1 = wrong.1.or(Some((from + at, *got, *want)));
                    }
                }
            }
            wrong
        });
        let count: u64 = parts.iter().map(|(count, _)| count).sum();
        let first = parts.iter().find_map(|(_, first)| *first);
        let (at, got, want) = first.unwrap_or_default();
        ensure!(count == 0, "{count} elements are wrong, the first at {at}: {got} instead of {want}");
        Ok(())
    }

    /// Times launches and copies, in turns.
    pub(super) fn time(&self) -> anyhow::Result<Times> {
        let arguments =
            self.sets.iter().map(|set| self.arguments(set)).collect::<vm_accel::Result<Vec<_>>>()?;
        let [guest, trusted] = &self.kernels;
        let deadline = || Instant::now() + TIMEOUT;
        let times = self.worker.submit_and_wait(deadline(), |session| {
            let mut times = Times { guest: Vec::new(), trusted: Vec::new(), copy: Vec::new() };
            let launch = |kernel, set: usize| session.launch(kernel, [self.blocks, 1, 1], &arguments[set]);
            let copy = |set: usize| session.copy(&self.sets[set].output, &self.sets[set].inputs[0]);
            let mut set = 0;
            let mut several = |f: &dyn Fn(usize) -> vm_accel::Result<()>| -> vm_accel::Result<f64> {
                let mut launches = |count: usize| {
                    (0..count).try_for_each(|_| {
                        set = (set + 1) % self.sets.len();
                        f(set)
                    })
                };
                launches(WARM)?;
                let taken = session.timed(deadline(), |_| launches(LAUNCHES))?;
                vm_accel::Result::Ok(taken.as_secs_f64() / LAUNCHES as f64)
            };
            for round in 0..=ROUNDS {
                let now = [
                    several(&copy)?,
                    several(&|set| launch(trusted, set))?,
                    several(&|set| launch(guest, set))?,
                ];
                // The first round warms up.
                if round > 0 {
                    times.copy.push(now[0]);
                    times.trusted.push(now[1]);
                    times.guest.push(now[2]);
                }
            }
            Ok(times)
        })?;
        Ok(times)
    }

    /// Gives everything back.
    pub(super) fn end(self) -> anyhow::Result<()> {
        let Bench { worker, sets, weights, kernels, .. } = self;
        drop((sets, weights, kernels));
        worker.stop(TIMEOUT)?;
        Ok(())
    }
}
