//! From the text of a kernel that nobody has seen to its result, against CUDA C++ through NVRTC.

use std::ffi::c_void;
use std::sync::Arc;

use anyhow::{Context, ensure};
use vm_accel::{Accelerator, Buffer, Worker, arguments};
use vm_cuda::CudaAccelerator;
use vm_cuda::assemble::{AssembleError, Assembler};
use vm_ir::{Trust, ValidModule};
use vm_jit::cache::{Cache, CacheOptions};
use vm_passthrough::accelerator::{CudaAssembler, CudaJITCompiler};

use super::compile::one_line;
use super::nvrtc::Nvrtc;
use super::raw::Raw;
use super::time;
use crate::gpu::{TIMEOUT, named};
use crate::skip::Skip;
use crate::table::{Aim, Figure, Sample};
use crate::{Arguments, Test};

/// How often each is done, after one time that is not counted.
const TIMES: usize = 20;

pub(super) fn tests(arguments: &Arguments) -> Vec<Test> {
    let (device, nvrtc) = (arguments.device, arguments.nvrtc.clone());
    vec![Test::new("from IR to running", move |gpu, report| {
        let worker = gpu.worker()?;
        let run = Run { x: worker.allocate_zeroed(1024)?, y: worker.allocate_zeroed(1024)?, worker };
        // Every kernel has a number of its own, so that nobody has seen it.
        let mut number = 0;
        let mut fresh = || {
            number += 1;
            one_line(number)
        };
        let compiler = gpu.compiler(Trust::Guest);
        let driver = compiler.clone().assembler(None);
        let driver = time(TIMES, 1, 1e3, || run.launch(&driver, &fresh()?))?;
        let (mut waited, mut started) = (None, None);
        match Assembler::find() {
            Ok(assembler) => {
                let compiled = vm_jit::compile(&fresh()?, &gpu.target()?)?;
                let suffixed = compiled.target.trim_start_matches("ptx:").split(',').next();
                let architecture = suffixed.unwrap_or(&gpu.accelerator.info().target);
                let ready = assembler.clone().standby(2);
                for (how, assembler) in [("started for each kernel", &assembler), ("that waited", &ready)] {
                    let process = time(TIMES, 1, 1e3, || {
                        assembler.assemble(&compiled.code, architecture)?;
                        Ok(())
                    })?;
                    report.note(format!("of which an assembler's process {how} takes {process} ms"));
                }
                waited = Some(time(TIMES, 1, 1e3, || run.launch(&compiler, &fresh()?))?);
                let compiler = compiler.clone().assembler(Some(Arc::new(CudaAssembler(assembler))));
                started = Some(time(TIMES, 1, 1e3, || run.launch(&compiler, &fresh()?))?);
            }
            Err(error @ AssembleError::Missing { .. }) => {
                report.note(error.to_string());
            }
            Err(error) => return Err(error.into()),
        }
        report.figure(Figure {
            name: "IR to running, from the cache on disk".into(),
            unit: "ms".into(),
            ours: from_disk(&run, &compiler, &mut fresh)?,
            peer: None,
            aim: Some(Aim::AtMost(1.0)),
        });

        let peers = match peers(device, nvrtc.as_deref(), &gpu.accelerator.info().target) {
            Ok(peers) => peers,
            Err(error) if error.is::<Skip>() => {
                report.note(format!("no peer: {error}"));
                Vec::new()
            }
            Err(error) => return Err(error),
        };
        // The first is what `CudaJITCompiler::new` gives, the second how guests' workers compile. The third has no aim: it is
        // the first kernel of a process.
        let ours = [
            ("assembled in a process that waited", waited, true),
            ("compiled by the driver", Some(driver), true),
            ("assembled in a process started for it", started, false),
        ];
        for (name, ours, aims) in ours.into_iter().filter_map(|(name, ours, aims)| Some((name, ours?, aims)))
        {
            let figure = |peer: Option<(String, _)>, aim| Figure {
                name: format!("IR to running, {name}"),
                unit: "ms".into(),
                ours: ours.clone(),
                peer,
                aim,
            };
            if peers.is_empty() {
                report.figure(figure(None, None));
            }
            for (index, peer) in peers.iter().enumerate() {
                report.figure(figure(
                    Some(peer.clone()),
                    (aims && index == 0).then_some(Aim::RatioAtMost(0.5)),
                ));
            }
        }
        let Run { x, y, worker } = run;
        drop((x, y));
        Ok(worker.stop(TIMEOUT)?)
    })]
}

