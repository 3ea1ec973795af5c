//! Records of the ledger of claims: what a crash or a full disk leaves of one.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vm_passthrough::ledger::fuzz_record(data));
