//! The suite that every accelerator must pass, and what only this one does: images that are none to run.
#![allow(unsafe_code)]

mod common;

use std::fs::File;
use std::num::NonZero;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vm_accel::programs::{Program, SOURCE};
use vm_accel::{Accelerator, Artifact, Error, ExternalKind, ExternalMemory, Queue, QueueOptions};
use vm_cpu::CpuAccelerator;
use vm_ir::{Trust, text, validate};
use vm_jit::Target;

fn program(program: Program) -> Artifact {
    let module = text::parse(SOURCE).unwrap();
    let name = if program == Program::Broken { Program::Add.name() } else { program.name() };
    // As the host's own they have no guard, but for the one that must be stopped.
    let trust = if program == Program::Spin { Trust::Guest } else { Trust::Trusted };
    let valid = validate(module, trust).unwrap();
    let target: Target = "cpu".parse().unwrap();
    let artifact = common::artifact(&valid, name, &target).unwrap();
    if program != Program::Broken {
        return artifact;
    }
    let half = &artifact.image()[..artifact.image().len() / 2];
    // SAFETY: it can't be loaded.
    unsafe { Artifact::new(half, artifact.signature().clone()) }.unwrap()
}

/// Host memory that is shared.
fn shared(seals: SealFlags, bytes: u64) -> File {
    let fd = memfd_create("shared", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fcntl_add_seals(&fd, seals).unwrap();
    fd.into()
}

/// What could end this process later is refused: what others can cut off, and what is not as long as is said.
#[test]
fn hostile_memory_is_refused() {
    let device = CpuAccelerator::with_threads(NonZero::<usize>::MIN).unwrap();
    let queue = device.open(&QueueOptions::default()).unwrap();
    let check = |file: File, kind: ExternalKind, [allocation, offset, bytes]: [u64; 3], what: &str| {
        let memory = ExternalMemory { fd: file.into(), kind, allocation, offset, bytes, dedicated: false };
        match queue.import_memory(memory) {
            Ok(memory) => {
                assert_eq!((what, memory.bytes()), ("", bytes));
                queue.free(memory).unwrap();
            }
            Err(error) => assert!(!what.is_empty() && error.to_string().contains(what), "{what}: {error}"),
        }
    };
    let sealed = || shared(SealFlags::SHRINK, 8192);
    check(sealed(), ExternalKind::HostFd, [8192, 0, 8192], "");
    check(sealed(), ExternalKind::HostFd, [100, 7, 93], "");
    check(shared(SealFlags::GROW, 8192), ExternalKind::HostFd, [8192, 0, 8192], "F_SEAL_SHRINK");
    check(tempfile::tempfile().unwrap(), ExternalKind::HostFd, [1, 0, 1], "no memfd");
    check(sealed(), ExternalKind::HostFd, [8193, 0, 1], "8192 bytes, not 8193");
    check(sealed(), ExternalKind::HostFd, [u64::MAX, 0, 1], "8192 bytes");
    check(sealed(), ExternalKind::HostFd, [8192, 8192, 1], "do not lie in");
    check(sealed(), ExternalKind::HostFd, [8192, u64::MAX, 2], "do not lie in");
    check(sealed(), ExternalKind::HostFd, [8192, 0, 0], "do not lie in");
    check(sealed(), ExternalKind::OpaqueFd, [8192, 0, 8192], "shared as opaque-fd");
    check(sealed(), ExternalKind::DmaBuf, [8192, 0, 8192], "no dma-buf");
}

#[test]
fn conforms() {
    for threads in [1, 3] {
        let device = Arc::new(CpuAccelerator::with_threads(NonZero::new(threads).unwrap()).unwrap());
        assert!(vm_accel::conformance::check(&device, &program) >= vm_accel::conformance::CASES);
        let other = CpuAccelerator::with_threads(NonZero::new(threads).unwrap()).unwrap();
        vm_accel::conformance::events_between(&device, &Arc::new(other));
        vm_accel::conformance::turns(&device, &program, &|| shared(SealFlags::SHRINK, 8192));
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

/// An object whose section of code is as long as is taken, or a byte longer.
#[test]
fn so_much_code_is_taken() {
    const MOST: usize = 256 << 20;
    let device = CpuAccelerator::with_threads(NonZero::<usize>::MIN).unwrap();
    let queue = device.open(&QueueOptions::default()).unwrap();
    let good = program(Program::Add);
    let word =
        |at: usize| usize::try_from(u64::from_le_bytes(*good.image()[at..].first_chunk().unwrap())).unwrap();
    let short = |at: usize| usize::from(u16::from_le_bytes(*good.image()[at..].first_chunk().unwrap()));
    // The section headers of an ELF object, and that of what is executed.
    let headers = (0..short(0x3c)).map(|index| word(0x28) + index * short(0x3a));
    let code = headers.into_iter().find(|header| word(header + 8) & 4 != 0).unwrap();
    for (bytes, taken) in [(MOST, true), (MOST + 1, false)] {
        let mut image = vec![0; word(code + 0x18) + bytes];
        image[..good.image().len()].copy_from_slice(good.image());
        image[code + 0x20..][..8].copy_from_slice(&bytes.to_le_bytes());
        // SAFETY: it is loaded and not launched.
        let artifact = unsafe { Artifact::new(image, good.signature().clone()) }.unwrap();
        match (queue.load(&artifact), taken) {
            (Ok(kernel), true) => queue.unload(kernel).unwrap(),
            (Err(Error::Load { reason, .. }), false) => {
                assert_eq!(reason, "it has 268435457 bytes of code, 1 to 268435456 are taken");
            }
            (other, _) => panic!("{bytes}: {other:?}"),
        }
    }
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
        // SAFETY: the memory is there until the queue is dropped, which frees it when nothing runs any more.
        unsafe { queue.launch(&kernel, vm_accel::Grid([i32::MAX as u32, 65535, 1]), &packed) }.unwrap();
    }
    let start = std::time::Instant::now();
    drop(queue);
    assert!(start.elapsed() < std::time::Duration::from_secs(300), "{:?}", start.elapsed());
}
