//! The functions of the ABI by name, for tests: in this program, or in a library that was loaded.
#![allow(clippy::missing_transmute_annotations, clippy::unnecessary_cast, clippy::fn_to_numeric_cast_any)]

use std::ffi::{c_float, c_int, c_void};
use std::mem::transmute;

use super::abi::{vmk_bf16, vmk_f16};

/// A function of the ABI.
#[derive(Debug)]
pub struct Entry {
    /// Its name.
    pub name: &'static str,
    /// Its parameters, in their order.
    pub parameters: &'static [Parameter],
}

/// A parameter.
#[derive(Debug)]
pub struct Parameter {
    /// Its name.
    pub name: &'static str,
    /// Its type as in the table, with the element in the place of `T`; the workspace, its bytes and the stream as in C.
    pub kind: &'static str,
    /// May it be NULL?
    pub optional: bool,
    /// Is it memory to work in, beside `workspace`?
    pub scratch: bool,
}

include!(concat!(env!("OUT_DIR"), "/by_name.rs"));

/// The functions of this program on the CPU, with memory of the process's.
#[derive(Debug)]
pub struct OnCpu(Vec<Box<Arena>>);

/// Memory of an arena.
#[derive(Debug)]
#[repr(align(256))]
struct Arena([u8; crate::checks::ARENA]);

impl OnCpu {
    /// Makes the CPU what the process's calls run on.
    ///
    /// # Errors
    /// There is none.
    pub fn new() -> Result<OnCpu, String> {
        let zeroed = || {
            // SAFETY: bytes of zero are an array of bytes.
            unsafe { Box::<Arena>::new_zeroed().assume_init() }
        };
        let this = OnCpu((0..crate::checks::ARENAS).map(|_| zeroed()).collect());
        this.choose()
    }

    /// The same again, after another device was chosen.
    ///
    /// # Errors
    /// There is none.
    pub fn choose(self) -> Result<OnCpu, String> {
        let status = super::vmk_use(super::vmk_device::VMK_CPU as i32);
        if status == super::vmk_status::VMK_SUCCESS { Ok(self) } else { Err(format!("vmk_use: {status:?}")) }
    }
}

impl crate::checks::Caller for OnCpu {
    fn call(&mut self, name: &str, words: &[u64]) -> Result<i32, String> {
        let function = place(name).ok_or_else(|| format!("no function {name}"))?;
        // SAFETY: the function is that of the name; addresses are those of arenas, which have room for what is computed there, or refused.
        unsafe { call(name, function, words) }
            .ok_or_else(|| format!("{name} has not {} parameters", words.len()))
    }

    fn last(&mut self) -> String {
        // SAFETY: it is a string until the thread's next call.
        unsafe { std::ffi::CStr::from_ptr(super::vmk_last_error()) }.to_string_lossy().into_owned()
    }

    fn arena(&self, number: usize) -> u64 {
        (&raw const self.0[number].0).expose_provenance() as u64
    }

    fn write(&mut self, number: usize, bytes: &[u8]) -> Result<(), String> {
        self.0[number].0[..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn read(&mut self, number: usize, bytes: &mut [u8]) -> Result<(), String> {
        bytes.copy_from_slice(&self.0[number].0[..bytes.len()]);
        Ok(())
    }

    fn stream(&self) -> u64 {
        0
    }
}
