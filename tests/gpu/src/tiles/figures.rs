//! Attention at sizes that matter, beside cuDNN, through PyTorch, and FlashAttention-3, if its module is there. Products are measured here on older architectures' code alone.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::ensure;
use vm_accel::{Argument, Buffer, Worker};
use vm_cuda::CudaAccelerator;
use vm_ir::interp::Tensor;
use vm_ir::{GuestAddr, Kernel, Scalar, Trust};
use vm_jit::backend::ptx::Arch;
use vm_kernels::attention::{Attention, Backward, Gradient, SplitBackward};
use vm_kernels::gemm::Gemm;

use super::occupancy::Occupancy;
use super::valid;
use crate::Test;
use crate::gpu::{Gpu, TIMEOUT, named};
use crate::peer::Answer;
use crate::table::{Aim, Figure, Report, Sample};

/// Measurements, launches of each, and launches before that don't count.
const ROUNDS: usize = 9;
const LAUNCHES: usize = 8;
const WARM: usize = 2;

/// What is measured.
#[derive(Clone, Copy)]
enum Work {
    /// M, N and K; is B transposed?
    Gemm([u64; 3], bool),
    /// Tokens, elements of a head, of 192 with values of 128; causal? Of 16K tokens in all, whose values are 2048 wide.
    Attention([u64; 2], bool),
    /// The same, of FP8.
    Fp8([u64; 2], bool),
    /// The same, of the gradients.
    Gradients([u64; 2], bool),
    /// The same, by a kernel for each.
    SplitGradients([u64; 2], bool),
}

const WORK: &[Work] = &[
    Work::Gemm([8192, 8192, 8192], true),
    Work::Gemm([4096, 4096, 4096], false),
    Work::Attention([1024, 128], false),
    Work::Attention([2048, 128], false),
    Work::Attention([4096, 128], false),
    Work::Attention([8192, 128], false),
    Work::Attention([16384, 128], false),
    Work::Attention([32768, 128], false),
    Work::Attention([1024, 128], true),
    Work::Attention([2048, 128], true),
    Work::Attention([4096, 128], true),
    Work::Attention([8192, 128], true),
    Work::Attention([16384, 128], true),
    Work::Attention([32768, 128], true),
    Work::Attention([8192, 64], false),
    Work::Attention([8192, 64], true),
    Work::Attention([8192, 192], false),
    Work::Attention([8192, 192], true),
    Work::Attention([8192, 256], false),
    Work::Attention([8192, 256], true),
    Work::Fp8([2048, 128], false),
    Work::Fp8([4096, 128], false),
    Work::Fp8([8192, 128], false),
    Work::Fp8([16384, 128], false),
    Work::Fp8([32768, 128], false),
    Work::Fp8([2048, 128], true),
    Work::Fp8([4096, 128], true),
    Work::Fp8([8192, 128], true),
    Work::Fp8([16384, 128], true),
    Work::Fp8([32768, 128], true),
    Work::Fp8([8192, 64], false),
    Work::Fp8([8192, 64], true),
    Work::Fp8([8192, 256], false),
    Work::Fp8([8192, 256], true),
    Work::Gradients([2048, 128], false),
    Work::Gradients([8192, 128], false),
    Work::Gradients([2048, 128], true),
    Work::Gradients([8192, 128], true),
    Work::Gradients([8192, 64], false),
    Work::Gradients([8192, 64], true),
    Work::SplitGradients([8192, 128], true),
    Work::SplitGradients([8192, 256], false),
    Work::SplitGradients([8192, 256], true),
];

/// A launch of what is measured: a kernel, its grid, which of the buffers are its views, and its scale.
struct Step {
    kernel: Kernel,
    grid: [u32; 3],
    views: Vec<usize>,
    scale: Option<f32>,
}

/// Tokens and columns of attention's tensors, in all their batches. Longer sequences are one.
const TOKENS: u64 = 16384;
const WIDTH: u64 = 2048;

/// What scales and sums are filled with.
const CONSTANT: f32 = 8.0;

impl Work {
    /// Sequences, heads, tokens and elements of a head of attention.
    fn tensor([tokens, dim]: [u64; 2]) -> Vec<u64> {
        vec![(TOKENS / tokens).max(1), WIDTH / Self::of_values(dim), tokens, dim]
    }

