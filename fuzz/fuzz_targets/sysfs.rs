//! Attributes and config space of a PCI function in sysfs.
#![cfg_attr(feature = "libfuzzer", no_main)]

fuzz::target!(|data: &[u8]| vm_passthrough::sim::fuzz_sysfs(data));
