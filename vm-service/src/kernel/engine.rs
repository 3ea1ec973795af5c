//! What runs a kernel: the interpreter, or an accelerator of this machine.

use std::path::PathBuf;
#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_ir::ValidModule;
use vm_ir::interp::{self, Argument, Launch, Limits};
#[cfg(feature = "cuda")]
use vm_passthrough::accelerator::{Assemble, CudaAccelerator, CudaAssembler, assemble::Assembler};
use vm_passthrough::claim::{ClaimError, SharedLease};
use vm_passthrough::manager::ManagerError;
use vm_passthrough::{DeviceType, Host, PassthroughManager, PciAddress, PciFunction, pci};

use super::args::DeviceArg;
use crate::describe;
use crate::failure::Failure;

/// What the first argument is when this program is not the operator's but an assembler's process: it then makes a cubin
/// of PTX, with limits that the process which started it has set.
#[cfg(feature = "cuda")]
pub(crate) const ASSEMBLE: &str = "assemble-ptx";

/// A launch that fits its kernel, and how long it may take.
#[derive(Clone, Debug)]
#[cfg_attr(not(any(feature = "cpu", feature = "cuda")), expect(dead_code, reason = "no accelerator asks"))]
pub(crate) struct Task {
    /// The module that the kernel is in.
    pub(crate) module: ValidModule,
    /// Kernel, grid and arguments.
    pub(crate) launch: Launch,
    /// When to stop it.
    pub(crate) deadline: Duration,
    /// The most iterations of loops that a thread of a guest's kernel may begin.
    pub(crate) fuel: Option<u64>,
    /// Where compiled kernels are kept.
    pub(crate) cache: Option<PathBuf>,
}

/// How a launch went.
#[derive(Clone, Debug)]
pub(crate) struct Ran {
    /// The arguments with what the kernel wrote, in their order.
    pub(crate) arguments: Vec<Argument>,
    /// What ran it.
    pub(crate) device: String,
    /// What it was compiled for; `None` where nothing was compiled.
    pub(crate) target: Option<String>,
    /// How long compiling and loading took, where it was compiled.
    pub(crate) compile: Option<Duration>,
    /// How long the kernel ran, as the host saw it.
    pub(crate) run: Duration,
}

/// Runs a task on a device.
///
/// # Errors
/// When the device is not there or the kernel does not end well; the message says which.
pub(crate) fn run(task: Task, device: DeviceArg, host: &Host) -> Result<Ran, Failure> {
    match device {
        DeviceArg::Interpreter => interpret(task),
        DeviceArg::Cpu => on_cpu(task),
        DeviceArg::Pci(address) => on_function(task, address, host),
    }
}

/// Runs a task on the interpreter.
///
/// # Errors
/// As the interpreter says.
pub(crate) fn interpret(task: Task) -> Result<Ran, Failure> {
    let Task { module, mut launch, deadline, .. } = task;
    tracing::debug!("the interpreter runs @{}, a step at a time", launch.kernel);
    let start = Instant::now();
    // The deadline is the limit here: how many steps a kernel needs is the operator's to know.
    let limits = Limits { fuel: u64::MAX, deadline: start.checked_add(deadline), ..Limits::default() };
    interp::run(&module, &mut launch, &limits).map_err(|error| match *error.kind {
        interp::RunErrorKind::Deadline => Failure::failed(format_args!(
            "{error}; the interpreter takes one step at a time: give it a smaller grid, or more time with --deadline"
        )),
        _ => Failure::failed(error),
    })?;
    Ok(Ran {
        arguments: launch.arguments,
        device: "interpreter".into(),
        target: None,
        compile: None,
        run: start.elapsed(),
    })
}

#[cfg(feature = "cpu")]
fn on_cpu(task: Task) -> Result<Ran, Failure> {
    let cpu = vm_passthrough::CpuAccelerator::new().map_err(Failure::failed)?;
    super::accelerated::run(task, cpu, |compiler| compiler)
}

#[cfg(not(feature = "cpu"))]
fn on_cpu(_: Task) -> Result<Ran, Failure> {
    Err(Failure::failed(
        "this vm-service was built without the cargo feature `cpu`; build it with --features cpu, or use --device \
         interpreter",
    ))
}

/// Runs a task on the accelerator that a PCI function is, which is shared meanwhile.
fn on_function(task: Task, address: PciAddress, host: &Host) -> Result<Ran, Failure> {
    let _lease = share(address, host)?;
    on_cuda(task, address)
}