    /// Elements of a value, by those of a head.
    fn of_values(dim: u64) -> u64 {
        if dim == 192 { 128 } else { dim }
    }

    /// As its peers are told of it: cuDNN and FlashAttention-3, and PyTorch's own, where cuDNN has it not; of FP8 the second, and as the
    /// next best bf16.
    fn keys(self) -> Vec<String> {
        match self {
            Work::Fp8(shape, causal) => vec![self.key(), Work::Attention(shape, causal).key()],
            Work::Attention(..) => {
                vec![self.key(), format!("flash {}", self.key()), format!("torch {}", self.key())]
            }
            _ => vec![self.key(), format!("torch {}", self.key())],
        }
    }

    fn key(self) -> String {
        let attention = |kind, shape, causal| {
            let extents: Vec<String> = Work::tensor(shape).iter().map(u64::to_string).collect();
            format!("{kind} {} {}", extents.join(" "), u8::from(causal))
        };
        match self {
            Work::Gemm([m, n, k], turned) => format!("gemm {m} {n} {k} {}", u8::from(turned)),
            Work::Attention(shape, causal) => attention("attention", shape, causal),
            Work::Fp8(shape, causal) => attention("fp8", shape, causal),
            Work::Gradients(shape, causal) | Work::SplitGradients(shape, causal) => {
                attention("gradients", shape, causal)
            }
        }
    }

    fn name(self) -> String {
        let element = if matches!(self, Work::Fp8(..)) { "fp8" } else { "bf16" };
        let attention = |of: &str, [tokens, dim]: [u64; 2], causal| {
            let kind = if causal { "causal" } else { "full" };
            let values = if dim == 192 { " with values of 128" } else { "" };
            format!("{of} of {element}, {kind}, heads of {dim}{values}, {tokens} tokens")
        };
        match self {
            Work::Gemm([m, n, k], turned) => {
                format!("product of bf16, {m} × {n} × {k}{}", if turned { ", B transposed" } else { "" })
            }
            Work::Attention(shape, causal) | Work::Fp8(shape, causal) => {
                attention("attention", shape, causal)
            }
            Work::Gradients(shape, causal) => attention("gradients of attention", shape, causal),
            Work::SplitGradients(shape, causal) => attention("gradients by a kernel each", shape, causal),
        }
    }

    /// Floating-point operations.
    fn operations(self) -> f64 {
        let attention = |products: f64, [tokens, dim]: [u64; 2], causal| {
            let values = Self::of_values(dim);
            let wide = (dim + values) as f64 / (2 * values) as f64;
            2.0 * products * wide * (TOKENS.max(tokens) * WIDTH * tokens) as f64
                / if causal { 2.0 } else { 1.0 }
        };
        match self {
            Work::Gemm([m, n, k], _) => 2.0 * m as f64 * n as f64 * k as f64,
            Work::Attention(shape, causal) | Work::Fp8(shape, causal) => attention(2.0, shape, causal),
            // Products that are computed again don't count.
            Work::Gradients(shape, causal) | Work::SplitGradients(shape, causal) => {
                attention(5.0, shape, causal)
            }
        }
    }

    /// Products have a section of their own, where they are measured as the tables choose them.
    fn is_product(self) -> bool {
        matches!(self, Work::Gemm(..))
    }

    /// One of each kind.
    fn for_older(self) -> bool {
        matches!(
            self,
            Work::Gemm([4096, 4096, 4096], _)
                | Work::Gemm([8192, ..], true)
                | Work::Attention([8192, 128], _)
        )
    }

