//! A driver for tests: contexts, streams and events are numbers, and each thread has its stack of contexts.
#![allow(unsafe_code, non_snake_case)]

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;

use vm_accel::sys::BorrowedResource;

use crate::sys::{
    BorrowedAdapter, CUDA_EXTERNAL_MEMORY_BUFFER_DESC, CUDA_EXTERNAL_MEMORY_HANDLE_DESC,
    CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC, CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC,
    CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS, CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS, CUDA_RESOURCE_DESC, CUarray,
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUexternalMemory, CUexternalSemaphore, CUgraphicsResource,
    CUmemoryPool, CUmipmappedArray, CUstream, CUsurfObject, Driver, Status,
};

thread_local! {
    static STACK: RefCell<Vec<CUcontext>> = const { RefCell::new(Vec::new()) };
    static CALLS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    static NEXT: Cell<usize> = const { Cell::new(100) };
}

/// Notes a call.
pub(crate) fn note(call: &str) -> Status {
    CALLS.with_borrow_mut(|calls| calls.push(call.to_owned()));
    0
}

/// The calls of this thread since this was asked last, without those that look what is current.
pub(crate) fn calls() -> Vec<String> {
    CALLS.take()
}

/// This thread's contexts, the current one last.
pub(crate) fn stack() -> Vec<CUcontext> {
    STACK.with_borrow(Vec::clone)
}

/// Gives this thread a stack of contexts.
pub(crate) fn set_current(stack: &[CUcontext]) {
    STACK.set(stack.to_vec());
}

/// A context of a device; its number 0 is the primary one.
pub(crate) fn context(device: usize, number: usize) -> CUcontext {
    ptr::without_provenance_mut(0x1000 + 0x100 * device + 0x10 * number)
}

fn next<T>() -> *mut T {
    NEXT.set(NEXT.get() + 100);
    ptr::without_provenance_mut(NEXT.get() - 100)
}

/// Stores what a function gives.
unsafe fn give<T>(place: *mut T, value: T) -> Status {
    // SAFETY: callers hand in pointers to locals.
    unsafe { place.write(value) };
    0
}

unsafe extern "C" fn get_current(context: *mut CUcontext) -> Status {
    let current = STACK.with_borrow(|stack| stack.last().copied().unwrap_or(ptr::null_mut()));
    // SAFETY: as the caller promises.
    unsafe { give(context, current) }
}

unsafe extern "C" fn set(context: CUcontext) -> Status {
    STACK.with_borrow_mut(|stack| {
        stack.pop();
        stack.extend((!context.is_null()).then_some(context));
    });
    note("set")
}

unsafe extern "C" fn push(context: CUcontext) -> Status {
    STACK.with_borrow_mut(|stack| stack.push(context));
    note("push")
}

unsafe extern "C" fn pop(context: *mut CUcontext) -> Status {
    note("pop");
    let popped = STACK.with_borrow_mut(Vec::pop);
    // SAFETY: as the caller promises.
    popped.map_or(201, |popped| unsafe { give(context, popped) })
}

unsafe extern "C" fn device_of_current(device: *mut CUdevice) -> Status {
    let current = STACK.with_borrow(|stack| stack.last().map_or(0, |context| context.addr()));
    // SAFETY: as the caller promises.
    unsafe { give(device, (current.saturating_sub(0x1000) / 0x100) as c_int) }
}

unsafe extern "C" fn get_device(device: *mut CUdevice, ordinal: c_int) -> Status {
    // SAFETY: as the caller promises.
    unsafe { give(device, ordinal) }
}

unsafe extern "C" fn retain(retained: *mut CUcontext, device: CUdevice) -> Status {
    note("cuDevicePrimaryCtxRetain");
    // SAFETY: as the caller promises.
    unsafe { give(retained, context(device as usize, 0)) }
}

unsafe extern "C" fn create_stream(stream: *mut CUstream, _: c_uint) -> Status {
    note("cuStreamCreate");
    NEXT.set(100);
    // SAFETY: as the caller promises.
    unsafe { give(stream, next()) }
}

unsafe extern "C" fn create_event(event: *mut CUevent, _: c_uint) -> Status {
    note("cuEventCreate");
    // SAFETY: as the caller promises.
    unsafe { give(event, next()) }
}

unsafe extern "C" fn is_capturing(_: CUstream, status: *mut c_uint) -> Status {
    // SAFETY: as the caller promises.
    unsafe { give(status, 0) }
}

unsafe extern "C" fn record(_: CUevent, stream: CUstream) -> Status {
    note(&format!("record on {}", stream.addr()))
}

unsafe extern "C" fn wait(stream: CUstream, _: CUevent, _: c_uint) -> Status {
    note(&format!("wait on {}", stream.addr()))
}

unsafe extern "C" fn fill(_: CUdeviceptr, _: u8, _: usize, stream: CUstream) -> Status {
    note(&format!("fill on {}", stream.addr()))
}

