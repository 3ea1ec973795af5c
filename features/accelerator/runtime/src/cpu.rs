//! The host's own processor.

use vm_jit::Target;
use vm_jit::backend::cpu::{Isa, Options};

pub use vm_cpu::CpuAccelerator;

use super::{CompileError, JitCompiler, JitTarget};

/// Compiles kernels for this machine's processor.
pub type CpuJITCompiler = JitCompiler<CpuAccelerator>;

impl JitTarget for CpuAccelerator {
    fn target(&self) -> Result<Target, CompileError> {
        use vm_accel::Accelerator as _;
        let isa = Isa::host().map_err(|error| CompileError::Device {
            device: self.info().name.clone(),
            reason: error.to_string(),
        })?;
        Ok(Target::Cpu(Options::new(isa)))
    }
}
