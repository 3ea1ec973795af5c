//! From a kernel in the IR to what an accelerator loads: validate, compile, assemble, and remember all of it.

use std::fmt;
use std::sync::Arc;

use thiserror::Error;
use vm_accel::{Accelerator, Artifact};
use vm_ir::builder::BuildError;
use vm_ir::valid::ValidationErrors;
use vm_ir::{IRBlock, Kernel, Module, Trust, ValidModule, validate};
use vm_jit::cache::{Cache, CacheStatistics, Key};
use vm_jit::{Rejected, Target, legal};

use super::artifact;

/// Why a kernel did not become code for an accelerator.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CompileError {
    /// The builder was asked for something that can't be written.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The kernel breaks rules of the IR; all of them.
    #[error(transparent)]
    Invalid(#[from] ValidationErrors),
    /// The target does not have what the kernel needs; all of it.
    #[error(transparent)]
    Rejected(#[from] Rejected),
    /// vm-jit has no target for the device.
    #[error("{device} can't be compiled for: {reason}")]
    Device {
        /// The device's name.
        device: String,
        /// What it is, and what would do.
        reason: String,
    },
    /// The module was validated as the host's own, and the compiler is for guests'.
    #[error(
        "kernel @{kernel} was validated as the host's own: give it to a compiler made with `trusted`, or validate it as a guest's"
    )]
    Trusted {
        /// The first kernel of the module.
        kernel: String,
    },
    /// The assembler did not take the code.
    #[error("kernel @{kernel} was compiled for {target}, but not assembled: {cause}")]
    Assemble {
        /// The first kernel of the module.
        kernel: String,
        /// The target.
        target: String,
        /// What went wrong. The message says it, so it is no `source`, which printers of errors would say again.
        cause: AssembleError,
    },
    /// The code does not fit the kernel that it should be of.
    #[error(transparent)]
    Artifact(#[from] vm_accel::Error),
}

/// What an assembler says when it fails.
pub type AssembleError = Box<dyn std::error::Error + Send + Sync>;

/// Makes what a device loads of the code that vm-jit wrote, as `ptxas` does of PTX.
pub trait Assemble: fmt::Debug + Send + Sync {
    /// What the result is, as [`CompiledKernel::format`] says.
    fn product(&self) -> String;

    /// What tells its results in the cache from those of others: program, version, options.
    fn identity(&self) -> String;

    /// Begins what would make the next [`assemble`](Self::assemble) for `target` sooner, and does not wait for it.
    fn prepare(&self, _target: &Target) {}

    /// Assembles `code` for `target`.
    ///
    /// # Errors
    /// What the assembler said.
    fn assemble(&self, code: &[u8], target: &Target) -> Result<Vec<u8>, AssembleError>;
}

/// An accelerator that vm-jit has a target for.
pub trait JitTarget: Accelerator {
    /// What to compile for this device, with its present driver.
    ///
    /// # Errors
    /// [`CompileError::Device`] for one that there is no target for.
    fn target(&self) -> Result<Target, CompileError>;

    /// What the host makes of the code, where that is known and another target: what it would reject is rejected here, so that whoever
    /// chooses among kernels takes the next.
    fn host_target(&self) -> Option<Target> {
        None
    }

    /// The assembler to use where the caller names none; `None` if the device takes the code as it is.
    fn assembler(&self) -> Option<Arc<dyn Assemble>> {
        None
    }
}

/// Compiles kernels for one accelerator. Clones share the cache, so threads may have one each.
///
/// A kernel is taken for a guest's, unless the compiler is [`trusted`](Self::trusted) to be given only the host's own:
/// its code checks every access that is not proved to be in bounds, and can be stopped.
pub struct JitCompiler<A> {
    accelerator: Arc<A>,
    trust: Trust,
    cache: Arc<Cache>,
    assembler: Option<Arc<dyn Assemble>>,
    target: Option<Target>,
}

