//! The loss that balances experts, and its gradient.

use vm_graph::{Element, Reduction};

use super::{Draft, Drawn};
use crate::call::Function as _;
use crate::experts::{AuxLoss, AuxLossGradient};

/// The loss, how often each expert was chosen, and the means of their probabilities.
pub(crate) fn loss(of: &AuxLoss) -> Drawn {
    let AuxLoss { tokens, experts, top_k, .. } = *of;
    let mut g = Draft::of("aux_loss", of.buffers())?;
    let probabilities = g.float("router_probs")?;
    let chosen = g.given("expert_indices")?;
    let assigned = tokens.saturating_mul(top_k);
    let chosen = g.reshape(chosen, &[assigned, 1])?;
    let hits = g.hits(chosen, experts)?;
    let hits = g.cast(hits, Element::F32)?;
    let counts = g.reduce_away(Reduction::Sum, hits, &[0])?;
    g.put("f_counts", counts)?;
    let means = g.reduce_away(Reduction::Mean, probabilities, &[0])?;
    g.put("p_means", means)?;
    let products = g.mul(counts, means)?;
    let sum = g.sum(products, &[0])?;
    let loss = g.times(sum, f64::from(of.alpha) * experts as f64 / assigned as f64)?;
    g.put("aux_loss", loss)?;
    g.finish()
}

/// Its gradient of the probabilities.
pub(crate) fn gradient(of: &AuxLossGradient) -> Drawn {
    let AuxLossGradient { tokens, experts, top_k, .. } = *of;
    let mut g = Draft::of("aux_loss_gradient", of.buffers())?;
    if top_k == 0 {
        return Err(g.no("0 experts for a token; there is at least 1"));
    }
    let (counts, dloss) = (g.float("f_counts")?, g.float("aux_loss_grad")?);
    let each = g.mul(counts, dloss)?;
    let tokens_squared = tokens as f64 * tokens as f64;
    let each = g.times(each, f64::from(of.alpha) * experts as f64 / (tokens_squared * top_k as f64))?;
    let all = match g.float_if(of.accumulate, "router_probs_grad")? {
        Some(before) => g.add(before, each)?,
        None => g.expand(each, &[tokens, experts])?,
    };
    g.put("router_probs_grad", all)?;
    g.finish()
}
