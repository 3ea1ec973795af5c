//! What does what was said to `tune`.

use std::path::PathBuf;
use std::time::Duration;

use vm_passthrough::accelerator::Tuned;
use vm_passthrough::accelerator::kernels::family::Problem;
use vm_passthrough::{DeviceType, Host, PciAddress};

use super::args::DeviceArg;
#[cfg(not(all(feature = "cuda", feature = "rocm")))]
use super::engine::without;
use super::engine::{numbered, share};
use crate::failure::Failure;

mod args;

pub(crate) use args::{FamilyArgs, MeasureArgs, TuneArgs};

/// What choices may take on disk: some tens of thousands.
#[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm"))]
const CHOICES_BYTES: u64 = 32 << 20;

/// What is to be tuned, and how.
#[derive(Clone, Debug)]
#[cfg_attr(
    not(any(feature = "cpu", feature = "cuda", feature = "rocm")),
    expect(dead_code, reason = "no accelerator asks")
)]
pub(crate) struct Task<P> {
    /// The problem.
    pub(crate) problem: P,
    /// How long it may take.
    pub(crate) limit: Duration,
    /// Whether it is measured even if there is a choice.
    pub(crate) again: bool,
    /// Where compiled kernels are kept, and choices in a folder of it.
    pub(crate) cache: Option<PathBuf>,
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct Ran<V> {
    /// The device, as it is named on the command line.
    pub(crate) device: String,
    /// Its name.
    pub(crate) device_name: String,
    /// The choice.
    pub(crate) tuned: Tuned<V>,
}

/// Tunes on a device; on the first NVIDIA GPU where none is named.
///
/// # Errors
/// When the device is not there or nothing could be chosen; the message says why.
pub(crate) fn run<P: Problem>(
    task: &Task<P>,
    device: Option<DeviceArg>,
    host: &Host,
) -> Result<Ran<P::Variant>, Failure> {
    match device {
        Some(DeviceArg::Interpreter) => Err(Failure::usage(
            "the interpreter takes one step at a time, and its times say nothing; name a GPU's PCI address or cpu with --device",
        )),
        Some(DeviceArg::Npu(_)) => Err(Failure::usage(
            "an NPU runs models, not kernels of threads; name a GPU's PCI address or cpu with --device",
        )),
        Some(DeviceArg::Cpu) => on_cpu(task),
        Some(DeviceArg::Pci(address)) => on_function(task, address, host),
        Some(DeviceArg::Rocm(number)) => on_function(task, numbered(number, host)?, host),
        None => on_function(task, first()?, host),
    }
}

fn on_function<P: Problem>(
    task: &Task<P>,
    address: PciAddress,
    host: &Host,
) -> Result<Ran<P::Variant>, Failure> {
    let (kind, _lease) = share(address, host)?;
    match kind {
        DeviceType::GpuAmd => on_rocm(task, address, host),
        _ => on_cuda(task, address),
    }
}

#[cfg(feature = "cpu")]
fn on_cpu<P: Problem>(task: &Task<P>) -> Result<Ran<P::Variant>, Failure> {
    let cpu = vm_passthrough::CpuAccelerator::new().map_err(Failure::failed)?;
    on(task, "cpu".into(), cpu, |compiler| compiler)
}

#[cfg(not(feature = "cpu"))]
fn on_cpu<P: Problem>(_: &Task<P>) -> Result<Ran<P::Variant>, Failure> {
    Err(Failure::failed(
        "this vm-service was built without the cargo feature `cpu`; build it with --features cpu",
    ))
}

#[cfg(feature = "cuda")]
fn on_cuda<P: Problem>(task: &Task<P>, address: PciAddress) -> Result<Ran<P::Variant>, Failure> {
    let (gpu, assembler) = super::engine::cuda(address)?;
    on(task, address.to_string(), gpu, |compiler| compiler.assembler(assembler))
}

#[cfg(not(feature = "cuda"))]
fn on_cuda<P: Problem>(_: &Task<P>, address: PciAddress) -> Result<Ran<P::Variant>, Failure> {
    Err(without(address, "cuda"))
}

#[cfg(feature = "rocm")]
fn on_rocm<P: Problem>(task: &Task<P>, address: PciAddress, host: &Host) -> Result<Ran<P::Variant>, Failure> {
    on(task, address.to_string(), super::engine::rocm(address, host)?, |compiler| compiler)
}

#[cfg(not(feature = "rocm"))]
fn on_rocm<P: Problem>(_: &Task<P>, address: PciAddress, _: &Host) -> Result<Ran<P::Variant>, Failure> {
    Err(without(address, "rocm"))
}

/// The address of the first NVIDIA GPU.
#[cfg(feature = "cuda")]
fn first() -> Result<PciAddress, Failure> {
    use vm_passthrough::accelerator::Accelerator as _;

    let none = |why: String| {
        Failure::failed(format_args!(
            "there is no NVIDIA GPU to tune on ({why}); name another device with --device"
        ))
    };
    let gpus = vm_passthrough::accelerator::cuda_devices().map_err(|error| none(error.to_string()))?;
    let address = gpus.first().and_then(|gpu| gpu.info().address.as_deref()?.parse().ok());
    address.ok_or_else(|| none("its driver has none".into()))
}

#[cfg(not(feature = "cuda"))]
fn first() -> Result<PciAddress, Failure> {
    Err(Failure::failed(
        "this vm-service was built without the cargo feature `cuda`; build it with --features cuda, or name another \
         device with --device",
    ))
}

/// Tunes on an accelerator.
#[cfg(any(feature = "cpu", feature = "cuda", feature = "rocm"))]
fn on<A: vm_passthrough::accelerator::JitTarget, P: Problem>(
    task: &Task<P>,
    device: String,
    accelerator: A,
    adjust: impl FnOnce(
        vm_passthrough::accelerator::JitCompiler<A>,
    ) -> vm_passthrough::accelerator::JitCompiler<A>,
) -> Result<Ran<P::Variant>, Failure> {
    use super::cache;
    use std::sync::Arc;
    use vm_passthrough::accelerator::{JitCompiler, TuneEvent, TuneOptions, Tuner};

    let device_name = accelerator.info().name.clone();
    let choices = task.cache.as_ref().map(|folder| folder.join("tuned"));
    let compiler =
        JitCompiler::new(Arc::new(accelerator)).cache(cache::open(task.cache.as_deref(), cache::CODE_BYTES));
    let tuner = Tuner::new(adjust(compiler)).choices(cache::open(choices.as_deref(), CHOICES_BYTES));
    let progress = |event: &TuneEvent| tracing::debug!("{event:?}");
    let options = TuneOptions {
        limit: task.limit,
        again: task.again,
        progress: Some(Arc::new(progress)),
        ..TuneOptions::default()
    };
    let tuned = tuner.tune(&task.problem, &options).map_err(Failure::failed)?;
    Ok(Ran { device, device_name, tuned })
}
