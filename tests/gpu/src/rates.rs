//! Launches in a second: through the worker, one by one and in batches, by a session without one, and from a guest, against the driver's own
//! `cuLaunchKernel` of the same kernel with the same parameters in the same run.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use vm_accel::sys::BorrowedMemory;
use vm_accel::{
    Argument, Buffer, Kernel, Launch, Limits, MemoryKind, Session, Worker, WorkerOptions, arguments,
};
use vm_cuda::CudaAccelerator;
use vm_ir::{Trust, text, validate};
use vm_passthrough::accelerator::CompiledKernel;

use crate::figures::raw::{Raw, RawKernel};
use crate::gpu::{Gpu, TIMEOUT, named};
use crate::paravirt::{Guest, KERNELS};
use crate::table::{Aim, Figure, Report, Sample};
use crate::{Arguments, Test};

/// Launches in a row, which fill every queue.
const ROW: usize = 8000;
/// Launches of a batch.
const BATCH: usize = 64;
const ROUNDS: usize = 15;
/// Rows before those that count.
const WARM: usize = 3;
/// Of a guest's batch.
const GUEST_BATCH: u64 = 4000;
/// Answers to a guest's batches that are taken together.
const SEVERAL: usize = 4;
/// What of the driver's own rate is aimed at.
const AIM: Aim = Aim::RatioAtLeast(0.95);

/// A guest's kernel that is watched: its loop may be as long as the view.
const WATCHED: &str = "vir 1
kernel @sum(@x: view<i32, [?], read>, @y: view<i32, [?], write>, %addend: i32) at 0x1000 block(64) {
  %thread = thread_id.x : i32
  %t = sext %thread : i64
  %n = extent @x, 0 : i64
  %step = const 64 : i64
  for %i: i64 = %t to %n step %step {
    %a = load @x[%i] : i32
    %b = add %a, %addend : i32
    store @y[%i], %b
  }
}
";

/// The tests of this section.
pub(crate) fn tests(arguments: &Arguments) -> Vec<Test> {
    let device = arguments.device;
    vec![
        Test::new("launches of a guest's kernel on the host", move |gpu, report| {
            let module = validate(text::parse(KERNELS)?, Trust::Guest)?;
            let compiled = gpu.compile(&module)?;
            let add = named(&compiled, "add")?;
            ensure!(!add.artifact().signature().guarded, "@add is watched");
            Rates::new(gpu, device, add, 256)?.measure("", report)
        }),
        Test::new("launches of a watched kernel on the host", move |gpu, report| {
            let module = validate(text::parse(WATCHED)?, Trust::Guest)?;
            let compiled = gpu.compile(&module)?;
            let sum = named(&compiled, "sum")?;
            ensure!(sum.artifact().signature().guarded, "@sum is not watched");
            Rates::new(gpu, device, sum, 64)?.measure(", watched", report)
        }),
        Test::new("launches from a guest", move |gpu, report| guest(gpu, device, report)),
    ]
}

/// A kernel of two views of 64 numbers and an addend, loaded on a worker and by the driver's own calls.
struct Rates {
    worker: Worker<CudaAccelerator>,
    kernel: Kernel<CudaAccelerator>,
    x: Buffer<CudaAccelerator>,
    y: Buffer<CudaAccelerator>,
    own: Own,
    raw: Raw,
    peer: RawKernel,
    /// Its parameters for the driver.
    block: Vec<u64>,
    /// Where in them the addend stands.
    addend: usize,
    threads: u32,
    /// Keeps a stop word that is never set.
    _stop: Buffer<CudaAccelerator>,
}

/// The same kernel and views on a session of this thread's own.
struct Own {
    session: Session<CudaAccelerator>,
    kernel: Kernel<CudaAccelerator>,
    x: Buffer<CudaAccelerator>,
    y: Buffer<CudaAccelerator>,
}

impl Rates {
    fn new(gpu: &Gpu, device: u32, compiled: &CompiledKernel, threads: u32) -> anyhow::Result<Self> {
        let artifact = compiled.artifact();
        let worker = gpu.worker()?;
        let kernel = worker.load(artifact)?;
        let (x, y) = (worker.allocate_zeroed(256)?, worker.allocate_zeroed(256)?);
        let stop = worker.allocate_kind(MemoryKind::Pinned, 256)?;
        worker.fill(&stop, 0)?;
        worker.synchronize(TIMEOUT)?;
        let session = Session::open(Arc::clone(&gpu.accelerator), WorkerOptions::default())?;
        // SAFETY: what is measured ends with a wait each time, and the worker's buffers are there as long as this value.
        #[allow(unsafe_code)]
        let [mine, theirs] =
            [&x, &y].map(|buffer| session.borrow(unsafe { BorrowedMemory::new(buffer.address(), 256) }));
        let own = Own { kernel: session.load(artifact)?, x: mine, y: theirs, session };
        let raw = Raw::open(device)?;
        let peer = raw.load(artifact.image(), artifact.entry())?;
        // Two views of one dimension: address and extent; then the addend.
        let mut block = vec![x.address(), 64, y.address(), 64, 1];
        if let Some(guard) = artifact.params().guard {
            block.resize(artifact.parameter_bytes().div_ceil(8) as usize, 0);
            block[guard.stop as usize / 8] = stop.address();
            block[guard.fuel as usize / 8] = 1 << 40;
        }
        ensure!(
            artifact.parameter_bytes().div_ceil(8) as usize == block.len(),
            "the kernel has {} bytes of parameters",
            artifact.parameter_bytes()
        );
        Ok(Self { worker, kernel, x, y, own, raw, peer, block, addend: 4, threads, _stop: stop })
    }

