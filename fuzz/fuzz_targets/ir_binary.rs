//! Kernels in the binary form: whatever a guest sends.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    vm_ir::fuzz::binary(data);
});
