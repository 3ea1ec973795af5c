//! Families at sizes that matter, beside PyTorch's: cuBLAS for products, cuDNN for attention.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::Context;
use vm_accel::{Argument, Buffer, Worker};
use vm_cuda::CudaAccelerator;
use vm_ir::{GuestAddr, Kernel, Trust};
use vm_jit::backend::ptx::Arch;
use vm_kernels::attention::Attention;
use vm_kernels::gemm::Gemm;

use super::valid;
use crate::Test;
use crate::gpu::{Gpu, TIMEOUT, named};
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
    /// Heads, tokens, elements of a head; causal?
    Attention([u64; 3], bool),
}

const WORK: &[Work] = &[
    Work::Gemm([8192, 8192, 8192], false),
    Work::Gemm([8192, 8192, 8192], true),
    Work::Gemm([4096, 4096, 4096], false),
    Work::Gemm([2048, 2048, 2048], false),
    Work::Gemm([1024, 1024, 1024], false),
    Work::Gemm([4096, 11008, 4096], true),
    Work::Gemm([4096, 4096, 11008], true),
    Work::Attention([128, 2048, 128], false),
    Work::Attention([32, 8192, 128], false),
    Work::Attention([16, 16384, 128], false),
    Work::Attention([32, 8192, 128], true),
    Work::Attention([64, 8192, 64], false),
    Work::Attention([64, 8192, 64], true),
];

/// Tiles, stages, groups and blocks on a multiprocessor of products by `mma.sync`.
const OLDER_GEMM: &[([u32; 3], u32, u32, u64)] = &[([128, 256, 64], 3, 2, 1)];
/// Queries and keys, stages and groups of attention by `mma.sync`.
const OLDER_ATTENTION: &[([u32; 2], u32, u32)] = &[([128, 64], 2, 2)];

impl Work {
    /// As its peer is told of it.
    fn key(self) -> String {
        match self {
            Work::Gemm([m, n, k], turned) => format!("gemm {m} {n} {k} {}", u8::from(turned)),
            Work::Attention([h, n, d], causal) => format!("attention {h} {n} {d} {}", u8::from(causal)),
        }
    }

    fn name(self) -> String {
        match self {
            Work::Gemm([m, n, k], turned) => {
                format!("product of bf16, {m} × {n} × {k}{}", if turned { ", B transposed" } else { "" })
            }
            Work::Attention([heads, tokens, dim], causal) => {
                let kind = if causal { "causal" } else { "full" };
                format!("attention of bf16, {kind}, {heads} heads of {dim}, {tokens} tokens")
            }
        }
    }

    /// Floating-point operations.
    fn operations(self) -> f64 {
        match self {
            Work::Gemm([m, n, k], _) => 2.0 * m as f64 * n as f64 * k as f64,
            Work::Attention([heads, tokens, dim], causal) => {
                4.0 * (heads * tokens) as f64 * tokens as f64 * dim as f64 / if causal { 2.0 } else { 1.0 }
            }
        }
    }

    /// One of each kind.
    fn for_older(self) -> bool {
        matches!(
            self,
            Work::Gemm([4096, 4096, 4096], _)
                | Work::Gemm([8192, ..], true)
                | Work::Attention([32, 8192, 128], _)
        )
    }

    fn kernel(self) -> anyhow::Result<Kernel> {
        Ok(match self {
            Work::Gemm(_, b_transposed) => Gemm { b_transposed, ..Gemm::LARGE }.kernel(GuestAddr(0))?,
            Work::Attention([_, _, dim], causal) => Attention::of(dim as u32, causal).kernel(GuestAddr(0))?,
        })
    }

    /// Variants for `mma.sync`, each with what it has on one multiprocessor: of a product blocks, of attention queries in a block.
    fn older_kernels(self) -> anyhow::Result<Vec<(Kernel, u64)>> {
        let mut kernels = Vec::new();
        match self {
            Work::Gemm(_, b_transposed) => {
                for (tile, stages, groups, blocks) in OLDER_GEMM {
                    let variant =
                        Gemm { b_transposed, tile: *tile, stages: *stages, groups: *groups, ..Gemm::LARGE };
                    kernels.push((variant.kernel(GuestAddr(0))?, *blocks));
                }
            }
            Work::Attention([_, _, dim], causal) => {
                for (tile, stages, groups) in OLDER_ATTENTION {
                    let variant = Attention {
                        tile: *tile,
                        stages: *stages,
                        groups: *groups,
                        ..Attention::of(dim as u32, causal)
                    };
                    kernels.push((variant.kernel(GuestAddr(0))?, tile[0].into()));
                }
            }
        }
        Ok(kernels)
    }

    fn grid(self, multiprocessors: u32, each: u64) -> [u32; 3] {
        match self {
            Work::Gemm(..) => [multiprocessors * each as u32, 1, 1],
            Work::Attention([heads, tokens, _], _) => [tokens.div_ceil(each) as u32, heads as u32, 1],
        }
    }

