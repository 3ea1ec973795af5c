//! The exported functions. Each takes its arguments as words.
#![allow(non_snake_case, clippy::too_many_arguments)]

use std::panic::{AssertUnwindSafe, catch_unwind};

use vm_bridge::wire::code;
use vm_cuda_api::names::Symbol;

use super::caller;
use crate::{describe, forward, hand};

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

/// What NVML's library asks for, by which it knows this one: 0 and nothing, what is known of the server's driver and devices; 1 and a UUID, a
/// device's memory; 2 and a length with so many bytes, NVIDIA's NVML. Writes up to `room` bytes to `to`, and how many there are to `len`.
// SAFETY: the name is the bridge's own.
#[unsafe(no_mangle)]
extern "C" fn vm_bridge_describe(what: usize, of: usize, to: usize, room: usize, len: usize) -> u32 {
    enter(what, &[of, to, room, len], |what, words| {
        let [of, to, room, len] = *words else { return Err(code::INVALID_VALUE) };
        let bytes = match what {
            0 => describe::facts()?,
            1 => {
                let memory = describe::memory([caller::word(of), caller::word(of + 8)])?;
                memory.iter().flat_map(|word| word.to_ne_bytes()).collect()
            }
            2 => describe::nvml(caller::bytes(of + 8, caller::word(of) as usize))?,
            _ => return Err(code::NOT_SUPPORTED),
        };
        caller::write(len, bytes.len() as u64);
        caller::write_bytes(to, bytes.get(..room.min(bytes.len())).unwrap_or_default());
        Ok(())
    })
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
