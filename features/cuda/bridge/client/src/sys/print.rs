//! Prints for the program, as the driver does in its process.

use std::ffi::c_void;
use std::io::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Standard output as descriptors say it.
const OUTPUT: u64 = 1;

/// Threads that have asked for what kernels printed and have not written it yet.
static PRINTING: AtomicUsize = AtomicUsize::new(0);

/// A thread that writes what kernels printed.
pub(crate) struct Printing(());

/// Says that this thread takes what kernels printed, until it drops the result.
pub(crate) fn begin() -> Printing {
    PRINTING.fetch_add(1, Ordering::SeqCst);
    Printing(())
}

impl Drop for Printing {
    fn drop(&mut self) {
        PRINTING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Waits until no thread has such bytes: a function of the program that prints next comes behind them. After a second it may come before them:
/// the program goes on in any case.
pub(crate) fn wait() {
    const MOST: Duration = Duration::from_secs(1);
    let since = Instant::now();
    while PRINTING.load(Ordering::SeqCst) > 0 && since.elapsed() < MOST {
        std::thread::sleep(Duration::from_millis(1));
    }
}

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
