//! Kernels in text: whatever a user writes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    vm_ir::fuzz::text(data);
});
