//! What a guest's kernel can't do: reach a byte that is not its views', whatever its indices are, or run for ever.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use vm_accel::{Launch, Limits, Worker, arguments};
use vm_cuda::CudaAccelerator;
use vm_ir::filetest::{Tolerance, compare};
use vm_ir::interp::{self, Tensor};
use vm_ir::{Scalar, Trust, text, validate};

use crate::arena::{Arena, Rows};
use crate::gpu::{Gpu, TIMEOUT, named};
use crate::table::Sample;
use crate::{Arguments, Test};

/// The tests of this section.
pub(crate) fn tests(_: &Arguments) -> Vec<Test> {
    let mut tests: Vec<Test> = HOSTILE
        .iter()
        .map(|&(name, rank, body)| {
            Test::new(format!("hostile indices: {name}"), move |gpu, report| {
                let ran = hostile(gpu, rank, body)?;
                report.note(format!("{ran} launches"));
                Ok(())
            })
        })
        .collect();
    for (what, round) in ROUNDS {
        tests.push(Test::new(
            format!("an endless loop is stopped by its deadline: {what}"),
            move |gpu, report| {
                let worker = gpu.worker()?;
                let mut late = Vec::new();
                for limit in [Duration::from_millis(20), Duration::from_millis(200)] {
                    for _ in 0..5 {
                        let begin = Instant::now();
                        let error =
                            endless(gpu, &worker, round, Limits { fuel: u64::MAX >> 2, time: limit })?;
                        let taken = begin.elapsed();
                        ensure!(matches!(error, vm_accel::Error::DeadlineExceeded { .. }), "{error}");
                        late.push(taken.saturating_sub(limit).as_secs_f64() * 1e3);
                        ensure!(taken < limit + Duration::from_secs(1), "it took {taken:?}, not {limit:?}");
                    }
                }
                let late = Sample::of(late);
                report.note(format!("from deadline to stopped, with loading and launching: {late} ms"));
                ensure!(late.spread[1] < 100.0, "stopped {late} ms after the deadline");
                goes_on(gpu, &worker)?;
                Ok(worker.stop(TIMEOUT)?)
            },
        ));
    }
    tests.push(Test::new("an endless loop is stopped by its fuel", |gpu, _| {
        let worker = gpu.worker()?;
        for fuel in [0, 1, 4095, 100_000] {
            let error = endless(gpu, &worker, "", Limits { fuel, time: Duration::from_secs(20) })?;
            ensure!(matches!(error, vm_accel::Error::OutOfFuel { .. }), "{fuel} fuel: {error}");
        }
        goes_on(gpu, &worker)?;
        Ok(worker.stop(TIMEOUT)?)
    }));
    tests
}

/// Name, rank of the views, and what is done with the hostile indices `%a` and `%b` (64 bits) and `%c` (32 bits).
const HOSTILE: &[(&str, usize, &str)] = &[
    (
        "one dimension",
        1,
        "%old = load @x[%a] : i32\n store @y[%a], %old\n store @y[%c], %c\n store @bytes[%b], %small",
    ),
    (
        "vectors",
        1,
        "%old = load @x[%a] : vec4<i32>\n store @y[%b], %old\n %eight = load @x[%c] : vec8<i32>\n store @y[%a], %eight",
    ),
    (
        "byte vectors",
        1,
        "%wide = vec.splat %small : vec16<i8>\n store @bytes[%a], %wide\n store @bytes[%c], %wide",
    ),
    (
        "atomics",
        1,
        "%o1 = atomic.add.relaxed.device @y[%a], %c : i32\n %o2 = atomic.exchange.relaxed.device @y[%b], %c : i32\n \
         %o3 = atomic.cas.relaxed.device @y[%c], %o1, %o2 : i32\n store @y[%b], %o3",
    ),
    ("two dimensions", 2, "%old = load @x[%a, %b] : i32\n store @y[%a, %b], %old\n store @y[%c, %a], %c"),
    (
        "vectors over a row's end",
        2,
        "%old = load @x[%a, %b] : vec4<i32>\n store @y[%a, %b], %old\n store @y[%b, %c], %old",
    ),
    (
        "four dimensions",
        4,
        "%old = load @x[%a, %b, %c, %a] : vec2<i32>\n store @y[%b, %a, %a, %c], %old\n store @y[%c, %a, %b, %b], %c",
    ),
    (
        "shared memory",
        1,
        "store @tile[%a], %c\n %mine = load @tile[%b] : vec4<i32>\n store @y[%a], %mine\n store @tile[%c], %mine",
    ),
];

