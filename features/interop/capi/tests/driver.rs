//! The library on a GPU, by a driver that is none: what it asks the driver, in which order, and what becomes of the driver's errors.
//!
//! Each test is a process whose libcuda.so.1 is made of `driver.c`.
#![allow(unsafe_code)]

mod common;
#[path = "common/driver.rs"]
mod fake;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use fake::{Driver, OnDriver, last};
use vmkernels::checks::{ARENA, ARENAS, Caller, SHAPES, refused, run};
use vmkernels::sys::by_name::Entry;
use vmkernels::sys::{vmk_device, vmk_device_count, vmk_use};

/// Runs a test in a process with that driver; true in that process.
fn with_driver(test: &str, settings: &[(&str, &str)]) -> bool {
    let Some(mut process) = fake::process() else { return true };
    common::run_command(process.args(["--exact", test, "--nocapture"]).envs(settings.iter().copied()));
    false
}

#[test]
fn what_it_is_asked() {
    if !with_driver("what_it_is_asked", &[]) {
        return;
    }
    let driver = Driver::open();
    let context = driver.context();
    let mut caller = OnDriver::new(&driver);
    assert_eq!(vmk_device_count(), 1);
    let (done, asked) = driver.asked(|| caller.silu());
    assert_eq!(done.0, 0, "{}", done.1);
    let at = |name: &str| {
        asked.iter().position(|call| call == name).unwrap_or_else(|| panic!("{name}: {asked:?}"))
    };
    let order = [
        "cuPointerGetAttributes",
        "cuThreadExchangeStreamCaptureMode",
        "cuModuleLoadDataEx",
        "cuModuleGetFunction",
        "cuLaunchKernel(1)",
    ];
    assert!(order.map(at).is_sorted(), "{asked:?}");
    // From then on, where it is called, about each pointer, and the launch.
    let place = ["cuCtxGetCurrent", "cuCtxGetId"];
    for _ in 0..3 {
        let (_, asked) = driver.asked(|| caller.silu());
        let about = ["cuPointerGetAttributes", "cuPointerGetAttributes", "cuLaunchKernel(1)"];
        assert_eq!(asked, [&place[..], &about].concat());
    }
    // Tensor maps are made once for the same memory.
    let (first, again) = (
        driver.asked(|| caller.function("cuda_gemm_bf16")).1,
        driver.asked(|| caller.function("cuda_gemm_bf16")).1,
    );
    let maps = |asked: &[String]| asked.iter().filter(|call| *call == "cuTensorMapEncodeTiled").count();
    assert!(maps(&first) >= 2 && maps(&again) == 0, "{first:?} {again:?}");
    // Without elements nothing is asked but where.
    let (status, asked) = driver.asked(|| Caller::call(&mut caller, "cuda_silu", &[0, 0, 0, 0]).unwrap());
    assert_eq!((status, asked), (0, place.map(str::to_owned).to_vec()));
    // A thread without a context calls the first device's primary one, and has none behind.
    driver.set_current(0);
    let (done, asked) = driver.asked(|| caller.silu());
    assert_eq!(done.0, -2, "memory and stream are of another context: {}", done.1);
    let mut primary = OnDriver { arenas: Vec::new(), stream: 0 };
    primary.arenas = (0..ARENAS).map(|_| driver.allocate(ARENA)).collect();
    let (done, again) = driver.asked(|| primary.silu());
    assert_eq!(done.0, 0, "{}", done.1);
    assert!(asked.contains(&"cuDevicePrimaryCtxRetain".into()), "{asked:?}");
    let count = |name: &str| again.iter().filter(|call| *call == name).count();
    assert_eq!([count("cuCtxPushCurrent"), count("cuCtxPopCurrent")], [1; 2], "{again:?}");
    driver.set_current(context);
}

#[test]
fn what_becomes_of_its_errors() {
    if !with_driver("what_becomes_of_its_errors", &[]) {
        return;
    }
    let driver = Driver::open();
    driver.context();
    let mut caller = OnDriver::new(&driver);
    let check = |caller: &mut OnDriver,
                 function: &str,
                 fails: &str,
                 code: i32,
                 after: i32,
                 status: i32,
                 text: &str| {
        driver.fail(fails, code, after);
        let (found, said) = caller.function(function);
        driver.fail("", 0, 0);
        assert!(
            found == status
                && said.contains(text)
                && said.contains(function.trim_end_matches("_ws").trim_end_matches("_bf16")),
            "{fails} {code}: {found}: {said}"
        );
        // Nothing is spoilt by it.
        let (found, said) = caller.function(function);
        assert_eq!(found, 0, "{function} behind {fails} {code}: {said}");
    };
    // Before anything is loaded.
    check(
        &mut caller,
        "cuda_silu",
        "cuModuleLoadDataEx",
        2,
        0,
        -4,
        "cuModuleLoadDataEx failed: CUDA_ERROR_OUT_OF_MEMORY",
    );
    check(&mut caller, "cuda_add", "cuModuleLoadDataEx", 218, 0, -3, "cuModuleLoadDataEx");
    check(&mut caller, "cuda_mul", "cuModuleGetFunction", 500, 0, -3, "cuModuleGetFunction");
    check(&mut caller, "cuda_gemm_bf16", "cuTensorMapEncodeTiled", 1, 0, -3, "cuTensorMapEncodeTiled");
    check(
        &mut caller,
        "cuda_softmax",
        "cuThreadExchangeStreamCaptureMode",
        999,
        0,
        -3,
        "cuThreadExchangeStreamCaptureMode",
    );
    for (code, status, text) in [
        (1, -3, "cuLaunchKernel failed: CUDA_ERROR (1)"),
        (2, -4, "CUDA_ERROR_OUT_OF_MEMORY"),
        (400, -2, "stream is 0x"),
        (700, -3, "CUDA_ERROR (700)"),
        (719, -3, "cuLaunchKernel"),
        (901, -3, "cuLaunchKernel"),
    ] {
        check(&mut caller, "cuda_silu", "cuLaunchKernel", code, 0, status, text);
        // The second of several launches.
        check(&mut caller, "cuda_grad_clip", "cuLaunchKernel", code, 1, status, text);
    }
    check(&mut caller, "cuda_silu", "cuPointerGetAttributes", 700, 1, -3, "cuPointerGetAttributes");
    check(&mut caller, "cuda_silu", "cuCtxGetId", 709, 0, -3, "cuCtxGetId");
    check(&mut caller, "cuda_silu", "cuCtxGetCurrent", 3, 0, -3, "cuCtxGetCurrent");
    let lost = driver.context();
    let mut other = OnDriver::new(&driver);
    assert_eq!(other.silu().0, 0);
    // SAFETY: it is a context.
    unsafe { driver.function::<unsafe extern "C" fn(u64) -> i32>("cuCtxDestroy_v2")(lost) };
    let (status, said) = other.silu();
    assert!(status == -3 && said.contains("cuCtxGetId"), "{status}: {said}");
}

