//! Lines of a guest's control socket: whatever a client sends, in parts of any size.
#![cfg_attr(feature = "libfuzzer", no_main)]

fuzz::target!(|data: &[u8]| vm_service::guest::control::fuzz(data));
