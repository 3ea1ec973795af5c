//! Memory and semaphores of other APIs, as Vulkan's.

use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use vm_accel::{Error, ExternalKind, ExternalMemory, Result};

use super::{Context, Stream, ended};
use crate::sys::{
    CUDA_EXTERNAL_MEMORY_BUFFER_DESC, CUDA_EXTERNAL_MEMORY_HANDLE_DESC,
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st__bindgen_ty_1 as MemoryHandle, CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC,
    CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_st__bindgen_ty_1 as SemaphoreHandle,
    CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS, CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS, CUexternalMemory,
    CUexternalMemoryHandleType as MemoryType, CUexternalSemaphore,
    CUexternalSemaphoreHandleType as SemaphoreType,
};

/// `CUDA_EXTERNAL_MEMORY_DEDICATED`.
const DEDICATED: u32 = 1;

/// Memory of another API, of which the device reaches a part.
pub(crate) struct ImportedMemory {
    handle: CUexternalMemory,
    address: u64,
    context: Arc<Context>,
}

impl ImportedMemory {
    /// Imports memory and maps the part.
    pub(crate) fn new(context: &Arc<Context>, memory: ExternalMemory, device: &str) -> Result<Self> {
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
        let mut this = Self { handle, address: 0, context: Arc::clone(context) };
        let part = CUDA_EXTERNAL_MEMORY_BUFFER_DESC {
            offset: memory.offset,
            size: memory.bytes,
            flags: 0,
            reserved: [0; 16],
        };
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
        let _entered = self.context.enter();
        if self.address != 0 {
            // SAFETY: the driver mapped it here; whoever drops it sees to it that no command uses it.
            ended(unsafe { self.context.driver.cuMemFree_v2(self.address) });
        }
        // SAFETY: nothing of it is mapped any more, and nobody uses the handle after this.
        ended(unsafe { self.context.driver.cuDestroyExternalMemory(self.handle) });
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
