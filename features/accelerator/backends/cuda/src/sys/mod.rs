//! The functions of libcuda as they are, found when the program runs. Everything here is as unsafe as C.
//!
//! [`BorrowedContext`] and [`BorrowedStream`] are what somebody else's code made by the same functions, for
//! [`CudaAccelerator::borrow`](crate::CudaAccelerator::borrow), and [`BorrowedAdapter`] is Windows', for
//! [`CudaAccelerator::of_adapter`](crate::CudaAccelerator::of_adapter).
#![allow(unsafe_code, non_snake_case)]

mod borrowed;

pub use borrowed::{BorrowedAdapter, BorrowedContext, BorrowedStream};

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

pub use cudarc::driver::sys::{
    CUDA_ARRAY3D_DESCRIPTOR, CUDA_EXTERNAL_MEMORY_BUFFER_DESC, CUDA_EXTERNAL_MEMORY_HANDLE_DESC,
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st__bindgen_ty_1, CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC,
    CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC, CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_st__bindgen_ty_1,
    CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS, CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS, CUDA_KERNEL_NODE_PARAMS_v2,
    CUDA_RESOURCE_DESC, CUDA_RESOURCE_DESC_st__bindgen_ty_1,
    CUDA_RESOURCE_DESC_st__bindgen_ty_1__bindgen_ty_1, CUarray, CUarray_format, CUcontext, CUdevice,
    CUdevice_attribute, CUdeviceptr, CUevent, CUexternalMemory, CUexternalMemoryHandleType,
    CUexternalSemaphore, CUexternalSemaphoreHandleType, CUfunction, CUfunction_attribute, CUgraph,
    CUgraphExec, CUgraphNode, CUgraphicsResource, CUjit_option, CUjitInputType, CUlinkState,
    CUmemAllocationHandleType, CUmemAllocationType, CUmemLocation, CUmemLocationType, CUmemPool_attribute,
    CUmemPoolProps, CUmemoryPool, CUmipmappedArray, CUmodule, CUpointer_attribute, CUresourcetype, CUstream,
    CUsurfObject, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle, CUuuid,
};
#[cfg(windows)]
pub use cudarc::driver::sys::{
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st__bindgen_ty_1__bindgen_ty_1,
    CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC_st__bindgen_ty_1__bindgen_ty_1,
};
use libloading::Library;
use vm_accel::{Error, Result};

/// What a driver function returns: 0 for success. A number, because a newer driver has codes that no list has.
pub type Status = c_uint;

/// The library.
const LIBRARY: &str = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };

