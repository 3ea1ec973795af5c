//! The same elements in other places: reshaped, turned, sliced, repeated.

use crate::device::same;
use crate::error::{Error, Result};
use crate::evaluate::{self, Output};
use crate::layout::{self, Affine};
use crate::node::{Array, Expression, State, Storage};

/// A part of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slice {
    /// One index, counted from behind where it is negative; the axis goes.
    At(i64),
    /// `count` indices from `start` on, `step` apart. They lie within.
    Range {
        /// The first.
        start: i64,
        /// From one to the next; not 0.
        step: i64,
        /// How many.
        count: u64,
    },
    /// A new axis of extent 1.
    New,
}

impl Slice {
    /// `start:stop:step` of an axis with so many elements, as Python reads it.
    ///
    /// # Errors
    /// [`Error::Value`] for a step of 0.
    pub fn of(start: Option<i64>, stop: Option<i64>, step: Option<i64>, extent: u64) -> Result<Slice> {
        let (n, step) = (extent as i64, step.unwrap_or(1));
        if step == 0 {
            return Err(Error::Value { function: "slice", what: "slice step cannot be zero".into() });
        }
        let (low, high) = if step > 0 { (0, n) } else { (-1, n - 1) };
        let bound = |index: i64| (if index < 0 { index.saturating_add(n) } else { index }).clamp(low, high);
        let start = start.map_or(if step > 0 { low } else { high }, bound);
        let stop = stop.map_or(if step > 0 { high } else { low }, bound);
        let distance = if step > 0 { stop - start } else { start - stop };
        let count = if distance <= 0 { 0 } else { (distance as u64).div_ceil(step.unsigned_abs()) };
        // Of one element no step is taken: it may be any.
        Ok(Slice::Range {
            start: if count == 0 { 0 } else { start },
            step: if count < 2 { 1 } else { step },
            count,
        })
    }
}

impl Array {
    /// A view by a map from its indices to this array's.
    fn viewed(&self, shape: Vec<u64>, map: layout::Map) -> Result<Array> {
        Array::lazy(self.device(), self.dtype(), shape, Expression::View(self.clone(), map))
    }

    /// The same elements, in order, in another shape.
    ///
    /// # Errors
    /// [`Error::Shape`] if it has another number of elements.
    pub fn reshape(&self, shape: &[u64]) -> Result<Array> {
        layout::check("reshape", shape)?;
        if layout::elements(shape) != self.size() {
            let what = format!("cannot reshape array of size {} into shape {shape:?}", self.size());
            return Err(Error::Shape { function: "reshape", what });
        }
        if shape == self.shape() {
            return Ok(self.clone());
        }
        // Only extents of 1 come or go: a view, of whatever is not computed yet, too.
        let real = |shape: &[u64]| shape.iter().copied().filter(|extent| *extent != 1).collect::<Vec<_>>();
        if real(shape) == real(self.shape()) {
            let mut places = shape.iter().enumerate().filter(|(_, extent)| **extent != 1).map(|(d, _)| d);
            let axis = |extent: &u64| {
                let own = if *extent == 1 { None } else { places.next() };
                Affine { start: 0, steps: (0..shape.len()).map(|d| i64::from(Some(d) == own)).collect() }
            };
            return self.viewed(shape.to_vec(), self.shape().iter().map(axis).collect());
        }
        let at = evaluate::storage(self)?;
        let storage = match layout::reshaped(self.shape(), &at.strides, shape) {
            Some(strides) => Storage { strides, ..at },
            None => Storage { strides: layout::dense(shape), ..evaluate::dense(self)? },
        };
        Ok(Array::ready(self.device(), self.dtype(), shape.to_vec(), storage))
    }

    /// Its dimensions in another order: the first of the result is dimension `order[0]`.
    ///
    /// # Errors
    /// [`Error::Value`] if they are not all named once.
    pub fn permute(&self, order: &[i64]) -> Result<Array> {
        let order = order
            .iter()
            .map(|axis| layout::axis("permute_dims", *axis, self.ndim()))
            .collect::<Result<Vec<_>>>()?;
        let mut sorted = order.clone();
        sorted.sort_unstable();
        if sorted.iter().enumerate().any(|(d, axis)| d != *axis) || order.len() != self.ndim() {
            let what = "the axes don't match the array".to_owned();
            return Err(Error::Value { function: "permute_dims", what });
        }
        let shape = order.iter().map(|axis| self.shape()[*axis]).collect();
        let axis =
            |d: usize| Affine { start: 0, steps: order.iter().map(|axis| i64::from(*axis == d)).collect() };
        self.viewed(shape, (0..self.ndim()).map(axis).collect())
    }

