//! Kernels in text: whatever a user writes.
#![cfg_attr(feature = "libfuzzer", no_main)]

fuzz::target!(|data: &[u8]| {
    vm_ir::fuzz::text(data);
});
