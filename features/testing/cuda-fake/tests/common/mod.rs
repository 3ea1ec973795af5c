//! The library, loaded in a process of each test's own: what it counts is exact, and the environment is the test's.
#![allow(unsafe_code, dead_code)]

use libloading::Library;
use std::{
    path::PathBuf,
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

/// A result that a call is to have.
pub(crate) type Code = i32;

pub(crate) const MIB2: u64 = 2 << 20;
pub(crate) const INVALID_VALUE: Code = 1;
pub(crate) const OUT_OF_MEMORY: Code = 2;
pub(crate) const ILLEGAL_ADDRESS: Code = 700;

/// Where the library is that is tested: beside the test's program.
pub(crate) fn library() -> PathBuf {
    let name = format!("lib{}.so", env!("CARGO_PKG_NAME").replace('-', "_"));
    std::env::current_exe().expect("the test's path").with_file_name(name)
}

/// The driver, loaded.
pub(crate) struct Driver {
    library: Library,
    /// Whether it is the fake.
    pub(crate) fake: bool,
}

/// Names a library to compare with: `libcuda.so.1` on a machine with a GPU.
const AGAINST: &str = "VM_CUDA_FAKE_AGAINST";

type Function = extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64) -> i32;

/// The address of something that C reads or writes.
pub(crate) fn at<T: ?Sized>(value: &mut T) -> u64 {
    std::ptr::from_mut(value).cast::<u8>().expose_provenance() as u64
}

impl Driver {
    pub(crate) fn load() -> Self {
        let other = std::env::var_os(AGAINST).map(PathBuf::from);
        let fake = other.is_none();
        // SAFETY: neither library has initialisers that matter.
        let library = unsafe { Library::new(other.unwrap_or_else(library)) };
        Self { library: library.expect("the library is built"), fake }
    }

    /// The address of a symbol.
    pub(crate) fn symbol(&self, name: &str) -> Option<u64> {
        // SAFETY: only its address is taken.
        let symbol = unsafe { self.library.get::<Function>(name.as_bytes()) };
        symbol.ok().map(|function| *function as usize as u64)
    }

    /// Calls a function. More arguments than it has are harmless in the C calling convention.
    pub(crate) fn call(&self, name: &str, arguments: &[u64]) -> Code {
        let mut all = [0; 11];
        all[..arguments.len()].copy_from_slice(arguments);
        let [a, b, c, d, e, f, g, h, i, j, k] = all;
        // SAFETY: all of the library's functions used here take integers and pointers; the tests pass what they ask for.
        let function = unsafe { self.library.get::<Function>(name.as_bytes()) };
        function.unwrap_or_else(|error| panic!("{name}: {error}"))(a, b, c, d, e, f, g, h, i, j, k)
    }

    /// `cuIpcOpenMemHandle`, whose handle is passed by value.
    pub(crate) fn open(&self, handle: [u8; 64], into: &mut u64) -> Code {
        #[repr(C)]
        struct Handle([u8; 64]);
        type Open = extern "C" fn(u64, Handle, u32) -> i32;
        // SAFETY: the function has this type.
        let open = unsafe { self.library.get::<Open>(b"cuIpcOpenMemHandle_v2") }.expect("a symbol");
        open(at(into), Handle(handle), 1)
    }

    /// Calls a function that is to succeed.
    #[track_caller]
    pub(crate) fn ok(&self, name: &str, arguments: &[u64]) {
        assert_eq!(self.call(name, arguments), 0, "{name} {arguments:x?}");
    }

    /// What a function writes where its first argument points.
    #[track_caller]
    pub(crate) fn get(&self, name: &str, arguments: &[u64]) -> u64 {
        let mut value = 0u64;
        self.ok(name, &[&[at(&mut value)], arguments].concat());
        value
    }

    /// Checks the results of calls, one after the other.
    #[track_caller]
    pub(crate) fn check(&self, cases: &[(&str, &[u64], Code)]) {
        let mut wrong = Vec::new();
        for (index, (name, arguments, expected)) in cases.iter().enumerate() {
            let code = self.call(name, arguments);
            if code != *expected {
                wrong.push(format!("case {index}: {name} {arguments:x?}: {code}, not {expected}"));
            }
        }
        assert_eq!(wrong, Vec::<String>::new());
    }