    /// Repeated along dimensions of extent 1, and along new ones in front.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn broadcast_to(&self, shape: &[u64]) -> Result<Array> {
        layout::check("broadcast_to", shape)?;
        if layout::broadcast("broadcast_to", self.shape(), shape)? != shape {
            let what = format!("{:?} can't be repeated to {shape:?}", self.shape());
            return Err(Error::Shape { function: "broadcast_to", what });
        }
        let map = layout::repeated(&layout::identity(shape.len()), self.shape(), shape, shape.len());
        self.viewed(shape.to_vec(), map)
    }

    /// Parts of its axes, in order; axes behind those named are whole.
    ///
    /// # Errors
    /// [`Error::Index`], [`Error::Value`] for more axes than there are.
    pub fn slice(&self, slices: &[Slice]) -> Result<Array> {
        let (shape, axes) = self.sliced(slices)?;
        self.viewed(shape, axes)
    }

    fn sliced(&self, slices: &[Slice]) -> Result<(Vec<u64>, layout::Map)> {
        let named = slices.iter().filter(|slice| **slice != Slice::New).count();
        if named > self.ndim() {
            let what = format!(
                "too many indices for array: array is {}-dimensional, but {named} were indexed",
                self.ndim()
            );
            return Err(Error::Value { function: "index", what });
        }
        let whole = self.shape()[named..].iter().map(|n| Slice::Range { start: 0, step: 1, count: *n });
        let (mut shape, mut axes, mut d) = (Vec::new(), Vec::new(), 0);
        for slice in slices.iter().copied().chain(whole) {
            match slice {
                Slice::New => shape.push(1),
                Slice::At(index) => {
                    let size = self.shape()[d];
                    let at = if index < 0 { index.saturating_add(size as i64) } else { index };
                    if at < 0 || at >= size as i64 {
                        return Err(Error::Index { index, axis: d, size });
                    }
                    axes.push((at, None));
                    d += 1;
                }
                Slice::Range { start, step, count } => {
                    let size = self.shape()[d] as i64;
                    let last =
                        count.checked_sub(1).map(|n| step.saturating_mul(n as i64).saturating_add(start));
                    if last.is_some_and(|last| !(0..size).contains(&start) || !(0..size).contains(&last)) {
                        return Err(Error::Index { index: start, axis: d, size: size as u64 });
                    }
                    axes.push((start, Some((shape.len(), step))));
                    shape.push(count);
                    d += 1;
                }
            }
        }
        let axis = |(start, of): (i64, Option<(usize, i64)>)| Affine {
            start,
            steps: (0..shape.len())
                .map(|e| of.filter(|(own, _)| *own == e).map_or(0, |(_, step)| step))
                .collect(),
        };
        let map = axes.into_iter().map(axis).collect();
        Ok((shape, map))
    }

    /// A copy of the array with a part of it replaced by other elements, which are repeated where they are fewer.
    ///
    /// # Errors
    /// As [`slice`](Array::slice); [`Error::Shape`] if the values can't be repeated to the part.
    pub fn replace(&self, slices: &[Slice], values: &Array) -> Result<Array> {
        same("setitem", self.device(), values.device())?;
        let (shape, map) = self.sliced(slices)?;
        // numpy drops leading extents of 1 here.
        let extra = values.ndim().saturating_sub(shape.len());
        let values = match values.shape()[..extra].iter().all(|extent| *extent == 1) {
            true => values.reshape(&values.shape()[extra..])?,
            false => values.clone(),
        };
        let values = values.cast(self.dtype())?.broadcast_to(&shape)?;
        let result = Array::empty(self.device(), self.dtype(), self.shape())?;
        let at = evaluate::storage(&result)?;
        if self.size() != 0 {
            let whole = Output { dtype: self.dtype(), shape: self.shape().to_vec(), storage: at.clone() };
            evaluate::copy(self, whole)?;
        }
        if layout::elements(&shape) != 0 {
            let mut part = Storage { buffer: at.buffer, offset: 0, strides: vec![0; shape.len()] };
            for (axis, stride) in map.iter().zip(&at.strides) {
                part.offset += axis.start * stride;
                part.strides.iter_mut().zip(&axis.steps).for_each(|(to, step)| *to += step * stride);
            }
            evaluate::copy(&values, Output { dtype: self.dtype(), shape, storage: part })?;
        }
        Ok(result)
    }

    /// Elements at indices of a dense array of one dimension, of the indices' shape; 0 at indices beyond it.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Type`].
    pub fn gather(&self, indices: &Array) -> Result<Array> {
        same("take", self.device(), indices.device())?;
        if self.ndim() != 1 {
            return Err(Error::Shape {
                function: "take",
                what: "elements are gathered from one dimension".into(),
            });
        }
        if !indices.dtype().is_integer() {
            return Err(Error::Type {
                function: "take",
                dtype: indices.dtype(),
                what: "indices are integers",
            });
        }
        let indices = indices.cast(crate::DType::Int64)?;
        let shape = indices.shape().to_vec();
        Array::lazy(self.device(), self.dtype(), shape, Expression::Gather(self.clone(), indices))
    }

    /// Arrays of one shape but along an axis, one behind the other along it.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Devices`].
    pub fn concatenate(arrays: &[Array], axis: i64) -> Result<Array> {
        let function = "concat";
        let Some(first) = arrays.first() else {
            return Err(Error::Value { function, what: "need at least one array to concatenate".into() });
        };
        let axis = layout::axis(function, axis, first.ndim())?;
        let mut shape = first.shape().to_vec();
        let mut dtype = first.dtype();
        for other in &arrays[1..] {
            same(function, first.device(), other.device())?;
            dtype = dtype.promote(other.dtype());
            let fits = other.ndim() == first.ndim()
                && other.shape().iter().zip(first.shape()).enumerate().all(|(d, (a, b))| d == axis || a == b);
            if !fits {
                let what = format!("{:?} and {:?} differ beside axis {axis}", first.shape(), other.shape());
                return Err(Error::Shape { function, what });
            }
            shape[axis] += other.shape()[axis];
        }
        let result = Array::empty(first.device(), dtype, &shape)?;
        let whole = evaluate::storage(&result)?;
        let mut start = 0;
        for array in arrays {
            if array.size() != 0 {
                let mut part = whole.clone();
                part.offset += start * part.strides[axis];
                let output = Output { dtype, shape: array.shape().to_vec(), storage: part };
                evaluate::copy(&array.cast(dtype)?, output)?;
            }
            start += array.shape()[axis] as i64;
        }
        Ok(result)
    }

    /// Its strides in bytes, if its elements are there.
    pub fn strides(&self) -> Option<Vec<i64>> {
        match self.state() {
            State::Ready(at) => {
                Some(at.strides.iter().map(|stride| stride * self.dtype().bytes() as i64).collect())
            }
            State::Lazy(_) => None,
        }
    }
}