macro_rules! driver {
    (
        $($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),*);)*
        optional: $($(#[$about:meta])* fn $optional:ident($($given:ident: $of:ty),*);)*
    ) => {
        /// The driver's functions. <https://docs.nvidia.com/cuda/cuda-driver-api/> says what each does.
        pub struct Driver {
            $($(#[$meta])* pub $name: unsafe extern "C" fn($($argument: $type),*) -> Status,)*
            $($(#[$about])* pub $optional: Option<unsafe extern "C" fn($($of),*) -> Status>,)*
            /// What they are in; a test's are in none.
            _library: Option<Library>,
        }

        #[cfg(test)]
        impl Driver {
            /// Functions that do nothing but note their names and succeed.
            pub(crate) fn fake() -> Self {
                Self {
                    $($name: {
                        unsafe extern "C" fn noted($(_: $type),*) -> Status {
                            crate::fake::note(stringify!($name))
                        }
                        noted
                    },)*
                    $($optional: None,)*
                    _library: None,
                }
            }
        }

        /// The functions again, each status as a result. Where the status itself matters there is the field.
        #[allow(dead_code, clippy::too_many_arguments)]
        impl Driver {
            $($(#[$meta])*
            ///
            /// # Safety
            /// What the driver's manual asks for.
            #[inline]
            pub unsafe fn $name(&self, $($argument: $type),*) -> Result<()> {
                // SAFETY: as the caller promises.
                self.check(stringify!($name), unsafe { (self.$name)($($argument),*) })
            })*

            $($(#[$about])*
            ///
            /// # Safety
            /// What the driver's manual asks for.
            pub unsafe fn $optional(&self, $($given: $of),*) -> Result<()> {
                let function = self.$optional.ok_or_else(|| lacking(stringify!($optional)))?;
                // SAFETY: as the caller promises.
                self.check(stringify!($optional), unsafe { function($($given),*) })
            })*
        }

        impl Driver {
            fn load() -> Result<Self> {
                // SAFETY: libcuda's constructors are the vendor's, made to be loaded so.
                let library = unsafe { Library::new(LIBRARY) }.map_err(|error| missing(&error))?;
                Ok(Self {
                    $($name: {
                        // SAFETY: the signature is that of the driver's header.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($type),*) -> Status>(
                            concat!(stringify!($name), "\0").as_bytes(),
                        ) };
                        *symbol.map_err(|error| too_old(&error))?
                    },)*
                    $($optional: {
                        // SAFETY: as above.
                        let symbol = unsafe { library.get(concat!(stringify!($optional), "\0").as_bytes()) };
                        symbol.ok().map(|symbol| *symbol)
                    },)*
                    _library: Some(library),
                })
            }
        }
    };
}

driver! {
    /// Must come first.
    fn cuInit(flags: c_uint);
    /// 1000 × major + 10 × minor.
    fn cuDriverGetVersion(version: *mut c_int);
    /// The code's name.
    fn cuGetErrorName(status: Status, name: *mut *const c_char);
    /// The code in words.
    fn cuGetErrorString(status: Status, text: *mut *const c_char);
    /// How many devices there are.
    fn cuDeviceGetCount(count: *mut c_int);
    /// The device with a number.
    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    /// The product's name.
    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: CUdevice);
    /// Bytes of memory.
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
    /// One property.
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
    /// `domain:bus:device.function`.
    fn cuDeviceGetPCIBusId(address: *mut c_char, length: c_int, device: CUdevice);
    /// The number by which other APIs know the device.
    fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
    /// The device's own memory pool.
    fn cuDeviceGetDefaultMemPool(pool: *mut CUmemoryPool, device: CUdevice);
    /// Takes the device's primary context.
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    /// Gives it back.
    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    /// Makes a context the calling thread's.
    fn cuCtxSetCurrent(context: CUcontext);
    /// The calling thread's context.
    fn cuCtxGetCurrent(context: *mut CUcontext);
    /// Makes a context the calling thread's, until it is popped.
    fn cuCtxPushCurrent_v2(context: CUcontext);
    /// Makes the context before it the calling thread's again.
    fn cuCtxPopCurrent_v2(context: *mut CUcontext);
    /// The device of the calling thread's context.
    fn cuCtxGetDevice(device: *mut CUdevice);
    /// A new stream.
    fn cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    /// Ends a stream.
    fn cuStreamDestroy_v2(stream: CUstream);
    /// Waits for all of a stream.
    fn cuStreamSynchronize(stream: CUstream);
    /// Lets a stream wait for an event.
    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    /// Whether a stream is recorded into a graph.
    fn cuStreamIsCapturing(stream: CUstream, status: *mut c_uint);
    /// Sets what the calling thread may do while streams are captured, and gives what it was.
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint);
    /// Begins a capture.
    fn cuStreamBeginCapture_v2(stream: CUstream, mode: c_uint);
    /// Ends a capture.
    fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
    /// A new event.
    fn cuEventCreate(event: *mut CUevent, flags: c_uint);
    /// Ends an event.
    fn cuEventDestroy_v2(event: CUevent);
    /// Puts an event into a stream.
    fn cuEventRecord(event: CUevent, stream: CUstream);
    /// Whether an event has been reached.
    fn cuEventQuery(event: CUevent);
    /// Milliseconds between two events.
    fn cuEventElapsedTime(milliseconds: *mut f32, from: CUevent, to: CUevent);
    /// A new memory pool.
    fn cuMemPoolCreate(pool: *mut CUmemoryPool, properties: *const CUmemPoolProps);
    /// Ends a pool.
    fn cuMemPoolDestroy(pool: CUmemoryPool);
    /// Sets a pool's property.
    fn cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: CUmemPool_attribute, value: *mut c_void);
    /// Reads a pool's property.
    fn cuMemPoolGetAttribute(pool: CUmemoryPool, attribute: CUmemPool_attribute, value: *mut c_void);
    /// Gives a pool's free memory back.
    fn cuMemPoolTrimTo(pool: CUmemoryPool, keep: usize);
    /// Allocates from a pool, in stream order.
    fn cuMemAllocFromPoolAsync(address: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream);
    /// Allocates from the device's pool, in stream order.
    fn cuMemAllocAsync(address: *mut CUdeviceptr, bytes: usize, stream: CUstream);
    /// Frees in stream order.
    fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream);
    /// Allocates.
    fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
    /// Frees.
    fn cuMemFree_v2(address: CUdeviceptr);
    /// Allocates unified memory.
    fn cuMemAllocManaged(address: *mut CUdeviceptr, bytes: usize, flags: c_uint);
    /// Says how unified memory will be used.
    fn cuMemAdvise(address: CUdeviceptr, bytes: usize, advice: c_uint, device: CUdevice);
    /// Allocates pinned memory.
    fn cuMemHostAlloc(host: *mut *mut c_void, bytes: usize, flags: c_uint);
    /// Frees pinned memory.
    fn cuMemFreeHost(host: *mut c_void);
    /// Registers host memory.
    fn cuMemHostRegister_v2(host: *mut c_void, bytes: usize, flags: c_uint);
    /// Gives registered memory back.
    fn cuMemHostUnregister(host: *mut c_void);
    /// The device's address of pinned or registered memory.
    fn cuMemHostGetDevicePointer_v2(address: *mut CUdeviceptr, host: *mut c_void, flags: c_uint);
    /// What memory an address is in.
    fn cuPointerGetAttributes(
        count: c_uint, attributes: *mut CUpointer_attribute, values: *mut *mut c_void, address: CUdeviceptr
    );
    /// Copies, in stream order.
    fn cuMemcpyAsync(target: CUdeviceptr, source: CUdeviceptr, bytes: usize, stream: CUstream);
    /// Sets bytes, in stream order.
    fn cuMemsetD8Async(target: CUdeviceptr, value: u8, bytes: usize, stream: CUstream);
    /// Free and total bytes of the device.
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    /// Takes memory of another API.
    fn cuImportExternalMemory(memory: *mut CUexternalMemory, description: *const CUDA_EXTERNAL_MEMORY_HANDLE_DESC);
    /// Maps a part of such memory, until it is freed.
    fn cuExternalMemoryGetMappedBuffer(
        address: *mut CUdeviceptr, memory: CUexternalMemory, part: *const CUDA_EXTERNAL_MEMORY_BUFFER_DESC
    );
    /// Maps an image that such memory is, until the array is destroyed.
    fn cuExternalMemoryGetMappedMipmappedArray(
        array: *mut CUmipmappedArray, memory: CUexternalMemory,
        image: *const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC
    );
    /// A level of it, which is there as long as it is.
    fn cuMipmappedArrayGetLevel(level: *mut CUarray, array: CUmipmappedArray, number: c_uint);
    /// Unmaps it.
    fn cuMipmappedArrayDestroy(array: CUmipmappedArray);
    /// By which kernels reach an array.
    fn cuSurfObjectCreate(surface: *mut CUsurfObject, resource: *const CUDA_RESOURCE_DESC);
    /// Lets go of that.
    fn cuSurfObjectDestroy(surface: CUsurfObject);
    /// Lets go of it.
    fn cuDestroyExternalMemory(memory: CUexternalMemory);
    /// Takes a semaphore of another API.
    fn cuImportExternalSemaphore(
        semaphore: *mut CUexternalSemaphore, description: *const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC
    );
    /// Lets a stream wait for semaphores.
    fn cuWaitExternalSemaphoresAsync(
        semaphores: *const CUexternalSemaphore, how: *const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS, count: c_uint,
        stream: CUstream
    );
    /// Lets a stream signal semaphores.
    fn cuSignalExternalSemaphoresAsync(
        semaphores: *const CUexternalSemaphore, how: *const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS, count: c_uint,
        stream: CUstream
    );
    /// Lets go of it.
    fn cuDestroyExternalSemaphore(semaphore: CUexternalSemaphore);
    /// Loads PTX or a cubin.
    fn cuModuleLoadDataEx(
        module: *mut CUmodule, image: *const c_void, count: c_uint, options: *mut CUjit_option,
        values: *mut *mut c_void
    );
    /// Unloads a module.
    fn cuModuleUnload(module: CUmodule);
    /// Begins to link.
    fn cuLinkCreate_v2(
        count: c_uint, options: *mut CUjit_option, values: *mut *mut c_void, state: *mut CUlinkState
    );
    /// Adds code to what is linked.
    fn cuLinkAddData_v2(
        state: CUlinkState, kind: CUjitInputType, data: *mut c_void, bytes: usize, name: *const c_char,
        count: c_uint, options: *mut CUjit_option, values: *mut *mut c_void
    );
    /// Links; the cubin is the state's.
    fn cuLinkComplete(state: CUlinkState, cubin: *mut *mut c_void, bytes: *mut usize);
    /// Ends a state.
    fn cuLinkDestroy(state: CUlinkState);
    /// A kernel of a module.
    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    /// A variable of a module: its address and its bytes.
    fn cuModuleGetGlobal_v2(address: *mut CUdeviceptr, bytes: *mut usize, module: CUmodule, name: *const c_char);
    /// One property of a kernel.
    fn cuFuncGetAttribute(value: *mut c_int, attribute: CUfunction_attribute, function: CUfunction);
    /// Sets a property of a kernel.
    fn cuFuncSetAttribute(function: CUfunction, attribute: CUfunction_attribute, value: c_int);
    /// Launches a kernel.
    fn cuLaunchKernel(
        function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared_bytes: c_uint, stream: CUstream, parameters: *mut *mut c_void,
        extra: *mut *mut c_void
    );
    /// Describes memory and boxes of it to the Tensor Memory Accelerator.
    fn cuTensorMapEncodeTiled(
        map: *mut CUtensorMap, element: CUtensorMapDataType, rank: c_uint, address: *mut c_void,
        extents: *const c_ulonglong, strides: *const c_ulonglong, shape: *const c_uint, steps: *const c_uint,
        interleave: CUtensorMapInterleave, swizzle: CUtensorMapSwizzle, promotion: CUtensorMapL2promotion,
        fill: CUtensorMapFloatOOBfill
    );
    /// A new graph.
    fn cuGraphCreate(graph: *mut CUgraph, flags: c_uint);
    /// Adds a launch to a graph.
    fn cuGraphAddKernelNode_v2(
        node: *mut CUgraphNode, graph: CUgraph, before: *const CUgraphNode, count: usize,
        parameters: *const CUDA_KERNEL_NODE_PARAMS_v2
    );
    /// Adds an event to a graph.
    fn cuGraphAddEventRecordNode(
        node: *mut CUgraphNode, graph: CUgraph, before: *const CUgraphNode, count: usize, event: CUevent
    );
    /// Changes a launch of a graph that can be launched.
    fn cuGraphExecKernelNodeSetParams_v2(
        executable: CUgraphExec, node: CUgraphNode, parameters: *const CUDA_KERNEL_NODE_PARAMS_v2
    );
    /// Makes a graph one that can be launched.
    fn cuGraphInstantiateWithFlags(executable: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong);
    /// Launches a graph.
    fn cuGraphLaunch(executable: CUgraphExec, stream: CUstream);
    /// Ends an executable graph.
    fn cuGraphExecDestroy(executable: CUgraphExec);
    /// Ends a graph.
    fn cuGraphDestroy(graph: CUgraph);

    optional:
    /// Where a parameter of a kernel lies, from CUDA 12.4 on.
    fn cuFuncGetParamInfo(function: CUfunction, number: usize, offset: *mut usize, bytes: *mut usize);
    /// Loads a kernel before its first launch, from CUDA 12.4 on.
    fn cuFuncLoad(function: CUfunction);
    /// A context's number, from CUDA 12.0 on.
    fn cuCtxGetId(context: CUcontext, id: *mut c_ulonglong);
    /// The number by which Windows knows the device, and its node there.
    fn cuDeviceGetLuid(luid: *mut c_char, node: *mut c_uint, device: CUdevice);
    /// The device that an `IDXGIAdapter` is, on Windows.
    fn cuD3D11GetDevice(device: *mut CUdevice, adapter: *mut c_void);
    /// Takes an `ID3D11Resource`, on Windows.
    fn cuGraphicsD3D11RegisterResource(
        resource: *mut CUgraphicsResource, object: *mut c_void, flags: c_uint
    );
    /// Lets go of a resource of graphics.
    fn cuGraphicsUnregisterResource(resource: CUgraphicsResource);
    /// Hands resources from graphics to a stream.
    fn cuGraphicsMapResources(count: c_uint, resources: *mut CUgraphicsResource, stream: CUstream);
    /// Hands them back.
    fn cuGraphicsUnmapResources(count: c_uint, resources: *mut CUgraphicsResource, stream: CUstream);
    /// The device's address of a mapped buffer, until it is unmapped.
    fn cuGraphicsResourceGetMappedPointer_v2(
        address: *mut CUdeviceptr, bytes: *mut usize, resource: CUgraphicsResource
    );
    /// A level of a layer of a mapped image, until it is unmapped.
    fn cuGraphicsSubResourceGetMappedArray(
        array: *mut CUarray, resource: CUgraphicsResource, layer: c_uint, level: c_uint
    );
    /// All of a mapped image, until it is unmapped.
    fn cuGraphicsResourceGetMappedMipmappedArray(array: *mut CUmipmappedArray, resource: CUgraphicsResource);
}

