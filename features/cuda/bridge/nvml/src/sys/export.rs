//! The exported functions. Each takes as many words as registers have: what a caller does not pass is not looked at.
#![allow(non_snake_case)]

use std::ffi::c_char;
use std::panic::catch_unwind;

use crate::answers::{self, Words};
use crate::errors::{self, Error};

/// Answers; no panic goes on into C.
fn enter(words: &Words, answer: fn(&Words) -> Result<(), Error>) -> u32 {
    match catch_unwind(|| answer(words)) {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => error.code(),
        Err(_) => Error::Unknown.code(),
    }
}

macro_rules! export {
    ($name:ident $answer:expr) => {
        // SAFETY: the name is NVML's, which this library stands for; nothing else of the process defines it.
        #[unsafe(no_mangle)]
        extern "C" fn $name(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> u32 {
            enter(&[a, b, c, d, e, f], $answer)
        }
    };
}

include!(concat!(env!("OUT_DIR"), "/exports.rs"));

// SAFETY: as above.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(result: u32) -> *const c_char {
    errors::text(result).as_ptr()
}
