//! Families are tuned within two seconds, and the second time from the cache.

use std::sync::Arc;
use std::time::Instant;

use anyhow::ensure;
use vm_cuda::CudaAccelerator;
use vm_ir::Scalar;
use vm_jit::cache::{Cache, CacheOptions};
use vm_kernels::attention::{Forward, Gradients, Mask};
use vm_kernels::family::Problem;
use vm_kernels::gemm::{Activation, Batch, Epilogue, Product, Scales};
use vm_passthrough::accelerator::{CudaJITCompiler, TuneError, TuneOptions, Tuner};

use crate::Test;
use crate::skip::skip;
use crate::table::Report;

pub(super) fn tests() -> Vec<Test> {
    vec![Test::new("a family is tuned in time, and then known", |gpu, report| {
        let folder = tempfile::tempdir()?;
        let kept = CacheOptions { folder: Some(folder.path().into()), ..CacheOptions::default() };
        let tuner = || -> anyhow::Result<_> {
            let compiler = CudaJITCompiler::new(Arc::clone(&gpu.accelerator));
            Ok(Tuner::new(compiler.cache(Arc::new(Cache::open(&kept)?))))
        };
        let first = tuner()?;
        for [m, n, k] in [[8192, 8192, 8192], [1024, 1024, 1024], [16, 4096, 4096]] {
            let product = Product { b_transposed: true, ..Product::of(m, n, k) };
            check(&first, &tuner()?, &product, &format!("product {m}×{n}×{k}"), report)?;
        }
        for tokens in [1024, 16384] {
            let forward = Forward::of(2, 16, tokens, 128, true);
            check(&first, &tuner()?, &forward, &format!("attention of {tokens} tokens"), report)?;
        }
        for (name, forward) in forwards() {
            check(&first, &tuner()?, &forward, &format!("attention {name}"), report)?;
        }
        for (name, gradients) in gradients() {
            check(&first, &tuner()?, &gradients, &format!("gradients {name}"), report)?;
        }
        for (name, product) in products() {
            check(&first, &tuner()?, &product, &format!("product {name}"), report)?;
        }
        Ok(())
    })]
}

fn forwards() -> Vec<(&'static str, Forward)> {
    let of = Forward::of(4, 16, 4096, 128, false);
    let packed = Forward { packed: true, ..of };
    vec![
        ("in a window", Forward { mask: Mask::Window, window: [1024, 0], ..of }),
        ("of packed sequences", packed),
        ("of packed sequences of FP8", Forward { fp8: true, dim: 256, ..packed }),
        ("of packed sequences in a window", Forward { mask: Mask::Window, window: [1024, 0], ..packed }),
    ]
}

fn gradients() -> Vec<(&'static str, Gradients)> {
    let of = |dim, causal| Gradients::of(4, 16, 4096, dim, causal);
    vec![
        ("of heads of 64", of(64, false)),
        ("of heads of 128, causal", of(128, true)),
        ("of heads of 128 that share keys", Gradients { heads: [16, 4], ..of(128, false) }),
        ("of heads of 256", of(256, true)),
        ("in a window", Gradients { mask: Mask::Window, window: [1024, 0], ..of(128, false) }),
        ("of packed sequences", Gradients { packed: true, ..of(128, true) }),
    ]
}

fn products() -> Vec<(&'static str, Product)> {
    let of = Product { b_transposed: true, ..Product::of(4096, 4096, 4096) };
    let fp8 = Product { element: Scalar::F8E4M3, ..of };
    let scaled = |scales| Product { epilogue: Epilogue { scales, ..Epilogue::NONE }, ..fp8 };
    let all =
        Epilogue { scaled: true, plus: true, bias: true, activation: Activation::Gelu, ..Epilogue::NONE };
    vec![
        ("of FP8 with scales of rows", scaled(Scales::Rows)),
        ("of FP8 with scales of blocks", scaled(Scales::Blocks)),
        ("of 8 groups", Product { batch: Batch::Grouped, matrices: 8, ..of }),
        ("of 8 pairs", Product { batch: Batch::Batched, matrices: 8, ..Product { m: 1024, n: 1024, ..of } }),
        ("with an epilogue", Product { epilogue: all, ..of }),
    ]
}

/// Tunes a problem by the first tuner within its time, and finds it in the cache by a second one.
fn check<P: Problem>(
    first: &Tuner<CudaAccelerator>,
    second: &Tuner<CudaAccelerator>,
    problem: &P,
    name: &str,
    report: &mut Report,
) -> anyhow::Result<()> {
    let options = TuneOptions::default();
    let begin = Instant::now();
    let tuned = match first.tune(problem, &options) {
        Err(error @ TuneError::NoneMeasured { .. }) => return skip(error.to_string()),
        tuned => tuned?,
    };
    let taken = begin.elapsed();
    ensure!(!tuned.cached && taken <= options.limit.mul_f64(1.1), "{}: {taken:?}", tuned.name);
    let again = second.tune(problem, &options)?;
    ensure!(again.cached && again.name == tuned.name, "{}, not {}", again.name, tuned.name);
    let (of, again) = (tuned.candidates.len(), again.elapsed);
    report.note(format!("{name}: {} of {of} in {taken:.1?}, then in {again:.1?}", tuned.name));
    Ok(())
}
