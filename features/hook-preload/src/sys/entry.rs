//! The functions that stand in the place of the driver's.
#![allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::transmute;
use std::ptr;
use std::slice;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

use super::copies::{Copy, Form};
use super::find;
use super::real::{NOT_FOUND, Real, THREAD_STREAMS, call, done, found, synchronize};
use crate::hook::{self, before, is_on, with};
use crate::{control, pause, sharing, stacks};
use vm_hook::driver::{Failure, INVALID_VALUE, OUT_OF_MEMORY, Result};
use vm_hook::log::{self, Level, Value};
use vm_hook::manager::{Event, Freed, Manager};
use vm_hook::options::Options;
use vm_hook::tracker::Tag;

/// The hook's function of a name.
pub(super) fn hooked_by_name(name: &str) -> Option<*const ()> {
    HOOKED.binary_search_by_key(&name, |(name, _)| name).ok().map(|at| HOOKED[at].1.0)
}

/// Is it a name of a function that neither works on memory nor lets anybody look at it?
pub(super) fn is_quiet(name: &str) -> bool {
    QUIET.binary_search(&name).is_ok()
}

/// All names that are known.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    HOOKED.iter().map(|(name, _)| *name).chain(QUIET)
}

/// The address of a function.
struct Code(*const ());

// SAFETY: code is everybody's, and stays where it is.
unsafe impl Sync for Code {}

/// Allocations whose copies and fills end before the call does (`CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`), and whether there ever were any.
static SYNCHRONOUS: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());
static IS_SYNCHRONOUS: AtomicBool = AtomicBool::new(false);

const fn ends_with(name: &str, end: &str) -> bool {
    let (name, end) = (name.as_bytes(), end.as_bytes());
    let mut at = 0;
    while at < end.len() {
        if name.len() < end.len() || name[name.len() - end.len() + at] != end[at] {
            return false;
        }
        at += 1;
    }
    true
}

/// Does a function need no memory, as it only ends something?
const fn only_frees(name: &str) -> bool {
    let (name, words) =
        (name.as_bytes(), [b"Free".as_slice(), b"Destroy", b"Unload", b"Release", b"Reset", b"Unregister"]);
    let mut word = 0;
    while word < words.len() {
        let mut at = 0;
        while at + words[word].len() <= name.len() {
            let mut same = 0;
            while same < words[word].len() && name[at + same] == words[word][same] {
                same += 1;
            }
            if same == words[word].len() {
                return true;
            }
            at += 1;
        }
        word += 1;
    }
    false
}

const fn is_of_thread_stream(name: &str) -> bool {
    ends_with(name, "_ptds") || ends_with(name, "_ptsz")
}

/// Before work: what is put off is done.
fn ready(of_thread: bool) -> Result<()> {
    if of_thread && !THREAD_STREAMS.load(Ordering::Relaxed) {
        THREAD_STREAMS.store(true, Ordering::Release);
    }
    before()
}

/// Behind work that may have been a copy.
fn ended(name: &str, code: u32) -> u32 {
    if code == 0
        && IS_SYNCHRONOUS.load(Ordering::Acquire)
        && (name.starts_with("cuMemcpy") || name.starts_with("cuMemset"))
        // What is recorded does not run, and who waits ends the capture.
        && !with(|manager| manager.is_capturing())
    {
        return call!(c"cuCtxSynchronize"()());
    }
    code
}

/// The functions that only settle what is put off.
macro_rules! work {
    ($($index:literal $function:ident $name:literal ($($argument:ident)*);)*) => {
        static SLOTS: [AtomicPtr<c_void>; WORK] = [const { AtomicPtr::new(ptr::null_mut()) }; WORK];
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $function($($argument: usize),*) -> u32 {
                const NAME: &CStr = match CStr::from_bytes_with_nul(concat!($name, "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => panic!("a name without a nul"),
                };
                const OF_THREAD: bool = is_of_thread_stream($name);
                let Some(real) = found(&SLOTS[$index], NAME) else { return NOT_FOUND };
                let _pass = hook::enter(const { only_frees($name) });
                if let Err(Failure(code)) = ready(OF_THREAD) {
                    return code;
                }
                // SAFETY: the driver's function of this name takes so many words, all of them integers or pointers.
                let real = unsafe { transmute::<*mut c_void, unsafe extern "C" fn($(work!(@word $argument)),*) -> u32>(real) };
                // SAFETY: the caller's arguments are passed on as they are.
                ended($name, unsafe { real($($argument),*) })
            }
        )*
    };
    (@word $argument:ident) => { usize };
}

