//! What ops take on this machine, beside what the compiler says that they cost.
//!
//! `cargo bench -p vm-cpu --bench costs`, with a word behind `--` for the ops whose name contains it. An op is done on random
//! numbers and corner cases, by one thread and by 64 neighbours, on single numbers and on vectors; what counts is the slowest,
//! in nanoseconds for an element. A cost is meant to be no less than half of that: the last line names those that are.

#[path = "../tests/common/mod.rs"]
mod common;

use std::sync::Arc;
use std::time::Duration;
use vm_accel::{Launch, Limits, Worker, WorkerOptions, arguments};
use vm_cpu::CpuAccelerator;
use vm_ir::filetest::{Random, is_on_values};
use vm_ir::op::{Opcode, Shape, TABLE};
use vm_ir::{Scalar, Trust, text, validate};
use vm_jit::Target;
use vm_jit::legal::{cost, support, types_of};

/// Elements of each operand: for 64 threads with 16 lanes each, 16 times.
const COUNT: usize = 64 * 16 * 16;
/// The fewest nanoseconds of a measurement.
const TIME: f64 = 2e6;

/// What this process took of the processors: others may be busy with something else.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

struct Machine {
    worker: Worker<CpuAccelerator>,
    target: Target,
}

impl Machine {
    /// Nanoseconds that an iteration of a kernel takes, whose parameters are views of these elements and the number of
    /// iterations.
    fn time(&self, source: &str, views: &[Scalar]) -> Option<f64> {
        let module = text::parse(source).unwrap_or_else(|error| panic!("{error}\n{source}"));
        let module = validate(module, Trust::Guest).unwrap_or_else(|error| panic!("{error}\n{source}"));
        let kernel = self.worker.load(&common::artifact(&module, "k", &self.target).ok()?).unwrap();
        let mut random = Random(7);
        let mut buffers = Vec::new();
        for scalar in views {
            let bytes: Vec<u8> = (0..COUNT)
                .flat_map(|_| random.bits(*scalar).to_le_bytes()[..scalar.bytes() as usize].to_vec())
                .collect();
            let buffer = self.worker.allocate_zeroed(bytes.len() as u64).unwrap();
            self.worker.write(&buffer, &bytes).unwrap();
            buffers.push(buffer);
        }
        let run = |n: i64| {
            let limits = Limits { time: Duration::from_secs(60), fuel: 1 << 60 };
            let launch = Launch::over([1, 1, 1]).within(limits);
            let begin = processor_time();
            match &buffers[..] {
                [a, b] => self.worker.launch(&kernel, launch, &arguments![a, b, n]),
                [a, b, c] => self.worker.launch(&kernel, launch, &arguments![a, b, c, n]),
                [a, b, c, d] => self.worker.launch(&kernel, launch, &arguments![a, b, c, d, n]),
                _ => panic!("{} views", buffers.len()),
            }
            .unwrap();
            self.worker.synchronize(Duration::from_secs(60)).unwrap();
            (processor_time() - begin).as_secs_f64() * 1e9
        };
        let once = |n| (0..3).map(|_| run(n)).fold(f64::INFINITY, f64::min);
        // What is left of the launch itself does not count.
        let nothing = once(1);
        let mut n = 16;
        while once(n) - nothing < TIME {
            n *= 4;
        }
        Some((once(n) - nothing) / n as f64)
    }
}

/// A kernel that goes through rows of its views; `body` has `%at`, the thread's place, and `%k`, the iteration's number.
fn kernel(views: &[Scalar], block: usize, lanes: usize, head: &str, body: &str) -> String {
    let mut params = String::new();
    for (i, scalar) in views.iter().enumerate() {
        params += &format!("@v{i}: view<{scalar}, [{COUNT}], readwrite>, ");
    }
    format!(
        "vir 1\nkernel @k({params}%n: i64) at 0x0 block({block}) {{\n{head}\n%t = thread_id.x : i32\n\
         %wide = sext %t : i64\n%lanes = const {lanes} : i64\n%mine = mul %wide, %lanes : i64\n%zero = const 0 : i64\n\
         %one = const 1 : i64\n%few = const 15 : i64\n%row = const 1024 : i64\nfor %k: i64 = %zero to %n step %one {{\n\
         %r = and %k, %few : i64\n%s = mul %r, %row : i64\n%at = add %s, %mine : i64\n{body}\n}}\n}}"
    )
}

/// Nanoseconds for an element of an op on values.
fn on_values(machine: &Machine, op: Opcode, from: Scalar, to: Scalar) -> Option<f64> {
    let memory = |s: Scalar| if s == Scalar::Bool { Scalar::I8 } else { s };
    let count = op.shape().operands().unwrap_or(1);
    let result = if matches!(op.shape(), Shape::Compare(_)) { Scalar::Bool } else { to };
    let operand = |i: usize| if matches!(op.shape(), Shape::Select) && i == 0 { Scalar::Bool } else { from };
    let mut views: Vec<Scalar> = (0..count).map(|i| memory(operand(i))).collect();
    views.push(memory(result));
    let mut worst = f64::NEG_INFINITY;
    for (block, lanes) in [(1, 1), (64, 1), (1, 16), (64, 16)] {
        let ty = |s: Scalar| if lanes == 1 { s.to_string() } else { format!("vec{lanes}<{s}>") };
        let (mut loads, mut names) = (String::new(), Vec::new());
        for i in 0..count {
            loads += &format!("%l{i} = load @v{i}[%at] : {}\n", ty(memory(operand(i))));
            match operand(i) {
                Scalar::Bool => {
                    loads += &format!(
                        "%o{i} = const 0 : {0}\n%b{i} = lt.s %l{i}, %o{i} : {1}\n",
                        ty(Scalar::I8),
                        ty(Scalar::Bool)
                    );
                    names.push(format!("%b{i}"));
                }
                _ => names.push(format!("%l{i}")),
            }
        }
        // What it loads and stores goes without saying.
        let mut copies = loads;
        for i in 0..count {
            copies += &format!("store @v{i}[%at], %l{i}\n");
        }
        let mut does = format!("{copies}%x = {} {} : {}\n", op.mnemonic(), names.join(", "), ty(result));
        let stored = match result {
            Scalar::Bool => {
                does += &format!("%y = zext %x : {}\n", ty(Scalar::I8));
                "%y"
            }
            _ => "%x",
        };
        does += &format!("store @v{count}[%at], {stored}");
        copies += &format!("%x = const 0 : {}\nstore @v{count}[%at], %x", ty(memory(result)));
        let (does, copies) =
            (kernel(&views, block, lanes, "", &does), kernel(&views, block, lanes, "", &copies));
        let (all, rest) = (machine.time(&does, &views)?, machine.time(&copies, &views)?);
        worst = worst.max((all - rest).max(0.0) / (block * lanes) as f64);
    }
    Some(worst)
}

