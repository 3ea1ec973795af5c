//! Makes an exported function of each of NVML's, and how the library is linked: as NVML is.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

/// What is answered, by what of `answers.rs`; forms of a function that are alike have a line each. The others are the server's NVML's, or not supported.
const ANSWERED: [(&str, &str); 34] = [
    ("nvmlInit", "init"),
    ("nvmlInit_v2", "init"),
    ("nvmlInitWithFlags", "init"),
    ("nvmlShutdown", "shutdown"),
    ("nvmlSystemGetDriverVersion", "driver_version"),
    ("nvmlSystemGetNVMLVersion", "nvml_version"),
    ("nvmlSystemGetCudaDriverVersion", "cuda_version"),
    ("nvmlSystemGetCudaDriverVersion_v2", "cuda_version"),
    ("nvmlDeviceGetCount", "count"),
    ("nvmlDeviceGetCount_v2", "count"),
    ("nvmlDeviceGetHandleByIndex", "by_index"),
    ("nvmlDeviceGetHandleByIndex_v2", "by_index"),
    ("nvmlDeviceGetHandleByUUID", "by_uuid"),
    ("nvmlDeviceGetHandleByPciBusId", "by_bus_id"),
    ("nvmlDeviceGetHandleByPciBusId_v2", "by_bus_id"),
    ("nvmlDeviceGetName", "name"),
    ("nvmlDeviceGetUUID", "uuid"),
    ("nvmlDeviceGetIndex", "index"),
    ("nvmlDeviceGetPciInfo", "pci_info_old"),
    ("nvmlDeviceGetPciInfo_v2", "pci_info_old"),
    ("nvmlDeviceGetPciInfo_v3", "pci_info"),
    ("nvmlDeviceGetMemoryInfo", "memory"),
    ("nvmlDeviceGetMemoryInfo_v2", "memory_v2"),
    ("nvmlDeviceGetCudaComputeCapability", "capability"),
    ("nvmlDeviceGetBrand", "brand"),
    ("nvmlDeviceGetArchitecture", "architecture"),
    ("nvmlDeviceGetComputeMode", "compute_mode"),
    ("nvmlDeviceGetP2PStatus", "peer_status"),
    ("nvmlDeviceGetComputeRunningProcesses", "processes_old"),
    ("nvmlDeviceGetComputeRunningProcesses_v2", "processes"),
    ("nvmlDeviceGetComputeRunningProcesses_v3", "processes"),
    ("nvmlDeviceGetMPSComputeRunningProcesses", "no_processes"),
    ("nvmlDeviceGetMPSComputeRunningProcesses_v2", "no_processes"),
    ("nvmlDeviceGetMPSComputeRunningProcesses_v3", "no_processes"),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let names: Vec<&str> = include_str!("names.txt").lines().filter(|line| !line.starts_with('#')).collect();
    if let Some((name, _)) = ANSWERED.iter().find(|(name, _)| !names.contains(name)) {
        return Err(format!("names.txt has no {name}").into());
    }
    let mut text = String::new();
    // Its answer is no result, but a text: it is by hand.
    for name in names.into_iter().filter(|name| *name != "nvmlErrorString") {
        match ANSWERED.iter().find(|(answered, _)| *answered == name) {
            Some((_, answer)) => writeln!(text, "export! {{ {name} answers::{answer} }}")?,
            None => writeln!(text, "export! {{ {name} |words| answers::other(\"{name}\", words) }}")?,
        }
    }
    fs::write(Path::new(&env::var("OUT_DIR")?).join("exports.rs"), text)?;
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=names.txt");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // What is called at forks is there until the process ends.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    Ok(())
}
