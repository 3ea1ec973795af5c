//! A library in the place of NVIDIA's, with one GPU. The file `scenario` beside it says what it refuses (`NAME refuse 4`), accepts and
//! forgets (`NAME forget`), where it hangs (`NAME hang`) and what it says (`NAME is 7`); a file beside it gets what was set.

use std::ffi::{CStr, c_char, c_uint, c_void};
use std::fs;
use std::io::Write as _;
use std::sync::Mutex;
use std::time::Duration;

type Device = *mut c_void;

struct State {
    scenario: String,
    core: c_uint,
    memory: c_uint,
    power: c_uint,
    /// Policy and percent.
    fans: [(c_uint, c_uint); 2],
}

const FRESH: State =
    State { scenario: String::new(), core: 1980, memory: 9501, power: 300_000, fans: [(0, 31); 2] };
static STATE: Mutex<State> = Mutex::new(FRESH);

fn path() -> String {
    std::env::var("LD_LIBRARY_PATH").expect("its folder") + "/scenario"
}

/// What the file says of a function; a file that says something else than before begins with a GPU as it comes.
fn said(name: &str) -> (String, c_uint) {
    let scenario = fs::read_to_string(path()).expect("the file");
    let mut state = STATE.lock().expect("a lock");
    if state.scenario != scenario {
        *state = State { scenario: scenario.clone(), ..FRESH };
    }
    let line = scenario.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    let (what, value) = line.map_or(("", ""), |line| line.split_once(' ').unwrap_or((line, "")));
    (what.into(), value.parse().unwrap_or(0))
}

/// Waits until the file says something else.
fn wait(name: &str) {
    while said(name).0 == "hang" {
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Sets something, unless the file says otherwise.
fn set(name: &str, values: &str, apply: impl FnOnce(&mut State)) -> c_uint {
    let mut log = fs::OpenOptions::new().append(true).create(true).open(path() + ".log").expect("a log");
    writeln!(log, "{name}{values}").expect("written");
    match said(name) {
        (what, _) if what == "hang" => wait(name),
        (what, code) if what == "refuse" => return code,
        (what, _) if what == "forget" => return 0,
        _ => {}
    }
    apply(&mut STATE.lock().expect("a lock"));
    0
}

fn get(name: &str, value: *mut c_uint, own: impl FnOnce(&State) -> c_uint) -> c_uint {
    let (what, number) = said(name);
    if what == "refuse" {
        return number;
    }
    let own = own(&STATE.lock().expect("a lock"));
    unsafe { value.write(if what == "is" { number } else { own }) };
    0
}

macro_rules! get {
    ($($name:ident($($of:ident),*) $own:expr;)*) => { $(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(_: Device, $($of: c_uint,)* value: *mut c_uint) -> c_uint {
            $(let _ = $of;)*
            let own: fn(&State, &[c_uint]) -> c_uint = $own;
            get(stringify!($name), value, |state| own(state, &[$($of),*]))
        }
    )* };
}

get! {
    nvmlDeviceGetPowerUsage() |_, _| 123_400;
    nvmlDeviceGetEnforcedPowerLimit() |state, _| state.power;
    nvmlDeviceGetPowerManagementLimit() |state, _| state.power;
    nvmlDeviceGetPowerManagementDefaultLimit() |_, _| 300_000;
    nvmlDeviceGetNumFans() |_, _| 2;
    nvmlDeviceGetPerformanceState() |_, _| 2;
    nvmlDeviceGetPersistenceMode() |_, _| 1;
    nvmlDeviceGetClockInfo(of) |state, of| if of[0] == 0 { state.core } else { state.memory };
    nvmlDeviceGetMaxClockInfo(of) |_, of| if of[0] == 0 { 1980 } else { 9501 };
    nvmlDeviceGetTargetFanSpeed(fan) |state, fan| state.fans[fan[0] as usize].1;
    nvmlDeviceGetFanControlPolicy_v2(fan) |state, fan| state.fans[fan[0] as usize].0;
    nvmlDeviceGetTemperature(of) |_, of| 61 + of[0];
    nvmlDeviceGetFanSpeed() |state, _| state.fans[0].1;
    nvmlDeviceGetPcieReplayCounter() |_, _| 7;
}

/// Writes numbers that a structure, or a single long, is made of; none where the file has it refused.
unsafe fn fields<T: Copy>(name: &str, to: *mut T, values: &[T]) -> c_uint {
    match said(name) {
        (what, code) if what == "refuse" => return code,
        _ => {}
    }
    unsafe { to.copy_from_nonoverlapping(values.as_ptr(), values.len()) };
    0
}

/// Of the core and of the memory.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetUtilizationRates(_: Device, to: *mut c_uint) -> c_uint {
    unsafe { fields("nvmlDeviceGetUtilizationRates", to, &[83, 12]) }
}

/// All, free and used.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMemoryInfo(_: Device, to: *mut u64) -> c_uint {
    unsafe { fields("nvmlDeviceGetMemoryInfo", to, &[24 << 30, 19 << 30, 5 << 30]) }
}

