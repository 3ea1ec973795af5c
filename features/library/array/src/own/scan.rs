//! Scans along an axis: sums and products of the elements up to each.

use vm_ir::view::Access;
use vm_ir::{GuestAddr, IRBlock};
use vm_runtime::Argument;

use super::{each, grid, tiles, view};
use crate::Accelerator;
use crate::dtype::DType;
use crate::error::Result;
use crate::evaluate;
use crate::layout;
use crate::node::Array;
use crate::op::Reduction;

impl Array {
    /// Sums or products of the elements up to each along an axis, in a type.
    ///
    /// # Errors
    /// [`Error::Type`], [`Error::Value`].
    pub fn scan(&self, op: Reduction, axis: i64, dtype: Option<DType>) -> Result<Array> {
        let axis = layout::axis("scan", axis, self.ndim())?;
        let to = dtype.map_or_else(|| op.of(self.dtype()), Ok)?;
        let converted = self.cast(to)?;
        if self.size() == 0 {
            return Ok(converted);
        }
        let shape = self.shape().to_vec();
        let [outer, n, inner] =
            [layout::elements(&shape[..axis]), shape[axis], layout::elements(&shape[axis + 1..])];
        let is_of_rows = !self.device().is_sequential() && to != DType::Bool && n >= SHORT;
        if is_of_rows && inner == 1 {
            return tiles::scanned(self, op, to, [outer, n]);
        }
        if is_of_rows && inner < COLUMNS && n > PART {
            let turn = |x: &Array, [a, b]: [u64; 2]| x.reshape(&[outer, a, b])?.permute(&[0, 2, 1]);
            let rows = tiles::scanned(&turn(self, [n, inner])?, op, to, [outer * inner, n])?;
            return turn(&rows, [inner, n])?.reshape(&shape);
        }
        let wide = self.cast(op.accumulator(to))?.reshape(&[outer, n, inner])?;
        scanned(&wide, op, [outer, n, inner])?.reshape(&shape)?.cast(to)
    }
}

/// The shortest row that a GPU's warp scans together; shorter ones are a thread's each.
const SHORT: u64 = 16;
/// Columns that lie too close for a GPU's threads to go down one each: they are made rows.
const COLUMNS: u64 = 16;
/// Elements of a part that one thread goes through.
const PART: u64 = 512;

/// The scan along the middle of three dimensions of a dense array: of parts, each of which begins with what those before came to.
fn scanned(x: &Array, op: Reduction, [outer, n, inner]: [u64; 3]) -> Result<Array> {
    let (device, dtype) = (x.device(), x.dtype());
    let parts = n.div_ceil(PART);
    let identity = match op {
        Reduction::Prod => crate::Number::Int(1),
        _ => crate::Number::Int(0),
    };
    let before = if parts == 1 {
        Array::full(device, dtype, &[outer, 1, inner], identity)?
    } else {
        // What each part comes to, with the last, shorter one filled up; and of these the same scan.
        let whole = parts * PART;
        let filled = if whole == n {
            x.clone()
        } else {
            let rest = Array::full(device, dtype, &[outer, whole - n, inner], identity)?;
            Array::concatenate(&[x.clone(), rest], 1)?
        };
        let sums =
            filled.reshape(&[outer, parts, PART, inner])?.reduce(op, Some(&[2]), false, Some(dtype))?;
        let up_to = scanned(&sums, op, [outer, parts, inner])?;
        let all = crate::Slice::of(None, None, None, outer)?;
        let but_last = up_to.slice(&[all, crate::Slice::Range { start: 0, step: 1, count: parts - 1 }])?;
        Array::concatenate(&[Array::full(device, dtype, &[outer, 1, inner], identity)?, but_last], 1)?
    };
    let (cpu, of) = (device.is_sequential(), dtype.parts());
    let product = op == Reduction::Prod;
    let kernel = device.own("scan", vec![dtype as u64, product.into()], || {
        let block = IRBlock::new(GuestAddr(0));
        let k = block.builder();
        k.name("scan");
        let y = k.view_of("y", view(dtype, 4, Access::Write, &["outer", "n", "inner", "parts"]));
        let x = k.view_of("x", view(dtype, 4, Access::Read, &["outer", "n", "inner", "parts"]));
        let before = k.view_of("before", view(dtype, 4, Access::Read, &["outer", "", "inner", "parts"]));
        let inner = y.extent(2);
        let parts = before.extent(1);
        each(k, cpu, y.extent(0) * parts * inner, |at| {
            let (rest, i) = (at.div_u(inner), at.rem_u(inner));
            let (o, part) = (rest.div_u(parts), rest.rem_u(parts));
            let first = part * PART as i64;
            let places = k.range(first, (first + PART as i64).min(y.extent(1)));
            let [re, im] = [0, 1].map(|part| k.i64(part));
            let begun = before.at([o, part, i, re]).load();
            if dtype.is_complex() {
                places.fold((begun, before.at([o, part, i, im]).load()), |j, (a, b)| {
                    let (c, d) = (x.at([o, j, i, re]).load(), x.at([o, j, i, im]).load());
                    let (a, b) = if product { (a * c - b * d, a * d + b * c) } else { (a + c, b + d) };
                    y.at([o, j, i, re]).store(a);
                    y.at([o, j, i, im]).store(b);
                    (a, b)
                });
            } else {
                places.fold(begun, |j, sum| {
                    let x = x.at([o, j, i, re]).load();
                    let sum = if product { sum * x } else { sum + x };
                    y.at([o, j, i, re]).store(sum);
                    sum
                });
            }
        });
        Ok(block.kernel()?)
    })?;
    let y = Array::empty(device, dtype, &[outer, n, inner])?;
    let (to, from, carry) = (evaluate::storage(&y)?, evaluate::dense(x)?, evaluate::dense(&before)?);
    let arguments: [Argument<'_, Accelerator>; 3] = [
        to.buffer.shaped(&[outer, n, inner, of])?.into(),
        from.buffer.shaped(&[outer, n, inner, of])?.into(),
        carry.buffer.shaped(&[outer, parts, inner, of])?.into(),
    ];
    device.launch(&kernel, grid(device, outer * parts * inner)?, &arguments)?;
    Ok(y)
}
