//! The fake's functions, with the signatures of HIP's.
#![allow(non_snake_case)]

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::sync::Arc;

use super::code::*;
use super::heap::Kind;
use super::stream::{Command, Event, Mark, Stream};
use super::{Object, State, devices, handle, lock, with_objects};
use crate::sys::{self, Attribute, Hip, Status};

pub(super) const INVALID: Status = 1;
const OUT_OF_MEMORY: Status = 2;
const NO_DEVICE: Status = 101;
const INVALID_HANDLE: Status = 400;
const NOT_READY: Status = 600;
const REGISTERED: Status = 712;
const CAPTURING: Status = 900;

pub(super) type Outcome = Result<(), Status>;

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

fn number(handle: *mut c_void) -> usize {
    handle.addr()
}

/// A call: what was planned for it on the thread's device, or what it does. What ends an object ends it on a device that is lost, too.
pub(super) fn call(name: &'static str, act: impl FnOnce(&Arc<State>) -> Outcome) -> Status {
    let Some(state) = devices().get(CURRENT.get()).cloned() else { return NO_DEVICE };
    if let Some(status) = state.planned(name) {
        if matches!(status, 4 | 214 | 700 | 702 | 709 | 710 | 719) {
            *lock(&state.lost) = Some(status);
        }
        return status;
    }
    let lost = *lock(&state.lost);
    let ends = ["Free", "Destroy", "Unload", "Unregister"].iter().any(|end| name.contains(end));
    match lost {
        Some(status) if !ends => status,
        lost => act(&state).err().or(lost).unwrap_or(0),
    }
}

/// Stores what a function gives.
pub(super) fn give<T>(place: *mut T, value: T) -> Outcome {
    if place.is_null() {
        return Err(INVALID);
    }
    // SAFETY: callers hand in pointers to locals.
    unsafe { place.write(value) };
    Ok(())
}

/// What a handle stands for.
pub(super) fn find<T>(
    state: &State,
    name: &str,
    at: *mut c_void,
    kind: impl Fn(&Object) -> Option<T>,
) -> Result<T, Status> {
    let found = with_objects(|objects| objects.get(&number(at)).and_then(|(_, object)| kind(object)));
    found.ok_or_else(|| {
        state.fault(name, format_args!("{at:?} is no such handle, or was ended"));
        INVALID_HANDLE
    })
}

fn stream(object: &Object) -> Option<Arc<Stream>> {
    if let Object::Stream(stream) = object { Some(Arc::clone(stream)) } else { None }
}

fn event(object: &Object) -> Option<Arc<Event>> {
    if let Object::Event(event) = object { Some(Arc::clone(event)) } else { None }
}

pub(super) fn forget(at: *mut c_void) {
    with_objects(|objects| objects.remove(&number(at)));
}

unsafe extern "C" fn hipInit(_: c_uint) -> Status {
    0
}

unsafe extern "C" fn hipRuntimeGetVersion(version: *mut c_int) -> Status {
    call("hipRuntimeGetVersion", |_| give(version, 60_241_134))
}

unsafe extern "C" fn hipGetDeviceCount(count: *mut c_int) -> Status {
    give(count, devices().len() as c_int).err().unwrap_or(0)
}

unsafe extern "C" fn hipSetDevice(device: c_int) -> Status {
    let before = CURRENT.replace(device as usize);
    let status = call("hipSetDevice", |_| Ok(()));
    // To leave a device that is lost is no failure.
    match status {
        0 => 0,
        status => {
            CURRENT.set(before);
            status
        }
    }
}

unsafe extern "C" fn hipGetDevice(device: *mut c_int) -> Status {
    give(device, CURRENT.get() as c_int).err().unwrap_or(0)
}

/// A call that is about the device with a number, whatever the thread's is.
fn of_device(name: &'static str, device: c_int, act: impl FnOnce(&Arc<State>) -> Outcome) -> Status {
    let before = CURRENT.replace(device as usize);
    let status = call(name, act);
    CURRENT.set(before);
    status
}

