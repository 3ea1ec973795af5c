//! Streams and events: what runs in which order, what waits, and what captures record.

#![allow(unsafe_code)]

mod common;

use common::*;
use std::sync::atomic::{AtomicU64, Ordering};

const NOT_READY: Code = 600;
const LEGACY: u64 = 1;
const PER_THREAD: u64 = 2;
/// How long a kernel polls at most: the test has then failed by its own deadline.
const LONG: u64 = 50_000_000;

#[test]
fn the_legacy_stream_waits_for_blocking_streams() {
    alone("the_legacy_stream_waits_for_blocking_streams", &[], |driver| {
        driver.start(0);
        let (poll, flag) = (driver.kernel("poll"), driver.get("cuMemHostAlloc", &[4, 0]));
        let opener = driver.get("cuStreamCreate", &[1]);
        let (blocking, free) = (driver.get("cuStreamCreate", &[0]), driver.get("cuStreamCreate", &[1]));
        // The stream that is held up, another that gets work behind, and whether it waits.
        let cases = [
            (blocking, 0, true),
            (blocking, LEGACY, true),
            (0, blocking, true),
            (0, free, false),
            (free, 0, false),
            (blocking, free, false),
            (PER_THREAD, 0, true),
            (0, PER_THREAD, true),
            (blocking, PER_THREAD, false),
        ];
        let event = driver.get("cuEventCreate", &[2]);
        for (held, other, waits) in cases {
            assert_eq!(driver.launch(poll, held, vec![flag, 1, LONG]), 0);
            driver.ok("cuEventRecord", &[event, other]);
            if !waits {
                driver.ok("cuEventSynchronize", &[event]);
            }
            let expected = if waits { NOT_READY } else { 0 };
            assert_eq!(driver.call("cuEventQuery", &[event]), expected, "{held:x} {other:x}");
            driver.ok("cuMemsetD32Async", &[flag, 1, 1, opener]);
            driver.check(&[("cuEventSynchronize", &[event], 0), ("cuCtxSynchronize", &[], 0)]);
            driver.ok("cuMemsetD32Async", &[flag, 0, 1, opener]);
            driver.ok("cuStreamSynchronize", &[opener]);
        }
    });
}

#[test]
fn variants_of_functions_use_the_threads_own_stream() {
    alone("variants_of_functions_use_the_threads_own_stream", &[], |driver| {
        driver.start(0);
        let flag = driver.get("cuMemHostAlloc", &[4, 0]);
        let opener = driver.get("cuStreamCreate", &[1]);
        assert_eq!(driver.launch(driver.kernel("poll"), PER_THREAD, vec![flag, 1, LONG]), 0);
        driver.check(&[
            ("cuStreamQuery_ptsz", &[0], NOT_READY),
            ("cuStreamQuery_ptsz", &[PER_THREAD], NOT_READY),
        ]);
        driver.ok("cuMemsetD32Async", &[flag, 1, 1, opener]);
        driver.check(&[("cuStreamSynchronize_ptsz", &[0], 0), ("cuStreamQuery_ptsz", &[0], 0)]);
    });
}

#[test]
fn events_order_streams() {
    alone("events_order_streams", &[("VM_CUDA_FAKE_DELAY_US", "2000")], |driver| {
        driver.start(0);
        let (first, second) = (driver.get("cuStreamCreate", &[1]), driver.get("cuStreamCreate", &[1]));
        let memory = driver.get("cuMemAlloc_v2", &[8]);
        let (start, event) = (driver.get("cuEventCreate", &[0]), driver.get("cuEventCreate", &[0]));
        let mut ms = 0f32;
        driver.check(&[
            ("cuEventQuery", &[event], 0),
            ("cuEventElapsedTime", &[at(&mut ms), start, event], 400),
            ("cuEventRecord", &[start, first], 0),
        ]);
        for value in 1..=20 {
            driver.ok("cuMemsetD32Async", &[memory, value, 1, first]);
            driver.ok("cuEventRecord", &[event, first]);
            driver.ok("cuStreamWaitEvent", &[second, event, 0]);
            driver.ok("cuMemcpyDtoDAsync_v2", &[memory + 4, memory, 4, second]);
            driver.ok("cuStreamSynchronize", &[second]);
            assert_eq!(driver.words(memory, 2), [value as u32; 2]);
        }
        driver.ok("cuEventElapsedTime", &[at(&mut ms), start, event]);
        assert!(ms > 0.0);
        driver.check(&[
            ("cuStreamDestroy_v2", &[first], 0),
            ("cuStreamDestroy_v2", &[first], 400),
            ("cuStreamQuery", &[first], 400),
            ("cuEventDestroy_v2", &[event], 0),
            ("cuEventQuery", &[event], 400),
        ]);
    });
}

