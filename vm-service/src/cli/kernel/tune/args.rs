//! What can be said to `tune`.

use std::time::Duration;

use clap::{Args, Subcommand};
use vm_ir::Scalar;
use vm_passthrough::accelerator::kernels::attention::{Forward, Generate, Gradients, Mask};
use vm_passthrough::accelerator::kernels::gemm::{Activation, Auxiliary, Batch, Epilogue, Product, Scales};

use super::super::args::{DeviceArg, seconds};
use crate::failure::Failure;

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
    /// Attention: softmax(Q · Kᵀ / √D) · V for each head of a batch of sequences, or its gradients
    Attention(AttentionArgs),
    /// Attention of the last queries of each sequence to a cache of keys and values, as when a model generates
    Decode(DecodeArgs),
}

/// Where it is measured, and how long.
#[derive(Clone, Debug, Args)]
pub(crate) struct MeasureArgs {
    /// Where: a GPU's PCI address, rocm:N for the AMD GPU of that number, or cpu; without it, on the first NVIDIA GPU
    #[arg(long, value_name = "ADDR|rocm:N|cpu")]
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
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = many())]
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
    #[arg(long, value_name = "COUNT", value_parser = tokens())]
    tokens: u64,
}

/// Attention.
#[derive(Debug, Args)]
pub(crate) struct AttentionArgs {
    #[command(flatten)]
    heads: HeadsArgs,
    /// Queries of a sequence; without it, as many as keys
    #[arg(long, value_name = "COUNT", value_parser = tokens())]
    queries: Option<u64>,
    /// What Q, K and V hold; the gradients are not of FP8
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = factor)]
    element: Scalar,
    /// What O holds where Q, K and V hold FP8; bf16 without it
    #[arg(long, value_name = "TYPE", value_parser = float)]
    output: Option<Scalar>,
    /// A query sees the keys up to its own place
    #[arg(long)]
    causal: bool,
    /// A query sees COUNT keys before its own place, and as many behind it, none of them with --causal
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(..1 << 31))]
    window: Option<u32>,
    /// Sequences of different lengths lie one behind the other, the longest of --tokens
    #[arg(long)]
    packed: bool,
    /// The logarithms of the sums are stored, which the gradients need
    #[arg(long)]
    log_sums: bool,
    /// The gradients of Q, K and V, from that of O: all their kernels, as they run one behind the other
    #[arg(long, conflicts_with_all = ["log_sums", "output"])]
    pub(crate) backward: bool,
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
    /// What Q, K and V hold
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = float)]
    element: Scalar,
    #[command(flatten)]
    pub(crate) measure: MeasureArgs,
}

/// A matrix product.
#[derive(Debug, Args)]
pub(crate) struct GemmArgs {
    /// Rows of A and C
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u64).range(1..))]
    m: u64,
    /// Columns of B and C
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    n: u64,
    /// Columns of A, rows of B
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u64).range(1..))]
    k: u64,
    /// What A and B hold
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = element)]
    element: Scalar,
    /// What C holds; without it, what A and B hold, or f32 for tf32, bf16 for FP8 and i32 for i8
    #[arg(long, value_name = "TYPE", value_parser = output)]
    output: Option<Scalar>,
    /// A is given transposed
    #[arg(long)]
    a_transposed: bool,
    /// B is given transposed, as GPUs want it of types other than 16 bits
    #[arg(long)]
    b_transposed: bool,
    /// Multiply COUNT pairs of matrices at once
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    batch: Option<u64>,
    /// Multiply COUNT groups of the rows of A by a matrix each, as those of experts
    #[arg(long, value_name = "COUNT", conflicts_with = "batch", value_parser = many())]
    groups: Option<u64>,
    /// How A and B are scaled: rows of A and columns of B (rows), or 128 elements of A's rows and 128 × 128 of B (blocks)
    #[arg(long, value_name = "rows|blocks", value_parser = scales)]
    scales: Option<Scales>,
    /// The product is multiplied by a number
    #[arg(long)]
    alpha: bool,
    /// What was in C is multiplied by a number, and added
    #[arg(long)]
    beta: bool,
    /// A bias is added to each row
    #[arg(long)]
    bias: bool,
    /// A function of each element behind all that
    #[arg(long, value_name = "relu|silu|gelu", value_parser = activation)]
    activation: Option<Activation>,
    /// What the function took is stored too (store), or the product is multiplied by the function's derivative there (gradient)
    #[arg(long, value_name = "store|gradient", requires = "activation", value_parser = auxiliary)]
    aux: Option<Auxiliary>,
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

fn float(text: &str) -> Result<Scalar, String> {
    one_of(text, &[Scalar::Bf16, Scalar::F16, Scalar::F32])
}

fn factor(text: &str) -> Result<Scalar, String> {
    one_of(text, &[Scalar::Bf16, Scalar::F16, Scalar::F32, Scalar::F8E4M3])
}