    /// Initialises the driver and makes a device's primary context current.
    pub(crate) fn start(&self, device: u64) -> u64 {
        self.ok("cuInit", &[0]);
        let context = self.get("cuDevicePrimaryCtxRetain", &[device]);
        self.ok("cuCtxSetCurrent", &[context]);
        context
    }

    /// Bytes of the current device that are used.
    pub(crate) fn used(&self) -> u64 {
        let (mut free, mut total) = (0u64, 0u64);
        self.ok("cuMemGetInfo_v2", &[at(&mut free), at(&mut total)]);
        total - free
    }

    /// Checks how many bytes are used, of the fake's memory: others use a real device as well.
    #[track_caller]
    pub(crate) fn uses(&self, expected: u64) {
        if self.fake {
            assert_eq!(self.used(), expected);
        }
    }

    /// The words at a device's address.
    #[track_caller]
    pub(crate) fn words(&self, from: u64, count: usize) -> Vec<u32> {
        let mut words = vec![0u32; count];
        self.ok("cuMemcpyDtoH_v2", &[at(words.as_mut_slice()), from, count as u64 * 4]);
        words
    }

    /// A kernel of the built-in ones.
    pub(crate) fn kernel(&self, name: &str) -> u64 {
        let mut image = *b"vm-cuda-fake\n\0";
        let module = self.get("cuModuleLoadData", &[at(&mut image)]);
        let mut name = [name.as_bytes(), b"\0"].concat();
        self.get("cuModuleGetFunction", &[module, at(name.as_mut_slice())])
    }

    /// Launches a kernel.
    pub(crate) fn launch(&self, kernel: u64, stream: u64, mut parameters: Vec<u64>) -> Code {
        let mut pointers: Vec<u64> = parameters.iter_mut().map(at).collect();
        self.call("cuLaunchKernel", &[kernel, 1, 1, 1, 1, 1, 1, 0, stream, at(pointers.as_mut_slice())])
    }

    /// `cuMemAllocationProp` of a device, with the types of handles it can be exported as.
    pub(crate) fn create(&self, len: u64, device: i32, handle_types: i32) -> u64 {
        let mut properties = properties(device, handle_types);
        self.get("cuMemCreate", &[len, at(&mut properties), 0])
    }

    /// Gives devices access to a range.
    pub(crate) fn access(&self, from: u64, len: u64, device: i32, flags: i32) -> Code {
        let mut description = [1, device, flags];
        self.call("cuMemSetAccess", &[from, len, at(&mut description), 1])
    }

    /// Waits until no work is left, and returns what that reports.
    pub(crate) fn synchronize(&self) -> Code {
        self.call("cuCtxSynchronize", &[])
    }
}

/// `cuMemAllocationProp`: pinned memory of a device.
pub(crate) fn properties(device: i32, handle_types: i32) -> [i32; 8] {
    [1, handle_types, 1, device, 0, 0, 0, 0]
}

const CASE: &str = "VM_CUDA_FAKE_TEST_CASE";

/// Runs a test's body in a process of its own with these variables. `name` is the test function's.
#[track_caller]
pub(crate) fn alone(name: &str, variables: &[(&str, &str)], body: impl FnOnce(&Driver)) {
    if std::env::var_os(AGAINST).is_some() {
        println!("skipped: {name} is of the fake alone");
    } else {
        alike(name, variables, body);
    }
}

/// The same, of what holds for the real driver as well.
#[track_caller]
pub(crate) fn alike(name: &str, variables: &[(&str, &str)], body: impl FnOnce(&Driver)) {
    if std::env::var(CASE).is_ok_and(|case| case == name) {
        return body(&Driver::load());
    }
    let output = child(name, variables);
    // A name that is no test's runs none.
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{name}: {}\n{text}", output.status);
}

/// Runs a test in another process.
pub(crate) fn child(name: &str, variables: &[(&str, &str)]) -> Output {
    let mut child = Command::new(std::env::current_exe().expect("the test's path"))
        .args(["--exact", name, "--nocapture"])
        .env(CASE, name)
        .envs(variables.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .expect("the test starts");
    let deadline = Instant::now() + Duration::from_secs(60);
    while child.try_wait().expect("a child").is_none() {
        if Instant::now() > deadline {
            child.kill().expect("a child");
            panic!("{name} hangs");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    child.wait_with_output().expect("a child")
}
