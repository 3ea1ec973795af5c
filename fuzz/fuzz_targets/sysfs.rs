//! Attributes and config space of a PCI function in sysfs.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vm_passthrough::sim::fuzz_sysfs(data));
