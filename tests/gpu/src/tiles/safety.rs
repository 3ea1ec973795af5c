//! What a guest's tile kernel can't do: reach beyond its views, or run for ever.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use vm_accel::{Launch, Limits, arguments};
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
            for (source, [one, many]) in endless_kernels() {
                for (blocks, milliseconds) in [(one, 20), (many, 20), (one, 300), (many, 300)] {
                    let time = Duration::from_millis(milliseconds);
                    let begin = Instant::now();
                    let error = endless(gpu, &source, blocks, Limits { fuel: u64::MAX >> 2, time })?;
                    ensure!(matches!(error, vm_accel::Error::DeadlineExceeded { .. }), "{error}");
                    let taken = begin.elapsed();
                    ensure!(taken < time + Duration::from_secs(10), "it took {taken:?}, not {time:?}");
                }
            }
            Ok(())
        }),
        Test::new("an endless tile kernel is stopped by its fuel", |gpu, _| {
            for (source, [_, many]) in endless_kernels() {
                for fuel in [0, 1, 4095, 100_000] {
                    let limits = Limits { fuel, time: Duration::from_secs(20) };
                    let error = endless(gpu, &source, many, limits)?;
                    ensure!(matches!(error, vm_accel::Error::OutOfFuel { .. }), "{fuel} fuel: {error}");
                }
            }
            Ok(())
        }),
        Test::new("roles agree on numbers that change in memory meanwhile", |gpu, report| {
            report.note(format!("{} fills beside {FICKLE_LAUNCHES} launches", fickle(gpu)?));
            Ok(())
        }),
    ]
}

/// Copies a box from anywhere to anywhere.
const COPY: &str = "vir 1
kernel @copy(@x: view<bf16, [?, ?, ?], read, align 16>, @y: view<bf16, [?, ?, ?], readwrite, align 16>, %a: i64, %b: i64, %c: i64, %d: i64) at 0x1000 tile(2) {
  channel @box: bf16[128, 128] stages 1
  channel @unit: bf16[128, 128] stages 1
  fragment @sum: f32[128, 128]
  fragment @out: bf16[128, 128]
  %z = const 0 : i64
  fetch @x[%z, %a, %b], @box
  fetch @x[%c, %b, %a], @unit
  get @y[%a, %d, %b], @out
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

/// It, and as a kernel of clusters of two and of four blocks, which fetch one factor together; with how few and how many blocks.
fn endless_kernels() -> Vec<(String, [u32; 2])> {
    let clusters = [2, 4].map(|blocks| {
        let head = ENDLESS.replace(" tile(2) {", &format!(" tile(2) cluster({blocks}) {{"));
        (head.replace("stages 3", "stages 3 multicast"), [blocks, 1000])
    });
    std::iter::once((ENDLESS.to_owned(), [1, 1000])).chain(clusters).collect()
}

/// How a launch that never ends by itself ends; the worker is of use afterwards.
fn endless(gpu: &Gpu, source: &str, blocks: u32, limits: Limits) -> anyhow::Result<vm_accel::Error> {
    let module = valid(gpu, text::parse(source)?.kernels()[0].clone(), Trust::Guest)?;
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

/// Loops as often, fetches what and multiplies as often as numbers in memory say, which it loads again each time.
const FICKLE: &str = "vir 1
kernel @fickle(@n: view<i32, [?], read>, @x: view<bf16, [?, ?], read, align 16>, @y: view<f32, [?, ?], readwrite, align 16>) at 0x1000 tile(2) {
  channel @a: bf16[128, 64] stages 2
  channel @b: bf16[64, 64] stages 3
  fragment @sum: f32[128, 64]
  %zero = const 0 : i32
  %one = const 1 : i32
  %most = const 4000 : i32
  %seven = const 7 : i32
  %last = while carry(%i: i32 = %zero) {
    %at = and %i, %seven : i32
    %word = load @n[%at] : i32
    %known = and %word, %seven : i32
    %more = ne %known, %seven : bool
    %few = lt.s %i, %most : bool
    %on = and %more, %few : bool
    yield %on
  } do {
    %also = and %i, %seven : i32
    %number = load @n[%also] : i32
    %times = and %number, %seven : i32
    for %k: i32 = %zero to %times step %one {
      fetch @x[%number, %k], @a
      fetch @x[%k, %number], @b
      mma @sum, @a, @b
      release @a
      release @b
    }
    %other = load @n[%times] : i32
    %odd = and %other, %one : i32
    %is_odd = ne %odd, %zero : bool
    if %is_odd {
      fetch @x[%other, %zero], @b
      release @b
    } else {
      put @y[%other, %zero], @sum
    }
    %next = add %i, %one : i32
    yield %next
  }
  put @y[%zero, %zero], @sum
}
";
/// Launches of it, each of which ends as the numbers are 7 at last.
const FICKLE_LAUNCHES: usize = 20;

/// Launches it while another stream sets the numbers. All launches end; gives how often the numbers were set.
fn fickle(gpu: &Gpu) -> anyhow::Result<usize> {
    let module = valid(gpu, text::parse(FICKLE)?.kernels()[0].clone(), Trust::Guest)?;
    let compiled = gpu.compile(&module)?;
    let artifact = named(&compiled, "fickle")?.artifact().clone();
    let worker = gpu.worker()?;
    let fills = worker.submit_and_wait(Instant::now() + 4 * TIMEOUT, move |session| {
        let loaded = session.load(&artifact)?;
        let (numbers, x, y) = (
            session.allocate_zeroed(64)?,
            session.allocate_zeroed(1 << 17)?,
            session.allocate_zeroed(1 << 15)?,
        );
        let mut fills = 0;
        for _ in 0..FICKLE_LAUNCHES {
            session.fill(&numbers, 0)?;
            session.scope(|scope| {
                let (runs, sets) = (scope.stream()?, scope.stream()?);
                let arguments =
                    arguments![numbers.shaped(&[16])?, x.shaped(&[256, 256])?, y.shaped(&[128, 64])?];
                let limits = Limits { fuel: u64::MAX >> 2, time: TIMEOUT };
                runs.launch(&loaded, Launch::over(200).within(limits), &arguments)?;
                let mut value = 1u8;
                for _ in 0..500 {
                    value = value.wrapping_mul(13).wrapping_add(5);
                    // None of them is 7 in its lowest three bits until the last.
                    let value = if value & 7 == 7 { value ^ 2 } else { value };
                    sets.fill(&numbers, value)?;
                    fills += 1;
                }
                sets.fill(&numbers, 7)
            })?;
        }
        Ok(fills)
    })?;
    worker.synchronize(TIMEOUT)?;
    worker.stop(TIMEOUT)?;
    Ok(fills)
}
