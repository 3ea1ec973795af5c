//! Functions of the kernel library, and kernels as they are written for a GPU, on this machine against numpy and PyTorch with as many
//! threads, turn by turn in one run.
//!
//! `cargo bench -p vm-cpu --bench library`, with words behind `--` for the rows that contain any of them, `threads=1` for that alone;
//! the peers need `python3` with numpy and torch, and what is missing is left out. The aim is to be ahead of both: the last line says
//! how many of the figures are.
#![allow(unsafe_code)]

#[path = "../tests/common/mod.rs"]
mod common;
mod peer;

use peer::Peer;
use std::num::NonZero;
use std::path::Path;
use std::time::{Duration, Instant};
use vm_accel::{
    Accelerator, Arguments, Extents, Grid, MemoryKind, Queue, QueueArgument, QueueOptions, Scalar as Number,
};
use vm_cpu::CpuAccelerator;
use vm_ir::interp::Tensor;
use vm_ir::{GuestAddr, Module, Scalar, Trust, text, validate};
use vm_kernels::call::{Call, Function, Operand};
use vm_kernels::elementwise::{Chain, Elementwise, Op};
use vm_kernels::family::{Kind, Resources};
use vm_kernels::flat::AdamW;
use vm_kernels::gather::Embedding;
use vm_kernels::gemm::{Batch, Multiply, Product};
use vm_kernels::loss::CrossEntropy;
use vm_kernels::norm::{Norm, NormForward};
use vm_kernels::sample::{Argmax, Logits, Sample, TopK, TopPSample};
use vm_kernels::softmax::Softmax;
use vm_kernels::transpose::Transpose;

/// The fewest turns of each, and the time that they are to take.
const TURNS: usize = 15;
const TIME: Duration = Duration::from_millis(300);
/// Turns before those that count.
const WARM: usize = 3;
/// What a peer's time over ours is to be at least.
const AIM: f64 = 1.0;