fn lacking(function: &str) -> Error {
    Error::Unavailable {
        library: LIBRARY.into(),
        cause: format!("it has no {function}"),
        remedy: "Direct3D is Windows' alone; there, install a newer NVIDIA driver".into(),
    }
}

fn missing(error: &libloading::Error) -> Error {
    Error::Unavailable {
        library: LIBRARY.into(),
        cause: one_line(error),
        remedy:
            "install the NVIDIA driver's CUDA library (Debian: libcuda1, Ubuntu: libnvidia-compute-VERSION, \
                 Fedora: xorg-x11-drv-nvidia-cuda-libs); the CUDA toolkit is not needed"
                .into(),
    }
}

fn too_old(error: &libloading::Error) -> Error {
    Error::Unavailable {
        library: LIBRARY.into(),
        cause: one_line(error),
        remedy: "install an NVIDIA driver of version 525 (CUDA 12.0) or newer".into(),
    }
}

pub(crate) fn one_line(error: &libloading::Error) -> String {
    use std::error::Error;
    let cause = error.source().map_or_else(|| error.to_string(), ToString::to_string);
    cause.lines().next().unwrap_or("no reason given").to_owned()
}

/// The driver, loaded and initialised once for the process.
///
/// # Errors
/// [`Error::Unavailable`] where there is none, or none that works, with what to install.
pub fn driver() -> Result<&'static Driver> {
    static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
    let loaded = DRIVER.get_or_init(|| {
        let driver = Driver::load()?;
        // SAFETY: it may be called at any time.
        match unsafe { (driver.cuInit)(0) } {
            0 => Ok(driver),
            status => Err(Error::Unavailable {
                library: LIBRARY.into(),
                cause: driver.error("cuInit", status).to_string(),
                remedy: match status {
                    100 => "no CUDA device is visible: check `nvidia-smi -L`, CUDA_VISIBLE_DEVICES, and that the GPU \
                            is bound to the driver nvidia",
                    802 => "the machine's NVLink switches are not set up: start nvidia-fabricmanager",
                    803 => "library and kernel module differ in version: reboot or reload the module nvidia",
                    _ => "check that the kernel module nvidia is loaded and /dev/nvidia* can be opened: `nvidia-smi`",
                }
                .into(),
            }),
        }
    });
    loaded.as_ref().map_err(Clone::clone)
}
