//! How long a model takes on the emulated Hexagon: to compile, to load from what was compiled, and an inference; beside ONNX Runtime
//! from Python in the same run, where `PYTHON` (or `python3`) has it with QNN. Ratios are Python's time over ours.
//!
//! ```text
//! PYTHON=venv/bin/python cargo bench -p vm-npu
//! ```

use std::error::Error;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use vm_graph::{Builder, Element, GraphError, Tensor, ValidGraph, onnx};
use vm_npu::{ContextOptions, Libraries, NpuAccelerator, Provider, Roots, Runtime};

/// The greatest part of Python's time that an aim allows.
const AIM: f64 = 1.0 / 1.05;
const ROUNDS: usize = 5;

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

fn timed<T>(times: &mut Vec<f64>, f: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let made = f();
    times.push(start.elapsed().as_secs_f64() * 1e3);
    made
}

/// The median, and the 10th and 90th percentiles.
fn spread(times: &[f64]) -> [f64; 3] {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    [0.5, 0.1, 0.9].map(|part| times[((times.len() - 1) as f64 * part).round() as usize])
}

fn main() -> Result<(), Box<dyn Error>> {
    let libraries = Libraries::find()?;
    let plugin = libraries.plugins.iter().find(|(provider, _)| *provider == Provider::Qnn);
    let Some((_, plugin)) = plugin else {
        println!("skipped: there is no QNN; features/npu/tests/fetch-onnxruntime puts it into the cache");
        return Ok(());
    };
    let runtime = Runtime::load(&libraries)?;
    let device =
        runtime.devices(&Roots::system())?.into_iter().find(|device| device.provider == Some(Provider::Qnn));
    let npu = NpuAccelerator::open(&runtime, &device.ok_or("QNN has no device")?)?;
    let graph = model()?;
    let context = npu.context(&ContextOptions::default())?;
    let [mut load, mut cached, mut run] = [const { Vec::new() }; 3];
    let mut blob = timed(&mut Vec::new(), || context.compile(&graph))?;
    for _ in 0..ROUNDS {
        let compiled = timed(&mut load, || context.compile(&graph))?;
        let bytes = compiled.blob().clone();
        drop(compiled);
        blob = timed(&mut cached, || context.load_blob(&graph, bytes))?;
    }
    let mut arrays = context.buffers(&blob)?;
    // As Python is given: an emulator may be quicker with zeros.
    arrays.inputs[0].bytes_mut().chunks_exact_mut(4).for_each(|one| one.copy_from_slice(&1f32.to_le_bytes()));
    for _ in 0..20 * ROUNDS {
        arrays = timed(&mut run, || {
            context.submit(&blob, arrays, Duration::from_secs(60)).and_then(|fence| fence.wait())
        })?;
    }
    let folder = tempfile::tempdir()?;
    let (file, made) = (folder.path().join("model.onnx"), folder.path().join("blob.onnx"));
    fs::write(&file, onnx::model(&graph))?;
    let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/inference.py");
    let peer =
        Command::new(python).arg(script).arg(&file).arg(plugin).arg(&made).arg(ROUNDS.to_string()).output();
    let no = |why: &str| format!("no ONNX Runtime from Python: {why}");
    let peer = peer.map_err(|error| no(&error.to_string())).and_then(|peer| {
        let text = String::from_utf8_lossy(&peer.stdout);
        let found = text.lines().find(|line| line.starts_with('{')).map(str::to_owned);
        found.ok_or_else(|| no(String::from_utf8_lossy(&peer.stderr).lines().last().unwrap_or_default()))
    });
    let peer: Option<serde_json::Value> = match peer {
        Ok(line) => Some(serde_json::from_str(&line)?),
        Err(reason) => {
            println!("{reason}");
            None
        }
    };
    println!("{:<10} {:>10} {:>20} {:>10} {:>7}", "", "median ms", "10th to 90th", "Python", "ratio");
    for (name, times) in [("load", &load), ("cached", &cached), ("run", &run)] {
        let [median, low, high] = spread(times);
        let other = peer
            .as_ref()
            .and_then(|peer| peer[name].as_array())
            .map(|times| spread(&times.iter().filter_map(serde_json::Value::as_f64).collect::<Vec<_>>())[0]);
        let (theirs, ratio) = match other {
            Some(other) => {
                let ratio = other / median;
                let told = if ratio >= AIM { "met" } else { "MISSED" };
                (format!("{other:.3}"), format!("{ratio:.3} {told}"))
            }
            None => ("-".to_owned(), "-".to_owned()),
        };
        println!(
            "{name:<10} {median:>10.3} {:>20} {theirs:>10} {ratio:>7}",
            format!("{low:.3} to {high:.3}")
        );
    }
    Ok(())
}
