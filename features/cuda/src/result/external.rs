//! Memory and semaphores of other APIs, as Vulkan's.

use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;

use vm_accel::{Element, Error, ExternalKind, ExternalMemory, Pixels, Result};

use super::{Context, Stream, ended};
use crate::sys::{
    CUDA_ARRAY3D_DESCRIPTOR, CUDA_EXTERNAL_MEMORY_BUFFER_DESC, CUDA_EXTERNAL_MEMORY_HANDLE_DESC,
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st__bindgen_ty_1 as MemoryHandle,
    CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC, CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC,
    CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_st__bindgen_ty_1 as SemaphoreHandle,
    CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS, CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS, CUDA_RESOURCE_DESC,
    CUDA_RESOURCE_DESC_st__bindgen_ty_1 as Resource,
    CUDA_RESOURCE_DESC_st__bindgen_ty_1__bindgen_ty_1 as ArrayResource, CUarray_format, CUexternalMemory,
    CUexternalMemoryHandleType as MemoryType, CUexternalSemaphore,
    CUexternalSemaphoreHandleType as SemaphoreType, CUmipmappedArray, CUresourcetype, CUsurfObject,
};

/// `CUDA_EXTERNAL_MEMORY_DEDICATED`.
const DEDICATED: u32 = 1;

/// `CUDA_ARRAY3D_LAYERED`.
const LAYERED: u32 = 1;
/// `CUDA_ARRAY3D_SURFACE_LDST`.
const SURFACE: u32 = 2;
/// `CUDA_ARRAY3D_COLOR_ATTACHMENT`: graphics renders to it.
const RENDERED: u32 = 0x20;

/// Memory of another API, of which nothing is mapped yet.
struct External {
    handle: CUexternalMemory,
    context: Arc<Context>,
}

impl External {
    fn new(context: &Arc<Context>, memory: ExternalMemory, device: &str) -> Result<Self> {
        memory.check()?;
        let kind = match memory.kind {
            ExternalKind::OpaqueFd => MemoryType::CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD,
            ExternalKind::DmaBuf => MemoryType::CU_EXTERNAL_MEMORY_HANDLE_TYPE_DMABUF_FD,
            ExternalKind::HostFd => return Err(memory.refused(device)),
        };
        let description = CUDA_EXTERNAL_MEMORY_HANDLE_DESC {
            type_: kind,
            handle: MemoryHandle { fd: memory.fd.as_raw_fd() },
            size: memory.allocation,
            flags: if memory.dedicated && memory.kind == ExternalKind::OpaqueFd { DEDICATED } else { 0 },
            reserved: [0; 16],
        };
        let mut handle = ptr::null_mut();
        let _entered = context.enter()?;
        // SAFETY: the pointers are to locals; the descriptor is open.
        unsafe { context.driver.cuImportExternalMemory(&raw mut handle, &raw const description) }?;
        // What was imported is the driver's; a dma-buf it only looks at.
        if memory.kind == ExternalKind::OpaqueFd {
            let _ = memory.fd.into_raw_fd();
        }
        Ok(Self { handle, context: Arc::clone(context) })
    }
}

impl Drop for External {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: nothing of it is mapped any more, and nobody uses the handle after this.
        ended(unsafe { self.context.driver.cuDestroyExternalMemory(self.handle) });
    }
}

/// Memory of another API, of which the device reaches a part.
pub(crate) struct ImportedMemory {
    address: u64,
    memory: External,
}

impl ImportedMemory {
    /// Imports memory and maps the part.
    pub(crate) fn new(context: &Arc<Context>, memory: ExternalMemory, device: &str) -> Result<Self> {
        let (offset, size) = (memory.offset, memory.bytes);
        let memory = External::new(context, memory, device)?;
        let mut this = Self { address: 0, memory };
        let part = CUDA_EXTERNAL_MEMORY_BUFFER_DESC { offset, size, flags: 0, reserved: [0; 16] };
        let (_entered, handle) = (context.enter()?, this.memory.handle);
        // SAFETY: the import is live, and has the part; the pointers are to locals.
        unsafe {
            context.driver.cuExternalMemoryGetMappedBuffer(&raw mut this.address, handle, &raw const part)
        }?;
        Ok(this)
    }

    /// The device's address of the part.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for ImportedMemory {
    fn drop(&mut self) {
        let context = &self.memory.context;
        let _entered = context.enter();
        if self.address != 0 {
            // SAFETY: the driver mapped it here; whoever drops it sees to it that no command uses it.
            ended(unsafe { context.driver.cuMemFree_v2(self.address) });
        }
    }
}

/// An image of another API.
struct ImportedImage {
    array: CUmipmappedArray,
    memory: External,
}

impl Drop for ImportedImage {
    fn drop(&mut self) {
        let context = &self.memory.context;
        let _entered = context.enter();
        // SAFETY: the driver mapped it here, and the surfaces of its levels, which hold it, are destroyed.
        ended(unsafe { context.driver.cuMipmappedArrayDestroy(self.array) });
    }
}

/// A level of an image of another API, as kernels reach it.
pub(crate) struct Surface {
    handle: CUsurfObject,
    image: Rc<ImportedImage>,
}