#[test]
fn no_driver_works() {
    if !with_driver("no_driver_works", &[]) {
        return;
    }
    let driver = Driver::open();
    driver.fail("cuInit", 100, 0);
    let status = vmk_use(vmk_device::VMK_GPU as i32) as i32;
    assert!(
        status == -1 && last().contains("vmk_use: ") && last().contains("cuInit"),
        "{status}: {}",
        last()
    );
    assert_eq!((vmk_device_count(), vmk_use(vmk_device::VMK_AUTO as i32) as i32), (0, 0));
    assert_eq!(vmkernels::sys::vmk_device_in_use(), vmk_device::VMK_CPU as i32);
}

#[test]
fn every_function_is_launched_and_refuses() {
    if !with_driver("every_function_is_launched_and_refuses", &[]) {
        return;
    }
    let driver = Driver::open();
    driver.context();
    let foreign = driver.allocate(ARENA);
    let own = driver.context();
    let mut caller = OnDriver::new(&driver);
    let freed = driver.allocate(ARENA);
    driver.free(freed);
    let pageable = vec![0u8; ARENA + 256];
    let host = (pageable.as_ptr().expose_provenance() as u64).next_multiple_of(256);
    let addresses =
        [("memory of the host", host), ("freed memory", freed), ("memory of another context", foreign)];
    let (mut launched, mut refusing) = (BTreeSet::new(), BTreeSet::new());
    for entry in Entry::all() {
        let (started, asked) = driver.asked(|| run(&mut caller, entry, SHAPES[1]).unwrap());
        assert_eq!(
            started.is_some(),
            asked.iter().any(|call| call.starts_with("cuLaunchKernel(")),
            "{}: {asked:?}",
            entry.name
        );
        launched.extend(started.map(|_| entry.function()));
        if refused(&mut caller, entry, &addresses).unwrap() > 0 {
            refusing.insert(entry.function());
        }
    }
    assert_eq!((launched.len(), refusing.len()), (36, 36));
    driver.set_current(own);
}

#[test]
fn captures_and_threads() {
    if !with_driver("captures_and_threads", &[]) {
        return;
    }
    let driver = Driver::open();
    let context = driver.context();
    let mut caller = OnDriver::new(&driver);
    // The first call of a kernel, in a capture: to load it must not spoil that.
    driver.capture(caller.stream, true);
    assert_eq!(caller.silu(), (0, String::new()));
    driver.capture(caller.stream, false);
    let before = driver.loaded();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let driver = Driver::open();
                driver.set_current(context);
                let mut caller = OnDriver::new(&driver);
                for _ in 0..200 {
                    for name in ["cuda_silu", "cuda_softmax_bf16", "cuda_gemm"] {
                        assert_eq!(caller.function(name).0, 0, "{}", last());
                    }
                }
            });
        }
    });
    assert_eq!(driver.loaded() - before, 2, "a kernel was loaded more than once, or not at all");
    // Another context has kernels of its own.
    driver.context();
    assert_eq!(OnDriver::new(&driver).silu().0, 0);
    assert_eq!(driver.loaded() - before, 3);
}

#[test]
fn a_kernel_that_is_compiled_as_the_process_ends() {
    if !with_driver("a_kernel_that_is_compiled_as_the_process_ends", &[("FAKE_COMPILER", "1")]) {
        return;
    }
    let driver = Driver::open();
    let context = driver.context();
    std::thread::spawn(move || {
        let driver = Driver::open();
        driver.set_current(context);
        OnDriver::new(&driver).silu()
    });
    let compiling = driver.function::<unsafe extern "C" fn() -> i32>("fake_compiling");
    let deadline = Instant::now() + Duration::from_secs(60);
    // SAFETY: it reads a number of the driver's.
    while unsafe { compiling() } == 0 {
        assert!(Instant::now() < deadline, "nothing is compiled");
        std::thread::sleep(Duration::from_millis(1));
    }
    // The compiler aborts if its own handler comes before that which waits for it.
    std::process::exit(0);
}
