//! A device's config space, and what a guest does to it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vm_passthrough::sim::fuzz_config_space(data));
