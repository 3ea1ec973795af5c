//! Copies that are checked at both ends: on the device itself, over links that flip bits, and beside plain copies.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use vm_accel::crc32::{BYTES, blocks, powers, sums};
use vm_accel::faulty::{Crossing, Faulty};
use vm_accel::{Accelerator, Checksum, Direction, Error, MemoryKind, Worker, WorkerOptions, arguments};
use vm_cuda::CudaAccelerator;
use vm_ir::Trust;

use crate::gpu::{Gpu, TIMEOUT};
use crate::table::{Aim, Figure, Report, Sample};
use crate::{Arguments, Test};

/// The tests of this section.
pub(crate) fn tests(_: &Arguments) -> Vec<Test> {
    vec![
        Test::new("every length and alignment arrives", arrives),
        Test::new("what is corrupted is sent again", sent_again),
        Test::new("what stays corrupted is given up", |gpu, _| given_up(gpu)),
        Test::new("how fast the device sums", summed),
        Test::new("what checks cost", costs),
    ]
}

fn checksum(gpu: &Gpu) -> anyhow::Result<Checksum> {
    Ok(gpu.compiler(Trust::Guest).checksum()?)
}

fn start<A: Accelerator>(accelerator: Arc<A>, checksum: Option<Checksum>) -> vm_accel::Result<Worker<A>> {
    Worker::start(accelerator, WorkerOptions { checksum, ..WorkerOptions::default() })
}

/// Bytes without a pattern.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ len as u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}

fn arrives(gpu: &Gpu, report: &mut Report) -> anyhow::Result<()> {
    let checksum = Checksum { chunk_bytes: 20_000, ..checksum(gpu)? };
    let worker = start(Arc::clone(&gpu.accelerator), Some(checksum))?;
    let few = (0..=70).chain([4095, 4096, 4097, 16_383, 16_385, 19_999, 20_000, 20_001, 100_003]);
    for len in few.chain([9_000_003]) {
        for offset in 0..4 {
            let bytes = noise(len);
            let device = worker.allocate(len as u64 + 8)?;
            let pinned = worker.allocate_kind(MemoryKind::Pinned, len as u64 + 8)?;
            let (there, here) = (device.view(offset, len as u64)?, pinned.view(7 - offset, len as u64)?);
            worker.write(there, &bytes)?;
            worker.copy(here, there)?;
            worker.fill(&device, 0)?;
            worker.copy(there, here)?;
            let mut came = vec![0; len];
            worker.read(there, &mut came)?;
            ensure!(came == bytes, "{len} bytes at {offset} came otherwise than they were sent");
        }
    }
    let checks = worker.checksum_statistics();
    report.note(format!("{} chunks, {} corrupted", checks.chunks, checks.corrupted));
    ensure!(checks.corrupted == 0 && checks.chunks > 1000, "{checks:?}");
    Ok(worker.stop(TIMEOUT)?)
}

/// The device behind a link that flips a bit of about one in `one_in` of the copies that `is_meant`; of all of those with 1.
fn behind(
    gpu: &Gpu,
    one_in: u64,
    is_meant: fn(Crossing) -> bool,
) -> (Arc<Faulty<CudaAccelerator>>, Arc<AtomicU64>) {
    let flipped = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&flipped);
    let faulty = Faulty::new(Arc::clone(&gpu.accelerator), move |crossing| {
        let random = crossing.number.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        let flips = is_meant(crossing) && random.is_multiple_of(one_in);
        flips.then(|| {
            count.fetch_add(1, Ordering::Relaxed);
            (random >> 7) % (crossing.bytes * 8)
        })
    });
    (Arc::new(faulty), flipped)
}

fn sent_again(gpu: &Gpu, report: &mut Report) -> anyhow::Result<()> {
    let checksum = Checksum { chunk_bytes: 64 << 10, retries: 50, ..checksum(gpu)? };
    let (faulty, flipped) = behind(gpu, 5, |_| true);
    let worker = start(faulty, Some(checksum))?;
    let bytes = noise((8 << 20) + 77);
    let mut came = vec![0; bytes.len()];
    let device = worker.allocate(bytes.len() as u64)?;
    let pinned = worker.allocate_kind(MemoryKind::Pinned, bytes.len() as u64)?;
    for _ in 0..3 {
        worker.write(&device, &bytes)?;
        worker.copy(&pinned, &device)?;
        worker.fill(&device, 0)?;
        worker.copy(&device, &pinned)?;
        came.fill(0);
        worker.read(&device, &mut came)?;
        ensure!(came == bytes, "what was sent again came otherwise than it was sent");
    }
    let checks = worker.checksum_statistics();
    let flipped = flipped.load(Ordering::Relaxed);
    report.note(format!(
        "{flipped} bits flipped; of {} chunks {} arrived corrupted, all of them sent again",
        checks.chunks, checks.corrupted
    ));
    ensure!(checks.corrupted == checks.resent && checks.given_up == 0, "{checks:?}");
    // Two bits may have flipped in one chunk and its sums.
    ensure!(checks.corrupted > 300 && checks.corrupted <= flipped, "{checks:?}, and {flipped} bits flipped");
    drop((device, pinned));
    Ok(worker.stop(TIMEOUT)?)
}

