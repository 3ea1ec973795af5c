//! A session has no more of a device's memory than its pot, by whatever call it asks for it, and what it gives back is there again.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vm_bridge::ring::Taken;
use vm_bridge::server::{Driver, Exports, Lane, Pot, SLOT, Session};
use vm_bridge::wire::{Header, own, put};
use vm_cuda_api::number;

/// Keeps the driver's library built.
use vm_cuda_fake as _;

const MIB: u64 = 1 << 20;
const QUOTA: u64 = 64 * MIB;
const OUT_OF_MEMORY: u32 = 2;

/// A program with a context, of a pot with others.
struct Program {
    lane: Lane,
    ticket: u64,
    context: u64,
}

/// One test at a time: they have one driver, and one resets its device.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A pot for so many programs.
fn pot(slots: u64) -> OwnedFd {
    let file = memfd_create("pot", MemfdFlags::ALLOW_SEALING).expect("a file");
    ftruncate(&file, slots * SLOT).expect("its length");
    fcntl_add_seals(&file, SealFlags::SHRINK).expect("sealed");
    file
}

/// What all hold of it.
fn held(file: &OwnedFd) -> u64 {
    let mut bytes = [0; 64];
    let read = rustix::io::pread(file, &mut bytes, 0).expect("read");
    bytes[..read].chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().expect("a word"))).sum()
}

impl Program {
    fn new(file: &OwnedFd, slot: usize) -> Self {
        Self::sharing(file, slot, &Exports::default())
    }

    fn sharing(file: &OwnedFd, slot: usize, exports: &Exports) -> Self {
        let (near, far) = UnixStream::pair().expect("a stream");
        let exports = exports.clone();
        std::thread::spawn(move || exports.serve(&far));
        let path: PathBuf =
            std::env::current_exe().expect("the test's path").with_file_name("libvm_cuda_fake.so");
        let driver = Driver::open(&path).expect("the driver");
        assert_eq!(driver.start(), 0);
        let pot = Pot::open(file, slot, QUOTA).expect("a pot");
        let session = Session::with_limits(Arc::new(driver), Some(pot), None, None).share_by(near);
        let lane = Lane::new(Arc::new(session));
        let mut program = Self { lane, ticket: 0, context: 0 };
        program.context = program.gives("cuDevicePrimaryCtxRetain", &[1, 0]);
        assert_eq!(program.call("cuCtxSetCurrent", &[program.context]).0, 0);
        program
    }

    fn send(&mut self, call: u16, payload: &[u8]) -> (u32, Vec<u64>) {
        let mut reply = Vec::new();
        let header =
            Header { len: payload.len() as u32, call, asks: true, ticket: self.ticket, ..Header::default() };
        self.ticket += 1;
        let code = self.lane.serve(Taken { header, bulk: None }, payload, &mut reply);
        let words = reply.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().expect("a word")));
        (code.expect("a call").expect("an answer"), words.collect())
    }

    /// Calls with words; what it said, and returned.
    fn call(&mut self, name: &str, words: &[u64]) -> (u32, Vec<u64>) {
        let mut payload = Vec::new();
        words.iter().for_each(|word| put(&mut payload, *word));
        self.send(number(name).expect("a function") as u16, &payload)
    }

    /// What a call that succeeds returns first.
    fn gives(&mut self, name: &str, words: &[u64]) -> u64 {
        let (code, words) = self.call(name, words);
        assert_eq!(code, 0, "{name}");
        words[0]
    }

    fn loads(&mut self, image: &[u8]) -> (u32, Vec<u64>) {
        assert_eq!(self.send(own::IMAGE, image).0, 0);
        // No options, and no logs; the driver's result is before the handle.
        let (code, mut words) = self.call("cuModuleLoadDataEx", &[0, 0, 0]);
        assert_eq!(code, 0);
        let code = words.remove(0) as u32;
        (code, words)
    }
}

