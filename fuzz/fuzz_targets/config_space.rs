//! Config space: whatever a device shows, and whatever a guest writes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vm_passthrough::guest::fuzz_config_space(data));
