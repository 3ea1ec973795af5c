//! The device's health and who uses it, by NVIDIA's management library. <https://docs.nvidia.com/deploy/nvml-api/>
#![allow(unsafe_code, non_snake_case)]

use std::ffi::{CStr, CString, c_char, c_uint, c_ulonglong, c_void};
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;
use vm_accel::{Error, Result};

use crate::sys::one_line;

const LIBRARY: &str = "libnvidia-ml.so.1";
type Status = c_uint;
type Handle = *mut c_void;

/// `nvmlUtilization_t`.
#[repr(C)]
#[derive(Default)]
struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
struct Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// `nvmlProcessInfo_t`, in its second version.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ProcessInfo {
    pid: c_uint,
    memory: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// Most processes of a kind that are asked for.
const MAX_PROCESSES: usize = 4096;

/// How a device does. What it does not tell is `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Health {
    /// Degrees Celsius.
    pub temperature: Option<u32>,
    /// Watts drawn.
    pub power: Option<f64>,
    /// The watts at which it throttles itself.
    pub power_limit: Option<f64>,
    /// Percent of the time that kernels ran, over the driver's last interval.
    pub busy: Option<u32>,
    /// Bytes of device memory in use, by anybody.
    pub memory_used: Option<u64>,
    /// Memory errors that were corrected since the last reset.
    pub corrected_errors: Option<u64>,
    /// Memory errors that were not, since the last reset.
    pub uncorrected_errors: Option<u64>,
    /// Whether rows of memory wait to be remapped, which needs a reset.
    pub reset_needed: Option<bool>,
}

/// What uses a device. What it does not tell is `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Usage {
    /// How it does.
    pub health: Health,
    /// Bytes of its memory.
    pub memory_bytes: Option<u64>,
    /// The processes that have it open to compute or to draw, by their IDs.
    pub processes: Option<Vec<Process>>,
}

/// A process that uses a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its ID.
    pub pid: u32,
    /// Bytes of the device's memory that it has.
    pub memory_bytes: Option<u64>,
}

macro_rules! library {
    ($(fn $name:ident($($type:ty),*);)*) => {
        struct Nvml {
            $($name: unsafe extern "C" fn($($type),*) -> Status,)*
            nvmlErrorString: unsafe extern "C" fn(Status) -> *const c_char,
            _library: Library,
        }

        impl Nvml {
            fn load() -> Result<Self, libloading::Error> {
                // SAFETY: the library's constructors are the vendor's, made to be loaded so.
                let library = unsafe { Library::new(LIBRARY) }?;
                Ok(Self {
                    $($name: {
                        // SAFETY: the signature is that of the library's header.
                        *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }?
                    },)*
                    nvmlErrorString: {
                        // SAFETY: as above.
                        *unsafe { library.get(b"nvmlErrorString\0") }?
                    },
                    _library: library,
                })
            }
        }
    };
}

library! {
    fn nvmlInit_v2();
    fn nvmlDeviceGetHandleByPciBusId_v2(*const c_char, *mut Handle);
    fn nvmlDeviceGetTemperature(Handle, c_uint, *mut c_uint);
    fn nvmlDeviceGetPowerUsage(Handle, *mut c_uint);
    fn nvmlDeviceGetEnforcedPowerLimit(Handle, *mut c_uint);
    fn nvmlDeviceGetUtilizationRates(Handle, *mut Utilization);
    fn nvmlDeviceGetMemoryInfo(Handle, *mut Memory);
    fn nvmlDeviceGetComputeRunningProcesses_v3(Handle, *mut c_uint, *mut ProcessInfo);
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(Handle, *mut c_uint, *mut ProcessInfo);
    fn nvmlDeviceGetTotalEccErrors(Handle, c_uint, c_uint, *mut c_ulonglong);
    fn nvmlDeviceGetRemappedRows(Handle, *mut c_uint, *mut c_uint, *mut c_uint, *mut c_uint);
}

fn nvml() -> Result<&'static Nvml> {
    static NVML: OnceLock<Result<Nvml>> = OnceLock::new();
    let loaded = NVML.get_or_init(|| {
        let nvml = Nvml::load().map_err(|error| Error::Unavailable {
            library: LIBRARY.into(),
            cause: one_line(&error),
            remedy: "install the NVIDIA driver's management library (Debian: libnvidia-ml1, Ubuntu: \
                     libnvidia-compute-VERSION, Fedora: xorg-x11-drv-nvidia-cuda-libs)"
                .into(),
        })?;
        // SAFETY: it may be called at any time; it is never shut down.
        nvml.check("nvmlInit", unsafe { (nvml.nvmlInit_v2)() })?;
        Ok(nvml)
    });
    loaded.as_ref().map_err(Clone::clone)
}

