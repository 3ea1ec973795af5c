//! The CPU.

use std::cell::RefCell;
use std::ffi::c_void;
use std::num::NonZero;
use std::sync::Arc;
use std::thread::LocalKey;

use vm_accel::{Accelerator as _, Arguments, Artifact, DeviceInfo, Error, Grid, Result, Tensor};
use vm_cpu::{CpuAccelerator, CpuKernel};
use vm_ir::Kernel;
use vm_kernels::family::Resources;
use vm_runtime::{CompileError, CompiledKernel, JitCompiler};

use super::device::Device;
use crate::engine::Recent;

/// The CPU, with threads that run blocks.
pub(crate) struct Cpu {
    accelerator: Arc<CpuAccelerator>,
    compiler: JitCompiler<CpuAccelerator>,
    threads: u32,
}

impl Cpu {
    /// Starts so many threads, or as many as there is room for: without any, blocks run on the thread that calls.
    ///
    /// # Errors
    /// The operating system's.
    pub(crate) fn start(threads: NonZero<usize>) -> Result<Cpu> {
        let mut others = threads.get();
        let accelerator = loop {
            // The accelerator counts a queue's thread, of which there is none here.
            match CpuAccelerator::with_threads(NonZero::<usize>::MIN.saturating_add(others)) {
                Err(_) if others > 0 => others /= 2,
                started => break Arc::new(started?),
            }
        };
        let threads = NonZero::new(others).unwrap_or(NonZero::<usize>::MIN);
        // SAFETY: the kernels are those of vm-kernels, whose tests run all of them as the host's own.
        let compiler = unsafe { JitCompiler::new(Arc::clone(&accelerator)).trusted() };
        Ok(Cpu { accelerator, compiler, threads: u32::try_from(threads.get()).unwrap_or(u32::MAX) })
    }
}

thread_local! {
    static RECENT: RefCell<Recent<Arc<CpuKernel>>> = const { RefCell::new(Recent::NEW) };
}

impl Device for Cpu {
    type Kernel = Arc<CpuKernel>;
    type Entered = ();

    fn recent() -> &'static LocalKey<RefCell<Recent<Arc<CpuKernel>>>> {
        &RECENT
    }

    fn info(&self) -> &DeviceInfo {
        self.accelerator.info()
    }

    fn resources(&self) -> Resources {
        Resources { compute_units: self.threads, ..vm_runtime::resources(self.info()) }
    }

    fn compile(&self, kernel: Kernel) -> std::result::Result<CompiledKernel, CompileError> {
        self.compiler.compile_kernel(kernel)
    }

    fn load(&self, artifact: &Artifact) -> Result<Arc<CpuKernel>> {
        self.accelerator.load(artifact)
    }

    fn check_memory(
        &self,
        _entered: &(),
        _address: u64,
        _bytes: u64,
    ) -> Result<std::result::Result<(), String>> {
        Ok(Ok(()))
    }

    fn check_stream(&self, stream: *mut c_void) -> std::result::Result<(), String> {
        if stream.is_null() {
            return Ok(());
        }
        Err(format!("is {stream:p}: kernels run on the CPU, where there are no streams; give NULL"))
    }

    fn map(&self, _entered: &(), _kernel: &Arc<CpuKernel>, _tensor: &Tensor) -> Result<[u64; 16]> {
        Err(Error::Unsupported { what: "a tensor map".into(), device: self.info().name.clone() })
    }

    unsafe fn launch(
        &self,
        _entered: &(),
        kernel: &Arc<CpuKernel>,
        grid: Grid,
        arguments: &Arguments,
        _stream: *mut c_void,
    ) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.accelerator.run(kernel, grid, arguments) }
    }
}
