//! The log of the driver's compiler.

use std::ffi::c_void;
use std::ptr;

use crate::sys::CUjit_option;

/// Bytes of the log that are kept.
const BYTES: usize = 16 << 10;

/// A place for the errors of the driver's compiler, and the options that tell it of the place.
pub(super) struct Log {
    text: Vec<u8>,
    options: Vec<CUjit_option>,
    values: Vec<*mut c_void>,
}

impl Log {
    pub(super) fn new() -> Self {
        let mut text = vec![0u8; BYTES];
        let options =
            vec![CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let values = vec![text.as_mut_ptr().cast(), ptr::without_provenance_mut(BYTES)];
        Self { text, options, values }
    }

    /// With one more option, whose value is a number.
    #[cfg(unix)]
    pub(super) fn with(mut self, option: CUjit_option, value: usize) -> Self {
        self.options.push(option);
        self.values.push(ptr::without_provenance_mut(value));
        self
    }

    /// Count, options and values for the driver, which writes to this value as long as it has them.
    pub(super) fn options(&mut self) -> (u32, *mut CUjit_option, *mut *mut c_void) {
        (self.options.len() as u32, self.options.as_mut_ptr(), self.values.as_mut_ptr())
    }

    /// What was written, on lines of its own behind an error's.
    pub(super) fn behind(&self, error: &dyn std::fmt::Display) -> String {
        let end = self.text.iter().position(|&byte| byte == 0).unwrap_or(BYTES);
        let text = String::from_utf8_lossy(&self.text[..end]);
        match text.trim() {
            "" => error.to_string(),
            text => format!("{error}\n{text}"),
        }
    }
}
