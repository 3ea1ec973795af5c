//! The functions of HIP's runtime, `libamdhip64`, as they are, found when the program runs. Everything here is as unsafe as C.
//!
//! # Which versions
//! 5.2 to 7. Each function is looked up by itself, and one that a version lacks is an error of the call alone. Only functions whose
//! signatures are the same in all of them are here, and no struct: `hipDeviceProp_t` has been laid out anew with 6.0, and what is
//! needed of it has functions of its own. The numbers of attributes are those from 5.0 on, of which later versions have renumbered
//! none.
#![allow(unsafe_code, non_snake_case)]

mod load;

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

use libloading::Library;
use vm_accel::{Error, Result};

#[cfg(feature = "fake")]
pub(crate) use load::install;
pub use load::{LIBRARY_VARIABLE, hip};

/// What a function returns (`hipError_t`): 0 for success. A number, because a newer version has codes that no list has.
pub type Status = c_uint;
/// A stream's handle (`hipStream_t`).
pub type Stream = *mut c_void;
/// An event's handle (`hipEvent_t`).
pub type Event = *mut c_void;
/// A module's handle (`hipModule_t`).
pub type Module = *mut c_void;
/// A kernel's handle (`hipFunction_t`).
pub type Function = *mut c_void;
/// A graph's handle (`hipGraph_t`).
pub type Graph = *mut c_void;
/// The handle of a graph that can be launched (`hipGraphExec_t`).
pub type GraphExec = *mut c_void;

/// Attributes of a device (`hipDeviceAttribute_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Attribute {
    /// Whether host and device may use managed memory at the same time.
    ConcurrentManagedAccess = 9,
    /// The most threads of a block along x.
    MaxBlockDimX = 26,
    /// Along y.
    MaxBlockDimY = 27,
    /// Along z.
    MaxBlockDimZ = 28,
    /// The most blocks of a grid along x.
    MaxGridDimX = 29,
    /// Along y.
    MaxGridDimY = 30,
    /// Along z.
    MaxGridDimZ = 31,
    /// The most threads of a block.
    MaxThreadsPerBlock = 56,
    /// The most bytes of shared memory (LDS) of a block.
    MaxSharedMemoryPerBlock = 74,
    /// Threads of a wave.
    WarpSize = 87,
}

/// `HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK`.
pub const FUNCTION_BLOCK_THREADS: c_uint = 0;
/// `HIP_LAUNCH_PARAM_BUFFER_POINTER`: the block of parameters follows.
pub const PARAM_BUFFER: usize = 1;
/// `HIP_LAUNCH_PARAM_BUFFER_SIZE`: the address of its size follows.
pub const PARAM_SIZE: usize = 2;
/// `HIP_LAUNCH_PARAM_END`.
pub const PARAM_END: usize = 3;

/// What a queue can't be ended without.
const NEEDED: [&str; 8] = [
    "hipFree",
    "hipHostFree",
    "hipModuleUnload",
    "hipStreamDestroy",
    "hipEventCreateWithFlags",
    "hipEventRecord",
    "hipEventQuery",
    "hipEventDestroy",
];