/// A way to take so many MiB, and to give it back.
type Way = (&'static str, fn(&mut Program, u64) -> (u32, Vec<u64>), fn(&mut Program, u64));

const WAYS: [Way; 7] = [
    (
        "cuMemAlloc",
        |p, mib| p.call("cuMemAlloc_v2", &[1, mib * MIB]),
        |p, at| {
            assert_eq!(p.call("cuMemFree_v2", &[at]).0, 0);
        },
    ),
    (
        "cuMemAllocPitch",
        |p, mib| p.call("cuMemAllocPitch_v2", &[1, 1, 1024, mib * 1024, 4]),
        |p, at| {
            assert_eq!(p.call("cuMemFree_v2", &[at]).0, 0);
        },
    ),
    (
        "cuMemAllocAsync",
        |p, mib| p.call("cuMemAllocAsync", &[1, mib * MIB, 0]),
        |p, at| {
            assert_eq!(p.call("cuMemFreeAsync", &[at, 0]).0, 0);
            assert_eq!(p.call("cuStreamSynchronize", &[0]).0, 0);
        },
    ),
    (
        "cuMemAllocAsync, cuMemFree",
        |p, mib| p.call("cuMemAllocAsync", &[1, mib * MIB, 0]),
        |p, at| {
            assert_eq!(p.call("cuMemFree_v2", &[at]).0, 0);
        },
    ),
    (
        "cuMemCreate",
        // Pinned memory of device 0.
        |p, mib| p.call("cuMemCreate", &[1, mib * MIB, 1, 0, 1, 1, 0, 0]),
        |p, handle| assert_eq!(p.call("cuMemRelease", &[handle]).0, 0),
    ),
    (
        "cuArrayCreate",
        // Floats, a channel.
        |p, mib| p.call("cuArrayCreate_v2", &[1, 1, 1024, mib * 256, 0x20 | 1 << 32]),
        |p, array| assert_eq!(p.call("cuArrayDestroy", &[array]).0, 0),
    ),
    (
        "cuModuleLoadDataEx",
        |p, mib| {
            let image =
                [&b"vm-cuda-fake\n"[..], &vec![b'\n'; (mib.min(64) * MIB) as usize - 14], &[0]].concat();
            p.loads(&image)
        },
        |p, module| assert_eq!(p.call("cuModuleUnload", &[module]).0, 0),
    ),
];

#[test]
fn no_call_takes_more_than_there_is() {
    let _alone = alone();
    let file = pot(1);
    let mut program = Program::new(&file, 0);
    for (name, take, give) in WAYS {
        for _ in 0..2 {
            let mut taken = Vec::new();
            let refused = loop {
                match take(&mut program, 8) {
                    (0, words) => taken.push(words[0]),
                    (code, _) => break code,
                }
                assert!(held(&file) <= QUOTA, "{name}");
            };
            assert_eq!(refused, OUT_OF_MEMORY, "{name}");
            // Never more; and less by no more than blocks and rows round.
            assert!((6..=8).contains(&taken.len()), "{name}: {}", taken.len());
            let (code, words) = program.call("cuMemGetInfo_v2", &[1, 1]);
            assert_eq!((code, words[0], words[1]), (0, QUOTA - held(&file), QUOTA), "{name}");
            assert_ne!(take(&mut program, u64::MAX / MIB).0, 0, "{name}");
            taken.into_iter().for_each(|what| give(&mut program, what));
            assert_eq!(held(&file), 0, "{name}");
        }
    }
    assert_eq!(program.gives("cuDeviceTotalMem_v2", &[1, 0]), QUOTA);
}

#[test]
fn programs_of_a_pot_have_it_together() {
    let _alone = alone();
    let file = pot(2);
    let (mut one, mut two) = (Program::new(&file, 0), Program::new(&file, 1));
    let at = one.gives("cuMemAlloc_v2", &[1, 40 * MIB]);
    assert_eq!(two.call("cuMemAlloc_v2", &[1, 30 * MIB]).0, OUT_OF_MEMORY);
    let (_, words) = two.call("cuMemGetInfo_v2", &[1, 1]);
    assert_eq!(words[0], QUOTA - held(&file));
    assert_eq!(one.call("cuMemFree_v2", &[at]).0, 0);
    two.gives("cuMemAlloc_v2", &[1, 30 * MIB]);
}

#[test]
fn physical_memory_counts_until_nothing_holds_it() {
    let _alone = alone();
    let file = pot(1);
    let mut program = Program::new(&file, 0);
    let handle = program.gives("cuMemCreate", &[1, 32 * MIB, 1, 0, 1, 1, 0, 0]);
    let at = program.gives("cuMemAddressReserve", &[1, 32 * MIB, 0, 0, 0]);
    assert_eq!(program.call("cuMemMap", &[at, 32 * MIB, 0, handle, 0]).0, 0);
    assert_eq!(program.call("cuMemRelease", &[handle]).0, 0);
    assert_eq!(held(&file), 32 * MIB, "it is mapped");
    let handle = program.gives("cuMemRetainAllocationHandle", &[1, at]);
    assert_eq!(program.call("cuMemUnmap", &[at, 32 * MIB]).0, 0);
    assert_eq!(held(&file), 32 * MIB, "it has a handle");
    assert_eq!(program.call("cuMemRelease", &[handle]).0, 0);
    assert_eq!(held(&file), 0);
}

#[test]
fn memory_that_is_a_file_counts_for_who_exported_it_and_who_has_it() {
    let _alone = alone();
    let file = pot(2);
    let exports = Exports::default();
    let (mut one, mut two) = (Program::sharing(&file, 0, &exports), Program::sharing(&file, 1, &exports));
    let handle = one.gives("cuMemCreate", &[1, 16 * MIB, 1, 0, 1 | 1 << 32, 1, 0, 0]);
    let (code, token) = one.call("cuMemExportToShareableHandle", &[handle]);
    assert_eq!(code, 0);
    assert_eq!(one.call("cuMemRelease", &[handle]).0, 0);
    assert_eq!(held(&file), 16 * MIB, "whoever has the file opens it");
    let opened = two.gives("cuMemImportFromShareableHandle", &token);
    assert_eq!(held(&file), 32 * MIB);
    let again = two.gives("cuMemImportFromShareableHandle", &token);
    assert_eq!(held(&file), 32 * MIB, "it is the same memory");
    let other = one.gives("cuMemCreate", &[1, 24 * MIB, 1, 0, 1 | 1 << 32, 1, 0, 0]);
    let (_, second) = one.call("cuMemExportToShareableHandle", &[other]);
    assert_eq!(two.call("cuMemImportFromShareableHandle", &second).0, OUT_OF_MEMORY);
    for (handle, left) in [(opened, 56 * MIB), (again, 40 * MIB)] {
        assert_eq!(two.call("cuMemRelease", &[handle]).0, 0);
        assert_eq!(held(&file), left);
    }
    let made_up: Vec<u64> = token.iter().map(|word| word ^ 1).collect();
    assert_eq!(two.call("cuMemImportFromShareableHandle", &made_up).0, 1);
}

#[test]
fn small_allocations_count_the_blocks_they_are_in() {
    let _alone = alone();
    let file = pot(1);
    let mut program = Program::new(&file, 0);
    let all: Vec<u64> = (0..1000).map(|_| program.gives("cuMemAlloc_v2", &[1, 512])).collect();
    assert!((1..=2).contains(&(held(&file) / (2 * MIB))), "{}", held(&file));
    for at in &all {
        assert_ne!(held(&file), 0);
        assert_eq!(program.call("cuMemFree_v2", &[*at]).0, 0);
    }
    assert_eq!(held(&file), 0);
}

#[test]
fn a_context_that_is_reset_gives_all_back() {
    let _alone = alone();
    let file = pot(1);
    let mut program = Program::new(&file, 0);
    program.gives("cuMemAlloc_v2", &[1, 10 * MIB]);
    program.gives("cuArrayCreate_v2", &[1, 1, 1024, 1024, 0x20 | 1 << 32]);
    assert!(held(&file) > 10 * MIB);
    assert_eq!(program.call("cuDevicePrimaryCtxReset_v2", &[0]).0, 0);
    assert_eq!(held(&file), 0);
}

#[test]
fn what_a_pool_keeps_counts_until_others_need_it() {
    let _alone = alone();
    let file = pot(1);
    let mut program = Program::new(&file, 0);
    // Pinned memory of device 0.
    let pool = program.gives("cuMemPoolCreate", &[1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    const RELEASE_THRESHOLD: u64 = 4;
    assert_eq!(program.call("cuMemPoolSetAttribute", &[pool, RELEASE_THRESHOLD, 1, u64::MAX]).0, 0);
    let at = program.gives("cuMemAllocFromPoolAsync", &[1, 40 * MIB, pool, 0]);
    assert_eq!(program.call("cuMemFreeAsync", &[at, 0]).0, 0);
    assert_eq!(program.call("cuStreamSynchronize", &[0]).0, 0);
    assert_eq!(held(&file), 40 * MIB);
    let other = program.gives("cuMemAlloc_v2", &[1, 30 * MIB]);
    assert!((30 * MIB..=34 * MIB).contains(&held(&file)), "{}", held(&file));
    // A pool that is destroyed has its memory until that is freed.
    let at = program.gives("cuMemAllocFromPoolAsync", &[1, 10 * MIB, pool, 0]);
    assert_eq!(program.call("cuMemFree_v2", &[other]).0, 0);
    assert_eq!(program.call("cuMemPoolDestroy", &[pool]).0, 0);
    assert_eq!(held(&file), 10 * MIB);
    assert_eq!(program.call("cuMemFreeAsync", &[at, 0]).0, 0);
    assert_eq!(held(&file), 0);
}
