//! Formats of pixels and shapes of images, and what kernels see of them.

use vm_accel::{Element, Pixels};

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
    /// Each, with what it is to kernels.
    fn told(self) -> (Element, u32) {
        match self {
            Self::Rgba8Unorm | Self::Bgra8Unorm => (Element::U8, 4),
            Self::R8Unorm => (Element::U8, 1),
            Self::Rgba16Float => (Element::F16, 4),
            Self::R32Float => (Element::F32, 1),
            Self::Rgba32Float => (Element::F32, 4),
        }
    }

    /// What each number of a pixel is to a kernel. An [`Element::U8`] stands for a float from 0 to 1, which the IR's builder
    /// makes of it and the other way by `from_unorm` and `to_unorm`.
    pub fn element(self) -> Element {
        self.told().0
    }

    /// Numbers of a pixel.
    pub fn lanes(self) -> u32 {
        self.told().1
    }

    /// Bytes of a pixel.
    pub fn bytes(self) -> u32 {
        let (element, lanes) = self.told();
        element.bytes() * lanes
    }
}

/// How many levels and layers an image has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageOptions {
    /// Its levels, each half as wide and as high as the one before.
    pub levels: u32,
    /// Its layers; none for an image in which kernels index no layer.
    pub layers: Option<u32>,
}

impl Default for ImageOptions {
    fn default() -> Self {
        Self { levels: 1, layers: None }
    }
}

impl ImageOptions {
    /// The pixels of an image of that, if there is one.
    pub(crate) fn pixels(self, format: Format, [width, height]: [u32; 2]) -> Option<Pixels> {
        let Self { levels, layers } = self;
        let most = u32::BITS - width.max(height).leading_zeros();
        let is = width > 0 && height > 0 && (1..=most).contains(&levels) && layers != Some(0);
        let (element, lanes, size) = (format.element(), format.lanes(), [width, height]);
        is.then_some(Pixels { element, lanes, size, layers, levels, pitch: None })
    }
}