fn source(rank: usize, body: &str) -> String {
    let dims = vec!["?"; rank].join(", ");
    format!(
        "vir 1
kernel @hostile(@x: view<i32, [{dims}], read>, @y: view<i32, [{dims}], readwrite>, @bytes: view<i8, [?], write>, \
         @indices: view<i64, [?], read>) at 0x1000 block(1) {{
  shared @tile: i32[24]
  %zero = const 0 : i64
  %one = const 1 : i64
  %n = extent @indices, 0 : i64
  for %i: i64 = %zero to %n step %one {{
    %next = add %i, %one : i64
    %a = load @indices[%i] : i64
    %b = load @indices[%next] : i64
    %c = trunc %a : i32
    %small = trunc %b : i8
    {body}
  }}
}}
"
    )
}

/// Indices that no view has, those at its edges, and some that are its own.
fn indices() -> Vec<u64> {
    let mut all = Vec::new();
    let powers = [0, 1, 2, 3, 4, 8, 16, 31, 32, 33, 40, 59, 60, 61, 62, 63].map(|power| 1u64 << power);
    for near in powers.into_iter().chain([0, 5, 6, 7, 10, 12, 20, 24, 30, 256, 512, 1 << 40, u64::MAX / 3]) {
        all.extend([near, near.wrapping_sub(1), near.wrapping_add(1), near.wrapping_neg()]);
    }
    // Mixed, so that each stands beside others.
    let count = all.len() as u64;
    (0..3 * count).map(|i| all[(i * i * 7 + i * 13 + 5) as usize % count as usize]).collect()
}

/// Runs a hostile kernel over views of several forms, and compares with the interpreter. Gives how often.
fn hostile(gpu: &Gpu, rank: usize, body: &str) -> anyhow::Result<usize> {
    let module = validate(text::parse(&source(rank, body))?, Trust::Guest)?;
    let compiled = gpu.compile(&module)?;
    let (kernel, _) = module.find("hostile").context("the kernel")?;
    let worker = gpu.worker()?;
    let loaded = worker.load(named(&compiled, "hostile")?.artifact())?;
    let mut ran = 0;
    for sizes in [[2u64, 3, 2, 7], [1, 1, 1, 1], [3, 1, 4, 16], [2, 0, 1, 4], [1, 2, 3, 0]] {
        let extents = &sizes[4 - rank..];
        let numbers = |count: u64| (0..count).map(|n| n * 3 + 1);
        let elements = extents.iter().product();
        let indices = indices();
        let tensors = [
            Tensor::from_bits(Scalar::I32, extents, numbers(elements)),
            Tensor::from_bits(Scalar::I32, extents, numbers(elements)),
            Tensor::from_bits(Scalar::I8, &[21], numbers(21)),
            Tensor::from_bits(Scalar::I64, &[indices.len() as u64], indices),
        ];
        let before = tensors.map(interp::Argument::Tensor);
        let mut launch =
            interp::Launch { kernel: "hostile".into(), grid: [1, 1, 1], arguments: before.to_vec() };
        interp::run(&module, &mut launch, &interp::Limits::default())?;
        for rows in [Rows::Packed, Rows::Apart] {
            let result = Arena::new(&before, rows).run(&worker, &loaded, kernel, Launch::over(1));
            let result = result.with_context(|| format!("extents {extents:?}, {rows:?}"))?;
            for (result, expected) in result.iter().zip(&launch.arguments) {
                if let (Some(result), Some(expected)) = (result.tensor(), expected.tensor()) {
                    compare(result, expected, Tolerance::Exact)
                        .with_context(|| format!("extents {extents:?}, {rows:?}"))?;
                }
            }
            ran += 1;
        }
    }
    worker.stop(TIMEOUT)?;
    Ok(ran)
}

