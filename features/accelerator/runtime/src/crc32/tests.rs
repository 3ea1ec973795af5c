//! The kernel against the host's crate, and copies over links that flip bits.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use vm_accel::crc32::{BLOCK_WORDS, EDGES, blocks, powers};
use vm_accel::faulty::{Crossing, Faulty};
use vm_accel::{
    Accelerator, ChecksumStatistics, Direction, Error, MemoryKind, QueueOptions, Worker, WorkerOptions,
};
use vm_ir::interp::{self, Argument, Launch, Limits, Tensor};
use vm_ir::{Module, Trust, validate};

use super::*;
use crate::{CpuAccelerator, CpuJITCompiler, arguments};

/// No wait ends before, however busy the machine is.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Bytes without a pattern.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ len as u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}

fn start<A: Accelerator>(accelerator: Arc<A>, checksum: Checksum) -> Worker<A> {
    let queue = QueueOptions { timeout: TIMEOUT, ..QueueOptions::default() };
    let options = WorkerOptions { queue, checksum: Some(checksum), ..WorkerOptions::default() };
    Worker::start(accelerator, options).expect("a worker starts")
}

fn on_cpu(chunk_bytes: u64) -> (Arc<CpuAccelerator>, Checksum) {
    static CPU: LazyLock<(Arc<CpuAccelerator>, Checksum)> = LazyLock::new(|| {
        let cpu = Arc::new(CpuAccelerator::new().expect("a processor"));
        let checksum = CpuJITCompiler::new(Arc::clone(&cpu)).checksum().expect("it compiles");
        (cpu, checksum)
    });
    let (cpu, checksum) = &*CPU;
    (Arc::clone(cpu), Checksum { chunk_bytes, ..checksum.clone() })
}

#[test]
fn the_interpreter_comes_to_what_the_crate_says() {
    let module = validate(Module::from(kernel().expect("a kernel")), Trust::Trusted).expect("valid");
    let check = |len: usize, before: usize| {
        let bytes = noise(len);
        let head = before.min(len);
        let whole = (len - head) & !3;
        let (first, rest) = bytes.split_at(head);
        let (middle, last) = rest.split_at(whole);
        let count = blocks(whole as u64 / 4);
        let tensor = |element: Scalar, bytes: &[u8]| {
            let extents = vec![bytes.len() as u64 / u64::from(element.bytes())];
            Argument::Tensor(Tensor { element, extents, bytes: bytes.to_vec() })
        };
        let table: Vec<u8> = powers().into_iter().flat_map(u32::to_le_bytes).collect();
        let mut launch = Launch {
            kernel: "crc32".into(),
            grid: [count, 1, 1],
            arguments: vec![
                tensor(Scalar::I32, middle),
                tensor(Scalar::I8, first),
                tensor(Scalar::I8, last),
                tensor(Scalar::I32, &table),
                Argument::Tensor(Tensor::zeros(Scalar::I32, &[u64::from(count + EDGES)])),
            ],
        };
        let limits = Limits { fuel: u64::MAX, ..Limits::default() };
        interp::run(&module, &mut launch, &limits).unwrap_or_else(|error| panic!("{len} {before}: {error}"));
        let sums = launch.arguments[4].tensor().expect("a tensor");
        let sums: Vec<u32> = (0..sums.len()).map(|at| sums.bits(at) as u32).collect();
        let remainder = sums[..count as usize].iter().fold(0, |all, sum| all ^ sum);
        assert_eq!(
            !(remainder ^ !crc32fast::hash(&vec![0; whole])),
            crc32fast::hash(middle),
            "{len} {before}"
        );
        let edges: Vec<u8> = sums[count as usize..].iter().map(|&byte| byte as u8).collect();
        assert_eq!((&edges[..head], &edges[3..3 + last.len()]), (first, last), "{len} {before}");
    };
    let block = BLOCK_WORDS as usize * 4;
    for (len, before) in [(0, 0), (1, 0), (3, 3), (4, 0), (11, 3), (1027, 1), (block, 0), (block + 9, 2)] {
        check(len, before);
    }
    check(2 * block + 4, 0);
}

