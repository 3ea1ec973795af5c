//! A CUDA driver on the host's processor: `libvm_cuda_cpu.so` is [`vm_cuda_fake`] with what runs PTX. Linked as `libcuda.so.1` in a
//! directory of `LD_LIBRARY_PATH`, or behind the bridge, it runs CUDA programs on machines without a GPU.
//!
//! It is a library of its own, as tests of programs that hook the driver load the other, which links no compiler.

// The driver's functions are exported from there.
use vm_cuda_fake as _;
