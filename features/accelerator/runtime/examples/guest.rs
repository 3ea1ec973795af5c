//! A kernel of the builder and a softmax of the library, on the accelerator that the host shares with this guest:
//!
//! `cargo run -p vm-runtime --features guest --example guest`, as root in a guest whose file has `[[accelerators]]` with `window`.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use vm_ir::op::Axis;
use vm_ir::view::Access;
use vm_ir::{GuestAddr, IRBlock, Scalar};
use vm_kernels::call::{Function as _, Operand};
use vm_kernels::softmax::Softmax;
use vm_runtime::{
    Accelerator as _, GuestAccelerator, GuestJITCompiler, View, Worker, WorkerOptions, arguments, resources,
};

const ROWS: u64 = 64;
const COLUMNS: u64 = 1000;

fn main() -> Result<(), Box<dyn Error>> {
    let accelerator = Arc::new(GuestAccelerator::new()?);
    let info = accelerator.info();
    println!("the accelerator is {}, for which the host compiles to {}", info.name, info.target);
    let worker = Worker::start(Arc::clone(&accelerator), WorkerOptions::default())?;
    let mut compiler = GuestJITCompiler::new(Arc::clone(&accelerator));

    let block = IRBlock::new(GuestAddr(0x1000));
    let k = block.builder();
    k.name("halve").block_size([256, 1, 1]);
    let x = k.view("x", Scalar::F32, 1, Access::ReadWrite);
    let i = k.global_id(Axis::X);
    k.if_(i.lt(x.extent(0)), || x.at([i]).store(x.at([i]).load() * 0.5));
    let halve = worker.load(compiler.compile(&block)?.artifact())?;

    let given: Vec<f32> = (0..ROWS * COLUMNS).map(|i| (i * 37 % 1013) as f32 / 16.0 - 32.0).collect();
    let x = worker.upload(&given)?;
    let y = worker.allocate_typed::<f32>(given.len())?;
    worker.launch(&halve, (given.len() as u32).div_ceil(256), &arguments![&x])?;
    let softmax = Softmax::of(ROWS, COLUMNS, Scalar::F32).call(&resources(info))?;
    for launch in &softmax.launches {
        let kernel = compiler.compile_kernel(launch.entry.kernel(GuestAddr(0x2000))?)?;
        let kernel = worker.load(kernel.artifact())?;
        let mut views = Vec::new();
        for operand in &launch.operands {
            let Operand::Buffer(number, region) = operand else {
                return Err("a softmax of views alone".into());
            };
            let buffer = if *number == 0 { &x } else { &y };
            views.push(View::from(buffer).shaped(&region.extents)?.into());
        }
        worker.launch(&kernel, launch.grid, &views)?;
    }
    let found = worker.download(&y)?;
    worker.stop(Duration::from_secs(30))?;

    let rows = given.chunks(COLUMNS as usize).zip(found.chunks(COLUMNS as usize));
    let worst = rows.flat_map(|(x, y)| {
        let sum: f64 = x.iter().map(|x| (f64::from(*x) / 2.0).exp()).sum();
        x.iter().zip(y).map(move |(x, y)| ((f64::from(*x) / 2.0).exp() / sum - f64::from(*y)).abs())
    });
    let worst = worst.fold(0.0, f64::max);
    println!("softmax of halves, {ROWS} rows of {COLUMNS}: the greatest difference is {worst:.1e}");
    if worst < 1e-6 { Ok(()) } else { Err("the accelerator computed something else".into()) }
}
