//! What can be said to `tune`, and what does it.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use vm_ir::Scalar;
use vm_passthrough::accelerator::Tuned;
use vm_passthrough::accelerator::kernels::attention::{Forward, Generate, Mask};
use vm_passthrough::accelerator::kernels::family::Problem;
use vm_passthrough::accelerator::kernels::gemm::{Batch, Product};
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
    /// Attention: softmax(Q · Kᵀ / √D) · V for each head of a batch of sequences
    Attention(AttentionArgs),
    /// Attention of the last queries of each sequence to a cache of keys and values, as when a model generates
    Decode(DecodeArgs),
}

/// Where it is measured, and how long.
#[derive(Clone, Debug, Args)]
pub(crate) struct MeasureArgs {
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

/// Heads of attention.
#[derive(Clone, Debug, Args)]
pub(crate) struct HeadsArgs {
    /// Sequences
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = clap::value_parser!(u64).range(1..))]
    batch: u64,
    /// Heads of queries
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    heads: u64,
    /// Heads of keys and values, which divide those of queries; without it, as many
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    key_heads: Option<u64>,
    /// Elements of a query and a key: 64, 128, 192 (with values of 128) or 256
    #[arg(long, value_name = "D", value_parser = dim)]
    dim: u32,
    /// Keys and values of a sequence
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    tokens: u64,
    /// What Q, K and V hold
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = narrow)]
    element: Scalar,
}

/// Attention.
#[derive(Debug, Args)]
pub(crate) struct AttentionArgs {
    #[command(flatten)]
    heads: HeadsArgs,
    /// Queries of a sequence; without it, as many as keys
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    queries: Option<u64>,
    /// A query sees the keys up to its own place
    #[arg(long)]
    causal: bool,
    /// The logarithms of the sums are stored, which the gradients need
    #[arg(long)]
    log_sums: bool,
    #[command(flatten)]
    pub(crate) measure: MeasureArgs,
}

/// Attention to a cache.
#[derive(Debug, Args)]
pub(crate) struct DecodeArgs {
    #[command(flatten)]
    heads: HeadsArgs,
    /// Queries of a sequence
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = clap::value_parser!(u64).range(1..=16))]
    queries: u64,
    /// Tokens of a page of the cache, a multiple of 16; without it, the cache is not paged
    #[arg(long, value_name = "TOKENS", value_parser = page)]
    page: Option<u32>,
    #[command(flatten)]
    pub(crate) measure: MeasureArgs,
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
    #[command(flatten)]
    pub(crate) measure: MeasureArgs,
}

fn element(text: &str) -> Result<Scalar, String> {
    use Scalar::{Bf16, F8E4M3, F8E5M2, F16, F32, I8, Tf32};
    one_of(text, &[Bf16, F16, Tf32, F32, F8E4M3, F8E5M2, I8])
}

fn output(text: &str) -> Result<Scalar, String> {
    one_of(text, &[Scalar::Bf16, Scalar::F16, Scalar::F32, Scalar::I32])
}

fn narrow(text: &str) -> Result<Scalar, String> {
    one_of(text, &[Scalar::Bf16, Scalar::F16, Scalar::F32])
}

fn dim(text: &str) -> Result<u32, String> {
    let dims = [64, 128, 192, 256];
    text.parse().ok().filter(|dim| dims.contains(dim)).ok_or_else(|| "write 64, 128, 192 or 256".to_owned())
}

fn page(text: &str) -> Result<u32, String> {
    let fits = |page: &u32| (16..=1 << 20).contains(page) && page.is_multiple_of(16);
    text.parse().ok().filter(fits).ok_or_else(|| "write a multiple of 16, up to 1048576".to_owned())
}

impl HeadsArgs {
    /// Heads of queries and of keys.
    fn both(&self) -> Result<[u64; 2], Failure> {
        let of_keys = self.key_heads.unwrap_or(self.heads);
        match self.heads.is_multiple_of(of_keys) {
            true => Ok([self.heads, of_keys]),
            false => Err(Failure::usage(format_args!(
                "--heads {} is no multiple of --key-heads {of_keys}; as many heads of queries share each head of keys",
                self.heads
            ))),
        }
    }
}

impl AttentionArgs {
    /// The problem.
    ///
    /// # Errors
    /// Heads that can't be shared.
    pub(crate) fn problem(&self) -> Result<Forward, Failure> {
        let HeadsArgs { batch, dim, tokens, element, .. } = self.heads;
        Ok(Forward {
            element,
            mask: if self.causal { Mask::Causal } else { Mask::Full },
            log_sums: self.log_sums,
            heads: self.heads.both()?,
            tokens: [self.queries.unwrap_or(tokens), tokens],
            ..Forward::of(batch, 1, tokens, dim, self.causal)
        })
    }
}

impl DecodeArgs {
    /// The problem.
    ///
    /// # Errors
    /// Heads that can't be shared.
    pub(crate) fn problem(&self) -> Result<Generate, Failure> {
        let HeadsArgs { batch, dim, tokens, element, .. } = self.heads;
        let (heads, page) = (self.heads.both()?, self.page.unwrap_or(0));
        Ok(Generate { element, dim, page, batch, heads, queries: self.queries, tokens })
    }
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
        Some(DeviceArg::Cpu) => on_cpu(task),
        Some(DeviceArg::Pci(address)) => on_function(task, address, host),
        None => on_function(task, first()?, host),
    }
}

fn on_function<P: Problem>(
    task: &Task<P>,
    address: PciAddress,
    host: &Host,
) -> Result<Ran<P::Variant>, Failure> {
    let _lease = share(address, host)?;
    on_cuda(task, address)
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
