//! Guest files: whatever an operator, or a tool, writes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vm_service::config::fuzz(data));
