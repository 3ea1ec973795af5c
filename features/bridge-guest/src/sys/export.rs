//! The exported functions. Each takes its arguments as words.
#![allow(non_snake_case, clippy::too_many_arguments)]

use std::panic::{AssertUnwindSafe, catch_unwind};

use vm_cuda_api::names::Symbol;

use crate::{forward, hand};

/// `CUDA_ERROR_UNKNOWN`.
const UNKNOWN: u32 = 999;

/// Makes a call; no panic goes on into C.
fn enter(number: usize, words: &[usize], handler: fn(usize, &[usize]) -> Result<(), u32>) -> u32 {
    match catch_unwind(AssertUnwindSafe(|| handler(number, words))) {
        Ok(result) => result.err().unwrap_or(0),
        Err(_) => UNKNOWN,
    }
}

/// A structure that is passed by value.
#[repr(C)]
struct Value<const N: usize>([u8; N]);

/// An argument as a word.
trait Word {
    fn word(&self) -> usize;
}

impl Word for usize {
    fn word(&self) -> usize {
        *self
    }
}

impl<const N: usize> Word for Value<N> {
    /// Where it is, until the call returns.
    fn word(&self) -> usize {
        self.0.as_ptr() as usize
    }
}

macro_rules! export {
    ($number:literal $name:ident ($(($argument:ident $kind:ty))*) $handler:path) => {
        // SAFETY: the name is the driver's, which this library stands for; nothing else of the process defines it.
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $kind),*) -> u32 {
            enter($number, &[$($argument.word()),*], $handler)
        }
    };
}

/// The address of a function.
struct Code(*const ());

// SAFETY: code is everybody's, and stays where it is.
unsafe impl Sync for Code {}

include!(concat!(env!("OUT_DIR"), "/exports.rs"));

/// All functions, with their addresses.
pub(crate) fn symbols() -> impl Iterator<Item = Symbol<'static, usize>> {
    TABLE.iter().map(|(name, since, code)| Symbol { name, since: *since, what: code.0 as usize })
}
