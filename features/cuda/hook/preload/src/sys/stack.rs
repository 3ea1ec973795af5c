//! Call stacks, and what is at an address of code.

use std::ffi::{CStr, c_void};

use vm_hook::tracker::Stack;

/// The most functions of a stack.
const DEPTH: usize = 48;

/// Where the functions of this thread's stack go on, the innermost first.
pub(crate) fn return_addresses() -> Stack {
    let mut addresses = [std::ptr::null_mut::<c_void>(); DEPTH];
    // SAFETY: there is room for as many addresses.
    let count = unsafe { libc::backtrace(addresses.as_mut_ptr(), DEPTH as libc::c_int) };
    addresses.iter().take(usize::try_from(count).unwrap_or(0)).map(|address| *address as usize).collect()
}

/// What is at an address of code.
pub(crate) struct InFile {
    pub(crate) file: String,
    /// Where the file is mapped.
    pub(crate) base: usize,
    /// The function, if the file exports it.
    pub(crate) name: Option<String>,
}

/// What is at an address; none where no file is.
pub(crate) fn file_of(address: usize) -> Option<InFile> {
    // SAFETY: an all-zero Dl_info is one.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: the address is only looked up, and the result is this function's.
    let found = unsafe { libc::dladdr(address as *const c_void, &mut info) } != 0;
    let text = |at: *const libc::c_char| {
        // SAFETY: it is null or a string of a library that is loaded.
        (!at.is_null()).then(|| unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned())
    };
    let (base, name) = (info.dli_fbase as usize, text(info.dli_sname));
    (found && base != 0).then(|| InFile { file: text(info.dli_fname).unwrap_or_default(), base, name })
}
