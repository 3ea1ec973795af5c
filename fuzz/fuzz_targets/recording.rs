//! Recordings of the bridge's sessions: whatever a file has.
#![cfg_attr(feature = "libfuzzer", no_main)]

fuzz::target!(|data: &[u8]| {
    vm_bridge::recording::fuzz(data);
});
