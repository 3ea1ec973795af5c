//! Launches of guests that have no loop to be stopped in.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_accel::{Error, Launch, Limits, Worker, WorkerOptions, arguments};
use vm_cpu::CpuAccelerator;
use vm_ir::{Trust, text, validate};
use vm_jit::Target;

/// How long this process has had the processors, all of them at once: a busy machine does not lengthen it.
fn processors_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
    Duration::try_from(time).unwrap() / processors
}

/// A kernel without a loop, and one with a loop that is not cancellable.
const MODULE: &str = "vir 1
kernel @none(@x: view<i32, [?], readwrite>) at 0x1000 block(1024) {
  %i = global_id.x : i64
  %one = const 1 : i32
  store @x[%i], %one
}
kernel @short(@x: view<f32, [?], readwrite>) at 0x2000 block(1024) {
  %i = local_index : i32
  %at = sext %i : i64
  %low = const 0 : i32
  %high = const 4096 : i32
  %step = const 1 : i32
  for %n: i32 = %low to %high step %step {
    %v = load @x[%at] : f32
    %e = exp %v : f32
    store @x[%at], %e
  }
}";

#[test]
fn a_grid_without_an_end_is_stopped_between_two_blocks() {
    let module = validate(text::parse(MODULE).unwrap(), Trust::Guest).unwrap();
    let target: Target = "cpu".parse().unwrap();
    let worker: Worker<CpuAccelerator> =
        Worker::start(Arc::new(CpuAccelerator::new().unwrap()), WorkerOptions::default()).unwrap();
    let buffer = worker.allocate_zeroed(4 << 10).unwrap();
    let limit = Duration::from_millis(300);
    for name in ["none", "short"] {
        let artifact = common::artifact(&module, name, &target).unwrap();
        let kernel = worker.load(&artifact).unwrap();
        let launch = |grid: [u32; 3], time| Launch::over(grid).within(Limits { time, fuel: 1 });
        // With time enough it ends by itself, and fuel is not for it.
        worker.launch(&kernel, launch([2, 1, 1], Duration::from_secs(60)), &arguments![&buffer]).unwrap();
        worker.synchronize(Duration::from_secs(60)).unwrap();
        let (begin, busy) = (Instant::now(), processors_time());
        let most = [i32::MAX as u32, 65535, 65535];
        worker.launch(&kernel, launch(most, limit), &arguments![&buffer]).unwrap();
        let error = worker.synchronize(Duration::from_secs(600)).unwrap_err();
        let (took, busy) = (begin.elapsed(), processors_time() - busy);
        assert_eq!(error, Error::DeadlineExceeded { kernel: name.into(), limit });
        assert!(took >= limit && busy < Duration::from_secs(20), "{name}: {took:?}, {busy:?}");
    }
}

/// A loop that never ends, each iteration of which takes long, and counts them.
const LONG_ROUNDS: &str = "vir 1
kernel @long(@x: view<f32, [?], readwrite>, @iterations: view<i32, [?], readwrite>) at 0x1000 block(64) {
  %t = thread_id.x : i32
  %first = const 0 : i32
  %one = const 1 : i32
  %many = const 4096 : i32
  while {
    %goes = ge.s %t, %first : bool
    yield %goes
  } do {
    for %n: i32 = %first to %many step %one {
      %v = load @x[%t] : f32
      %e = pow %v, %v : f32
      store @x[%t], %e
    }
    %before = atomic.add.relaxed.device @iterations[%first], %one : i32
  }
}";

