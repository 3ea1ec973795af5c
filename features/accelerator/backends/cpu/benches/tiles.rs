//! Matrix products and attention of `vm-kernels` on this machine against numpy and PyTorch with as many threads, turn by turn
//! in one run.
//!
//! `cargo bench -p vm-cpu --bench tiles`, with a word behind `--` for the rows that contain it; the peers need `python3` with
//! numpy and torch, and what is missing is said.
#![allow(unsafe_code)]

#[path = "../tests/common/mod.rs"]
mod common;
mod peer;

use peer::Peer;
use std::num::NonZero;
use std::time::{Duration, Instant};
use vm_accel::{
    Accelerator, Arguments, Extents, Grid, MemoryKind, Queue, QueueArgument, QueueOptions, Scalar as Number,
};
use vm_cpu::CpuAccelerator;
use vm_ir::interp::Tensor;
use vm_ir::{GuestAddr, Kernel, Module, Scalar, Trust, validate};
use vm_kernels::attention::Attention;
use vm_kernels::gemm::Gemm;

/// The fewest turns of each, and the time that they are to take; the medians are compared.
const TURNS: usize = 15;
const TIME: Duration = Duration::from_secs(3);
/// Turns before those that count.
const WARM: usize = 3;

#[derive(Clone, Copy, Debug)]
enum Work {
    /// M, N and K.
    Gemm(Gemm, [u64; 3]),
    /// Heads, and rows of queries, keys and values.
    Attention(Attention, u64, u64),
}

impl Work {
    fn name(self) -> String {
        match self {
            Work::Gemm(gemm, [m, n, k]) => format!("gemm {} {m}×{n}×{k}", gemm.element),
            Work::Attention(attention, heads, rows) => {
                format!("attention {} {heads} heads {rows}×{}", attention.element, attention.dims[0])
            }
        }
    }

    fn flops(self) -> f64 {
        match self {
            Work::Gemm(_, [m, n, k]) => 2.0 * (m * n * k) as f64,
            Work::Attention(attention, heads, rows) => {
                4.0 * (heads * rows * rows * u64::from(attention.dims[0])) as f64
            }
        }
    }

    fn kernel(self) -> Kernel {
        let guest = GuestAddr(0x1000);
        match self {
            Work::Gemm(gemm, _) => gemm.kernel(guest),
            Work::Attention(attention, ..) => attention.kernel(guest),
        }
        .unwrap()
    }

    /// Extents of the views, the last of which is written; and blocks.
    fn shape(self) -> (Vec<Vec<u64>>, [u32; 3]) {
        match self {
            Work::Gemm(gemm, [m, n, k]) => {
                let tiles = m.div_ceil(gemm.tile[0].into()) * n.div_ceil(gemm.tile[1].into());
                (vec![vec![m, k], vec![k, n], vec![m, n]], [tiles as u32, 1, 1])
            }
            Work::Attention(attention, heads, rows) => {
                let blocks = rows.div_ceil(attention.tile[0].into()) as u32;
                let extents = vec![1, heads, rows, attention.dims[0].into()];
                (vec![extents; 4], [blocks * heads as u32, 1, 1])
            }
        }
    }

    /// The peers and what they are told.
    fn peers(self) -> Vec<(&'static str, &'static str, [u64; 3])> {
        match self {
            Work::Gemm(_, sizes) => vec![("numpy", "gemm", sizes), ("torch", "gemm", sizes)],
            Work::Attention(attention, heads, rows) => {
                vec![("torch", "attention", [heads, rows, attention.dims[0].into()])]
            }
        }
    }
}

struct Ours {
    queue: vm_cpu::CpuQueue,
    kernel: std::sync::Arc<vm_cpu::CpuKernel>,
    packed: Arguments,
    grid: Grid,
    // Keeps the threads.
    _device: CpuAccelerator,
}

