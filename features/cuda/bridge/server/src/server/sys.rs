//! Calls of a driver by name, and memory of this process that a call of it reads and writes.
#![allow(unsafe_code)]

pub(super) mod nvml;
pub(super) mod staged;

use std::ffi::{CStr, OsStr, c_char, c_void};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::atomic::AtomicU64;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use rustix::fs::SealFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use thiserror::Error;
use vm_cuda_api::tables::{self, Table};
use vm_cuda_api::{FUNCTIONS, number};

use super::callbacks;
use super::exports::Handle;
use super::host::Charge;
use super::reach::Checked;
use crate::wire::{code, control};

/// The driver could not be opened.
#[derive(Debug, Error)]
#[error("cannot open the CUDA driver {path}: {source}; {fix}", fix = fix(path))]
pub struct OpenError {
    path: PathBuf,
    source: libloading::Error,
}

fn fix(path: &Path) -> &'static str {
    match path.components().count() {
        1 => {
            "install the GPU's driver, or name its library by --driver, or `accelerators[].driver` of a guest's file"
        }
        _ => "see that all users may read it, and search the directories above it",
    }
}

/// A CUDA driver: any library that has its functions.
#[derive(Debug)]
pub struct Driver {
    functions: Vec<usize>,
    version: Option<String>,
    /// Keeps it loaded.
    _library: Option<Library>,
}

/// The most parameters that a function has.
pub(super) const WORDS: usize = 18;

macro_rules! invoke {
    ($address:expr, $words:expr; $($count:literal: $($at:literal)*;)*) => {
        match $words.len() {
            $($count => {
                // SAFETY: it is a driver's function of so many words, integers and pointers, as `functions.txt` says.
                let function = unsafe {
                    std::mem::transmute::<usize, unsafe extern "C" fn($(invoke!(@word $at)),*) -> u32>($address)
                };
                // SAFETY: the caller vouches for the words.
                unsafe { function($($words[$at]),*) }
            })*
            _ => code::NOT_SUPPORTED,
        }
    };
    (@word $at:literal) => { u64 };
}

