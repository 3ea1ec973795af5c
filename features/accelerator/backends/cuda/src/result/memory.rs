//! Memory: stream-ordered pools, pinned, unified and registered host memory.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use vm_accel::Result;

use super::{Context, Device, Stream, ended};
use crate::sys::{
    CUmemAllocationHandleType, CUmemAllocationType, CUmemLocation, CUmemLocationType, CUmemPool_attribute,
    CUmemPoolProps, CUmemoryPool, Driver, Status,
};

/// `CU_MEMHOSTALLOC_PORTABLE | _DEVICEMAP`, which `CU_MEMHOSTREGISTER_` has as the same bits.
const PORTABLE_AND_MAPPED: u32 = 3;
/// `CU_MEM_ATTACH_GLOBAL`.
const GLOBAL: u32 = 1;
/// `CU_MEM_ADVISE_SET_READ_MOSTLY`.
const READ_MOSTLY: u32 = 1;

/// A stream-ordered memory pool.
pub(crate) struct Pool {
    handle: CUmemoryPool,
    context: Arc<Context>,
}

impl Pool {
    /// A pool that keeps `keep` bytes of freed memory.
    pub(crate) fn new(context: &Arc<Context>, device: Device, keep: u64) -> Result<Self> {
        let driver = context.driver;
        let _entered = context.enter()?;
        let properties = CUmemPoolProps {
            allocType: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            handleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location: CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device.0 },
            win32SecurityAttributes: ptr::null_mut(),
            maxSize: 0,
            usage: 0,
            reserved: [0; 54],
        };
        let mut handle = ptr::null_mut();
        // SAFETY: the pointers are to locals.
        unsafe { driver.cuMemPoolCreate(&raw mut handle, &raw const properties) }?;
        let pool = Self { handle, context: Arc::clone(context) };
        let mut keep = keep;
        let threshold = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: this attribute is a 64-bit number.
        unsafe { driver.cuMemPoolSetAttribute(handle, threshold, (&raw mut keep).cast::<c_void>()) }?;
        Ok(pool)
    }

    /// Allocates. The status is given as it is: the caller tells a lack of memory from other failures.
    pub(crate) fn allocate(&self, bytes: u64, stream: &Stream) -> Result<u64, Status> {
        let driver = self.context.driver;
        let mut address = 0;
        // SAFETY: pool and stream are live, the pointer is to a local.
        match unsafe {
            (driver.cuMemAllocFromPoolAsync)(&raw mut address, bytes as usize, self.handle, stream.handle())
        } {
            0 => Ok(address),
            status => Err(status),
        }
    }

    pub(crate) fn trim(&self, keep: u64) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: the pool is live.
        unsafe { self.context.driver.cuMemPoolTrimTo(self.handle, keep as usize) }
    }

    /// Bytes that the pool holds, used or not.
    pub(crate) fn reserved(&self) -> Result<u64> {
        let _entered = self.context.enter()?;
        let driver = self.context.driver;
        let mut bytes = 0u64;
        let reserved = CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
        // SAFETY: this attribute is a 64-bit number.
        unsafe { driver.cuMemPoolGetAttribute(self.handle, reserved, (&raw mut bytes).cast::<c_void>()) }?;
        Ok(bytes)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: nobody uses the handle after this.
        ended(unsafe { self.context.driver.cuMemPoolDestroy(self.handle) });
    }
}

impl Driver {
    /// Frees memory of a [`Pool`], behind the stream's commands so far.
    ///
    /// # Safety
    /// The address is one that a pool gave, and was not freed. Only commands of the stream before this one use the memory.
    pub(crate) unsafe fn free_async(&self, address: u64, stream: &Stream) -> Result<()> {
        // SAFETY: as the caller promises; the stream is live.
        unsafe { self.cuMemFreeAsync(address, stream.handle()) }
    }

    pub(crate) fn allocate_unified(&self, bytes: u64) -> Result<u64, Status> {
        let mut address = 0;
        // SAFETY: the pointer is to a local.
        match unsafe { (self.cuMemAllocManaged)(&raw mut address, bytes as usize, GLOBAL) } {
            0 => Ok(address),
            status => Err(status),
        }
    }

    /// Lets host and device have copies of unified memory as long as neither writes there.
    pub(crate) fn mostly_read(&self, address: u64, bytes: u64, device: Device) -> Result<()> {
        // SAFETY: it only says how the memory is used; what is no unified memory is refused.
        unsafe { self.cuMemAdvise(address, bytes as usize, READ_MOSTLY, device.0) }
    }

    /// Frees unified memory.
    ///
    /// # Safety
    /// The address is one that [`allocate_unified`](Self::allocate_unified) gave, and was not freed. Nobody uses the memory any
    /// more.
    pub(crate) unsafe fn free_unified(&self, address: u64) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.cuMemFree_v2(address) }
    }

    /// Pinned memory: the host's address and the device's.
    pub(crate) fn allocate_pinned(&self, bytes: u64) -> Result<(u64, u64), Status> {
        let mut host = ptr::null_mut();
        // SAFETY: the pointer is to a local.
        match unsafe { (self.cuMemHostAlloc)(&raw mut host, bytes as usize, PORTABLE_AND_MAPPED) } {
            0 => {}
            status => return Err(status),
        }
        self.device_address(host).map(|address| (host as u64, address)).inspect_err(|_| {
            // SAFETY: it was allocated just now.
            ended(unsafe { self.cuMemFreeHost(host) });
        })
    }

    /// Frees pinned memory, by the host's address.
    ///
    /// # Safety
    /// The address is one that [`allocate_pinned`](Self::allocate_pinned) gave, and was not freed. Nobody uses the memory any
    /// more.
    pub(crate) unsafe fn free_pinned(&self, host: u64) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.cuMemFreeHost(host as *mut c_void) }
    }

    /// Registers host memory, and gives the device's address.
    ///
    /// # Safety
    /// The memory stays mapped until it is unregistered by [`Driver::unregister`].
    pub(crate) unsafe fn register(&self, host: *mut u8, bytes: u64) -> Result<u64> {
        let host: *mut c_void = host.cast();
        // SAFETY: as the caller promises; a range that is not mapped is refused.
        unsafe { self.cuMemHostRegister_v2(host, bytes as usize, PORTABLE_AND_MAPPED) }?;
        self.device_address(host).map_err(|status| {
            // SAFETY: it was registered just now.
            ended(unsafe { self.cuMemHostUnregister(host) });
            self.error("cuMemHostGetDevicePointer", status)
        })
    }

    /// Takes registered memory from the device.
    ///
    /// # Safety
    /// The address is one that was given to [`register`](Self::register), and was not unregistered. The device uses the memory no
    /// more.
    pub(crate) unsafe fn unregister(&self, host: u64) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.cuMemHostUnregister(host as *mut c_void) }
    }

    fn device_address(&self, host: *mut c_void) -> Result<u64, Status> {
        let mut address = 0;
        // SAFETY: the memory is pinned or registered; the pointer is to a local.
        match unsafe { (self.cuMemHostGetDevicePointer_v2)(&raw mut address, host, 0) } {
            0 => Ok(address),
            status => Err(status),
        }
    }
}