/// Writes and reads back, and copies by way of pinned memory, at offsets in the device's memory.
fn round_trips(worker: &Worker<CpuAccelerator>, len: usize, offset: u64) {
    let bytes = noise(len);
    let device = worker.allocate(len as u64 + 8).expect("memory");
    let part = device.view(offset, len as u64).expect("a part");
    worker.fill(&device, 0x5a).expect("a fill");
    worker.write(part, &bytes).expect("a write");
    let mut came = vec![0; len];
    worker.read(part, &mut came).expect("a read");
    assert!(came == bytes, "{len} {offset}");
    // What lies around is as it was.
    let mut all = vec![0u8; len + 8];
    worker.read(&device, &mut all).expect("a read");
    let (before, after) = (&all[..offset as usize], &all[offset as usize + len..]);
    assert!(before.iter().chain(after).all(|&byte| byte == 0x5a), "{len} {offset}");

    let pinned = worker.allocate_kind(MemoryKind::Pinned, len as u64 + 8).expect("memory");
    let there = pinned.view(8 - offset, len as u64).expect("a part");
    worker.fill(&pinned, 1).expect("a fill");
    worker.copy(there, part).expect("a copy");
    worker.fill(&device, 2).expect("a fill");
    worker.copy(part, there).expect("a copy");
    worker.read(part, &mut came).expect("a read");
    assert!(came == bytes, "{len} {offset}");
}

#[test]
fn every_length_and_alignment_arrives() {
    let (cpu, checksum) = on_cpu(4096);
    let worker = start(cpu, checksum.clone());
    for len in 0..=70 {
        (0..4).for_each(|offset| round_trips(&worker, len, offset));
    }
    for len in [4095, 4096, 4097, 8191, 8192, 8193, 100_003] {
        (0..4).for_each(|offset| round_trips(&worker, len, offset));
    }
    let checks = worker.checksum_statistics();
    assert!(checks.chunks > 1000, "{checks:?}");
    assert_eq!(checks, ChecksumStatistics { chunks: checks.chunks, ..ChecksumStatistics::default() });
    worker.stop(TIMEOUT).expect("it stops");

    // Blocks of the kernel and chunks of all sizes; those beyond what there can be are as large as they can be.
    for chunk_bytes in [0, 1, 5, 16 << 10, 4 << 20, u64::MAX] {
        let (cpu, checksum) = on_cpu(chunk_bytes);
        let worker = start(cpu, checksum);
        for len in [0, 1, 17, 300] {
            round_trips(&worker, len, 1);
        }
        if chunk_bytes > 5 {
            for len in [(16 << 10) - 1, (16 << 10) + 1, (48 << 10) + 5, (9 << 20) + 3] {
                round_trips(&worker, len, 3);
            }
        }
        assert_eq!(worker.checksum_statistics().corrupted, 0, "{chunk_bytes}");
        worker.stop(TIMEOUT).expect("it stops");
    }
}

const CHUNK: u64 = 8192;
const LEN: usize = 5 * CHUNK as usize + 77;

/// A copy that is corrupted: what it is, what is flipped, and what comes of it.
struct Case {
    name: &'static str,
    /// By way of pinned memory instead of the caller's.
    pinned: bool,
    direction: Direction,
    flip: fn(Crossing) -> Option<u64>,
    /// How often it is flipped.
    times: u64,
    /// Chunks that were corrupted, sent again and given up.
    counts: [u64; 3],
    /// Where the copy failed.
    failed: Option<(u64, u64)>,
}

fn data(crossing: &Crossing) -> bool {
    // The table's is larger, and the sums' smaller than any chunk but the last.
    crossing.bytes == CHUNK || crossing.bytes == 77
}

