//! What is reported on a machine without the driver.

use vm_accel::Error;
use vm_cuda::CudaAccelerator;

#[test]
fn a_missing_library_is_named_with_its_package() {
    match CudaAccelerator::new(0) {
        Ok(_) => println!("skipped: this machine has the driver"),
        Err(Error::Unavailable { library, remedy, .. }) => {
            assert_eq!(library, "libcuda.so.1");
            assert!(remedy.contains("libcuda1") || remedy.contains("nvidia-smi"), "{remedy}");
            // Asked again, and for other things, it says the same.
            for again in [CudaAccelerator::new(1), CudaAccelerator::at("0000:01:00.0")] {
                assert!(matches!(again, Err(Error::Unavailable { .. })), "{again:?}");
            }
            assert!(matches!(vm_cuda::devices(), Err(Error::Unavailable { .. })));
        }
        Err(error) => panic!("{error}"),
    }
}
