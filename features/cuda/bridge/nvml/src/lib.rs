//! NVML for programs of the bridge: a `libnvidia-ml.so.1` that says what the server says of its driver and devices.
//!
//! The library `libvm_bridge_nvml.so` is linked as `libnvidia-ml.so.1` beside the bridge's `libcuda.so.1`, which it asks. It exports all functions of
//! `names.txt`. What `build.rs` lists is answered here, what `vm_bridge::wire::nvml` lists by NVIDIA's NVML on the server; the rest is
//! `NVML_ERROR_NOT_SUPPORTED`, and is logged once.
//!
//! Nothing that it does begins the program's CUDA session or makes a context: a program may ask it, set `CUDA_VISIBLE_DEVICES`, and fork before
//! it uses CUDA. As NVIDIA's, it lists the devices of the machine, by PCI addresses, whatever that variable says.

mod answers;
mod errors;
mod forward;
mod state;
mod sys;
