//! silu and softmax on this machine against numpy with as many threads, turn by turn in one run.
//!
//! `cargo bench -p vm-cpu --bench numpy`, with a word behind `--` for the rows that contain it; it needs `python3` with numpy (`pip install numpy`), and says so where there is
//! none.
#![allow(unsafe_code)]

#[path = "../tests/common/mod.rs"]
mod common;

use std::io::{BufRead, BufReader, Write};
use std::num::NonZero;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use vm_accel::{Accelerator, Arguments, Extents, Grid, MemoryKind, Queue, QueueArgument, QueueOptions};
use vm_cpu::CpuAccelerator;
use vm_ir::{Trust, text, validate};

/// The fewest turns of each, and the time that they are to take; the medians are compared. Of short work it takes many: on
/// which processors the threads are put is chance.
const TURNS: usize = 15;
const TIME: Duration = Duration::from_secs(1);
/// Turns before those that count.
const WARM: usize = 2;

struct Numpy {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Numpy {
    fn start(work: &str, rows: usize, columns: usize, threads: usize) -> std::io::Result<Numpy> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/numpy.py");
        let sizes = [rows, columns, threads].map(|n| n.to_string());
        let mut child = Command::new("python3")
            .arg(script)
            .arg(work)
            .args(sizes)
            .env("OMP_NUM_THREADS", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        match (input, output) {
            (Some(input), Some(output)) => Ok(Numpy { child, input, output: BufReader::new(output) }),
            _ => Err(std::io::ErrorKind::BrokenPipe.into()),
        }
    }

    fn turn(&mut self) -> Option<f64> {
        writeln!(self.input).ok()?;
        let mut line = String::new();
        self.output.read_line(&mut line).ok()?;
        line.trim().parse().ok()
    }
}

impl Drop for Numpy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
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
    fn start(file: &str, trust: Trust, rows: usize, columns: usize, threads: usize) -> Ours {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let folder = match file {
            "softmax_row.vir" => here.join("benches"),
            _ => here.join("../../../../vm-ir/filetests/run"),
        };
        let module = text::parse(&std::fs::read_to_string(folder.join(file)).unwrap()).unwrap();
        let name = module.kernels()[0].name().to_owned();
        let rank = module.kernels()[0].view(0).unwrap().rank();
        let valid = validate(module, trust).unwrap();
        let artifact = common::artifact(&valid, &name, &"cpu".parse().unwrap()).unwrap();
        let device = CpuAccelerator::with_threads(NonZero::new(threads).unwrap()).unwrap();
        let queue = device.open(&QueueOptions::default()).unwrap();
        let kernel = queue.load(&artifact).unwrap();
        let count = rows * columns;
        let bytes = count as u64 * 4;
        let [x, y] = [0; 2].map(|_| queue.allocate(MemoryKind::Pinned, bytes).unwrap());
        let mut state = 1u64;
        let values: Vec<u8> = (0..count)
            .flat_map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                ((state >> 40) as f32 / (1u64 << 20) as f32 - 8.0).to_le_bytes()
            })
            .collect();
        x.region().write_host(&values).unwrap();
        let stop = queue.allocate(MemoryKind::Pinned, 4).unwrap();
        queue.fill(stop.region(), 0).unwrap();
        let extents = match rank {
            1 => Extents::packed(&[count as u64]),
            _ => Extents::packed(&[rows as u64, columns as u64]),
        };
        let extents = extents.unwrap();
        let views = [&x, &y].map(|memory| QueueArgument::View(memory.region(), extents));
        let mut packed = Arguments::new(&artifact, views).unwrap();
        packed.guard(&artifact, stop.region(), 1 << 40).unwrap();
        let grid = match rank {
            1 => Grid::from((count as u32).div_ceil(1024)),
            _ => Grid::from(rows as u32),
        };
        // The queue frees them when it is dropped.
        let _ = (x, y, stop);
        Ours { queue, kernel, packed, grid, _device: device }
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

/// Rates from seconds: the median, and the 10th and the 90th percentile.
fn rates(mut seconds: Vec<f64>, bytes: usize) -> [f64; 3] {
    seconds.sort_by(f64::total_cmp);
    let last = seconds.len() - 1;
    [last / 2, last * 9 / 10, last / 10].map(|at| bytes as f64 / seconds[at] / 1e9)
}

fn main() {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    // `cargo bench` adds `--bench`; a word picks the rows that contain it.
    let only = std::env::args().skip(1).find(|word| !word.starts_with('-'));
    let mut threads = vec![1];
    threads.extend((cores > 1).then_some(cores));
    println!("median (10th..90th percentile)\n\n| work | threads | ours, GB/s | numpy, GB/s | ratio |");
    println!("| --- | --- | --- | --- | --- |");
    for (work, file, rows, columns) in [
        ("silu", "silu.vir", 256, 4096),
        ("silu", "silu.vir", 4096, 4096),
        ("softmax", "softmax.vir", 256, 4096),
        ("softmax", "softmax.vir", 4096, 4096),
        ("softmax", "softmax_row.vir", 256, 4096),
        ("softmax", "softmax_row.vir", 4096, 4096),
        ("softmax", "softmax_4096.vir", 4096, 4096),
        ("softmax", "softmax.vir", 256, 65536),
    ] {
        if only
            .as_ref()
            .is_some_and(|only| !format!("{work} {rows}×{columns} {file}").contains(only.as_str()))
        {
            continue;
        }
        for &threads in &threads {
            for trust in [Trust::Guest, Trust::Trusted] {
                let ours = Ours::start(file, trust, rows, columns, threads);
                let mut numpy = match Numpy::start(work, rows, columns, threads) {
                    Ok(numpy) => numpy,
                    Err(error) => return println!("skipped: python3 can't be started: {error}"),
                };
                let (mut mine, mut theirs) = (Vec::new(), Vec::new());
                let begin = Instant::now();
                while mine.len() < TURNS + WARM || begin.elapsed() < TIME {
                    let Some(turn) = numpy.turn() else {
                        return println!("skipped: numpy is missing; pip install numpy");
                    };
                    theirs.push(turn);
                    mine.push(ours.turn());
                }
                let [mine, theirs] =
                    [mine, theirs].map(|all| rates(all[WARM..].to_vec(), rows * columns * 8));
                let said = |[median, low, high]: [f64; 3]| format!("{median:.2} ({low:.2}..{high:.2})");
                println!(
                    "| {work} {rows}×{columns} ({file}, {trust:?}) | {threads} | {} | {} | {:.2} |",
                    said(mine),
                    said(theirs),
                    mine[0] / theirs[0]
                );
            }
        }
    }
}
