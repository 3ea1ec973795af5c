//! Scatters: elements at places of an array become others.

use vm_ir::view::Access;
use vm_ir::{GuestAddr, IRBlock};
use vm_runtime::Argument;

use super::{each, grid, view};
use crate::Accelerator;
use crate::device::same;
use crate::dtype::DType;
use crate::error::Result;
use crate::evaluate;
use crate::node::Array;

impl Array {
    /// The array with `values` at places of its elements, counted one behind the other; what has a place beyond it is left out. Of several for one place any is
    /// stored.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Devices`].
    pub fn scatter(&self, places: &Array, values: &Array) -> Result<Array> {
        same("scatter", self.device(), places.device())?;
        same("scatter", self.device(), values.device())?;
        let values = values.cast(self.dtype())?.broadcast_to(places.shape())?;
        let places = places.cast(DType::Int64)?;
        let (device, dtype) = (self.device(), self.dtype());
        let result = Array::empty(device, dtype, self.shape())?;
        let to = evaluate::storage(&result)?;
        if self.size() == 0 {
            return Ok(result);
        }
        evaluate::copy(self, evaluate::Output { dtype, shape: self.shape().to_vec(), storage: to.clone() })?;
        if places.size() == 0 {
            return Ok(result);
        }
        let (parts, n) = (dtype.parts(), places.size());
        let cpu = device.is_sequential();
        let kernel = device.own("scatter", vec![dtype as u64], || {
            let block = IRBlock::new(GuestAddr(0));
            let k = block.builder();
            k.name("scatter");
            let y = k.view_of("y", view(dtype, 2, Access::Write, &["", "parts"]));
            let at = k.view_of("at", view(DType::Int64, 1, Access::Read, &["n"]));
            let x = k.view_of("x", view(dtype, 2, Access::Read, &["n", "parts"]));
            each(k, cpu, at.extent(0), |i| {
                let place = at.at([i]).load();
                k.if_(place.ge(k.i64(0)) & place.lt(y.extent(0)), || {
                    k.range(k.i64(0), y.extent(1)).each(|part| {
                        y.at([place, part]).store(x.at([i, part]).load());
                    });
                });
            });
            Ok(block.kernel()?)
        })?;
        let (at, x) = (evaluate::dense(&places)?, evaluate::dense(&values)?);
        let arguments: [Argument<'_, Accelerator>; 3] = [
            to.buffer.shaped(&[self.size(), parts])?.into(),
            at.buffer.shaped(&[n])?.into(),
            x.buffer.shaped(&[n, parts])?.into(),
        ];
        device.launch(&kernel, grid(device, n)?, &arguments)?;
        Ok(result)
    }
}
