//! Formats of pixels, and what kernels see of them.

use ash::vk;
use vm_accel::Element;

/// How an image's pixels are stored. A kernel sees one as so many [lanes](Format::lanes) of an [element](Format::element).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::Display, strum::EnumIter)]
#[strum(serialize_all = "kebab-case")]
pub enum Format {
    /// Four bytes: red, green, blue and alpha, each from 0 for 0.0 to 255 for 1.0.
    Rgba8Unorm,
    /// The same in the order of screens: blue, green, red, alpha.
    Bgra8Unorm,
    /// One such byte.
    R8Unorm,
    /// Four floats of 16 bits.
    Rgba16Float,
    /// One float.
    R32Float,
    /// Four floats.
    Rgba32Float,
}

impl Format {
    /// Each, with what it is to Vulkan and to kernels.
    fn told(self) -> (vk::Format, Element, u32) {
        match self {
            Self::Rgba8Unorm => (vk::Format::R8G8B8A8_UNORM, Element::U8, 4),
            Self::Bgra8Unorm => (vk::Format::B8G8R8A8_UNORM, Element::U8, 4),
            Self::R8Unorm => (vk::Format::R8_UNORM, Element::U8, 1),
            Self::Rgba16Float => (vk::Format::R16G16B16A16_SFLOAT, Element::F16, 4),
            Self::R32Float => (vk::Format::R32_SFLOAT, Element::F32, 1),
            Self::Rgba32Float => (vk::Format::R32G32B32A32_SFLOAT, Element::F32, 4),
        }
    }

    /// What each number of a pixel is to a kernel. An [`Element::U8`] stands for a float from 0 to 1, which the IR's builder
    /// makes of it and the other way by `from_unorm` and `to_unorm`.
    pub fn element(self) -> Element {
        self.told().1
    }

    /// Numbers of a pixel.
    pub fn lanes(self) -> u32 {
        self.told().2
    }

    /// Bytes of a pixel.
    pub fn bytes(self) -> u32 {
        let (_, element, lanes) = self.told();
        element.bytes() * lanes
    }

    pub(crate) fn vulkan(self) -> vk::Format {
        self.told().0
    }
}
