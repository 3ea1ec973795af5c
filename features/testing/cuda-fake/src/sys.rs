//! The driver's functions are exported from here.
#![allow(unsafe_code)]

vm_cuda_driver::driver!(super::settings);
