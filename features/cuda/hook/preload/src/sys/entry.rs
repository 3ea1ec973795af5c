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
use super::real::{NOT_FOUND, Of, Property, Real, THREAD_STREAMS, call, done, found, synchronize};
use super::reserve;
use crate::hook::{self, before, is_on, with};
use crate::{control, pause, sharing, stacks};
use vm_hook::driver::{Failure, INVALID_VALUE, OUT_OF_MEMORY, Result};
use vm_hook::log::{self, Level, Value};
use vm_hook::manager::{Event, Freed, Id, Kind, Manager, Mark};
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

mod arrays;
mod contexts;
mod ipc;
mod memory;
mod physical;
mod pointer;
mod pools;
mod streams;

use arrays::*;
use contexts::*;
use ipc::*;
use memory::*;
use physical::*;
use pointer::*;
use pools::*;
use streams::*;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuInit(flags: c_uint) -> u32 {
    let result = real!(c"cuInit"(c_uint)(flags));
    if result == 0 {
        hook::greet();
    }
    result
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
