//! The device that the tests run on.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use vm_accel::{Accelerator, Worker, WorkerOptions};
use vm_cuda::CudaAccelerator;
use vm_ir::{Trust, ValidModule};
use vm_jit::Target;
use vm_passthrough::accelerator::{CompileError, CompiledKernel, CudaJITCompiler, JitTarget};

/// How long anything that should be short may take.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

/// The device under test.
pub(crate) struct Gpu {
    pub(crate) accelerator: Arc<CudaAccelerator>,
}

impl Gpu {
    /// The device with a number in CUDA's order.
    pub(crate) fn open(device: u32) -> vm_accel::Result<Self> {
        Ok(Self { accelerator: Arc::new(CudaAccelerator::new(device)?) })
    }

    /// It in one line.
    pub(crate) fn describe(&self) -> String {
        let info = self.accelerator.info();
        let address = info.address.as_deref().unwrap_or("no address");
        format!("{} ({}) at {address}, {}", info.name, info.target, info.driver)
    }

    /// A worker with the usual options.
    pub(crate) fn worker(&self) -> vm_accel::Result<Worker<CudaAccelerator>> {
        Worker::start(Arc::clone(&self.accelerator), WorkerOptions::default())
    }

    /// A compiler for modules of a trust, with a cache of its own.
    pub(crate) fn compiler(&self, trust: Trust) -> CudaJITCompiler {
        let compiler = CudaJITCompiler::new(Arc::clone(&self.accelerator));
        match trust {
            Trust::Guest => compiler,
            // SAFETY: the kernels of these tests stay within their views with the arguments that they are given here.
            Trust::Trusted => unsafe { compiler.trusted() },
        }
    }

    /// The kernels of a module, compiled in the usual way.
    pub(crate) fn compile(&self, module: &ValidModule) -> Result<Vec<CompiledKernel>, CompileError> {
        self.compiler(module.trust()).compile_module(module)
    }

    /// What to compile for.
    pub(crate) fn target(&self) -> Result<Target, CompileError> {
        self.accelerator.target()
    }
}

/// The kernel of a name.
pub(crate) fn named<'a>(kernels: &'a [CompiledKernel], name: &str) -> anyhow::Result<&'a CompiledKernel> {
    kernels.iter().find(|kernel| kernel.name() == name).with_context(|| format!("@{name} was not compiled"))
}
