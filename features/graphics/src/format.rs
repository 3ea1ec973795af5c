//! Formats of pixels, and what kernels see of them.

use ash::vk;

/// How an image's pixels are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::Display, strum::EnumIter)]
#[strum(serialize_all = "kebab-case")]
pub enum Format {
    /// Four bytes: red, green, blue and alpha, each from 0 for 0.0 to 255 for 1.0.
    Rgba8Unorm,
}

impl Format {
    /// Bytes of a pixel.
    pub fn bytes(self) -> u32 {
        match self {
            Self::Rgba8Unorm => 4,
        }
    }

    pub(crate) fn vulkan(self) -> vk::Format {
        match self {
            Self::Rgba8Unorm => vk::Format::R8G8B8A8_UNORM,
        }
    }
}
