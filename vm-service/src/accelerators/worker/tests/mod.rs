//! Batches on the simulated accelerator, whose kernels are known by their names.

#[cfg(feature = "cpu")]
mod guest;
#[cfg(feature = "npu")]
mod hexagon;
mod models;
mod panics;
#[cfg(all(feature = "rocm", feature = "cpu"))]
mod rocm;
mod stream;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use proptest::prelude::Rng as _;
use vm_accel::fake::FakeAccelerator;
use vm_accel::{Accelerator, Artifact, Limits, PoolOptions, Worker, WorkerOptions};
use vm_ir::ValidModule;
use vm_memory::{Bytes as _, GuestAddress};
use vm_paravirt::{
    Argument, BatchWriter, Info, LogReader, MAX_REPLY_BYTES, NoRoom, Range, Reply, Span, Status,
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::accelerators::worker::backend;
use crate::accelerators::worker::log::Log;
use crate::accelerators::worker::queue::Ring;
use crate::accelerators::worker::ram::Ram;
use crate::accelerators::worker::server::{Compile, Compiler, Executed, Quotas, Server, most};
use crate::accelerators::worker::session::{Guest, serve};
use crate::accelerators::worker::usage::Usage;
use crate::accelerators::worker::watch::Watch;
use crate::accelerators::{Meter, Open, Start};
use crate::os::sandbox::Measure;

const RAM: u64 = 64 << 10;
const QUOTA: u64 = 1 << 20;

/// Compiles a kernel to the program of its name.
struct ByName;

impl Compile for ByName {
    fn target(&self) -> &str {
        "fake"
    }

    fn compile(&self, module: &ValidModule) -> Result<Vec<Artifact>, String> {
        let kernels = module.kernels().iter();
        kernels
            .map(|kernel| {
                let program = kernel.name().parse().map_err(|_| "no such program".to_owned())?;
                Ok(FakeAccelerator::artifact(program))
            })
            .collect()
    }
}

struct Bench<A: Accelerator = FakeAccelerator> {
    server: Server<A>,
    device: Arc<A>,
    ram: File,
}

/// What a worker of these tests is sent first.
fn orders(port: Option<u32>) -> Open {
    Open {
        guest: "test".into(),
        device: "fake".into(),
        memory: QUOTA,
        deadline_us: 200_000,
        time_slice_us: 100_000,
        poll_us: 200,
        unconfined: Measure::ALL.to_vec(),
        ram: Vec::new(),
        port,
        trust: crate::config::Trust::Kernels,
    }
}

fn module(text: &str) -> Vec<u8> {
    let module = vm_ir::text::parse(&format!("vir 1\n{text}")).unwrap();
    vm_ir::binary::encode(&module, vm_ir::binary::Lines::Strip)
}

fn add_and_spin() -> Vec<u8> {
    module(
        "kernel @add(@input: view<i32, [?], read>, @output: view<i32, [?], write>, %addend: i32) at 0x1 block(256) {}
         kernel @spin(@output: view<i32, [1], write>, %turns: i64) at 0x2 block(32) {}",
    )
}

impl Bench {
    fn new() -> Self {
        Self::compiling(Arc::new(ByName))
    }

    fn compiling(compiler: Arc<dyn Compile>) -> Self {
        Self::on(Arc::new(FakeAccelerator::with_memory(4 << 20)), Compiler::Kernels(compiler))
    }
}

impl<A: Accelerator> Bench<A> {
    fn on(device: Arc<A>, compiler: Compiler) -> Self {
        let ram = tempfile::tempfile().unwrap();
        ram.set_len(RAM).unwrap();
        let pool = PoolOptions { zero: true, ..PoolOptions::default() };
        let worker =
            Worker::start(device.clone(), WorkerOptions { pool, ..WorkerOptions::default() }).unwrap();
        let parts = Ram::new(&[(0x1000, RAM)], vec![OwnedFd::from(ram.try_clone().unwrap())]).unwrap();
        let limits = Limits { fuel: 1 << 40, time: Duration::from_millis(200) };
        let (quotas, log) = (Quotas { memory: QUOTA, limits }, Arc::new(Mutex::new(Log::default())));
        let usage = Usage::new(most(&quotas, &parts));
        let server = Server::new(worker, compiler, Arc::new(parts), quotas, usage, log, Watch::default());
        Self { server, device, ram }
    }

    fn execute(
        &mut self,
        room: usize,
        fill: impl FnOnce(&mut BatchWriter<'_>) -> Result<(), NoRoom>,
    ) -> Executed {
        let mut bytes = vec![0; 1 << 20];
        let mut batch = BatchWriter::new(&mut bytes).unwrap();
        fill(&mut batch).unwrap();
        let len = batch.finish();
        self.server.execute(&bytes[..len], room)
    }

    /// Does a batch, waits for its fences, and answers with the reply.
    fn run(&mut self, fill: impl FnOnce(&mut BatchWriter<'_>) -> Result<(), NoRoom>) -> Vec<u8> {
        let executed = self.execute(MAX_REPLY_BYTES, fill);
        finish(executed).encode(MAX_REPLY_BYTES)
    }

    /// As [`Self::run`], and answers with how it ended.
    fn check(
        &mut self,
        fill: impl FnOnce(&mut BatchWriter<'_>) -> Result<(), NoRoom>,
        expect: Result<(), (usize, Status)>,
    ) {
        let reply = self.run(fill);
        let log = self.log();
        assert_eq!(Reply::decode(&reply).unwrap().check(), expect, "{log:?}");
        assert!(log.is_empty() || expect.is_err(), "{log:?}");
    }

    fn log(&mut self) -> Vec<String> {
        let reply = self.run(|batch| batch.log());
        let reply = Reply::decode(&reply).unwrap();
        let (status, answer) = reply.results().next().unwrap().unwrap();
        assert_eq!(status, Status::Ok);
        LogReader::new(answer).map(|entry| entry.unwrap().text.to_owned()).collect()
    }
}

fn finish(executed: Executed) -> crate::accelerators::worker::server::Answer {
    let mut answer = executed.answer;
    for fence in executed.fences {
        let ended = fence.job.wait(Instant::now() + Duration::from_secs(30));
        if let (Err(error), Some(operation)) = (ended, fence.operation) {
            answer.set_status(operation, crate::accelerators::worker::status::of(&error));
        }
    }
    answer
}

fn page(number: u64) -> Range {
    Range { address: 0x1000 * number, bytes: 0x1000 }
}

#[test]
fn a_kernel_works_on_the_guests_own_memory() {
    let mut bench = Bench::new();
    let numbers: Vec<u8> = (0..1024u32).flat_map(u32::to_le_bytes).collect();
    bench.ram.write_all_at(&numbers, 0x2000).unwrap();
    let ir = add_and_spin();
    // The second buffer is two pages that are neighbours in the buffer only.
    bench.check(
        |batch| {
            batch.create_module(7, &ir)?;
            batch.import_buffer(1, &[page(3)])?;
            batch.import_buffer(2, &[page(9), page(5)])?;
            let view = |buffer, offset| Argument::view(buffer, offset, &[1024]);
            batch.launch(7, 0, [4, 1, 1], &[view(1, 0)?, view(2, 2048)?, Argument::i32(5)])?;
            batch.fence()
        },
        Ok(()),
    );
    let mut got = vec![0; 2048];
    for (at, first) in [(0x8800, 0u32), (0x4000, 512)] {
        bench.ram.read_exact_at(&mut got, at).unwrap();
        let expect: Vec<u8> = (first..first + 512).flat_map(|number| (number + 5).to_le_bytes()).collect();
        assert!(got == expect, "at {at:#x}");
    }
}

#[test]
fn buffers_on_the_device_are_zero_copied_and_freed() {
    let mut bench = Bench::new();
    bench.ram.write_all_at(&[0xee; 0x2000], 0).unwrap();
    bench.check(
        |batch| {
            batch.import_buffer(1, &[Range { address: 0x1004, bytes: 0x100 }])?;
            // What its former life left is not there in the second.
            batch.create_buffer(2, 4096)?;
            batch.fill(Span { buffer: 2, offset: 0, bytes: 4096 }, 0xdd)?;
            batch.destroy_buffer(2)?;
            batch.create_buffer(2, 4096)?;
            batch.fill(Span { buffer: 2, offset: 4, bytes: 4 }, 7)?;
            batch.copy((1, 0x10), (2, 0), 16)?;
            batch.fence()?;
            batch.destroy_buffer(1)?;
            batch.destroy_buffer(2)
        },
        Ok(()),
    );
    let mut got = [0; 24];
    bench.ram.read_exact_at(&mut got, 0x10).unwrap();
    let expect =
        [0xee, 0xee, 0xee, 0xee, 0, 0, 0, 0, 7, 7, 7, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0xee, 0xee, 0xee, 0xee];
    assert_eq!(got, expect);
    // All quotas are as they were: all of each can be had again.
    for _ in 0..2 {
        bench.check(
            |batch| {
                batch.create_buffer(1, QUOTA)?;
                batch.import_buffer(2, &[Range { address: 0x1000, bytes: RAM }])?;
                batch.destroy_buffer(1)?;
                batch.destroy_buffer(2)
            },
            Ok(()),
        );
    }
}

#[test]
fn launches_in_a_row_all_run_up_to_the_one_that_is_wrong() {
    let mut bench = Bench::new();
    let ir = add_and_spin();
    let setup = |batch: &mut BatchWriter<'_>| {
        batch.create_module(1, &ir)?;
        batch.create_buffer(1, 64)?;
        batch.import_buffer(2, &[Range { address: 0x1000, bytes: 64 }])
    };
    bench.check(setup, Ok(()));
    let mut expect = 0u32;
    // The places where a launch has a wrong argument, among launches that each add 1.
    for wrong in [None, Some(0), Some(1), Some(63), Some(64), Some(100), Some(199), None] {
        let result = wrong.map_or(Ok(()), |place| Err((place, Status::Arguments)));
        bench.check(
            |batch| {
                for place in 0..200 {
                    let views = [Argument::view(1, 0, &[16])?, Argument::view(2, 0, &[16])?];
                    let [from, to] = if place % 2 == 0 { views } else { [views[1], views[0]] };
                    let addend =
                        if wrong == Some(place) { Argument::Scalar(1 << 32) } else { Argument::i32(1) };
                    batch.launch(1, 0, [1; 3], &[from, to, addend])?;
                }
                batch.fence()
            },
            result,
        );
        // An odd number of them leaves the last sum in the other buffer.
        let ran = wrong.unwrap_or(200) as u32;
        expect += ran;
        if ran % 2 == 1 {
            bench.check(|batch| batch.copy((1, 0), (2, 0), 64), Ok(()));
        } else {
            bench.check(|batch| batch.copy((2, 0), (1, 0), 64), Ok(()));
        }
        bench.check(|batch| batch.fence(), Ok(()));
        let mut got = [0; 4];
        bench.ram.read_exact_at(&mut got, 0).unwrap();
        assert_eq!(u32::from_le_bytes(got), expect, "{wrong:?}");
    }
    assert!(bench.device.graph_launches() > 800, "{}", bench.device.graph_launches());
}

#[test]
fn a_kernel_that_takes_a_surface_is_refused_by_name() {
    let mut bench = Bench::new();
    let ir = module("kernel @add(@image: surface<i8, [?, ?, 4], readwrite>) at 0x1 block(1) {}");
    let reply = bench.run(|batch| batch.create_module(1, &ir));
    assert_eq!(Reply::decode(&reply).unwrap().check(), Err((0, Status::Module)));
    let log = bench.log().concat();
    assert!(log.contains("@add takes the surface @image; guests are given no images"), "{log}");
}

#[test]
fn what_is_not_allowed_fails_with_its_status() {
    let mut bench = Bench::new();
    let ir = add_and_spin();
    bench.check(
        |batch| {
            batch.create_module(1, &ir)?;
            batch.create_buffer(1, 4096)?;
            batch.import_buffer(2, &[page(2)])
        },
        Ok(()),
    );
    type Fill = fn(&mut BatchWriter<'_>) -> Result<(), NoRoom>;
    let view = |buffer, offset, extent| Argument::view(buffer, offset, &[extent]).unwrap();
    let rows = Argument::strided(1, 0, &[2, 2], &[8]).unwrap();
    let cases: &[(Fill, Status)] = &[
        (|b| b.create_module(1, b""), Status::NumberTaken),
        (|b| b.create_module(2, b"PTX, please"), Status::Module),
        (|b| b.create_module(2, &module("kernel @unknown() at 0x1 block(1) {}")), Status::Module),
        (|b| b.destroy_module(9), Status::NoSuch),
        (|b| b.create_buffer(1, 8), Status::NumberTaken),
        (|b| b.create_buffer(3, 0), Status::Range),
        (|b| b.create_buffer(3, QUOTA), Status::Quota),
        (|b| b.create_buffer(3, u64::MAX), Status::Quota),
        (|b| b.import_buffer(1, &[page(2)]), Status::NumberTaken),
        (|b| b.import_buffer(3, &[page(0)]), Status::Range),
        (|b| b.import_buffer(3, &[page(0x11)]), Status::Range),
        (|b| b.import_buffer(3, &[Range { address: u64::MAX - 1, bytes: 8 }]), Status::Range),
        (|b| b.import_buffer(3, &[Range { address: 0x1000, bytes: RAM }]), Status::Quota),
        (|b| b.import_buffer(3, &[Range { address: 0x1000, bytes: u64::MAX }; 2]), Status::Quota),
        (|b| b.destroy_buffer(9), Status::NoSuch),
        (|b| b.copy((1, 0), (9, 0), 1), Status::NoSuch),
        (|b| b.copy((1, 0), (2, 1), 4096), Status::Range),
        (|b| b.copy((1, u64::MAX), (2, 0), 2), Status::Range),
        (|b| b.fill(Span { buffer: 2, offset: 4096, bytes: 1 }, 0), Status::Range),
        (|b| b.launch(9, 0, [1; 3], &[]), Status::NoSuch),
        (|b| b.launch(1, 2, [1; 3], &[]), Status::NoSuch),
    ];
    for (index, (fill, status)) in cases.iter().enumerate() {
        println!("case {index}");
        // What stands behind is not begun.
        bench.check(
            |batch| {
                fill(batch)?;
                batch.destroy_buffer(1)
            },
            Err((0, *status)),
        );
    }
    let launches = [
        (vec![], [1; 3], Status::Arguments),
        (vec![view(1, 0, 4), view(2, 0, 4), Argument::i32(1), Argument::i32(1)], [1; 3], Status::Arguments),
        (vec![view(1, 0, 4), view(2, 0, 4), view(2, 0, 4)], [1; 3], Status::Arguments),
        (vec![view(1, 0, 4), view(2, 0, 4), Argument::Scalar(1 << 32)], [1; 3], Status::Arguments),
        (vec![view(1, 0, 4), view(2, 0, 4), Argument::i32(1)], [0, 1, 1], Status::Arguments),
        (vec![view(1, 0, 4), view(2, 0, 1025), Argument::i32(1)], [1; 3], Status::Arguments),
        (vec![view(1, 0, 4), view(2, 0, u64::MAX), Argument::i32(1)], [1; 3], Status::Arguments),
        (vec![view(1, 0, 4), view(2, 2, 4), Argument::i32(1)], [1; 3], Status::Arguments),
        (vec![rows, view(2, 0, 4), Argument::i32(1)], [1; 3], Status::Arguments),
        (vec![view(1, 0, 4), view(2, 4097, 0), Argument::i32(1)], [1; 3], Status::Range),
        (vec![view(1, 0, 4), view(9, 0, 4), Argument::i32(1)], [1; 3], Status::NoSuch),
        // What is written overlaps what is read.
        (vec![view(1, 0, 4), view(1, 12, 4), Argument::i32(1)], [1; 3], Status::Arguments),
    ];
    for (arguments, grid, status) in launches {
        println!("{arguments:?}");
        bench.check(|batch| batch.launch(1, 0, grid, &arguments), Err((0, status)));
    }
}

#[test]
fn an_endless_kernel_is_stopped_and_the_next_one_runs() {
    let mut bench = Bench::new();
    let ir = add_and_spin();
    let spin = |batch: &mut BatchWriter<'_>, turns, fuel| {
        batch.launch_with_fuel(1, 1, [1; 3], fuel, &[Argument::view(1, 0, &[1])?, Argument::i64(turns)])?;
        batch.fence()
    };
    bench.check(
        |batch| {
            batch.create_module(1, &ir)?;
            batch.create_buffer(1, 4)?;
            spin(batch, 10, 0)
        },
        Ok(()),
    );
    bench.check(|batch| spin(batch, 1 << 30, 5_000), Err((1, Status::OutOfFuel)));
    let start = Instant::now();
    bench.check(|batch| spin(batch, i64::MAX, 0), Err((1, Status::Deadline)));
    assert!(start.elapsed() >= Duration::from_millis(200), "{:?}", start.elapsed());
    bench.check(|batch| spin(batch, 10, 0), Ok(()));
    bench.device.lose();
    bench.check(|batch| spin(batch, 10, 0), Err((1, Status::Lost)));
    // From then on it is known.
    bench.check(|batch| spin(batch, 10, 0), Err((0, Status::Lost)));
}

/// A guest's launches that violate an assumption of range analysis are rejected.
#[cfg(feature = "cpu")]
#[test]
fn launches_that_break_what_compilers_assume_are_refused() {
    use vm_jit::range::assumed::Assumption;
    use vm_passthrough::accelerator::{CpuAccelerator, JitCompiler, JitTarget as _};

    let device = Arc::new(CpuAccelerator::new().unwrap());
    let target = device.target().unwrap().to_string();
    let compiler = backend::Jit { compiler: JitCompiler::new(device.clone()), target };
    let mut bench = Bench::on(device, Compiler::Kernels(Arc::new(compiler)));
    let ir = module(
        "kernel @k(@x: view<i32, [?*4], read, align 16>, @y: view<i32, [n, 8], write>, @z: view<i32, [n], read>, %s: i32 in [1, 4]) at 0x1 block(32) {}
         kernel @c() at 0x2 block(32) cluster(4) {}",
    );
    bench.check(
        |batch| {
            batch.create_module(1, &ir)?;
            batch.create_buffer(1, 4096)
        },
        Ok(()),
    );
    let view = |offset, extents: &[u64]| Argument::view(1, offset, extents).unwrap();
    let strided = |offset, extents: &[u64], stride| Argument::strided(1, offset, extents, &[stride]).unwrap();
    let good = [view(0, &[8]), view(1024, &[2, 8]), view(2048, &[2]), Argument::i32(2)];
    let with = |index: usize, other: Argument| {
        let mut arguments = good;
        arguments[index] = other;
        ([1; 3], arguments)
    };
    bench.check(|batch| batch.launch(1, 0, [1; 3], &good), Ok(()));
    bench.check(|batch| batch.launch(1, 1, [8, 1, 1], &[]), Ok(()));
    for assumption in Assumption::ALL {
        let (most, far) = (vm_ir::limits::MAX_EXTENT, 1 << 62);
        let cases = match assumption {
            Assumption::Grid => {
                [[0, 1, 1], [1, 65_536, 1], [1, 1, 65_536], [1, 1, 0]].map(|grid| (grid, good)).to_vec()
            }
            Assumption::Clusters => {
                bench.check(|batch| batch.launch(1, 1, [6, 1, 1], &[]), Err((0, Status::Arguments)));
                continue;
            }
            // A launch does not choose these.
            Assumption::Block | Assumption::Warp => continue,
            Assumption::Extents => vec![with(2, view(2048, &[most + 1])), with(0, view(0, &[u64::MAX]))],
            Assumption::FixedExtents => vec![with(1, view(1024, &[2, 7])), with(1, view(1024, &[2, 9]))],
            Assumption::Multiples => vec![with(0, view(0, &[6])), with(0, view(0, &[1]))],
            Assumption::NamedExtents => vec![with(2, view(2048, &[3])), with(1, view(1024, &[1, 8]))],
            Assumption::ScalarRanges => [0, 5, -1, i32::MIN].map(|s| with(3, Argument::i32(s))).to_vec(),
            Assumption::Alignment => {
                vec![with(0, view(4, &[8])), with(2, view(2050, &[2])), with(1, strided(1024, &[2, 8], 34))]
            }
            Assumption::Memory => vec![
                with(0, view(4080, &[8])),
                with(1, strided(1024, &[2, 8], 3072)),
                with(1, strided(1024, &[2, 8], far)),
                with(1, strided(1024, &[2, 8], !3)),
            ],
            Assumption::Apart => vec![with(1, view(16, &[2, 8])), with(1, strided(1024, &[2, 8], 16))],
        };
        for (grid, arguments) in cases {
            println!("{assumption:?}: {grid:?}, {arguments:?}");
            bench.check(|batch| batch.launch(1, 0, grid, &arguments), Err((0, Status::Arguments)));
        }
    }
    bench.check(|batch| batch.launch(1, 0, [1; 3], &good), Ok(()));
}

/// Machine code of real kernels, each of which keeps all of its module's.
#[cfg(feature = "cpu")]
#[test]
fn code_has_a_quota() {
    use vm_passthrough::accelerator::{CpuAccelerator, JitCompiler, JitTarget as _};

    const KERNELS: usize = 64;
    let body: String = (1..20).map(|n| format!("%a{n} = rotl %a{}, %a0 : i64\n", n - 1)).collect();
    let kernel = |n| {
        format!(
            "kernel @k{n}(@x: view<i64, [?], readwrite>) at 0x1 block(32) {{\n%i = global_id.x : i64\n\
             %a0 = load @x[%i] : i64\n{body}store @x[%i], %a19\n}}\n"
        )
    };
    let ir = module(&(0..KERNELS).map(kernel).collect::<String>());
    let device = Arc::new(CpuAccelerator::new().unwrap());
    let target = device.target().unwrap().to_string();
    let compiler = backend::Jit { compiler: JitCompiler::new(device.clone()), target };
    let mut bench = Bench::on(device, Compiler::Kernels(Arc::new(compiler)));
    // No more than that number of kernels may be there in any case.
    let mut modules = 1..4096 / KERNELS as u32;
    let refused = modules.find_map(|number| {
        let reply = bench.run(|batch| batch.create_module(number, &ir));
        Reply::decode(&reply).unwrap().check().err().map(|ended| (number, ended))
    });
    let (number, ended) = refused.expect("the code is not counted");
    assert_eq!(ended, (0, Status::Quota));
    assert_eq!(bench.log(), ["a guest's modules have at most 268435456 bytes of code"]);
    bench.check(|batch| batch.destroy_module(1), Ok(()));
    bench.check(|batch| batch.create_module(number, &ir), Ok(()));
}

#[test]
fn a_reply_never_passes_its_room() {
    let mut bench = Bench::new();
    let query = |batch: &mut BatchWriter<'_>| {
        batch.query()?;
        batch.create_buffer(1, 16)
    };
    let reply = bench.run(query);
    let reply = Reply::decode(&reply).unwrap();
    let (_, answer) = reply.results().next().unwrap().unwrap();
    let info = Info::decode(answer).unwrap();
    assert_eq!((info.name, info.target, info.memory_bytes), ("simulated accelerator", "fake", QUOTA));
    assert_eq!(info.deadline_us, 200_000);
    bench.check(|batch| batch.destroy_buffer(1), Ok(()));
    for room in [0, 15, 16, 24, 1000] {
        let reply = finish(bench.execute(room, query)).encode(room);
        match Reply::decode(&reply) {
            Ok(reply) => assert_eq!(reply.check(), Err((0, Status::ReplyRoom)), "{room}"),
            Err(_) => assert!(reply.is_empty() && room < 16, "{room}"),
        }
    }
    // None of them made the buffer.
    bench.log();
    bench.check(|batch| batch.create_buffer(1, 16), Ok(()));
}

/// Mutated batches: `PARAVIRT_FRAMES` of them, or a few that an ordinary run has time for. The bytes beside what the
/// batches may touch stay as they are.
#[test]
fn mutated_batches_do_no_harm() {
    const CANARY: u8 = 0xc5;
    let frames: usize = std::env::var("PARAVIRT_FRAMES")
        .map_or_else(|_| crate::sweep::count(200_000), |text| text.parse().unwrap());
    let ir = add_and_spin();
    let seed = |fill: &dyn Fn(&mut BatchWriter<'_>) -> Result<(), NoRoom>| {
        let mut bytes = vec![0; 4096];
        let mut batch = BatchWriter::new(&mut bytes).unwrap();
        fill(&mut batch).unwrap();
        let len = batch.finish();
        bytes.truncate(len);
        bytes
    };
    let view = |buffer, extent| Argument::view(buffer, 0, &[extent]);
    let seeds = [
        seed(&|b| {
            b.create_module(1, &ir)?;
            b.create_buffer(1, 4096)?;
            b.import_buffer(2, &[page(4)])?;
            b.import_buffer(3, &[page(5), page(7)])?;
            b.create_module_from(2, Span { buffer: 2, offset: 8, bytes: 64 })
        }),
        seed(&|b| {
            b.launch(1, 0, [1, 1, 1], &[view(1, 64)?, view(2, 64)?, Argument::i32(1)])?;
            b.launch_with_fuel(1, 1, [1; 3], 1000, &[view(2, 1)?, Argument::i64(5)])?;
            b.fence()
        }),
        seed(&|b| {
            b.copy((1, 0), (2, 0), 64)?;
            b.fill(Span { buffer: 3, offset: 0, bytes: 128 }, 1)?;
            b.query()?;
            b.log()
        }),
        seed(&|b| {
            b.destroy_buffer(1)?;
            b.destroy_buffer(2)?;
            b.destroy_buffer(3)?;
            b.destroy_module(1)
        }),
    ];
    let mut bench = Bench::new();
    // A file behind the RAM's own end: nothing maps it, nothing may write it.
    bench.ram.set_len(2 * RAM).unwrap();
    bench.ram.write_all_at(&[CANARY; RAM as usize], RAM).unwrap();
    let mut rng = crate::sweep::random(9);
    let (mut begun, mut slowest) = (0, Duration::ZERO);
    let start = Instant::now();
    for _ in 0..frames {
        let random = rng.next_u32();
        let mut frame = seeds[random as usize % seeds.len()].clone();
        for _ in 0..random >> 8 & 3 {
            let (random, at) = (rng.next_u32(), 8 + rng.next_u32() as usize % (frame.len() - 8));
            match random % 4 {
                0 => frame[at] = (random >> 8) as u8,
                1 => frame[at] ^= 1 << (random >> 8 & 7),
                2 => {
                    let edges = [0, 1, 2, 3, 4096, 0x8000_0000, u32::MAX, random];
                    let at = at.min(frame.len() - 4) & !3;
                    frame[at..at + 4]
                        .copy_from_slice(&edges[(random >> 8) as usize % edges.len()].to_le_bytes());
                }
                _ => frame.truncate(at.max(16)),
            }
            let len = frame.len() as u32;
            frame[8..12].copy_from_slice(&len.to_le_bytes());
        }
        let room = if random & 1 << 16 == 0 { MAX_REPLY_BYTES } else { rng.next_u32() as usize % 2048 };
        let begin = Instant::now();
        let reply = finish(bench.server.execute(&frame, room)).encode(room);
        slowest = slowest.max(begin.elapsed());
        assert!(reply.len() <= room);
        if let Ok(reply) = Reply::decode(&reply) {
            begun += usize::from(reply.status() == Status::Ok);
        } else {
            assert!(room < 16, "a reply that is none");
        }
    }
    println!(
        "{frames} mutated batches in {:.1} s, {begun} of them begun, the slowest in {slowest:?}",
        start.elapsed().as_secs_f64()
    );
    assert!(begun > frames / 4, "the mutations miss what they are for");
    let mut beside = vec![0; RAM as usize];
    bench.ram.read_exact_at(&mut beside, RAM).unwrap();
    assert!(beside.iter().all(|byte| *byte == CANARY), "memory outside of the guest's RAM has changed");
    // It still works.
    bench.check(|batch| batch.log(), Ok(()));
}

#[test]
fn a_lost_context_is_told_at_once() {
    const QUEUE: u64 = 0x1000;
    let bench = Bench::new();
    let parts = vec![OwnedFd::from(bench.ram.try_clone().unwrap())];
    let ram = Arc::new(Ram::new(&[(0x1000, RAM)], parts).unwrap());
    let memory = ram.map().unwrap();
    let start = Start {
        size: 8,
        descriptors: QUEUE,
        available: QUEUE + 0x200,
        used: QUEUE + 0x400,
        event_index: false,
    };
    // One batch, which waits for the accelerator, and room for its answer.
    let mut batch = vec![0; 64];
    let mut writer = BatchWriter::new(&mut batch).unwrap();
    writer.fence().unwrap();
    let len = writer.finish() as u32;
    memory.write_slice(&batch, GuestAddress(0x3000)).unwrap();
    for (index, (address, len, flags)) in [(0x3000u64, len, 1u16), (0x4000, 64, 2)].into_iter().enumerate() {
        let at = QUEUE + 16 * index as u64;
        memory.write_obj(address, GuestAddress(at)).unwrap();
        memory.write_obj(len, GuestAddress(at + 8)).unwrap();
        memory.write_obj(flags, GuestAddress(at + 12)).unwrap();
        memory.write_obj(1u16, GuestAddress(at + 14)).unwrap();
    }
    memory.write_obj(1u16, GuestAddress(start.available + 2)).unwrap();
    let doorbell = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).unwrap();
    let ring = Ring::new(memory.clone(), &start, vec![doorbell]).unwrap();
    let open = orders(None);
    let (broken, breaks) = std::sync::mpsc::channel();
    let device = Arc::new(FakeAccelerator::new());
    let worker: Worker<_> = Worker::start(device.clone(), WorkerOptions::default()).unwrap();
    device.lose();
    let guest = Guest::new(&open, ram, Meter::new().unwrap(), Watch::default(), broken).unwrap();
    // As the worker's main thread does.
    std::thread::spawn(move || {
        if let Err(reason) = serve(&worker, Compiler::Kernels(Arc::new(ByName)), ring, &guest) {
            guest.broken(reason);
        }
    });
    let reason = breaks.recv_timeout(Duration::from_secs(30)).unwrap();
    assert!(reason.contains("lost"), "{reason}");
    let mut reply = [0; 24];
    memory.read_slice(&mut reply, GuestAddress(0x4000)).unwrap();
    assert_eq!(Reply::decode(&reply).unwrap().check(), Err((0, Status::Lost)));
}
