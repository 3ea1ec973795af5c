//! Kernels whose memory has pages that aren't there: they end, and all else goes on.
#![allow(unsafe_code)]

mod common;

use common::artifact;
use std::num::NonZero;
use std::sync::atomic::AtomicU32;
use vm_accel::{Arguments, Extents, Grid, Memory, MemoryKind, QueueArgument, Scalar};
use vm_cpu::CpuAccelerator;
use vm_ir::{Trust, text, validate};
use vm_jit::backend::cpu::Isa;

const PAGE: u64 = 4096;
/// Blocks of 64 threads, each of which writes an element.
const KERNEL: &str = "vir 1
    kernel @put(@x: view<i32, [?], readwrite>, %from: i64) at 0x0 block(64) {
      %i = global_id.x : i64
      %at = add %i, %from : i64
      %n = const 7 : i32
      store @x[%at], %n
    }";

/// Three pages, of which the middle one is none.
fn pages() -> u64 {
    let (none, both) = (libc::PROT_NONE, libc::PROT_READ | libc::PROT_WRITE);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: new pages, wherever there is room.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), 3 * PAGE as usize, both, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    let middle = at.wrapping_byte_add(PAGE as usize);
    // SAFETY: one of these pages.
    assert_eq!(unsafe { libc::mprotect(middle, PAGE as usize, none) }, 0);
    at.expose_provenance() as u64
}

#[test]
fn a_kernel_ends_where_memory_is_missing() {
    let module = validate(text::parse(KERNEL).unwrap(), Trust::Guest).unwrap();
    let target = format!("cpu:{}+faults", Isa::host().unwrap()).parse().unwrap();
    let artifact = artifact(&module, "put", &target).unwrap();
    let device = CpuAccelerator::with_threads(NonZero::new(3).unwrap()).unwrap();
    let kernel = device.load(&artifact).unwrap();
    let start = pages();
    let range = start..start + 3 * PAGE;
    // SAFETY: the pages stay; that one can't be accessed is said below.
    let memory = unsafe { Memory::from_raw(MemoryKind::Device, start, 0, 3 * PAGE) };
    let per_page = PAGE as i64 / 4;
    // From which element on, how many blocks, and between which addresses the first fault is.
    let nowhere = Some(0..PAGE);
    let missing = Some(start + PAGE..start + 2 * PAGE);
    let cases = [
        (0, 16, None),
        (2 * per_page, 16, None),
        (0, 17, missing.clone()),
        (per_page - 1, 1, missing.clone()),
        (per_page, 1000, missing),
        (-1, 1, nowhere.clone()),
        (3 * per_page - 63, 1, nowhere.clone()),
        (1 << 40, 5, nowhere),
        (0, 16, None),
    ];
    for (from, blocks, expect) in cases {
        let stop = AtomicU32::new(0);
        // SAFETY: the flag is there until the launch has ended.
        let flag =
            unsafe { Memory::from_raw(MemoryKind::Pinned, stop.as_ptr() as u64, stop.as_ptr() as u64, 4) };
        let given = [
            QueueArgument::View(memory.region(), Extents::WHOLE),
            QueueArgument::Scalar(Scalar::from_bits(from as u64, 8)),
        ];
        let mut arguments = Arguments::new(&artifact, given).unwrap();
        arguments.guard(&artifact, flag.region(), 1 << 40).unwrap();
        // SAFETY: the memory is there but for a page of it, and the flag is set.
        let fault = unsafe { device.run_within(&kernel, Grid([blocks, 1, 1]), &arguments, &range) }.unwrap();
        let right = match (&expect, &fault) {
            (None, None) => true,
            (Some(expect), Some(at)) => expect.contains(at),
            _ => false,
        };
        assert!(right, "from {from}, {blocks} blocks: {fault:x?}, not {expect:x?}");
    }
}