impl Ours {
    fn start(work: Work, trust: Trust, threads: usize) -> Ours {
        let valid = validate(Module::from(work.kernel()), trust).unwrap();
        let name = valid.kernels()[0].name().to_owned();
        let artifact = common::artifact(&valid, &name, &"cpu".parse().unwrap()).unwrap();
        let device = CpuAccelerator::with_threads(NonZero::new(threads).unwrap()).unwrap();
        let queue = device.open(&QueueOptions::default()).unwrap();
        let kernel = queue.load(&artifact).unwrap();
        let element = match work {
            Work::Gemm(gemm, _) => gemm.element,
            Work::Attention(attention, ..) => attention.element,
        };
        let (extents, grid) = work.shape();
        let mut state = 1u64;
        let mut memories = Vec::new();
        for extents in &extents {
            let count: u64 = extents.iter().product();
            let numbers = (0..count).map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f64 / f64::from(1u32 << 23) - 1.0
            });
            let tensor = Tensor::from_f64s(element, extents, numbers);
            let memory = queue.allocate(MemoryKind::Pinned, tensor.bytes.len() as u64).unwrap();
            memory.region().write_host(&tensor.bytes).unwrap();
            memories.push(memory);
        }
        let mut arguments = Vec::new();
        for (memory, extents) in memories.iter().zip(&extents) {
            arguments.push(QueueArgument::View(memory.region(), Extents::packed(extents).unwrap()));
        }
        if let Work::Attention(attention, ..) = work {
            let scale = 1.0 / f64::from(attention.dims[0]).sqrt();
            arguments.push(QueueArgument::Scalar(Number::from_bits(u64::from((scale as f32).to_bits()), 4)));
        }
        let stop = queue.allocate(MemoryKind::Pinned, 4).unwrap();
        queue.fill(stop.region(), 0).unwrap();
        let mut packed = Arguments::new(&artifact, arguments).unwrap();
        packed.guard(&artifact, stop.region(), 1 << 40).unwrap();
        // The queue frees them when it is dropped.
        let _ = (memories, stop);
        Ours { queue, kernel, packed, grid: Grid(grid), _device: device }
    }

    fn turn(&self) -> f64 {
        let event = self.queue.event(false).unwrap();
        let start = Instant::now();
        // SAFETY: the queue frees the memory when it is dropped.
        unsafe { self.queue.launch(&self.kernel, self.grid, &self.packed) }.unwrap();
        self.queue.record(&event).unwrap();
        self.queue.wait(&event, start + Duration::from_secs(60)).unwrap();
        start.elapsed().as_secs_f64()
    }
}

/// The median, and the 10th percentile, of what comes behind the warm turns.
fn times(turns: &[f64]) -> [f64; 2] {
    let mut turns = turns[WARM.min(turns.len() - 1)..].to_vec();
    turns.sort_by(f64::total_cmp);
    [turns.len() / 2, turns.len() / 10].map(|at| turns[at])
}

fn main() {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    // `cargo bench` adds `--bench`; a word picks the rows that contain it.
    let only = std::env::args().skip(1).find(|word| !word.starts_with('-'));
    let mut threads = vec![1];
    threads.extend((cores > 1).then_some(cores));
    println!("GFLOP/s: median (10th percentile of the times)\n\n| work | threads | ours | peer | ratio |");
    println!("| --- | --- | --- | --- | --- |");
    let bf16 = Gemm { element: Scalar::Bf16, output: Scalar::Bf16, ..Gemm::CPU };
    for work in [
        Work::Gemm(Gemm::CPU, [1024; 3]),
        Work::Gemm(Gemm::CPU, [1000, 1000, 1000]),
        Work::Gemm(Gemm::CPU, [2048; 3]),
        Work::Gemm(bf16, [1024; 3]),
        Work::Attention(Attention::cpu(64, false), 8, 1024),
        Work::Attention(Attention::cpu(64, false), 1, 1024),
        Work::Attention(Attention::cpu(128, false), 8, 1024),
        Work::Attention(Attention { element: Scalar::Bf16, ..Attention::cpu(64, false) }, 8, 1024),
    ] {
        let name = work.name();
        if only.as_ref().is_some_and(|only| !name.contains(only.as_str())) {
            continue;
        }
        for &threads in &threads {
            let ours = Ours::start(work, Trust::Guest, threads);
            let started = work.peers().into_iter().map(|(peer, work, sizes)| {
                let sizes = sizes.into_iter().chain([threads as u64]).map(|size| size.to_string());
                let arguments: Vec<String> =
                    [peer, work].map(str::to_owned).into_iter().chain(sizes).collect();
                (peer, Peer::start("tiles.py", &arguments, threads))
            });
            let mut peers = Vec::new();
            for (name, peer) in started {
                match peer {
                    Ok(peer) => peers.push(peer),
                    Err(error) => println!("skipped: python3 with {name}: {error}"),
                }
            }
            let (mut mine, begin) = (Vec::new(), Instant::now());
            while mine.len() < TURNS + WARM || begin.elapsed() < TIME {
                peers.iter_mut().for_each(Peer::turn);
                mine.push(ours.turn());
            }
            let rate = |seconds: f64| work.flops() / seconds / 1e9;
            let said = |[median, best]: [f64; 2]| format!("{:.1} ({:.1})", rate(median), rate(best));
            let mine = times(&mine);
            if peers.is_empty() {
                println!("| {name} | {threads} | {} | | |", said(mine));
            }
            for peer in peers.iter().filter(|peer| !peer.turns.is_empty()) {
                let theirs = times(&peer.turns);
                let [median, best] = [0, 1].map(|i| theirs[i] / mine[i]);
                let peer = &peer.name;
                println!(
                    "| {name} | {threads} | {} | {peer}: {} | {median:.2} ({best:.2}) |",
                    said(mine),
                    said(theirs)
                );
            }
        }
    }
}
