//! A device's config space, and what a guest does to it.
#![cfg_attr(feature = "libfuzzer", no_main)]

fuzz::target!(|data: &[u8]| vm_passthrough::sim::fuzz_config_space(data));
