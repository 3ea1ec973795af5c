//! The device's health, by NVIDIA's management library. <https://docs.nvidia.com/deploy/nvml-api/>
#![allow(unsafe_code, non_snake_case)]

use std::ffi::{CStr, CString, c_char, c_uint, c_ulonglong, c_void};
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;
use vm_accel::{Error, Health, Result};

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

/// The health of the device at a PCI address.
pub(crate) fn health(address: &str) -> Result<Health> {
    let nvml = nvml()?;
    let no_device = |_| Error::NoDevice { wanted: format!("at {address:?}"), found: 0 };
    let address = CString::new(address).map_err(no_device)?;
    let mut device = ptr::null_mut();
    // SAFETY: the address ends with a zero byte, the pointer is to a local.
    let status = unsafe { (nvml.nvmlDeviceGetHandleByPciBusId_v2)(address.as_ptr(), &raw mut device) };
    nvml.check("nvmlDeviceGetHandleByPciBusId", status)?;

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
    let mut memory = Memory::default();
    // SAFETY: as above.
    let memory =
        (unsafe { (nvml.nvmlDeviceGetMemoryInfo)(device, &raw mut memory) } == 0).then_some(memory.used);
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
    Ok(Health {
        temperature,
        power: power.map(|milliwatts| f64::from(milliwatts) / 1e3),
        power_limit: power_limit.map(|milliwatts| f64::from(milliwatts) / 1e3),
        busy,
        memory_used: memory,
        corrected_errors: errors(0),
        uncorrected_errors: errors(1),
        reset_needed: (status == 0).then_some(pending != 0 || failed != 0),
    })
}
