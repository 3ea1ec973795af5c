//! A program's calls only reach memory of the program, over their whole length.
//!
//! Random calls have addresses and lengths at the edges of allocations, of shared host memory and of private memory of this process. A model
//! predicts which succeed: those within one allocation or one window, as with NVIDIA's driver, and those of no bytes. If `Session::reaches` only
//! checks the first byte (`has(at, 1)` instead of `has(at, len)`), the first case fails; for windows, this process crashes.

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vm_bridge::orders;
use vm_bridge::ring::Taken;
use vm_bridge::server::{Driver, Lane, Session, serve};
use vm_bridge::wire::{Header, VERSION, WINDOW, control, put};
use vm_cuda_api::number;

/// Keeps the driver's library built.
use vm_cuda_fake as _;

const OK: u32 = 0;
const INVALID_VALUE: u32 = 1;
const NOT_SUPPORTED: u32 = 801;
const PAGE: u64 = 4096;

static DRIVER: LazyLock<Arc<Driver>> = LazyLock::new(|| {
    let path = std::env::current_exe().expect("the test's path").with_file_name("libvm_cuda_fake.so");
    let driver = Driver::open(&path).expect("the driver");
    assert_eq!(driver.start(), 0);
    Arc::new(driver)
});

/// Memory of this process that is no program's.
static PRIVATE: [u64; 512] = [77; 512];

/// A program with a session.
struct Program {
    /// Its end ends the session.
    _connection: UnixStream,
    lane: Lane,
    ticket: u64,
    context: u64,
    /// Allocations of the device, and shared host memory, each with its length.
    device: Vec<(u64, u64)>,
    host: Vec<(u64, u64)>,
}

impl Program {
    /// One with two windows side by side.
    fn new() -> Self {
        let session = Arc::new(Session::new(DRIVER.clone()));
        let (near, far) = UnixStream::pair().expect("a connection");
        let served = session.clone();
        std::thread::spawn(move || serve(&far, &served));
        let lane = Lane::new(session);
        let (device, host) = (Vec::new(), Vec::new());
        let mut program = Self { _connection: near, lane, ticket: 0, context: 0, device, host };
        program.order([control::HELLO, VERSION.into(), 0, 0], None);
        // A case that failed leaves its memory.
        assert_eq!(program.call("cuDevicePrimaryCtxReset_v2", &[0]).0, OK);
        program.context = program.call("cuDevicePrimaryCtxRetain", &[1, 0]).1[0];
        assert_eq!(program.call("cuCtxSetCurrent", &[program.context]).0, OK);
        let memory = memfd_create("window", MemfdFlags::ALLOW_SEALING).expect("memory");
        ftruncate(&memory, 2 * PAGE).expect("its length");
        static CASES: AtomicU64 = AtomicU64::new(0);
        let start = WINDOW.start + CASES.fetch_add(1, Ordering::Relaxed) * 2 * PAGE;
        for (at, offset) in [(start, 0), (start + PAGE, PAGE)] {
            program.order([control::WINDOW, at, PAGE, offset], Some(&memory));
            assert_eq!(program.call("cuMemHostAlloc", &[at, 3]).0, OK);
            program.host.push((at, PAGE));
        }
        program
    }

    fn order(&self, words: orders::Order, file: Option<&OwnedFd>) {
        let files: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
        assert_eq!(orders::give(&self._connection, words, &[], &files).expect("an answer"), 0);
    }

    fn send(&mut self, name: &str, payload: &[u8]) -> (u32, Vec<u64>) {
        let call = number(name).expect(name) as u16;
        let header =
            Header { len: payload.len() as u32, call, asks: true, is_bulk: false, ticket: self.ticket };
        self.ticket += 1;
        let mut reply = Vec::new();
        let code = self.lane.serve(Taken { header, bulk: None }, payload, &mut reply).expect(name);
        (code.expect("an answer"), reply.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect())
    }

    fn call(&mut self, name: &str, words: &[u64]) -> (u32, Vec<u64>) {
        let mut payload = Vec::new();
        words.iter().for_each(|word| put(&mut payload, *word));
        self.send(name, &payload)
    }

    fn allocate(&mut self, len: u64) {
        let (code, words) = self.call("cuMemAlloc_v2", &[1, len]);
        assert_eq!(code, OK);
        self.device.push((words[0], len));
    }

    fn free(&mut self, at: usize) {
        let (at, _) = self.device.swap_remove(at);
        assert_eq!(self.call("cuMemFree_v2", &[at]).0, OK);
    }

    /// The model: one allocation, or one window, has all of it.
    fn has(&self, at: u64, len: Option<u128>) -> bool {
        let Some(len) = len else { return false };
        let has = |(start, size): &(u64, u64)| at >= *start && u128::from(at - start) + len <= (*size).into();
        len == 0 || self.device.iter().chain(&self.host).any(has)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        while !self.device.is_empty() {
            self.free(0);
        }
        for (at, _) in std::mem::take(&mut self.host) {
            assert_eq!(self.call("cuMemFreeHost", &[at]).0, OK);
        }
    }
}

