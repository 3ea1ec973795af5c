//! NVIDIA's own NVML, which knows what is free of a device's memory where there is no context.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::wire::code;

const NAME: &str = "libnvidia-ml.so.1";

type Handle = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
type Memory = unsafe extern "C" fn(*mut c_void, *mut [u64; 3]) -> c_int;

/// Two of its functions, and what keeps them there.
struct Nvml {
    handle: Handle,
    memory: Memory,
    _library: Library,
}

/// Opened once, for the life of the process: as long as the driver is.
fn nvml() -> Option<&'static Nvml> {
    static NVML: OnceLock<Option<Nvml>> = OnceLock::new();
    let open = || {
        // SAFETY: it is a library of the driver, whose initialisers run.
        let library = unsafe { Library::open(Some(NAME), RTLD_NOW | RTLD_LOCAL) };
        let library = library.inspect_err(|error| tracing::debug!(%error, "there is no NVML")).ok()?;
        // SAFETY: NVML's function is of this type.
        let start = unsafe { library.get::<unsafe extern "C" fn() -> c_int>(b"nvmlInit_v2\0") }.ok()?;
        // SAFETY: as above.
        let handle = *unsafe { library.get::<Handle>(b"nvmlDeviceGetHandleByUUID\0") }.ok()?;
        // SAFETY: as above.
        let memory = *unsafe { library.get::<Memory>(b"nvmlDeviceGetMemoryInfo\0") }.ok()?;
        // SAFETY: it takes nothing.
        let started = unsafe { start() };
        tracing::debug!(started, "NVML is opened");
        (started == 0).then_some(Nvml { handle, memory, _library: library })
    };
    NVML.get_or_init(open).as_ref()
}

/// What is free of the memory of a device with this name.
pub(in crate::server) fn free(uuid: &str) -> Result<u64, u32> {
    let nvml = nvml().ok_or(code::NOT_SUPPORTED)?;
    let name = CString::new(uuid).map_err(|_| code::INVALID_VALUE)?;
    let mut device = std::ptr::null_mut();
    // SAFETY: it reads a string, and writes a handle.
    if unsafe { (nvml.handle)(name.as_ptr(), &raw mut device) } != 0 {
        return Err(code::NOT_FOUND);
    }
    let mut memory = [0; 3];
    // SAFETY: it takes a handle of its own, and writes total, free and used.
    match unsafe { (nvml.memory)(device, &raw mut memory) } {
        0 => Ok(memory[1]),
        _ => Err(code::NOT_SUPPORTED),
    }
}
