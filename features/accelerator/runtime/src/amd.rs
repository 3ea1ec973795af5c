//! AMD GPUs.

use std::sync::Arc;

use vm_accel::Accelerator as _;
use vm_jit::Target;
use vm_jit::backend::amdgcn::{Chip, Options};
use vm_rocm::assemble::Assembler;

pub use vm_rocm::{self as rocm, RocmAccelerator};

use super::{Assemble, AssembleError, CompileError, JitCompiler, JitTarget};

/// Compiles kernels for one AMD GPU.
///
/// LLVM IR becomes a code object in processes with limits, and the cache keeps the code object. Where this machine has no LLVM,
/// nothing can be compiled; the error says what to install.
pub type RocmJITCompiler = JitCompiler<RocmAccelerator>;

impl JitTarget for RocmAccelerator {
    fn target(&self) -> Result<Target, CompileError> {
        let info = self.info();
        let chip: Chip = info.target.parse().map_err(|error| CompileError::Device {
            device: info.name.clone(),
            reason: format!("{error}"),
        })?;
        Ok(Target::Amdgcn(Options { chip }))
    }

    fn assembler(&self) -> Option<Arc<dyn Assemble>> {
        // No device takes the text.
        Some(match Assembler::find() {
            Ok(assembler) => Arc::new(RocmAssembler(assembler)),
            Err(error) => Arc::new(Absent(error.to_string())),
        })
    }
}

/// That there is no assembler, with what to do.
#[derive(Debug)]
struct Absent(String);

impl Assemble for Absent {
    fn product(&self) -> String {
        "code object".into()
    }

    fn identity(&self) -> String {
        "nobody".into()
    }

    fn assemble(&self, _: &[u8], _: &Target) -> Result<Vec<u8>, AssembleError> {
        Err(self.0.clone().into())
    }
}

/// LLVM IR to code objects, in processes with limits: `vm_rocm::assemble` has what makes them.
#[derive(Clone, Debug)]
pub struct RocmAssembler(pub Assembler);

impl Assemble for RocmAssembler {
    fn product(&self) -> String {
        "code object".into()
    }

    fn identity(&self) -> String {
        self.0.identity()
    }

    fn assemble(&self, code: &[u8], target: &Target) -> Result<Vec<u8>, AssembleError> {
        match target {
            Target::Amdgcn(options) => Ok(self.0.assemble(code, options.chip.name())?),
            other => Err(format!("{other} is not an AMD GPU").into()),
        }
    }
}
