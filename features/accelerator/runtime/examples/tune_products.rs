//! Tunes matrix products on the first NVIDIA GPU: `tune_products 4096x4096x4096 16x4096x4096`. What is chosen is kept in `$TUNED`, if
//! that names a folder.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_jit::cache::{Cache, CacheOptions};
use vm_runtime::kernels::family::Problem as _;
use vm_runtime::kernels::gemm::Product;
use vm_runtime::{CudaAccelerator, CudaJITCompiler, TuneEvent, TuneOptions, Tuner};

fn main() -> Result<(), Box<dyn Error>> {
    let gpu = Arc::new(CudaAccelerator::new(0)?);
    let options =
        CacheOptions { folder: std::env::var_os("TUNED").map(Into::into), ..CacheOptions::default() };
    let cache = Arc::new(Cache::open(&options)?);
    let tuner = Tuner::new(CudaJITCompiler::new(gpu).cache(cache));
    let mut shapes: Vec<String> = std::env::args().skip(1).collect();
    if shapes.is_empty() {
        shapes = ["8192x8192x8192", "1024x1024x1024", "16x4096x4096"].map(str::to_owned).to_vec();
    }
    for shape in shapes {
        let numbers: Vec<u64> = shape.split('x').map(str::parse).collect::<Result<_, _>>()?;
        let &[m, n, k] = &numbers[..] else { return Err(format!("{shape} is not MxNxK").into()) };
        let product = Product { b_transposed: true, ..Product::of(m, n, k) };
        let start = Instant::now();
        let progress = move |event: &TuneEvent| match event {
            TuneEvent::Round { number, left, best, median } => {
                println!("  {:>7.1?}  round {number}, {left} left, {best} {median:?}", start.elapsed());
            }
            event => println!("  {:>7.1?}  {event:?}", start.elapsed()),
        };
        let options = TuneOptions { progress: Some(Arc::new(progress)), ..TuneOptions::default() };
        let tuned = tuner.tune(&product, &options)?;
        let rate = |time: Duration| product.operations() / time.as_secs_f64() / 1e12;
        println!("{} in {:.1?}{}", product.class(), tuned.elapsed, if tuned.cached { ", kept" } else { "" });
        for candidate in &tuned.candidates {
            let mark = if candidate.name == tuned.name { '*' } else { ' ' };
            match candidate.outcome.figure() {
                Some(figure) => println!(
                    "{mark} {} {:.2?} ({:.2?} to {:.2?}, {} samples), {:.1} TFLOP/s",
                    candidate.name,
                    figure.median,
                    figure.least,
                    figure.greatest,
                    figure.samples,
                    rate(figure.median)
                ),
                None => println!("{mark} {} {:?}", candidate.name, candidate.outcome),
            }
        }
    }
    Ok(())
}
