//! What programs ask of addresses, and by what others come to memory.

use super::*;

/// An allocation of virtual memory.
#[derive(Clone, Copy)]
struct Whole {
    start: u64,
    bytes: u64,
    context: u64,
    /// 0 of another process's.
    number: u64,
    /// What no other memory has or has had; the driver's own are small.
    id: u64,
}

/// The allocation of virtual memory that an address lies in. It is whole from here on.
fn whole(address: u64) -> Result<Option<Whole>> {
    if !is_on() {
        return Ok(None);
    }
    if let Some((start, bytes, Of { context, number })) = sharing::around(address) {
        return Ok(Some(Whole { start, bytes, context, number: 0, id: 3 << 61 | number }));
    }
    with(|manager| {
        let Some(of) = manager.tracker().around(address) else { return Ok(None) };
        let (start, bytes, context, number) = (of.address, of.bytes, of.context, of.number);
        let found = Whole { start, bytes, context, number, id: 1 << 62 | number };
        manager.settle()?;
        Ok(Some(found))
    })
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuMemGetAddressRange_v2(
    base: *mut u64,
    size: *mut usize,
    address: u64,
) -> u32 {
    let _pass = hook::enter(false);
    match whole(address) {
        Ok(Some(Whole { start, bytes, .. })) => {
            // SAFETY: it is null or the caller's place for it.
            if let Some(base) = unsafe { base.as_mut() } {
                *base = start;
            }
            // SAFETY: likewise.
            if let Some(size) = unsafe { size.as_mut() } {
                *size = bytes as usize;
            }
            0
        }
        Ok(None) => real!(c"cuMemGetAddressRange_v2" (*mut u64, *mut usize, u64) (base, size, address)),
        Err(Failure(code)) => code,
    }
}

/// Makes an attribute of virtual memory what that of the driver's own memory is.
///
/// # Safety
/// The driver has written it to `data`.
unsafe fn as_native(data: *mut c_void, attribute: c_int, of: Whole) {
    let Whole { start, bytes, context, number, id } = of;
    // SYNC_MEMOPS, IS_LEGACY_CUDA_IPC_CAPABLE, ALLOWED_HANDLE_TYPES: numbers of which the driver has written a byte at least.
    let byte = match attribute {
        6 if number != 0 => {
            Some(SYNCHRONOUS.lock().unwrap_or_else(PoisonError::into_inner).contains(&number).into())
        }
        10 if number != 0 => Some(u8::from(control::is_on())),
        14 => Some(0),
        _ => None,
    };
    if let Some(byte) = byte {
        // SAFETY: the caller's promise.
        return unsafe { data.cast::<u8>().write(byte) };
    }
    let value = match attribute {
        // CONTEXT, RANGE_START_ADDR, RANGE_SIZE, MAPPING_SIZE, MAPPING_BASE_ADDR
        1 => context,
        11 | 19 => start,
        // BUFFER_ID, MEMORY_BLOCK_ID, which each piece has another of
        7 | 20 => id,
        12 => bytes,
        18 => bytes.next_multiple_of(vm_hook::driver::GRANULE),
        _ => return,
    };
    // SAFETY: these have eight bytes.
    unsafe { data.cast::<u64>().write_unaligned(value) };
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuPointerGetAttribute(
    data: *mut c_void,
    attribute: c_int,
    address: u64,
) -> u32 {
    let _pass = hook::enter(false);
    let own = match whole(address) {
        Ok(own) => own,
        Err(Failure(code)) => return code,
    };
    // P2P_TOKENS: another device may read the memory by them.
    if attribute == 5
        && own.is_some()
        && let Err(Failure(code)) = with(|manager| manager.pin(address))
    {
        return code;
    }
    let result = real!(c"cuPointerGetAttribute" (*mut c_void, c_int, u64) (data, attribute, address));
    if let (0, Some(own)) = (result, own) {
        // SAFETY: the driver has just written it.
        unsafe { as_native(data, attribute, own) };
    }
    result
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuPointerGetAttributes(
    count: c_uint,
    attributes: *mut c_int,
    data: *mut *mut c_void,
    address: u64,
) -> u32 {
    let _pass = hook::enter(false);
    let own = match whole(address) {
        Ok(own) => own,
        Err(Failure(code)) => return code,
    };
    let result = real!(c"cuPointerGetAttributes" (c_uint, *mut c_int, *mut *mut c_void, u64) (count, attributes, data, address));
    if let (0, Some(own)) = (result, own) {
        // SAFETY: the driver has read as many attributes.
        let attributes = unsafe { slice::from_raw_parts(attributes, count as usize) };
        // SAFETY: and written as many values.
        let data = unsafe { slice::from_raw_parts(data, count as usize) };
        for (data, attribute) in data.iter().zip(attributes) {
            // SAFETY: the driver has just written it.
            unsafe { as_native(*data, *attribute, own) };
        }
    }
    result
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuPointerSetAttribute(
    value: *const c_void,
    attribute: c_int,
    address: u64,
) -> u32 {
    let _pass = hook::enter(false);
    // SYNC_MEMOPS, which virtual memory does not have.
    if attribute == 6
        && !value.is_null()
        && let Ok(Some(own)) = whole(address)
    {
        let mut synchronous = SYNCHRONOUS.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller gives an unsigned integer.
        if unsafe { *value.cast::<c_uint>() } != 0 {
            synchronous.insert(own.number);
            IS_SYNCHRONOUS.store(true, Ordering::Release);
        } else {
            synchronous.remove(&own.number);
        }
        drop(synchronous);
        return code(with(|manager| manager.pin(address)));
    }
    real!(c"cuPointerSetAttribute" (*const c_void, c_int, u64) (value, attribute, address))
}

/// Memory that others come to by a handle stays where it is.
pub(super) fn pinned(address: u64) -> Result<()> {
    if is_on() { with(|manager| manager.pin(address)) } else { Ok(()) }
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuMemGetHandleForAddressRange(
    handle: *mut c_void,
    address: u64,
    bytes: usize,
    kind: c_int,
    flags: u64,
) -> u32 {
    let _pass = hook::enter(false);
    match pinned(address) {
        Ok(()) => {
            real!(c"cuMemGetHandleForAddressRange" (*mut c_void, u64, usize, c_int, u64) (handle, address, bytes, kind, flags))
        }
        Err(Failure(code)) => code,
    }
}
