//! Argmax, top-k, and draws that draw nothing.

use vm_graph::{Element, Reduction, Value};

use super::{Draft, Drawn, NoGraph};
use crate::call::{Buffer, Function as _};
use crate::sample::{Argmax, SoftmaxTopK, TopK, scale_of};

/// The column of the greatest of each row, NaN above all.
pub(crate) fn argmax(of: &Argmax) -> Drawn {
    let mut g = Draft::of("argmax", of.buffers())?;
    let x = g.float("logits")?;
    let is_nan = g.nan(x)?;
    let least = g.number(f64::NEG_INFINITY)?;
    let numbers = g.select(is_nan, least, x)?;
    let greatest = g.arg_max(numbers, 1)?;
    let ones = g.cast(is_nan, Element::F32)?;
    let first = g.arg_max(ones, 1)?;
    let any = g.any(ones, &[1])?;
    let found = g.select(any, first, greatest)?;
    g.put("output", found)?;
    g.finish()
}

/// The values and columns of the k greatest, NaN above all. A +∞ is as great as the greatest number of f32.
fn greatest(g: &mut Draft, x: Value, k: u64) -> Result<[Value; 2], NoGraph> {
    let is_nan = g.nan(x)?;
    let most = g.number(f32::MAX.into())?;
    let above = g.number(f64::INFINITY)?;
    let numbers = g.min(x, most)?;
    let keys = g.select(is_nan, above, numbers)?;
    let [_, columns] = g.top_k(keys, 1, k)?;
    Ok([g.gather_elements(x, columns, 1)?, columns])
}

/// The k greatest of each row.
pub(crate) fn top_k(of: &TopK) -> Drawn {
    let mut g = Draft::of("topk", of.buffers())?;
    let x = g.float("logits")?;
    let [values, columns] = greatest(&mut g, x, of.k)?;
    g.put("values", values)?;
    g.put("indices", columns)?;
    g.finish()
}

/// Softmax of each row, and its k greatest.
pub(crate) fn softmax_top_k(of: &SoftmaxTopK) -> Drawn {
    let mut g = Draft::of("softmax_topk", of.buffers())?;
    let x = g.float("input")?;
    let [values, columns] = greatest(&mut g, x, of.k)?;
    let weights = match of.renormalised {
        true => g.softmax(values, 1)?,
        false => {
            let all = g.softmax(x, 1)?;
            g.gather_elements(all, columns, 1)?
        }
    };
    g.put("weights", weights)?;
    g.put("indices", columns)?;
    g.finish()
}

/// A draw, which at a temperature of 0 is of the greatest, NaN below all; −1 where there is none.
pub(crate) fn draw(function: &'static str, buffers: Vec<Buffer>, temperature: f32) -> Drawn {
    let scale = scale_of(function, temperature)?;
    let mut g = Draft::of(function, buffers)?;
    if scale.is_some() {
        return Err(g.no("it draws by Philox, for whose 64-bit products NPUs have no operations"));
    }
    let x = g.float("logits")?;
    let is_nan = g.nan(x)?;
    let least = g.number(f64::NEG_INFINITY)?;
    let numbers = g.select(is_nan, least, x)?;
    let columns = g.arg_max(numbers, 1)?;
    let greatest = g.reduce(Reduction::Max, numbers, &[1])?;
    let is_any = g.greater(greatest, least)?;
    let none = g.integer_like(columns, -1)?;
    let found = g.select(is_any, columns, none)?;
    g.put("output", found)?;
    g.finish()
}
