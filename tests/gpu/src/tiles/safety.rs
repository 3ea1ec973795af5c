//! What a guest's tile kernel can't do: reach beyond its views, or run for ever.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use vm_accel::{Launch, Limits};
use vm_ir::interp::{Argument, Tensor};
use vm_ir::{Scalar, Trust, text};

use super::valid;
use crate::Test;
use crate::arena::{Arena, Rows};
use crate::gpu::{Gpu, TIMEOUT, named};

pub(super) fn tests() -> Vec<Test> {
    vec![
        Test::new("hostile boxes of tile kernels", |gpu, report| {
            report.note(format!("{} launches", hostile(gpu)?));
            Ok(())
        }),
        Test::new("an endless tile kernel is stopped by its deadline", |gpu, _| {
            for (blocks, milliseconds) in [(1, 20), (1000, 20), (1, 300), (1000, 300)] {
                let time = Duration::from_millis(milliseconds);
                let begin = Instant::now();
                let error = endless(gpu, blocks, Limits { fuel: u64::MAX >> 2, time })?;
                ensure!(matches!(error, vm_accel::Error::DeadlineExceeded { .. }), "{error}");
                let taken = begin.elapsed();
                ensure!(taken < time + Duration::from_secs(10), "it took {taken:?}, not {time:?}");
            }
            Ok(())
        }),
        Test::new("an endless tile kernel is stopped by its fuel", |gpu, _| {
            for fuel in [0, 1, 4095, 100_000] {
                let error = endless(gpu, 200, Limits { fuel, time: Duration::from_secs(20) })?;
                ensure!(matches!(error, vm_accel::Error::OutOfFuel { .. }), "{fuel} fuel: {error}");
            }
            Ok(())
        }),
    ]
}

/// Copies a box from anywhere to anywhere.
const COPY: &str = "vir 1
kernel @copy(@x: view<bf16, [?, ?, ?], read, align 16>, @y: view<bf16, [?, ?, ?], readwrite, align 16>, %a: i64, %b: i64, %c: i64, %d: i64) at 0x1000 tile(2) {
  channel @box: bf16[128, 64] stages 1
  channel @unit: bf16[64, 64] stages 1
  fragment @sum: f32[128, 64]
  fragment @out: bf16[128, 64]
  %z = const 0 : i64
  fetch @x[%z, %a, %b], @box
  fetch @x[%c, %b, %a], @unit
  mma @sum, @box, @unit
  map @out = @sum (%i, %j, %s) {
    %n = fpconv %s : bf16
    yield %n
  }
  put @y[%z, %c, %d], @out
  put @y[%d, %a, %b], @out
}
";

fn hostile(gpu: &Gpu) -> anyhow::Result<usize> {
    let module = valid(gpu, text::parse(COPY)?.kernels()[0].clone(), Trust::Guest)?;
    let worker = gpu.worker()?;
    let compiled = gpu.compile(&module)?;
    let loaded = worker.load(named(&compiled, "copy")?.artifact())?;
    let far = [0, 1, -1, 37, -64, -127, -128, 1000, 1 << 31, -(1 << 31), (1 << 31) - 1, 1 << 32, -(1 << 32)];
    let all: Vec<i64> = far.into_iter().chain([i64::MAX, i64::MIN, i64::MAX - 63, i64::MIN + 63]).collect();
    let at = |n: usize| Argument::Bits(all[n % all.len()] as u64);
    let mut launches = 0;
    for n in 0..4 * all.len() {
        let tensor = |extents: [u64; 3]| Argument::Tensor(Tensor::zeros(Scalar::Bf16, &extents));
        let views = [tensor([2, 100, 72]), tensor([3, 33, 40])];
        let indices = [at(n), at(n * 7 + 3), at(n * 5 + 1), at(n * 11 + 2)];
        let arguments: Vec<Argument> = views.into_iter().chain(indices).collect();
        for rows in [Rows::Packed, Rows::Apart] {
            // The arena's canaries are around each view, and between its rows.
            Arena::new(&arguments, rows).run(&worker, &loaded, &module.kernels()[0], Launch::over(3))?;
            launches += 1;
        }
    }
    worker.stop(TIMEOUT)?;
    Ok(launches)
}

/// Fetches and multiplies as long as it may.
const ENDLESS: &str = "vir 1
kernel @endless(@x: view<bf16, [?, ?], read, align 16>, @y: view<f32, [?, ?], readwrite, align 16>, %one: i64) at 0x1000 tile(2) {
  channel @a: bf16[128, 64] stages 2
  channel @b: bf16[64, 64] stages 3
  fragment @sum: f32[128, 64]
  %z = const 0 : i64
  fetch @x[%z, %z], @b
  %last = while carry(%n: i64 = %z) {
    %on = ge.s %n, %z : bool
    yield %on
  } do {
    fetch @x[%n, %z], @a
    fetch @x[%z, %n], @b
    mma @sum, @a, @b
    release @a
    release @b
    %next = rem.s %n, %one : i64
    yield %next
  }
  release @b
  put @y[%z, %z], @sum
}
";

/// How a launch that never ends by itself ends; the worker is of use afterwards.
fn endless(gpu: &Gpu, blocks: u32, limits: Limits) -> anyhow::Result<vm_accel::Error> {
    let module = valid(gpu, text::parse(ENDLESS)?.kernels()[0].clone(), Trust::Guest)?;
    let worker = gpu.worker()?;
    let compiled = gpu.compile(&module)?;
    let loaded = worker.load(named(&compiled, "endless")?.artifact())?;
    let x = Argument::Tensor(Tensor::zeros(Scalar::Bf16, &[256, 256]));
    let y = Argument::Tensor(Tensor::zeros(Scalar::F32, &[128, 64]));
    let arguments = [x, y, Argument::Bits(1)];
    let launch = Launch::over(blocks).within(limits);
    let ran = Arena::new(&arguments, Rows::Packed).run(&worker, &loaded, &module.kernels()[0], launch);
    // The first call that comes when the launch has been stopped reports it.
    let error = match (ran, worker.synchronize(TIMEOUT)) {
        (Err(error), _) => error.downcast::<vm_accel::Error>()?,
        (Ok(_), Err(error)) => error,
        (Ok(_), Ok(())) => bail!("it ended well"),
    };
    let copy = valid(gpu, text::parse(COPY)?.kernels()[0].clone(), Trust::Guest)?;
    let compiled = gpu.compile(&copy)?;
    let loaded = worker.load(named(&compiled, "copy")?.artifact())?;
    let tensor = || Argument::Tensor(Tensor::zeros(Scalar::Bf16, &[1, 128, 64]));
    let arguments: Vec<Argument> =
        [tensor(), tensor()].into_iter().chain(std::iter::repeat_n(Argument::Bits(0), 4)).collect();
    Arena::new(&arguments, Rows::Packed).run(&worker, &loaded, &copy.kernels()[0], Launch::over(1))?;
    worker.stop(TIMEOUT)?;
    Ok(error)
}
