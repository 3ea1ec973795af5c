//! The CUDA driver, as programs of the demos and of the benchmark call it: found by its name, so that the hook, where there is one, stands before it.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::ptr;

use libloading::Library;

/// An empty kernel. The first line has the driver of the tests take it, too.
const EMPTY: &CStr =
    c"// vm-cuda-fake\n.version 7.0\n.target sm_70\n.address_size 64\n.visible .entry empty() { ret; }\n";

/// What the driver answers when a device is full.
pub(crate) const OUT_OF_MEMORY: u32 = 2;

/// Why the driver does not do something.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// There is none.
    #[error(
        "no CUDA driver: {0}; install NVIDIA's, or name the folder that has libcuda.so.1 in LD_LIBRARY_PATH"
    )]
    NoDriver(String),
    /// It is too old.
    #[error("the CUDA driver is too old: {0}; CUDA 10.2 or newer is needed")]
    Old(String),
    /// It refuses a call.
    #[error("{function} fails with CUDA's error {code} ({name})")]
    Call {
        /// The call.
        function: &'static str,
        /// The driver's code.
        code: u32,
        /// And the code's name.
        name: String,
    },
    /// More is asked of an allocation than it has.
    #[error("{bytes} bytes from {offset} on are not within {of} bytes")]
    Range {
        /// From where on.
        offset: u64,
        /// How many.
        bytes: u64,
        /// Of how many.
        of: u64,
    },
}

/// What the driver answers.
pub(crate) type Result<T> = std::result::Result<T, Error>;

/// What the dynamic linker says.
fn said(error: &libloading::Error) -> String {
    let source = std::error::Error::source(error);
    source.map_or_else(|| error.to_string(), ToString::to_string)
}

macro_rules! functions {
    ($($name:ident $symbol:literal ($($ty:ty),*);)*) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($ty),*) -> u32,)*
        }

        impl Functions {
            fn load(library: &Library) -> std::result::Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: CUDA's functions of these names have these signatures.
                    $($name: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }?,)*
                })
            }
        }
    };
}

functions! {
    init "cuInit" (c_uint);
    error_name "cuGetErrorName" (u32, *mut *const c_char);
    device_name "cuDeviceGetName" (*mut c_char, c_int, c_int);
    retain "cuDevicePrimaryCtxRetain" (*mut *mut c_void, c_int);
    set_current "cuCtxSetCurrent" (*mut c_void);
    synchronize "cuCtxSynchronize" ();
    info "cuMemGetInfo_v2" (*mut usize, *mut usize);
    allocate "cuMemAlloc_v2" (*mut u64, usize);
    free "cuMemFree_v2" (u64);
    copy "cuMemcpyDtoD_v2" (u64, u64, usize);
    fill "cuMemsetD32_v2" (u64, c_uint, usize);
    read "cuMemcpyDtoH_v2" (*mut c_void, u64, usize);
    attribute "cuPointerGetAttribute" (*mut c_void, c_int, u64);
    load "cuModuleLoadData" (*mut *mut c_void, *const c_char);
    function "cuModuleGetFunction" (*mut *mut c_void, *mut c_void, *const c_char);
    launch "cuLaunchKernel" (
        *mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, *mut c_void, *mut *mut c_void, *mut *mut c_void
    );
}

/// A device's memory of this process, which is freed by [`Driver::free`] alone.
#[derive(Debug)]
pub(crate) struct Memory {
    address: u64,
    bytes: u64,
}

impl Memory {
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where a part begins.
    fn part(&self, offset: u64, bytes: u64) -> Result<u64> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(self.address + offset),
            _ => Err(Error::Range { offset, bytes, of: self.bytes }),
        }
    }
}

/// A kernel without parameters.
#[derive(Debug)]
pub(crate) struct Kernel(*mut c_void);

/// The driver, with the primary context of a device current in this thread.
pub(crate) struct Driver {
    functions: Functions,
    device: c_int,
    _library: Library,
    /// A context is a thread's.
    _thread: PhantomData<*mut ()>,
}

