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

use crate::format::Format;

/// What a format is to Vulkan.
pub(crate) fn format(format: Format) -> vk::Format {
    match format {
        Format::Rgba8Unorm => vk::Format::R8G8B8A8_UNORM,
        Format::Bgra8Unorm => vk::Format::B8G8R8A8_UNORM,
        Format::R8Unorm => vk::Format::R8_UNORM,
        Format::Rgba16Float => vk::Format::R16G16B16A16_SFLOAT,
        Format::R32Float => vk::Format::R32_SFLOAT,
        Format::Rgba32Float => vk::Format::R32G32B32A32_SFLOAT,
    }
}

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
