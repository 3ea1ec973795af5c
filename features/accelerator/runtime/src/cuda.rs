//! NVIDIA GPUs.

use std::sync::Arc;

use vm_accel::Accelerator as _;
use vm_cuda::assemble::Assembler;
use vm_jit::Target;
use vm_jit::backend::ptx::{Arch, Options, Version};

pub use vm_cuda::nvml::{self, Usage as CudaUsage, usage as cuda_usage};
pub use vm_cuda::{CudaAccelerator, assemble, devices as cuda_devices};

use super::{Assemble, AssembleError, CompileError, JitCompiler, JitTarget};

/// Compiles kernels for one NVIDIA GPU.
///
/// Where this machine has a `ptxas`, PTX becomes a cubin in a process of its own, and the cache keeps the cubin. From the
/// first kernel on, [two such processes](Assembler::standby) wait ready for the next; [`prepare`](JitCompiler::prepare)
/// starts them before. Where it has none, the driver compiles the PTX when the kernel is loaded, in this process. A service that compiles for
/// guests names its [`CudaAssembler`] with [`assembler`](JitCompiler::assembler), so that it is never in its own.
pub type CudaJITCompiler = JitCompiler<CudaAccelerator>;

impl JitTarget for CudaAccelerator {
    fn target(&self) -> Result<Target, CompileError> {
        let info = self.info();
        let arch = capability(&info.target).and_then(|(major, minor)| Arch::of_device(major, minor));
        let arch = arch.ok_or_else(|| CompileError::Device {
            device: info.name.clone(),
            reason: format!("it is of {}, and the oldest architecture with a target is sm_70", info.target),
        })?;
        let max_version = driver_version(&info.driver).map(Version::of_driver);
        Ok(Target::Ptx(Options { max_version, ..Options::new(arch) }))
    }

    fn assembler(&self) -> Option<Arc<dyn Assemble>> {
        match Assembler::find() {
            // Two keep up with a thread that compiles one kernel after the other.
            Ok(assembler) => Some(Arc::new(CudaAssembler(assembler.standby(2)))),
            Err(error) => {
                tracing::debug!(%error, "the driver compiles PTX instead");
                None
            }
        }
    }
}

/// 9 and 0 of `sm_90`.
fn capability(target: &str) -> Option<(u32, u32)> {
    let number: u32 = target.strip_prefix("sm_")?.parse().ok()?;
    Some((number / 10, number % 10))
}

/// 13000 of `CUDA 13.0`, as the driver counts.
fn driver_version(text: &str) -> Option<u32> {
    let (major, minor) = text.strip_prefix("CUDA ")?.split_once('.')?;
    let (major, minor): (u32, u32) = (major.parse().ok()?, minor.parse().ok()?);
    major.checked_mul(1000)?.checked_add(minor.checked_mul(10)?)
}

/// PTX to cubins, in processes with limits: [`assemble`] has what makes the process.
#[derive(Clone, Debug)]
pub struct CudaAssembler(pub Assembler);

impl Assemble for CudaAssembler {
    fn product(&self) -> String {
        "cubin".into()
    }

    fn identity(&self) -> String {
        self.0.identity()
    }

    fn prepare(&self, target: &Target) {
        if let Target::Ptx(options) = target
            && let Err(error) = self.0.prepare(options.arch.name())
        {
            tracing::debug!(%error, "no assembler waits ready");
        }
    }

    fn assemble(&self, code: &[u8], target: &Target) -> Result<Vec<u8>, AssembleError> {
        match target {
            Target::Ptx(options) => Ok(self.0.assemble(code, options.arch.name())?),
            other => Err(format!("{other} is not PTX").into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_driver_calls_things() {
        assert_eq!(capability("sm_90"), Some((9, 0)));
        assert_eq!(capability("sm_120"), Some((12, 0)));
        assert_eq!(capability("gfx942"), None);
        assert_eq!(driver_version("CUDA 13.0"), Some(13000));
        assert_eq!(driver_version("CUDA 12.8"), Some(12080));
        assert_eq!(driver_version("12"), None);
        assert_eq!(driver_version("CUDA 4294967295.0"), None);
    }
}
