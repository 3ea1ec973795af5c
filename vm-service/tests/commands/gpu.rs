//! What uses a GPU, as a library tells that stands in for NVIDIA's.
#![cfg(feature = "cuda")]

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use vm_passthrough::Host;
use vm_passthrough::host::{DiskNode, DiskProbe, DiskState};

use super::host::{address, workstation};
use super::vm_service;

/// Says that the test runs in the process that finds the library.
pub(super) const INSIDE: &str = "VM_SERVICE_TEST_NVML";

/// A library with what is called of NVML. It knows one GPU, which does not tell of errors.
const LIBRARY: &str = r#"
use std::ffi::{CStr, c_char, c_uint, c_void};
type Device = *mut c_void;
macro_rules! numbers { ($($name:ident: $value:expr),*) => { $(
    #[unsafe(no_mangle)] pub unsafe extern "C" fn $name(_: Device, value: *mut c_uint) -> c_uint {
        unsafe { value.write($value) }; 0
    }
)* } }
numbers!(nvmlDeviceGetPowerUsage: 123_400, nvmlDeviceGetEnforcedPowerLimit: 700_000);
#[unsafe(no_mangle)] pub extern "C" fn nvmlInit_v2() -> c_uint { 0 }
#[unsafe(no_mangle)] pub extern "C" fn nvmlErrorString(_: c_uint) -> *const c_char { c"Not Found".as_ptr() }
#[unsafe(no_mangle)] pub unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(at: *const c_char, device: *mut Device) -> c_uint {
    if unsafe { CStr::from_ptr(at) } != c"0000:01:00.0" { return 6 }
    unsafe { device.write(1 as Device) }; 0
}
#[unsafe(no_mangle)] pub unsafe extern "C" fn nvmlDeviceGetTemperature(_: Device, _: c_uint, value: *mut c_uint) -> c_uint {
    unsafe { value.write(41) }; 0
}
#[unsafe(no_mangle)] pub unsafe extern "C" fn nvmlDeviceGetUtilizationRates(_: Device, rates: *mut [c_uint; 2]) -> c_uint {
    unsafe { rates.write([35, 7]) }; 0
}
#[unsafe(no_mangle)] pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo(_: Device, memory: *mut [u64; 3]) -> c_uint {
    unsafe { memory.write([80 << 30, 60 << 30, 20 << 30]) }; 0
}
#[repr(C)] pub struct Process { pid: c_uint, memory: u64, instances: [c_uint; 2] }
#[unsafe(no_mangle)] pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(_: Device, count: *mut c_uint, to: *mut Process) -> c_uint {
    if unsafe { count.read() } < 2 { return 7 }
    unsafe { to.write(Process { pid: std::process::id(), memory: 19 << 30, instances: [u32::MAX; 2] }) };
    unsafe { to.add(1).write(Process { pid: u32::MAX, memory: u64::MAX, instances: [u32::MAX; 2] }) };
    unsafe { count.write(2) }; 0
}
#[unsafe(no_mangle)] pub unsafe extern "C" fn nvmlDeviceGetGraphicsRunningProcesses_v3(_: Device, count: *mut c_uint, to: *mut Process) -> c_uint {
    unsafe { to.write(Process { pid: u32::MAX, memory: u64::MAX, instances: [u32::MAX; 2] }) };
    unsafe { count.write(1) }; 0
}
#[unsafe(no_mangle)] pub extern "C" fn nvmlDeviceGetTotalEccErrors(_: Device, _: c_uint, _: c_uint, _: *mut u64) -> c_uint { 3 }
#[unsafe(no_mangle)] pub extern "C" fn nvmlDeviceGetRemappedRows(_: Device, _: *mut c_uint, _: *mut c_uint, _: *mut c_uint, _: *mut c_uint) -> c_uint { 3 }
"#;

/// Asks for nothing, but makes a simulated host one whose drivers may be asked.
#[derive(Debug)]
struct Alive;

impl DiskProbe for Alive {
    fn probe(&self, nodes: &[DiskNode], _: Duration) -> Vec<DiskState> {
        nodes.iter().map(|_| DiskState::Free).collect()
    }
}

pub(super) fn alive(host: Host) -> Host {
    host.with_disk_probe(Arc::new(Alive))
}

