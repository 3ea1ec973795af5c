//! Searches: where values would go into what is in order, and where elements are not 0.

use vm_ir::builder::{Builder, Val};
use vm_ir::view::Access;
use vm_ir::{GuestAddr, IRBlock};
use vm_runtime::Argument;

use super::{each, grid, view};
use crate::Accelerator;
use crate::device::same;
use crate::dtype::{DType, Kind};
use crate::error::{Error, Result};
use crate::evaluate;
use crate::node::Array;
use crate::op::{Binary, Reduction};

/// Is one element before another? NaN comes last.
fn before<'b>(dtype: DType, a: Val<'b>, b: Val<'b>) -> Val<'b> {
    match dtype.kind() {
        Kind::Float => a.lt(b) | (b.ne(b) & a.eq(a)),
        Kind::Signed => a.lt(b),
        _ => a.lt_u(b),
    }
}

/// The first place in `low..high` whose element `is` not, all before it are.
fn partition<'b>(k: Builder<'b>, low: Val<'b>, high: Val<'b>, is: impl Fn(Val<'b>) -> Val<'b>) -> Val<'b> {
    let halve = |(low, high): (Val<'b>, Val<'b>)| {
        let middle = (low + high) >> 1;
        let goes_on = is(middle);
        (goes_on.select(middle + 1, low), goes_on.select(high, middle))
    };
    k.while_((low, high), |(low, high)| low.lt(high), halve).0
}

impl Array {
    /// Where each of `values` would go into this array of one dimension, which is in order, an `Int64`: before what is equal, or behind it.
    ///
    /// # Errors
    /// [`Error::Type`], [`Error::Shape`].
    pub fn search_sorted(&self, values: &Array, right: bool) -> Result<Array> {
        let function = "searchsorted";
        same(function, self.device(), values.device())?;
        if self.ndim() != 1 {
            return Err(Error::Shape { function, what: "what is searched has one dimension".into() });
        }
        let dtype = self.dtype().promote(values.dtype());
        let (sorted, values) = (self.cast(dtype)?, values.cast(dtype)?);
        sorted.sortable(function)?;
        let device = self.device();
        let result = Array::empty(device, DType::Int64, values.shape())?;
        if values.size() == 0 {
            return Ok(result);
        }
        if self.size() == 0 {
            return Array::full(device, DType::Int64, values.shape(), crate::Number::Int(0));
        }
        let cpu = device.is_sequential();
        let kernel = device.own(function, vec![dtype as u64, right.into()], || {
            let block = IRBlock::new(GuestAddr(0));
            let k = block.builder();
            k.name("search_sorted");
            let y = k.view_of("y", view(DType::Int64, 1, Access::Write, &["n"]));
            let sorted = k.view_of("sorted", view(dtype, 1, Access::Read, &[]));
            let x = k.view_of("x", view(dtype, 1, Access::Read, &["n"]));
            each(k, cpu, y.extent(0), |i| {
                let key = x.at([i]).load();
                let place = partition(k, k.i64(0), sorted.extent(0), |at| {
                    let other = sorted.at([at]).load();
                    if right { !before(dtype, key, other) } else { before(dtype, other, key) }
                });
                y.at([i]).store(place);
            });
            Ok(block.kernel()?)
        })?;
        let (s, x, y) = (evaluate::dense(&sorted)?, evaluate::dense(&values)?, evaluate::storage(&result)?);
        let n = [values.size()];
        let arguments: [Argument<'_, Accelerator>; 3] = [
            y.buffer.shaped(&n)?.into(),
            s.buffer.shaped(&[self.size()])?.into(),
            x.buffer.shaped(&n)?.into(),
        ];
        device.launch(&kernel, grid(device, n[0])?, &arguments)?;
        Ok(result)
    }

    /// The places of elements that are not 0, counted one behind the other, an `Int64`. It waits for how many there are.
    ///
    /// # Errors
    /// What computing them fails with.
    pub fn nonzero(&self) -> Result<Array> {
        let device = self.device();
        let n = self.size();
        if n == 0 {
            return Array::empty(device, DType::Int64, &[0]);
        }
        let is = self.cast(DType::Bool)?.reshape(&[n])?;
        let up_to = is.scan(Reduction::Sum, 0, Some(DType::Int64))?;
        let count = match up_to.slice(&[crate::Slice::At(-1)])?.item()? {
            crate::Number::Int(count) => count as u64,
            _ => 0,
        };
        let one = Array::full(device, DType::Int64, &[], crate::Number::Int(1))?;
        let none = Array::full(device, DType::Int64, &[], crate::Number::Int(-1))?;
        let to = is.select(&up_to.binary(Binary::Subtract, &one)?, &none)?;
        Array::empty(device, DType::Int64, &[count])?.scatter(&to, &Array::indices(device, &[n], 0, 0, 1)?)
    }
}