/// Where an address is.
#[derive(Clone, Copy, Debug)]
struct Near {
    /// Which of all ranges, and whether at its end.
    range: usize,
    end: bool,
    delta: i16,
}

impl Near {
    fn address(self, program: &Program) -> u64 {
        let private = (PRIVATE.as_ptr() as u64, size_of_val(&PRIVATE) as u64);
        let others = [private, (0, 0), (u64::MAX, 0)];
        let all: Vec<_> = program.device.iter().chain(&program.host).chain(&others).copied().collect();
        let (at, len) = all[self.range % all.len()];
        at.wrapping_add(if self.end { len } else { 0 }).wrapping_add_signed(self.delta.into())
    }
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(u64),
    Free(usize),
    /// A function, two addresses, two lengths and a pitch.
    Call(usize, [Near; 2], [u64; 2], u64),
}

const FUNCTIONS: [&str; 20] = [
    "cuMemcpy",
    "cuMemcpy_ptds",
    "cuMemcpyAsync",
    "cuMemcpyAsync_ptsz",
    "cuMemcpyDtoD_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyPeer",
    "cuMemcpyPeerAsync",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpy2D_v2",
    "cuMemcpy3D_v2",
    "cuMemsetD8_v2",
    "cuMemsetD16Async",
    "cuMemsetD32_v2_ptds",
    "cuMemsetD2D8_v2",
    "cuMemsetD2D16_v2",
    "cuMemsetD2D32Async",
    "cuStreamWriteValue32_v2",
    "cuStreamWriteValue64_v2",
];

fn near() -> impl Strategy<Value = Near> {
    let delta = prop_oneof![3 => Just(0), 2 => -70i16..70, 1 => Just(-4096), 1 => any::<i16>()];
    (any::<usize>(), any::<bool>(), delta).prop_map(|(range, end, delta)| Near { range, end, delta })
}

fn length() -> impl Strategy<Value = u64> {
    prop_oneof![
        1 => Just(0),
        4 => 1..130u64,
        3 => (-3..4i64).prop_map(|more| PAGE.wrapping_add_signed(more)),
        1 => 1..3 * PAGE,
        1 => (0..70u64).prop_map(|less| u64::MAX - less),
        1 => (0..64u32).prop_map(|bit| 1 << bit),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => prop_oneof![Just(PAGE), Just(2 * PAGE), 1..PAGE].prop_map(Step::Allocate),
        1 => any::<usize>().prop_map(Step::Free),
        12 => (0..FUNCTIONS.len(), [near(), near()], [length(), length()], prop_oneof![0..200u64, any::<u64>()])
            .prop_map(|(function, at, len, pitch)| Step::Call(function, at, len, pitch)),
    ]
}

/// A copy of rows, as `CUDA_MEMCPY2D` or `CUDA_MEMCPY3D`; the program's host memory is 1, a device's 2.
fn rows(program: &Program, three: bool, at: [u64; 2], [width, height]: [u64; 2], pitch: u64) -> Vec<u64> {
    let (words, next) = if three { (25, 11) } else { (16, 7) };
    let mut copy = vec![0; words + 1];
    for (from, at) in [(0, at[1]), (next, at[0])] {
        let kind = from + if three { 4 } else { 2 };
        let is_host = program.host.iter().any(|(start, len)| (*start..start + len).contains(&at));
        copy[kind] = if is_host { 1 } else { 2 };
        copy[kind + if is_host { 1 } else { 2 }] = at;
        copy[kind + if three { 5 } else { 4 }] = pitch;
    }
    let size = words - if three { 3 } else { 2 };
    copy[size..size + 2].copy_from_slice(&[width, height]);
    if three {
        copy[size + 2] = 1;
    }
    copy
}

/// Bytes that rows reach.
fn span(width: u64, unit: u64, height: u64, pitch: u64) -> Option<u128> {
    let [width, unit, height, pitch] = [width, unit, height, pitch].map(u128::from);
    if width == 0 || height == 0 {
        Some(0)
    } else {
        (height - 1).checked_mul(pitch)?.checked_add(width * unit)
    }
}