    fn arguments(&self, addend: i32) -> [Argument<'_, CudaAccelerator>; 3] {
        arguments![&self.x, &self.y, addend]
    }

    fn launch(&self) -> Launch {
        Launch::over(1).within(Limits { fuel: 1 << 40, time: Duration::from_secs(1) })
    }

    fn by_driver(&self) -> anyhow::Result<()> {
        let mut block = self.block.clone();
        for number in 0..ROW {
            block[self.addend] = number as u64;
            let mut parameters = [block.as_mut_ptr().cast::<c_void>()];
            self.raw.launch_blocks(&self.peer, 1, self.threads, &mut parameters)?;
        }
        self.raw.synchronize()
    }

    fn one_by_one(&self) -> anyhow::Result<()> {
        for number in 0..ROW {
            self.worker.launch(&self.kernel, self.launch(), &self.arguments(number as i32))?;
        }
        Ok(self.worker.synchronize(TIMEOUT)?)
    }

    fn by_session(&self) -> anyhow::Result<()> {
        let Own { session, kernel, x, y } = &self.own;
        for number in 0..ROW {
            session.launch(kernel, self.launch(), &arguments![x, y, number as i32])?;
        }
        Ok(session.synchronize(Instant::now() + TIMEOUT)?)
    }

    /// In batches; with `same` all of them are alike.
    fn in_batches(&self, same: bool) -> anyhow::Result<()> {
        for first in (0..ROW).step_by(BATCH) {
            let mut batch = self.worker.batch();
            for number in first..first + BATCH {
                let addend = if same { number - first } else { number };
                batch.launch(&self.kernel, self.launch(), &self.arguments(addend as i32))?;
            }
            self.worker.launch_batch(batch)?;
        }
        Ok(self.worker.synchronize(TIMEOUT)?)
    }

    /// Measures turn by turn, so that what the machine does beside falls on all.
    fn measure(&self, suffix: &str, report: &mut Report) -> anyhow::Result<()> {
        let mut peer = Vec::new();
        let mut ours = [const { Vec::new() }; 4];
        let timed = |values: &mut Vec<f64>, round: usize, f: &dyn Fn() -> anyhow::Result<()>| {
            let begin = Instant::now();
            f()?;
            if round >= WARM {
                values.push(ROW as f64 / begin.elapsed().as_secs_f64() / 1e3);
            }
            anyhow::Ok(())
        };
        for round in 0..WARM + ROUNDS {
            timed(&mut peer, round, &|| self.by_driver())?;
            timed(&mut ours[0], round, &|| self.one_by_one())?;
            timed(&mut ours[1], round, &|| self.in_batches(true))?;
            timed(&mut ours[2], round, &|| self.in_batches(false))?;
            timed(&mut ours[3], round, &|| self.by_session())?;
        }
        let names = [
            "through the worker, one by one",
            "through the worker, batches of 64, alike",
            "through the worker, batches of 64, all arguments new",
            "by a session without a worker",
        ];
        for (name, ours) in names.into_iter().zip(ours) {
            report.figure(Figure {
                name: format!("launches {name}{suffix}"),
                unit: "k/s".into(),
                ours: Sample::of(ours),
                peer: Some(("cuLaunchKernel".into(), Sample::of(peer.clone()))),
                aim: Some(AIM),
            });
        }
        // That all this ran: the last launch's addend stands in the result.
        let mut result = [0i32; 64];
        self.worker.read(&self.y, &mut result)?;
        ensure!(result == [ROW as i32 - 1; 64], "the kernel gave {:?}", &result[..4]);
        Ok(())
    }
}

fn guest(gpu: &Gpu, device: u32, report: &mut Report) -> anyhow::Result<()> {
    let ended =
        Guest::start(gpu, "rates", &format!("accel-bench mib=1 launches={GUEST_BATCH}"), 66)?.end()?;
    ended.passed()?;
    let mut windows = Vec::new();
    while let Ok(picoseconds) = ended.number(&format!("figure batched-launch-{} ", windows.len())) {
        windows.push(picoseconds);
    }
    ensure!(windows.len() >= SEVERAL, "the guest reported {} times", windows.len());
    // The guest sees one answer a little later and the next a little sooner.
    let ours = windows.chunks_exact(SEVERAL).map(|some| 1e9 * SEVERAL as f64 / some.iter().sum::<f64>());
    // The host's own, right after it.
    let module = validate(text::parse(KERNELS)?, Trust::Guest)?;
    let compiled = gpu.compile(&module)?;
    let rates = Rates::new(gpu, device, named(&compiled, "add")?, 256)?;
    let mut peer = Vec::new();
    for round in 0..WARM + ROUNDS {
        let begin = Instant::now();
        rates.by_driver()?;
        if round >= WARM {
            peer.push(ROW as f64 / begin.elapsed().as_secs_f64() / 1e3);
        }
    }
    report.figure(Figure {
        name: "launches from a guest, in batches, all arguments new".into(),
        unit: "k/s".into(),
        ours: Sample::of(ours.collect()),
        peer: Some(("cuLaunchKernel".into(), Sample::of(peer))),
        aim: Some(AIM),
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_watched_kernel_is_watched() {
        let module = validate(text::parse(WATCHED).unwrap(), Trust::Guest).unwrap();
        let compiled = vm_jit::compile(&module, &"ptx:sm_90a".parse().unwrap()).unwrap();
        let params = &compiled.entries[0].params;
        assert!(params.guard.is_some());
        // As `Rates` lays them out: two views of one dimension, the addend, and the guard.
        assert_eq!((params.bytes, params.guard.map(|guard| guard.stop)), (56, Some(40)));
    }
}