macro_rules! functions {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),*);)*) => {
        /// The library's functions. <https://rocm.docs.amd.com/projects/HIP/> says what each does.
        pub struct Hip {
            $($(#[$meta])* pub $name: Option<unsafe extern "C" fn($($argument: $type),*) -> Status>,)*
            /// The name of a code.
            pub hipGetErrorName: Option<unsafe extern "C" fn(Status) -> *const c_char>,
            /// The code in words.
            pub hipGetErrorString: Option<unsafe extern "C" fn(Status) -> *const c_char>,
            /// What the library was found as.
            pub library: String,
            /// What they are in; a test's are in none.
            _library: Option<Library>,
        }

        /// The functions again, each status as a result.
        #[allow(clippy::too_many_arguments)]
        impl Hip {
            $($(#[$meta])*
            ///
            /// # Errors
            /// [`Error::Unavailable`] where the library lacks it; what it returned.
            ///
            /// # Safety
            /// What HIP's manual asks for.
            #[inline]
            pub unsafe fn $name(&self, $($argument: $type),*) -> Result<()> {
                let Some(function) = self.$name else { return Err(self.absent(stringify!($name))) };
                // SAFETY: as the caller promises.
                self.check(stringify!($name), unsafe { function($($argument),*) })
            })*
        }

        impl Hip {
            /// The functions that `find` knows.
            ///
            /// # Safety
            /// What `find` gives for a name is the address of HIP's function with that name, or of one with its signature, for as
            /// long as the process lives; the library is what they are in.
            pub(crate) unsafe fn of(
                name: String, library: Option<Library>, find: impl Fn(&Option<Library>, &CStr) -> Option<*const c_void>
            ) -> Self {
                macro_rules! found {
                    ($symbol:ident) => {{
                        let name = const {
                            match CStr::from_bytes_with_nul(concat!(stringify!($symbol), "\0").as_bytes()) {
                                Ok(name) => name,
                                Err(_) => c"",
                            }
                        };
                        find(&library, name).filter(|at| !at.is_null())
                    }};
                }
                Self {
                    $($name: found!($name).map(|at| {
                        // SAFETY: the caller promises that the address is that of such a function.
                        unsafe { std::mem::transmute::<*const c_void, unsafe extern "C" fn($($type),*) -> Status>(at) }
                    }),)*
                    hipGetErrorName: found!(hipGetErrorName).map(|at| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<*const c_void, unsafe extern "C" fn(Status) -> *const c_char>(at) }
                    }),
                    hipGetErrorString: found!(hipGetErrorString).map(|at| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<*const c_void, unsafe extern "C" fn(Status) -> *const c_char>(at) }
                    }),
                    library: name,
                    _library: library,
                }
            }
        }

        impl Hip {
            /// That the library has the functions that every queue needs, whatever is done with it.
            ///
            /// # Errors
            /// [`Error::Unavailable`], naming the first that it lacks.
            pub(crate) fn check_complete(&self) -> Result<()> {
                $(if NEEDED.contains(&stringify!($name)) && self.$name.is_none() {
                    return Err(self.absent(stringify!($name)));
                })*
                Ok(())
            }
        }

        #[cfg(feature = "fake")]
        impl Hip {
            /// Takes a function away, as a version that lacks it.
            pub(crate) fn forget(&mut self, name: &str) {
                $(if name == stringify!($name) {
                    self.$name = None;
                })*
            }
        }

        /// Their names.
        pub const FUNCTIONS: &[&str] = &[$(stringify!($name)),*];
    };
}

