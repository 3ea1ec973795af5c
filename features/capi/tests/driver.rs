//! The library on a GPU, by a driver that is none: what it asks the driver, in which order, and what becomes of the driver's errors.
//!
//! Each test is a process whose libcuda.so.1 is made of `driver.c`.
#![allow(unsafe_code, clippy::multiple_unsafe_ops_per_block)]

mod common;

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::process::Command;
use std::ptr;
use std::sync::OnceLock;

use libloading::{Library, Symbol};
use vmkernels::checks::{ARENA, ARENAS, Caller, SHAPES, refused, run, words};
use vmkernels::sys::by_name::{Entry, call, place};
use vmkernels::sys::{vmk_device, vmk_device_count, vmk_last_error, vmk_use};

/// Runs a test in a process with that driver; true in that process.
fn with_driver(test: &str, settings: &[(&str, &str)]) -> bool {
    const INSIDE: &str = "VMK_TEST_WITH_DRIVER";
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/driver.c");
        let library = folder.path().join("libcuda.so.1");
        let flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-o"];
        common::run_command(Command::new("gcc").args(flags).arg(library).arg(source).arg("-lpthread"));
        folder
    });
    let mut process = Command::new(std::env::current_exe().unwrap());
    process.args(["--exact", test, "--nocapture"]).env(INSIDE, "1").env("LD_LIBRARY_PATH", folder.path());
    common::run_command(process.env_remove("VMK_DEVICE").envs(settings.iter().copied()));
    false
}

/// The driver, as who calls the library uses it too.
struct Driver(Library);

impl Driver {
    fn open() -> Driver {
        // SAFETY: it is that of `driver.c`.
        Driver(unsafe { Library::new("libcuda.so.1") }.unwrap())
    }

    fn function<F>(&self, name: &str) -> Symbol<'_, F> {
        // SAFETY: callers name the type that `driver.c` has.
        unsafe { self.0.get(name.as_bytes()) }.unwrap()
    }

    fn context(&self) -> u64 {
        let mut context = 0u64;
        let create = self.function::<unsafe extern "C" fn(*mut u64, u32, i32) -> i32>("cuCtxCreate_v2");
        // SAFETY: the pointer is to a local.
        assert_eq!(unsafe { create(&raw mut context, 0, 0) }, 0);
        context
    }

    fn set_current(&self, context: u64) {
        let set = self.function::<unsafe extern "C" fn(u64) -> i32>("cuCtxSetCurrent");
        // SAFETY: it is a context, or none.
        assert_eq!(unsafe { set(context) }, 0);
    }

    fn stream(&self) -> u64 {
        let mut stream = 0u64;
        let create = self.function::<unsafe extern "C" fn(*mut u64, u32) -> i32>("cuStreamCreate");
        // SAFETY: the pointer is to a local.
        assert_eq!(unsafe { create(&raw mut stream, 1) }, 0);
        stream
    }

    fn allocate(&self, bytes: usize) -> u64 {
        let mut address = 0u64;
        let allocate = self.function::<unsafe extern "C" fn(*mut u64, usize) -> i32>("cuMemAlloc_v2");
        // SAFETY: the pointer is to a local.
        assert_eq!(unsafe { allocate(&raw mut address, bytes) }, 0);
        address
    }

    fn free(&self, address: u64) {
        // SAFETY: it was allocated.
        assert_eq!(unsafe { self.function::<unsafe extern "C" fn(u64) -> i32>("cuMemFree_v2")(address) }, 0);
    }

    fn capture(&self, stream: u64, begin: bool) {
        let mut graph = 0u64;
        // SAFETY: the stream is live, the pointer is to a local.
        let status = unsafe {
            match begin {
                true => self.function::<unsafe extern "C" fn(u64, u32) -> i32>("cuStreamBeginCapture_v2")(
                    stream, 0,
                ),
                false => self.function::<unsafe extern "C" fn(u64, *mut u64) -> i32>("cuStreamEndCapture")(
                    stream,
                    &raw mut graph,
                ),
            }
        };
        assert_eq!(status, 0);
    }

    /// Lets a call fail, the one behind so many.
    fn fail(&self, name: &str, status: i32, after: i32) {
        let name = CString::new(name).unwrap();
        // SAFETY: the string ends with a zero byte.
        unsafe {
            self.function::<unsafe extern "C" fn(*const c_char, i32, i32)>("fake_fail")(
                name.as_ptr(),
                status,
                after,
            )
        };
    }

    /// What `f` asks of it, by the names of calls.
    fn asked<R>(&self, f: impl FnOnce() -> R) -> (R, Vec<String>) {
        let note = self.function::<unsafe extern "C" fn(i32)>("fake_note");
        // SAFETY: it takes any number.
        unsafe { note(1) };
        let result = f();
        // SAFETY: it is a string until it notes again.
        let noted = unsafe {
            CStr::from_ptr(self.function::<unsafe extern "C" fn() -> *const c_char>("fake_noted")())
        };
        let noted = noted.to_str().unwrap().split_whitespace().map(str::to_owned).collect();
        // SAFETY: as above.
        unsafe { note(0) };
        (result, noted)
    }

    fn loaded(&self) -> u64 {
        // SAFETY: it has no parameters.
        unsafe { self.function::<unsafe extern "C" fn() -> u64>("fake_loaded")() }
    }
}

