//! The suite that every accelerator must pass, and what only this one does: images that are none to run.
#![allow(unsafe_code)]

mod common;

use std::num::NonZero;
use std::sync::Arc;
use vm_accel::programs::Program;
use vm_accel::{Accelerator, Artifact, Error, Queue, QueueOptions};
use vm_cpu::CpuAccelerator;
use vm_ir::{Trust, text, validate};
use vm_jit::Target;

/// The suite's programs, written in the IR.
fn source(program: Program) -> &'static str {
    match program {
        Program::Add | Program::Broken => {
            "kernel @add(@input: view<i32, [?], read>, @output: view<i32, [?], write>, %addend: i32) at 0x0 block(256) {
               FIRST AND STEP
               %a = extent @input, 0 : i64
               %b = extent @output, 0 : i64
               %n = min.s %a, %b : i64
               for %i: i64 = %first to %n step %step {
                 %x = load @input[%i] : i32
                 %y = add %x, %addend : i32
                 store @output[%i], %y
               }
             }"
        }
        Program::Bump => {
            "kernel @bump(@data: view<i32, [?], readwrite>, %by: i32) at 0x0 block(256) {
               FIRST AND STEP
               %n = extent @data, 0 : i64
               for %i: i64 = %first to %n step %step {
                 %x = load @data[%i] : i32
                 %y = add %x, %by : i32
                 store @data[%i], %y
               }
             }"
        }
        Program::Copy2 => {
            "kernel @copy2(@source: view<i32, [?, ?], read>, @target: view<i32, [?, ?], write>) at 0x0 block(64) {
               FIRST AND STEP
               %zero = const 0 : i64
               %one = const 1 : i64
               %a0 = extent @source, 0 : i64
               %b0 = extent @target, 0 : i64
               %n0 = min.s %a0, %b0 : i64
               %a1 = extent @source, 1 : i64
               %b1 = extent @target, 1 : i64
               %n1 = min.s %a1, %b1 : i64
               for %i: i64 = %zero to %n0 step %one {
                 for %j: i64 = %first to %n1 step %step {
                   %x = load @source[%i, %j] : i32
                   store @target[%i, %j], %x
                 }
               }
             }"
        }
        Program::Copy3 => {
            "kernel @copy3(@source: view<i32, [?, ?, ?], read>, @target: view<i32, [?, ?, ?], write>) at 0x0 block(64) {
               FIRST AND STEP
               %zero = const 0 : i64
               %one = const 1 : i64
               %a0 = extent @source, 0 : i64
               %b0 = extent @target, 0 : i64
               %n0 = min.s %a0, %b0 : i64
               %a1 = extent @source, 1 : i64
               %b1 = extent @target, 1 : i64
               %n1 = min.s %a1, %b1 : i64
               %a2 = extent @source, 2 : i64
               %b2 = extent @target, 2 : i64
               %n2 = min.s %a2, %b2 : i64
               for %i: i64 = %zero to %n0 step %one {
                 for %j: i64 = %zero to %n1 step %one {
                   for %k: i64 = %first to %n2 step %step {
                     %x = load @source[%i, %j, %k] : i32
                     store @target[%i, %j, %k], %x
                   }
                 }
               }
             }"
        }
        Program::Copy4 => {
            "kernel @copy4(@source: view<i32, [?, ?, ?, ?], read>, @target: view<i32, [?, ?, ?, ?], write>) at 0x0 block(64) {
               FIRST AND STEP
               %zero = const 0 : i64
               %one = const 1 : i64
               %a0 = extent @source, 0 : i64
               %b0 = extent @target, 0 : i64
               %n0 = min.s %a0, %b0 : i64
               %a1 = extent @source, 1 : i64
               %b1 = extent @target, 1 : i64
               %n1 = min.s %a1, %b1 : i64
               %a2 = extent @source, 2 : i64
               %b2 = extent @target, 2 : i64
               %n2 = min.s %a2, %b2 : i64
               %a3 = extent @source, 3 : i64
               %b3 = extent @target, 3 : i64
               %n3 = min.s %a3, %b3 : i64
               for %h: i64 = %zero to %n0 step %one {
                 for %i: i64 = %zero to %n1 step %one {
                   for %j: i64 = %zero to %n2 step %one {
                     for %k: i64 = %first to %n3 step %step {
                       %x = load @source[%h, %i, %j, %k] : i32
                       store @target[%h, %i, %j, %k], %x
                     }
                   }
                 }
               }
             }"
        }
        Program::Scalars => {
            "kernel @scalars(@output: view<i64, [4], write>, %a: i8, %b: i16, %c: i32, %d: i64) at 0x0 block(1) {
               %0 = const 0 : i64
               %1 = const 1 : i64
               %2 = const 2 : i64
               %3 = const 3 : i64
               %wa = zext %a : i64
               %wb = zext %b : i64
               %wc = zext %c : i64
               store @output[%0], %wa
               store @output[%1], %wb
               store @output[%2], %wc
               store @output[%3], %d
             }"
        }
        Program::Reverse => {
            "kernel @reverse(@data: view<i32, [?*64], readwrite>) at 0x0 block(64) {
               shared @turn: i32[64]
               %i = global_id.x : i64
               %t = thread_id.x : i32
               %last = const 63 : i32
               %other = sub %last, %t : i32
               %x = load @data[%i] : i32
               store @turn[%other], %x
               barrier.block
               %y = load @turn[%t] : i32
               store @data[%i], %y
             }"
        }
        Program::Ids => {
            "kernel @ids(@output: view<i32, [?, 16], write>) at 0x0 block(4, 2, 2) {
               %bx = block_id.x : i32
               %by = block_id.y : i32
               %bz = block_id.z : i32
               %tx = thread_id.x : i32
               %ty = thread_id.y : i32
               %tz = thread_id.z : i32
               %4 = const 4 : i32
               %8 = const 8 : i32
               %12 = const 12 : i32
               %16 = const 16 : i32
               %20 = const 20 : i32
               %by4 = shl %by, %4 : i32
               %bz8 = shl %bz, %8 : i32
               %tx12 = shl %tx, %12 : i32
               %ty16 = shl %ty, %16 : i32
               %tz20 = shl %tz, %20 : i32
               %a = or %bx, %by4 : i32
               %b = or %a, %bz8 : i32
               %c = or %b, %tx12 : i32
               %d = or %c, %ty16 : i32
               %e = or %d, %tz20 : i32
               %gx = grid_dim.x : i32
               %gy = grid_dim.y : i32
               %row = mul %bz, %gy : i32
               %row2 = add %row, %by : i32
               %plane = mul %row2, %gx : i32
               %number = add %plane, %bx : i32
               %item = local_index : i32
               store @output[%number, %item], %e
             }"
        }
        Program::Spin => {
            "kernel @spin(@output: view<i32, [1], write>, %turns: i64) at 0x0 block(32) {
               %zero = const 0 : i64
               %one = const 1 : i64
               %first = const 0 : i32
               %begun = const 1 : i32
               for %i: i64 = %zero to %turns step %one {
               }
               store @output[%first], %begun
             }"
        }
    }
}

