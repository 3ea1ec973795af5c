//! A pattern of which every pixel is known: for tests, examples and figures.

use std::fmt;
use std::sync::Arc;

use vm_accel::Result;

use crate::format::Format;
use crate::sys::{self, Device, Pipeline};

// Made by `glslangValidator -V --target-env vulkan1.3` of the file beside it.
const VERTEX: &[u8] = include_bytes!("../shaders/pattern.vert.spv");
const FRAGMENT: &[u8] = include_bytes!("../shaders/pattern.frag.spv");

/// A triangle over all of an image, each of whose pixels is known for each frame.
pub struct Pattern {
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) format: Format,
}

impl Pattern {
    pub(crate) fn new(device: &Arc<Device>, format: Format) -> Result<Self> {
        let pipeline = Pipeline::new(device, sys::format(format), VERTEX, FRAGMENT)?;
        Ok(Self { pipeline: Arc::new(pipeline), format })
    }

    /// The pixel at a column and a row of the frame with a number: red, green, blue and alpha.
    pub fn pixel(x: u32, y: u32, number: u32) -> [u8; 4] {
        let of = |at: u32, times: u32| at.wrapping_add(number.wrapping_mul(times)) as u8;
        [of(x.wrapping_mul(3), 1), of(y.wrapping_mul(5), 1), of(x ^ y, 7), 255]
    }
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pattern").field("format", &self.format).finish_non_exhaustive()
    }
}
