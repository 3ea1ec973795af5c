//! NVIDIA's management library: its functions, found at run time, and a safe call for each.
//!
//! A function that an older driver's library lacks is an ordinary error, like one that the device does not support.
#![allow(unsafe_code, non_snake_case)]

use std::ffi::{CStr, CString, c_char, c_uint, c_ulonglong, c_void};
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;
use vm_accel::{Error, Result};

use super::Process;
use crate::sys::one_line;

const LIBRARY: &str = if cfg!(windows) { "nvml.dll" } else { "libnvidia-ml.so.1" };
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

/// Most clocks that are asked for; GPUs have some hundred.
const MAX_CLOCKS: usize = 4096;

macro_rules! library {
    ($(fn $name:ident($($type:ty),*);)*) => {
        struct Nvml {
            $($name: unsafe extern "C" fn($($type),*) -> Status,)*
            nvmlErrorString: unsafe extern "C" fn(Status) -> *const c_char,
            optional: Optional,
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
                    optional: Optional::find(&library),
                    _library: library,
                })
            }
        }
    };
}

library! {
    fn nvmlInit_v2();
    fn nvmlDeviceGetHandleByPciBusId_v2(*const c_char, *mut Handle);
    fn nvmlDeviceGetUtilizationRates(Handle, *mut Utilization);
    fn nvmlDeviceGetMemoryInfo(Handle, *mut Memory);
    fn nvmlDeviceGetComputeRunningProcesses_v3(Handle, *mut c_uint, *mut ProcessInfo);
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(Handle, *mut c_uint, *mut ProcessInfo);
    fn nvmlDeviceGetTotalEccErrors(Handle, c_uint, c_uint, *mut c_ulonglong);
    fn nvmlDeviceGetRemappedRows(Handle, *mut c_uint, *mut c_uint, *mut c_uint, *mut c_uint);
}

/// The C type of a group of functions, by what they do.
macro_rules! signature {
    (get) => { unsafe extern "C" fn(Handle, *mut c_uint) -> Status };
    (get_of) => { unsafe extern "C" fn(Handle, c_uint, *mut c_uint) -> Status };
    (get_pair) => { unsafe extern "C" fn(Handle, *mut c_uint, *mut c_uint) -> Status };
    (get_long) => { unsafe extern "C" fn(Handle, *mut c_ulonglong) -> Status };
    (list) => { unsafe extern "C" fn(Handle, *mut c_uint, *mut c_uint) -> Status };
    (list_of) => { unsafe extern "C" fn(Handle, c_uint, *mut c_uint, *mut c_uint) -> Status };
    (text) => { unsafe extern "C" fn(Handle, *mut c_char, c_uint) -> Status };
    (act) => { unsafe extern "C" fn(Handle) -> Status };
    (set) => { unsafe extern "C" fn(Handle, c_uint) -> Status };
    (set_pair) => { unsafe extern "C" fn(Handle, c_uint, c_uint) -> Status };
}

