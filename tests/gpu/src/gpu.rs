//! The device that the tests run on.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use vm_accel::{Accelerator, Worker, WorkerOptions};
use vm_cuda::CudaAccelerator;
use vm_ir::{Trust, ValidModule};
use vm_jit::Target;
use vm_jit::backend::ptx::{Arch, Options};
use vm_passthrough::accelerator::{CompileError, CompiledKernel, CudaJITCompiler, JitTarget};

/// How long anything that should be short may take.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

/// The device under test.
pub(crate) struct Gpu {
    pub(crate) accelerator: Arc<CudaAccelerator>,
    /// What is compiled for, if not for the device.
    target: Option<Target>,
}

impl Gpu {
    /// The device with a number in CUDA's order.
    pub(crate) fn open(device: u32) -> vm_accel::Result<Self> {
        Ok(Self { accelerator: Arc::new(CudaAccelerator::new(device)?), target: None })
    }

    /// The same device, for which code of another architecture is compiled that it runs by way of PTX.
    pub(crate) fn compiling_for(&self, arch: Arch) -> anyhow::Result<Self> {
        let target = match self.accelerator.target()? {
            Target::Ptx(options) if options.arch == arch => None,
            Target::Ptx(options) if options.arch.sm() >= arch.sm() => {
                Some(Target::Ptx(Options { arch, ..options }))
            }
            other => return crate::skip::skip(format!("{other} does not run code for {arch}")),
        };
        Ok(Self { accelerator: Arc::clone(&self.accelerator), target })
    }

    /// Is code compiled for another architecture than the device's?
    pub(crate) fn compiles_for_older(&self) -> bool {
        self.target.is_some()
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
        let compiler = match &self.target {
            Some(target) => compiler.target(target.clone()),
            None => compiler,
        };
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
        self.target.clone().map_or_else(|| self.accelerator.target(), Ok)
    }
}

/// The kernel of a name.
pub(crate) fn named<'a>(kernels: &'a [CompiledKernel], name: &str) -> anyhow::Result<&'a CompiledKernel> {
    kernels.iter().find(|kernel| kernel.name() == name).with_context(|| format!("@{name} was not compiled"))
}
