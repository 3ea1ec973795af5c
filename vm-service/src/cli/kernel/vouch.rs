//! Where the operator's word is taken for a kernel.
#![allow(unsafe_code)]

use vm_passthrough::accelerator::{JitCompiler, JitTarget};

/// The compiler for the kernels of `egpu benchmark`.
#[cfg(any(feature = "cuda", feature = "rocm", all(test, feature = "cpu")))]
pub(crate) fn own<A: JitTarget>(compiler: JitCompiler<A>) -> JitCompiler<A> {
    // SAFETY: it is given two kernels. Each compares its one index with the extents of its views before it takes it, and
    // its one loop ends after as many rounds as it is told.
    unsafe { compiler.trusted() }
}

/// The compiler for the host's own kernels.
pub(super) fn trusted<A: JitTarget>(compiler: JitCompiler<A>) -> JitCompiler<A> {
    // SAFETY: it is given one kernel, of a file for which the operator said `--trusted`: that it is the host's own, and
    // stays within its views.
    unsafe { compiler.trusted() }
}