impl Surface {
    /// Imports an image, and makes a surface for each level.
    pub(crate) fn of_image(
        context: &Arc<Context>,
        memory: ExternalMemory,
        pixels: &Pixels,
        device: &str,
    ) -> Result<Vec<Self>> {
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
        let image = CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC {
            offset: memory.offset,
            arrayDesc: CUDA_ARRAY3D_DESCRIPTOR {
                Width: width,
                Height: height,
                Depth: pixels.layers.unwrap_or(0) as usize,
                Format: format,
                NumChannels: pixels.lanes,
                Flags: SURFACE | RENDERED | if pixels.layers.is_some() { LAYERED } else { 0 },
            },
            numLevels: pixels.levels,
            reserved: [0; 16],
        };
        let (driver, memory) = (context.driver, External::new(context, memory, device)?);
        let (_entered, mut array) = (context.enter()?, ptr::null_mut());
        // SAFETY: the import is live; the pointers are to locals.
        unsafe {
            driver.cuExternalMemoryGetMappedMipmappedArray(&raw mut array, memory.handle, &raw const image)
        }?;
        let image = Rc::new(ImportedImage { array, memory });
        (0..pixels.levels).map(|level| Self::new(&image, level)).collect()
    }

    fn new(image: &Rc<ImportedImage>, number: u32) -> Result<Self> {
        let (driver, mut level, mut handle) = (image.memory.context.driver, ptr::null_mut(), 0);
        // SAFETY: the array is live; the pointer is to a local.
        unsafe { driver.cuMipmappedArrayGetLevel(&raw mut level, image.array, number) }?;
        let resource = CUDA_RESOURCE_DESC {
            resType: CUresourcetype::CU_RESOURCE_TYPE_ARRAY,
            res: Resource { array: ArrayResource { hArray: level } },
            flags: 0,
        };
        // SAFETY: the level is there as long as the array, which the surface holds; the pointers are to locals.
        unsafe { driver.cuSurfObjectCreate(&raw mut handle, &raw const resource) }?;
        Ok(Self { handle, image: Rc::clone(image) })
    }

    /// What a kernel takes.
    pub(crate) fn handle(&self) -> u64 {
        self.handle
    }
}

impl Drop for Surface {
    fn drop(&mut self) {
        let context = &self.image.memory.context;
        let _entered = context.enter();
        // SAFETY: it was made here; whoever drops it sees to it that no command uses it.
        ended(unsafe { context.driver.cuSurfObjectDestroy(self.handle) });
    }
}

/// A timeline semaphore of another API.
pub(crate) struct ImportedSemaphore {
    handle: CUexternalSemaphore,
    context: Arc<Context>,
}

// SAFETY: the handle is the driver's, which locks for itself.
unsafe impl Send for ImportedSemaphore {}
// SAFETY: as above.
unsafe impl Sync for ImportedSemaphore {}

impl ImportedSemaphore {
    pub(crate) fn new(context: &Arc<Context>, fd: OwnedFd) -> Result<Self> {
        let description = CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC {
            type_: SemaphoreType::CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD,
            handle: SemaphoreHandle { fd: fd.as_raw_fd() },
            flags: 0,
            reserved: [0; 16],
        };
        let mut handle = ptr::null_mut();
        let _entered = context.enter()?;
        // SAFETY: the pointers are to locals; the descriptor is open.
        unsafe { context.driver.cuImportExternalSemaphore(&raw mut handle, &raw const description) }?;
        // It is the driver's now.
        let _ = fd.into_raw_fd();
        Ok(Self { handle, context: Arc::clone(context) })
    }

    /// Lets what the stream is given next wait for a value.
    pub(crate) fn wait(&self, stream: &Stream, value: u64) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: all of it is numbers and pointers that may be null.
        let mut how: CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS = unsafe { std::mem::zeroed() };
        how.params.fence.value = value;
        let (handle, driver) = (&raw const self.handle, self.context.driver);
        // SAFETY: semaphore and stream are live; the pointers are to one of each.
        unsafe { driver.cuWaitExternalSemaphoresAsync(handle, &raw const how, 1, stream.handle()) }
    }

    /// Sets it to a value behind what the stream was given.
    pub(crate) fn signal(&self, stream: &Stream, value: u64) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: as above.
        let mut how: CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS = unsafe { std::mem::zeroed() };
        how.params.fence.value = value;
        let (handle, driver) = (&raw const self.handle, self.context.driver);
        // SAFETY: as above.
        unsafe { driver.cuSignalExternalSemaphoresAsync(handle, &raw const how, 1, stream.handle()) }
    }

    /// That it was imported in this context.
    pub(crate) fn check(&self, context: &Arc<Context>) -> Result<()> {
        if self.context.handle == context.handle {
            Ok(())
        } else {
            Err(Error::WrongWorker { what: "semaphore" })
        }
    }
}

impl Drop for ImportedSemaphore {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: nobody uses the handle after this; whoever drops it sees to it that no command does.
        ended(unsafe { self.context.driver.cuDestroyExternalSemaphore(self.handle) });
    }
}
