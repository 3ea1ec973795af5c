//! ONNX Runtime and the emulated Hexagon, fetched where they are not there.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use vm_npu::{ContextOptions, Libraries, NpuAccelerator, NpuDevice, Roots, Runtime};

/// The runtime, or why there is none.
pub(crate) fn runtime() -> Result<Runtime, String> {
    static RUNTIME: OnceLock<Result<Runtime, String>> = OnceLock::new();
    let load = || {
        if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
            return Err("the emulator is for Linux on x86-64".to_owned());
        }
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fetch-onnxruntime");
        let fetched = Command::new(&script).output().map_err(|error| error.to_string())?;
        if !fetched.status.success() {
            let said = String::from_utf8_lossy(&fetched.stderr);
            return Err(said.trim().lines().last().unwrap_or("tests/fetch-onnxruntime failed").to_owned());
        }
        let libraries = Libraries::find().map_err(|error| error.to_string())?;
        Runtime::load(&libraries).map_err(|error| error.to_string())
    };
    RUNTIME.get_or_init(load).clone()
}

/// The emulated Hexagon's place in the list.
pub(crate) fn hexagon(runtime: &Runtime) -> NpuDevice {
    let nowhere = Roots { sys: "/nowhere".into(), dev: "/nowhere".into() };
    let devices = runtime.devices(&nowhere).unwrap();
    let found = devices.into_iter().find(|device| device.to_string() == "Qualcomm Hexagon, emulated");
    found.expect("QNN's library emulates a Hexagon on x86-64")
}

/// Runs a test on the processor and on the emulated Hexagon, or says why not.
pub(crate) fn on_each(test: impl Fn(&NpuAccelerator)) {
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(reason) => {
            println!("skipped: {reason}");
            return;
        }
    };
    for device in [runtime.processor(), hexagon(&runtime)] {
        test(&NpuAccelerator::open(&runtime, &device).unwrap());
    }
}

/// Contexts as tests have them.
pub(crate) fn options() -> ContextOptions {
    ContextOptions::default()
}