#[test]
fn freeing_legacy_memory_waits_and_unmapping_does_not() {
    alone("freeing_legacy_memory_waits_and_unmapping_does_not", &[], |driver| {
        let context = driver.start(0);
        let (poll, flag) = (driver.kernel("poll"), driver.get("cuMemHostAlloc", &[4, 0]));
        let (held, opener) = (driver.get("cuStreamCreate", &[1]), driver.get("cuStreamCreate", &[1]));
        let legacy = driver.get("cuMemAlloc_v2", &[512]);
        assert_eq!(driver.launch(poll, held, vec![flag, 1, LONG]), 0);
        std::thread::scope(|scope| {
            let freed = scope.spawn(|| {
                driver.ok("cuCtxSetCurrent", &[context]);
                driver.ok("cuMemFree_v2", &[legacy]);
                driver.call("cuStreamQuery", &[held])
            });
            driver.ok("cuMemsetD32Async", &[flag, 1, 1, opener]);
            assert_eq!(freed.join().expect("a thread"), 0, "the stream was done when it was freed");
        });
        // A kernel that polls memory which is unmapped below it.
        let range = driver.get("cuMemAddressReserve", &[MIB2, 0, 0, 0]);
        driver.ok("cuMemMap", &[range, MIB2, 0, driver.create(MIB2, 0, 0), 0]);
        assert_eq!(driver.access(range, MIB2, 0, 3), 0);
        assert_eq!(driver.launch(poll, held, vec![range, 1, LONG]), 0);
        driver.check(&[
            ("cuStreamQuery", &[held], NOT_READY),
            ("cuMemUnmap", &[range, MIB2], 0),
            ("cuStreamSynchronize", &[held], ILLEGAL_ADDRESS),
        ]);
    });
}

static CALLED: AtomicU64 = AtomicU64::new(0);

extern "C" fn function(data: u64) {
    CALLED.store(data, Ordering::SeqCst);
}

static DENIED: AtomicU64 = AtomicU64::new(0);

/// Calls the driver's function that it is told.
extern "C" fn forbidden(count: u64) {
    let function = std::ptr::with_exposed_provenance::<()>(count as usize);
    // SAFETY: the test passes cuDeviceGetCount.
    let function: extern "C" fn(u64) -> i32 = unsafe { std::mem::transmute(function) };
    let mut count = 0u64;
    DENIED.store(function(at(&mut count)) as u64, Ordering::SeqCst);
}

extern "C" fn callback(stream: u64, status: i32, data: u64) {
    CALLED.store(stream + status as u64 + data, Ordering::SeqCst);
}

#[test]
fn functions_of_the_host_run_in_the_streams_order() {
    alone("functions_of_the_host_run_in_the_streams_order", &[("VM_CUDA_FAKE_DELAY_US", "1000")], |driver| {
        driver.start(0);
        let stream = driver.get("cuStreamCreate", &[0]);
        let function = function as extern "C" fn(u64) as usize as u64;
        let callback = callback as extern "C" fn(u64, i32, u64) as usize as u64;
        driver.check(&[
            ("cuLaunchHostFunc", &[stream, function, 77], 0),
            ("cuStreamSynchronize", &[stream], 0),
        ]);
        assert_eq!(CALLED.load(Ordering::SeqCst), 77);
        let forbidden = forbidden as extern "C" fn(u64) as usize as u64;
        driver.ok(
            "cuLaunchHostFunc",
            &[stream, forbidden, driver.symbol("cuDeviceGetCount").expect("a symbol")],
        );
        driver.ok("cuStreamSynchronize", &[stream]);
        assert_eq!(DENIED.load(Ordering::SeqCst), 800, "it may not call the driver");
        driver.ok("cuStreamAddCallback", &[stream, callback, 5, 0]);
        driver.ok("cuStreamSynchronize", &[stream]);
        assert_eq!(CALLED.load(Ordering::SeqCst), stream + 5);
        driver.check(&[
            ("cuStreamAddCallback", &[stream, callback, 5, 1], INVALID_VALUE),
            ("cuLaunchHostFunc", &[stream, 0, 5], INVALID_VALUE),
        ]);
    });
}