impl Driver {
    /// Opens a driver.
    ///
    /// # Errors
    /// When the library can't be loaded.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        // SAFETY: the operator names the driver, whose initialisers run.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library = library.map_err(|source| OpenError { path: path.to_owned(), source })?;
        let found = |name: &str| {
            // SAFETY: it is a function's address, which is used as `functions.txt` says.
            let symbol = unsafe { library.get::<*const c_void>(format!("{name}\0").as_bytes()) };
            symbol.map_or(0, |symbol| symbol.as_raw_ptr() as usize)
        };
        let version = version(found("cuInit"));
        let functions = FUNCTIONS.iter().map(|function| found(&function.name)).collect();
        Ok(Self { functions, version, _library: Some(library) })
    }

    /// A driver whose functions say that they have done what was asked, and have done nothing.
    pub(super) fn that_does_nothing() -> Self {
        extern "C" fn nothing() -> u32 {
            0
        }
        // It may be called with any number of words: who calls has placed them, and takes them back.
        let functions = vec![nothing as *const () as usize; FUNCTIONS.len()];
        Self { functions, version: None, _library: None }
    }

    /// Starts the driver; what it says of that.
    #[must_use]
    pub fn start(&self) -> u32 {
        self.named("cuInit", &[Word::Is(0)], &mut [])
    }

    /// NVIDIA's version of the driver; other drivers have none.
    #[must_use]
    pub fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    /// Starts the driver, and makes the context of its first device; what it says of that.
    #[must_use]
    pub fn try_device(&self) -> u32 {
        let mut context = [0];
        match self.start() {
            0 => self.named("cuDevicePrimaryCtxRetain", &[Word::At(0), Word::Is(0)], &mut context),
            code => code,
        }
    }

    /// Does this process have a device's primary context?
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn has_primary(&self, device: u64) -> Result<bool, u32> {
        let mut memory = [0; 2];
        let words = [Word::Is(device), Word::At(0), Word::At(1)];
        match self.named("cuDevicePrimaryCtxGetState", &words, &mut memory) {
            0 => Ok(memory[1] as u32 != 0),
            code => Err(code),
        }
    }

    /// Where a function is.
    fn address(&self, function: usize) -> Option<usize> {
        self.functions.get(function).copied().filter(|address| *address != 0)
    }

    /// Where the multiprocessors of the current context's device are, as the driver's own libraries are told: two arrays of as many bytes, one behind the
    /// other.
    pub(super) fn topology(&self) -> Result<Vec<u8>, u32> {
        /// Places in the table: what gives the arrays, which are memory of the C library's, and what takes them back.
        const GIVE: usize = 4;
        const TAKE: usize = 13;
        /// More than any device has.
        const MOST: usize = 1024;
        type Give = unsafe extern "C" fn(*mut *mut c_void, *mut *mut c_void) -> u32;
        type Take = unsafe extern "C" fn(*mut c_void, *mut c_void) -> u32;
        let id = tables::name_of(Table::Topology);
        let mut at = [0];
        match self.named("cuGetExportTable", &[Word::At(0), Word::Is(id.as_ptr() as u64)], &mut at) {
            0 if at[0] != 0 => {}
            0 => return Err(code::NOT_FOUND),
            code => return Err(code),
        }
        let table = at[0] as *const usize;
        // SAFETY: a table of the driver's has its length in its first word.
        if unsafe { *table } < (TAKE + 1) * size_of::<usize>() {
            return Err(code::NOT_FOUND);
        }
        // SAFETY: it is as long.
        let entries = unsafe { std::slice::from_raw_parts(table, TAKE + 1) };
        // SAFETY: a function of this type, by which NVIDIA's own libraries call it.
        let give = unsafe { std::mem::transmute::<usize, Give>(entries[GIVE]) };
        // SAFETY: the same.
        let take = unsafe { std::mem::transmute::<usize, Take>(entries[TAKE]) };
        let mut arrays = [null_mut(); 2];
        let [first, second] = &mut arrays;
        // SAFETY: it writes two pointers.
        let result = unsafe { give(first, second) };
        if result != 0 {
            return Err(result);
        }
        // SAFETY: both are the C library's, or null.
        let lens = arrays.map(|array| unsafe { libc::malloc_usable_size(array) });
        let len = lens[0].min(lens[1]).min(MOST);
        let bytes = arrays.iter().flat_map(|array| self::bytes(*array as u64, len)).collect();
        // SAFETY: they are what was given, and nobody has them any more.
        unsafe { take(arrays[0], arrays[1]) };
        Ok(bytes)
    }

    /// Calls a function by its number.
    ///
    /// # Safety
    /// Words that the function takes for pointers are valid for what it does with them.
    pub(super) unsafe fn call(&self, function: usize, words: &[u64]) -> u32 {
        let Some(address) = self.address(function) else { return code::NOT_SUPPORTED };
        let mut all = [0; WORDS];
        let Some(all) = all.get_mut(..words.len()) else { return code::NOT_SUPPORTED };
        all.copy_from_slice(words);
        invoke! { address, all;
            0: ; 1: 0; 2: 0 1; 3: 0 1 2; 4: 0 1 2 3; 5: 0 1 2 3 4; 6: 0 1 2 3 4 5; 7: 0 1 2 3 4 5 6;
            8: 0 1 2 3 4 5 6 7; 9: 0 1 2 3 4 5 6 7 8; 10: 0 1 2 3 4 5 6 7 8 9; 11: 0 1 2 3 4 5 6 7 8 9 10;
            12: 0 1 2 3 4 5 6 7 8 9 10 11; 13: 0 1 2 3 4 5 6 7 8 9 10 11 12;
            14: 0 1 2 3 4 5 6 7 8 9 10 11 12 13; 15: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14;
            16: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; 17: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16;
            18: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17;
        }
    }

    /// Makes a call that takes no pointers but to `memory`, which is passed where a word is [`Word::At`].
    pub(super) fn make(&self, call: Checked<'_>, memory: &mut [u64]) -> u32 {
        let words = call.words();
        let mut all = [0; WORDS];
        let Some(all) = all.get_mut(..words.len()) else { return code::NOT_SUPPORTED };
        for (word, given) in all.iter_mut().zip(words) {
            *word = match *given {
                Word::Is(word) => word,
                Word::At(at) if at <= memory.len() => memory.as_mut_ptr().wrapping_add(at) as u64,
                Word::At(_) => return code::INVALID_VALUE,
            };
        }
        // SAFETY: pointers are to `memory`, which who packs the words has made as large as the function's table says; other words are numbers,
        // addresses that were checked, places of bytes that the caller owns and keeps until this returns, or handles that the driver gave.
        unsafe { self.call(call.number(), all) }
    }

    /// Makes a call of the server's own by the function's name.
    pub(super) fn named(&self, function: &str, words: &[Word], memory: &mut [u64]) -> u32 {
        let call = |function| self.make(Checked::of_server(function, words), memory);
        number(function).map_or(code::NOT_SUPPORTED, call)
    }
}

