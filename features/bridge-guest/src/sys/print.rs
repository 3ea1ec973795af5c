//! Prints for the program, as the driver does in its process.

use std::ffi::c_void;
use std::io::Write as _;

/// Standard output as descriptors say it.
const OUTPUT: u64 = 1;

unsafe extern "C" {
    /// The C library's standard output, which programs' own `printf` writes to.
    static stdout: *mut libc::FILE;
}

/// Writes to standard output, in the order of what the program prints there, or to standard error.
pub(crate) fn print(to: u64, bytes: &[u8]) {
    if to == OUTPUT {
        // SAFETY: the C library has set it before any other code of this process runs.
        let file = unsafe { stdout };
        // SAFETY: it is the C library's, which locks it; the bytes are as many. One that can't be written loses them, as natively.
        unsafe { libc::fwrite(bytes.as_ptr().cast::<c_void>(), 1, bytes.len(), file) };
        // SAFETY: as above.
        unsafe { libc::fflush(file) };
    } else {
        // One that can't be written loses it.
        let _ = std::io::stderr().write_all(bytes);
    }
}
