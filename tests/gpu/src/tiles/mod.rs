//! Tile kernels: right at odd shapes between canaries, safe with hostile boxes, stopped in the middle, and fast beside
//! PyTorch's.

mod attention;
mod decode;
mod figures;
mod occupancy;
mod odd;
pub(crate) mod products;
#[path = "../../../../features/library/kernels/tests/reference/mod.rs"]
mod reference;
mod safety;
mod tuning;

use std::collections::HashMap;

use anyhow::{Context, ensure};
use vm_accel::{Launch, Limits};
use vm_ir::interp::{Argument, Tensor};
use vm_ir::{GuestAddr, Kernel, Module, Scalar, Trust, ValidModule, validate};
use vm_jit::backend::ptx::Arch;
use vm_kernels::gemm::Gemm;

use crate::arena::{Arena, Rows};
use crate::gpu::{Gpu, TIMEOUT, named};
use crate::skip::skip;
use crate::{Arguments, Test, filetests, fuzz};

/// The tests of this section.
pub(crate) fn tests(arguments: &Arguments) -> Vec<Test> {
    let figures = figures::tests(None).into_iter().chain(decode::tests());
    right(arguments).into_iter().chain(tuning::tests()).chain(figures).collect()
}

/// The same of code for other architectures.
pub(crate) fn tests_of_older(arguments: &Arguments) -> Vec<Test> {
    let of = |&arch: &Arch| {
        let all = figures::tests(Some(arch)).into_iter().chain(right(arguments));
        all.map(move |test| test.compiled_for(arch))
    };
    arguments.tiles_for.iter().flat_map(of).collect()
}

/// Those of what a kernel computes, and what it can't do.
fn right(arguments: &Arguments) -> Vec<Test> {
    let mut tests = filetests::of_tiles();
    tests.extend(fuzz::of_tiles(arguments));
    tests.extend(odd::tests());
    tests.extend(safety::tests());
    tests.extend([Test::new("products of odd shapes", |gpu, report| {
        report.note(products(gpu)?.to_string());
        Ok(())
    })]);
    tests.extend(attention::tests());
    tests
}

/// What was launched.
#[derive(Default)]
struct Launches {
    launches: usize,
    /// Variants that the target has no room for.
    too_large: usize,
}

impl std::fmt::Display for Launches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} launches, a guest's and the host's own", self.launches)?;
        match self.too_large {
            0 => Ok(()),
            variants => write!(f, "; {variants} variants need more shared memory than there is"),
        }
    }
}

/// Has the target too little shared memory for a kernel?
fn is_too_large(gpu: &Gpu, kernel: &Kernel) -> anyhow::Result<bool> {
    let rejects = vm_jit::legal::rejects(&Module::from(kernel.clone()), &gpu.target()?);
    Ok(rejects.iter().any(|reject| reject.kind.to_string().contains("bytes of shared memory")))
}

/// A kernel of a module of its own, if the device has tile kernels.
fn valid(gpu: &Gpu, kernel: Kernel, trust: Trust) -> anyhow::Result<ValidModule> {
    let module = Module::from(kernel);
    let rejects = vm_jit::legal::rejects(&module, &gpu.target()?);
    if let Some(reject) = rejects.iter().find(|reject| reject.kind.code() == "unsupported-tile") {
        skip(format!("{}", reject.kind))?;
    }
    Ok(validate(module, trust)?)
}

/// Numbers from -1 to 1, the same everywhere.
fn random(seed: u64, element: Scalar, extents: &[u64]) -> Tensor {
    let mut state = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f64 / f64::from(1u32 << 23) - 1.0
    };
    let count: u64 = extents.iter().product();
    Tensor::from_f64s(element, extents, (0..count).map(|_| next()))
}

