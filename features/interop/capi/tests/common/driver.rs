//! A driver that is none, of `driver.c`, and who calls the library with its memory.
#![allow(dead_code, unsafe_code, clippy::multiple_unsafe_ops_per_block)]

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::process::Command;
use std::ptr;
use std::sync::OnceLock;

use libloading::{Library, Symbol};
use vmkernels::checks::{ARENA, ARENAS, Caller, SHAPES, words};
use vmkernels::sys::by_name::{Entry, call, place};
use vmkernels::sys::{vmk_device, vmk_last_error, vmk_use};

/// The program that calls it, again, in a process with that driver; none in that process.
pub(crate) fn process() -> Option<Command> {
    const INSIDE: &str = "VMK_TEST_WITH_DRIVER";
    if std::env::var_os(INSIDE).is_some() {
        return None;
    }
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        for (source, library) in
            [("driver.c", "libcuda.so.1"), ("compiler.c", "libnvidia-ptxjitcompiler.so.1")]
        {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(source);
            let library = folder.path().join(library);
            let flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-o"];
            let mut gcc = Command::new("gcc");
            crate::common::run_command(gcc.args(flags).arg(library).arg(source).args(["-lpthread", "-ldl"]));
        }
        folder
    });
    let mut process = Command::new(std::env::current_exe().unwrap());
    process.env(INSIDE, "1").env("LD_LIBRARY_PATH", folder.path()).env_remove("VMK_DEVICE");
    Some(process)
}

/// The driver, as who calls the library uses it too.
pub(crate) struct Driver(Library);

impl Driver {
    pub(crate) fn open() -> Driver {
        // SAFETY: it is that of `driver.c`.
        Driver(unsafe { Library::new("libcuda.so.1") }.unwrap())
    }

    pub(crate) fn function<F>(&self, name: &str) -> Symbol<'_, F> {
        // SAFETY: callers name the type that `driver.c` has.
        unsafe { self.0.get(name.as_bytes()) }.unwrap()
    }

    pub(crate) fn context(&self) -> u64 {
        let mut context = 0u64;
        let create = self.function::<unsafe extern "C" fn(*mut u64, u32, i32) -> i32>("cuCtxCreate_v2");
        // SAFETY: the pointer is to a local.
        assert_eq!(unsafe { create(&raw mut context, 0, 0) }, 0);
        context
    }

    pub(crate) fn set_current(&self, context: u64) {
        let set = self.function::<unsafe extern "C" fn(u64) -> i32>("cuCtxSetCurrent");
        // SAFETY: it is a context, or none.
        assert_eq!(unsafe { set(context) }, 0);
    }

    pub(crate) fn stream(&self) -> u64 {
        let mut stream = 0u64;
        let create = self.function::<unsafe extern "C" fn(*mut u64, u32) -> i32>("cuStreamCreate");
        // SAFETY: the pointer is to a local.
        assert_eq!(unsafe { create(&raw mut stream, 1) }, 0);
        stream
    }

    pub(crate) fn allocate(&self, bytes: usize) -> u64 {
        let mut address = 0u64;
        let allocate = self.function::<unsafe extern "C" fn(*mut u64, usize) -> i32>("cuMemAlloc_v2");
        // SAFETY: the pointer is to a local.
        assert_eq!(unsafe { allocate(&raw mut address, bytes) }, 0);
        address
    }

    pub(crate) fn free(&self, address: u64) {
        // SAFETY: it was allocated.
        assert_eq!(unsafe { self.function::<unsafe extern "C" fn(u64) -> i32>("cuMemFree_v2")(address) }, 0);
    }

    pub(crate) fn capture(&self, stream: u64, begin: bool) {
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
    pub(crate) fn fail(&self, name: &str, status: i32, after: i32) {
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
    pub(crate) fn asked<R>(&self, f: impl FnOnce() -> R) -> (R, Vec<String>) {
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

    pub(crate) fn loaded(&self) -> u64 {
        // SAFETY: it has no parameters.
        unsafe { self.function::<unsafe extern "C" fn() -> u64>("fake_loaded")() }
    }
}

/// Who calls with the driver's memory, in the thread's context.
pub(crate) struct OnDriver {
    pub(crate) arenas: Vec<u64>,
    pub(crate) stream: u64,
}

impl OnDriver {
    pub(crate) fn new(driver: &Driver) -> OnDriver {
        assert_eq!(vmk_use(vmk_device::VMK_GPU as i32) as i32, 0, "{}", last());
        OnDriver { arenas: (0..ARENAS).map(|_| driver.allocate(ARENA)).collect(), stream: driver.stream() }
    }

    /// Calls `cuda_silu` of 1001 elements.
    pub(crate) fn silu(&mut self) -> (i32, String) {
        self.function("cuda_silu")
    }

    pub(crate) fn function(&mut self, name: &str) -> (i32, String) {
        let entry = Entry::all().find(|entry| entry.name == name).unwrap();
        let given = words(self, entry, SHAPES[1]).unwrap();
        let status = Caller::call(self, name, &given).unwrap();
        (status, self.last())
    }
}

pub(crate) fn last() -> String {
    // SAFETY: it is a string until the thread's next call.
    unsafe { CStr::from_ptr(vmk_last_error()) }.to_string_lossy().into_owned()
}

pub(crate) fn pointer<T>(address: u64) -> *mut T {
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
