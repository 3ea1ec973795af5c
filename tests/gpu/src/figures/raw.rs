//! The driver's own calls, as a program that uses nothing else would make them: the peers of the figures.
#![allow(unsafe_code)]

use std::ffi::{CString, c_void};
use std::ptr;

use anyhow::ensure;
use vm_cuda::sys::{
    CUcontext, CUdeviceptr, CUfunction, CUmemPool_attribute, CUmemoryPool, CUmodule, CUstream, Driver, driver,
};

/// A context and a stream, current on the thread that made it.
pub(crate) struct Raw {
    driver: &'static Driver,
    stream: CUstream,
}

/// A module with a kernel.
pub(crate) struct RawKernel {
    module: CUmodule,
    function: CUfunction,
}

fn check(what: &str, status: u32) -> anyhow::Result<()> {
    ensure!(status == 0, "{what} failed: {status}");
    Ok(())
}

impl Raw {
    /// The primary context of the device with a number.
    pub(crate) fn open(device: u32) -> anyhow::Result<Self> {
        let driver = driver()?;
        let (mut handle, mut context, mut stream): (i32, CUcontext, CUstream) =
            (0, ptr::null_mut(), ptr::null_mut());
        // SAFETY: here and below: the pointers are to locals, and the handles are live.
        check("cuDeviceGet", unsafe { (driver.cuDeviceGet)(&raw mut handle, device as i32) })?;
        // SAFETY: as above; it is never released.
        let status = unsafe { (driver.cuDevicePrimaryCtxRetain)(&raw mut context, handle) };
        check("cuDevicePrimaryCtxRetain", status)?;
        // SAFETY: as above.
        check("cuCtxSetCurrent", unsafe { (driver.cuCtxSetCurrent)(context) })?;
        // SAFETY: as above.
        check("cuStreamCreate", unsafe { (driver.cuStreamCreate)(&raw mut stream, 1) })?;
        Ok(Self { driver, stream })
    }

    pub(crate) fn load(&self, image: &[u8], entry: &str) -> anyhow::Result<RawKernel> {
        let mut image = image.to_vec();
        image.push(0);
        let entry = CString::new(entry)?;
        let mut kernel = RawKernel { module: ptr::null_mut(), function: ptr::null_mut() };
        // SAFETY: text with a zero byte behind it, or a cubin.
        let status = unsafe {
            (self.driver.cuModuleLoadDataEx)(
                &raw mut kernel.module,
                image.as_ptr().cast(),
                0,
                ptr::null_mut(),
                ptr::null_mut(),
            )
        };
        check("cuModuleLoadData", status)?;
        // SAFETY: the module was loaded just now.
        let status = unsafe {
            (self.driver.cuModuleGetFunction)(&raw mut kernel.function, kernel.module, entry.as_ptr())
        };
        check("cuModuleGetFunction", status)?;
        Ok(kernel)
    }

    pub(crate) fn unload(&self, kernel: RawKernel) -> anyhow::Result<()> {
        // SAFETY: nobody uses it after this.
        check("cuModuleUnload", unsafe { (self.driver.cuModuleUnload)(kernel.module) })
    }

    /// Launches blocks of 256 with these parameters, each a pointer to its value.
    pub(crate) fn launch(
        &self,
        kernel: &RawKernel,
        blocks: u32,
        parameters: &mut [*mut c_void],
    ) -> anyhow::Result<()> {
        self.launch_blocks(kernel, blocks, 256, parameters)
    }

    /// Launches blocks of N threads with these parameters, each a pointer to its value.
    pub(crate) fn launch_blocks(
        &self,
        kernel: &RawKernel,
        blocks: u32,
        threads: u32,
        parameters: &mut [*mut c_void],
    ) -> anyhow::Result<()> {
        // SAFETY: the kernels of the figures take what they are given, which is copied before this returns.
        let status = unsafe {
            (self.driver.cuLaunchKernel)(
                kernel.function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                self.stream,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check("cuLaunchKernel", status)
    }

    pub(crate) fn synchronize(&self) -> anyhow::Result<()> {
        // SAFETY: the stream is live.
        check("cuStreamSynchronize", unsafe { (self.driver.cuStreamSynchronize)(self.stream) })
    }

    pub(crate) fn allocate(&self, bytes: usize) -> anyhow::Result<CUdeviceptr> {
        let mut address = 0;
        // SAFETY: the pointer is to a local.
        check("cuMemAlloc", unsafe { (self.driver.cuMemAlloc_v2)(&raw mut address, bytes) })?;
        Ok(address)
    }

    pub(crate) fn free(&self, address: CUdeviceptr) -> anyhow::Result<()> {
        // SAFETY: it was allocated by `allocate`, and is freed once.
        check("cuMemFree", unsafe { (self.driver.cuMemFree_v2)(address) })
    }

    /// Lets the device's own pool keep what is freed.
    pub(crate) fn keep_freed(&self, device: u32) -> anyhow::Result<()> {
        let mut pool: CUmemoryPool = ptr::null_mut();
        // SAFETY: the pointer is to a local.
        let status = unsafe { (self.driver.cuDeviceGetDefaultMemPool)(&raw mut pool, device as i32) };
        check("cuDeviceGetDefaultMemPool", status)?;
        let mut all = u64::MAX;
        let threshold = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: this attribute is a 64-bit number.
        let status =
            unsafe { (self.driver.cuMemPoolSetAttribute)(pool, threshold, (&raw mut all).cast::<c_void>()) };
        check("cuMemPoolSetAttribute", status)
    }

    /// Allocates and frees, in the order of the stream.
    pub(crate) fn allocate_and_free_async(&self, bytes: usize) -> anyhow::Result<()> {
        let mut address = 0;
        // SAFETY: the pointer is to a local.
        let status = unsafe { (self.driver.cuMemAllocAsync)(&raw mut address, bytes, self.stream) };
        check("cuMemAllocAsync", status)?;
        // SAFETY: it was allocated just now.
        check("cuMemFreeAsync", unsafe { (self.driver.cuMemFreeAsync)(address, self.stream) })
    }
}
