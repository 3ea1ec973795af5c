//! The accelerator that the host shares with a guest: the host compiles.

use vm_accel::Accelerator as _;
use vm_jit::Target;

pub use vm_guest::GuestAccelerator;

use super::{CompileError, JitCompiler, JitTarget};

/// Encodes kernels for the host, which compiles them.
pub type GuestJITCompiler = JitCompiler<GuestAccelerator>;

impl JitTarget for GuestAccelerator {
    fn target(&self) -> Result<Target, CompileError> {
        Ok(Target::Ir)
    }

    fn host_target(&self) -> Option<Target> {
        // A host's that is not known here rejects by itself.
        self.info().target.parse().ok()
    }
}
