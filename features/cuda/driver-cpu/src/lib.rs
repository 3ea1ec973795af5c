//! A CUDA driver on the host's processor: `libvm_cuda_cpu.so` is [`vm_cuda_driver`] with what runs PTX. Linked as `libcuda.so.1` in a
//! directory of `LD_LIBRARY_PATH`, or behind the bridge, it runs CUDA programs on machines without a GPU.
//!
//! | variable | says |
//! | --- | --- |
//! | `VM_CUDA_CPU_DEVICES` | how many devices there are: 1 |
//! | `VM_CUDA_CPU_MEMORY` | bytes of memory of each: 1 GiB |
//! | `VM_CUDA_CPU_SECONDS` | how long a kernel may run: 60 |

use std::time::Duration;

use vm_cuda_driver::{Settings, number};

vm_cuda_driver::driver!(settings);

/// Reads the environment. A variable that does not parse is ignored.
fn settings() -> Settings {
    let standard = Settings::default();
    Settings {
        devices: number("VM_CUDA_CPU_DEVICES", standard.devices),
        memory: number("VM_CUDA_CPU_MEMORY", standard.memory),
        kernel_time: Duration::from_secs(number("VM_CUDA_CPU_SECONDS", standard.kernel_time.as_secs())),
        ..standard
    }
}
