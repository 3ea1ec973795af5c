//! What Python's C interface and DLPack's hand over as pointers.
#![allow(unsafe_code)]

pub(crate) mod deferred;
pub(crate) mod dlpack;

use vm_array::{Array, Device, Place, Result};

use deferred::Deferred;

/// An array of elements where another library has them.
pub(crate) fn adopt(place: Place, device: &Device, keeper: Deferred) -> Result<Array> {
    // SAFETY: the library that said so answers for it; what keeps the memory is kept until the device is done with it.
    unsafe { place.adopt(device, keeper) }
}

/// An array of copies of elements that another library has in the host's memory, while that is kept.
pub(crate) fn copied(place: &Place, device: &Device) -> Result<Array> {
    // SAFETY: as above.
    unsafe { place.copied(device) }
}

/// Copies an array's elements to where another library wants them, while that memory is kept.
pub(crate) fn fill(place: &Place, array: &Array) -> Result<()> {
    // SAFETY: the library says that the memory may be written, and answers for it.
    unsafe { place.fill(array) }
}

/// Lets what a device is given begin after what another library's stream was given.
pub(crate) fn follow(device: &Device, stream: u64) -> Result<()> {
    // SAFETY: the library says that it is one of its streams, and answers for it.
    unsafe { device.follow(stream) }
}

/// Lets what another library's stream is given begin after what a device was given.
pub(crate) fn precede(device: &Device, stream: u64) -> Result<()> {
    // SAFETY: as above.
    unsafe { device.precede(stream) }
}