unsafe extern "C" fn allocate(address: *mut CUdeviceptr, _: usize, _: CUmemoryPool, _: CUstream) -> Status {
    // SAFETY: as the caller promises.
    unsafe { give(address, next::<u8>().addr() as CUdeviceptr) }
}

unsafe extern "C" fn import_memory(
    memory: *mut CUexternalMemory,
    description: *const CUDA_EXTERNAL_MEMORY_HANDLE_DESC,
) -> Status {
    // SAFETY: as the caller promises.
    let CUDA_EXTERNAL_MEMORY_HANDLE_DESC { type_, size, flags, .. } = unsafe { *description };
    note(&format!("import {size} bytes as {}, flags {flags}", type_ as u32));
    // SAFETY: as the caller promises.
    unsafe { give(memory, next()) }
}

unsafe extern "C" fn map_buffer(
    address: *mut CUdeviceptr,
    _: CUexternalMemory,
    part: *const CUDA_EXTERNAL_MEMORY_BUFFER_DESC,
) -> Status {
    // SAFETY: as the caller promises.
    let CUDA_EXTERNAL_MEMORY_BUFFER_DESC { offset, size, .. } = unsafe { *part };
    note(&format!("map {size} bytes from {offset}"));
    // SAFETY: as the caller promises.
    unsafe { give(address, next::<u8>().addr() as CUdeviceptr) }
}

unsafe extern "C" fn map_image(
    array: *mut CUmipmappedArray,
    _: CUexternalMemory,
    image: *const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC,
) -> Status {
    // SAFETY: as the caller promises.
    let CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC { offset, arrayDesc: of, numLevels, .. } =
        unsafe { *image };
    let (sides, format) = ([of.Width, of.Height, of.Depth], of.Format as u32);
    note(&format!(
        "map {numLevels} levels of {sides:?} from {offset}, {} of {format}, flags {:#x}",
        of.NumChannels, of.Flags
    ));
    // SAFETY: as the caller promises.
    unsafe { give(array, next()) }
}

unsafe extern "C" fn level(level: *mut CUarray, _: CUmipmappedArray, number: c_uint) -> Status {
    note(&format!("level {number}"));
    // SAFETY: as the caller promises.
    unsafe { give(level, next()) }
}

unsafe extern "C" fn create_surface(
    surface: *mut CUsurfObject,
    resource: *const CUDA_RESOURCE_DESC,
) -> Status {
    // SAFETY: as the caller promises.
    let resource = unsafe { (*resource).res };
    // SAFETY: as above, it is one of an array.
    note(&format!("surface of {}", unsafe { resource.array.hArray }.addr()));
    // SAFETY: as the caller promises.
    unsafe { give(surface, next::<u8>().addr() as CUsurfObject) }
}

unsafe extern "C" fn import_semaphore(
    semaphore: *mut CUexternalSemaphore,
    description: *const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC,
) -> Status {
    // SAFETY: as the caller promises.
    SEMAPHORE.set(unsafe { (*description).type_ } as u32);
    note(&format!("import a semaphore as {}", SEMAPHORE.get()));
    // SAFETY: as the caller promises.
    unsafe { give(semaphore, next()) }
}

/// The type of a keyed mutex, whose values are keys.
const KEYED_MUTEX: u32 = 7;

thread_local! {
    /// The type of the semaphore that was imported last.
    static SEMAPHORE: Cell<u32> = const { Cell::new(0) };
}

unsafe extern "C" fn wait_semaphore(
    _: *const CUexternalSemaphore,
    how: *const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS,
    count: c_uint,
    stream: CUstream,
) -> Status {
    // SAFETY: as the caller promises.
    let params = unsafe { (*how).params };
    if SEMAPHORE.get() == KEYED_MUTEX {
        note(&format!("acquire {} within {} ms", params.keyedMutex.key, params.keyedMutex.timeoutMs));
        return if params.keyedMutex.key == u64::MAX { 909 } else { 0 };
    }
    note(&format!("wait for {} of {count} on {}", params.fence.value, stream.addr()))
}

unsafe extern "C" fn signal_semaphore(
    _: *const CUexternalSemaphore,
    how: *const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS,
    count: c_uint,
    stream: CUstream,
) -> Status {
    // SAFETY: as the caller promises.
    let how = unsafe { &*how };
    let (fence, mutex) = (how.params.fence, how.params.keyedMutex);
    if SEMAPHORE.get() == KEYED_MUTEX {
        return note(&format!("release {}", mutex.key));
    }
    note(&format!("signal {} of {count} on {}", fence.value, stream.addr()))
}

unsafe extern "C" fn luid(luid: *mut c_char, node: *mut c_uint, device: CUdevice) -> Status {
    // SAFETY: as the caller promises.
    unsafe { give(luid.cast(), [device as u8; 8]) };
    // SAFETY: as above.
    unsafe { give(node, 1) }
}