/// NVIDIA's version of the driver that has a function, by the name of its file: `libcuda.so.580.95.05`.
fn version(function: usize) -> Option<String> {
    // SAFETY: it is zeros and null pointers.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: it writes `info`.
    let found = unsafe { libc::dladdr(function as *const c_void, &raw mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: it is a string as long as the library is there.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    let file = std::fs::canonicalize(OsStr::from_bytes(name.to_bytes())).ok()?;
    let version = file.file_name()?.to_str()?.strip_prefix("libcuda.so.")?;
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let is_version = version.contains('.') && version.split('.').all(is_number);
    is_version.then(|| version.to_owned())
}

/// A word of a call.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Word {
    /// A number, or a handle of the driver's.
    Is(u64),
    /// A pointer to a word of the call's memory.
    At(usize),
}

/// A string that the driver returned a pointer to: at most so many bytes of it.
pub(super) fn text(at: u64, most: usize) -> Vec<u8> {
    if at == 0 {
        return Vec::new();
    }
    let at = at as *const c_char;
    // SAFETY: the driver's strings end with a zero; no more than `most` bytes are looked at.
    let len = unsafe { libc::strnlen(at, most) };
    // SAFETY: these bytes were just looked at, and live as long as their object, which this lane's turn keeps.
    unsafe { std::slice::from_raw_parts(at.cast::<u8>(), len) }.to_vec()
}

/// The word of bytes of this process.
pub(super) fn place(bytes: &[u8]) -> u64 {
    bytes.as_ptr() as u64
}

/// The word of bytes of this process that are written.
pub(super) fn place_mut(bytes: &mut [u8]) -> u64 {
    bytes.as_mut_ptr() as u64
}

/// The word of words of this process.
pub(super) fn place_words(words: &mut [u64]) -> u64 {
    words.as_mut_ptr() as u64
}

/// Whether a C string is in bytes.
pub(super) fn is_text(bytes: &[u8]) -> bool {
    CStr::from_bytes_until_nul(bytes).is_ok()
}

/// Memory of the program at the address where the program has it.
#[derive(Debug)]
pub(super) struct Mapping {
    at: u64,
    len: u64,
}

impl Mapping {
    /// Maps a part of a memory file, of memory or of tmpfs. One that shrinks ends this process by `SIGBUS`, and with it the program's session.
    pub(super) fn new(at: u64, len: u64, offset: u64, memory: &OwnedFd) -> io::Result<Self> {
        // No other file has seals: one of a file system in user space would have its reader wait.
        rustix::fs::fcntl_get_seals(memory)?;
        // The last page is whole.
        let size = (rustix::fs::fstat(memory)?.st_size as u64).checked_next_multiple_of(4096);
        if offset.checked_add(len).is_none_or(|end| size.is_none_or(|size| end > size)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED_NOREPLACE;
        // SAFETY: nothing else is mapped there, or it fails; no reference is made to this memory.
        let mapped = unsafe { mmap(at as *mut c_void, len as usize, protection, flags, memory, offset) }?;
        let mapping = Self { at: mapped as u64, len };
        // An old system takes the address for a wish.
        if mapping.at == at { Ok(mapping) } else { Err(io::ErrorKind::AddrInUse.into()) }
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it is this mapping's own, and the driver has let go of it.
        if let Err(error) = unsafe { munmap(self.at as *mut c_void, self.len as usize) } {
            tracing::error!(%error, "memory of a program can't be unmapped");
        }
    }
}

/// A memory file of numbers that several processes change.
#[derive(Debug)]
pub(super) struct Slots {
    at: *mut c_void,
    len: usize,
}

// SAFETY: nothing of it is of a thread, and the numbers are atomic.
unsafe impl Send for Slots {}
// SAFETY: as above.
unsafe impl Sync for Slots {}

impl Slots {
    /// Maps a file that can't shrink.
    pub(super) fn map(file: &OwnedFd) -> io::Result<Self> {
        let size = rustix::fs::fstat(file)?.st_size as usize;
        let len = size / size_of::<AtomicU64>();
        if !rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK) || len == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: it is placed where nothing is.
        let at = unsafe { mmap(std::ptr::null_mut(), size, protection, MapFlags::SHARED, file, 0) }?;
        Ok(Self { at, len })
    }

    pub(super) fn all(&self) -> &[AtomicU64] {
        // SAFETY: as many are mapped as long as this is there, of a file that does not shrink, and all change them as a whole.
        unsafe { std::slice::from_raw_parts(self.at.cast::<AtomicU64>(), self.len) }
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        // SAFETY: it is this one's own. It can fail only where it was not mapped.
        let _ = unsafe { munmap(self.at, self.len * size_of::<AtomicU64>()) };
    }
}

/// Words that the driver returned a pointer to; none where it is null.
pub(super) fn words(at: u64, count: usize) -> Vec<u64> {
    if at == 0 {
        return Vec::new();
    }
    // SAFETY: the driver has said that there are as many, until the next call of this thread.
    unsafe { std::slice::from_raw_parts(at as *const u64, count) }.to_vec()
}

/// A function of the program's, for the driver to call by way of this process.
pub(super) struct Callback {
    pub(super) callbacks: callbacks::Shared,
    pub(super) words: [u64; control::CALL],
    /// Is it called more than once?
    pub(super) stays: bool,
    /// Its memory.
    pub(super) _charge: Charge,
}

impl Callback {
    /// Calls it.
    ///
    /// # Safety
    /// `at` is of [`Box::into_raw`], and is not used any more where it does not stay.
    unsafe fn call(at: *mut Self, status: u32) {
        // SAFETY: it is one, which only this call uses or nobody changes.
        let this = unsafe { &*at };
        let mut words = this.words;
        words[control::CALL - 1] = status.into();
        let (callbacks, stays) = (this.callbacks.clone(), this.stays);
        callbacks.call(words);
        if !stays {
            // SAFETY: this was its last use.
            drop(unsafe { Box::from_raw(at) });
        }
    }
}

unsafe extern "C" fn function(at: *mut Callback) {
    // SAFETY: the driver passes what it was given.
    unsafe { Callback::call(at, 0) }
}

unsafe extern "C" fn callback(_: *mut c_void, status: u32, at: *mut Callback) {
    // SAFETY: as above.
    unsafe { Callback::call(at, status) }
}

/// Puts a callback on a stream.
pub(super) fn add_callback(driver: &Driver, number: usize, stream: u64, made: Callback, flags: u64) -> u32 {
    let is_function = made.words[0] == control::FUNCTION;
    let at = Box::into_raw(Box::new(made));
    let words = if is_function {
        vec![stream, function as *const () as u64, at as u64]
    } else {
        vec![stream, callback as *const () as u64, at as u64, flags]
    };
    // SAFETY: the driver calls the function with the pointer, once where it is not recorded.
    let result = unsafe { driver.call(number, &words) };
    if result != 0 {
        // SAFETY: the driver has not taken it.
        drop(unsafe { Box::from_raw(at) });
    }
    result
}

/// What the driver calls for a function of the program, and what it passes to it. It stays as long as this process.
pub(super) fn keep_callback(callback: Callback) -> [u64; 2] {
    let kept: &'static mut Callback = Box::leak(Box::new(callback));
    [function as *const () as u64, std::ptr::from_mut(kept) as u64]
}

/// A handle, by value.
#[repr(C)]
struct Shared(Handle);

/// Opens memory of another process: what the driver says, and where it is.
pub(super) fn open_memory(driver: &Driver, number: usize, handle: Handle, flags: u32) -> (u32, u64) {
    type Open = unsafe extern "C" fn(*mut u64, Shared, u32) -> u32;
    let Some(address) = driver.address(number) else { return (code::NOT_SUPPORTED, 0) };
    // SAFETY: it is `cuIpcOpenMemHandle`.
    let open = unsafe { std::mem::transmute::<usize, Open>(address) };
    let mut at = 0;
    // SAFETY: the driver writes one word.
    (unsafe { open(&raw mut at, Shared(handle), flags) }, at)
}

/// Opens an event of another process: what the driver says, and the event.
pub(super) fn open_event(driver: &Driver, number: usize, handle: Handle) -> (u32, u64) {
    type Open = unsafe extern "C" fn(*mut u64, Shared) -> u32;
    let Some(address) = driver.address(number) else { return (code::NOT_SUPPORTED, 0) };
    // SAFETY: it is `cuIpcOpenEventHandle`.
    let open = unsafe { std::mem::transmute::<usize, Open>(address) };
    let mut event = 0;
    // SAFETY: the driver writes one word.
    (unsafe { open(&raw mut event, Shared(handle)) }, event)
}

/// The file that the driver returned, in the half of a word: it is the caller's.
pub(super) fn given_file(word: u64) -> Option<OwnedFd> {
    let file = i32::try_from(word as u32).ok()?;
    // SAFETY: the driver has opened it for who asked, and nobody else closes it.
    Some(unsafe { OwnedFd::from_raw_fd(file) })
}

/// Makes an object that calls a function of the program when it ends.
pub(super) fn user_object(
    driver: &Driver,
    number: usize,
    callback: Callback,
    [count, flags]: [u64; 2],
    made: &mut [u64; 1],
) -> u32 {
    let at = Box::into_raw(Box::new(callback));
    let words = [made.as_mut_ptr() as u64, at as u64, function as *const () as u64, count, flags];
    // SAFETY: the driver writes one word, and calls the function with the pointer once.
    let result = unsafe { driver.call(number, &words) };
    if result != 0 {
        // SAFETY: the driver has not taken it.
        drop(unsafe { Box::from_raw(at) });
    }
    result
}

/// Has the C library write what it keeps of what was printed.
pub(super) fn flush() {
    // SAFETY: it locks what it writes.
    unsafe { libc::fflush(null_mut()) };
}

/// Bytes that the driver returned a pointer to.
pub(super) fn bytes(at: u64, len: usize) -> Vec<u8> {
    if at == 0 {
        return Vec::new();
    }
    // SAFETY: the driver has said that there are as many, until their linker ends or they are given back.
    unsafe { std::slice::from_raw_parts(at as *const u8, len) }.to_vec()
}

/// Sets a variable for the driver to read, unless who started the server has set it.
pub(super) fn set_variable(name: &str, value: &[u8]) -> Result<(), u32> {
    let value = std::str::from_utf8(value).map_err(|_| code::INVALID_VALUE)?;
    if value.contains('\0') {
        return Err(code::INVALID_VALUE);
    }
    if std::env::var_os(name).is_none() {
        // SAFETY: a program sends it first, before it has lanes: no other thread reads the environment then. One that does otherwise harms its own
        // worker alone.
        unsafe { std::env::set_var(name, value) };
    }
    Ok(())
}