#[test]
fn a_loop_with_long_rounds_is_stopped_within_few() {
    let module = validate(text::parse(LONG_ROUNDS).unwrap(), Trust::Guest).unwrap();
    let artifact = common::artifact(&module, "long", &"cpu".parse().unwrap()).unwrap();
    let worker: Worker<CpuAccelerator> =
        Worker::start(Arc::new(CpuAccelerator::new().unwrap()), WorkerOptions::default()).unwrap();
    let kernel = worker.load(&artifact).unwrap();
    let (x, iterations) = (worker.allocate_zeroed(4 << 10).unwrap(), worker.allocate_zeroed(4).unwrap());
    let limit = Duration::from_millis(200);
    let limits = Limits { time: limit, fuel: u64::MAX >> 2 };
    worker.launch(&kernel, Launch::over([1, 1, 1]).within(limits), &arguments![&x, &iterations]).unwrap();
    let error = worker.synchronize(Duration::from_secs(60)).unwrap_err();
    assert_eq!(error, Error::DeadlineExceeded { kernel: "long".into(), limit });
    let mut count = [0i32];
    worker.read(&iterations, &mut count).unwrap();
    // Sixteen threads are run together; they take many seconds for as many iterations as a fuel quantum has.
    assert!((1..16 * 4096).contains(&count[0]), "{} iterations", count[0]);
    println!("{} iterations", count[0] / 16);
}

/// Nests of loops each of which is short by itself: one with a hint to unroll it, one with a barrier between, at which
/// threads are run one by one, and one around which is another of no known length.
const NESTS: &str = "vir 1
kernel @unrolled(@x: view<i32, [?], readwrite>, %n: i32) at 0x1000 block(1024) {
  %0 = const 0 : i32
  %1 = const 1 : i32
  %few = const 256 : i32
  %many = const 4096 : i32
  for %i: i32 = %0 to %few step %1 unroll 256 {
    for %j: i32 = %0 to %many step %1 {
      %old = atomic.add.relaxed.device @x[%0], %1 : i32
    }
  }
}
kernel @barrier(@x: view<i32, [?], readwrite>, %n: i32) at 0x2000 block(64) {
  %0 = const 0 : i32
  %1 = const 1 : i32
  %many = const 4096 : i32
  for %i: i32 = %0 to %many step %1 {
    for %j: i32 = %0 to %many step %1 {
      %old = atomic.add.relaxed.device @x[%0], %1 : i32
    }
    barrier.block
  }
}
kernel @around(@x: view<i32, [?], readwrite>, %n: i32) at 0x3000 block(1024) {
  %0 = const 0 : i32
  %1 = const 1 : i32
  %few = const 64 : i32
  for %k: i32 = %0 to %n step %1 unroll 256 {
    for %i: i32 = %0 to %few step %1 unroll 64 {
      for %j: i32 = %0 to %few step %1 {
        %old = atomic.add.relaxed.device @x[%0], %1 : i32
      }
    }
  }
}";

#[test]
fn nests_of_short_loops_are_stopped() {
    let module = validate(text::parse(NESTS).unwrap(), Trust::Guest).unwrap();
    let target: Target = "cpu".parse().unwrap();
    let worker: Worker<CpuAccelerator> =
        Worker::start(Arc::new(CpuAccelerator::new().unwrap()), WorkerOptions::default()).unwrap();
    let x = worker.allocate_zeroed(4 << 10).unwrap();
    let limit = Duration::from_millis(100);
    for name in ["unrolled", "barrier", "around"] {
        let kernel = worker.load(&common::artifact(&module, name, &target).unwrap()).unwrap();
        let begin = processors_time();
        let limits = Limits { time: limit, fuel: u64::MAX >> 2 };
        let arguments = arguments![&x, 1_000_000i32];
        worker.launch(&kernel, Launch::over([1, 1, 1]).within(limits), &arguments).unwrap();
        let error = worker.synchronize(Duration::from_secs(600)).unwrap_err();
        let took = processors_time() - begin;
        assert_eq!(error, Error::DeadlineExceeded { kernel: name.into(), limit });
        assert!(took < Duration::from_secs(2), "{name}: {took:?}");
        println!("{name}: {took:?}");
    }
}

