//! The memory of tensors.
#![allow(unsafe_code)]

use std::slice;

use ort::value::DynTensor;

/// The bytes of a tensor in the host's memory, of which it has so many.
pub(crate) fn bytes(tensor: &DynTensor, bytes: usize) -> &[u8] {
    let start = tensor.data_ptr().cast::<u8>();
    if start.is_null() || bytes == 0 || !tensor.memory_info().is_cpu_accessible() {
        return &[];
    }
    // SAFETY: ONNX Runtime allocated the tensor for elements of `bytes` in all, as `Buffer::new` asked for, and they were
    // written with zeros. Nobody else writes them: a run borrows the tensor mutably by owning it.
    unsafe { slice::from_raw_parts(start, bytes) }
}

/// The same, to be written.
pub(crate) fn bytes_mut(tensor: &mut DynTensor, bytes: usize) -> &mut [u8] {
    let start = tensor.data_ptr_mut().cast::<u8>();
    if start.is_null() || bytes == 0 || !tensor.memory_info().is_cpu_accessible() {
        return &mut [];
    }
    // SAFETY: as above, and the tensor is borrowed mutably.
    unsafe { slice::from_raw_parts_mut(start, bytes) }
}
