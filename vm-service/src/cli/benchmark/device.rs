//! An accelerator, measured.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_accel::{Buffer, Session};
use vm_passthrough::accelerator::{
    Accelerator, Error, JitCompiler, JitTarget, MemoryKind, QueueOptions, Worker, WorkerOptions, arguments,
};

use super::{Measured, SMALL, compute, spread};
use crate::api::{
    BenchmarkChecks, BenchmarkDirection, BenchmarkLatency, BenchmarkMemory, BenchmarkSpread,
    BenchmarkTransfer,
};
use crate::cli::kernel::vouch;
use crate::failure::Failure;

/// How long the device may take for anything.
const TIMEOUT: Duration = Duration::from_secs(30);
/// How long each thing is measured, once it was often enough.
const EACH: Duration = Duration::from_millis(300);
/// How often at least, and at most.
const COUNTS: (usize, usize) = (7, 400);
/// How long a launch of arithmetic should take.
const LAUNCH: Duration = Duration::from_millis(20);
/// Blocks of arithmetic for each of the device's units.
const BLOCKS: u64 = 32;

/// Measures an accelerator, and tells of each step before it is made. `sizes` of copies that are more than a quarter of what is free
/// are left out.
///
/// # Errors
/// Whatever the compiler or the accelerator fails with, as where a checked copy stays corrupted.
pub(crate) fn measure<A: JitTarget>(
    accelerator: A,
    adjust: impl FnOnce(JitCompiler<A>) -> JitCompiler<A>,
    sizes: &[u64],
    checked: bool,
    step: &dyn Fn(&str),
) -> Result<Measured, Failure> {
    step("compiling");
    let accelerator = Arc::new(accelerator);
    let compiler = vouch::own(adjust(JitCompiler::new(Arc::clone(&accelerator))));
    let start = |checksum| {
        let options = WorkerOptions {
            name: "benchmark".into(),
            queue: QueueOptions { timeout: TIMEOUT, ..QueueOptions::default() },
            checksum,
            ..WorkerOptions::default()
        };
        Worker::<A>::start(Arc::clone(&accelerator), options).map_err(Failure::failed)
    };
    let plain = start(None)?;
    let checksum = checked.then(|| compiler.checksum()).transpose().map_err(Failure::failed)?;
    let checker = checksum.map(|checksum| start(Some(checksum))).transpose()?;

    let mut measured = Measured { device: accelerator.info().name.clone(), ..Measured::default() };
    let free = plain.memory().map_err(Failure::failed)?.free;
    for &bytes in sizes {
        if bytes > free / 4 {
            tracing::info!("copies of {bytes} bytes are left out: {free} bytes are free on the device");
            (0..4 * if checked { 2 } else { 1 }).for_each(|_| step("left out"));
            continue;
        }
        let mut transfers = copies(&plain, bytes, "copying", step)?;
        if let Some(checker) = &checker {
            for (transfer, checked) in
                transfers.iter_mut().zip(copies(checker, bytes, "checked copying", step)?)
            {
                // Of times: the reciprocal of the ratio of rates.
                transfer.checked_time_ratio = Some(transfer.rate.median / checked.rate.median);
                transfer.checked = Some(checked.rate);
            }
        }
        measured.transfers.extend(transfers);
    }
    measured.latencies = latencies(&plain, step).map_err(Failure::failed)?;
    step("arithmetic");
    measured.f32_flops = Some(arithmetic(&plain, &compiler)?);
    step("memory");
    let most = sizes.iter().copied().filter(|bytes| *bytes <= free / 4).max().unwrap_or(1 << 20);
    measured.memory = Some(memory(&plain, &compiler, most)?);
    if let Some(checker) = checker {
        let checks = checker.checksum_statistics();
        measured.checks = Some(BenchmarkChecks {
            chunks: checks.chunks,
            corrupted: checks.corrupted,
            resent: checks.resent,
        });
        checker.stop(TIMEOUT).map_err(Failure::failed)?;
    }
    plain.stop(TIMEOUT).map_err(Failure::failed)?;
    Ok(measured)
}

