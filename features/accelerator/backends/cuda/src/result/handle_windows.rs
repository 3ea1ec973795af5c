//! What the driver is given for a handle.

use std::os::windows::io::AsRawHandle;
use std::ptr;

use vm_accel::OsHandle;

use crate::sys::{
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st__bindgen_ty_1 as MemoryHandle,
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st__bindgen_ty_1__bindgen_ty_1 as Win32Memory,
    CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_st__bindgen_ty_1 as SemaphoreHandle,
    CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_st__bindgen_ty_1__bindgen_ty_1 as Win32Semaphore,
};

fn raw(handle: &OsHandle) -> *mut std::ffi::c_void {
    match handle {
        OsHandle::Nt(handle) => handle.as_raw_handle(),
        OsHandle::Kmt(handle) => ptr::without_provenance_mut(*handle),
    }
}

pub(super) fn of_memory(handle: &OsHandle) -> MemoryHandle {
    MemoryHandle { win32: Win32Memory { handle: raw(handle), name: ptr::null() } }
}

pub(super) fn of_semaphore(handle: &OsHandle) -> SemaphoreHandle {
    SemaphoreHandle { win32: Win32Semaphore { handle: raw(handle), name: ptr::null() } }
}

/// Whether it is one of the graphics kernel.
pub(super) fn is_kmt(handle: &OsHandle) -> bool {
    matches!(handle, OsHandle::Kmt(_))
}

/// Closes it: on Windows the driver has a handle of its own of what it imported.
pub(super) fn give(handle: OsHandle) {
    drop(handle);
}
