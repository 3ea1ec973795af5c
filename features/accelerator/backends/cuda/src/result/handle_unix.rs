//! What the driver is given for a file descriptor.

use std::os::fd::{AsRawFd, IntoRawFd};

use vm_accel::OsHandle;

use crate::sys::{
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st__bindgen_ty_1 as MemoryHandle,
    CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_st__bindgen_ty_1 as SemaphoreHandle,
};

pub(super) fn of_memory(handle: &OsHandle) -> MemoryHandle {
    MemoryHandle { fd: handle.as_raw_fd() }
}

pub(super) fn of_semaphore(handle: &OsHandle) -> SemaphoreHandle {
    SemaphoreHandle { fd: handle.as_raw_fd() }
}

/// Whether it is one of Windows' graphics kernel.
pub(super) fn is_kmt(_: &OsHandle) -> bool {
    false
}

/// Leaves it to the driver.
pub(super) fn give(handle: OsHandle) {
    let _ = handle.into_raw_fd();
}
