//! AMD GPUs.

use vm_jit::Target;
use vm_rocm::assemble::Assembler;

use super::{Assemble, AssembleError};

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
