//! Memory of other processes.

use super::*;

/// `CUipcMemHandle`, `CUipcEventHandle`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Ipc([u8; 64]);

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuIpcGetMemHandle(handle: *mut Ipc, address: u64) -> u32 {
    let _pass = hook::enter(false);
    if !handle.is_null()
        && is_on()
        && control::is_on()
        && let Some(made) = sharing::handle(address)
    {
        return code(made.map(|made| {
            // SAFETY: the caller gives the place of a handle.
            unsafe { *handle = Ipc(made) };
        }));
    }
    match pinned(address) {
        Ok(()) => real!(c"cuIpcGetMemHandle" (*mut Ipc, u64) (handle, address)),
        Err(Failure(code)) => code,
    }
}

/// Opens a handle of the hook's; none where it is the driver's.
///
/// # Safety
/// `address` is null or the place of an address.
unsafe fn imported(address: *mut u64, handle: &Ipc) -> Option<u32> {
    if address.is_null() || !hook::is_here() {
        return None;
    }
    Some(code(sharing::open(&handle.0)?.map(|opened| {
        // SAFETY: the caller's promise.
        unsafe { *address = opened };
    })))
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuIpcOpenMemHandle(address: *mut u64, handle: Ipc, flags: c_uint) -> u32 {
    let _pass = hook::enter(false);
    // SAFETY: the caller gives the place of an address.
    if let Some(code) = unsafe { imported(address, &handle) } {
        return code;
    }
    match before() {
        Ok(()) => real!(c"cuIpcOpenMemHandle" (*mut u64, Ipc, c_uint) (address, handle, flags)),
        Err(Failure(code)) => code,
    }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuIpcOpenMemHandle_v2(address: *mut u64, handle: Ipc, flags: c_uint) -> u32 {
    let _pass = hook::enter(false);
    // SAFETY: the caller gives the place of an address.
    if let Some(code) = unsafe { imported(address, &handle) } {
        return code;
    }
    match before() {
        Ok(()) => real!(c"cuIpcOpenMemHandle_v2" (*mut u64, Ipc, c_uint) (address, handle, flags)),
        Err(Failure(code)) => code,
    }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuIpcCloseMemHandle(address: u64) -> u32 {
    let _pass = hook::enter(true);
    if hook::is_here()
        && let Some(closed) = sharing::close(address)
    {
        return code(closed);
    }
    match before() {
        Ok(()) => real!(c"cuIpcCloseMemHandle"(u64)(address)),
        Err(Failure(code)) => code,
    }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuIpcOpenEventHandle(event: *mut u64, handle: Ipc) -> u32 {
    let _pass = hook::enter(false);
    match before() {
        Ok(()) => real!(c"cuIpcOpenEventHandle" (*mut u64, Ipc) (event, handle)),
        Err(Failure(code)) => code,
    }
}