unsafe extern "C" fn hipDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int) -> Status {
    const VALUES: [(Attribute, c_int); 8] = [
        (Attribute::MaxBlockDimX, 1024),
        (Attribute::MaxBlockDimY, 1024),
        (Attribute::MaxBlockDimZ, 1024),
        (Attribute::MaxGridDimX, c_int::MAX),
        (Attribute::MaxGridDimY, 65_536),
        (Attribute::MaxGridDimZ, 65_536),
        (Attribute::MaxThreadsPerBlock, 1024),
        (Attribute::MaxSharedMemoryPerBlock, 64 << 10),
    ];
    of_device("hipDeviceGetAttribute", device, |state| {
        if attribute == Attribute::WarpSize as c_uint {
            return give(value, state.options.wavefront as c_int);
        }
        if attribute == Attribute::ConcurrentManagedAccess as c_uint {
            return give(value, c_int::from(state.options.unified));
        }
        let known = VALUES.iter().find(|(known, _)| *known as c_uint == attribute);
        known.map_or(Err(INVALID), |(_, known)| give(value, *known))
    })
}

/// Writes a string that ends with a zero byte, if there is room.
fn give_text(place: *mut c_char, bytes: c_int, text: &str) -> Outcome {
    if place.is_null() || text.len() >= bytes.max(0) as usize {
        return Err(INVALID);
    }
    // SAFETY: the caller has room for that many bytes.
    let place = unsafe { std::slice::from_raw_parts_mut(place.cast::<MaybeUninit<u8>>(), text.len() + 1) };
    for (place, byte) in place.iter_mut().zip(text.bytes().chain([0])) {
        place.write(byte);
    }
    Ok(())
}

unsafe extern "C" fn hipDeviceGetName(name: *mut c_char, bytes: c_int, device: c_int) -> Status {
    of_device("hipDeviceGetName", device, |_| give_text(name, bytes, "AMD Instinct (fake)"))
}

unsafe extern "C" fn hipDeviceTotalMem(bytes: *mut usize, device: c_int) -> Status {
    of_device("hipDeviceTotalMem", device, |state| give(bytes, state.options.memory_bytes as usize))
}

unsafe extern "C" fn hipDeviceGetPCIBusId(address: *mut c_char, bytes: c_int, device: c_int) -> Status {
    of_device("hipDeviceGetPCIBusId", device, |state| {
        give_text(address, bytes, &state.address().to_uppercase())
    })
}

unsafe extern "C" fn hipMemGetInfo(free: *mut usize, total: *mut usize) -> Status {
    call("hipMemGetInfo", |state| {
        let heap = lock(&state.heap);
        give(free, heap.free() as usize)?;
        give(total, heap.total() as usize)
    })
}

fn allocate(name: &'static str, kind: Kind, at: *mut *mut c_void, bytes: usize) -> Status {
    call(name, |state| {
        let address = lock(&state.heap).allocate(kind, bytes).ok_or(OUT_OF_MEMORY)?;
        give(at, std::ptr::with_exposed_provenance_mut(address as usize))
    })
}

/// Gives back what begins at an address; noted is what is none of these kinds, or in use.
fn release(name: &'static str, kinds: &[Kind], at: *mut c_void) -> Status {
    call(name, |state| {
        let address = at.addr() as u64;
        // Whichever device is the thread's.
        let owner = devices().into_iter().find_map(|state| {
            let bytes = lock(&state.heap).at(address, kinds)?;
            Some((state, bytes))
        });
        let Some((state, bytes)) = owner else {
            state.fault(name, format_args!("{at:?} is not allocated so"));
            return Err(INVALID);
        };
        if !state.is_lost() && state.in_use(address, bytes) {
            state.fault(name, format_args!("{at:?} is used by a command that has not run"));
            return Err(INVALID);
        }
        lock(&state.heap).give(address);
        Ok(())
    })
}

unsafe extern "C" fn hipMalloc(at: *mut *mut c_void, bytes: usize) -> Status {
    allocate("hipMalloc", Kind::Device, at, bytes)
}

unsafe extern "C" fn hipFree(at: *mut c_void) -> Status {
    release("hipFree", &[Kind::Device, Kind::Managed], at)
}

unsafe extern "C" fn hipMallocManaged(at: *mut *mut c_void, bytes: usize, _: c_uint) -> Status {
    allocate("hipMallocManaged", Kind::Managed, at, bytes)
}

unsafe extern "C" fn hipHostMalloc(at: *mut *mut c_void, bytes: usize, _: c_uint) -> Status {
    allocate("hipHostMalloc", Kind::Pinned, at, bytes)
}

