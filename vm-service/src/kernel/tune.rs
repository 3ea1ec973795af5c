//! What can be said to `tune`, and what does it.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use vm_ir::Scalar;
use vm_passthrough::accelerator::Tuned;
use vm_passthrough::accelerator::kernels::gemm::{Batch, Gemm, Product};
use vm_passthrough::{Host, PciAddress};

use super::args::{DeviceArg, seconds};
use super::engine::share;
#[cfg(not(feature = "cuda"))]
use super::engine::without;
use crate::failure::Failure;

/// What choices may take on disk: some tens of thousands.
#[cfg(any(feature = "cpu", feature = "cuda"))]
const CHOICES_BYTES: u64 = 32 << 20;

/// Arguments of `tune`.
#[derive(Debug, Args)]
pub(crate) struct TuneArgs {
    #[command(subcommand)]
    pub(crate) family: FamilyArgs,
}

/// A family, and a problem.
#[derive(Debug, Subcommand)]
pub(crate) enum FamilyArgs {
    /// Matrix products: C = A · B, where A is M × K and B is K × N
    Gemm(GemmArgs),
}

/// A matrix product.
#[derive(Debug, Args)]
pub(crate) struct GemmArgs {
    /// Rows of A and C
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) m: u64,
    /// Columns of B and C
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) n: u64,
    /// Columns of A, rows of B
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) k: u64,
    /// What A and B hold
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = element)]
    pub(crate) element: Scalar,
    /// What C holds; without it, what A and B hold, or f32 for tf32, bf16 for FP8 and i32 for i8
    #[arg(long, value_name = "TYPE", value_parser = output)]
    pub(crate) output: Option<Scalar>,
    /// A is given transposed
    #[arg(long)]
    pub(crate) a_transposed: bool,
    /// B is given transposed, as GPUs want it of types other than 16 bits
    #[arg(long)]
    pub(crate) b_transposed: bool,
    /// Multiply COUNT pairs of matrices at once
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) batch: Option<u64>,
    /// Where: a GPU's PCI address, or cpu; without it, on the first NVIDIA GPU
    #[arg(long, value_name = "ADDR|cpu")]
    pub(crate) device: Option<DeviceArg>,
    /// Measure for SECONDS at most
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = seconds)]
    pub(crate) limit: Duration,
    /// Measure even if there is a choice from before
    #[arg(long)]
    pub(crate) again: bool,
}

fn element(text: &str) -> Result<Scalar, String> {
    use Scalar::{Bf16, F8E4M3, F8E5M2, F16, F32, I8, Tf32};
    one_of(text, &[Bf16, F16, Tf32, F32, F8E4M3, F8E5M2, I8])
}

fn output(text: &str) -> Result<Scalar, String> {
    one_of(text, &[Scalar::Bf16, Scalar::F16, Scalar::F32, Scalar::I32])
}

fn one_of(text: &str, all: &[Scalar]) -> Result<Scalar, String> {
    let found = all.iter().copied().find(|scalar| scalar.to_string() == text);
    found.ok_or_else(|| {
        format!("write one of {}", all.iter().map(Scalar::to_string).collect::<Vec<_>>().join(", "))
    })
}

impl GemmArgs {
    /// The problem.
    pub(crate) fn product(&self) -> Product {
        let output = self.output.unwrap_or(match self.element {
            Scalar::Tf32 => Scalar::F32,
            Scalar::F8E4M3 | Scalar::F8E5M2 => Scalar::Bf16,
            Scalar::I8 => Scalar::I32,
            element => element,
        });
        Product {
            element: self.element,
            output,
            a_transposed: self.a_transposed,
            b_transposed: self.b_transposed,
            batch: if self.batch.is_some() { Batch::Batched } else { Batch::One },
            matrices: self.batch.unwrap_or(1),
            ..Product::of(self.m, self.n, self.k)
        }
    }
}