impl<A> Clone for JitCompiler<A> {
    fn clone(&self) -> Self {
        Self {
            accelerator: Arc::clone(&self.accelerator),
            trust: self.trust,
            cache: Arc::clone(&self.cache),
            assembler: self.assembler.clone(),
            target: self.target.clone(),
        }
    }
}

impl<A: Accelerator> fmt::Debug for JitCompiler<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JitCompiler")
            .field("device", &self.accelerator.info().name)
            .field("trust", &self.trust)
            .field("assembler", &self.assembler)
            .finish_non_exhaustive()
    }
}

impl<A: JitTarget> JitCompiler<A> {
    /// A compiler for guests' kernels, with the accelerator's usual assembler and a cache in memory.
    pub fn new(accelerator: Arc<A>) -> Self {
        let assembler = accelerator.assembler();
        let cache = Arc::new(Cache::in_memory());
        Self { accelerator, trust: Trust::Guest, cache, assembler, target: None }
    }

    /// For the host's own kernels, whose code does not check its accesses.
    ///
    /// # Safety
    /// Every kernel that the result is given stays within its views and its shared arrays, whatever the arguments of its
    /// launches are, and ends.
    #[must_use]
    #[allow(unsafe_code)]
    pub unsafe fn trusted(self) -> Self {
        Self { trust: Trust::Trusted, ..self }
    }

    /// With another cache, such as one on disk.
    #[must_use]
    pub fn cache(self, cache: Arc<Cache>) -> Self {
        Self { cache, ..self }
    }

    /// With another assembler; `None` gives the accelerator the code as vm-jit wrote it. Assemblers are closed programs:
    /// what a guest sent belongs in one that runs in a process of its own.
    #[must_use]
    pub fn assembler(self, assembler: Option<Arc<dyn Assemble>>) -> Self {
        Self { assembler, ..self }
    }

    /// For another target than the device's, of which it takes the code as vm-jit wrote it: an older NVIDIA architecture, whose PTX
    /// newer ones run. There is no assembler then.
    #[must_use]
    pub fn target(self, target: Target) -> Self {
        Self { target: Some(target), assembler: None, ..self }
    }

    /// The trust that kernels are compiled for.
    pub fn trust(&self) -> Trust {
        self.trust
    }

    /// What it compiles for.
    pub(super) fn compiled_for(&self) -> Result<Target, CompileError> {
        self.target.clone().map_or_else(|| self.accelerator.target(), Ok)
    }

    /// The cache.
    pub(super) fn kept(&self) -> &Arc<Cache> {
        &self.cache
    }

    /// The accelerator.
    pub fn accelerator(&self) -> &Arc<A> {
        &self.accelerator
    }

    /// Begins, in the background, what would make the first kernel that is not in the cache sooner: on NVIDIA GPUs it
    /// starts the assembler's processes.
    ///
    /// # Errors
    /// [`CompileError::Device`].
    pub fn prepare(&self) -> Result<(), CompileError> {
        let target = self.accelerator.target()?;
        if let Some(assembler) = &self.assembler {
            assembler.prepare(&target);
        }
        Ok(())
    }

    /// How often the cache had what was asked for.
    pub fn statistics(&self) -> CacheStatistics {
        self.cache.statistics()
    }

    /// Compiles the kernel that a builder wrote, or gives what was compiled before.
    ///
    /// # Errors
    /// Every [`CompileError`]; each names the kernel and the line of the Rust file that called the builder.
    pub fn compile(&mut self, block: &IRBlock) -> Result<CompiledKernel, CompileError> {
        self.compile_kernel(block.kernel()?)
    }

    /// Compiles one kernel.
    ///
    /// # Errors
    /// As [`compile`](Self::compile), but for what only a builder can get wrong.
    pub fn compile_kernel(&self, kernel: Kernel) -> Result<CompiledKernel, CompileError> {
        let module = validate(Module::from(kernel), self.trust)?;
        let mut kernels = self.compile_module(&module)?;
        kernels.pop().ok_or_else(|| CompileError::Device {
            device: self.accelerator.info().name.clone(),
            reason: "its target gave no code for the kernel; please report this".into(),
        })
    }

