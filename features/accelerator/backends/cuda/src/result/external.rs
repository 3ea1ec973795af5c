//! Memory and semaphores of other APIs, as Vulkan's and Direct3D's.

use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use vm_accel::{Error, ExternalKind, ExternalMemory, OsHandle, Result, SemaphoreKind};

use super::{Context, Stream, ended, handle};
use crate::sys::{
    CUDA_ARRAY3D_DESCRIPTOR, CUDA_EXTERNAL_MEMORY_BUFFER_DESC, CUDA_EXTERNAL_MEMORY_HANDLE_DESC,
    CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC, CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC,
    CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS, CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS, CUexternalMemory,
    CUexternalMemoryHandleType as MemoryType, CUexternalSemaphore,
    CUexternalSemaphoreHandleType as SemaphoreType, CUmipmappedArray,
};

/// `CUDA_EXTERNAL_MEMORY_DEDICATED`.
const DEDICATED: u32 = 1;
/// `CUDA_ERROR_TIMEOUT`.
const TIMEOUT: u32 = 909;

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
            ExternalKind::D3d11Resource if handle::is_kmt(&memory.fd) => {
                MemoryType::CU_EXTERNAL_MEMORY_HANDLE_TYPE_D3D11_RESOURCE_KMT
            }
            ExternalKind::D3d11Resource => MemoryType::CU_EXTERNAL_MEMORY_HANDLE_TYPE_D3D11_RESOURCE,
            ExternalKind::HostFd => return Err(memory.refused(device)),
        };
        let dedicated = match memory.kind {
            ExternalKind::OpaqueFd => memory.dedicated,
            kind => kind == ExternalKind::D3d11Resource,
        };
        let description = CUDA_EXTERNAL_MEMORY_HANDLE_DESC {
            type_: kind,
            handle: handle::of_memory(&memory.fd),
            size: memory.allocation,
            flags: if dedicated { DEDICATED } else { 0 },
            reserved: [0; 16],
        };
        let mut handle = ptr::null_mut();
        let _entered = context.enter()?;
        // SAFETY: the pointers are to locals; the descriptor is open.
        unsafe { context.driver.cuImportExternalMemory(&raw mut handle, &raw const description) }?;
        // A descriptor of its own is the driver's now; at others it only looks.
        if memory.kind == ExternalKind::OpaqueFd {
            handle::give(memory.fd);
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
pub(super) struct ImportedImage {
    pub(super) array: CUmipmappedArray,
    memory: External,
}

impl ImportedImage {
    /// Imports an image of such arrays.
    pub(super) fn new(
        context: &Arc<Context>,
        memory: ExternalMemory,
        (levels, array): (u32, CUDA_ARRAY3D_DESCRIPTOR),
        device: &str,
    ) -> Result<Self> {
        let image = CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC {
            offset: memory.offset,
            arrayDesc: array,
            numLevels: levels,
            reserved: [0; 16],
        };
        let (driver, memory) = (context.driver, External::new(context, memory, device)?);
        let (_entered, mut array) = (context.enter()?, ptr::null_mut());
        // SAFETY: the import is live; the pointers are to locals.
        unsafe {
            driver.cuExternalMemoryGetMappedMipmappedArray(&raw mut array, memory.handle, &raw const image)
        }?;
        Ok(Self { array, memory })
    }
}

impl Drop for ImportedImage {
    fn drop(&mut self) {
        let context = &self.memory.context;
        let _entered = context.enter();
        // SAFETY: the driver mapped it here, and the surfaces of its levels, which hold it, are destroyed.
        ended(unsafe { context.driver.cuMipmappedArrayDestroy(self.array) });
    }
}

/// A semaphore of another API.
pub(crate) struct ImportedSemaphore {
    handle: CUexternalSemaphore,
    kind: SemaphoreKind,
    /// How long it is waited for, of a kind whose waits can end before.
    milliseconds: u32,
    context: Arc<Context>,
}

// SAFETY: the handle is the driver's, which locks for itself.
unsafe impl Send for ImportedSemaphore {}
// SAFETY: as above.
unsafe impl Sync for ImportedSemaphore {}

impl ImportedSemaphore {
    pub(crate) fn new(
        context: &Arc<Context>,
        fd: OsHandle,
        kind: SemaphoreKind,
        timeout: Duration,
    ) -> Result<Self> {
        let description = CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC {
            type_: match kind {
                SemaphoreKind::Timeline => {
                    SemaphoreType::CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD
                }
                SemaphoreKind::D3d11Fence => SemaphoreType::CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_D3D11_FENCE,
                SemaphoreKind::D3d11KeyedMutex if handle::is_kmt(&fd) => {
                    SemaphoreType::CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_D3D11_KEYED_MUTEX_KMT
                }
                SemaphoreKind::D3d11KeyedMutex => {
                    SemaphoreType::CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_D3D11_KEYED_MUTEX
                }
            },
            handle: handle::of_semaphore(&fd),
            flags: 0,
            reserved: [0; 16],
        };
        let mut handle = ptr::null_mut();
        let _entered = context.enter()?;
        // SAFETY: the pointers are to locals; the descriptor is open.
        unsafe { context.driver.cuImportExternalSemaphore(&raw mut handle, &raw const description) }?;
        if kind == SemaphoreKind::Timeline {
            handle::give(fd);
        }
        // The largest number would be for ever.
        let milliseconds = timeout.as_millis().min(u128::from(u32::MAX - 1)) as u32;
        Ok(Self { handle, kind, milliseconds, context: Arc::clone(context) })
    }

    /// Lets what the stream is given next wait for a value, or for a mutex that was released with that key.
    pub(crate) fn wait(&self, stream: &Stream, value: u64) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: all of it is numbers and pointers that may be null.
        let mut how: CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS = unsafe { std::mem::zeroed() };
        if self.kind == SemaphoreKind::D3d11KeyedMutex {
            how.params.keyedMutex.key = value;
            how.params.keyedMutex.timeoutMs = self.milliseconds;
        } else {
            how.params.fence.value = value;
        }
        let (handle, driver) = (&raw const self.handle, self.context.driver);
        // SAFETY: semaphore and stream are live; the pointers are to one of each.
        let status =
            unsafe { (driver.cuWaitExternalSemaphoresAsync)(handle, &raw const how, 1, stream.handle()) };
        match status {
            TIMEOUT => Err(Error::Deadline { what: format!("graphics' {} at {value}", self.kind) }),
            status => driver.check("cuWaitExternalSemaphoresAsync", status),
        }
    }

    /// Sets it to a value behind what the stream was given, or releases a mutex with that key.
    pub(crate) fn signal(&self, stream: &Stream, value: u64) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: as above.
        let mut how: CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS = unsafe { std::mem::zeroed() };
        if self.kind == SemaphoreKind::D3d11KeyedMutex {
            how.params.keyedMutex.key = value;
        } else {
            how.params.fence.value = value;
        }
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
