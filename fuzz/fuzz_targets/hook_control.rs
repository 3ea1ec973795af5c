//! Requests and answers of the memory hook's socket: whatever the other side sends, in parts of any size.
#![cfg_attr(feature = "libfuzzer", no_main)]

fuzz::target!(|data: &[u8]| vm_hook::control::fuzz(data));
