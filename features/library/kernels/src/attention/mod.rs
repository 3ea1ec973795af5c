//! Attention: O = softmax(scale · Q · Kᵀ) · V for each head, without the matrix in between ever being in memory
//! (Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention", 2022; softmax overlaps with products as in Shah
//! et al., "FlashAttention-3", 2024), and its gradients.
//!
//! Views, slowest dimension first: `q` and `o` are `[batch, heads, queries, D]`, `k` and `v` are `[batch, heads, keys, D]`, all
//! of f16, bf16 or f32 ([`Backward`]: of f16 or bf16). Strides are free as long as a row's elements lie side by side and rows begin on multiples of 16 bytes, so
//! tensors that lie as `[batch, tokens, heads, D]` are launched as they are, with their dimensions named in this order.
//! `scale` is an f32 above 0, as a rule 1/√D.
//!
//! Heads of queries may be a multiple of those of keys and values (grouped-query and multi-query attention): as many in a row
//! share a head of keys.
//!
//! What a query sees is its [`Mask`]. A query that sees no key gets zeros, and −∞ for the logarithm of its sum.
//!
//! [`Forward`], [`Gradients`] and [`Generate`] are what is to be computed, and have the tables of variants. Functions of the library are
//! [`DotProductAttention`] and [`SelfAttention`], both with their gradients, and [`DecodeAttention`].
//!
//! [`Attention`] is the forward kernel, [`Backward`] the three of the gradients where heads have 64 or 128 elements and sequences are
//! not packed, [`SplitBackward`] those of all other gradients. [`Decode`] is for a few queries, of a model that generates. A launch may have any number of blocks along
//! x, which divide the tiles among themselves: as many as the device has multiprocessors is best.

mod backward;
mod decode;
mod dot_product;
mod dot_product_backward;
mod forward;
mod generate;
mod gradients;
mod plan;
mod self_attention;
mod split;
mod table;

pub use backward::{Backward, BackwardPass};
pub use decode::Decode;
pub use dot_product::{DotProductAttention, Fp8Scales};
pub use dot_product_backward::DotProductAttentionBackward;
pub use forward::Attention;
pub use generate::DecodeAttention;
pub use gradients::{GradientKernels, Gradients};
pub use plan::Order;
pub use self_attention::{SelfAttention, SelfAttentionBackward};
pub use split::{Gradient, SplitBackward};
pub use table::{Forward, Generate};

use vm_ir::builder::Val;

/// Which keys a query sees. The last query's own place is that of the last key: query i is at i + keys − queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mask {
    /// All.
    Full,
    /// Those up to its place.
    Causal,
    /// Those from `left` before its place up to `right` behind it, both parameters of i32, and not negative.
    Window,
}

impl Mask {
    fn name(self) -> &'static str {
        match self {
            Mask::Full => "full",
            Mask::Causal => "causal",
            Mask::Window => "window",
        }
    }
}

/// The score of a key that a query does not see: below every finite one, so a row of the least finite scores is not taken for an empty one.
pub(crate) const UNSEEN: f32 = f32::NEG_INFINITY;
/// log2 e: exponentials are powers of two.
const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// The greatest score so far, or 0 where no key was seen yet: exponents below it are −∞ there, and not differences of infinities.
fn seen_or_zero(greatest: Val<'_>) -> Val<'_> {
    greatest.gt(UNSEEN).select(greatest, 0.0)
}