/// The thread's number in the whole grid, and how many there are.
const FIRST_AND_STEP: &str = "
    %block_x = block_id.x : i32
    %block_y = block_id.y : i32
    %block_z = block_id.z : i32
    %gx = grid_dim.x : i32
    %gy = grid_dim.y : i32
    %gz = grid_dim.z : i32
    %block_x64 = sext %block_x : i64
    %block_y64 = sext %block_y : i64
    %block_z64 = sext %block_z : i64
    %gx64 = sext %gx : i64
    %gy64 = sext %gy : i64
    %gz64 = sext %gz : i64
    %plane = mul %block_z64, %gy64 : i64
    %row = add %plane, %block_y64 : i64
    %rows = mul %row, %gx64 : i64
    %number = add %rows, %block_x64 : i64
    %dim = block_dim.x : i32
    %size = sext %dim : i64
    %before = mul %number, %size : i64
    %t = thread_id.x : i32
    %t64 = sext %t : i64
    %first = add %before, %t64 : i64
    %area = mul %gx64, %gy64 : i64
    %blocks = mul %area, %gz64 : i64
    %all = mul %blocks, %size : i64
    %least = const 1 : i64
    %step = max.s %all, %least : i64";

fn program(program: Program) -> Artifact {
    let source = source(program).replace("FIRST AND STEP", FIRST_AND_STEP);
    let module = text::parse(&format!("vir 1\n{source}\n")).unwrap();
    let name = module.kernels()[0].name().to_owned();
    // As the host's own they have no guard, but for the one that must be stopped.
    let trust = if program == Program::Spin { Trust::Guest } else { Trust::Trusted };
    let valid = validate(module, trust).unwrap();
    let target: Target = "cpu".parse().unwrap();
    let artifact = common::artifact(&valid, &name, &target).unwrap();
    if program != Program::Broken {
        return artifact;
    }
    let half = &artifact.image()[..artifact.image().len() / 2];
    // SAFETY: it can't be loaded.
    unsafe { Artifact::new(half, artifact.signature().clone()) }.unwrap()
}

