//! Frames of the paravirtual accelerator: whatever a guest sends.
#![cfg_attr(feature = "libfuzzer", no_main)]

fuzz::target!(|data: &[u8]| {
    vm_paravirt::fuzz::frame(data);
});
