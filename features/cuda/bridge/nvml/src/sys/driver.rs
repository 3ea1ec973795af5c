//! The bridge's `libcuda.so.1`, which knows the server.

use std::ffi::{CStr, OsStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use vm_bridge::say;
use vm_bridge::wire::control::MEMORY_WORDS;
use vm_bridge::wire::facts::{Facts, MOST};
use vm_bridge::wire::nvml::{self, Question};

use crate::errors::Error;

const NAME: &str = "libcuda.so.1";

/// `vm_bridge_describe`: what is asked, a UUID or a question, where the answer goes, how long it may be and is.
type Describe = unsafe extern "C" fn(usize, usize, usize, usize, usize) -> u32;

/// The memory of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    pub(crate) total: u64,
    pub(crate) free: u64,
    /// Has this program a context of it?
    pub(crate) is_used: bool,
}

/// Where this library is, as it was loaded.
fn folder() -> Option<PathBuf> {
    // SAFETY: it is null pointers and zeros.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: it writes `info`.
    let found = unsafe { libc::dladdr(folder as *const c_void, &raw mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: it is a string as long as this library is there.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Path::new(OsStr::from_bytes(name.to_bytes())).parent().map(Path::to_owned)
}

/// The driver's library that the process has, else the one beside this, else the one that is found as others are.
fn library() -> Option<Library> {
    // SAFETY: one that is loaded already runs no initialisers.
    let loaded = unsafe { Library::open(Some(NAME), RTLD_NOW | RTLD_LOCAL | libc::RTLD_NOLOAD) };
    if let Ok(loaded) = loaded {
        return Some(loaded);
    }
    let beside = folder().map(|folder| folder.join(NAME)).filter(|path| path.exists());
    [beside, Some(NAME.into())].into_iter().flatten().find_map(|path| {
        // SAFETY: it is a driver's library, which the program would load the same way.
        unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.ok()
    })
}

/// Asks it of what is in some bytes; how long the answer is.
fn describe(what: usize, of: &[u8], to: &mut [u8]) -> Result<usize, Error> {
    let library = library().ok_or_else(|| {
        say::once(&format!(
            "there is no {NAME}: NVML asks the bridge's, which is linked beside {}",
            "libnvidia-ml.so.1"
        ));
        Error::LibraryNotFound
    })?;
    // SAFETY: only the bridge's has it, of this type.
    let Ok(function) = (unsafe { library.get::<Describe>(b"vm_bridge_describe\0") }) else {
        say::once(&format!(
            "{NAME} is not the bridge's: this NVML answers for that alone; take NVIDIA's own with NVIDIA's"
        ));
        return Err(Error::LibraryNotFound);
    };
    let mut len = 0usize;
    let (at, room) = (to.as_mut_ptr() as usize, to.len());
    // SAFETY: it reads a UUID, or as much as the first word of a question says, and writes to as much memory as it is told, and a word.
    let result = unsafe { function(what, of.as_ptr() as usize, at, room, &raw mut len as usize) };
    match result {
        0 if len <= room => Ok(len),
        0 => Err(Error::Unknown),
        code => Err(Error::of_driver(code)),
    }
}

/// What the server knows of its driver and devices.
pub(crate) fn facts() -> Result<Facts, Error> {
    let mut bytes = vec![0; MOST];
    let len = describe(0, &[0; 16], &mut bytes)?;
    Facts::from_bytes(&bytes[..len]).map_err(|_| Error::Unknown)
}

/// What it says of a device's memory now.
pub(crate) fn memory(uuid: [u8; 16]) -> Result<Memory, Error> {
    let mut words = [[0; 8]; MEMORY_WORDS];
    if describe(1, &uuid, words.as_flattened_mut())? != size_of_val(&words) {
        return Err(Error::Unknown);
    }
    let [total, free, is_used] = words.map(u64::from_ne_bytes);
    Ok(Memory { total, free: free.min(total), is_used: is_used != 0 })
}

/// What NVIDIA's NVML on the server answers: its result, and what memory of the question is then. None where the server has none.
pub(crate) fn ask(question: &mut Question) -> Result<Option<u32>, Error> {
    let mut of = vec![0; 8];
    of.extend(question.to_bytes());
    let len = (of.len() - 8) as u64;
    of[..8].copy_from_slice(&len.to_ne_bytes());
    let mut to = vec![0; nvml::MOST];
    match describe(2, &of, &mut to) {
        Ok(len) => question.take(&to[..len]).map(Some).map_err(|_| Error::Unknown),
        Err(Error::NotSupported) => Ok(None),
        Err(error) => Err(error),
    }
}