    /// What is launched, on a device of so many multiprocessors; is its code for an older architecture, which has less shared
    /// memory?
    fn steps(self, multiprocessors: u32, older: bool) -> anyhow::Result<Vec<Step>> {
        let one = |kernel, scale| vec![Step { kernel, grid: [multiprocessors, 1, 1], views: vec![], scale }];
        let scale = |[_, dim]: [u64; 2]| Some(1.0 / (dim as f32).sqrt());
        Ok(match self {
            Work::Gemm(_, b_transposed) => {
                one(Gemm { b_transposed, ..Gemm::LARGE }.kernel(GuestAddr(0))?, None)
            }
            Work::Attention(shape, causal) => {
                let large = Attention::of_length(shape[1] as u32, causal, shape[0]);
                let variant = if older { Attention { tile: [128, 64], groups: 2, ..large } } else { large };
                one(variant.kernel(GuestAddr(0))?, scale(shape))
            }
            Work::Fp8(shape, causal) => {
                let kernel = Attention::fp8(shape[1] as u32, causal, shape[0]).kernel(GuestAddr(0))?;
                // Queries and keys have scales, too.
                one(kernel, scale(shape).map(|scale| scale / (CONSTANT * CONSTANT)))
            }
            Work::SplitGradients(shape, causal) => {
                let variant = SplitBackward::of(shape[1] as u32, causal);
                let extents = Work::tensor(shape);
                let by_rows = [extents[2].div_ceil(64) as u32, extents[1] as u32, extents[0] as u32];
                let [q, k, v, o, d_o, dq, dk, dv, lse, delta] = std::array::from_fn(|at| at);
                let main = |of, views: &[usize]| {
                    let kernel = variant.kernel(of, GuestAddr(0))?;
                    let grid = [multiprocessors, 1, 1];
                    anyhow::Ok(Step { kernel, grid, views: views.to_vec(), scale: scale(shape) })
                };
                let prepare = variant.prepare(GuestAddr(0))?;
                vec![
                    Step { kernel: prepare, grid: by_rows, views: vec![o, d_o, delta], scale: None },
                    main(Gradient::Queries, &[q, k, v, d_o, lse, delta, dq])?,
                    main(Gradient::Keys, &[q, k, v, d_o, lse, delta, dk])?,
                    main(Gradient::Values, &[q, k, d_o, lse, dv])?,
                ]
            }
            Work::Gradients(shape, causal) => {
                let variant = Backward::of(shape[1] as u32, causal);
                let (scale, extents) = (scale(shape), Work::tensor(shape));
                let by_rows = [extents[2].div_ceil(64) as u32, extents[1] as u32, extents[0] as u32];
                let [q, k, v, o, d_o, dq, dk, dv, lse, delta, sums] = std::array::from_fn(|at| at);
                let step = |kernel, grid, views: &[usize], scale| Step {
                    kernel,
                    grid,
                    views: views.to_vec(),
                    scale,
                };
                let main = [q, k, v, d_o, lse, delta, sums, dk, dv];
                vec![
                    step(variant.prepare(GuestAddr(0))?, by_rows, &[o, d_o, delta, sums], None),
                    step(variant.kernel(GuestAddr(0))?, [multiprocessors, 1, 1], &main, scale),
                    step(variant.finish(GuestAddr(0))?, by_rows, &[sums, dq], scale),
                ]
            }
        })
    }

    /// The extents of the buffers: of FP8, of bf16, and of f32.
    fn extents(self) -> [Vec<Vec<u64>>; 3] {
        let none = Vec::new();
        let [narrow, wide] = match self {
            Work::Fp8(shape, _) => {
                let extents = Work::tensor(shape);
                let mut transposed = extents.clone();
                transposed.swap(2, 3);
                let factors = vec![extents.clone(), extents.clone(), transposed];
                return [factors, vec![extents], vec![vec![1, 1]; 3]];
            }
            Work::SplitGradients(shape, _) => {
                let extents = Work::tensor(shape);
                let rows = extents[..3].to_vec();
                [vec![extents; 8], vec![rows; 2]]
            }
            Work::Gemm([m, n, k], turned) => {
                [vec![vec![m, k], if turned { vec![n, k] } else { vec![k, n] }, vec![m, n]], vec![]]
            }
            Work::Attention(shape, _) => {
                let extents = Work::tensor(shape);
                let mut values = extents.clone();
                values[3] = Work::of_values(values[3]);
                [vec![extents.clone(), extents, values.clone(), values], vec![]]
            }
            Work::Gradients(shape, causal) => {
                let extents = Work::tensor(shape);
                let mut sums = extents.clone();
                if Backward::of(shape[1] as u32, causal).turned() {
                    (sums[2], sums[3]) = (sums[2].div_ceil(64) * sums[3], 64);
                }
                let rows = extents[..3].to_vec();
                [vec![extents; 8], vec![rows.clone(), rows, sums]]
            }
        };
        [none, narrow, wide]
    }
}