#[test]
fn kernels_compute() {
    alone("kernels_compute", &[], |driver| {
        driver.start(0);
        let memory = driver.get("cuMemAlloc_v2", &[4096]);
        let (a, b, c) = (memory, memory + 1024, memory + 2048);
        let cases: [(&str, Vec<u64>, u64, u32); 7] = [
            ("fill", vec![a, 100, 3], a + 396, 3),
            ("fill", vec![a, 100, 3], a + 400, 0),
            ("fill", vec![b, 100, u64::from(u32::MAX)], b, u32::MAX),
            ("add", vec![c, a, b, 100], c + 396, 2),
            ("copy", vec![c + 400, c, 100], c + 796, 2),
            ("sum", vec![a, c, 200], a, 400),
            ("store", vec![a, 9], a, 9),
        ];
        driver.ok("cuMemsetD8_v2", &[memory, 0, 4096]);
        for (name, parameters, from, expected) in cases {
            assert_eq!(driver.launch(driver.kernel(name), 0, parameters), 0, "{name}");
            assert_eq!(driver.words(from, 1), [expected], "{name}");
        }
        let kernel = driver.kernel("store");
        let (mut to, mut value) = (a, 12u64);
        let mut pointers = [at(&mut to), at(&mut value)];
        // cuLaunchKernelEx: grid and block, shared memory, stream, attributes.
        let mut config = [1u64 | 1 << 32, 1 | 1 << 32, 1 | 1 << 32, 0, 0, 0, 0];
        driver.ok("cuLaunchKernelEx", &[at(&mut config), kernel, at(&mut pointers), 0]);
        assert_eq!(driver.words(a, 1), [12]);
        let (mut name, mut image) = (*b"none\0", *b"\x7fELF\0");
        let mut none = 0u64;
        driver.check(&[
            (
                "cuModuleGetFunction",
                &[at(&mut none), driver.get("cuFuncGetModule", &[kernel]), at(&mut name)],
                500,
            ),
            ("cuModuleLoadData", &[at(&mut none), at(&mut image)], 200),
            ("cuLaunchKernel", &[kernel, 0, 1, 1, 1, 1, 1, 0, 0, at(&mut pointers)], INVALID_VALUE),
            ("cuLaunchKernel", &[kernel, 1, 1, 1, 1025, 1, 1, 0, 0, at(&mut pointers)], INVALID_VALUE),
            ("cuLaunchKernel", &[99, 1, 1, 1, 1, 1, 1, 0, 0, at(&mut pointers)], 400),
        ]);
    });
}

#[test]
fn captures_record_and_graphs_replay() {
    alone("captures_record_and_graphs_replay", &[], |driver| {
        driver.start(0);
        let (stream, side) = (driver.get("cuStreamCreate", &[1]), driver.get("cuStreamCreate", &[1]));
        let memory = driver.get("cuMemAlloc_v2", &[1024]);
        let (fork, join) = (driver.get("cuEventCreate", &[2]), driver.get("cuEventCreate", &[2]));
        let (mut status, mut graph) = (0u64, 0u64);
        let (status_at, graph_at) = (at(&mut status), at(&mut graph));
        driver.ok("cuMemsetD32_v2", &[memory, 0, 256]);
        let add = driver.kernel("add");
        driver.ok("cuStreamBeginCapture_v2", &[stream, 0]);
        driver.ok("cuMemsetD32Async", &[memory + 4, 1, 1, stream]);
        driver.check(&[
            ("cuEventRecord", &[fork, stream], 0),
            ("cuStreamWaitEvent", &[side, fork, 0], 0),
            ("cuStreamIsCapturing", &[side, status_at], 0),
        ]);
        assert_eq!(status, 1);
        assert_eq!(driver.launch(add, side, vec![memory, memory, memory + 4, 1]), 0);
        driver.check(&[
            ("cuEventRecord", &[join, side], 0),
            ("cuStreamWaitEvent", &[stream, join, 0], 0),
            ("cuStreamEndCapture", &[stream, graph_at], 0),
        ]);
        assert_eq!(driver.words(memory, 1), [0], "nothing ran");
        let exec = driver.get("cuGraphInstantiateWithFlags", &[graph, 0]);
        driver.check(&[("cuGraphDestroy", &[graph], 0), ("cuGraphDestroy", &[graph], INVALID_VALUE)]);
        for count in 1..=3 {
            driver.check(&[("cuGraphLaunch", &[exec, stream], 0), ("cuStreamSynchronize", &[stream], 0)]);
            assert_eq!(driver.words(memory, 1), [count]);
        }
        // A capture ends with its stream, or its context.
        driver.check(&[("cuStreamBeginCapture_v2", &[side, 0], 0), ("cuStreamDestroy_v2", &[side], 0)]);
        driver.get("cuMemAlloc_v2", &[512]);
        driver
            .check(&[("cuStreamBeginCapture_v2", &[stream, 0], 0), ("cuDevicePrimaryCtxReset_v2", &[0], 0)]);
        driver.get("cuMemAlloc_v2", &[512]);
    });
}