/// What is to be tuned, and how.
#[derive(Clone, Debug)]
#[cfg_attr(not(any(feature = "cpu", feature = "cuda")), expect(dead_code, reason = "no accelerator asks"))]
pub(crate) struct Task {
    /// The problem.
    pub(crate) product: Product,
    /// How long it may take.
    pub(crate) limit: Duration,
    /// Whether it is measured even if there is a choice.
    pub(crate) again: bool,
    /// Where compiled kernels are kept, and choices in a folder of it.
    pub(crate) cache: Option<PathBuf>,
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct Ran {
    /// The device, as it is named on the command line.
    pub(crate) device: String,
    /// Its name.
    pub(crate) device_name: String,
    /// The choice.
    pub(crate) tuned: Tuned<Gemm>,
}

/// Tunes on a device; on the first NVIDIA GPU where none is named.
///
/// # Errors
/// When the device is not there or nothing could be chosen; the message says why.
pub(crate) fn run(task: &Task, device: Option<DeviceArg>, host: &Host) -> Result<Ran, Failure> {
    match device {
        Some(DeviceArg::Interpreter) => Err(Failure::usage(
            "the interpreter takes one step at a time, and its times say nothing; name a GPU's PCI address or cpu with --device",
        )),
        Some(DeviceArg::Cpu) => on_cpu(task),
        Some(DeviceArg::Pci(address)) => on_function(task, address, host),
        None => on_function(task, first()?, host),
    }
}

fn on_function(task: &Task, address: PciAddress, host: &Host) -> Result<Ran, Failure> {
    let _lease = share(address, host)?;
    on_cuda(task, address)
}

#[cfg(feature = "cpu")]
fn on_cpu(task: &Task) -> Result<Ran, Failure> {
    let cpu = vm_passthrough::CpuAccelerator::new().map_err(Failure::failed)?;
    on(task, "cpu".into(), cpu, |compiler| compiler)
}

#[cfg(not(feature = "cpu"))]
fn on_cpu(_: &Task) -> Result<Ran, Failure> {
    Err(Failure::failed(
        "this vm-service was built without the cargo feature `cpu`; build it with --features cpu",
    ))
}

#[cfg(feature = "cuda")]
fn on_cuda(task: &Task, address: PciAddress) -> Result<Ran, Failure> {
    let (gpu, assembler) = super::engine::cuda(address)?;
    on(task, address.to_string(), gpu, |compiler| compiler.assembler(assembler))
}

#[cfg(not(feature = "cuda"))]
fn on_cuda(_: &Task, address: PciAddress) -> Result<Ran, Failure> {
    Err(without(address, "cuda"))
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
#[cfg(any(feature = "cpu", feature = "cuda"))]
fn on<A: vm_passthrough::accelerator::JitTarget>(
    task: &Task,
    device: String,
    accelerator: A,
    adjust: impl FnOnce(
        vm_passthrough::accelerator::JitCompiler<A>,
    ) -> vm_passthrough::accelerator::JitCompiler<A>,
) -> Result<Ran, Failure> {
    use super::accelerated::{CACHE_BYTES, cache};
    use std::sync::Arc;
    use vm_passthrough::accelerator::{JitCompiler, TuneEvent, TuneOptions, Tuner};

    let device_name = accelerator.info().name.clone();
    let choices = task.cache.as_ref().map(|folder| folder.join("tuned"));
    let compiler = JitCompiler::new(Arc::new(accelerator)).cache(cache(task.cache.as_deref(), CACHE_BYTES));
    let tuner = Tuner::new(adjust(compiler)).choices(cache(choices.as_deref(), CHOICES_BYTES));
    let progress = |event: &TuneEvent| tracing::debug!("{event:?}");
    let options = TuneOptions {
        limit: task.limit,
        again: task.again,
        progress: Some(Arc::new(progress)),
        ..TuneOptions::default()
    };
    let tuned = tuner.tune(&task.product, &options).map_err(Failure::failed)?;
    Ok(Ran { device, device_name, tuned })
}