/// Of an older architecture, those alone that say what its instructions do.
pub(super) fn tests(older: Option<Arch>) -> Vec<Test> {
    let all = WORK.iter().filter(move |work| match older {
        None => !work.is_product(),
        Some(arch) => arch.sm() == 80 && work.for_older(),
    });
    all.map(|work| Test::new(work.name(), move |gpu, report| run(gpu, *work, report))).collect()
}

/// Random bf16 numbers from -2 to 2, which take as much power as any.
pub(super) fn random(
    worker: &Worker<CudaAccelerator>,
    seed: u64,
    count: u64,
) -> anyhow::Result<Buffer<CudaAccelerator>> {
    let mut state = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let numbers: Vec<u16> = (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let number = (state >> 40) as f32 / (1u32 << 22) as f32 - 2.0;
            (number.to_bits() >> 16) as u16
        })
        .collect();
    let buffer = worker.allocate(2 * count)?;
    worker.write(&buffer, &numbers)?;
    Ok(buffer)
}

/// The same of FP8.
fn random_fp8(
    worker: &Worker<CudaAccelerator>,
    seed: u64,
    count: u64,
) -> anyhow::Result<Buffer<CudaAccelerator>> {
    let table = (0..4096).map(|at| f64::from(at) / 1024.0 - 2.0);
    let table = Tensor::from_f64s(Scalar::F8E4M3, &[4096], table).bytes;
    let mut state = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let numbers: Vec<u8> = (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            table[(state >> 52) as usize]
        })
        .collect();
    let buffer = worker.allocate(count)?;
    worker.write(&buffer, &numbers)?;
    Ok(buffer)
}

/// Numbers of f32, all alike.
pub(super) fn constant(
    worker: &Worker<CudaAccelerator>,
    count: u64,
) -> anyhow::Result<Buffer<CudaAccelerator>> {
    let buffer = worker.allocate(4 * count)?;
    worker.write(&buffer, &vec![CONSTANT; count as usize])?;
    Ok(buffer)
}

