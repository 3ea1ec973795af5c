//! Kernels in the binary form: whatever a guest sends.
#![cfg_attr(feature = "libfuzzer", no_main)]

fuzz::target!(|data: &[u8]| {
    vm_ir::fuzz::binary(data);
});