    /// The extents of the views.
    fn extents(self) -> Vec<Vec<u64>> {
        match self {
            Work::Gemm([m, n, k], turned) => {
                vec![vec![m, k], if turned { vec![n, k] } else { vec![k, n] }, vec![m, n]]
            }
            Work::Attention([heads, tokens, dim], _) => vec![vec![heads, tokens, dim]; 4],
        }
    }
}

/// Of an older architecture, those alone that say what its instructions do.
pub(super) fn tests(older: Option<Arch>) -> Vec<Test> {
    let all = WORK.iter().filter(move |work| match older {
        None => true,
        Some(arch) => arch.sm() == 80 && work.for_older(),
    });
    all.map(|work| {
        Test::new(work.name(), move |gpu, report| match gpu.compiles_for_older() {
            true => work
                .older_kernels()?
                .iter()
                .try_for_each(|(kernel, each)| run(gpu, *work, kernel, *each, report)),
            false => {
                run(gpu, *work, &work.kernel()?, if matches!(work, Work::Gemm(..)) { 1 } else { 128 }, report)
            }
        })
    })
    .collect()
}

/// Random bf16 numbers from -2 to 2, which take as much power as any.
fn random(
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

fn run(gpu: &Gpu, work: Work, kernel: &Kernel, each: u64, report: &mut Report) -> anyhow::Result<()> {
    let worker = gpu.worker()?;
    let load = |trust| -> anyhow::Result<_> {
        let begin = Instant::now();
        let compiled = gpu.compile(&valid(gpu, kernel.clone(), trust)?)?;
        Ok((worker.load(named(&compiled, kernel.name())?.artifact())?, begin.elapsed()))
    };
    let [(guest, _), (trusted, compiled)] = [load(Trust::Guest)?, load(Trust::Trusted)?];
    let extents = work.extents();
    let buffers: Vec<_> = extents
        .iter()
        .enumerate()
        .map(|(seed, extents)| random(&worker, seed as u64, extents.iter().product()))
        .collect::<anyhow::Result<_>>()?;
    let mut arguments: Vec<Argument<'_, CudaAccelerator>> = Vec::new();
    for (buffer, extents) in buffers.iter().zip(&extents) {
        arguments.push(buffer.shaped(extents)?.into());
    }
    if let Work::Attention([.., dim], _) = work {
        arguments.push((1.0 / (dim as f32).sqrt()).into());
    }
    let grid = work.grid(multiprocessors(gpu), each);
    let deadline = || Instant::now() + Duration::from_secs(60);
    let [guests, own] = worker.submit_and_wait(deadline(), |session| {
        let mut times = [const { Vec::new() }; 2];
        for round in 0..=ROUNDS {
            for (times, kernel) in times.iter_mut().zip([&guest, &trusted]) {
                let launches = |count| (0..count).try_for_each(|_| session.launch(kernel, grid, &arguments));
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
    let mut figure = |name: String, ours: Sample, peer: (String, Sample), aim: f64| {
        // Older instructions are measured, and not held to what newer ones reach.
        let aim = (!gpu.compiles_for_older()).then_some(Aim::RatioAtLeast(aim));
        let unit = "TFLOP/s".into();
        report.figure(Figure { name, unit, ours, peer: Some(peer), aim });
    };
    figure(
        format!("{}, as a guest's", work.name()),
        Sample::of(guests),
        ("the host's own".into(), own.clone()),
        0.97,
    );
    if gpu.compiles_for_older() {
        report.note(format!("{}: {own} TFLOP/s", kernel.name()));
        let (name, unit) = (format!("{}, {}", work.name(), kernel.name()), "TFLOP/s".into());
        report.figure(Figure { name, unit, ours: own, peer: None, aim: None });
        return Ok(());
    }
    match peers() {
        Ok(peers) => {
            let seconds = peers.get(&work.key()).context("the peer measured other work")?;
            let speeds = seconds.iter().map(|seconds| work.operations() / seconds / 1e12).collect();
            let name = if matches!(work, Work::Gemm(..)) { "cuBLAS" } else { "cuDNN" };
            figure(work.name(), own, (name.to_owned(), Sample::of(speeds)), 1.0);
        }
        Err(reason) => report.note(format!("without PyTorch: {reason}")),
    }
    Ok(())
}

fn multiprocessors(gpu: &Gpu) -> u32 {
    use vm_accel::Accelerator as _;
    gpu.accelerator.info().compute_units.max(1)
}

/// Seconds of a call by measurement, by what is measured. PyTorch runs once, in a process of its own.
fn peers() -> &'static Result<HashMap<String, Vec<f64>>, String> {
    static PEERS: OnceLock<Result<HashMap<String, Vec<f64>>, String>> = OnceLock::new();
    PEERS.get_or_init(|| {
        let keys: Vec<String> = WORK.iter().map(|work| work.key()).collect();
        crate::kernels::peers::run(include_str!("peers.py"), &keys)
    })
}