unsafe extern "C" fn hipHostFree(at: *mut c_void) -> Status {
    release("hipHostFree", &[Kind::Pinned], at)
}

unsafe extern "C" fn hipHostRegister(host: *mut c_void, bytes: usize, _: c_uint) -> Status {
    call("hipHostRegister", |state| {
        let address = host.expose_provenance() as u64;
        if lock(&state.heap).register(address, bytes as u64) { Ok(()) } else { Err(REGISTERED) }
    })
}

unsafe extern "C" fn hipHostUnregister(host: *mut c_void) -> Status {
    release("hipHostUnregister", &[Kind::Registered], host)
}

unsafe extern "C" fn hipHostGetDevicePointer(at: *mut *mut c_void, host: *mut c_void, _: c_uint) -> Status {
    call("hipHostGetDevicePointer", |state| {
        let kinds = [Kind::Pinned, Kind::Registered];
        let known = lock(&state.heap).at(host.addr() as u64, &kinds);
        known.map_or(Err(INVALID), |_| give(at, host))
    })
}

/// Gives a stream a command whose bytes must be allocated.
pub(super) fn push(state: &Arc<State>, name: &str, to: sys::Stream, command: Command) -> Outcome {
    for (at, bytes) in command.ranges() {
        if !state.reaches(at, bytes) {
            state.fault(name, format_args!("{bytes} bytes at {at:#x} are not allocated"));
            return Err(INVALID);
        }
    }
    find(state, name, to, stream)?.push(command);
    Ok(())
}

unsafe extern "C" fn hipMemcpyAsync(
    to: *mut c_void,
    from: *const c_void,
    bytes: usize,
    _: c_uint,
    stream: sys::Stream,
) -> Status {
    const NAME: &str = "hipMemcpyAsync";
    call(NAME, |state| {
        let (to, from) = (to.addr() as u64, from.addr() as u64);
        push(state, NAME, stream, Command::Copy { to, from, bytes: bytes as u64 })
    })
}

unsafe extern "C" fn hipMemsetD8Async(
    at: *mut c_void,
    value: u8,
    bytes: usize,
    stream: sys::Stream,
) -> Status {
    const NAME: &str = "hipMemsetD8Async";
    call(NAME, |state| {
        push(state, NAME, stream, Command::Fill { at: at.addr() as u64, bytes: bytes as u64, value })
    })
}

unsafe extern "C" fn hipStreamCreateWithFlags(at: *mut sys::Stream, _: c_uint) -> Status {
    call("hipStreamCreateWithFlags", |state| {
        let stream = Stream::start(state).map_err(|_| OUT_OF_MEMORY)?;
        give(at, handle(state, Object::Stream(stream)))
    })
}

unsafe extern "C" fn hipStreamDestroy(at: sys::Stream) -> Status {
    call("hipStreamDestroy", |state| {
        find(state, "hipStreamDestroy", at, stream)?.end();
        forget(at);
        Ok(())
    })
}

unsafe extern "C" fn hipStreamWaitEvent(at: sys::Stream, wanted: sys::Event, _: c_uint) -> Status {
    const NAME: &str = "hipStreamWaitEvent";
    call(NAME, |state| {
        let (stream, event) = (find(state, NAME, at, stream)?, find(state, NAME, wanted, event)?);
        if lock(&stream.capture).is_some() {
            return Err(CAPTURING);
        }
        if let Some(mark) = lock(&event.mark).clone() {
            stream.push(Command::Wait(mark));
        }
        Ok(())
    })
}

unsafe extern "C" fn hipStreamBeginCapture(at: sys::Stream, _: c_uint) -> Status {
    const NAME: &str = "hipStreamBeginCapture";
    call(NAME, |state| {
        *lock(&find(state, NAME, at, stream)?.capture) = Some(Vec::new());
        Ok(())
    })
}

unsafe extern "C" fn hipStreamEndCapture(at: sys::Stream, graph: *mut sys::Graph) -> Status {
    const NAME: &str = "hipStreamEndCapture";
    let of = with_objects(|objects| objects.get(&number(at)).and_then(|(_, object)| stream(object)));
    // A capture that fails has ended, too.
    let captured = of.and_then(|stream| lock(&stream.capture).take());
    call(NAME, |state| {
        find(state, NAME, at, stream)?;
        give(graph, handle(state, Object::Graph(captured.ok_or(CAPTURING)?)))
    })
}

