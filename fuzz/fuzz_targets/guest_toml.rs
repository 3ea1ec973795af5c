//! Guest files: whatever an operator, or a tool, writes.
#![cfg_attr(feature = "libfuzzer", no_main)]

fuzz::target!(|data: &[u8]| vm_service::config::fuzz(data));
