//! Physical memory that the program makes itself, and maps. It is there while it has a reference or a mapping; what is imported is another's.

use super::*;
use crate::sys::real::ON_DEVICE;

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuMemCreate(
    handle: *mut u64,
    bytes: usize,
    property: *const Property,
    flags: u64,
) -> u32 {
    let _pass = hook::enter(false);
    if let Err(Failure(code)) = before() {
        return code;
    }
    let own =
        || real!(c"cuMemCreate" (*mut u64, usize, *const Property, u64) (handle, bytes, property, flags));
    // SAFETY: it is null, or the caller's.
    let is_of_device = unsafe { property.as_ref() }.is_some_and(|of| of.location.kind == ON_DEVICE);
    if handle.is_null() || !is_of_device || !hook::is_here() {
        return own();
    }
    // SAFETY: the driver has written it.
    natively(Kind::Physical, bytes as u64, own, || (unsafe { *handle }, bytes as u64))
}

/// Calls the driver, and notes what that has done before another thread can be given the same handle or address.
fn noting(call: impl FnOnce() -> u32, note: impl FnOnce(&mut Manager<Real>)) -> u32 {
    if let Err(Failure(code)) = before() {
        return code;
    }
    if !hook::is_here() {
        return call();
    }
    with(|manager| {
        let result = call();
        if result == 0 {
            note(manager);
        }
        result
    })
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuMemRelease(handle: u64) -> u32 {
    let _pass = hook::enter(true);
    noting(|| real!(c"cuMemRelease"(u64)(handle)), |manager| manager.physical_released(handle))
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuMemMap(
    address: u64,
    bytes: usize,
    offset: usize,
    handle: u64,
    flags: u64,
) -> u32 {
    let _pass = hook::enter(false);
    let own = || real!(c"cuMemMap"(u64, usize, usize, u64, u64)(address, bytes, offset, handle, flags));
    noting(own, |manager| manager.physical_mapped(address, bytes as u64, handle))
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuMemUnmap(address: u64, bytes: usize) -> u32 {
    let _pass = hook::enter(false);
    let own = || real!(c"cuMemUnmap"(u64, usize)(address, bytes));
    noting(own, |manager| manager.physical_unmapped(address, bytes as u64))
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuMemRetainAllocationHandle(handle: *mut u64, address: *mut c_void) -> u32 {
    let _pass = hook::enter(false);
    if let Err(Failure(code)) = pinned(address as u64) {
        return code;
    }
    let own = || real!(c"cuMemRetainAllocationHandle" (*mut u64, *mut c_void) (handle, address));
    // SAFETY: the driver has written it.
    noting(own, |manager| manager.physical_retained(unsafe { *handle }))
}

/// The driver may know the memory, and give its handle once more.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuMemImportFromShareableHandle(
    handle: *mut u64,
    shared: *mut c_void,
    kind: c_int,
) -> u32 {
    let _pass = hook::enter(false);
    let own =
        || real!(c"cuMemImportFromShareableHandle" (*mut u64, *mut c_void, c_int) (handle, shared, kind));
    // SAFETY: the driver has written it.
    noting(own, |manager| manager.physical_retained(unsafe { *handle }))
}