impl Driver {
    /// Loads it, and takes a device.
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::Old`], or the driver's own.
    pub(crate) fn open(device: u32) -> Result<Self> {
        // SAFETY: NVIDIA's library may be loaded at any time.
        let library =
            unsafe { Library::new("libcuda.so.1") }.map_err(|error| Error::NoDriver(said(&error)))?;
        let functions = Functions::load(&library).map_err(|error| Error::Old(said(&error)))?;
        let device = c_int::try_from(device).unwrap_or(c_int::MAX);
        let this = Self { functions, device, _library: library, _thread: PhantomData };
        // SAFETY: no argument is an address.
        this.done("cuInit", unsafe { (this.functions.init)(0) })?;
        let mut context = ptr::null_mut();
        // SAFETY: the address is of a context's place.
        let code = unsafe { (this.functions.retain)(&mut context, device) };
        this.done("cuDevicePrimaryCtxRetain", code)?;
        // SAFETY: the context was just retained, and never is released.
        this.done("cuCtxSetCurrent", unsafe { (this.functions.set_current)(context) })?;
        Ok(this)
    }

    fn done(&self, function: &'static str, code: u32) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut name = ptr::null();
        // SAFETY: the address is of a string's place.
        let known = unsafe { (self.functions.error_name)(code, &mut name) } == 0 && !name.is_null();
        // SAFETY: the driver's names are strings that last.
        let name = if known { unsafe { CStr::from_ptr(name) }.to_string_lossy() } else { "unknown".into() };
        Err(Error::Call { function, code, name: name.into_owned() })
    }

    /// The device's name.
    pub(crate) fn device_name(&self) -> Result<String> {
        let mut name = [0u8; 128];
        let length = name.len() as c_int - 1;
        // SAFETY: the driver writes a string of so many bytes at most.
        let code = unsafe { (self.functions.device_name)(name.as_mut_ptr().cast(), length, self.device) };
        self.done("cuDeviceGetName", code)?;
        let name = CStr::from_bytes_until_nul(&name).map(CStr::to_string_lossy).unwrap_or_default();
        Ok(crate::units::printable(&name, 100))
    }

    /// Bytes that are free, and all.
    pub(crate) fn memory(&self) -> Result<(u64, u64)> {
        let (mut free, mut all) = (0usize, 0usize);
        // SAFETY: the addresses are of two numbers.
        self.done("cuMemGetInfo", unsafe { (self.functions.info)(&mut free, &mut all) })?;
        Ok((free as u64, all as u64))
    }

    /// Allocates.
    pub(crate) fn allocate(&self, bytes: u64) -> Result<Memory> {
        let mut address = 0;
        // SAFETY: the address is of an address's place.
        self.done("cuMemAlloc", unsafe { (self.functions.allocate)(&mut address, bytes as usize) })?;
        Ok(Memory { address, bytes })
    }

    /// Frees.
    pub(crate) fn free(&self, memory: Memory) -> Result<()> {
        // SAFETY: it was allocated, and this is its only owner.
        self.done("cuMemFree", unsafe { (self.functions.free)(memory.address) })
    }

    /// Copies the beginning of one to the beginning of another.
    pub(crate) fn copy(&self, to: &Memory, from: &Memory, bytes: u64) -> Result<()> {
        let (to, from) = (to.part(0, bytes)?, from.part(0, bytes)?);
        // SAFETY: both have so many bytes.
        self.done("cuMemcpyDtoD", unsafe { (self.functions.copy)(to, from, bytes as usize) })
    }

    /// Fills a part with a word.
    pub(crate) fn fill(&self, memory: &Memory, offset: u64, word: u32, words: u64) -> Result<()> {
        let to = memory.part(offset, words.saturating_mul(4))?;
        // SAFETY: there are so many words.
        self.done("cuMemsetD32", unsafe { (self.functions.fill)(to, word, words as usize) })
    }

    /// A word.
    pub(crate) fn read(&self, memory: &Memory, offset: u64) -> Result<u32> {
        let from = memory.part(offset, 4)?;
        let mut word = 0u32;
        // SAFETY: both have four bytes.
        let code = unsafe { (self.functions.read)((&raw mut word).cast(), from, 4) };
        self.done("cuMemcpyDtoH", code)?;
        Ok(word)
    }

    /// Waits for all work.
    pub(crate) fn synchronize(&self) -> Result<()> {
        // SAFETY: it has no arguments.
        self.done("cuCtxSynchronize", unsafe { (self.functions.synchronize)() })
    }

    /// Asks of which context some memory is.
    pub(crate) fn ask(&self, memory: &Memory) -> Result<()> {
        const CONTEXT: c_int = 1;
        let mut context = ptr::null_mut::<c_void>();
        // SAFETY: the driver writes a context.
        let code = unsafe { (self.functions.attribute)((&raw mut context).cast(), CONTEXT, memory.address) };
        self.done("cuPointerGetAttribute", code)
    }

    /// A kernel that does nothing.
    pub(crate) fn empty(&self) -> Result<Kernel> {
        let (mut module, mut kernel) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the image is a string of PTX, and the address of a module's place.
        self.done("cuModuleLoadData", unsafe { (self.functions.load)(&mut module, EMPTY.as_ptr()) })?;
        // SAFETY: the module was just loaded, and never is unloaded.
        let code = unsafe { (self.functions.function)(&mut kernel, module, c"empty".as_ptr()) };
        self.done("cuModuleGetFunction", code)?;
        Ok(Kernel(kernel))
    }

    /// Launches it with one thread.
    pub(crate) fn launch(&self, kernel: &Kernel) -> Result<()> {
        let (mut none, null) = ([ptr::null_mut(); 1], ptr::null_mut());
        // SAFETY: the kernel is there and has no parameters, so nothing of them is read.
        let code = unsafe {
            (self.functions.launch)(kernel.0, 1, 1, 1, 1, 1, 1, 0, null, none.as_mut_ptr(), ptr::null_mut())
        };
        self.done("cuLaunchKernel", code)
    }
}