include!(concat!(env!("OUT_DIR"), "/functions.rs"));

/// Calls the driver's function of a name.
macro_rules! real {
    ($name:literal ( $($ty:ty),* ) ( $($argument:expr),* )) => { call!($name ( $($ty),* ) ( $($argument),* )) };
}

fn code(result: Result<()>) -> u32 {
    match result {
        Ok(()) => 0,
        Err(Failure(code)) => code,
    }
}

/// Logs an allocation of the driver's own, or its end.
fn log_native(what: &str, address: u64, bytes: u64) {
    log::line(Level::Info, what, &[("address", Value::Address(address)), ("bytes", Value::Number(bytes))]);
}

/// Notes who allocated what is at an address, if that is recorded.
fn noted(address: u64) {
    if let Some(stack) = stacks::current() {
        with(|manager| manager.allocated_by(address, stack));
    }
}

/// The driver allocates itself, within the quota; managed memory is where it is used, and has none. `made` tells the address and the bytes, of
/// which at least `bytes` were asked for.
fn natively(
    bytes: u64,
    is_managed: bool,
    allocate: impl FnOnce() -> u32,
    made: impl FnOnce() -> (u64, u64),
) -> u32 {
    let own = || {
        done(allocate()).inspect_err(|failure| log::event(&Event::Failed { bytes, code: failure.0 }))?;
        Ok(made())
    };
    let note = |manager: &mut Manager<Real>, (address, bytes)| {
        manager.native_allocated(manager.driver().context(), address, bytes, is_managed);
        (address, bytes)
    };
    let allocated = if is_on() && !is_managed && Options::get().quota.is_some() {
        // One look at the manager, so that threads do not pass the quota together.
        with(|manager| {
            manager.admit(bytes)?;
            let made = own()?;
            manager.admit(made.1).inspect_err(|_| {
                let _ = real!(c"cuMemFree_v2"(u64)(made.0));
            })?;
            Ok(note(manager, made))
        })
    } else {
        own().map(|made| with(|manager| note(manager, made)))
    };
    code(allocated.map(|(address, bytes)| {
        noted(address);
        log_native("native-allocated", address, bytes);
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuInit(flags: c_uint) -> u32 {
    let result = real!(c"cuInit"(c_uint)(flags));
    if result == 0 {
        hook::greet();
    }
    result
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(to: *mut u64, bytes: usize) -> u32 {
    let _pass = hook::enter(false);
    let own = || real!(c"cuMemAlloc_v2" (*mut u64, usize) (to, bytes));
    if to.is_null() || bytes == 0 || !hook::is_here() {
        return own();
    }
    if is_on() {
        let made = with(|manager| match manager.driver().current() {
            Some((context, device)) => manager.allocate(context, device, bytes as u64),
            None => Ok(None),
        });
        match made {
            Ok(Some(address)) => {
                // SAFETY: the caller gives the place of an address.
                unsafe { *to = address };
                noted(address);
                return 0;
            }
            Err(OUT_OF_MEMORY) => return OUT_OF_MEMORY.0,
            // What virtual memory can't be made of may be had by the driver's own way.
            Ok(None) | Err(_) => {}
        }
    }
    // SAFETY: the driver has written it.
    natively(bytes as u64, false, own, || (unsafe { *to }, bytes as u64))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocManaged(to: *mut u64, bytes: usize, flags: c_uint) -> u32 {
    let _pass = hook::enter(false);
    if let Err(Failure(code)) = before() {
        return code;
    }
    let own = || real!(c"cuMemAllocManaged" (*mut u64, usize, c_uint) (to, bytes, flags));
    if !hook::is_here() {
        return own();
    }
    // SAFETY: the driver has written it.
    natively(bytes as u64, true, own, || (unsafe { *to }, bytes as u64))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocPitch_v2(
    to: *mut u64,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
) -> u32 {
    let _pass = hook::enter(false);
    if let Err(Failure(code)) = before() {
        return code;
    }
    let own = || real!(c"cuMemAllocPitch_v2" (*mut u64, *mut usize, usize, usize, c_uint) (to, pitch, width, height, element));
    if !hook::is_here() {
        return own();
    }
    natively((width as u64).saturating_mul(height as u64), false, own, || {
        // SAFETY: the driver has written it.
        let address = unsafe { *to };
        // SAFETY: likewise.
        let pitch = unsafe { *pitch };
        (address, (pitch * height) as u64)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemFree_v2(address: u64) -> u32 {
    let _pass = hook::enter(true);
    if hook::is_here() {
        match with(|manager| manager.begin_free(address)) {
            Ok(Freed::Done) => return 0,
            Ok(Freed::AfterWork(of)) => {
                let waited = hook::inside(|| synchronize(of.context));
                return code(with(|manager| manager.end_free(of, waited)));
            }
            Ok(Freed::Not) => {}
            Err(Failure(code)) => return code,
        }
    }
    let result = real!(c"cuMemFree_v2"(u64)(address));
    if result == 0 && hook::is_here() {
        let bytes = with(|manager| manager.native_freed(address));
        log_native("native-freed", address, bytes);
    }
    result
}

/// A copy that may be put off.
macro_rules! copies {
    ($($function:ident $name:literal ($($stream:ident)?);)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $function(to: u64, from: u64, bytes: usize $(, $stream: u64)?) -> u32 {
            const NAME: &CStr = match CStr::from_bytes_with_nul(concat!($name, "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name without a nul"),
            };
            static SLOT: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
            let Some(real) = found(&SLOT, NAME) else { return NOT_FOUND };
            let _pass = hook::enter(false);
            let form: Form = Form::Default;
            $(let form: Form = { let _ = form; Form::On($stream) };)?
            // The default stream of a thread is another one in another thread.
            let of_thread = is_of_thread_stream($name) && !matches!(form, Form::On(stream) if stream > 2)
                || matches!(form, Form::On(2));
            match put_off(real, form, to, from, bytes, of_thread) {
                Ok(true) => return 0,
                Ok(false) => {}
                Err(Failure(code)) => return code,
            }
            // SAFETY: the driver's function of this name has this signature.
            let real = unsafe {
                transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(u64, u64, usize $(, copies!(@stream $stream))?) -> u32,
                >(real)
            };
            // SAFETY: the arguments are the caller's, as they are.
            ended($name, unsafe { real(to, from, bytes $(, $stream)?) })
        }
    )*};
    (@stream $stream:ident) => { u64 };
}

copies! {
    cuMemcpyDtoD_v2 "cuMemcpyDtoD_v2" ();
    cuMemcpyDtoD_v2_ptds "cuMemcpyDtoD_v2_ptds" ();
    cuMemcpyDtoDAsync_v2 "cuMemcpyDtoDAsync_v2" (stream);
    cuMemcpyDtoDAsync_v2_ptsz "cuMemcpyDtoDAsync_v2_ptsz" (stream);
    cuMemcpy "cuMemcpy" ();
    cuMemcpy_ptds "cuMemcpy_ptds" ();
    cuMemcpyAsync "cuMemcpyAsync" (stream);
    cuMemcpyAsync_ptsz "cuMemcpyAsync_ptsz" (stream);
}

/// Puts a copy off, if that may be; else what it could see is settled.
fn put_off(real: *mut c_void, form: Form, to: u64, from: u64, bytes: usize, of_thread: bool) -> Result<bool> {
    if of_thread {
        return ready(true).map(|()| false);
    }
    // A target that waits for memory leaves things unsettled.
    if !hook::is_unsettled() || !is_on() {
        return Ok(false);
    }
    with(|manager| {
        let Some((context, _)) = manager.driver().current() else { return manager.settle().map(|()| false) };
        let copy = Copy { function: real as usize, form, context, to, from, bytes };
        manager.copy(to, from, bytes as u64, copy)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, all: *mut usize) -> u32 {
    let _pass = hook::enter(false);
    let result = real!(c"cuMemGetInfo_v2" (*mut usize, *mut usize) (free, all));
    if result == 0 && !free.is_null() && !all.is_null() && is_on() {
        let (promised, (used, quota)) = with(|manager| (manager.promised(), manager.used()));
        // SAFETY: the driver has written it, so it is there.
        let free = unsafe { &mut *free };
        // SAFETY: likewise.
        let all = unsafe { &mut *all };
        *free = free.saturating_sub(promised as usize);
        if let Some(quota) = quota {
            *all = (*all).min(quota as usize);
            *free = (*free).min(quota.saturating_sub(used) as usize);
        }
    }
    result
}

/// An allocation of virtual memory.
#[derive(Clone, Copy)]
struct Whole {
    start: u64,
    bytes: u64,
    context: u64,
    /// 0 of another process's.
    number: u64,
}

/// The allocation of virtual memory that an address lies in. It is whole from here on.
fn whole(address: u64) -> Result<Option<Whole>> {
    if !is_on() {
        return Ok(None);
    }
    if let Some((start, bytes, context)) = sharing::around(address) {
        return Ok(Some(Whole { start, bytes, context, number: 0 }));
    }
    with(|manager| {
        let Some(of) = manager.tracker().around(address) else { return Ok(None) };
        let found = Whole { start: of.address, bytes: of.bytes, context: of.context, number: of.number };
        manager.settle()?;
        Ok(Some(found))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAddressRange_v2(base: *mut u64, size: *mut usize, address: u64) -> u32 {
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
    let Whole { start, bytes, context, number } = of;
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
        // BUFFER_ID, which each piece has another of; the driver's own are small.
        7 if number != 0 => 1 << 62 | number,
        12 => bytes,
        18 => bytes.next_multiple_of(vm_hook::driver::GRANULE),
        _ => return,
    };
    // SAFETY: these have eight bytes.
    unsafe { data.cast::<u64>().write_unaligned(value) };
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuPointerGetAttribute(data: *mut c_void, attribute: c_int, address: u64) -> u32 {
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
unsafe extern "C" fn cuPointerGetAttributes(
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
unsafe extern "C" fn cuPointerSetAttribute(value: *const c_void, attribute: c_int, address: u64) -> u32 {
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
fn pinned(address: u64) -> Result<()> {
    if is_on() { with(|manager| manager.pin(address)) } else { Ok(()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemRetainAllocationHandle(handle: *mut u64, address: *mut c_void) -> u32 {
    let _pass = hook::enter(false);
    match pinned(address as u64) {
        Ok(()) => real!(c"cuMemRetainAllocationHandle" (*mut u64, *mut c_void) (handle, address)),
        Err(Failure(code)) => code,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetHandleForAddressRange(
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

/// `CUipcMemHandle`, `CUipcEventHandle`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Ipc([u8; 64]);

#[unsafe(no_mangle)]
unsafe extern "C" fn cuIpcGetMemHandle(handle: *mut Ipc, address: u64) -> u32 {
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
unsafe extern "C" fn cuIpcOpenMemHandle(address: *mut u64, handle: Ipc, flags: c_uint) -> u32 {
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
unsafe extern "C" fn cuIpcOpenMemHandle_v2(address: *mut u64, handle: Ipc, flags: c_uint) -> u32 {
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
unsafe extern "C" fn cuIpcCloseMemHandle(address: u64) -> u32 {
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
unsafe extern "C" fn cuIpcOpenEventHandle(event: *mut u64, handle: Ipc) -> u32 {
    let _pass = hook::enter(false);
    match before() {
        Ok(()) => real!(c"cuIpcOpenEventHandle" (*mut u64, Ipc) (event, handle)),
        Err(Failure(code)) => code,
    }
}

/// A device has a context: it reaches the memory that there is.
fn join(device: c_int) {
    if !is_on() {
        return;
    }
    with(|manager| {
        let driver = manager.driver();
        if !driver.join(device) {
            return;
        }
        let own = manager
            .tracker()
            .all()
            .flat_map(|of| of.pieces.iter().map(move |piece| (of.address + piece.offset, piece.bytes)));
        for (address, bytes) in own.chain(sharing::pieces()) {
            if let Err(Failure(code)) = driver.give_access(address, bytes, device) {
                let values = [("address", Value::Address(address)), ("code", Value::Number(code.into()))];
                log::line(Level::Error, "no-access", &values);
            }
        }
    });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut u64, device: c_int) -> u32 {
    let _pass = hook::enter(false);
    let result = real!(c"cuDevicePrimaryCtxRetain" (*mut u64, c_int) (context, device));
    if result == 0 {
        join(device);
    }
    result
}

/// Makes contexts, which are waited for when the program is paused.
macro_rules! makes {
    ($($function:ident $name:literal ($($argument:ident: $ty:ty),*);)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $function(context: *mut u64, $($argument: $ty),*) -> u32 {
            let _pass = hook::enter(false);
            let result = real!($name (*mut u64, $($ty),*) (context, $($argument),*));
            if result == 0 && hook::is_here() {
                // SAFETY: the driver has written it.
                let context = unsafe { *context };
                let made = with(|manager| {
                    let driver = manager.driver();
                    driver.contexts.lock().unwrap_or_else(PoisonError::into_inner).insert(context);
                    // It is the thread's.
                    driver.current()
                });
                if let Some((_, device)) = made {
                    join(device);
                }
            }
            result
        }
    )*};
}

makes! {
    cuCtxCreate c"cuCtxCreate" (flags: c_uint, device: c_int);
    cuCtxCreate_v2 c"cuCtxCreate_v2" (flags: c_uint, device: c_int);
    cuCtxCreate_v3 c"cuCtxCreate_v3" (affinity: *const c_void, count: c_int, flags: c_uint, device: c_int);
    cuCtxCreate_v4 c"cuCtxCreate_v4" (parameters: *const c_void, flags: c_uint, device: c_int);
}

/// A context is gone, and with it its memory, its streams and their captures.
fn gone(manager: &mut Manager<Real>, context: u64) {
    let captures = manager.driver().forget(context);
    let _ = manager.end_context(context);
    for _ in 0..captures {
        let _ = manager.end_capture();
    }
}

/// Ends a context, which takes its memory with it; what the driver refuses to end keeps it.
fn end(context: u64, destroy: impl FnOnce() -> u32) -> u32 {
    if !hook::is_here() {
        return destroy();
    }
    if let Err(Failure(code)) = before() {
        return code;
    }
    // What can't be waited for, or was lost, goes with the context.
    let _ = hook::inside(|| synchronize(context));
    pause::leave(context);
    let result = destroy();
    if result == 0 {
        with(|manager| {
            gone(manager, context);
        });
        sharing::end_context(context);
    }
    result
}

macro_rules! ends {
    ($($function:ident $name:literal;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $function(context: u64) -> u32 {
            let _pass = hook::enter(true);
            end(context, || real!($name (u64) (context)))
        }
    )*};
}

ends! {
    cuCtxDestroy c"cuCtxDestroy";
    cuCtxDestroy_v2 c"cuCtxDestroy_v2";
}

macro_rules! primary {
    ($($function:ident $name:literal $resets:literal;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $function(device: c_int) -> u32 {
            let _pass = hook::enter(true);
            if let Err(Failure(code)) = before() {
                return code;
            }
            let context = if hook::is_here() { with(|manager| manager.driver().primary(device)) } else { None };
            context.into_iter().for_each(pause::leave);
            let result = real!($name (c_int) (device));
            if let Some(context) = context
                // What is retained is there behind a reset, without its memory.
                && (result == 0 && $resets || !with(|manager| manager.driver().has_primary(device)))
            {
                with(|manager| {
                    gone(manager, context);
                });
                sharing::end_context(context);
            }
            result
        }
    )*};
}

primary! {
    cuDevicePrimaryCtxReset c"cuDevicePrimaryCtxReset" true;
    cuDevicePrimaryCtxReset_v2 c"cuDevicePrimaryCtxReset_v2" true;
    cuDevicePrimaryCtxRelease c"cuDevicePrimaryCtxRelease" false;
    cuDevicePrimaryCtxRelease_v2 c"cuDevicePrimaryCtxRelease_v2" false;
}

/// Remembers a stream that was made.
///
/// # Safety
/// Where `result` is success, the driver has written `stream`.
unsafe fn made(stream: *mut u64, result: u32) -> u32 {
    if result == 0 && hook::is_here() {
        // SAFETY: the driver has written it.
        let stream = unsafe { *stream };
        with(|manager| {
            let driver = manager.driver();
            let context = driver.context();
            driver.streams.lock().unwrap_or_else(PoisonError::into_inner).insert(stream, context);
        });
    }
    result
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: *mut u64, flags: c_uint) -> u32 {
    let _pass = hook::enter(false);
    let result = real!(c"cuStreamCreate" (*mut u64, c_uint) (stream, flags));
    // SAFETY: the driver takes no null.
    unsafe { made(stream, result) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreateWithPriority(stream: *mut u64, flags: c_uint, priority: c_int) -> u32 {
    let _pass = hook::enter(false);
    let result = real!(c"cuStreamCreateWithPriority" (*mut u64, c_uint, c_int) (stream, flags, priority));
    // SAFETY: the driver takes no null.
    unsafe { made(stream, result) }
}

macro_rules! destroys {
    ($($function:ident $name:literal;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $function(stream: u64) -> u32 {
            let _pass = hook::enter(true);
            if let Err(Failure(code)) = before() {
                return code;
            }
            let own = || real!($name (u64) (stream));
            if !hook::is_here() {
                return own();
            }
            // Nobody may ask it from here on, and its handle may come again.
            let streams = |f: &mut dyn FnMut(&mut BTreeMap<u64, u64>)| {
                with(|manager| f(&mut manager.driver().streams.lock().unwrap_or_else(PoisonError::into_inner)));
            };
            let mut known = None;
            streams(&mut |streams| known = streams.remove(&stream));
            if let Some(context) = known {
                with(|manager| manager.driver().leave(stream, context));
            }
            let result = own();
            if result != 0 && let Some(context) = known {
                streams(&mut |streams| {
                    streams.insert(stream, context);
                });
                return result;
            }
            released(stream, result, true)
        }
    )*};
}

destroys! {
    cuStreamDestroy c"cuStreamDestroy";
    cuStreamDestroy_v2 c"cuStreamDestroy_v2";
}

/// A stream's handle, which is that of the thread's default stream where a function takes 0 for it.
fn stream_of(name: &str, stream: u64) -> u64 {
    if stream == 0 && is_of_thread_stream(name) { 2 } else { stream }
}

/// Begins a capture.
fn captured(stream: u64, begin: impl FnOnce() -> u32) -> u32 {
    if !is_on() {
        return begin();
    }
    if let Err(Failure(code)) = with(|manager| manager.begin_capture()) {
        return code;
    }
    let result = begin();
    if result == 0 {
        with(|manager| {
            let driver = manager.driver();
            let context = driver.context();
            driver.captures.lock().unwrap_or_else(PoisonError::into_inner).push((stream, context));
        });
    } else if let Err(Failure(code)) = with(|manager| manager.end_capture()) {
        return code;
    }
    result
}

/// Behind a call that ends a stream's capture, if there is one; one that fails may end it, or not.
fn released(stream: u64, result: u32, is_gone: bool) -> u32 {
    if !is_on() {
        return result;
    }
    let ended = with(|manager| {
        if !is_gone && result != 0 && manager.driver().is_captured(stream) {
            return Ok(());
        }
        let mut captures = manager.driver().captures.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = captures.iter().position(|(of, _)| *of == stream) else { return Ok(()) };
        captures.swap_remove(at);
        drop(captures);
        manager.end_capture()
    });
    if result == 0 { code(ended) } else { result }
}

macro_rules! captures {
    ($($function:ident $name:literal ($stream:ident: u64 $(, $argument:ident: $ty:ty)*);)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $function($stream: u64 $(, $argument: $ty)*) -> u32 {
            let _pass = hook::enter(false);
            let own = || real!($name (u64 $(, $ty)*) ($stream $(, $argument)*));
            captured(stream_of(stringify!($function), $stream), own)
        }
    )*};
}

captures! {
    cuStreamBeginCapture c"cuStreamBeginCapture" (stream: u64);
    cuStreamBeginCapture_ptsz c"cuStreamBeginCapture_ptsz" (stream: u64);
    cuStreamBeginCapture_v2 c"cuStreamBeginCapture_v2" (stream: u64, mode: c_int);
    cuStreamBeginCapture_v2_ptsz c"cuStreamBeginCapture_v2_ptsz" (stream: u64, mode: c_int);
    cuStreamBeginCaptureToGraph c"cuStreamBeginCaptureToGraph" (stream: u64, graph: u64, nodes: *const u64, edges: *const c_void, count: usize, mode: c_int);
    cuStreamBeginCaptureToGraph_ptsz c"cuStreamBeginCaptureToGraph_ptsz" (stream: u64, graph: u64, nodes: *const u64, edges: *const c_void, count: usize, mode: c_int);
    cuStreamBeginRecaptureToGraph c"cuStreamBeginRecaptureToGraph" (stream: u64, mode: c_int, graph: u64, function: *const c_void, data: *mut c_void);
    cuStreamBeginRecaptureToGraph_ptsz c"cuStreamBeginRecaptureToGraph_ptsz" (stream: u64, mode: c_int, graph: u64, function: *const c_void, data: *mut c_void);
    cuStreamBeginCaptureToCig c"cuStreamBeginCaptureToCig" (stream: u64, parameters: *mut c_void);
    cuStreamBeginCaptureToCig_ptsz c"cuStreamBeginCaptureToCig_ptsz" (stream: u64, parameters: *mut c_void);
}

macro_rules! captures_end {
    ($($function:ident $name:literal ($($graph:ident)?);)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $function(stream: u64 $(, $graph: *mut u64)?) -> u32 {
            let _pass = hook::enter(false);
            let result = real!($name (u64 $(, captures_end!(@place $graph))?) (stream $(, $graph)?));
            released(stream_of(stringify!($function), stream), result, false)
        }
    )*};
    (@place $graph:ident) => { *mut u64 };
}

captures_end! {
    cuStreamEndCapture c"cuStreamEndCapture" (graph);
    cuStreamEndCapture_ptsz c"cuStreamEndCapture_ptsz" (graph);
    cuStreamEndCaptureToCig c"cuStreamEndCaptureToCig" ();
    cuStreamEndCaptureToCig_ptsz c"cuStreamEndCaptureToCig_ptsz" ();
}

/// Gives the hook's function in the place of what was found.
///
/// # Safety
/// `symbol` is a string, and `found` was written by the driver.
unsafe fn instead(symbol: *const c_char, function: *mut *mut c_void, result: u32) -> u32 {
    if result == 0 && !function.is_null() {
        // SAFETY: the driver has written it.
        let function = unsafe { &mut *function };
        if !function.is_null() {
            // SAFETY: it is a string, which the driver has read.
            *function = find::instead_of(unsafe { CStr::from_ptr(symbol) }, *function);
        }
    }
    result
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> u32 {
    let result = real!(
        c"cuGetProcAddress_v2" (*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) (symbol, function, version, flags, status)
    );
    // SAFETY: the driver has read the name and written the function.
    unsafe { instead(symbol, function, result) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetProcAddress(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> u32 {
    let result = real!(c"cuGetProcAddress" (*const c_char, *mut *mut c_void, c_int, u64) (symbol, function, version, flags));
    // SAFETY: as above.
    unsafe { instead(symbol, function, result) }
}

/// What the contents of an allocation need not outlive: `VMHOOK_DROPPABLE`.
const DROPPABLE: c_uint = 1;
/// The most bytes of a tag's name.
const TAG: usize = 64;

/// Names an allocation, and says whether its contents may be lost by a pause: `include/vmhook.h`.
#[unsafe(no_mangle)]
unsafe extern "C" fn vmhook_tag(address: u64, name: *const c_char, flags: c_uint) -> c_int {
    if name.is_null() || flags & !DROPPABLE != 0 || !hook::is_here() {
        return INVALID_VALUE.0 as c_int;
    }
    // SAFETY: the caller gives a string; no more than so many bytes are looked at.
    let length = unsafe { libc::strnlen(name, TAG) };
    // SAFETY: these bytes were just looked at.
    let bytes = unsafe { slice::from_raw_parts(name.cast::<u8>(), length) };
    let name = String::from_utf8_lossy(bytes).into_owned();
    let _pass = hook::enter(true);
    let tag = Tag { name, is_droppable: flags & DROPPABLE != 0 };
    let text = Value::Text(tag.name.clone());
    if !with(|manager| manager.tag(address, tag)) {
        return INVALID_VALUE.0 as c_int;
    }
    log::line(Level::Info, "tagged", &[("address", Value::Address(address)), ("tag", text)]);
    0
}
