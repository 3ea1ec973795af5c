//! Frames of the CUDA bridge: whatever a program sends.
#![cfg_attr(feature = "libfuzzer", no_main)]

fuzz::target!(|data: &[u8]| {
    vm_bridge::server::fuzz::frames(data);
});