/// Builds a library in the place of NVIDIA's; not where there is no compiler.
pub(super) fn build(library: &str, folder: &Path) -> bool {
    std::fs::write(folder.join("nvml.rs"), library).expect("written");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let built = Command::new(rustc)
        .args(["--edition=2024", "--crate-type=cdylib", "-o", "libnvidia-ml.so.1", "nvml.rs"])
        .current_dir(folder)
        .output();
    match built {
        Ok(built) => assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr)),
        Err(error) => {
            println!("skipped: no rustc: {error}");
            return false;
        }
    }
    true
}

/// This test alone, in a process whose libraries are in `folder` first. Says whether it passed, and what it printed.
pub(super) fn again(test: &str, folder: &Path) -> (bool, String) {
    let test = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", test, "--nocapture"])
        .env("LD_LIBRARY_PATH", folder)
        .env(INSIDE, "1")
        .output()
        .expect("this test");
    let text = String::from_utf8_lossy(&[test.stdout, test.stderr].concat()).into_owned();
    (test.status.success() && text.contains("1 passed"), text)
}

#[test]
fn shows_what_uses_a_gpu() {
    if std::env::var_os(INSIDE).is_none() {
        let folder = tempfile::tempdir().expect("a folder");
        if !build(LIBRARY, folder.path()) {
            return;
        }
        let (passed, text) = again("gpu::shows_what_uses_a_gpu", folder.path());
        assert!(passed, "{text}");
        return;
    }
    let sim = workstation();
    let pid = std::process::id();
    sim.write(&format!("proc/{pid}/comm"), "trainer\n").expect("written");
    let host = alive(sim.plain_host());
    let got = vm_service(&host, "info 01:00.0").out;
    let expect = format!(
        "  use              35 % busy, 20.0 of 80.0 GiB, 41 °C, 123 W\n    process        {pid} (trainer), 19.0 GiB\n    \
         process        {} (?)\n",
        u32::MAX
    );
    assert!(got.contains(&expect), "{got}");
    let got = vm_service(&host, "list --usage").out;
    assert!(got.contains("35 % busy, 20.0 of 80.0 GiB, 41 °C, 123 W"), "{got}");
    let document: serde_json::Value =
        serde_json::from_str(&vm_service(&host, "list --usage --json").out).expect("JSON");
    let usage = &document["functions"][0]["usage"];
    assert_eq!((&usage["busy_percent"], &usage["memory_used_bytes"]), (&35.into(), &(20u64 << 30).into()));
    assert_eq!(usage["processes"][0]["command"], "trainer");
    assert_eq!(usage["processes"].as_array().map(Vec::len), Some(2));
    // One that the library does not know.
    let sim = vm_passthrough::sim::SimHost::new().expect("a simulated host");
    sim.add_driver("nvidia").expect("a driver");
    let gpu = vm_passthrough::sim::SimFunction::gpu(address("0000:09:00.0")).group(1).driver("nvidia");
    sim.add(&gpu).expect("a function");
    let got = vm_service(&alive(sim.plain_host()), "info 09:00.0").out;
    assert!(got.contains("unknown: ") && got.contains("Not Found"), "{got}");
}

#[test]
fn says_why_the_use_of_a_gpu_is_unknown() {
    let sim = workstation();
    // Files tell nothing of it.
    let got = vm_service(&sim.plain_host(), "info 01:00.0").out;
    assert!(!got.contains("  use "), "{got}");
    sim.set_driver(address("01:00.0"), Some("vfio-pci")).expect("bound");
    let got = vm_service(&alive(sim.plain_host()), "info 01:00.0").out;
    assert!(got.contains("unknown: the driver nvidia would tell, and it has vfio-pci\n"), "{got}");
    sim.set_driver(address("01:00.0"), Some("nvidia")).expect("bound");
    let got = vm_service(&alive(sim.plain_host()), "list --usage --json").out;
    let document: serde_json::Value = serde_json::from_str(&got).expect("JSON");
    let unknown = document["functions"][0]["usage"]["unknown"].as_str().unwrap_or_default();
    // Where there is a driver, it does not know the simulated GPU, or has one of its own there.
    if !unknown.contains("libnvidia-ml.so.1") || !unknown.contains("libnvidia-ml1") {
        println!("skipped: NVML is there: {unknown}");
    }
}
