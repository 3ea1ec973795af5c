//! Frames of the paravirtual accelerator: whatever a guest sends.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    vm_paravirt::fuzz::frame(data);
});
