//! Images of other APIs, as kernels reach them.

use std::ptr;
use std::rc::Rc;
use std::sync::Arc;

use vm_accel::{Element, Error, ExternalMemory, Pixels, Result};

use super::external::ImportedImage;
use super::graphics::MappedResource;
use super::{Context, ended};
use crate::sys::{
    CUDA_ARRAY3D_DESCRIPTOR, CUDA_RESOURCE_DESC, CUDA_RESOURCE_DESC_st__bindgen_ty_1 as Resource,
    CUDA_RESOURCE_DESC_st__bindgen_ty_1__bindgen_ty_1 as ArrayResource, CUarray, CUarray_format,
    CUmipmappedArray, CUresourcetype, CUsurfObject,
};

/// `CUDA_ARRAY3D_LAYERED`.
const LAYERED: u32 = 1;
/// `CUDA_ARRAY3D_SURFACE_LDST`.
const SURFACE: u32 = 2;
/// `CUDA_ARRAY3D_COLOR_ATTACHMENT`: graphics renders to it.
const RENDERED: u32 = 0x20;

/// What has the arrays, which are there as long as it is.
enum Image {
    Imported(ImportedImage),
    Mapped(MappedResource),
}

impl Image {
    fn level(&self, context: &Context, pixels: &Pixels, number: u32) -> Result<CUarray> {
        let of = |array: CUmipmappedArray| {
            let mut level = ptr::null_mut();
            // SAFETY: the array is live; the pointer is to a local.
            unsafe { context.driver.cuMipmappedArrayGetLevel(&raw mut level, array, number) }.map(|()| level)
        };
        match self {
            Self::Imported(image) => of(image.array),
            Self::Mapped(image) if pixels.layers.is_some() => of(image.array()?),
            Self::Mapped(image) => image.level(number),
        }
    }
}

/// A level of an image of another API, as kernels reach it.
pub(crate) struct Surface {
    handle: CUsurfObject,
    context: Arc<Context>,
    _image: Rc<Image>,
}

impl Surface {
    /// Imports an image, and makes a surface for each level.
    pub(crate) fn of_image(
        context: &Arc<Context>,
        memory: ExternalMemory,
        pixels: &Pixels,
        device: &str,
    ) -> Result<Vec<Self>> {
        let array = array(pixels, device)?;
        let image = ImportedImage::new(context, memory, (pixels.levels, array), device)?;
        Self::levels(context, Image::Imported(image), pixels)
    }

    /// The same of an image that is mapped, until the last of them is dropped.
    pub(crate) fn of_resource(
        context: &Arc<Context>,
        resource: MappedResource,
        pixels: &Pixels,
    ) -> Result<Vec<Self>> {
        Self::levels(context, Image::Mapped(resource), pixels)
    }

    fn levels(context: &Arc<Context>, image: Image, pixels: &Pixels) -> Result<Vec<Self>> {
        let (_entered, image) = (context.enter()?, Rc::new(image));
        let each = |number| Self::new(context, image.level(context, pixels, number)?, &image);
        (0..pixels.levels).map(each).collect()
    }

    fn new(context: &Arc<Context>, level: CUarray, image: &Rc<Image>) -> Result<Self> {
        let resource = CUDA_RESOURCE_DESC {
            resType: CUresourcetype::CU_RESOURCE_TYPE_ARRAY,
            res: Resource { array: ArrayResource { hArray: level } },
            flags: 0,
        };
        let mut handle = 0;
        // SAFETY: the level is there as long as the image, which the surface holds; the pointers are to locals.
        unsafe { context.driver.cuSurfObjectCreate(&raw mut handle, &raw const resource) }?;
        Ok(Self { handle, context: Arc::clone(context), _image: Rc::clone(image) })
    }

    /// What a kernel takes.
    pub(crate) fn handle(&self) -> u64 {
        self.handle
    }
}

impl Drop for Surface {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: it was made here; whoever drops it sees to it that no command uses it.
        ended(unsafe { self.context.driver.cuSurfObjectDestroy(self.handle) });
    }
}

/// What an array is called that has such pixels.
fn array(pixels: &Pixels, device: &str) -> Result<CUDA_ARRAY3D_DESCRIPTOR> {
    let [width, height] = pixels.size.map(|side| side as usize);
    let format = match pixels.element {
        Element::U8 => CUarray_format::CU_AD_FORMAT_UNSIGNED_INT8,
        Element::U16 => CUarray_format::CU_AD_FORMAT_UNSIGNED_INT16,
        Element::U32 => CUarray_format::CU_AD_FORMAT_UNSIGNED_INT32,
        Element::F16 => CUarray_format::CU_AD_FORMAT_HALF,
        Element::F32 => CUarray_format::CU_AD_FORMAT_FLOAT,
        other => {
            let what = format!("surfaces of {other}");
            return Err(Error::Unsupported { what, device: device.to_owned() });
        }
    };
    Ok(CUDA_ARRAY3D_DESCRIPTOR {
        Width: width,
        Height: height,
        Depth: pixels.layers.unwrap_or(0) as usize,
        Format: format,
        NumChannels: pixels.lanes,
        Flags: SURFACE | RENDERED | if pixels.layers.is_some() { LAYERED } else { 0 },
    })
}
