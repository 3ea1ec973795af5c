//! Records of the ledger of claims: what a crash or a full disk leaves of one.
#![cfg_attr(feature = "libfuzzer", no_main)]

fuzz::target!(|data: &[u8]| vm_passthrough::ledger::fuzz_record(data));
