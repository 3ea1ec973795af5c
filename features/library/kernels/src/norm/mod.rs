//! RMS norm and layer norm of rows, fused with the addition of a residual, and their gradients.
//!
//! With `h = x`, or `h = x + residual` rounded to the elements of `x`, of a row of `n` columns:
//!
//! | norm | computes |
//! | --- | --- |
//! | [`Norm::Rms`] | `y = h · r · weight`, `r = 1 / √(Σ h² / n + ε)` |
//! | [`Norm::Layer`] | `y = (h − m) · r · weight + bias`, `m = Σ h / n`, `r = 1 / √(Σ (h − m)² / n + ε)` |
//!
//! Their gradients, with `ĥ = h · r` or `(h − m) · r` and `g = dy · weight`:
//!
//! | of | is |
//! | --- | --- |
//! | `h`, and so `x` and the residual | `dx = r · (g − ĥ · Σ (g · ĥ) / n)`, of a layer norm less `r · Σ g / n` too; plus `dsum`, what comes to `h` from elsewhere |
//! | `weight` | `Σ dy · ĥ` over the rows |
//! | `bias` | `Σ dy` over the rows |
//!
//! Gradients of weights are summed in two launches: each block adds up rows of its own, and the second launch adds the blocks' sums, both
//! in a fixed order. So a call on the same device gives the same bits each time.

mod backward;
mod forward;
mod plan;
mod sums;

pub use backward::{Keeps, NormBackward, NormGradient};
pub use forward::{NormForward, NormRows};
pub use sums::NormSums;

/// Which norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Norm {
    /// By the root of the mean square.
    Rms,
    /// By mean and variance.
    Layer,
}

impl Norm {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Norm::Rms => "rmsnorm",
            Norm::Layer => "layernorm",
        }
    }
}
