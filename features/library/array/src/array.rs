//! Arrays from the host and back, of numbers, and their functions of elements.

use std::time::Duration;

use half::{bf16, f16};

use crate::device::{Device, TIMEOUT, same};
use crate::dtype::{DType, Kind};
use crate::error::{Error, Result};
use crate::evaluate;
use crate::layout::{self, Affine};
use crate::node::{Array, Expression, Storage};
use crate::op::{Binary, Reduction, Unary};

/// A number of any type, as a host's language has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// A truth value.
    Bool(bool),
    /// An integer.
    Int(i128),
    /// A float.
    Float(f64),
    /// A complex number: real and imaginary part.
    Complex(f64, f64),
}

impl Number {
    /// What it is a number of: integers are signed.
    pub const fn kind(self) -> Kind {
        match self {
            Number::Bool(_) => Kind::Bool,
            Number::Int(_) => Kind::Signed,
            Number::Float(_) => Kind::Float,
            Number::Complex(..) => Kind::Complex,
        }
    }

    /// Its bits in a type; of a complex type those of both parts. Integers wrap, as do floats beyond an integer's range.
    pub fn bits(self, dtype: DType) -> [u64; 2] {
        let part = |value: f64| match dtype.real() {
            DType::Float16 => f16::from_f64(value).to_bits().into(),
            DType::BFloat16 => bf16::from_f64(value).to_bits().into(),
            DType::Float32 => (value as f32).to_bits().into(),
            _ => value.to_bits(),
        };
        let (re, im) = match self {
            Number::Bool(value) => (f64::from(u8::from(value)), 0.0),
            Number::Int(value) => (value as f64, 0.0),
            Number::Float(value) => (value, 0.0),
            Number::Complex(re, im) => (re, im),
        };
        let mask = dtype.stored().mask();
        match (dtype.kind(), self) {
            (Kind::Bool, _) => [u64::from(re != 0.0 || im != 0.0), 0],
            (Kind::Signed | Kind::Unsigned, Number::Int(value)) => [value as u64 & mask, 0],
            (Kind::Signed | Kind::Unsigned, _) => [re as i128 as u64 & mask, 0],
            (Kind::Float, _) => [part(re), 0],
            (Kind::Complex, _) => [part(re), part(im)],
        }
    }

    /// The number of an element's bytes.
    pub fn from_bytes(dtype: DType, bytes: &[u8]) -> Number {
        let word = |bytes: &[u8]| {
            let mut all = [0; 8];
            let n = bytes.len().min(8);
            all[..n].copy_from_slice(&bytes[..n]);
            u64::from_le_bytes(all)
        };
        let float = |bytes: &[u8]| match dtype.real() {
            DType::Float16 => f16::from_bits(word(bytes) as u16).to_f64(),
            DType::BFloat16 => bf16::from_bits(word(bytes) as u16).to_f64(),
            DType::Float32 => f32::from_bits(word(bytes) as u32).into(),
            _ => f64::from_bits(word(bytes)),
        };
        let half = bytes.len() / 2;
        match dtype.kind() {
            Kind::Bool => Number::Bool(word(bytes) != 0),
            Kind::Unsigned => Number::Int(word(bytes).into()),
            Kind::Signed => {
                let unused = 64 - 8 * bytes.len().clamp(1, 8);
                Number::Int(((word(bytes) << unused).cast_signed() >> unused).into())
            }
            Kind::Float => Number::Float(float(bytes)),
            Kind::Complex => Number::Complex(float(&bytes[..half]), float(&bytes[half..])),
        }
    }
}

impl Array {
    /// A dense array of the host's bytes, little-endian.
    ///
    /// # Errors
    /// [`Error::Shape`] if they are not as many as the shape has; [`Error::OutOfMemory`].
    pub fn from_bytes(device: &Device, dtype: DType, shape: &[u64], bytes: &[u8]) -> Result<Array> {
        let array = Array::empty(device, dtype, shape)?;
        let wanted = array.size() * dtype.bytes();
        if wanted != bytes.len() as u64 {
            let what = format!("{} bytes for {shape:?} of {dtype}, which takes {wanted}", bytes.len());
            return Err(Error::Shape { function: "from_bytes", what });
        }
        if wanted != 0 {
            let at = evaluate::storage(&array)?;
            let (worker, to) = (device.worker()?, at.buffer.view(0, wanted)?);
            match device.pinned_at(bytes)? {
                None => worker.write(to, bytes)?,
                Some((block, offset)) => {
                    worker.copy(to, block.view(offset, wanted)?)?;
                    worker.synchronize(TIMEOUT)?;
                }
            }
        }
        Ok(array)
    }