/// The method of [`Device`] for one of a group.
macro_rules! method {
    ($(#[$doc:meta])* get $method:ident $name:ident) => { method!($(#[$doc])* get $method $name () -> u32); };
    ($(#[$doc:meta])* get_of $method:ident $name:ident) => { method!($(#[$doc])* get_of $method $name (of) -> u32); };
    ($(#[$doc:meta])* get_pair $method:ident $name:ident) => { method!($(#[$doc])* get_pair $method $name () -> (u32, u32)); };
    ($(#[$doc:meta])* get_long $method:ident $name:ident) => { method!($(#[$doc])* get_long $method $name () -> u64); };
    ($(#[$doc:meta])* list $method:ident $name:ident) => { method!($(#[$doc])* list $method $name () -> Vec<u32>); };
    ($(#[$doc:meta])* list_of $method:ident $name:ident) => { method!($(#[$doc])* list_of $method $name (of) -> Vec<u32>); };
    ($(#[$doc:meta])* text $method:ident $name:ident) => { method!($(#[$doc])* text $method $name () -> String); };
    ($(#[$doc:meta])* act $method:ident $name:ident) => { method!($(#[$doc])* act $method $name () -> ()); };
    ($(#[$doc:meta])* set $method:ident $name:ident) => { method!($(#[$doc])* set $method $name (value) -> ()); };
    ($(#[$doc:meta])* set_pair $method:ident $name:ident) => { method!($(#[$doc])* set_pair $method $name (first, second) -> ()); };
    ($(#[$doc:meta])* $kind:ident $method:ident $name:ident ($($argument:ident),*) -> $result:ty) => {
        $(#[$doc])*
        pub(super) fn $method(&self $(, $argument: c_uint)*) -> Result<$result> {
            let name = stringify!($name);
            let function = self.nvml.optional.$name.ok_or_else(|| Error::Driver {
                call: name,
                code: i64::from(FUNCTION_NOT_FOUND),
                name: "NVML".into(),
                message: "this driver's library does not have it".into(),
            })?;
            self.$kind(name, function $(, $argument)*)
        }
    };
}

/// `NVML_ERROR_FUNCTION_NOT_FOUND`.
const FUNCTION_NOT_FOUND: Status = 13;

/// Functions that not every driver's library has, in groups of one signature, and for each a method of [`Device`].
macro_rules! optional {
    ($($kind:ident { $($(#[$doc:meta])* $method:ident = $name:ident;)* })*) => {
        struct Optional { $($($name: Option<signature!($kind)>,)*)* }

        impl Optional {
            fn find(library: &Library) -> Self {
                Self { $($($name: {
                    // SAFETY: the signature is that of the library's header.
                    let found = unsafe { library.get::<signature!($kind)>(concat!(stringify!($name), "\0").as_bytes()) };
                    found.ok().map(|found| *found)
                },)*)* }
            }
        }

        impl Device {
            $($(method! { $(#[$doc])* $kind $method $name })*)*
        }
    };
}

optional! {
    get {
        /// Milliwatts drawn.
        power_usage = nvmlDeviceGetPowerUsage;
        /// Milliwatts at which it throttles itself, of all that limits it.
        enforced_power_limit = nvmlDeviceGetEnforcedPowerLimit;
        /// Milliwatts that it is limited to.
        power_limit = nvmlDeviceGetPowerManagementLimit;
        /// Milliwatts that it is limited to by default.
        default_power_limit = nvmlDeviceGetPowerManagementDefaultLimit;
        /// Percent of the highest speed that its first fan is to have.
        fan_speed = nvmlDeviceGetFanSpeed;
        /// How many fans it has.
        fans = nvmlDeviceGetNumFans;
        /// 0 for the fastest to 15; 32 where it is unknown.
        performance_state = nvmlDeviceGetPerformanceState;
        /// 1 where the driver stays with it while nobody uses it.
        persistence_mode = nvmlDeviceGetPersistenceMode;
        /// Packets that were sent again on PCI Express, as long as the driver counts.
        replays = nvmlDeviceGetPcieReplayCounter;
        /// Its generation, as `NVML_DEVICE_ARCH_HOPPER`, 9.
        architecture = nvmlDeviceGetArchitecture;
    }
    get_of {
        /// Degrees Celsius of a sensor; 0 is the core's.
        temperature = nvmlDeviceGetTemperature;
        /// MHz of a clock: 0 is the core's, 2 the memory's.
        clock = nvmlDeviceGetClockInfo;
        /// The highest MHz of a clock.
        max_clock = nvmlDeviceGetMaxClockInfo;
        /// Percent of the highest speed that a fan is to have.
        fan_target = nvmlDeviceGetTargetFanSpeed;
        /// 0 where the driver drives a fan by temperature, 1 where it has the speed that was set.
        fan_policy = nvmlDeviceGetFanControlPolicy_v2;
    }
    get_pair {
        /// The least and the most milliwatts that it may be limited to.
        power_limits = nvmlDeviceGetPowerManagementLimitConstraints;
        /// The least and the most percent that a fan may be set to.
        fan_limits = nvmlDeviceGetMinMaxFanSpeed;
        /// Its compute capability, as 9 and 0. The library has it in `int`s, which are never negative.
        compute_capability = nvmlDeviceGetCudaComputeCapability;
    }
    text {
        /// The product's name.
        name = nvmlDeviceGetName;
    }
    get_long {
        /// Why its clocks are held down, a bit for each reason.
        throttle_reasons = nvmlDeviceGetCurrentClocksThrottleReasons;
    }
    list {
        /// The MHz that the memory can have.
        memory_clocks = nvmlDeviceGetSupportedMemoryClocks;
    }
    list_of {
        /// The MHz that the core can have at that clock of the memory.
        core_clocks = nvmlDeviceGetSupportedGraphicsClocks;
    }
    act {
        /// Lets the core have any clock again.
        unlock_core_clock = nvmlDeviceResetGpuLockedClocks;
        /// Lets the memory have any clock again.
        unlock_memory_clock = nvmlDeviceResetMemoryLockedClocks;
    }
    set {
        /// Limits it to N milliwatts.
        set_power_limit = nvmlDeviceSetPowerManagementLimit;
        /// Has the driver drive a fan again.
        default_fan = nvmlDeviceSetDefaultFanSpeed_v2;
    }
    set_pair {
        /// Keeps the core's clock between these MHz.
        lock_core_clock = nvmlDeviceSetGpuLockedClocks;
        /// Keeps the memory's clock between these MHz.
        lock_memory_clock = nvmlDeviceSetMemoryLockedClocks;
        /// Sets a fan, the first number, to N percent.
        set_fan = nvmlDeviceSetFanSpeed_v2;
    }
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

/// A device that the library knows.
pub(super) struct Device {
    nvml: &'static Nvml,
    handle: Handle,
}

impl Device {
    /// The device at a PCI address.
    pub(super) fn at(address: &str) -> Result<Self> {
        let nvml = nvml()?;
        let no_device = |_| Error::NoDevice { wanted: format!("at {address:?}"), found: 0 };
        let address = CString::new(address).map_err(no_device)?;
        let mut handle = ptr::null_mut();
        // SAFETY: the address ends with a zero byte, the pointer is to a local.
        let status = unsafe { (nvml.nvmlDeviceGetHandleByPciBusId_v2)(address.as_ptr(), &raw mut handle) };
        nvml.check("nvmlDeviceGetHandleByPciBusId", status)?;
        Ok(Self { nvml, handle })
    }

    fn get(&self, name: &'static str, function: signature!(get)) -> Result<u32> {
        let mut value = 0;
        // SAFETY: the handle is live, as the library is never shut down; the pointer is to a local.
        self.nvml.check(name, unsafe { function(self.handle, &raw mut value) })?;
        Ok(value)
    }

    fn get_of(&self, name: &'static str, function: signature!(get_of), of: c_uint) -> Result<u32> {
        let mut value = 0;
        // SAFETY: as in `get`.
        self.nvml.check(name, unsafe { function(self.handle, of, &raw mut value) })?;
        Ok(value)
    }

    fn get_pair(&self, name: &'static str, function: signature!(get_pair)) -> Result<(u32, u32)> {
        let (mut first, mut second) = (0, 0);
        // SAFETY: as in `get`.
        self.nvml.check(name, unsafe { function(self.handle, &raw mut first, &raw mut second) })?;
        Ok((first, second))
    }

    fn get_long(&self, name: &'static str, function: signature!(get_long)) -> Result<u64> {
        let mut value = 0;
        // SAFETY: as in `get`.
        self.nvml.check(name, unsafe { function(self.handle, &raw mut value) })?;
        Ok(value)
    }

    fn list(&self, name: &'static str, function: signature!(list)) -> Result<Vec<u32>> {
        let (mut values, mut count) = (vec![0; MAX_CLOCKS], MAX_CLOCKS as c_uint);
        // SAFETY: the handle is live, and `values` has room for as many as `count` says.
        let status = unsafe { function(self.handle, &raw mut count, values.as_mut_ptr()) };
        self.nvml.check(name, status)?;
        values.truncate(count as usize);
        Ok(values)
    }

    fn list_of(&self, name: &'static str, function: signature!(list_of), of: c_uint) -> Result<Vec<u32>> {
        let (mut values, mut count) = (vec![0; MAX_CLOCKS], MAX_CLOCKS as c_uint);
        // SAFETY: as in `list`.
        let status = unsafe { function(self.handle, of, &raw mut count, values.as_mut_ptr()) };
        self.nvml.check(name, status)?;
        values.truncate(count as usize);
        Ok(values)
    }

    fn text(&self, name: &'static str, function: signature!(text)) -> Result<String> {
        // `NVML_DEVICE_NAME_V2_BUFFER_SIZE`.
        let mut text = [0; 96];
        // SAFETY: the handle is live, and `text` has room for as many bytes as are said.
        let status = unsafe { function(self.handle, text.as_mut_ptr().cast(), text.len() as c_uint) };
        self.nvml.check(name, status)?;
        let end = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
        Ok(String::from_utf8_lossy(text.get(..end).unwrap_or_default()).into_owned())
    }

    fn act(&self, name: &'static str, function: signature!(act)) -> Result<()> {
        // SAFETY: the handle is live.
        self.nvml.check(name, unsafe { function(self.handle) })
    }

    fn set(&self, name: &'static str, function: signature!(set), value: c_uint) -> Result<()> {
        // SAFETY: as in `act`; the library checks values.
        self.nvml.check(name, unsafe { function(self.handle, value) })
    }

    fn set_pair(
        &self,
        name: &'static str,
        function: signature!(set_pair),
        first: c_uint,
        second: c_uint,
    ) -> Result<()> {
        // SAFETY: as in `set`.
        self.nvml.check(name, unsafe { function(self.handle, first, second) })
    }

    /// Percent of the time that kernels ran, over the driver's last interval.
    pub(super) fn busy(&self) -> Option<u32> {
        let mut rates = Utilization::default();
        // SAFETY: as in `get`.
        let status = unsafe { (self.nvml.nvmlDeviceGetUtilizationRates)(self.handle, &raw mut rates) };
        (status == 0).then_some(rates.gpu)
    }

    /// Bytes of memory that are in use, and of all.
    pub(super) fn memory(&self) -> Option<(u64, u64)> {
        let mut memory = Memory::default();
        // SAFETY: as in `get`.
        let status = unsafe { (self.nvml.nvmlDeviceGetMemoryInfo)(self.handle, &raw mut memory) };
        (status == 0).then_some((memory.used, memory.total))
    }

    /// Memory errors since the last reset: 0 for those that were corrected, 1 for those that were not.
    pub(super) fn memory_errors(&self, kind: c_uint) -> Option<u64> {
        const SINCE_RESET: c_uint = 0;
        let mut count = 0;
        // SAFETY: as in `get`.
        let status = unsafe {
            (self.nvml.nvmlDeviceGetTotalEccErrors)(self.handle, kind, SINCE_RESET, &raw mut count)
        };
        (status == 0).then_some(count)
    }

    /// Whether rows of memory wait to be remapped, which needs a reset.
    pub(super) fn reset_needed(&self) -> Option<bool> {
        let [mut corrected, mut uncorrected, mut pending, mut failed] = [0; 4];
        // SAFETY: as in `get`.
        let status = unsafe {
            (self.nvml.nvmlDeviceGetRemappedRows)(
                self.handle,
                &raw mut corrected,
                &raw mut uncorrected,
                &raw mut pending,
                &raw mut failed,
            )
        };
        (status == 0).then_some(pending != 0 || failed != 0)
    }

    /// The processes that have it open to compute or to draw, by their IDs.
    pub(super) fn processes(&self) -> Option<Vec<Process>> {
        let calls = [
            self.nvml.nvmlDeviceGetComputeRunningProcesses_v3,
            self.nvml.nvmlDeviceGetGraphicsRunningProcesses_v3,
        ];
        let mut found = Vec::new();
        for call in calls {
            let mut infos = vec![ProcessInfo::default(); MAX_PROCESSES];
            let mut count = MAX_PROCESSES as c_uint;
            // SAFETY: the handle is live, and `infos` has room for as many as `count` says.
            if unsafe { call(self.handle, &raw mut count, infos.as_mut_ptr()) } != 0 {
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
