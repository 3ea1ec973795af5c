//! A context of a GPU.

use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::Arc;

use vm_accel::{Accelerator as _, Arguments, Artifact, DeviceInfo, Grid, Result};
use vm_cuda::sys::{BorrowedContext, BorrowedStream};
use vm_cuda::{CudaAccelerator, CudaKernel, CudaLauncher, Place};
use vm_ir::Kernel;
use vm_kernels::family::{Kind, Resources};
use vm_runtime::{CompileError, CompiledKernel, JitCompiler};

use super::device::Device;

/// A context of a GPU, which is the caller's.
pub(crate) struct Gpu {
    accelerator: Arc<CudaAccelerator>,
    compiler: JitCompiler<CudaAccelerator>,
    launcher: CudaLauncher,
    /// The context's number.
    id: u64,
}

/// A thread's current context, for the kernels that are loaded there.
pub(crate) fn lend(place: Place) -> BorrowedContext {
    // SAFETY: it is a context of the driver. It is used only by threads whose current one it is, by its number: not any more when
    // its owner has destroyed it, and nothing is released then.
    unsafe { BorrowedContext::new(place.context) }
}

impl Gpu {
    pub(crate) fn new(accelerator: Arc<CudaAccelerator>, launcher: CudaLauncher, id: u64) -> Self {
        // The driver assembles: no library should start processes.
        let compiler = JitCompiler::new(Arc::clone(&accelerator)).assembler(None);
        // SAFETY: the kernels are those of vm-kernels, whose tests run all of them as the host's own.
        let compiler = unsafe { compiler.trusted() };
        Self { accelerator, compiler, launcher, id }
    }
}

/// A range that the driver was asked about: the context's number, the address and the bytes behind it.
type Seen = (u64, u64, u64);

thread_local! {
    /// The ranges that this thread asked about last. To ask takes about as long as a launch.
    static SEEN: RefCell<[Seen; 64]> = const { RefCell::new([(0, 0, 0); 64]) };
}

/// Where a range is remembered.
fn slot(address: u64) -> usize {
    (address.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize
}

impl Device for Gpu {
    type Kernel = CudaKernel;

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
        self.launcher.load(artifact)
    }

    fn check_memory(&self, address: u64, bytes: u64) -> std::result::Result<(), String> {
        let at = slot(address);
        let known = |seen: &RefCell<[Seen; 64]>| {
            seen.try_borrow().is_ok_and(|seen| {
                let (id, first, room) = seen[at];
                (id, first) == (self.id, address) && bytes <= room
            })
        };
        if SEEN.try_with(known).unwrap_or(false) {
            return Ok(());
        }
        let found = self.launcher.allocation(address).map_err(|error| format!("is {address:#x}: {error}"))?;
        let Some(found) = found else {
            return Err(format!(
                "is {address:#x}, which is no memory that the GPU reaches: give memory of cuMemAlloc, cudaMalloc or a tensor \
                 on the GPU, or choose the CPU by vmk_use(VMK_CPU)"
            ));
        };
        // Of memory that is made of several mappings drivers may tell nothing.
        let room = if found.bytes == 0 {
            u64::MAX
        } else {
            found.bytes.saturating_sub(address.saturating_sub(found.address))
        };
        if bytes > room {
            return Err(format!(
                "is {address:#x}: it needs {bytes} bytes, and the allocation has {room} from there on"
            ));
        }
        let _ =
            SEEN.try_with(|seen| seen.try_borrow_mut().map(|mut seen| seen[at] = (self.id, address, room)));
        Ok(())
    }

    fn check_stream(&self, _stream: *mut c_void) -> std::result::Result<(), String> {
        Ok(())
    }

    unsafe fn launch(
        &self,
        kernel: &CudaKernel,
        grid: Grid,
        arguments: &Arguments,
        stream: *mut c_void,
    ) -> Result<()> {
        // SAFETY: the caller promises that it is a stream of this context; it is used by this call alone.
        let stream = unsafe { BorrowedStream::new(stream.cast()) };
        // SAFETY: as the caller promises.
        unsafe { self.launcher.launch(kernel, grid, arguments, &stream) }
    }
}