    /// The elements, one behind the other.
    ///
    /// # Errors
    /// What computing them fails with; [`Error::Lost`]; [`Error::OutOfMemory`] of the host.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let count = usize::try_from(self.size() * self.dtype().bytes()).unwrap_or(usize::MAX);
        let mut bytes = Vec::new();
        let full =
            |_| Error::OutOfMemory(format!("the host cannot allocate {count} bytes for an array's elements"));
        bytes.try_reserve_exact(count).map_err(full)?;
        bytes.resize(count, 0);
        self.read(&mut bytes)?;
        Ok(bytes)
    }

    /// The same into memory of the caller's, of as many bytes.
    ///
    /// # Errors
    /// As [`to_bytes`](Array::to_bytes); [`Error::Shape`] for another number of bytes.
    pub fn read(&self, bytes: &mut [u8]) -> Result<()> {
        let wanted = self.size() * self.dtype().bytes();
        if bytes.len() as u64 != wanted {
            return Err(Error::Shape {
                function: "read",
                what: format!("{} bytes, not {wanted}", bytes.len()),
            });
        }
        if wanted == 0 {
            return Ok(());
        }
        let at = evaluate::dense(self)?;
        if self.device().is_cpu() {
            self.device().synchronize()?;
            return at.buffer.read(bytes);
        }
        let (worker, from) = (self.device().worker()?, at.buffer.view(0, wanted)?);
        match self.device().pinned_at(bytes)? {
            None => worker.read(from, bytes)?,
            Some((block, offset)) => {
                worker.copy(block.view(offset, wanted)?, from)?;
                worker.synchronize(TIMEOUT)?;
            }
        }
        Ok(())
    }

    /// Waits until its elements are computed.
    ///
    /// # Errors
    /// What computing them fails with; [`Error::Deadline`].
    pub fn wait(&self, timeout: Duration) -> Result<()> {
        self.evaluate()?;
        Ok(self.device().worker()?.synchronize(timeout)?)
    }

    /// The only element.
    ///
    /// # Errors
    /// [`Error::Value`] if there are others or none.
    pub fn item(&self) -> Result<Number> {
        if self.size() != 1 {
            let what = "can only convert an array of size 1 to a scalar".to_owned();
            return Err(Error::Value { function: "item", what });
        }
        Ok(Number::from_bytes(self.dtype(), &self.to_bytes()?))
    }

    /// Memory with whatever was there.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::OutOfMemory`].
    pub fn empty(device: &Device, dtype: DType, shape: &[u64]) -> Result<Array> {
        layout::check("empty", shape)?;
        let buffer = device.allocate(layout::elements(shape) * dtype.bytes())?;
        Ok(Array::ready(device, dtype, shape.to_vec(), Storage::dense(buffer, shape)))
    }

    /// A number everywhere.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn full(device: &Device, dtype: DType, shape: &[u64], number: Number) -> Result<Array> {
        layout::check("full", shape)?;
        Array::lazy(device, dtype, shape.to_vec(), Expression::Number(number.bits(dtype)))
    }

    /// `start + step * i` for each index `i` along an axis, an `Int64`.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn indices(device: &Device, shape: &[u64], axis: usize, start: i64, step: i64) -> Result<Array> {
        layout::check("indices", shape)?;
        let steps = (0..shape.len()).map(|d| if d == axis { step } else { 0 }).collect();
        Array::lazy(device, DType::Int64, shape.to_vec(), Expression::Index(Affine { start, steps }))
    }

    /// `start`, `start + step`, …: `n` of them.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn arange(device: &Device, dtype: DType, start: Number, step: Number, n: u64) -> Result<Array> {
        let index = Array::indices(device, &[n], 0, 0, 1)?;
        let wide = if dtype.is_inexact() { dtype.promote(DType::Float64) } else { DType::Int64 };
        let of = |number: Number| Array::full(device, wide, &[], number);
        let scaled = index.cast(wide)?.binary(Binary::Multiply, &of(step)?)?;
        scaled.binary(Binary::Add, &of(start)?)?.cast(dtype)
    }

    /// In another type.
    ///
    /// # Errors
    /// [`Error::Type`] for a complex number as a real one, which would drop its imaginary part; those of what must be computed now, as with all
    /// functions of elements.
    pub fn cast(&self, dtype: DType) -> Result<Array> {
        if dtype == self.dtype() {
            return Ok(self.clone());
        }
        if self.dtype().is_complex() && !dtype.is_complex() && dtype != DType::Bool {
            let what = "a complex number has no real type: take its real or imaginary part first";
            return Err(Error::Type { function: "astype", dtype: self.dtype(), what });
        }
        Array::lazy(self.device(), dtype, self.shape().to_vec(), Expression::Cast(self.clone()))
    }

    /// A function of each element.
    ///
    /// # Errors
    /// [`Error::Type`].
    pub fn unary(&self, op: Unary) -> Result<Array> {
        let (from, to) = op.types(self.dtype())?;
        Array::lazy(self.device(), to, self.shape().to_vec(), Expression::Unary(op, self.cast(from)?))
    }

    /// A function of each two elements, of the type that both promote to.
    ///
    /// # Errors
    /// [`Error::Type`], [`Error::Shape`], [`Error::Devices`].
    pub fn binary(&self, op: Binary, other: &Array) -> Result<Array> {
        same(op.into(), self.device(), other.device())?;
        let (from, to) = op.types(self.dtype().promote(other.dtype()))?;
        if op.is_comparison()
            && from == DType::Float64
            && self.dtype().is_integer()
            && other.dtype().is_integer()
        {
            return self.compare_exactly(op, other);
        }
        let shape = layout::broadcast(op.into(), self.shape(), other.shape())?;
        let expression = Expression::Binary(op, self.cast(from)?, other.cast(from)?);
        Array::lazy(self.device(), to, shape, expression)
    }

    /// Compares signed with unsigned 64-bit integers, whose common type Float64 represents neither exactly.
    fn compare_exactly(&self, op: Binary, other: &Array) -> Result<Array> {
        if self.dtype().kind() == Kind::Unsigned {
            return other.compare_exactly(op.mirrored(), self);
        }
        let truth = |value| Array::full(self.device(), DType::Bool, &[], Number::Bool(value));
        let negative =
            self.binary(Binary::Less, &Array::full(self.device(), self.dtype(), &[], Number::Int(0))?)?;
        let less = matches!(op, Binary::Less | Binary::LessEqual | Binary::NotEqual);
        negative.select(&truth(less)?, &self.cast(DType::UInt64)?.binary(op, other)?)
    }

    /// Elements of `a` where this is true, or not 0, and of `b` elsewhere.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Devices`].
    pub fn select(&self, a: &Array, b: &Array) -> Result<Array> {
        same("where", self.device(), a.device())?;
        same("where", self.device(), b.device())?;
        let dtype = a.dtype().promote(b.dtype());
        let shape = layout::broadcast("where", a.shape(), b.shape())?;
        let shape = layout::broadcast("where", self.shape(), &shape)?;
        let expression = Expression::Select(self.cast(DType::Bool)?, a.cast(dtype)?, b.cast(dtype)?);
        Array::lazy(self.device(), dtype, shape, expression)
    }

    /// Complex numbers of their parts.
    ///
    /// # Errors
    /// [`Error::Type`] if they are no floats, [`Error::Shape`].
    pub fn complex(&self, imaginary: &Array) -> Result<Array> {
        same("complex", self.device(), imaginary.device())?;
        let part = self.dtype().promote(imaginary.dtype()).to_inexact();
        let (dtype, part) = (part.complex(), part.complex().real());
        let shape = layout::broadcast("complex", self.shape(), imaginary.shape())?;
        let expression = Expression::Complex(self.cast(part)?, imaginary.cast(part)?);
        Array::lazy(self.device(), dtype, shape, expression)
    }

    /// One number of the elements along axes; all of them where none is named.
    ///
    /// # Errors
    /// [`Error::Type`]; [`Error::Value`] for an axis that there is not, that is named twice, or that has no element where the function needs one.
    pub fn reduce(
        &self,
        op: Reduction,
        axes: Option<&[i64]>,
        keep: bool,
        dtype: Option<DType>,
    ) -> Result<Array> {
        let function: &'static str = op.into();
        let axes = self.axes(function, axes)?;
        let source = match dtype {
            Some(dtype) => self.cast(dtype)?,
            None => self.clone(),
        };
        let to = dtype.map_or_else(|| op.of(self.dtype()), |dtype| op.of(dtype).map(|_| dtype))?;
        let to = if matches!(op, Reduction::Any | Reduction::All) { DType::Bool } else { to };
        let count: u64 = axes.iter().map(|axis| self.shape()[*axis]).product();
        let kept = |(d, extent): (usize, &u64)| match axes.contains(&d) {
            true => keep.then_some(1),
            false => Some(*extent),
        };
        let shape: Vec<u64> = self.shape().iter().enumerate().filter_map(kept).collect();
        if count == 0 && layout::elements(&shape) != 0 {
            if !op.has_identity() {
                let what = "zero-size array to reduction operation which has no identity".to_owned();
                return Err(Error::Value { function, what });
            }
            let one = matches!(op, Reduction::Prod | Reduction::All);
            return Array::full(self.device(), to, &shape, Number::Int(one.into()));
        }
        if axes.is_empty() {
            return source.cast(to);
        }
        let source = source.cast(to)?;
        Array::lazy(self.device(), to, shape, Expression::Reduce { op, source, axes })
    }

    /// Axes counted from the front, in order.
    pub(crate) fn axes(&self, function: &'static str, axes: Option<&[i64]>) -> Result<Vec<usize>> {
        let Some(axes) = axes else { return Ok((0..self.ndim()).collect()) };
        let mut axes =
            axes.iter().map(|axis| layout::axis(function, *axis, self.ndim())).collect::<Result<Vec<_>>>()?;
        axes.sort_unstable();
        match axes.windows(2).any(|pair| pair[0] == pair[1]) {
            true => Err(Error::Value { function, what: "an axis is named twice".to_owned() }),
            false => Ok(axes),
        }
    }
}