/// Who calls with the driver's memory, in the thread's context.
struct OnDriver {
    arenas: Vec<u64>,
    stream: u64,
}

impl OnDriver {
    fn new(driver: &Driver) -> OnDriver {
        assert_eq!(vmk_use(vmk_device::VMK_GPU as i32) as i32, 0, "{}", last());
        OnDriver { arenas: (0..ARENAS).map(|_| driver.allocate(ARENA)).collect(), stream: driver.stream() }
    }

    /// Calls `cuda_silu` of 1001 elements.
    fn silu(&mut self) -> (i32, String) {
        self.function("cuda_silu")
    }

    fn function(&mut self, name: &str) -> (i32, String) {
        let entry = Entry::all().find(|entry| entry.name == name).unwrap();
        let given = words(self, entry, SHAPES[1]).unwrap();
        let status = Caller::call(self, name, &given).unwrap();
        (status, self.last())
    }
}

fn last() -> String {
    // SAFETY: it is a string until the thread's next call.
    unsafe { CStr::from_ptr(vmk_last_error()) }.to_string_lossy().into_owned()
}

fn pointer<T>(address: u64) -> *mut T {
    ptr::with_exposed_provenance_mut(address as usize)
}

impl Caller for OnDriver {
    fn call(&mut self, name: &str, words: &[u64]) -> Result<i32, String> {
        let function: *const c_void = place(name).unwrap();
        // SAFETY: the function is that of the name; the driver computes nothing.
        Ok(unsafe { call(name, function, words) }.unwrap())
    }

    fn last(&mut self) -> String {
        last()
    }

    fn arena(&self, number: usize) -> u64 {
        self.arenas[number]
    }

    fn write(&mut self, number: usize, bytes: &[u8]) -> Result<(), String> {
        // SAFETY: an arena is memory of the process, of as many bytes at least.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), pointer(self.arenas[number]), bytes.len()) };
        Ok(())
    }

    fn read(&mut self, number: usize, bytes: &mut [u8]) -> Result<(), String> {
        // SAFETY: as above.
        unsafe { ptr::copy_nonoverlapping(pointer(self.arenas[number]), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn stream(&self) -> u64 {
        self.stream
    }
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
    let about = ["cuCtxGetCurrent", "cuPointerGetAttributes"];
    let launch = ["cuCtxGetCurrent", "cuLaunchKernel(1)"];
    let essential = |asked: &[String]| -> Vec<String> {
        asked.iter().filter(|call| *call != "cuCtxGetCurrent" && *call != "cuCtxGetDevice").cloned().collect()
    };
    for _ in 0..3 {
        let (_, asked) = driver.asked(|| caller.silu());
        let wanted = [&place[..], &about, &about, &launch].concat();
        assert_eq!(
            essential(&asked),
            essential(&wanted.iter().map(ToString::to_string).collect::<Vec<_>>()),
            "{asked:?}"
        );
        assert!(asked.len() <= 8, "{asked:?}");
    }
    // Tensor maps are made once for the same memory.
    let (first, again) = (
        driver.asked(|| caller.function("cuda_gemm_bf16")).1,
        driver.asked(|| caller.function("cuda_gemm_bf16")).1,
    );
    let maps = |asked: &[String]| asked.iter().filter(|call| *call == "cuTensorMapEncodeTiled").count();
    assert!(maps(&first) >= 2 && maps(&again) == 0, "{first:?} {again:?}");
    // Without elements nothing is asked but where.
    let (status, asked) = driver.asked(|| caller.call("cuda_silu", &[0, 0, 0, 0]).unwrap());
    assert_eq!((status, essential(&asked)), (0, place[1..].iter().map(ToString::to_string).collect()));
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
    assert!(
        count("cuCtxPushCurrent") > 0 && count("cuCtxPushCurrent") == count("cuCtxPopCurrent"),
        "{again:?}"
    );
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
