//! Rows of tables, sums of columns, transposes.

use vm_graph::{Element, Reduction, Value};

use super::{Draft, Drawn, NoGraph};
use crate::call::Function as _;
use crate::columns::ColumnSums;
use crate::gather::Embedding;
use crate::scatter::{EmbeddingGradient, ScatterAdd};
use crate::transpose::Transpose;

/// Rows by their indices, zeros for those that are none.
pub(crate) fn embedding(of: &Embedding) -> Drawn {
    let mut g = Draft::of("embedding", of.buffers())?;
    let (table, indices) = (g.given("table")?, g.given("indices")?);
    let mut found = g.gather(table, indices, 0)?;
    if matches!(g.type_of(found).element, Element::F16 | Element::Bf16) {
        // Few runtimes choose among these.
        found = g.cast(found, Element::F32)?;
    }
    let found = there(&mut g, found, indices, of.rows)?;
    g.put("y", found)?;
    g.finish()
}

/// Rows where their indices are some, zeros elsewhere.
fn there(g: &mut Draft, x: Value, indices: Value, rows: u64) -> Result<Value, NoGraph> {
    let is_there = g.below(indices, rows)?;
    let count = g.type_of(indices).elements();
    let is_there = g.reshape(is_there, &[count, 1])?;
    Ok(g.or(is_there, x, 0.0)?)
}

/// Rows added to those of a table.
pub(crate) fn scatter_add(of: &ScatterAdd) -> Drawn {
    let mut g = Draft::of("scatter_add", of.buffers())?;
    let table = g.float("y")?;
    add(&mut g, of, ["x", "y"], table)?;
    g.finish()
}

/// The gradient of an embedding.
pub(crate) fn embedding_gradient(of: &EmbeddingGradient) -> Drawn {
    let ScatterAdd { rows, columns, .. } = of.add;
    let mut g = Draft::of("embedding_gradient", of.buffers())?;
    let zeros = |g: &mut Draft| g.filled(Element::F32, 0.0, &[rows, columns]);
    let before = g.float_if(of.accumulate, "dtable")?;
    let before = before.map_or_else(|| zeros(&mut g), Ok)?;
    add(&mut g, &of.add, ["dy", "dtable"], before)?;
    g.finish()
}

/// Zeros are added where an index is none.
fn add(g: &mut Draft, of: &ScatterAdd, [from, to]: [&str; 2], before: Value) -> Result<(), NoGraph> {
    let (x, indices) = (g.float(from)?, g.given("indices")?);
    let x = there(g, x, indices, of.rows)?;
    let sums = g.scatter_rows(before, indices, x, true)?;
    g.put(to, sums)
}

/// Sums of columns.
pub(crate) fn column_sums(of: &ColumnSums) -> Drawn {
    let mut g = Draft::of("column_sums", of.buffers())?;
    let x = g.float("x")?;
    let sums = g.reduce_away(Reduction::Sum, x, &[0])?;
    g.put("y", sums)?;
    g.finish()
}

/// Transposes.
pub(crate) fn transpose(of: &Transpose) -> Drawn {
    let mut g = Draft::of("transpose", of.buffers())?;
    let x = g.given("x")?;
    let y = g.turned(x)?;
    g.put("y", y)?;
    g.finish()
}
