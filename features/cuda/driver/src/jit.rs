//! The options of loads and links: logs, and limits of the compiler.

use std::ffi::{CString, c_void};

use crate::{error::Result, module::Refusal, sys};

/// `CU_JIT_MAX_REGISTERS`.
const MAX_REGISTERS: i32 = 0;
/// `CU_JIT_INFO_LOG_BUFFER`; the option of its size follows, as with the log of errors.
const INFO_LOG: i32 = 3;
/// `CU_JIT_ERROR_LOG_BUFFER`.
const ERROR_LOG: i32 = 5;
/// `CU_JIT_LOG_VERBOSE`.
const VERBOSE: i32 = 12;
/// The most options that are read.
const MOST: u32 = 64;

/// The options that a program passed.
#[derive(Default)]
pub(crate) struct Options {
    pub(crate) max_registers: Option<u32>,
    pub(crate) is_verbose: bool,
    error: Log,
    info: Log,
}

/// A buffer of the program's, by its address.
#[derive(Default)]
struct Log {
    buffer: u64,
    size: usize,
    /// The bytes that have text.
    used: usize,
    /// The address of the option's value, which receives the length of the text.
    size_at: u64,
}

impl Log {
    /// Appends a text, truncated to the free space.
    fn append(&mut self, text: &str) {
        let buffer = std::ptr::with_exposed_provenance_mut::<u8>(self.buffer as usize);
        let Ok(text) = CString::new(text.replace('\0', " ")) else { return };
        if !sys::is_address(buffer) {
            return;
        }
        let (start, room) = (buffer.wrapping_add(self.used), self.size - self.used);
        // As NVIDIA's driver does, a truncated text counts its last byte unless that byte was 0 before.
        let last = room.saturating_sub(1);
        let kept = sys::read_at(start, last).is_some_and(|byte| byte != 0);
        sys::write_text(start, room, &text);
        self.used += match text.count_bytes() {
            count if count <= last => count,
            _ => last + usize::from(kept && room > 0),
        };
    }
}

impl Options {
    /// Reads the options of a call.
    pub(crate) fn read(count: u32, options: *const i32, values: *const *const c_void) -> Self {
        let mut read = Self::default();
        for index in 0..count.min(MOST) as usize {
            let (Some(option), Some(value)) = (sys::read_at(options, index), sys::read_at(values, index))
            else {
                continue;
            };
            let number = value.addr() as u32;
            let log = if option < ERROR_LOG { &mut read.info } else { &mut read.error };
            match option {
                MAX_REGISTERS => read.max_registers = Some(number).filter(|most| *most > 0),
                VERBOSE => read.is_verbose = number != 0,
                INFO_LOG | ERROR_LOG => log.buffer = value.expose_provenance() as u64,
                _ if [INFO_LOG + 1, ERROR_LOG + 1].contains(&option) => {
                    log.size = number as usize;
                    log.size_at = values.wrapping_add(index).expose_provenance() as u64;
                }
                _ => {}
            }
        }
        read
    }

    /// Writes to the log why a load was refused, and to the option's value how long the text is.
    pub(crate) fn logged<T>(&mut self, loaded: Result<T, Refusal>) -> Result<T> {
        loaded.map_err(|refusal| {
            self.error.append(&refusal.reason);
            let size_at = std::ptr::with_exposed_provenance_mut::<u32>(self.error.size_at as usize);
            // Null where the program does not ask.
            let _ = sys::write(size_at, self.error.used as u32);
            refusal.error
        })
    }

    /// Writes to the log why a link fails. It does not write the length of the text: programs such as cuda.core free the array of values
    /// after `cuLinkCreate`.
    pub(crate) fn log_error(&mut self, text: &str) {
        text.lines().for_each(|line| self.error.append(&format!("error   : {line}\n")));
    }

    /// Writes to the log of information.
    pub(crate) fn log_info(&mut self, text: &str) {
        text.lines().for_each(|line| self.info.append(&format!("info    : {line}\n")));
    }
}