#[test]
fn conforms() {
    for threads in [1, 3] {
        let device = Arc::new(CpuAccelerator::with_threads(NonZero::new(threads).unwrap()).unwrap());
        assert!(vm_accel::conformance::check(&device, &program) >= 15);
        let health = device.health().unwrap();
        assert!(health.memory_used.is_some_and(|used| used > 0 && used < device.info().memory_bytes));
    }
}

/// Objects with bytes changed at random are refused or have the code that they say; none is run.
#[test]
fn hostile_images_are_refused() {
    let device = CpuAccelerator::with_threads(NonZero::<usize>::MIN).unwrap();
    let queue = device.open(&QueueOptions::default()).unwrap();
    let good = program(Program::Add);
    let load = |image: &[u8]| {
        // SAFETY: it is loaded and not launched.
        let artifact = unsafe { Artifact::new(image, good.signature().clone()) }.unwrap();
        queue.load(&artifact)
    };
    assert!(load(good.image()).is_ok());
    let check = |image: &[u8], what: &str| match load(image) {
        Err(Error::Load { reason, .. }) => assert!(reason.contains(what), "{reason}, not {what}"),
        other => panic!("{what}: {other:?}"),
    };
    check(b"", "no object");
    check(b"\x7fELF", "no object");
    check(&good.image()[..good.image().len() / 2], "");
    let mut foreign = good.image().to_vec();
    foreign[18] = if cfg!(target_arch = "x86_64") { 183 } else { 62 };
    check(&foreign, "it is for");
    let mut renamed = good.signature().clone();
    renamed.entry = "other".into();
    // SAFETY: it has no such function, so it is refused.
    let other = unsafe { Artifact::new(good.image(), renamed) }.unwrap();
    assert!(
        matches!(queue.load(&other), Err(Error::Load { reason, .. }) if reason.contains("no function other"))
    );
    let mut state = 1u64;
    let mut refused = 0;
    for _ in 0..20_000 {
        let mut image = good.image().to_vec();
        for _ in 0..1 + state % 4 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let at = (state >> 33) as usize % image.len();
            image[at] = (state >> 24) as u8;
        }
        image.truncate(image.len() - (state >> 20) as usize % 3);
        refused += usize::from(load(&image).is_err());
    }
    assert!(refused > 100, "{refused}");
}

/// A queue that is dropped gives up what waits, and comes to an end.
#[test]
fn a_dropped_queue_gives_up() {
    let device = CpuAccelerator::with_threads(NonZero::new(2).unwrap()).unwrap();
    let queue = device.open(&QueueOptions::default()).unwrap();
    let artifact = program(Program::Add);
    let kernel = queue.load(&artifact).unwrap();
    let memory = queue.allocate(vm_accel::MemoryKind::Device, 8).unwrap();
    let [input, output] = [0, 4].map(|at| memory.region().slice(at, 4).unwrap());
    let view = |region| vm_accel::QueueArgument::View(region, vm_accel::Extents::WHOLE);
    let arguments = [view(input), view(output), vm_accel::QueueArgument::Scalar(1u32.into())];
    let packed = vm_accel::Arguments::new(&artifact, arguments).unwrap();
    // More blocks than anybody waits for.
    for _ in 0..100 {
        queue.launch(&kernel, vm_accel::Grid([i32::MAX as u32, 65535, 1]), &packed).unwrap();
    }
    let start = std::time::Instant::now();
    drop(queue);
    assert!(start.elapsed() < std::time::Duration::from_secs(10), "{:?}", start.elapsed());
}
