//! What of the ABI is no kernel: types, errors, devices.
#![allow(non_camel_case_types)]

use std::cell::RefCell;
use std::ffi::{CString, c_char};

use super::run::{answer, buffer_sizes, state};

/// The bits of a bfloat16.
pub type vmk_bf16 = u16;

/// The bits of an IEEE 754 half-precision number.
pub type vmk_f16 = u16;

/// What a function returns.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum vmk_status {
    /// The kernels were started; on a CPU they have run.
    VMK_SUCCESS = 0,
    /// The device, or what a kernel needs of it, is not there.
    VMK_NOT_AVAILABLE = -1,
    /// A parameter has a value that it can't have. Nothing was started.
    VMK_INVALID_VALUE = -2,
    /// A kernel could not be made or started.
    VMK_LAUNCH_FAILED = -3,
    /// There is not enough memory.
    VMK_OUT_OF_MEMORY = -4,
}

/// Where kernels run.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum vmk_device {
    /// On a GPU where there is one, else on the CPU.
    VMK_AUTO = 0,
    /// On the CPU: pointers are the host's, the stream is NULL, and a function returns when all is computed.
    VMK_CPU = 1,
    /// On the GPU of the calling thread's current CUDA context, or the first one's primary context if it has none.
    VMK_GPU = 2,
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Keeps an error's text for the calling thread.
pub(super) fn keep(text: String) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // A thread that ends has no text any more.
    let _ = LAST.try_with(|last| *last.borrow_mut() = text);
}

/// What was wrong with the calling thread's last call that failed: which function, parameter and value, and what to do. Empty if none
/// failed. The text is valid until the thread's next call of a function of this library.
#[unsafe(no_mangle)]
pub extern "C" fn vmk_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// The version of the library that runs, as VMK_VERSION is that of the header: 10000 major + 100 minor + patch.
#[unsafe(no_mangle)]
pub extern "C" fn vmk_version() -> i32 {
    version()
}

/// The library's version as a number.
pub(super) const fn version() -> i32 {
    const fn number(text: &str) -> i32 {
        let (bytes, mut at, mut sum) = (text.as_bytes(), 0, 0);
        while at < bytes.len() {
            sum = sum * 10 + (bytes[at] - b'0') as i32;
            at += 1;
        }
        sum
    }
    const {
        10_000 * number(env!("CARGO_PKG_VERSION_MAJOR"))
            + 100 * number(env!("CARGO_PKG_VERSION_MINOR"))
            + number(env!("CARGO_PKG_VERSION_PATCH"))
    }
}

/// How many GPUs there are. Without any, vmk_last_error says why.
#[unsafe(no_mangle)]
pub extern "C" fn vmk_device_count() -> i32 {
    let mut count = 0;
    let status = answer("vmk_device_count", || {
        let gpus = state().gpus().as_ref();
        count = gpus.copied().map_err(|why| crate::error::Failure::Unavailable(why.clone()))?;
        Ok(())
    });
    if status == vmk_status::VMK_SUCCESS { i32::try_from(count).unwrap_or(i32::MAX) } else { 0 }
}

/// Chooses where the process's calls from now on run: VMK_AUTO, VMK_CPU or VMK_GPU. Without this it is what the environment variable
/// VMK_DEVICE says, `auto`, `cpu` or `gpu`, and else VMK_AUTO.
#[unsafe(no_mangle)]
pub extern "C" fn vmk_use(device: i32) -> vmk_status {
    answer("vmk_use", || state().choose(device))
}

/// Where a call would run now: VMK_CPU or VMK_GPU; VMK_INVALID_VALUE if VMK_DEVICE says none of what it can say.
#[unsafe(no_mangle)]
pub extern "C" fn vmk_device_in_use() -> i32 {
    let mut gpu = false;
    let status = answer("vmk_device_in_use", || {
        gpu = state().on_gpu()?;
        Ok(())
    });
    match status {
        vmk_status::VMK_SUCCESS if gpu => vmk_device::VMK_GPU as i32,
        vmk_status::VMK_SUCCESS => vmk_device::VMK_CPU as i32,
        status => status as i32,
    }
}

/// How many bytes each pointer of a function points to, for callers that know how long their arrays are: name is that of the function, without
/// _ws. words has a number for each parameter but those of _ws and the stream: an integer, a float's bits, of a pointer 0 for NULL
/// and else 1. bytes gets as many numbers, 0 for what is no pointer, and for memory to work in.
///
/// # Safety
/// The name ends with a zero, words and bytes have count numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmk_buffer_sizes(
    name: *const c_char,
    words: *const u64,
    count: i32,
    bytes: *mut u64,
) -> vmk_status {
    // SAFETY: as the caller promises.
    unsafe { buffer_sizes(name, words, count, bytes) }
}