/// By its limit of power.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetCurrentClocksThrottleReasons(_: Device, to: *mut u64) -> c_uint {
    unsafe { fields("nvmlDeviceGetCurrentClocksThrottleReasons", to, &[4]) }
}

fn list(name: &str, count: *mut c_uint, to: *mut c_uint, values: &[c_uint]) -> c_uint {
    match said(name) {
        (what, code) if what == "refuse" => return code,
        _ => {}
    }
    if (unsafe { count.read() } as usize) < values.len() {
        return 7;
    }
    unsafe { to.copy_from_nonoverlapping(values.as_ptr(), values.len()) };
    unsafe { count.write(values.len() as c_uint) };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetSupportedMemoryClocks(
    _: Device,
    count: *mut c_uint,
    to: *mut c_uint,
) -> c_uint {
    list("nvmlDeviceGetSupportedMemoryClocks", count, to, &[9501, 5001, 405])
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetSupportedGraphicsClocks(
    _: Device,
    at: c_uint,
    count: *mut c_uint,
    to: *mut c_uint,
) -> c_uint {
    assert_eq!(at, 9501, "with the memory at its fastest");
    let clocks: Vec<c_uint> = (14..=132).rev().map(|step| step * 15).collect();
    list("nvmlDeviceGetSupportedGraphicsClocks", count, to, &clocks)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetPowerManagementLimitConstraints(
    _: Device,
    min: *mut c_uint,
    max: *mut c_uint,
) -> c_uint {
    let result = get("nvmlDeviceGetPowerManagementLimitConstraints", min, |_| 100_000);
    unsafe { max.write(350_000) };
    result
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMinMaxFanSpeed(_: Device, min: *mut c_uint, max: *mut c_uint) -> c_uint {
    unsafe { max.write(100) };
    get("nvmlDeviceGetMinMaxFanSpeed", min, |_| 30)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceSetGpuLockedClocks(_: Device, min: c_uint, max: c_uint) -> c_uint {
    set("nvmlDeviceSetGpuLockedClocks", &format!(" {min} {max}"), |state| state.core = state.core.min(max))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceSetMemoryLockedClocks(_: Device, min: c_uint, max: c_uint) -> c_uint {
    set("nvmlDeviceSetMemoryLockedClocks", &format!(" {min} {max}"), |state| {
        state.memory = state.memory.min(max)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceResetGpuLockedClocks(_: Device) -> c_uint {
    set("nvmlDeviceResetGpuLockedClocks", "", |state| state.core = 1980)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceResetMemoryLockedClocks(_: Device) -> c_uint {
    set("nvmlDeviceResetMemoryLockedClocks", "", |state| state.memory = 9501)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceSetPowerManagementLimit(_: Device, limit: c_uint) -> c_uint {
    set("nvmlDeviceSetPowerManagementLimit", &format!(" {limit}"), |state| state.power = limit)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceSetFanSpeed_v2(_: Device, fan: c_uint, percent: c_uint) -> c_uint {
    set(&format!("nvmlDeviceSetFanSpeed_v2/{fan}"), &format!(" {percent}"), |state| {
        state.fans[fan as usize] = (1, percent)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceSetDefaultFanSpeed_v2(_: Device, fan: c_uint) -> c_uint {
    set(&format!("nvmlDeviceSetDefaultFanSpeed_v2/{fan}"), "", |state| state.fans[fan as usize] = (0, 31))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> c_uint {
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(code: c_uint) -> *const c_char {
    let text = match code {
        3 => c"Not Supported",
        4 => c"Insufficient Permissions",
        15 => c"GPU is lost",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(at: *const c_char, device: *mut Device) -> c_uint {
    if unsafe { CStr::from_ptr(at) } != c"0000:01:00.0" {
        return 6;
    }
    let (what, code) = said("nvmlDeviceGetHandleByPciBusId_v2");
    if what == "hang" {
        wait("nvmlDeviceGetHandleByPciBusId_v2");
    }
    unsafe { device.write(1 as Device) };
    if what == "refuse" { code } else { 0 }
}

macro_rules! unsupported {
    ($($name:ident($($type:ty),*);)*) => { $(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(_: Device, $(_: $type),*) -> c_uint {
            3
        }
    )* };
}

unsupported! {
    nvmlDeviceGetComputeRunningProcesses_v3(*mut c_uint, *mut c_void);
    nvmlDeviceGetGraphicsRunningProcesses_v3(*mut c_uint, *mut c_void);
    nvmlDeviceGetTotalEccErrors(c_uint, c_uint, *mut u64);
    nvmlDeviceGetRemappedRows(*mut c_uint, *mut c_uint, *mut c_uint, *mut c_uint);
}
