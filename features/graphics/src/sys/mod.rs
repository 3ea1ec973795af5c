//! Vulkan's objects, owned: each is destroyed once, when the last that uses it is gone, and each result becomes a `Result`.
//!
//! Handles never leave this module, so the unsafe calls in it are given handles that are live.
#![allow(unsafe_code)]

mod allocation;
mod device;
mod instance;
mod pattern;
mod recorder;
mod resource;
mod timeline;

use ash::vk;
use vm_accel::Error;

pub(crate) use allocation::Place;
pub(crate) use device::Device;
pub(crate) use instance::{Instance, Physical};
pub(crate) use pattern::Pipeline;
pub(crate) use recorder::{Recorder, Ring};
pub(crate) use resource::{RawBuffer, RawImage};
pub(crate) use timeline::RawTimeline;

/// The error of a call.
pub(crate) fn failed(call: &'static str) -> impl Fn(vk::Result) -> Error {
    move |result| match result {
        vk::Result::ERROR_DEVICE_LOST => Error::Lost { cause: format!("{call}: {result:?}, {result}") },
        _ => Error::Driver {
            call,
            code: i64::from(result.as_raw()),
            name: format!("{result:?}"),
            message: result.to_string(),
        },
    }
}