/// What a thread does in short loops, by the name under which it is shown.
const KINDS: &[(&str, &str)] = &[
    ("f16 add", "%r = add %h, %h : vec16<f16>"),
    ("f16 min", "%r = min %h, %h : vec16<f16>"),
    ("f16 fma", "%r = fma %h, %h, %h : vec16<f16>"),
    ("bf16 fma", "%b = bitcast %h : vec16<bf16>\n%r = fma %b, %b, %b : vec16<bf16>"),
    ("f16 pow", "%r = pow %h, %h : vec16<f16>"),
    ("f64 pow", "%r = pow %d, %d : vec16<f64>"),
    ("f64 div", "%r = div %d, %d : vec16<f64>"),
    ("i64 mulhi", "%r = mulhi.s %l, %l : vec16<i64>"),
    ("i64 div", "%r = div.s %l, %l : vec16<i64>"),
    ("f16 warp sum", "%e = vec.extract %h, 0 : f16\n%r = warp.add %e : f16"),
    ("scattered loads", "%f = mul %j, %odd : i32\n%g = and %f, %mask : i32\n%r = load @x[%g] : f32"),
    ("atomics", "%r = atomic.add.device @n[%j], %j : i32"),
];

/// A loop that is short, in a block of 1024 threads, each of which does this. Its results are kept.
fn short_loop(body: &str) -> String {
    let ty = match body.rsplit_once(": ") {
        Some((_, ty)) => ty,
        None => panic!("{body}: no type"),
    };
    let element = ty.trim_start_matches("vec16<").trim_end_matches('>');
    format!(
        "vir 1
kernel @k(@x: view<f32, [?], read>, @n: view<i32, [?], readwrite>, @out: view<{element}, [?], write>,
    @h: view<f16, [?], read>, @d: view<f64, [?], read>, @l: view<i64, [?], read>) at 0x0 block(1024) {{
  %0 = const 0 : i32
  %1 = const 1 : i32
  %few = const 4000 : i32
  %odd = const 40503 : i32
  %mask = const 4194303 : i32
  for %j: i32 = %0 to %few step %1 {{
    %h = load @h[%j] : vec16<f16>
    %d = load @d[%j] : vec16<f64>
    %l = load @l[%j] : vec16<i64>
    {body}
    store @out[%j], %r
  }}
}}"
    )
}

/// Whatever takes long is noticed by what it costs, and a launch ends soon after its deadline.
#[test]
fn launches_end_soon_after_their_deadline_whatever_they_do() {
    let target: Target = "cpu".parse().unwrap();
    let worker: Worker<CpuAccelerator> =
        Worker::start(Arc::new(CpuAccelerator::new().unwrap()), WorkerOptions::default()).unwrap();
    let x = worker.allocate_zeroed(16 << 20).unwrap();
    let ones = vec![0x3c01_u16; 1 << 16];
    let some = worker.allocate_zeroed(128 << 10).unwrap();
    worker.write(&some, &ones).unwrap();
    let limit = Duration::from_millis(100);
    let limits = Limits { time: limit, fuel: u64::MAX >> 2 };
    for (name, body) in KINDS {
        let source = short_loop(body);
        let module = text::parse(&source).unwrap_or_else(|error| panic!("{error}\n{source}"));
        let module = validate(module, Trust::Guest).unwrap_or_else(|error| panic!("{error}\n{source}"));
        let kernel = worker.load(&common::artifact(&module, "k", &target).unwrap()).unwrap();
        let out = worker.allocate_zeroed(128 << 10).unwrap();
        let n = worker.allocate_zeroed(128 << 10).unwrap();
        let begin = processors_time();
        let arguments = arguments![&x, &n, &out, &some, &some, &some];
        worker.launch(&kernel, Launch::over([1 << 20, 1, 1]).within(limits), &arguments).unwrap();
        let error = worker.synchronize(Duration::from_secs(600)).unwrap_err();
        let over = (processors_time() - begin).saturating_sub(limit);
        assert_eq!(error, Error::DeadlineExceeded { kernel: "k".into(), limit }, "{name}");
        println!("{name:16} {:8.1} ms over", over.as_secs_f64() * 1e3);
        assert!(over < Duration::from_secs(2), "{name}: {over:?}");
    }
}
