//! What a device is to the engine.

use std::cell::RefCell;
use std::ffi::c_void;
use std::thread::LocalKey;

use vm_accel::{Arguments, Artifact, DeviceInfo, Grid, Result};
use vm_ir::Kernel;
use vm_kernels::family::Resources;
use vm_runtime::{CompileError, CompiledKernel};

use crate::engine::Recent;

/// A device.
pub(crate) trait Device: Send + Sync + 'static {
    /// A loaded kernel.
    type Kernel: Send + Sync;

    /// Where a thread remembers its last calls, for a device where a call is short.
    fn recent() -> Option<&'static LocalKey<RefCell<Recent<Self::Kernel>>>> {
        None
    }

    /// Identity and limits.
    fn info(&self) -> &DeviceInfo;

    /// What the choice of variants depends on.
    fn resources(&self) -> Resources;

    /// Compiles a kernel, as the host's own: without checks, and without what could stop it.
    ///
    /// # Errors
    /// The compiler's.
    fn compile(&self, kernel: Kernel) -> std::result::Result<CompiledKernel, CompileError>;

    /// Loads a kernel.
    ///
    /// # Errors
    /// The device's.
    fn load(&self, artifact: &Artifact) -> Result<Self::Kernel>;

    /// That so many bytes at an address are memory that the device reaches, as far as that can be told.
    ///
    /// # Errors
    /// What it is, and what is needed; the device's.
    fn check_memory(&self, address: u64, bytes: u64) -> Result<std::result::Result<(), String>>;

    /// That a stream is one that launches may be given to, as far as that can be told.
    ///
    /// # Errors
    /// What it is, and what is needed.
    fn check_stream(&self, stream: *mut c_void) -> std::result::Result<(), String>;

    /// Launches a kernel that can't be stopped.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Safety
    /// Until the kernel has ended, the memory that its arguments name is there. The stream is one of the device's context.
    unsafe fn launch(
        &self,
        kernel: &Self::Kernel,
        grid: Grid,
        arguments: &Arguments,
        stream: *mut c_void,
    ) -> Result<()>;
}