/// Nanoseconds for an op that is no op on values, by one thread and by 64, and its name.
fn others() -> Vec<(&'static str, Opcode, Scalar, bool, String)> {
    let mut all = Vec::new();
    for shared in [false, true] {
        let (place, at) = if shared { ("@s", "%mine") } else { ("@v0", "%at") };
        for scalar in [Scalar::I8, Scalar::I32, Scalar::F64] {
            let (load, store) =
                (format!("%l = load {place}[{at}] : {scalar}\n"), format!("store {place}[{at}], %l\n"));
            all.push(("load, store", Opcode::Load, scalar, shared, load + &store));
        }
        for op in [Opcode::AtomicAdd, Opcode::AtomicMinS, Opcode::AtomicExchange] {
            for scalar in [Scalar::I32, Scalar::I64, Scalar::F64] {
                if types_of(op).contains(&(scalar, scalar)) {
                    let other = if shared { "@v0[%mine]" } else { "@v1[%mine]" };
                    let body = format!(
                        "%l = load {other} : {scalar}\n%o = {}.device {place}[{at}], %l : {scalar}",
                        op.mnemonic()
                    );
                    let body = if shared { body.replace(".device", ".block") } else { body };
                    all.push(("atomic", op, scalar, shared, body));
                }
            }
        }
    }
    let reduce = |op: Opcode, scalar: Scalar| {
        let body = format!(
            "%l = load @v0[%at] : {scalar}\n%o = {} %l : {scalar}\nstore @v1[%at], %o",
            op.mnemonic()
        );
        ("warp", op, scalar, false, body)
    };
    all.push(reduce(Opcode::WarpAdd, Scalar::F32));
    all.push(reduce(Opcode::WarpAdd, Scalar::F16));
    all.push(reduce(Opcode::WarpMax, Scalar::F64));
    let body =
        "%l = load @v0[%at] : i32\n%d = const 1 : i32\n%o = shuffle.xor %l, %d : i32\nstore @v1[%at], %o";
    all.push(("warp", Opcode::ShuffleXor, Scalar::I32, false, body.into()));
    all.push(("fence", Opcode::Fence, Scalar::I32, false, "fence.acqrel.device\nstore @v1[%at], %t".into()));
    all.push(("barrier", Opcode::Barrier, Scalar::I32, false, "barrier.block\nstore @v1[%at], %t".into()));
    all
}

fn main() {
    let only = std::env::args().skip(1).find(|word| !word.starts_with('-'));
    let wanted = |name: &str| only.as_ref().is_none_or(|only| name.contains(only.as_str()));
    let worker = Worker::start(Arc::new(CpuAccelerator::new().unwrap()), WorkerOptions::default()).unwrap();
    let machine = Machine { worker, target: "cpu".parse().unwrap() };
    let mut low = Vec::new();
    println!("{:24} {:>10} {:>10} {:>8}", "op", "type", "ns", "cost");
    let mut show = |name: &str, ty: String, ns: f64, cost: u64| {
        println!("{name:24} {ty:>10} {ns:10.2} {cost:8}");
        if cost as f64 * 2.0 < ns {
            low.push(format!("{name} {ty}"));
        }
    };
    for row in TABLE.iter().filter(|row| is_on_values(row) && wanted(row.mnemonic)) {
        for (from, to) in types_of(row.opcode) {
            let target = &machine.target;
            if matches!(support(target, row.opcode, from, to), vm_jit::legal::Support::Rejected(_)) {
                continue;
            }
            let Some(ns) = on_values(&machine, row.opcode, from, to) else { continue };
            let ty = if from == to { from.to_string() } else { format!("{from} {to}") };
            show(row.mnemonic, ty, ns, cost(target, row.opcode, from, to, false));
        }
    }
    for (kind, op, scalar, shared, body) in others() {
        let name = format!("{} ({kind}{})", op.mnemonic(), if shared { ", shared" } else { "" });
        if !wanted(&name) {
            continue;
        }
        let head = if shared { format!("shared @s: {scalar}[1024]") } else { String::new() };
        let views = [scalar, if kind == "fence" || kind == "barrier" { Scalar::I32 } else { scalar }];
        let mut worst = 0.0f64;
        for block in [32, 64] {
            if let Some(ns) = machine.time(&kernel(&views, block, 1, &head, &body), &views) {
                worst = worst.max(ns / block as f64);
            }
        }
        show(&name, scalar.to_string(), worst, cost(&machine.target, op, scalar, scalar, shared));
    }
    println!(
        "costs below half of what it takes: {}",
        if low.is_empty() { "none".into() } else { low.join(", ") }
    );
}