unsafe extern "C" fn device_of_adapter(device: *mut CUdevice, adapter: *mut c_void) -> Status {
    // SAFETY: as the caller promises.
    unsafe { give(device, adapter.addr() as c_int) }
}

unsafe extern "C" fn register_graphics(
    resource: *mut CUgraphicsResource,
    object: *mut c_void,
    flags: c_uint,
) -> Status {
    note(&format!("register {:#x}, flags {flags}", object.addr()));
    // SAFETY: as the caller promises.
    unsafe { give(resource, object.cast()) }
}

unsafe extern "C" fn unregister_graphics(_: CUgraphicsResource) -> Status {
    note("unregister")
}

/// What somebody has at an address.
pub(crate) fn resource(address: usize, keeper: impl Any + Send + Sync) -> BorrowedResource {
    // SAFETY: this driver takes numbers.
    unsafe { BorrowedResource::new(ptr::without_provenance_mut(address), keeper) }
}

/// The adapter that is the device with a number.
pub(crate) fn adapter(device: usize) -> BorrowedAdapter {
    // SAFETY: as above.
    unsafe { BorrowedAdapter::new(ptr::without_provenance_mut(device)) }
}

/// The resource at 0xbad is not mapped twice.
unsafe extern "C" fn map_graphics(_: c_uint, resources: *mut CUgraphicsResource, stream: CUstream) -> Status {
    note(&format!("map on {}", stream.addr()));
    // SAFETY: as the caller promises.
    if unsafe { *resources }.addr() == 0xbad { 208 } else { 0 }
}

unsafe extern "C" fn unmap_graphics(_: c_uint, _: *mut CUgraphicsResource, _: CUstream) -> Status {
    note("unmap")
}

unsafe extern "C" fn mapped_buffer(
    address: *mut CUdeviceptr,
    bytes: *mut usize,
    _: CUgraphicsResource,
) -> Status {
    // SAFETY: as the caller promises.
    unsafe { give(bytes, 4096) };
    // SAFETY: as above.
    unsafe { give(address, next::<u8>().addr() as CUdeviceptr) }
}

unsafe extern "C" fn mapped_level(
    array: *mut CUarray,
    _: CUgraphicsResource,
    layer: c_uint,
    number: c_uint,
) -> Status {
    note(&format!("level {number} of layer {layer}"));
    // SAFETY: as the caller promises.
    unsafe { give(array, next()) }
}

unsafe extern "C" fn mapped_image(array: *mut CUmipmappedArray, _: CUgraphicsResource) -> Status {
    note("all levels");
    // SAFETY: as the caller promises.
    unsafe { give(array, next()) }
}

/// A driver of such functions. Those that are not here note their names.
pub(crate) fn driver() -> &'static Driver {
    let mut driver = Driver::fake();
    driver.cuCtxGetCurrent = get_current;
    driver.cuCtxSetCurrent = set;
    driver.cuCtxPushCurrent_v2 = push;
    driver.cuCtxPopCurrent_v2 = pop;
    driver.cuCtxGetDevice = device_of_current;
    driver.cuDeviceGet = get_device;
    driver.cuDevicePrimaryCtxRetain = retain;
    driver.cuStreamCreate = create_stream;
    driver.cuStreamIsCapturing = is_capturing;
    driver.cuStreamWaitEvent = wait;
    driver.cuEventCreate = create_event;
    driver.cuEventRecord = record;
    driver.cuMemsetD8Async = fill;
    driver.cuMemAllocFromPoolAsync = allocate;
    driver.cuImportExternalMemory = import_memory;
    driver.cuExternalMemoryGetMappedBuffer = map_buffer;
    driver.cuExternalMemoryGetMappedMipmappedArray = map_image;
    driver.cuMipmappedArrayGetLevel = level;
    driver.cuSurfObjectCreate = create_surface;
    driver.cuImportExternalSemaphore = import_semaphore;
    driver.cuWaitExternalSemaphoresAsync = wait_semaphore;
    driver.cuSignalExternalSemaphoresAsync = signal_semaphore;
    driver.cuDeviceGetLuid = Some(luid);
    driver.cuD3D11GetDevice = Some(device_of_adapter);
    driver.cuGraphicsD3D11RegisterResource = Some(register_graphics);
    driver.cuGraphicsUnregisterResource = Some(unregister_graphics);
    driver.cuGraphicsMapResources = Some(map_graphics);
    driver.cuGraphicsUnmapResources = Some(unmap_graphics);
    driver.cuGraphicsResourceGetMappedPointer_v2 = Some(mapped_buffer);
    driver.cuGraphicsSubResourceGetMappedArray = Some(mapped_level);
    driver.cuGraphicsResourceGetMappedMipmappedArray = Some(mapped_image);
    Box::leak(Box::new(driver))
}
