//! What a device is to the engine.

use std::cell::RefCell;
use std::ffi::c_void;
use std::thread::LocalKey;

use vm_accel::{Arguments, Artifact, DeviceInfo, Grid, Result, Tensor};
use vm_ir::Kernel;
use vm_kernels::family::Resources;
use vm_runtime::{CompileError, CompiledKernel};

use crate::engine::Recent;

/// A device.
pub(crate) trait Device: Send + Sync + 'static {
    /// A loaded kernel.
    type Kernel: Send + Sync;
    /// The calling thread is where the device's driver is to be called, as long as it is there.
    type Entered;

    /// Where a thread remembers its last calls.
    fn recent() -> &'static LocalKey<RefCell<Recent<Self::Kernel>>>;

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
    fn check_memory(
        &self,
        entered: &Self::Entered,
        address: u64,
        bytes: u64,
    ) -> Result<std::result::Result<(), String>>;

    /// That a stream is one that launches may be given to, as far as that can be told.
    ///
    /// # Errors
    /// What it is, and what is needed.
    fn check_stream(&self, stream: *mut c_void) -> std::result::Result<(), String>;

    /// The tensor map of a view that a kernel copies by one.
    ///
    /// # Errors
    /// The device's, or that it has none.
    fn map(&self, entered: &Self::Entered, kernel: &Self::Kernel, tensor: &Tensor) -> Result<[u64; 16]>;

    /// Launches a kernel that can't be stopped.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Safety
    /// Until the kernel has ended, the memory that its arguments name is there; they have its tensor maps. The stream is one of the
    /// device's context.
    unsafe fn launch(
        &self,
        entered: &Self::Entered,
        kernel: &Self::Kernel,
        grid: Grid,
        arguments: &Arguments,
        stream: *mut c_void,
    ) -> Result<()>;
}