/// Tokens of a sequence: as many as kernels count.
fn tokens() -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(1..1 << 30)
}

/// Sequences, or groups: each has an offset, which the host writes.
fn many() -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(1..=1 << 20)
}

fn scales(text: &str) -> Result<Scales, String> {
    named(text, &[("rows", Scales::Rows), ("blocks", Scales::Blocks)])
}

fn activation(text: &str) -> Result<Activation, String> {
    named(text, &[("relu", Activation::Relu), ("silu", Activation::Silu), ("gelu", Activation::Gelu)])
}

fn auxiliary(text: &str) -> Result<Auxiliary, String> {
    named(text, &[("store", Auxiliary::Store), ("gradient", Auxiliary::Gradient)])
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
    /// What a query sees.
    fn mask(&self) -> (Mask, [u32; 2]) {
        match (self.window, self.causal) {
            (Some(reach), true) => (Mask::Window, [reach, 0]),
            (Some(reach), false) => (Mask::Window, [reach; 2]),
            (None, true) => (Mask::Causal, [0; 2]),
            (None, false) => (Mask::Full, [0; 2]),
        }
    }

    /// Queries and keys of a sequence.
    fn tokens(&self) -> [u64; 2] {
        [self.queries.unwrap_or(self.heads.tokens), self.heads.tokens]
    }

    /// The problem, unless it is that of the gradients.
    ///
    /// # Errors
    /// Heads that can't be shared, or an output that differs from what is not FP8.
    pub(crate) fn forward(&self) -> Result<Forward, Failure> {
        let HeadsArgs { batch, dim, tokens, .. } = self.heads;
        let fp8 = self.element == Scalar::F8E4M3;
        let of_factors = if fp8 { Scalar::Bf16 } else { self.element };
        let element = self.output.unwrap_or(of_factors);
        if !fp8 && element != of_factors {
            return Err(Failure::usage(format_args!(
                "--output {element} with --element {of_factors}: O holds what Q, K and V do, unless those hold f8e4m3; leave \
                 --output out"
            )));
        }
        let (mask, window) = self.mask();
        Ok(Forward {
            element,
            fp8,
            mask,
            window,
            packed: self.packed,
            log_sums: self.log_sums,
            heads: self.heads.both()?,
            tokens: self.tokens(),
            ..Forward::of(batch, 1, tokens, dim, self.causal)
        })
    }

    /// The problem of the gradients.
    ///
    /// # Errors
    /// Heads that can't be shared, or FP8.
    pub(crate) fn gradients(&self) -> Result<Gradients, Failure> {
        let HeadsArgs { batch, dim, .. } = self.heads;
        let element = self.element;
        if element == Scalar::F8E4M3 {
            return Err(Failure::usage("the gradients of attention are of bf16, f16 or f32, not of f8e4m3"));
        }
        let (mask, window) = self.mask();
        let (packed, heads, tokens) = (self.packed, self.heads.both()?, self.tokens());
        Ok(Gradients { element, dim, mask, window, packed, batch, heads, tokens })
    }
}

impl DecodeArgs {
    /// The problem.
    ///
    /// # Errors
    /// Heads that can't be shared.
    pub(crate) fn problem(&self) -> Result<Generate, Failure> {
        let HeadsArgs { batch, dim, tokens, .. } = self.heads;
        let (heads, page) = (self.heads.both()?, self.page.unwrap_or(0));
        Ok(Generate { element: self.element, dim, page, batch, heads, queries: self.queries, tokens })
    }
}

fn one_of(text: &str, all: &[Scalar]) -> Result<Scalar, String> {
    let found = all.iter().copied().find(|scalar| scalar.to_string() == text);
    found.ok_or_else(|| {
        format!("write one of {}", all.iter().map(Scalar::to_string).collect::<Vec<_>>().join(", "))
    })
}

fn named<T: Copy>(text: &str, all: &[(&str, T)]) -> Result<T, String> {
    let found = all.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
    found.ok_or_else(|| {
        format!("write one of {}", all.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", "))
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
        let (batch, matrices) = match (self.batch, self.groups) {
            (Some(pairs), _) => (Batch::Batched, pairs),
            (None, Some(groups)) => (Batch::Grouped, groups),
            (None, None) => (Batch::One, 1),
        };
        let epilogue = Epilogue {
            scaled: self.alpha,
            scales: self.scales.unwrap_or(Scales::None),
            plus: self.beta,
            bias: self.bias,
            activation: self.activation.unwrap_or(Activation::None),
            aux: self.aux.unwrap_or(Auxiliary::None),
        };
        Product {
            element: self.element,
            output,
            a_transposed: self.a_transposed,
            b_transposed: self.b_transposed,
            batch,
            matrices,
            epilogue,
            ..Product::of(self.m, self.n, self.k)
        }
    }
}