/// Makes a call, and checks its answer against the model.
fn check(program: &mut Program, name: &str, near: [Near; 2], [len, height]: [u64; 2], pitch: u64) {
    let [to, from] = near.map(|near| near.address(program));
    let context = program.context;
    let all = |program: &Program, len: Option<u128>| program.has(to, len) && program.has(from, len);
    let unit = if name.contains("D32") {
        4
    } else if name.contains("D16") {
        2
    } else {
        1
    };
    let bytes = Some(u128::from(len) * u128::from(unit));
    let (words, fits) = if name.starts_with("cuMemcpyPeer") {
        (vec![to, context, from, context, len, 0], all(program, bytes))
    } else if name.starts_with("cuMemcpyHtoD") || name.starts_with("cuMemcpyDtoH") {
        // The device's end, a length, no stream, and bytes of the request or of the answer.
        let len = len % 100;
        ([&[to, len, 0, 0][..], &[0; 13]].concat(), program.has(to, Some(len.into())))
    } else if name.starts_with("cuMemcpy2D") || name.starts_with("cuMemcpy3D") {
        let three = name.starts_with("cuMemcpy3D");
        let row = if pitch == 0 { len } else { pitch };
        // The driver refuses rows that overlap, and layers that no address reaches.
        let is_right = (height < 2 || row >= len) && !(three && row.checked_mul(height).is_none());
        let fits = is_right && all(program, span(len, 1, height, row));
        (rows(program, three, [to, from], [len, height], pitch), fits)
    } else if name.starts_with("cuMemcpy") {
        (vec![to, from, len, 0], all(program, bytes))
    } else if name.starts_with("cuMemsetD2D") {
        let is_pitch = pitch.is_multiple_of(unit) && bytes.is_some_and(|row| u128::from(pitch) >= row);
        let fits = to.is_multiple_of(unit)
            && (height < 2 || is_pitch)
            && program.has(to, span(len, unit, height, pitch));
        (vec![to, pitch, 7, len, height, 0], fits)
    } else if name.starts_with("cuMemset") {
        (vec![to, 7, len, 0], to.is_multiple_of(unit) && program.has(to, bytes))
    } else {
        let len = if name.contains("64") { 8 } else { 4 };
        (vec![0, to, 7, 0], program.has(to, Some(len)))
    };
    let count = vm_cuda_api::FUNCTIONS[number(name).expect(name)].parameters.len();
    let by_hand =
        name.contains("HtoD") || name.contains("DtoH") || name.contains("2D_v2") || name.contains("3D");
    let words = if by_hand { &words[..] } else { &words[..count] };
    let (code, _) = program.call(name, words);
    let expect = if fits { OK } else { INVALID_VALUE };
    assert_eq!(code, expect, "{name} {words:x?}, device {:x?}, host {:x?}", program.device, program.host);
    // A copy that reached too far would fail when it runs.
    assert_eq!(program.call("cuCtxSynchronize", &[]).0, OK, "{name} {words:x?}");
}

/// The window and the driver are one test's at a time.
static ALONE: Mutex<()> = Mutex::new(());

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_call_reaches_memory_of_its_program_alone(steps in prop::collection::vec(step(), 1..60)) {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let mut program = Program::new();
        program.allocate(PAGE);
        program.allocate(PAGE);
        for step in steps {
            match step {
                Step::Allocate(len) => program.allocate(len),
                Step::Free(at) if program.device.len() > 1 => program.free(at % program.device.len()),
                Step::Free(_) => {}
                Step::Call(function, near, len, pitch) => check(&mut program, FUNCTIONS[function], near, len, pitch),
            }
        }
        prop_assert!(PRIVATE.iter().all(|word| *word == 77));
    }
}

#[test]
fn addresses_in_structures_are_checked_with_their_lengths() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut program = Program::new();
    program.allocate(PAGE);
    let (at, private) = (program.device[0].0, PRIVATE.as_ptr() as u64);
    // Writes of 8 bytes, of which the driver knows none in batches; then what would be another address.
    for (kind, address, expect) in [
        (5, at + PAGE - 8, NOT_SUPPORTED),
        (5, at + PAGE - 4, INVALID_VALUE),
        (2, at + PAGE - 4, NOT_SUPPORTED),
        (2, private, INVALID_VALUE),
        (1, private, INVALID_VALUE),
        (4, u64::MAX - 3, INVALID_VALUE),
        (8, at, NOT_SUPPORTED),
    ] {
        let words = [0, 1, 1, 0, kind, address, 0, 0, 0, 0];
        assert_eq!(program.call("cuStreamBatchMemOp_v2", &words).0, expect, "{kind} {address:#x}");
    }
    // Textures of bytes, and of rows of four floats.
    let mut texture = |of: &[u64], expect: bool| {
        let mut words = [0; 18 + 13];
        words[..of.len()].copy_from_slice(of);
        let (code, _) = program.call("cuTexObjectCreate", &words);
        assert_eq!(code != INVALID_VALUE, expect, "{of:x?}: {code}");
    };
    let (bytes, floats) = (1 | 1 << 32, 0x20 | 4 << 32);
    texture(&[2, at, bytes, PAGE], true);
    texture(&[2, at, bytes, PAGE + 1], false);
    texture(&[2, private, bytes, 64], false);
    texture(&[2, at, bytes, u64::MAX], false);
    texture(&[3, at, floats, 16, 8, 512], true);
    texture(&[3, at, floats, 16, 17, 256], false);
    texture(&[3, at, floats, 1 << 62, 1, 512], false);
    texture(&[3, at, floats, 16, 3, u64::MAX], false);
    texture(&[3, private, floats, 16, 1, 512], false);
    // An attribute whose value would be an event of the driver's.
    let set = [&[0, 7, 1][..], &[private; 8]].concat();
    assert_eq!(program.call("cuStreamSetAttribute", &set).0, NOT_SUPPORTED);
}