fn given_up(gpu: &Gpu) -> anyhow::Result<()> {
    const TAIL: u64 = 77;
    let to: fn(Crossing) -> bool = |c| c.bytes == TAIL && c.direction == Direction::HostToDevice;
    let from: fn(Crossing) -> bool = |c| c.bytes == TAIL && c.direction == Direction::DeviceToHost;
    for (direction, is_meant) in [(Direction::HostToDevice, to), (Direction::DeviceToHost, from)] {
        let chunk = 64 << 10;
        let checksum = Checksum { chunk_bytes: chunk, retries: 3, ..checksum(gpu)? };
        let (faulty, _) = behind(gpu, 1, is_meant);
        let worker = start(faulty, Some(checksum))?;
        let bytes = noise((3 * chunk + TAIL) as usize);
        let device = worker.allocate(bytes.len() as u64)?;
        let written = worker.write(&device, &bytes);
        let outcome = match direction {
            Direction::HostToDevice => written,
            Direction::DeviceToHost => {
                written.and_then(|()| worker.read(&device, &mut vec![0_u8; bytes.len()]))
            }
        };
        let Err(Error::Corrupted { direction: way, offset, attempts, .. }) = outcome else {
            anyhow::bail!("a copy {direction} whose tail is never right ended with {outcome:?}");
        };
        ensure!((way, offset, attempts) == (direction, 3 * chunk, 4), "{way}, {offset}, {attempts}");
        let checks = worker.checksum_statistics();
        ensure!((checks.corrupted, checks.resent, checks.given_up) == (4, 3, 1), "{checks:?}");
        // It goes on.
        let part = device.view(0, chunk)?;
        let mut came = vec![0; chunk as usize];
        worker.write(part, &bytes[..chunk as usize])?;
        worker.read(part, &mut came)?;
        ensure!(came == bytes[..chunk as usize], "after a copy that was given up, bytes came otherwise");
        drop(device);
        worker.stop(TIMEOUT)?;
    }
    Ok(())
}

fn summed(gpu: &Gpu, report: &mut Report) -> anyhow::Result<()> {
    const LAUNCHES: u64 = 64;
    let worker = gpu.worker()?;
    let kernel = worker.load(&checksum(gpu)?.kernel)?;
    let grid = blocks(BYTES / 4);
    let data = worker.allocate(BYTES * 4)?;
    let table = worker.allocate(4 * powers().len() as u64)?;
    let out = worker.allocate(4 * sums(grid))?;
    worker.fill(&data, 0x35)?;
    worker.write(&table, &powers())?;
    let edge = table.view(0, 0)?;
    let mut rates = Vec::new();
    for round in 0..25 {
        worker.synchronize(TIMEOUT)?;
        let taken = worker.submit_and_wait(Instant::now() + TIMEOUT, |session| {
            session.timed(Instant::now() + TIMEOUT, |session| {
                (0..LAUNCHES).try_for_each(|index| {
                    let words = data.view(index % 4 * BYTES, BYTES)?;
                    session.launch(&kernel, grid, &arguments![words, edge, edge, &table, &out])
                })
            })
        })?;
        if round >= 5 {
            rates.push((LAUNCHES * BYTES) as f64 / taken.as_secs_f64() / 1e9);
        }
    }
    report.figure(Figure {
        name: "CRC-32 of 4 MiB by the device".into(),
        unit: "GB/s".into(),
        ours: Sample::of(rates),
        peer: None,
        aim: None,
    });
    Ok(worker.stop(TIMEOUT)?)
}

/// GB/s of `copy` of as many bytes.
fn rate(bytes: u64, mut copy: impl FnMut() -> vm_accel::Result<()>) -> anyhow::Result<Sample> {
    let mut rates = Vec::new();
    let begin = Instant::now();
    for round in 0..43 {
        let start = Instant::now();
        copy()?;
        if round >= 3 {
            rates.push(bytes as f64 / start.elapsed().as_secs_f64() / 1e9);
        }
        if rates.len() >= 9 && begin.elapsed() > Duration::from_secs(5) {
            break;
        }
    }
    Ok(Sample::of(rates))
}

fn costs(gpu: &Gpu, report: &mut Report) -> anyhow::Result<()> {
    let plain = start(Arc::clone(&gpu.accelerator), None)?;
    let checked = start(Arc::clone(&gpu.accelerator), Some(checksum(gpu)?))?;
    for (bytes, size) in [(1 << 20, "1 MiB"), (64 << 20, "64 MiB"), (1 << 30, "1 GiB")] {
        let mut host = noise(bytes as usize);
        let mut samples = Vec::new();
        for worker in [&plain, &checked] {
            let device = worker.allocate(bytes)?;
            let pinned = worker.allocate_kind(MemoryKind::Pinned, bytes)?;
            worker.write(&pinned, &host)?;
            worker.synchronize(TIMEOUT)?;
            let wait = || worker.synchronize(TIMEOUT);
            samples.push([
                rate(bytes, || worker.write(&device, &host).and_then(|()| wait()))?,
                rate(bytes, || worker.read(&device, &mut host))?,
                rate(bytes, || worker.copy(&device, &pinned).and_then(|()| wait()))?,
                rate(bytes, || worker.copy(&pinned, &device).and_then(|()| wait()))?,
            ]);
            drop((device, pinned));
            worker.trim()?;
        }
        let checked = samples.pop().context("two samples")?;
        let plain = samples.pop().context("two samples")?;
        let names = ["to the device", "from the device", "to the device, pinned", "from the device, pinned"];
        for ((name, ours), peer) in names.into_iter().zip(checked).zip(plain) {
            report.figure(Figure {
                name: format!("checked copy of {size} {name}"),
                unit: "GB/s".into(),
                ours,
                peer: Some(("plain".into(), peer)),
                // The check takes no longer than the copy.
                aim: (bytes > 1 << 20).then_some(Aim::RatioAtLeast(0.5)),
            });
        }
    }
    let checks = checked.checksum_statistics();
    report.note(format!("{} chunks, {} corrupted", checks.chunks, checks.corrupted));
    plain.stop(TIMEOUT)?;
    Ok(checked.stop(TIMEOUT)?)
}
