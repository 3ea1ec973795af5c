//! A CUDA driver for tests of programs that hook or forward the driver's API on machines without a GPU: [`vm_cuda_driver`] with what tests want of it.
//!
//! A test links `libvm_cuda_fake.so` as `libcuda.so.1` in a directory of `LD_LIBRARY_PATH`.
//!
//! | variable | says |
//! | --- | --- |
//! | `VM_CUDA_FAKE_DEVICES` | how many devices there are: 1 |
//! | `VM_CUDA_FAKE_MEMORY` | bytes of memory of each: 1 GiB |
//! | `VM_CUDA_FAKE_VERSION` | what `cuDriverGetVersion` says: 13000. `cuGetProcAddress` hides what is newer; `dlsym` does not, as the symbols are there |
//! | `VM_CUDA_FAKE_ATTRIBUTES` | what devices say of attributes that are 0 otherwise |
//! | `VM_CUDA_FAKE_DELAY_US` | how long each operation of a stream waits before it runs, so that races show |
//! | `VM_CUDA_FAKE_FAIL` | calls that fail: `cuMemMap:3=2,cuMemCreate:1=2`, where the third `cuMemMap` returns 2; all versions of a function count as one |
//! | `VM_CUDA_FAKE_KERNELS` | a file of kernels, which do nothing: every image is of these then |
//! | `VM_CUDA_FAKE_TRACE` | a file that each call appends a line to: `cuMemFree_v2 dptr=0x7f0000200000 -> 0` |
//!
//! A call waits for the device for two minutes at most, so that a test ends.

use std::time::Duration;
use std::{env, fs};

use vm_cuda_driver::{Settings, Tests, number};

vm_cuda_driver::driver!(settings);

/// Reads the environment. A variable that does not parse is ignored.
fn settings() -> Settings {
    const PATIENCE: Duration = Duration::from_secs(120);
    let standard = Settings::default();
    Settings {
        name: "vm-cuda-fake",
        devices: number("VM_CUDA_FAKE_DEVICES", standard.devices),
        memory: number("VM_CUDA_FAKE_MEMORY", standard.memory),
        version: number("VM_CUDA_FAKE_VERSION", standard.version),
        patience: Some(PATIENCE),
        tests: Some(Tests {
            attributes: number("VM_CUDA_FAKE_ATTRIBUTES", 0),
            delay: Duration::from_micros(number("VM_CUDA_FAKE_DELAY_US", 0)),
            kernels: env::var("VM_CUDA_FAKE_KERNELS").ok().and_then(|path| fs::read_to_string(path).ok()),
            failures: env::var("VM_CUDA_FAKE_FAIL").unwrap_or_default(),
            trace: env::var("VM_CUDA_FAKE_TRACE").ok(),
        }),
        ..standard
    }
}