#[test]
fn what_is_corrupted_is_sent_again_or_given_up() {
    use Direction::{DeviceToHost, HostToDevice};
    let check = |case: &Case| {
        let (cpu, checksum) = on_cpu(CHUNK);
        let armed = Arc::new(AtomicU64::new(0));
        let (left, direction, flip) = (Arc::clone(&armed), case.direction, case.flip);
        let faulty = Faulty::new(cpu, move |crossing| {
            let bit = flip(crossing).filter(|_| crossing.direction == direction)?;
            let one = |left: u64| left.checked_sub(1);
            left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one).ok().map(|_| bit)
        });
        let worker = start(Arc::new(faulty), Checksum { retries: 3, ..checksum });
        let bytes = noise(LEN);
        let device = worker.allocate(LEN as u64).expect("memory");
        let pinned = worker.allocate_kind(MemoryKind::Pinned, LEN as u64).expect("memory");
        let before = worker.checksum_statistics();
        let mut came = vec![0; LEN];
        let write = |came: &mut [u8]| match (case.pinned, case.direction) {
            (false, HostToDevice) => worker.write(&device, &bytes),
            (false, DeviceToHost) => worker.read(&device, came),
            (true, HostToDevice) => worker.copy(&device, &pinned).and_then(|()| worker.synchronize(TIMEOUT)),
            (true, DeviceToHost) => worker
                .copy(&pinned, &device)
                .and_then(|()| worker.synchronize(TIMEOUT))
                .and_then(|()| worker.read(&pinned, came)),
        };
        worker.write(&device, &bytes).expect("a write");
        worker.write(&pinned, &bytes).expect("a write");
        let written = worker.checksum_statistics();
        assert_eq!(
            (written.corrupted, written.chunks - before.chunks),
            (before.corrupted, 6),
            "{}",
            case.name
        );
        armed.store(case.times, Ordering::Relaxed);
        let outcome = write(&mut came);
        armed.store(0, Ordering::Relaxed);
        let after = worker.checksum_statistics();
        let counts = [after.corrupted, after.resent, after.given_up];
        assert_eq!(counts, case.counts, "{}: {outcome:?}", case.name);
        match (case.failed, outcome) {
            (None, Ok(())) => {
                assert_eq!(after.chunks - written.chunks, 6, "{}", case.name);
                if case.direction == HostToDevice {
                    worker.read(&device, &mut came).expect("a read");
                }
                assert!(came == bytes, "{}", case.name);
            }
            (Some(at), Err(Error::Corrupted { direction, offset, bytes, attempts, sent, received })) => {
                assert_eq!(((offset, bytes), direction, attempts), (at, case.direction, 4), "{}", case.name);
                assert_ne!(sent, received);
            }
            (_, outcome) => panic!("{}: {outcome:?}", case.name),
        }
        // It goes on, whatever was given up.
        worker.write(&device, &bytes).expect("a write");
        worker.read(&device, &mut came).expect("a read");
        assert!(came == bytes, "{}", case.name);
        assert_eq!(worker.checksum_statistics().corrupted, after.corrupted, "{}", case.name);
        drop((device, pinned));
        worker.stop(TIMEOUT).expect("it stops");
    };
    let of = |name, flip: fn(Crossing) -> Option<u64>, times, counts, failed| {
        for pinned in [false, true] {
            for direction in [HostToDevice, DeviceToHost] {
                check(&Case { name, pinned, direction, flip, times, counts, failed });
            }
        }
    };
    of("no fault", |_| None, 9, [0, 0, 0], None);
    of("the first bit, once", |c| data(&c).then_some(0), 1, [1, 1, 0], None);
    of("a bit in the middle, three times", |c| data(&c).then_some(c.bytes * 4 + 5), 3, [3, 3, 0], None);
    of("the last bit of the tail, once", |c| (c.bytes == 77).then_some(c.bytes * 8 - 1), 1, [1, 1, 0], None);
    let tail = Some((5 * CHUNK, 77));
    of("the tail only, for ever", |c| (c.bytes == 77).then_some(c.bytes * 8 - 1), u64::MAX, [4, 3, 1], tail);
    // What else is under way then is not settled.
    let check_first = |pinned, direction| {
        let flip: fn(Crossing) -> Option<u64> = |c| data(&c).then_some(c.bytes);
        let failed = Some((0, CHUNK));
        check(&Case {
            name: "for ever",
            pinned,
            direction,
            flip,
            times: u64::MAX,
            counts: [4, 3, 1],
            failed,
        });
    };
    for pinned in [false, true] {
        check_first(pinned, HostToDevice);
        check_first(pinned, DeviceToHost);
    }
    // Where the sums themselves are corrupted, what they are of is sent again.
    let sums: fn(Crossing) -> Option<u64> = |c| (!data(&c)).then_some(3);
    let case = |pinned| Case {
        name: "the sums",
        pinned,
        direction: DeviceToHost,
        flip: sums,
        times: 2,
        counts: [2, 2, 0],
        failed: None,
    };
    check(&case(false));
    check(&case(true));
}