/// What a kernel is run with.
struct Run {
    x: Buffer<CudaAccelerator>,
    y: Buffer<CudaAccelerator>,
    worker: Worker<CudaAccelerator>,
}

impl Run {
    fn launch(&self, compiler: &CudaJITCompiler, module: &ValidModule) -> anyhow::Result<()> {
        let kernels = compiler.compile_module(module)?;
        let kernel = self.worker.load(named(&kernels, "k")?.artifact())?;
        self.worker.launch(&kernel, 1, &arguments![&self.x, &self.y])?;
        Ok(self.worker.synchronize(TIMEOUT)?)
    }
}

fn from_disk(
    run: &Run,
    compiler: &CudaJITCompiler,
    fresh: &mut dyn FnMut() -> anyhow::Result<ValidModule>,
) -> anyhow::Result<Sample> {
    let folder = std::env::temp_dir().join(format!("gpu-cache-{}", std::process::id()));
    let options = CacheOptions { folder: Some(folder.clone()), memory_bytes: 0, ..CacheOptions::default() };
    let compiler = compiler.clone().cache(Arc::new(Cache::open(&options)?));
    let modules = (0..=TIMES).map(|_| fresh()).collect::<anyhow::Result<Vec<_>>>()?;
    for module in &modules {
        compiler.compile_module(module)?;
    }
    let mut modules = modules.iter();
    let sample = time(TIMES, 1, 1e3, || run.launch(&compiler, modules.next().context("a module")?));
    let statistics = compiler.statistics();
    std::fs::remove_dir_all(&folder)?;
    ensure!(statistics.disk_hits >= TIMES as u64, "{statistics:?}: not all came from the disk");
    sample
}

/// NVRTC to PTX, which the driver compiles; and NVRTC to a cubin.
fn peers(
    device: u32,
    nvrtc: Option<&std::path::Path>,
    architecture: &str,
) -> anyhow::Result<Vec<(String, Sample)>> {
    let nvrtc = Nvrtc::load(nvrtc)?;
    let raw = Raw::open(device)?;
    let (x, y) = (raw.allocate(1024)?, raw.allocate(1024)?);
    let mut number = 0;
    let mut peers = Vec::new();
    for (name, prefix) in [("NVRTC to PTX and load", "compute_"), ("NVRTC to a cubin and load", "sm_")] {
        let architecture = architecture.replace("sm_", prefix);
        let sample = time(TIMES, 1, 1e3, || {
            number += 1;
            let source = format!(
                "extern \"C\" __global__ void k(const float* x, float* y, long long n) {{\n  long long i = \
                 blockIdx.x * (long long)blockDim.x + threadIdx.x;\n  if (i < n) y[i] = x[i] * {number}.5f;\n}}\n"
            );
            let code = nvrtc.compile(&source, &architecture)?;
            let kernel = raw.load(&code, "k")?;
            let (mut x, mut y, mut n) = (x, y, 256i64);
            let mut parameters =
                [(&raw mut x).cast::<c_void>(), (&raw mut y).cast::<c_void>(), (&raw mut n).cast::<c_void>()];
            raw.launch(&kernel, 1, &mut parameters)?;
            raw.synchronize()?;
            raw.unload(kernel)
        })?;
        peers.push((name.to_owned(), sample));
    }
    raw.free(x)?;
    raw.free(y)?;
    Ok(peers)
}
