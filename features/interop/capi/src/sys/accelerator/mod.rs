//! The functions of `accelerator.txt`, as `build.rs` writes them, and what they look at what C gave with.
#![allow(non_camel_case_types, clippy::derivable_impls, clippy::type_complexity, clippy::useless_conversion)]

mod given;
mod job;
mod process;
mod timeline;

use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::abi::{keep, version, vmk_last_error};
use super::run::Uncancelled;
use crate::accelerator::objects::{Device, Event, Job, Kernel, Link, Memory, Module, Worker};
use crate::accelerator::resource::Resource;
use crate::accelerator::timeline::Timeline;
use crate::accelerator::{Failure, functions};

pub(crate) use given::{Array, ArrayMut, Function, Output, descriptor};
pub(crate) use job::{Call, running_job};
pub(crate) use process::end_at_exit;
pub(crate) use timeline::{SignalFunction, Theirs, WaitFunction};

include!(concat!(env!("OUT_DIR"), "/accelerator.rs"));

/// What was wrong with the calling thread's last call that failed: which function and parameter, and what to do.
#[unsafe(no_mangle)]
pub extern "C" fn vma_last_error() -> *const c_char {
    vmk_last_error()
}

/// The version of the library that runs.
#[unsafe(no_mangle)]
pub extern "C" fn vma_version() -> i32 {
    version()
}

/// Runs `f`, keeps the text of what went wrong for the thread, and makes a status of it. No panic leaves this.
fn answer(function: &'static str, f: impl FnOnce() -> Result<(), Failure>) -> vma_status {
    let _uncancelled = Uncancelled::new();
    let done = process::enter().and_then(|_passed| {
        catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
            let said = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let said = said.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
            // What the panic holds may panic when it is dropped.
            std::mem::forget(panic);
            Err(Failure::Bug(said))
        })
    });
    match done {
        Ok(()) => VMA_SUCCESS,
        Err(failure) => {
            keep(format!("{function}: {failure}"));
            failure.status()
        }
    }
}