/// What is timed.
enum Ours {
    /// A function of the library.
    Library(Box<dyn Function>),
    /// A kernel of a file, of views of these elements and extents, over a grid.
    Text(&'static str, Scalar, Vec<Vec<u64>>, [u32; 3]),
}

struct Row {
    /// What the peers know it by, with its element.
    work: &'static str,
    element: Scalar,
    sizes: Vec<u64>,
    ours: Ours,
}

impl Row {
    fn name(&self) -> String {
        let sizes: Vec<String> = self.sizes.iter().map(u64::to_string).collect();
        let file = match self.ours {
            Ours::Library(_) => String::new(),
            Ours::Text(file, ..) => format!(" ({file})"),
        };
        format!("{} {} {}{file}", self.work, self.element, sizes.join("×"))
    }
}

fn rows() -> Vec<Row> {
    let (f32, bf16) = (Scalar::F32, Scalar::Bf16);
    let mut all = Vec::new();
    let mut text = |work, file, element, sizes: &[u64], views: &[&[u64]], grid| {
        let views = views.iter().map(|extents| extents.to_vec()).collect();
        all.push(Row { work, element, sizes: sizes.to_vec(), ours: Ours::Text(file, element, views, grid) });
    };
    for rows in [1024u64, 16384] {
        let n = [rows * 256];
        text("scan", "scan.vir", Scalar::I32, &[rows, 256], &[&n, &n], [rows as u32, 1, 1]);
    }
    for matrices in [256u64, 4096] {
        let (sizes, views) = ([matrices, 16, 16, 16], [matrices, 16, 16]);
        for file in ["batched.vir", "batched_flat.vir"] {
            text("batched", file, f32, &sizes, &[&views[..]; 3], [matrices as u32, 1, 1]);
        }
    }
    for side in [512u64, 2048] {
        let tiles = side as u32 / 32;
        text("transpose", "transpose.vir", f32, &[side, side], &[&[side, side][..]; 2], [tiles, tiles, 1]);
    }
    let mut library = |work, element, sizes: &[u64], function: Box<dyn Function>| {
        all.push(Row { work, element, sizes: sizes.to_vec(), ours: Ours::Library(function) });
    };
    for side in [16u64, 64] {
        let matrices = if side == 16 { 4096 } else { 256 };
        let product = Product { batch: Batch::Batched, matrices, ..Product::of(side, side, side) };
        let product = Product { element: f32, output: f32, ..product };
        let function = Multiply { product, alpha: 1.0, beta: 0.0 };
        library("batched", f32, &[matrices, side, side, side], Box::new(function));
    }
    for element in [f32, bf16, Scalar::F16] {
        for (size, depth) in [(288u64, 288u64), (768, 288), (4096, 4096), (32000, 288)] {
            for [m, n] in [[size, 1], [1, size]] {
                let product = Product { element, output: element, ..Product::of(m, n, depth) };
                let function = Multiply { product, alpha: 1.0, beta: 0.0 };
                library("line", element, &[m, n, depth], Box::new(function));
            }
        }
    }
    for element in [f32, bf16] {
        for [rows, columns] in [[256, 1024u64], [4096, 1024], [16384, 64]] {
            let sizes = [rows, columns];
            let n = rows * columns;
            let unary = |op| Box::new(Elementwise::of(Chain::unary(op, element, element), n));
            library("silu", element, &sizes, unary(Op::Silu));
            library("softmax", element, &sizes, Box::new(Softmax::of(rows, columns, element)));
            for (work, norm) in [("rmsnorm", Norm::Rms), ("layernorm", Norm::Layer)] {
                let function = NormForward::of(norm, rows, columns, element, 1e-5);
                library(work, element, &sizes, Box::new(function));
            }
            library("cross_entropy", element, &sizes, Box::new(CrossEntropy::of(rows, columns, element)));
            if columns == 64 {
                continue;
            }
            library("gelu", element, &sizes, unary(Op::Gelu));
            library("gelu_tanh", element, &sizes, unary(Op::GeluTanh));
            library("tanh", element, &sizes, unary(Op::Tanh));
            let other = if element == f32 { bf16 } else { f32 };
            library("cast", element, &sizes, Box::new(Elementwise::of(Chain::cast(element, other), n)));
            let add = Chain::binary(Op::Add, element, element);
            library("add", element, &sizes, Box::new(Elementwise::of(add, n)));
            library("swiglu", element, &sizes, Box::new(Elementwise::of(Chain::swiglu(element, element), n)));
            let log = Softmax { log: true, ..Softmax::of(rows, columns, element) };
            library("log_softmax", element, &sizes, Box::new(log));
            let adamw = AdamW { step: 10, ..AdamW::of(&[n], element) };
            if element == f32 {
                library("adamw", element, &sizes, Box::new(adamw));
            }
            let embedding =
                Embedding { rows: 32768, columns, count: rows, element, index: Scalar::I64, align: 16 };
            library("embedding", element, &[rows, columns, 32768], Box::new(embedding));
            let transpose = Transpose { matrices: 1, rows, columns, element, align: 16 };
            library("transpose", element, &sizes, Box::new(transpose));
        }
        for [rows, columns] in [[16u64, 32768], [64, 4096]] {
            let logits = Logits { element, rows, columns, align: 16 };
            let sizes = [rows, columns];
            library("argmax", element, &sizes, Box::new(Argmax { logits }));
            library("topk", element, &[rows, columns, 50], Box::new(TopK { logits, k: 50 }));
            library("sample", element, &sizes, Box::new(Sample { logits, temperature: 1.0 }));
            library("topp", element, &sizes, Box::new(TopPSample { logits, p: 0.9, temperature: 1.0 }));
        }
    }
    all
}

/// What is launched, ready.
struct Ready {
    device: CpuAccelerator,
    launches: Vec<(std::sync::Arc<vm_cpu::CpuKernel>, Grid, Arguments)>,
    // Keeps the memory.
    _queue: vm_cpu::CpuQueue,
}

impl Ready {
    fn of(row: &Row, trust: Trust, threads: usize) -> Ready {
        // The accelerator counts a queue's thread, which computes nothing here.
        let device = CpuAccelerator::with_threads(NonZero::new(threads + 1).unwrap()).unwrap();
        let queue = device.open(&QueueOptions::default()).unwrap();
        let stop = queue.allocate(MemoryKind::Pinned, 4).unwrap();
        queue.fill(stop.region(), 0).unwrap();
        let mut state = 1u64;
        let mut random = |name: &str, element: Scalar, extents: &[u64]| {
            let numbers = (0..extents.iter().product()).map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let one = (state >> 40) as f64 / f64::from(1u32 << 23) - 1.0;
                match name {
                    "targets" => (one.abs() * row.sizes[1] as f64).floor(),
                    "indices" => (one.abs() * row.sizes[2] as f64).floor(),
                    "logits" if row.work != "cross_entropy" => one * 8.0,
                    "m" | "v" => one.abs(),
                    _ if element.is_int() => (one * 100.0).floor(),
                    _ => one,
                }
            });
            let tensor = Tensor::from_f64s(element, extents, numbers);
            let memory = queue.allocate(MemoryKind::Pinned, tensor.bytes.len() as u64).unwrap();
            memory.region().write_host(&tensor.bytes).unwrap();
            memory
        };
        let mut launches = Vec::new();
        let mut launch = |module: Module, grid, arguments: Vec<QueueArgument<'_>>| {
            let valid = validate(module, trust).unwrap();
            let name = valid.kernels()[0].name().to_owned();
            let artifact = common::artifact(&valid, &name, &"cpu".parse().unwrap()).unwrap();
            let mut packed = Arguments::new(&artifact, arguments).unwrap();
            packed.guard(&artifact, stop.region(), 1 << 40).unwrap();
            launches.push((device.load(&artifact).unwrap(), Grid(grid), packed));
        };
        match &row.ours {
            Ours::Text(file, element, views, grid) => {
                let here = Path::new(env!("CARGO_MANIFEST_DIR"));
                let folder = match *file {
                    "scan.vir" => here.join("../../../../vm-ir/filetests/run"),
                    _ => here.join("benches"),
                };
                let module = text::parse(&std::fs::read_to_string(folder.join(file)).unwrap()).unwrap();
                let memories: Vec<_> = views.iter().map(|extents| random("x", *element, extents)).collect();
                let arguments = memories.iter().zip(views).map(|(memory, extents)| {
                    QueueArgument::View(memory.region(), Extents::packed(extents).unwrap())
                });
                launch(module, *grid, arguments.collect());
            }
            Ours::Library(function) => {
                let resources = Resources {
                    compute_units: threads as u32,
                    shared_bytes: 227 << 10,
                    kind: Kind::Cpu,
                    cluster: 1,
                };
                let Call { launches, workspace } = function.call(&resources).unwrap();
                let buffers = function.buffers();
                let memories: Vec<_> = buffers
                    .iter()
                    .map(|buffer| random(buffer.name, buffer.element, &buffer.extents))
                    .collect();
                let workspace = queue.allocate(MemoryKind::Pinned, workspace.max(4)).unwrap();
                for step in launches {
                    let arguments = step.operands.iter().map(|operand| {
                        let (memory, region) = match operand {
                            Operand::Buffer(at, region) => (&memories[*at], region),
                            Operand::Workspace(region) => (&workspace, region),
                            Operand::Number(bits, ty) => {
                                return QueueArgument::Scalar(Number::from_bits(*bits, ty.bytes()));
                            }
                        };
                        let bytes =
                            region.extents.iter().product::<u64>() * u64::from(region.element.bytes());
                        let part = memory.region().slice(region.offset, bytes).unwrap();
                        QueueArgument::View(part, Extents::packed(&region.extents).unwrap())
                    });
                    launch(step.entry.kernel(GuestAddr(0)).unwrap().into(), step.grid, arguments.collect());
                }
            }
        }
        // The queue frees its memory when it is dropped.
        let _ = stop;
        Ready { device, launches, _queue: queue }
    }

    /// On the thread that calls, as the library for C does it and the peers: nobody is woken for it.
    fn turn(&self) -> f64 {
        let start = Instant::now();
        for (kernel, grid, arguments) in &self.launches {
            // SAFETY: the queue frees the memory when it is dropped; the cancel flag is set in the arguments.
            unsafe { self.device.run(kernel, *grid, arguments) }.unwrap();
        }
        start.elapsed().as_secs_f64()
    }
}