#[test]
fn a_bad_link_is_told_of_when_the_worker_starts() {
    let check = |flip: fn(Crossing) -> Option<u64>, want: Option<Direction>| {
        let (cpu, checksum) = on_cpu(CHUNK);
        let options = WorkerOptions { checksum: Some(checksum), ..WorkerOptions::default() };
        let worker = Worker::start(Arc::new(Faulty::new(cpu, flip)), options);
        match (worker, want) {
            (Ok(worker), None) => worker.stop(TIMEOUT).expect("it stops"),
            (Err(Error::Corrupted { direction, .. }), want) => assert_eq!(Some(direction), want),
            (worker, want) => panic!("{:?}, not {want:?}", worker.err()),
        }
    };
    check(|_| None, None);
    // A table that came wrong says so itself.
    check(|c| (c.number == 0).then_some(77), None);
    check(|c| (c.direction == Direction::HostToDevice).then_some(77), Some(Direction::HostToDevice));
}

/// What has come of the table sums the rest of it only where older memory happens to hold the same.
#[test]
fn the_table_goes_in_one_chunk_whatever_their_size() {
    for chunk_bytes in [0, 5, 2047, 2048, CHUNK] {
        let (cpu, checksum) = on_cpu(chunk_bytes);
        let first = Arc::new(AtomicU64::new(0));
        let seen = Arc::clone(&first);
        let faulty = Faulty::new(cpu, move |crossing| {
            if crossing.number == 0 {
                seen.store(crossing.bytes, Ordering::Relaxed);
            }
            None
        });
        start(Arc::new(faulty), checksum).stop(TIMEOUT).expect("it stops");
        assert_eq!(first.load(Ordering::Relaxed), 4 * powers().len() as u64, "{chunk_bytes}");
    }
}

#[test]
fn what_can_not_be_checked_is_refused() {
    let (cpu, checksum) = on_cpu(CHUNK);
    let other = IRBlock::new(GuestAddr(0));
    other.builder().name("other").block_size([32, 1, 1]);
    let compiler = &mut CpuJITCompiler::new(Arc::clone(&cpu));
    let kernel = compiler.compile(&other).expect("it compiles").artifact().clone();
    let options = WorkerOptions { checksum: Some(Checksum::new(kernel)), ..WorkerOptions::default() };
    let refused = Worker::start(Arc::clone(&cpu), options).err();
    assert!(matches!(refused, Some(Error::Load { .. })), "{refused:?}");

    let worker = start(cpu, checksum);
    let (device, pinned) =
        (worker.allocate(64).expect("memory"), worker.allocate_kind(MemoryKind::Pinned, 64).expect("memory"));
    let captured = worker.capture(|session| {
        let refused = session.copy(&device, &pinned);
        assert!(matches!(refused, Err(Error::Capturing { .. })), "{refused:?}");
        // What does not leave the device is no such copy.
        session.copy(device.view(0, 8)?, device.view(8, 8)?)
    });
    drop(captured.expect("a graph"));
    let refused = worker.write(&device, &[0u8; 63]);
    assert!(matches!(refused, Err(Error::Lengths { .. })), "{refused:?}");
    // A kernel that writes the source ends before it is summed.
    let twice = IRBlock::new(GuestAddr(0));
    let k = twice.builder();
    k.name("count").block_size([64, 1, 1]);
    let bytes = k.view("bytes", Scalar::I8, 1, Access::Write);
    let at = k.global_id(Axis::X);
    bytes.at([at]).store(at.to(Scalar::I8));
    let count = worker.load(compiler.compile(&twice).expect("it compiles").artifact()).expect("loaded");
    for _ in 0..20 {
        worker.launch(&count, 1, &arguments![&pinned]).expect("a launch");
        worker.copy(&device, &pinned).expect("a copy");
        let mut came = [0u8; 64];
        worker.read(&device, &mut came).expect("a read");
        assert_eq!(came, std::array::from_fn(|at| at as u8));
        worker.fill(&pinned, 0).expect("a fill");
    }
    drop((device, pinned, count));
    worker.stop(TIMEOUT).expect("it stops");
}
