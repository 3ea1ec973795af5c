//! Families are tuned within two seconds, and the second time from the cache.

use std::sync::Arc;
use std::time::Instant;

use anyhow::ensure;
use vm_jit::cache::{Cache, CacheOptions};
use vm_kernels::gemm::Product;
use vm_passthrough::accelerator::{CudaJITCompiler, TuneError, TuneOptions, Tuner};

use crate::Test;
use crate::skip::skip;

pub(super) fn tests() -> Vec<Test> {
    vec![Test::new("a family is tuned in time, and then known", |gpu, report| {
        let folder = tempfile::tempdir()?;
        let kept = CacheOptions { folder: Some(folder.path().into()), ..CacheOptions::default() };
        let tuner = || -> anyhow::Result<_> {
            let compiler = CudaJITCompiler::new(Arc::clone(&gpu.accelerator));
            Ok(Tuner::new(compiler.cache(Arc::new(Cache::open(&kept)?))))
        };
        let (first, options) = (tuner()?, TuneOptions::default());
        for [m, n, k] in [[8192, 8192, 8192], [1024, 1024, 1024], [16, 4096, 4096]] {
            let product = Product { b_transposed: true, ..Product::of(m, n, k) };
            let begin = Instant::now();
            let tuned = match first.tune(&product, &options) {
                Err(error @ TuneError::NoneMeasured { .. }) => return skip(error.to_string()),
                tuned => tuned?,
            };
            let taken = begin.elapsed();
            ensure!(!tuned.cached && taken <= options.limit.mul_f64(1.1), "{}: {taken:?}", tuned.name);
            let again = tuner()?.tune(&product, &options)?;
            ensure!(again.cached && again.name == tuned.name, "{again:?}, not {}", tuned.name);
            report.note(format!(
                "{m}×{n}×{k}: {} of {} in {taken:.1?}, then in {:.1?}",
                tuned.name,
                tuned.candidates.len(),
                again.elapsed
            ));
        }
        Ok(())
    })]
}