fn run(gpu: &Gpu, work: Work, report: &mut Report) -> anyhow::Result<()> {
    let worker = gpu.worker()?;
    let steps = work.steps(multiprocessors(gpu), gpu.compiles_for_older())?;
    let load = |trust| -> anyhow::Result<_> {
        let begin = Instant::now();
        let kernels = steps.iter().map(|step| {
            let compiled = gpu.compile(&valid(gpu, step.kernel.clone(), trust)?)?;
            Ok(worker.load(named(&compiled, step.kernel.name())?.artifact())?)
        });
        let kernels = kernels.collect::<anyhow::Result<Vec<_>>>()?;
        Ok((kernels, begin.elapsed()))
    };
    let [(guest, _), (trusted, compiled)] = [load(Trust::Guest)?, load(Trust::Trusted)?];
    let [narrowest, narrow, wide] = work.extents();
    let count = |extents: &Vec<u64>| extents.iter().product::<u64>();
    let factors =
        narrowest.iter().enumerate().map(|(seed, extents)| random_fp8(&worker, seed as u64, count(extents)));
    let randoms =
        narrow.iter().enumerate().map(|(seed, extents)| random(&worker, seed as u64, count(extents)));
    let constants = wide.iter().map(|extents| constant(&worker, count(extents)));
    let buffers: Vec<_> = factors.chain(randoms).chain(constants).collect::<anyhow::Result<_>>()?;
    let extents: Vec<_> = narrowest.iter().chain(&narrow).chain(&wide).collect();
    let arguments = steps.iter().map(|step| {
        let all: Vec<usize> = (0..buffers.len()).collect();
        let views = if step.views.is_empty() { &all } else { &step.views };
        let mut arguments: Vec<Argument<'_, CudaAccelerator>> = Vec::new();
        for at in views {
            arguments.push(buffers[*at].shaped(extents[*at])?.into());
        }
        arguments.extend(step.scale.map(Argument::from));
        Ok(arguments)
    });
    let arguments = arguments.collect::<anyhow::Result<Vec<_>>>()?;
    let deadline = || Instant::now() + Duration::from_secs(60);
    let [guests, own] = worker.submit_and_wait(deadline(), |session| {
        let mut times = [const { Vec::new() }; 2];
        for round in 0..=ROUNDS {
            for (times, kernels) in times.iter_mut().zip([&guest, &trusted]) {
                let launches = |count| {
                    (0..count).try_for_each(|_| {
                        let mut all = kernels.iter().zip(&steps).zip(&arguments);
                        all.try_for_each(|((kernel, step), given)| session.launch(kernel, step.grid, given))
                    })
                };
                launches(WARM)?;
                let taken = session.timed(deadline(), |_| launches(LAUNCHES))?;
                let taken = taken.as_secs_f64() / LAUNCHES as f64;
                if round > 0 {
                    times.push(work.operations() / taken / 1e12);
                }
            }
        }
        Ok(times)
    })?;
    let own = Sample::of(own);
    drop(arguments);
    drop((buffers, guest, trusted));
    worker.stop(TIMEOUT)?;
    report.note(format!("compiled, assembled and loaded in {:.0} ms", compiled.as_secs_f64() * 1e3));
    for step in &steps {
        if let Some(occupancy) = Occupancy::of(gpu, step.kernel.clone())? {
            report.note(format!("{}: {occupancy}", step.kernel.name()));
        }
    }
    let figure = |name: String, ours: Sample, peer: (String, Sample), aim: f64| {
        // Older instructions are measured, and not held to what newer ones reach.
        let aim = (!gpu.compiles_for_older()).then_some(Aim::RatioAtLeast(aim));
        let unit = "TFLOP/s".into();
        Figure { name, unit, ours, peer: Some(peer), aim }
    };
    let trusted = ("the host's own".into(), own.clone());
    report.figure(figure(format!("{}, as a guest's", work.name()), Sample::of(guests), trusted, 0.97));
    if gpu.compiles_for_older() {
        report.note(format!("{}: {own} TFLOP/s", steps[0].kernel.name()));
        let (unit, aim) = ("TFLOP/s".into(), None);
        report.figure(Figure { name: work.name(), unit, ours: own, peer: None, aim });
        return Ok(());
    }
    match peers() {
        Ok(peers) => {
            // The best that there is first.
            let keys = work.keys();
            let found = keys.iter().filter_map(|key| Some((key, peers.get(key)?))).collect::<Vec<_>>();
            ensure!(!found.is_empty(), "the peer measured other work");
            let mut measured = 0;
            for (key, answer) in found {
                let seconds = match answer {
                    Ok(seconds) => seconds,
                    Err(reason) => {
                        report.note(format!("without {key}: {reason}"));
                        continue;
                    }
                };
                let speeds = seconds.iter().map(|seconds| work.operations() / seconds / 1e12).collect();
                let (peer, aim) = match work {
                    Work::Fp8(..) if key.starts_with("fp8") => ("FlashAttention-3", 0.9),
                    _ if key.starts_with("flash") => ("FlashAttention-3", 1.0),
                    _ if key.starts_with("torch") => ("PyTorch's own", 1.0),
                    Work::Fp8(..) => ("cuDNN of bf16", 1.0),
                    _ => ("cuDNN", 1.0),
                };
                let next_best = measured > 0 && matches!(work, Work::Fp8(..));
                measured += 1;
                let name = if next_best { format!("{}, beside bf16", work.name()) } else { work.name() };
                report.figure(figure(name, own.clone(), (peer.to_owned(), Sample::of(speeds)), aim));
            }
        }
        Err(reason) => report.note(format!("without PyTorch: {reason}")),
    }
    Ok(())
}

fn multiprocessors(gpu: &Gpu) -> u32 {
    use vm_accel::Accelerator as _;
    gpu.accelerator.info().compute_units.max(1)
}

/// What peers take, by what is measured. They run once, in a process of their own.
fn peers() -> &'static Result<HashMap<String, Answer>, String> {
    static PEERS: OnceLock<Result<HashMap<String, Answer>, String>> = OnceLock::new();
    PEERS.get_or_init(|| {
        let keys: Vec<String> =
            WORK.iter().filter(|work| !work.is_product()).flat_map(|work| work.keys()).collect();
        crate::peer::run(include_str!("peers.py"), &keys)
    })
}