#[test]
fn captures_forbid_what_is_unsafe() {
    alike("captures_forbid_what_is_unsafe", &[], |driver| {
        driver.start(0);
        let (stream, side) = (driver.get("cuStreamCreate", &[1]), driver.get("cuStreamCreate", &[1]));
        let memory = driver.get("cuMemAlloc_v2", &[1024]);
        let (event, fork) = (driver.get("cuEventCreate", &[2]), driver.get("cuEventCreate", &[2]));
        let (mut graph, mut none) = (0u64, 0u64);
        let (graph_at, none) = (at(&mut graph), at(&mut none));
        // What a capture does not allow invalidates it.
        let blocking = driver.get("cuStreamCreate", &[0]);
        let cases: &[(&str, &[u64], Code)] = &[
            ("cuMemAlloc_v2", &[none, 512], 900),
            ("cuMemFree_v2", &[memory], 900),
            ("cuStreamSynchronize", &[blocking], 900),
            ("cuCtxSynchronize", &[], 900),
            ("cuEventQuery", &[event], 900),
            ("cuMemsetD32Async", &[memory, 0, 1, 0], 906),
        ];
        for case in cases {
            driver.ok("cuStreamBeginCapture_v2", &[blocking, 0]);
            driver.check(&[*case, ("cuStreamEndCapture", &[blocking, graph_at], 901)]);
        }
        // A relaxed capture allows allocations, and so does a thread that is relaxed.
        driver.check(&[
            ("cuStreamBeginCapture_v2", &[stream, 2], 0),
            ("cuMemAlloc_v2", &[none, 512], 0),
            ("cuStreamEndCapture", &[stream, graph_at], 0),
            ("cuStreamBeginCapture_v2", &[stream, 0], 0),
        ]);
        let mut mode = 2i32;
        driver.ok("cuThreadExchangeStreamCaptureMode", &[at(&mut mode)]);
        driver.ok("cuMemAlloc_v2", &[none, 512]);
        driver.ok("cuThreadExchangeStreamCaptureMode", &[at(&mut mode)]);
        assert_eq!(mode, 2);
        driver.check(&[
            ("cuEventRecord", &[fork, stream], 0),
            ("cuStreamWaitEvent", &[side, fork, 0], 0),
            ("cuMemsetD32Async", &[memory, 0, 1, side], 0),
            ("cuStreamEndCapture", &[stream, graph_at], 904),
            ("cuStreamEndCapture", &[stream, graph_at], INVALID_VALUE),
            ("cuStreamBeginCapture_v2", &[0, 0], 900),
            ("cuEventRecord", &[event, side], 0),
        ]);
    });
}

#[test]
fn rows_of_graph_nodes_are_bounded_by_memory() {
    alone("rows_of_graph_nodes_are_bounded_by_memory", &[], |driver| {
        let context = driver.start(0);
        let memory = driver.get("cuMemAlloc_v2", &[1 << 20]);
        let graph = driver.get("cuGraphCreate", &[0]);
        let (mut node, rows) = (0u64, 1u64 << 40);
        // A destination, a pitch, a value with the bytes of an element, a width and a height.
        let mut fill = |pitch: u64, width: u64, height: u64| {
            let mut parameters = [memory, pitch, 7 | 1 << 32, width, height];
            driver.call(
                "cuGraphAddMemsetNode",
                &[at(&mut node), graph, 0, 0, at(parameters.as_mut_slice()), context],
            )
        };
        assert_eq!([fill(0, 16, rows), fill(8, 16, 2), fill(16, 0, rows)], [INVALID_VALUE; 3]);
        assert_eq!(fill(2, 1, 1 << 19), 0);
        // A copy of nothing, however many rows it has.
        let end = |device| [0, 0, 0, 0, 2, 0, device, 0, 0, 0, 0];
        let mut copy = [&end(memory)[..], &end(memory + (1 << 19)), &[0, rows, 1]].concat();
        let mut node = 0u64;
        driver.ok("cuGraphAddMemcpyNode", &[at(&mut node), graph, 0, 0, at(copy.as_mut_slice()), context]);
        let executable = driver.get("cuGraphInstantiateWithFlags", &[graph, 0]);
        driver.ok("cuGraphLaunch", &[executable, 0]);
        assert_eq!(driver.synchronize(), 0);
        assert_eq!(driver.words(memory, 2), [0x0007_0007; 2]);
        assert_eq!(driver.words(memory + (1 << 20) - 4, 1), [0x0007_0007]);
    });
}
