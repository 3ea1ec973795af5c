//! Families are tuned within two seconds, and the second time from the cache.

use std::sync::Arc;
use std::time::Instant;

use anyhow::ensure;
use vm_cuda::CudaAccelerator;
use vm_jit::cache::{Cache, CacheOptions};
use vm_kernels::attention::Forward;
use vm_kernels::family::Problem;
use vm_kernels::gemm::Product;
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
        Ok(())
    })]
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