/// A kernel that never ends; `ROUND` is done in each round.
const ENDLESS: &str = "vir 1
kernel @endless(@y: view<i32, [?], readwrite>) at 0x1000 block(64) {
  %zero = const 0 : i32
  %one = const 1 : i32
  %many = const 4096 : i32
  %ended = while carry(%n: i32 = %zero) {
    %v = atomic.load.relaxed.device @y[%zero] : i32
    %more = ge.s %v, %zero : bool
    yield %more
  } do {
    ROUND
    %next = add %n, %n : i32
    yield %next
  }
}
";

/// What an endless loop does in each round.
const ROUNDS: [(&str, &str); 3] =
    [("a round is short", ""), ("it reads much", READS), ("it computes much", COMPUTES)];

/// Each read waits for the one before.
const READS: &str = "%read = for %i: i32 = %zero to %many step %one carry(%at: i32 = %zero) {
      %a = load @y[%at] : i32
      %b = add %a, %at : i32
      yield %b
    }
    store @y[%one], %read";

/// Each division waits for the one before.
const COMPUTES: &str = "%done = for %i: i32 = %zero to %many step %one carry(%a: i32 = %many) {
      %b = add %a, %i : i32
      %c = div.s %many, %b : i32
      %d = add %b, %c : i32
      yield %d
    }
    store @y[%one], %done";

fn endless_source(round: &str) -> String {
    ENDLESS.replace("ROUND", round)
}

/// Launches an endless kernel, and gives the error that it ends with.
fn endless(
    gpu: &Gpu,
    worker: &Worker<CudaAccelerator>,
    round: &str,
    limits: Limits,
) -> anyhow::Result<vm_accel::Error> {
    let module = validate(text::parse(&endless_source(round))?, Trust::Guest)?;
    let compiled = gpu.compile(&module)?;
    let loaded = worker.load(named(&compiled, "endless")?.artifact())?;
    let buffer = worker.allocate_zeroed(256)?;
    worker.launch(&loaded, Launch::over(400).within(limits), &arguments![&buffer])?;
    let error = worker.synchronize(TIMEOUT).err().context("it ended well")?;
    Ok(error)
}

/// That the worker goes on after a kernel was stopped.
fn goes_on(gpu: &Gpu, worker: &Worker<CudaAccelerator>) -> anyhow::Result<()> {
    let program = crate::programs::artifact(vm_accel::programs::Program::Add, gpu)?;
    let add = worker.load(&program)?;
    let (input, output) = (worker.allocate(4000)?, worker.allocate(4000)?);
    worker.write(&input, &[20u32; 1000])?;
    worker.launch(&add, 4, &arguments![&input, &output, 22u32])?;
    let mut sums = [0u32; 1000];
    worker.read(&output, &mut sums)?;
    ensure!(sums == [42; 1000], "the worker computes otherwise after a kernel was stopped");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_are_valid() {
        for (name, rank, body) in HOSTILE {
            let module = text::parse(&source(*rank, body)).unwrap_or_else(|error| panic!("{name}: {error}"));
            let module = validate(module, Trust::Guest).unwrap_or_else(|error| panic!("{name}: {error}"));
            vm_jit::compile(&module, &"ptx:sm_90".parse().unwrap()).unwrap();
        }
        for (_, round) in ROUNDS {
            let endless = validate(text::parse(&endless_source(round)).unwrap(), Trust::Guest).unwrap();
            let endless = vm_jit::compile(&endless, &"ptx:sm_90".parse().unwrap()).unwrap();
            assert!(endless.entries[0].params.guard.is_some());
        }
    }
}