functions! {
    /// Must come first.
    fn hipInit(flags: c_uint);
    /// 10⁷ × major + 10⁵ × minor + patch.
    fn hipRuntimeGetVersion(version: *mut c_int);
    /// How many devices there are.
    fn hipGetDeviceCount(count: *mut c_int);
    /// Makes a device the calling thread's.
    fn hipSetDevice(device: c_int);
    /// The calling thread's device.
    fn hipGetDevice(device: *mut c_int);
    /// One property of a device.
    fn hipDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int);
    /// The product's name.
    fn hipDeviceGetName(name: *mut c_char, bytes: c_int, device: c_int);
    /// Bytes of its memory.
    fn hipDeviceTotalMem(bytes: *mut usize, device: c_int);
    /// Its PCI address.
    fn hipDeviceGetPCIBusId(address: *mut c_char, bytes: c_int, device: c_int);
    /// Free and total bytes of the calling thread's device.
    fn hipMemGetInfo(free: *mut usize, total: *mut usize);
    /// Allocates on the device.
    fn hipMalloc(address: *mut *mut c_void, bytes: usize);
    /// Frees what `hipMalloc` and `hipMallocManaged` gave, once all of the device's work has ended.
    fn hipFree(address: *mut c_void);
    /// Allocates managed memory.
    fn hipMallocManaged(address: *mut *mut c_void, bytes: usize, flags: c_uint);
    /// Allocates pinned host memory.
    fn hipHostMalloc(host: *mut *mut c_void, bytes: usize, flags: c_uint);
    /// Frees pinned host memory.
    fn hipHostFree(host: *mut c_void);
    /// Registers host memory.
    fn hipHostRegister(host: *mut c_void, bytes: usize, flags: c_uint);
    /// Gives registered memory back.
    fn hipHostUnregister(host: *mut c_void);
    /// The device's address of pinned or registered memory.
    fn hipHostGetDevicePointer(address: *mut *mut c_void, host: *mut c_void, flags: c_uint);
    /// Copies, in stream order.
    fn hipMemcpyAsync(target: *mut c_void, source: *const c_void, bytes: usize, kind: c_uint, stream: Stream);
    /// Sets bytes, in stream order.
    fn hipMemsetD8Async(target: *mut c_void, value: u8, bytes: usize, stream: Stream);
    /// A new stream.
    fn hipStreamCreateWithFlags(stream: *mut Stream, flags: c_uint);
    /// Ends a stream.
    fn hipStreamDestroy(stream: Stream);
    /// Lets a stream wait for an event.
    fn hipStreamWaitEvent(stream: Stream, event: Event, flags: c_uint);
    /// Begins to record a stream's commands.
    fn hipStreamBeginCapture(stream: Stream, mode: c_uint);
    /// Ends the recording.
    fn hipStreamEndCapture(stream: Stream, graph: *mut Graph);
    /// A new event.
    fn hipEventCreateWithFlags(event: *mut Event, flags: c_uint);
    /// Ends an event.
    fn hipEventDestroy(event: Event);
    /// Puts an event into a stream.
    fn hipEventRecord(event: Event, stream: Stream);
    /// Whether an event has been reached.
    fn hipEventQuery(event: Event);
    /// Milliseconds between two events.
    fn hipEventElapsedTime(milliseconds: *mut f32, from: Event, to: Event);
    /// Loads a code object.
    fn hipModuleLoadData(module: *mut Module, image: *const c_void);
    /// Unloads a module.
    fn hipModuleUnload(module: Module);
    /// A kernel of a module.
    fn hipModuleGetFunction(function: *mut Function, module: Module, name: *const c_char);
    /// One property of a kernel.
    fn hipFuncGetAttribute(value: *mut c_int, attribute: c_uint, function: Function);
    /// Launches a kernel.
    fn hipModuleLaunchKernel(
        function: Function, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared_bytes: c_uint, stream: Stream, parameters: *mut *mut c_void, extra: *mut *mut c_void
    );
    /// Makes a graph one that can be launched.
    fn hipGraphInstantiateWithFlags(executable: *mut GraphExec, graph: Graph, flags: c_ulonglong);
    /// Launches a graph.
    fn hipGraphLaunch(executable: GraphExec, stream: Stream);
    /// Ends an executable graph.
    fn hipGraphExecDestroy(executable: GraphExec);
    /// Ends a graph.
    fn hipGraphDestroy(graph: Graph);
}

impl Hip {
    /// That the library lacks a function.
    #[cold]
    pub(crate) fn absent(&self, function: &'static str) -> Error {
        Error::Unavailable {
            library: self.library.clone(),
            cause: format!("it has no {function}"),
            remedy: "install ROCm 5.2 or newer".into(),
        }
    }

    #[inline]
    pub(crate) fn check(&self, call: &'static str, status: Status) -> Result<()> {
        if status == 0 { Ok(()) } else { Err(self.error(call, status)) }
    }

    /// A status as an error.
    #[cold]
    pub(crate) fn error(&self, call: &'static str, status: Status) -> Error {
        let text = |get: Option<unsafe extern "C" fn(Status) -> *const c_char>| {
            // SAFETY: it may be called with any code.
            let text = get.map_or(std::ptr::null(), |get| unsafe { get(status) });
            if text.is_null() {
                return "unknown".to_owned();
            }
            // SAFETY: it is a string of the library's that is never freed.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        let (name, message) = (text(self.hipGetErrorName), text(self.hipGetErrorString));
        if is_sticky(status) {
            return Error::Lost { cause: format!("{call}: {name} ({status}), {message}") };
        }
        Error::Driver { call, code: i64::from(status), name, message }
    }
}

/// Whether a status means that nothing works any more: the runtime was shut down; memory that ECC could not correct; an illegal
/// address; a kernel that ran into the driver's own limit of time; a context that is gone; a failed assertion; a kernel that failed.
fn is_sticky(status: Status) -> bool {
    matches!(status, 4 | 214 | 700 | 702 | 709 | 710 | 719)
}