/// Launches a kernel as a guest's and as the host's own, rows packed and apart, and compares the last tensor.
fn check(
    gpu: &Gpu,
    kernel: &Kernel,
    grid: [u32; 3],
    arguments: &[Argument],
    wanted: &[f64],
) -> anyhow::Result<usize> {
    let worker = gpu.worker()?;
    let last = arguments.iter().rposition(|argument| argument.tensor().is_some()).context("no tensor")?;
    let mut launches = 0;
    for trust in [Trust::Guest, Trust::Trusted] {
        let module = valid(gpu, kernel.clone(), trust)?;
        let compiled = gpu.compile(&module)?;
        let loaded = worker.load(named(&compiled, kernel.name())?.artifact())?;
        for rows in [Rows::Packed, Rows::Apart] {
            let launch = Launch::over(grid).within(Limits::default());
            let after = Arena::new(arguments, rows).run(&worker, &loaded, kernel, launch)?;
            let found = after[last].tensor().context("no tensor")?.to_f64s();
            for (at, (found, wanted)) in found.iter().zip(wanted).enumerate() {
                ensure!(
                    (found - wanted).abs() <= 1e-2 * wanted.abs().max(1.0),
                    "{}, {trust:?}, rows {rows:?}: element {at} is {found}, not {wanted}",
                    kernel.name()
                );
            }
            launches += 1;
        }
    }
    worker.stop(TIMEOUT)?;
    Ok(launches)
}

fn products(gpu: &Gpu) -> anyhow::Result<Launches> {
    let mut variants = vec![Gemm::SMALL, Gemm { b_transposed: true, ..Gemm::SMALL }];
    for (element, output) in
        [(Scalar::Bf16, Scalar::Bf16), (Scalar::F16, Scalar::F16), (Scalar::F16, Scalar::F32)]
    {
        let tile = if output == Scalar::F32 { [128, 128, 64] } else { [128, 256, 64] };
        for b_transposed in [false, true] {
            variants.push(Gemm { element, output, tile, b_transposed, ..Gemm::LARGE });
        }
    }
    variants.push(Gemm { tile: [192, 128, 64], groups: 3, ..Gemm::LARGE });
    // For little shared memory, and of shapes that `wgmma` has not.
    for (tile, groups) in [([64, 64, 64], 1), ([128, 64, 32], 2), ([96, 48, 32], 3), ([16, 24, 16], 1)] {
        variants.push(Gemm { tile, groups, element: Scalar::F16, stages: 2, ..Gemm::SMALL });
    }
    variants.push(Gemm { tile: [32, 32, 32], stages: 2, ..Gemm::SMALL });
    variants.push(Gemm { tile: [256, 128, 64], stages: 2, ..Gemm::LARGE });
    variants.push(Gemm { tile: [128, 128, 128], stages: 2, ..Gemm::LARGE });
    let mut done = Launches::default();
    // Variants of one type and order come to the same.
    let mut known: HashMap<(String, bool, u64), Vec<f64>> = HashMap::new();
    for variant in variants {
        let kernel = variant.kernel(GuestAddr(0x1000))?;
        if is_too_large(gpu, &kernel)? {
            done.too_large += 1;
            continue;
        }
        for ([m, n, k], blocks) in
            [([1, 8, 8], 1), ([72, 80, 136], 5), ([333, 264, 520], 3), ([300, 520, 72], 200)]
        {
            let a = random(1, variant.element, &[m, k]);
            let b = random(2, variant.element, &if variant.b_transposed { [n, k] } else { [k, n] });
            let key = (variant.element.to_string(), variant.b_transposed, m);
            let (left, right) = (a.to_f64s(), b.to_f64s());
            let cell = |i: u64, j: u64| -> f64 {
                let of_b = |l: u64| if variant.b_transposed { j * k + l } else { l * n + j };
                (0..k).map(|l| left[(i * k + l) as usize] * right[of_b(l) as usize]).sum()
            };
            let wanted =
                known.entry(key).or_insert_with(|| (0..m * n).map(|at| cell(at / n, at % n)).collect());
            let arguments = [a, b, random(3, variant.output, &[m, n])].map(Argument::Tensor);
            done.launches += check(gpu, &kernel, [blocks, 1, 1], &arguments, wanted)?;
        }
    }
    ensure!(done.launches > 0, "no variant fits");
    Ok(done)
}
