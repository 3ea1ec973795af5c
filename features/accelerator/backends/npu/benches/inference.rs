//! How long a model takes on the emulated Hexagon: to compile, to load from what was compiled, and an inference; beside ONNX Runtime
//! from Python, where `PYTHON` (or `python3`) has it with QNN: one after the other, each time. Ratios are our time over Python's.
//!
//! ```text
//! PYTHON=venv/bin/python cargo bench -p vm-npu
//! ```

use std::error::Error;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use vm_graph::{Builder, Element, GraphError, Tensor, ValidGraph, onnx};
use vm_npu::{ContextOptions, Libraries, NpuAccelerator, Provider, Roots, Runtime};

/// What an aim allows of Python's time.
const AIM: f64 = 1.05;
const ROUNDS: usize = 25;

/// Layers of 128 rows: 256 wide, 1,024 within.
fn model() -> Result<ValidGraph, GraphError> {
    let mut b = Builder::new("layers");
    let mut x = b.input("x", Element::F32, &[128, 256])?;
    for layer in 0..4 {
        let mut weight = |rows: u64, columns: u64| {
            let value = |at: u64| ((at + layer) as f64 * 0.618).fract() * 0.1 - 0.05;
            let values: Vec<f64> = (0..rows * columns).map(value).collect();
            b.constant(Tensor::from_f64s(Element::F32, &[rows, columns], &values))
        };
        let (up, down) = (weight(256, 1024)?, weight(1024, 256)?);
        let h = b.mat_mul(x, up)?;
        let h = b.gelu(h)?;
        let h = b.mat_mul(h, down)?;
        x = b.add(x, h)?;
    }
    b.output("y", x)?;
    b.finish()
}

/// A time and the processor's, in ms.
type Taken = [f64; 2];

fn timed<T>(times: &mut Vec<Taken>, f: impl FnOnce() -> T) -> T {
    let used = || {
        let used = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        used.tv_sec as f64 * 1e3 + used.tv_nsec as f64 / 1e6
    };
    let (start, before) = (Instant::now(), used());
    let made = f();
    times.push([start.elapsed().as_secs_f64() * 1e3, used() - before]);
    made
}

/// The median, and the 10th and 90th percentiles.
fn spread(times: &[f64]) -> [f64; 3] {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    [0.5, 0.1, 0.9].map(|part| times[((times.len() - 1) as f64 * part).round() as usize])
}

/// ONNX Runtime from Python, which does what it is told and tells the time that it took.
struct Peer {
    child: Child,
    told: BufReader<ChildStdout>,
}

impl Peer {
    fn start(model: &Path, plugin: &Path, blob: &Path) -> Result<Peer, Box<dyn Error>> {
        let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/inference.py");
        let mut child = Command::new(python)
            .arg(script)
            .args([model, plugin, blob])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let told = BufReader::new(child.stdout.take().ok_or("it has no output")?);
        Ok(Peer { child, told })
    }

    fn time(&mut self, what: &str) -> Result<Taken, Box<dyn Error>> {
        writeln!(self.child.stdin.as_mut().ok_or("it has no input")?, "{what}")?;
        // Libraries write lines of their own there.
        let numbers = |line: String| -> Option<Taken> {
            let (time, used) = line.split_once(' ')?;
            Some([time.parse().ok()?, used.parse().ok()?])
        };
        let taken = self.told.by_ref().lines().find_map(|line| line.map(numbers).transpose());
        Ok(taken.ok_or("it has ended")??)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It ends with its input.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let libraries = Libraries::find()?;
    let plugin = libraries.plugins.iter().find(|(provider, _)| *provider == Provider::Qnn);
    let Some((_, plugin)) = plugin else {
        println!(
            "skipped: there is no QNN; features/accelerator/backends/npu/tests/fetch-onnxruntime puts it into the cache"
        );
        return Ok(());
    };
    let runtime = Runtime::load(&libraries)?;
    let device =
        runtime.devices(&Roots::system())?.into_iter().find(|device| device.provider == Some(Provider::Qnn));
    let npu = NpuAccelerator::open(&runtime, &device.ok_or("QNN has no device")?)?;
    let graph = model()?;
    let context = npu.context(&ContextOptions::default())?;
    let folder = tempfile::tempdir()?;
    let (file, made) = (folder.path().join("model.onnx"), folder.path().join("blob.onnx"));
    fs::write(&file, onnx::model(&graph))?;
    // A first one of each is not counted.
    let peer = Peer::start(&file, plugin, &made).and_then(|mut peer| Ok((peer.time("load")?, peer).1));
    let mut peer = peer.inspect_err(|error| println!("no ONNX Runtime from Python: {error}")).ok();
    let mut blob = context.compile(&graph)?;
    let [mut load, mut cached, mut run] = [const { [const { Vec::new() }; 2] }; 3];
    let mut beside = |what: &str, times: &mut Vec<Taken>| -> Result<(), Box<dyn Error>> {
        times.extend(peer.as_mut().map(|peer| peer.time(what)).transpose()?);
        Ok(())
    };
    // In turns, so that whatever else the machine does is of both.
    for _ in 0..ROUNDS {
        drop(blob);
        let compiled = timed(&mut load[0], || context.compile(&graph))?;
        beside("load", &mut load[1])?;
        let bytes = compiled.blob().clone();
        drop(compiled);
        blob = timed(&mut cached[0], || context.load_blob(&graph, bytes))?;
        beside("cached", &mut cached[1])?;
    }
    let mut arrays = context.buffers(&blob)?;
    // As Python is given: an emulator may be quicker with zeros.
    arrays.inputs[0].bytes_mut().chunks_exact_mut(4).for_each(|one| one.copy_from_slice(&1f32.to_le_bytes()));
    for _ in 0..2 * ROUNDS {
        arrays = timed(&mut run[0], || {
            context.submit(&blob, arrays, Duration::from_secs(60)).and_then(|fence| fence.wait())
        })?;
        beside("run", &mut run[1])?;
    }
    println!(
        "{:<17} {:>10} {:>20} {:>10} {:>20} {:>6}",
        "", "median ms", "10th to 90th", "Python", "10th to 90th", "ratio"
    );
    let rows = [("load", &load), ("cached", &cached), ("run", &run)];
    let rows =
        rows.iter().flat_map(|(name, of)| [(name.to_string(), of, 0), (format!("{name}, processor"), of, 1)]);
    for (name, [own, other], which) in rows {
        let only = |all: &[Taken]| all.iter().map(|taken| taken[which]).collect::<Vec<_>>();
        let (own, other) = (only(own), only(other));
        let [median, low, high] = spread(&own);
        let range = |low: f64, high: f64| format!("{low:.3} to {high:.3}");
        let (theirs, their_range, ratio) = match &other[..] {
            [] => ["-", "-", "-"].map(str::to_owned).into(),
            other => {
                let [theirs, low, high] = spread(other);
                let told = if median / theirs <= AIM { "met" } else { "MISSED" };
                (format!("{theirs:.3}"), range(low, high), format!("{:.3} {told}", median / theirs))
            }
        };
        println!(
            "{name:<17} {median:>10.3} {:>20} {theirs:>10} {their_range:>20} {ratio:>6}",
            range(low, high)
        );
    }
    Ok(())
}
