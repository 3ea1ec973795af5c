//! What is reported on a machine without ROCm, or without a card.

use vm_accel::Error;
use vm_rocm::sys::LIBRARY_VARIABLE;
use vm_rocm::{RocmAccelerator, RocmError, device_count};

#[test]
fn what_is_missing_is_named() {
    match device_count() {
        Ok(count) => println!("skipped: this machine has {count} devices"),
        Err(Error::Unavailable { library, cause, remedy }) => {
            println!("{library}: {cause}; {remedy}");
            // The library, or else the driver, its nodes, or what hides the device.
            let told =
                [LIBRARY_VARIABLE, "amdgpu", "may not open", "there is no /dev", "HIP_VISIBLE_DEVICES"];
            assert!(told.iter().any(|part| remedy.contains(part)), "{remedy}");
            // Asked again, it says the same.
            let again = RocmAccelerator::new(0);
            assert!(matches!(again, Err(RocmError::Hip(Error::Unavailable { .. }))), "{again:?}");
        }
        Err(error) => panic!("{error}"),
    }
}
