//! A context of a GPU.

use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::Arc;
use std::thread::LocalKey;

use vm_accel::{Accelerator as _, Arguments, Artifact, DeviceInfo, Grid, Result, Tensor};
use vm_cuda::sys::{BorrowedContext, BorrowedStream};
use vm_cuda::{CudaAccelerator, CudaKernel, CudaLauncher, Entered, Place};
use vm_ir::Kernel;
use vm_kernels::family::{Kind, Resources};
use vm_runtime::{CompileError, CompiledKernel, JitCompiler};

use super::device::Device;
use super::gate::{close_at_exit, load_compiler};
use crate::engine::Recent;

/// A context of a GPU, which is the caller's.
pub(crate) struct Gpu {
    accelerator: Arc<CudaAccelerator>,
    compiler: JitCompiler<CudaAccelerator>,
    launcher: CudaLauncher,
}

/// A thread's current context, for the kernels that are loaded there.
pub(crate) fn lend(place: Place) -> BorrowedContext {
    // SAFETY: it is a context of the driver. It is used only by threads whose current one it is, by its number: not any more when
    // its owner has destroyed it, and nothing is released then.
    unsafe { BorrowedContext::new(place.context) }
}

impl Gpu {
    pub(crate) fn new(accelerator: Arc<CudaAccelerator>, launcher: CudaLauncher) -> Self {
        // The driver assembles: no library should start processes.
        let compiler = JitCompiler::new(Arc::clone(&accelerator)).assembler(None);
        // SAFETY: the kernels are those of vm-kernels, whose tests run all of them as the host's own.
        let compiler = unsafe { compiler.trusted() };
        Self { accelerator, compiler, launcher }
    }

    /// Lets a thread call in the context, whose own one was `before`.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn enter(&self, before: Option<Place>) -> Result<Entered<'static>> {
        self.launcher.enter(before)
    }
}

thread_local! {
    static RECENT: RefCell<Recent<CudaKernel>> = const { RefCell::new(Recent::NEW) };
}

impl Device for Gpu {
    type Kernel = CudaKernel;
    type Entered = Entered<'static>;

    fn recent() -> &'static LocalKey<RefCell<Recent<CudaKernel>>> {
        &RECENT
    }

    fn info(&self) -> &DeviceInfo {
        self.accelerator.info()
    }

    fn resources(&self) -> Resources {
        let DeviceInfo { compute_units, shared_bytes, .. } = *self.info();
        // From Hopper on.
        let clusters = !matches!(self.info().target.as_bytes(), [b's', b'm', b'_', b'0'..=b'8', _]);
        let cluster = if clusters { 8 } else { 1 };
        Resources { compute_units: compute_units.max(1), shared_bytes, kind: Kind::Gpu, cluster }
    }

    fn compile(&self, kernel: Kernel) -> std::result::Result<CompiledKernel, CompileError> {
        self.compiler.compile_kernel(kernel)
    }

    fn load(&self, artifact: &Artifact) -> Result<CudaKernel> {
        load_compiler();
        let loaded = self.launcher.load(artifact);
        close_at_exit();
        loaded
    }

    fn check_memory(
        &self,
        entered: &Self::Entered,
        address: u64,
        bytes: u64,
    ) -> Result<std::result::Result<(), String>> {
        let Some(found) = self.launcher.allocation(entered, address)? else {
            return Ok(Err(format!(
                "is {address:#x}, which is no memory that the GPU reaches: give memory of cuMemAlloc, cudaMalloc or a tensor \
                 on the GPU, or choose the CPU by vmk_use(VMK_CPU)"
            )));
        };
        if found.foreign {
            return Ok(Err(format!(
                "is {address:#x}, memory of another context than the calling thread's current one: make that current by cuCtxSetCurrent, \
                 or allocate in this one"
            )));
        }
        // Of memory that is made of several mappings drivers may tell nothing.
        let behind = address.saturating_sub(found.address);
        let room = if found.bytes == 0 { u64::MAX } else { found.bytes.saturating_sub(behind) };
        if bytes > room {
            return Ok(Err(format!(
                "is {address:#x}: it needs {bytes} bytes, and the allocation has {room} from there on"
            )));
        }
        Ok(Ok(()))
    }

    fn check_stream(&self, _stream: *mut c_void) -> std::result::Result<(), String> {
        Ok(())
    }

    fn map(&self, entered: &Self::Entered, kernel: &CudaKernel, tensor: &Tensor) -> Result<[u64; 16]> {
        self.launcher.map(entered, kernel, tensor)
    }

    unsafe fn launch(
        &self,
        entered: &Self::Entered,
        kernel: &CudaKernel,
        grid: Grid,
        arguments: &Arguments,
        stream: *mut c_void,
    ) -> Result<()> {
        // SAFETY: the caller promises that it is a stream of this context; it is used by this call alone.
        let stream = unsafe { BorrowedStream::new(stream.cast()) };
        // SAFETY: as the caller promises.
        unsafe { self.launcher.launch(entered, kernel, grid, arguments, &stream) }
    }
}