/// Copies of one size, both ways and of memory of both kinds.
fn copies<A: Accelerator>(
    worker: &Worker<A>,
    bytes: u64,
    what: &str,
    step: &dyn Fn(&str),
) -> Result<Vec<BenchmarkTransfer>, Failure> {
    use BenchmarkDirection::{FromDevice, ToDevice};
    use BenchmarkMemory::{Pageable, Pinned};
    let one = |memory, direction, copy: &mut dyn FnMut() -> Result<(), Error>| {
        step(&format!("{what} {} MiB", bytes >> 20));
        let seconds = often(copy).map_err(Failure::failed)?;
        let rates = seconds.into_iter().map(|seconds| bytes as f64 / seconds).collect();
        Ok::<_, Failure>(BenchmarkTransfer {
            memory,
            direction,
            bytes,
            rate: spread(rates),
            percent_of_link: None,
            checked: None,
            checked_time_ratio: None,
        })
    };
    let device = worker.allocate(bytes).map_err(Failure::failed)?;
    let pinned = worker.allocate_kind(MemoryKind::Pinned, bytes).map_err(Failure::failed)?;
    // Bytes of all values, so that nothing on the way finds them easy.
    let mut pageable: Vec<u8> = (0..bytes).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect();
    worker.write(&pinned, &pageable).map_err(Failure::failed)?;
    let all = vec![
        one(Pinned, ToDevice, &mut || copied(worker, &device, &pinned))?,
        one(Pinned, FromDevice, &mut || copied(worker, &pinned, &device))?,
        one(Pageable, ToDevice, &mut || {
            worker.write(&device, &pageable)?;
            worker.synchronize(TIMEOUT)
        })?,
        one(Pageable, FromDevice, &mut || worker.read(&device, &mut pageable))?,
    ];
    drop((device, pinned));
    // The next size needs room.
    worker.trim().map_err(Failure::failed)?;
    Ok(all)
}

fn copied<A: Accelerator>(worker: &Worker<A>, target: &Buffer<A>, source: &Buffer<A>) -> Result<(), Error> {
    worker.copy(target, source)?;
    worker.synchronize(TIMEOUT)
}

fn latencies<A: Accelerator>(
    worker: &Worker<A>,
    step: &dyn Fn(&str),
) -> Result<Vec<BenchmarkLatency>, Error> {
    let device = worker.allocate(SMALL)?;
    let pinned = worker.allocate_kind(MemoryKind::Pinned, SMALL)?;
    worker.fill(&device, 0)?;
    worker.fill(&pinned, 0)?;
    let ways = [
        (BenchmarkDirection::ToDevice, &device, &pinned),
        (BenchmarkDirection::FromDevice, &pinned, &device),
    ];
    ways.into_iter()
        .map(|(direction, target, source)| {
            step("latency");
            let seconds = often(&mut || copied(worker, target, source))?;
            Ok(BenchmarkLatency { direction, bytes: SMALL, seconds: spread(seconds) })
        })
        .collect()
}

/// Operations in a second.
fn arithmetic<A: JitTarget>(
    worker: &Worker<A>,
    compiler: &JitCompiler<A>,
) -> Result<BenchmarkSpread, Failure> {
    let kernel = compute::arithmetic().map_err(Failure::failed)?;
    let compiled = compiler.compile_kernel(kernel).map_err(Failure::failed)?;
    let run = || -> Result<BenchmarkSpread, Error> {
        let kernel = worker.load(compiled.artifact())?;
        let grid = BLOCKS.saturating_mul(worker.accelerator().info().compute_units.into()).clamp(1, 65_535);
        let items = grid * compute::ITEMS;
        let out = worker.allocate(4 * items)?;
        let launch = |rounds: i32| {
            let launch =
                |session: &Session<A>| session.launch(&kernel, grid as u32, &arguments![&out, rounds]);
            timed(worker, launch).map(|time| time.as_secs_f64())
        };
        // As many rounds as take long enough to be timed, and not so long that nobody could stop it.
        let mut rounds = 1;
        while launch(rounds)? < LAUNCH.as_secs_f64() && rounds < 1 << 24 {
            rounds *= 2;
        }
        let operations = (items * compute::ROUND) as f64 * f64::from(rounds);
        let seconds = repeat(|| launch(rounds))?;
        Ok(spread(seconds.into_iter().map(|seconds| operations / seconds).collect()))
    };
    run().map_err(Failure::failed)
}

