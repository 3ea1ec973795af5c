//! Writes a kernel with the builder, compiles it, and runs it on the first NVIDIA GPU:
//!
//! `cargo run -p vm-runtime --features cuda --example launch_on_gpu`
//!
//! It prints the times, and `skipped: REASON` where there is no GPU.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_ir::op::Axis;
use vm_ir::view::Access;
use vm_ir::{GuestAddr, IRBlock, Scalar};
use vm_runtime::{Accelerator as _, CudaAccelerator, CudaJITCompiler, Worker, WorkerOptions, arguments};

fn main() -> Result<(), Box<dyn Error>> {
    let accelerator = match CudaAccelerator::new(0) {
        Ok(accelerator) => Arc::new(accelerator),
        Err(error) => {
            println!("skipped: {error}");
            return Ok(());
        }
    };
    let info = accelerator.info();
    println!("{} at {}, {}", info.name, info.address.as_deref().unwrap_or("no PCI address"), info.driver);
    let worker = Worker::start(Arc::clone(&accelerator), WorkerOptions::default())?;

    let mut compiler = CudaJITCompiler::new(accelerator);
    let block = IRBlock::new(GuestAddr(0x1000));
    let k = block.builder();
    k.name("silu").block_size([256, 1, 1]);
    let x = k.view("x", Scalar::F32, 1, Access::Read);
    let y = k.view("y", Scalar::F32, 1, Access::Write);
    let i = k.global_id(Axis::X);
    k.if_(i.lt(y.extent(0)), || {
        let v = x.at([i]).load();
        y.at([i]).store(v / ((-v).exp() + 1.0));
    });
    for round in ["first", "again"] {
        let start = Instant::now();
        let kernel = compiler.compile(&block)?;
        println!("compiled for {} to {}, {round}: {:?}", kernel.target(), kernel.format(), start.elapsed());
    }
    let kernel = worker.load(compiler.compile(&block)?.artifact())?;

    const COUNT: usize = 1_000_000;
    let given: Vec<f32> = (0..COUNT).map(|i| i as f32 / COUNT as f32 * 16.0 - 8.0).collect();
    let mut result = vec![0.0f32; COUNT];
    let (x, y) = (worker.allocate(4 * COUNT as u64)?, worker.allocate(4 * COUNT as u64)?);
    worker.write(&x, &given)?;
    let start = Instant::now();
    worker.launch(&kernel, (COUNT as u32).div_ceil(256), &arguments![&x, &y])?;
    worker.read(&y, &mut result)?;
    println!("launched and read back: {:?}", start.elapsed());
    drop((x, y, kernel));
    worker.stop(Duration::from_secs(10))?;

    let wrong = given.iter().zip(&result).filter(|(x, y)| {
        let wanted = **x / (1.0 + (-**x).exp());
        (wanted - **y).abs() > 1e-5 * wanted.abs().max(1.0)
    });
    match wrong.count() {
        0 => println!("all {COUNT} results are right"),
        wrong => return Err(format!("{wrong} of {COUNT} results are wrong").into()),
    }
    Ok(())
}
