//! Cross-entropy and its gradient.

use vm_graph::{Element, Reduction as Reduce, Value};

use super::{Built, Draft, Drawn, NoGraph};
use crate::call::Function as _;
use crate::loss::{CrossEntropy, CrossEntropyBackward, LossOptions, Reduction};

/// Targets of rows: `[rows, 1]`, which of them are columns, and which are ignored, if any can be.
struct Targets {
    columns: Value,
    valid: Value,
    ignored: Option<Value>,
}

impl Targets {
    fn of(g: &mut Draft, [rows, columns]: [u64; 2], options: &LossOptions) -> Result<Targets, NoGraph> {
        let targets = g.given("targets")?;
        let targets = g.reshape(targets, &[rows, 1])?;
        let range = g.type_of(targets).element.range();
        let can_be = range.is_some_and(|(least, most)| (least..=most).contains(&options.ignored));
        let mut ignored = None;
        if can_be {
            let number = g.integer_like(targets, options.ignored)?;
            ignored = Some(g.equal(targets, number)?);
        }
        Ok(Targets { columns: targets, valid: g.below(targets, columns)?, ignored })
    }

    /// x of valid rows, zeros of ignored ones, NaN of others.
    fn masked(&self, g: &mut Draft, x: Value) -> Built {
        let x = g.or(self.valid, x, f64::NAN)?;
        let Some(ignored) = self.ignored else { return Ok(x) };
        let zero = g.number(0.0)?;
        g.select(ignored, zero, x)
    }

    /// How many are not ignored, `[1, 1]`.
    fn count(&self, g: &mut Draft) -> Built {
        let rows = g.type_of(self.columns).elements();
        let Some(ignored) = self.ignored else { return g.filled(Element::F32, rows as f64, &[1, 1]) };
        let counted = g.not(ignored)?;
        let counted = g.cast(counted, Element::F32)?;
        g.sum(counted, &[0])
    }
}

/// ln Σ eˣ of each row.
fn log_sums(g: &mut Draft, x: Value) -> Built {
    let greatest = g.reduce(Reduce::Max, x, &[1])?;
    let below = g.sub(x, greatest)?;
    let powers = g.exp(below)?;
    let sum = g.sum(powers, &[1])?;
    let log = g.log(sum)?;
    g.add(greatest, log)
}

/// The losses of rows, or their sum or mean, and the logarithms of the probabilities.
pub(crate) fn forward(of: &CrossEntropy) -> Drawn {
    let CrossEntropy { rows, columns, options, .. } = *of;
    let (smoothing, z) = (f64::from(options.smoothing), f64::from(options.z));
    let mut g = Draft::of("cross_entropy", of.buffers())?;
    let logits = g.float("logits")?;
    let targets = Targets::of(&mut g, [rows, columns], &options)?;
    let logs = g.log_softmax(logits, 1)?;
    if of.log_probs.is_some() {
        g.put("log_probs", logs)?;
    }
    if of.log_sums {
        let sums = log_sums(&mut g, logits)?;
        g.put("log_sums", sums)?;
    }
    let own = g.gather_elements(logs, targets.columns, 1)?;
    let mut loss = g.times(own, smoothing - 1.0)?;
    if smoothing != 0.0 {
        let average = g.mean(logs, &[1])?;
        let average = g.times(average, smoothing)?;
        loss = g.sub(loss, average)?;
    }
    if z != 0.0 {
        let sums = log_sums(&mut g, logits)?;
        let squares = g.mul(sums, sums)?;
        let squares = g.times(squares, z)?;
        loss = g.add(loss, squares)?;
    }
    loss = targets.masked(&mut g, loss)?;
    if options.reduction != Reduction::None {
        loss = g.sum(loss, &[0])?;
    }
    if options.reduction == Reduction::Mean {
        let count = targets.count(&mut g)?;
        loss = g.div(loss, count)?;
    }
    g.put("loss", loss)?;
    g.finish()
}

/// The gradient.
pub(crate) fn backward(of: &CrossEntropyBackward) -> Drawn {
    let CrossEntropyBackward { rows, columns, options, .. } = *of;
    let (smoothing, z) = (f64::from(options.smoothing), f64::from(options.z));
    let mut g = Draft::of("cross_entropy_backward", of.buffers())?;
    let (logits, dloss) = (g.float("logits")?, g.float("dloss")?);
    let targets = Targets::of(&mut g, [rows, columns], &options)?;
    let (mut one, sums) = if of.log_sums {
        let sums = g.float("log_sums")?;
        let sums = g.reshape(sums, &[rows, 1])?;
        let logs = g.sub(logits, sums)?;
        (g.exp(logs)?, Some(sums))
    } else {
        (g.softmax(logits, 1)?, None)
    };
    if z != 0.0 {
        let sums = sums.map_or_else(|| log_sums(&mut g, logits), Ok)?;
        let factor = g.times(sums, 2.0 * z)?;
        let factor = g.plus(factor, 1.0)?;
        one = g.mul(one, factor)?;
    }
    let hits = g.hits(targets.columns, columns)?;
    let hits = g.cast(hits, Element::F32)?;
    let hits = g.times(hits, 1.0 - smoothing)?;
    one = g.sub(one, hits)?;
    if smoothing != 0.0 {
        one = g.plus(one, -smoothing / columns as f64)?;
    }
    let mut given = g.reshape(dloss, &[if options.reduction == Reduction::None { rows } else { 1 }, 1])?;
    if options.reduction == Reduction::Mean {
        let count = targets.count(&mut g)?;
        given = g.div(given, count)?;
    }
    one = g.mul(one, given)?;
    one = targets.masked(&mut g, one)?;
    g.put(if of.in_place { "logits" } else { "dlogits" }, one)?;
    g.finish()
}