unsafe extern "C" fn hipEventCreateWithFlags(at: *mut sys::Event, flags: c_uint) -> Status {
    call("hipEventCreateWithFlags", |state| {
        let event = Event { timed: flags & 2 == 0, ..Event::default() };
        give(at, handle(state, Object::Event(Arc::new(event))))
    })
}

unsafe extern "C" fn hipEventDestroy(at: sys::Event) -> Status {
    call("hipEventDestroy", |state| {
        find(state, "hipEventDestroy", at, event)?;
        forget(at);
        Ok(())
    })
}

unsafe extern "C" fn hipEventRecord(at: sys::Event, to: sys::Stream) -> Status {
    const NAME: &str = "hipEventRecord";
    call(NAME, |state| {
        let (event, stream) = (find(state, NAME, at, event)?, find(state, NAME, to, stream)?);
        let mark = Arc::new(Mark::default());
        stream.push(Command::Record(Arc::clone(&mark)));
        // One that is captured is reached when the graph is run.
        *lock(&event.mark) = Some(mark);
        Ok(())
    })
}

unsafe extern "C" fn hipEventQuery(at: sys::Event) -> Status {
    const NAME: &str = "hipEventQuery";
    call(NAME, |state| {
        let event = find(state, NAME, at, event)?;
        let reached = lock(&event.mark).as_ref().is_none_or(|mark| mark.at().is_some());
        if reached { Ok(()) } else { Err(NOT_READY) }
    })
}

unsafe extern "C" fn hipEventElapsedTime(place: *mut f32, from: sys::Event, to: sys::Event) -> Status {
    const NAME: &str = "hipEventElapsedTime";
    call(NAME, |state| {
        let at = |handle| {
            let event = find(state, NAME, handle, event)?;
            let mark = lock(&event.mark).clone().filter(|_| event.timed).ok_or(INVALID_HANDLE)?;
            mark.at().ok_or(NOT_READY)
        };
        let (from, to) = (at(from)?, at(to)?);
        give(place, to.saturating_duration_since(from).as_secs_f32() * 1e3)
    })
}

unsafe extern "C" fn hipGetErrorName(status: Status) -> *const c_char {
    let name = match status {
        1 => c"hipErrorInvalidValue",
        2 => c"hipErrorOutOfMemory",
        200 => c"hipErrorInvalidImage",
        209 => c"hipErrorNoBinaryForGpu",
        400 => c"hipErrorInvalidHandle",
        500 => c"hipErrorNotFound",
        700 => c"hipErrorIllegalAddress",
        719 => c"hipErrorLaunchFailure",
        _ => c"hipErrorUnknown",
    };
    name.as_ptr()
}

unsafe extern "C" fn hipGetErrorString(_: Status) -> *const c_char {
    c"of the fake".as_ptr()
}

macro_rules! table {
    ($($name:ident),* $(,)?) => {
        /// All of them.
        pub(super) fn table() -> Hip {
            // SAFETY: it knows no function by its name.
            let mut hip = unsafe { Hip::of("a fake HIP".into(), None, |_, _| None) };
            $(hip.$name = Some($name);)*
            hip
        }
    };
}

table! {
    hipInit, hipRuntimeGetVersion, hipGetDeviceCount, hipSetDevice, hipGetDevice, hipDeviceGetAttribute, hipDeviceGetName,
    hipDeviceTotalMem, hipDeviceGetPCIBusId, hipMemGetInfo, hipMalloc, hipFree, hipMallocManaged, hipHostMalloc, hipHostFree,
    hipHostRegister, hipHostUnregister, hipHostGetDevicePointer, hipMemcpyAsync, hipMemsetD8Async, hipStreamCreateWithFlags,
    hipStreamDestroy, hipStreamWaitEvent, hipStreamBeginCapture, hipStreamEndCapture, hipEventCreateWithFlags, hipEventDestroy,
    hipEventRecord, hipEventQuery, hipEventElapsedTime, hipModuleLoadData, hipModuleUnload, hipModuleGetFunction,
    hipFuncGetAttribute, hipModuleLaunchKernel, hipGraphInstantiateWithFlags, hipGraphLaunch, hipGraphExecDestroy,
    hipGraphDestroy, hipGetErrorName, hipGetErrorString,
}
