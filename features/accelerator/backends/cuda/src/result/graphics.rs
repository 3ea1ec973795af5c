//! Resources of Direct3D that the driver maps itself.

use std::any::Any;
use std::ptr;
use std::sync::Arc;

use vm_accel::sys::BorrowedResource;
use vm_accel::{Error, Pixels, Result};

use super::{Context, Stream, ended};
use crate::sys::{CUarray, CUgraphicsResource, CUmipmappedArray};

/// `CU_GRAPHICS_REGISTER_FLAGS_SURFACE_LDST`: kernels take it for a surface.
const SURFACE: u32 = 4;

/// A resource of graphics that is registered.
pub(crate) struct GraphicsResource {
    handle: CUgraphicsResource,
    /// Of an image.
    pixels: Option<Pixels>,
    context: Arc<Context>,
    /// What keeps the resource itself.
    _keeper: Box<dyn Any + Send + Sync>,
}

// SAFETY: the handle is the driver's, which locks for itself.
unsafe impl Send for GraphicsResource {}
// SAFETY: as above.
unsafe impl Sync for GraphicsResource {}

impl GraphicsResource {
    pub(crate) fn new(
        context: &Arc<Context>,
        resource: BorrowedResource,
        pixels: Option<Pixels>,
    ) -> Result<Self> {
        let (_entered, mut handle) = (context.enter()?, ptr::null_mut());
        let (address, keeper) = resource.into_parts();
        let flags = if pixels.is_some() { SURFACE } else { 0 };
        // SAFETY: who made it promises that a resource is there; the pointer is to a local.
        unsafe { context.driver.cuGraphicsD3D11RegisterResource(&raw mut handle, address, flags) }?;
        Ok(Self { handle, pixels, context: Arc::clone(context), _keeper: keeper })
    }

    /// The pixels of an image.
    pub(crate) fn pixels(&self) -> Option<&Pixels> {
        self.pixels.as_ref()
    }

    /// That it was registered in this context.
    pub(crate) fn check(&self, context: &Arc<Context>) -> Result<()> {
        match self.context.handle == context.handle {
            true => Ok(()),
            false => Err(Error::WrongWorker { what: "resource" }),
        }
    }
}

impl Drop for GraphicsResource {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: what mapped it holds it, and is gone.
        ended(unsafe { self.context.driver.cuGraphicsUnregisterResource(self.handle) });
    }
}

/// A resource that is the device's, until this is dropped.
pub(crate) struct MappedResource(Arc<GraphicsResource>);

impl MappedResource {
    /// Maps it for what the stream is given next.
    pub(crate) fn new(resource: &Arc<GraphicsResource>, stream: &Stream) -> Result<Self> {
        let _entered = resource.context.enter()?;
        let (driver, mut handle) = (resource.context.driver, resource.handle);
        // SAFETY: resource and stream are live; the pointer is to a local.
        unsafe { driver.cuGraphicsMapResources(1, &raw mut handle, stream.handle()) }?;
        Ok(Self(Arc::clone(resource)))
    }

    /// Where a buffer is, and how long.
    pub(crate) fn buffer(&self) -> Result<(u64, u64)> {
        let (context, mut address, mut bytes) = (&self.0.context, 0, 0);
        let _entered = context.enter()?;
        // SAFETY: it is mapped; the pointers are to locals.
        unsafe {
            context.driver.cuGraphicsResourceGetMappedPointer_v2(
                &raw mut address,
                &raw mut bytes,
                self.0.handle,
            )
        }?;
        Ok((address, bytes as u64))
    }

    /// The array of an image with layers; the context is entered.
    pub(super) fn array(&self) -> Result<CUmipmappedArray> {
        let (driver, mut array) = (self.0.context.driver, ptr::null_mut());
        // SAFETY: it is mapped; the pointer is to a local.
        unsafe { driver.cuGraphicsResourceGetMappedMipmappedArray(&raw mut array, self.0.handle) }?;
        Ok(array)
    }

    /// The array of a level of an image without layers; the context is entered.
    pub(super) fn level(&self, number: u32) -> Result<CUarray> {
        let (driver, mut array) = (self.0.context.driver, ptr::null_mut());
        // SAFETY: as above.
        unsafe { driver.cuGraphicsSubResourceGetMappedArray(&raw mut array, self.0.handle, 0, number) }?;
        Ok(array)
    }
}

impl Drop for MappedResource {
    fn drop(&mut self) {
        let (context, mut handle) = (&self.0.context, self.0.handle);
        let _entered = context.enter();
        // SAFETY: it is mapped; whoever drops it sees to it that no command uses it, so that the default stream does.
        ended(unsafe { context.driver.cuGraphicsUnmapResources(1, &raw mut handle, ptr::null_mut()) });
    }
}