/// Bytes that are read and written in a second.
fn memory<A: JitTarget>(
    worker: &Worker<A>,
    compiler: &JitCompiler<A>,
    bytes: u64,
) -> Result<BenchmarkSpread, Failure> {
    let kernel = compute::copy().map_err(Failure::failed)?;
    let compiled = compiler.compile_kernel(kernel).map_err(Failure::failed)?;
    let run = || -> Result<BenchmarkSpread, Error> {
        let kernel = worker.load(compiled.artifact())?;
        let (from, to) = (worker.allocate_zeroed(bytes)?, worker.allocate(bytes)?);
        let grid = bytes.div_ceil(4 * compute::LANES * compute::ITEMS) as u32;
        let launch = |session: &Session<A>| session.launch(&kernel, grid, &arguments![&from, &to]);
        timed(worker, launch)?;
        let seconds = repeat(|| timed(worker, launch).map(|time| time.as_secs_f64()))?;
        Ok(spread(seconds.into_iter().map(|seconds| 2.0 * bytes as f64 / seconds).collect()))
    };
    run().map_err(Failure::failed)
}

/// The device's time for what `f` gives it.
fn timed<A: Accelerator>(
    worker: &Worker<A>,
    f: impl Fn(&Session<A>) -> Result<(), Error> + Send + Sync,
) -> Result<Duration, Error> {
    let deadline = Instant::now() + TIMEOUT;
    worker.submit_and_wait(deadline, |session| session.timed(deadline, &f))
}

/// The host's seconds for each of several copies, after one that is not counted.
fn often(copy: &mut dyn FnMut() -> Result<(), Error>) -> Result<Vec<f64>, Error> {
    copy()?;
    repeat(|| {
        let start = Instant::now();
        copy()?;
        Ok(start.elapsed().as_secs_f64())
    })
}

fn repeat(mut one: impl FnMut() -> Result<f64, Error>) -> Result<Vec<f64>, Error> {
    let (start, mut seconds) = (Instant::now(), Vec::new());
    while seconds.len() < COUNTS.0 || start.elapsed() < EACH && seconds.len() < COUNTS.1 {
        seconds.push(one()?);
    }
    Ok(seconds)
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use std::cell::Cell;

    use vm_passthrough::CpuAccelerator;

    use super::*;

    #[test]
    fn a_processor_is_measured() {
        let check = |sizes: &[u64], checked: bool, transfers: usize| {
            let told = Cell::new(0);
            let step = |_: &str| told.set(told.get() + 1);
            let cpu = CpuAccelerator::new().expect("a processor");
            let measured = measure(cpu, |compiler| compiler, sizes, checked, &step).expect("it is measured");
            assert_eq!(measured.transfers.len(), transfers);
            assert_eq!(told.get(), super::super::steps(checked, sizes.len()));
            let is_sound = |spread: &BenchmarkSpread| {
                spread.count >= COUNTS.0
                    && spread.low > 0.0
                    && spread.low <= spread.median
                    && spread.median <= spread.high
            };
            for transfer in &measured.transfers {
                assert!(is_sound(&transfer.rate), "{transfer:?}");
                assert_eq!(transfer.checked.as_ref().map(is_sound), checked.then_some(true), "{transfer:?}");
                assert_eq!(
                    transfer.checked_time_ratio.is_some_and(|ratio| ratio > 0.0),
                    checked,
                    "{transfer:?}"
                );
            }
            assert!(measured.latencies.iter().all(|latency| is_sound(&latency.seconds)));
            assert!(
                measured.f32_flops.as_ref().is_some_and(is_sound)
                    && measured.memory.as_ref().is_some_and(is_sound)
            );
            let checks = measured.checks;
            assert_eq!(
                checks.as_ref().map(|checks| (checks.corrupted, checks.chunks > 0)),
                checked.then_some((0, true))
            );
        };
        check(&[1 << 20], true, 4);
        check(&[4096, 1 << 62], false, 4);
    }
}