/// Finds the NVIDIA GPU that a PCI function is, and keeps others from claiming it as [`lease`] says.
///
/// # Errors
/// When there is none there, or it can't be shared.
pub(super) fn share(address: PciAddress, host: &Host) -> Result<Option<SharedLease>, Failure> {
    let function = pci::read_function(host, address).map_err(|error| match error {
        pci::ScanError::NotFound { .. } => Failure::failed(format_args!(
            "there is no PCI function {address} on this host; `vm-service list` shows its accelerators"
        )),
        error => Failure::failed(error),
    })?;
    if let Some(refusal) = refusal(&function, host) {
        return Err(refusal);
    }
    lease(address, host)
}

/// Why a function runs no kernels; `None` for an NVIDIA GPU, which does.
pub(crate) fn refusal(function: &PciFunction, host: &Host) -> Option<Failure> {
    let address = function.address;
    match function.device_type {
        DeviceType::GpuNvidia => None,
        DeviceType::GpuAmd => Some(no_rocm(address, host)),
        DeviceType::Npu | DeviceType::Accelerator => Some(no_npu(address, host)),
        _ => Some(Failure::failed(format_args!(
            "{address} ({}) is no accelerator that runs kernels; `vm-service list` shows those that there are, and \
             `vm-service launch --device cpu` runs anywhere",
            describe::name(function)
        ))),
    }
}

/// The lease that keeps others from claiming the function while a kernel runs on it. Who is not root has none, and can't
/// claim either.
pub(crate) fn lease(address: PciAddress, host: &Host) -> Result<Option<SharedLease>, Failure> {
    let manager = PassthroughManager::with_host(host.clone()).map_err(Failure::failed)?;
    match manager.share(address) {
        Ok(lease) => Ok(Some(lease)),
        Err(ManagerError::Claim(ClaimError::Ledger(error))) if !rustix::process::geteuid().is_root() => {
            tracing::debug!("the use of {address} is not recorded for others: {error}");
            Ok(None)
        }
        Err(error) => Err(Failure::failed(error)),
    }
}

#[cfg(feature = "cuda")]
fn on_cuda(task: Task, address: PciAddress) -> Result<Ran, Failure> {
    let (gpu, assembler) = cuda(address)?;
    super::accelerated::run(task, gpu, |compiler| compiler.assembler(assembler))
}

/// An NVIDIA GPU, and what assembles for it.
///
/// # Errors
/// When there is no driver that can be used, or it does not have that GPU.
#[cfg(feature = "cuda")]
pub(crate) fn cuda(address: PciAddress) -> Result<(CudaAccelerator, Option<Arc<dyn Assemble>>), Failure> {
    let gpu = CudaAccelerator::at(&address.to_string()).map_err(Failure::failed)?;
    // Where there is no ptxas, this program is the assembler's process (see `ASSEMBLE`).
    let own = || Some(Assembler::driver(std::env::current_exe().ok()?, [ASSEMBLE.into()]));
    let assembler = Assembler::find().ok().or_else(own);
    Ok((gpu, assembler.map(|found| Arc::new(CudaAssembler(found)) as Arc<dyn Assemble>)))
}

#[cfg(not(feature = "cuda"))]
fn on_cuda(_: Task, address: PciAddress) -> Result<Ran, Failure> {
    Err(without(address, "cuda"))
}

#[cfg(feature = "rocm")]
fn no_rocm(address: PciAddress, host: &Host) -> Failure {
    use vm_passthrough::accelerator::rocm::{RocmAccelerator, Roots};

    let roots = Roots { sys: host.sys.clone(), dev: host.dev.clone() };
    match RocmAccelerator::at(&roots, &address.to_string()) {
        Err(error) => Failure::failed(error),
        Ok(never) => match never {},
    }
}

#[cfg(not(feature = "rocm"))]
fn no_rocm(address: PciAddress, _: &Host) -> Failure {
    without(address, "rocm")
}

#[cfg(feature = "npu")]
fn no_npu(address: PciAddress, host: &Host) -> Failure {
    use vm_passthrough::accelerator::npu::{NpuAccelerator, Roots};

    let roots = Roots { sys: host.sys.clone(), dev: host.dev.clone() };
    match NpuAccelerator::at(&roots, &address.to_string()) {
        Err(error) => Failure::failed(error),
        Ok(never) => match never {},
    }
}

#[cfg(not(feature = "npu"))]
fn no_npu(address: PciAddress, _: &Host) -> Failure {
    without(address, "npu")
}

#[cfg(not(all(feature = "cuda", feature = "rocm", feature = "npu")))]
pub(crate) fn without(address: PciAddress, feature: &str) -> Failure {
    Failure::failed(format_args!(
        "{address} needs the cargo feature `{feature}`, which this vm-service was built without; build it with \
         --features {feature}, or use --device cpu"
    ))
}