impl Nvml {
    fn check(&self, call: &'static str, status: Status) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: it may be called at any time, with any status.
        let text = unsafe { (self.nvmlErrorString)(status) };
        let message = if text.is_null() {
            String::new()
        } else {
            // SAFETY: the library's strings are never freed.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Err(Error::Driver { call, code: i64::from(status), name: "NVML".into(), message })
    }
}

/// The device at a PCI address.
fn device(address: &str) -> Result<(&'static Nvml, Handle)> {
    let nvml = nvml()?;
    let no_device = |_| Error::NoDevice { wanted: format!("at {address:?}"), found: 0 };
    let address = CString::new(address).map_err(no_device)?;
    let mut device = ptr::null_mut();
    // SAFETY: the address ends with a zero byte, the pointer is to a local.
    let status = unsafe { (nvml.nvmlDeviceGetHandleByPciBusId_v2)(address.as_ptr(), &raw mut device) };
    nvml.check("nvmlDeviceGetHandleByPciBusId", status)?;
    Ok((nvml, device))
}

impl Nvml {
    fn memory(&self, device: Handle) -> Option<Memory> {
        let mut memory = Memory::default();
        // SAFETY: the handle is live and the pointer is to a local.
        (unsafe { (self.nvmlDeviceGetMemoryInfo)(device, &raw mut memory) } == 0).then_some(memory)
    }

    fn processes(&self, device: Handle) -> Option<Vec<Process>> {
        let calls =
            [self.nvmlDeviceGetComputeRunningProcesses_v3, self.nvmlDeviceGetGraphicsRunningProcesses_v3];
        let mut found = Vec::new();
        for call in calls {
            let mut infos = vec![ProcessInfo::default(); MAX_PROCESSES];
            let mut count = MAX_PROCESSES as c_uint;
            // SAFETY: the handle is live, and `infos` has room for as many as `count` says.
            if unsafe { call(device, &raw mut count, infos.as_mut_ptr()) } != 0 {
                return None;
            }
            found.extend(infos.into_iter().take(count as usize).map(|info| Process {
                pid: info.pid,
                memory_bytes: (info.memory != c_ulonglong::MAX).then_some(info.memory),
            }));
        }
        found.sort_by_key(|process| process.pid);
        found.dedup_by_key(|process| process.pid);
        Some(found)
    }
}

/// What uses the device at a PCI address. It needs no context of CUDA, and takes no memory of the device.
///
/// # Errors
/// When the library is missing, or does not know the device.
pub fn usage(address: &str) -> Result<Usage> {
    let (nvml, device) = device(address)?;
    Ok(Usage {
        health: health(nvml, device),
        memory_bytes: nvml.memory(device).map(|memory| memory.total),
        processes: nvml.processes(device),
    })
}

fn health(nvml: &Nvml, device: Handle) -> Health {
    // What a device does not tell (a consumer card has no ECC) is left out.
    let number = |get: &dyn Fn(*mut c_uint) -> Status| {
        let mut value = 0;
        (get(&raw mut value) == 0).then_some(value)
    };
    const CORE: c_uint = 0;
    // SAFETY: here and below the handle is live and the pointers are to locals.
    let temperature = number(&|value| unsafe { (nvml.nvmlDeviceGetTemperature)(device, CORE, value) });
    // SAFETY: as above.
    let power = number(&|value| unsafe { (nvml.nvmlDeviceGetPowerUsage)(device, value) });
    // SAFETY: as above.
    let power_limit = number(&|value| unsafe { (nvml.nvmlDeviceGetEnforcedPowerLimit)(device, value) });
    let mut busy = Utilization::default();
    // SAFETY: as above.
    let busy =
        (unsafe { (nvml.nvmlDeviceGetUtilizationRates)(device, &raw mut busy) } == 0).then_some(busy.gpu);
    let errors = |kind: c_uint| {
        const SINCE_RESET: c_uint = 0;
        let mut count = 0;
        // SAFETY: as above.
        let status = unsafe { (nvml.nvmlDeviceGetTotalEccErrors)(device, kind, SINCE_RESET, &raw mut count) };
        (status == 0).then_some(count)
    };
    let [mut corrected, mut uncorrected, mut pending, mut failed] = [0; 4];
    // SAFETY: as above.
    let status = unsafe {
        (nvml.nvmlDeviceGetRemappedRows)(
            device,
            &raw mut corrected,
            &raw mut uncorrected,
            &raw mut pending,
            &raw mut failed,
        )
    };
    Health {
        temperature,
        power: power.map(|milliwatts| f64::from(milliwatts) / 1e3),
        power_limit: power_limit.map(|milliwatts| f64::from(milliwatts) / 1e3),
        busy,
        memory_used: nvml.memory(device).map(|memory| memory.used),
        corrected_errors: errors(0),
        uncorrected_errors: errors(1),
        reset_needed: (status == 0).then_some(pending != 0 || failed != 0),
    }
}