    /// Compiles the kernels of a module, for the trust that it was validated with. They share one image.
    ///
    /// # Errors
    /// [`CompileError::Rejected`], [`CompileError::Device`], [`CompileError::Assemble`], [`CompileError::Artifact`].
    pub fn compile_module(&self, module: &ValidModule) -> Result<Vec<CompiledKernel>, CompileError> {
        if module.trust() == Trust::Trusted && self.trust == Trust::Guest {
            return Err(CompileError::Trusted { kernel: first(module) });
        }
        let target = self.compiled_for()?;
        if let Some(host) = self.accelerator.host_target() {
            let rejects = legal::rejects(module, &host);
            if !rejects.is_empty() {
                return Err(Rejected(rejects).into());
            }
        }
        let compiled = self.cache.compile(module, &target)?;
        let image = match &self.assembler {
            None => Arc::from(compiled.code.as_slice()),
            Some(assembler) => assembled(&self.cache, &**assembler, module, &target, &compiled.code)?,
        };
        let format = self.assembler.as_ref().map_or(compiled.format.to_string(), |a| a.product());
        compiled
            .entries
            .iter()
            .map(|entry| {
                let artifact = artifact::of(module, entry, compiled.format, &image)?;
                Ok(CompiledKernel {
                    name: entry.kernel.clone(),
                    target: target.clone(),
                    trust: module.trust(),
                    format: format.clone(),
                    artifact,
                })
            })
            .collect()
    }
}

/// What an assembler makes of `code`, which vm-jit made of the module for the target; from the cache if it has that.
///
/// # Errors
/// [`CompileError::Assemble`].
pub fn assembled(
    cache: &Cache,
    assembler: &dyn Assemble,
    module: &ValidModule,
    target: &Target,
    code: &[u8],
) -> Result<Arc<[u8]>, CompileError> {
    let parts = [assembler.product(), assembler.identity(), target.to_string()];
    // By the code itself, which another build of vm-jit may write otherwise.
    let key = Key::of("assembled", &[parts[0].as_bytes(), parts[1].as_bytes(), parts[2].as_bytes(), code]);
    if let Some(image) = cache.get(&key) {
        return Ok(image);
    }
    let image = assembler.assemble(code, target).map_err(|cause| CompileError::Assemble {
        kernel: first(module),
        target: target.to_string(),
        cause,
    })?;
    let image: Arc<[u8]> = image.into();
    cache.put(&key, Arc::clone(&image));
    Ok(image)
}

/// The name of a module's first kernel.
fn first(module: &ValidModule) -> String {
    module.kernels().first().map(|kernel| kernel.name().to_owned()).unwrap_or_default()
}

/// A kernel that was compiled for an accelerator. Clones share the code.
#[derive(Clone, PartialEq, Eq)]
pub struct CompiledKernel {
    name: String,
    target: Target,
    trust: Trust,
    format: String,
    artifact: Artifact,
}

impl fmt::Debug for CompiledKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompiledKernel")
            .field("name", &self.name)
            .field("target", &format_args!("{}", self.target))
            .field("trust", &self.trust)
            .field("format", &self.format)
            .field("bytes", &self.artifact.image().len())
            .field("signature", self.artifact.signature())
            .finish()
    }
}

impl CompiledKernel {
    /// The kernel's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it was compiled for.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The trust that it was compiled for.
    pub fn trust(&self) -> Trust {
        self.trust
    }

    /// What the image is: `PTX`, `cubin`, `ELF`.
    pub fn format(&self) -> &str {
        &self.format
    }

    /// What a [`Worker`](super::Worker) loads: the image, and what a launch must know of the kernel.
    pub fn artifact(&self) -> &Artifact {
        &self.artifact
    }
}