/// The 10th percentile, the median and the 90th.
fn quantiles(mut all: Vec<f64>) -> [f64; 3] {
    all.sort_by(f64::total_cmp);
    let last = all.len() - 1;
    [last / 10, last / 2, last * 9 / 10].map(|at| all[at])
}

fn main() {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    // `cargo bench` adds `--bench`; words pick the rows that contain one of them.
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let (only, words): (Vec<String>, Vec<String>) =
        words.into_iter().partition(|word| word.starts_with("threads="));
    let mut threads = vec![1];
    threads.extend((cores > 1).then_some(cores));
    threads.retain(|count| only.is_empty() || only.contains(&format!("threads={count}")));
    println!(
        "µs: medians; ratios: a peer's time over ours, of pairs of turns: the median (10th..90th percentile), and of the least times\n"
    );
    println!(
        "| work | threads | ours | peer | ratio | aim ratio ≥ {AIM} |\n| --- | --- | --- | --- | --- | --- |"
    );
    let mut aims = [0; 2];
    for row in rows() {
        let name = row.name();
        if !words.is_empty() && !words.iter().any(|word| name.contains(word.as_str())) {
            continue;
        }
        for &threads in &threads {
            let ours = Ready::of(&row, Trust::Guest, threads);
            let peers = ["numpy", "torch"].into_iter().filter_map(|peer| {
                let words = [peer.to_owned(), row.work.to_owned(), row.element.to_string()];
                let numbers = [threads as u64].iter().chain(&row.sizes).map(u64::to_string).collect();
                Peer::start("library.py", &[words.to_vec(), numbers].concat(), threads).ok()
            });
            let mut peers: Vec<Peer> = peers.collect();
            let (mut mine, begin) = (Vec::new(), Instant::now());
            while mine.len() < TURNS + WARM || begin.elapsed() < TIME * (1 + peers.len() as u32) {
                peers.iter_mut().for_each(Peer::turn);
                mine.push(ours.turn());
            }
            let micros = |turns: &[f64]| quantiles(turns[WARM..].to_vec())[1] * 1e6;
            if peers.is_empty() {
                println!("| {name} | {threads} | {:.0} | | | |", micros(&mine));
            }
            for peer in peers.iter().filter(|peer| peer.turns.len() == mine.len()) {
                let pairs = peer.turns.iter().zip(&mine).skip(WARM).map(|(theirs, mine)| theirs / mine);
                let [low, median, high] = quantiles(pairs.collect());
                let (ours, theirs) = (micros(&mine), micros(&peer.turns));
                let least = |turns: &[f64]| turns.iter().copied().fold(f64::INFINITY, f64::min);
                let best = least(&peer.turns) / least(&mine);
                let met = median >= AIM;
                aims[usize::from(met)] += 1;
                println!(
                    "| {name} | {threads} | {ours:.0} | {}: {theirs:.0} | {median:.2} ({low:.2}..{high:.2}), {best:.2} | {} |",
                    peer.name,
                    if met { "met" } else { "MISSED" }
                );
            }
        }
    }
    println!("\naims: {} met, {} missed", aims[1], aims[0]);
}
