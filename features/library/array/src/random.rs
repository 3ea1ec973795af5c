//! Random numbers: of a counter, so that a seed gives the same ones on every device (Salmon et al. 2011).

use crate::device::Device;
use crate::dtype::{DType, Kind};
use crate::error::Result;
use crate::layout::{self, Affine};
use crate::node::{Array, Expression};
use crate::op::{Binary, Unary};
use crate::{Number, TIMEOUT};

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Generator {
    device: Device,
    key: u64,
    /// How many numbers it has given.
    counter: u64,
}

impl Generator {
    /// The stream of a seed.
    pub fn new(device: &Device, seed: u64) -> Self {
        Self { device: device.clone(), key: seed, counter: 0 }
    }

    /// Counters of the next numbers of a shape, and the key.
    fn next(&mut self, shape: &[u64]) -> Result<(Array, Array)> {
        layout::check("random", shape)?;
        let index = Affine { start: self.counter.cast_signed(), steps: layout::dense(shape) };
        self.counter = self.counter.wrapping_add(layout::elements(shape));
        let counter = Array::lazy(&self.device, DType::Int64, shape.to_vec(), Expression::Index(index))?;
        Ok((counter, self.number(DType::Int64, Number::Int(self.key.into()))?))
    }

    fn number(&self, dtype: DType, number: Number) -> Result<Array> {
        Array::full(&self.device, dtype, &[], number)
    }

    fn bits(&mut self, shape: &[u64]) -> Result<Array> {
        let (counter, key) = self.next(shape)?;
        Array::lazy(&self.device, DType::UInt64, shape.to_vec(), Expression::Bits(counter, key))
    }

    /// Numbers in [0, 1), each of the same chance.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape).
    pub fn uniform(&mut self, shape: &[u64], dtype: DType) -> Result<Array> {
        if dtype.kind() != Kind::Float {
            return Err(crate::Error::Type { function: "random", dtype, what: "they are of a float's type" });
        }
        let (counter, key) = self.next(shape)?;
        Array::lazy(&self.device, dtype, shape.to_vec(), Expression::Uniform(counter, key))
    }

    /// Of the normal distribution with mean 0 and variance 1 (Box and Muller 1958).
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape).
    pub fn normal(&mut self, shape: &[u64], dtype: DType) -> Result<Array> {
        if dtype.kind() != Kind::Float {
            return Err(crate::Error::Type { function: "normal", dtype, what: "they are of a float's type" });
        }
        let of = if dtype == DType::Float64 { dtype } else { DType::Float32 };
        let (radius, angle) = (self.uniform(shape, of)?, self.uniform(shape, of)?);
        let number = |value| self.number(of, Number::Float(value));
        let radius = number(1.0)?.binary(Binary::Subtract, &radius)?.unary(Unary::Log)?;
        let radius = radius.binary(Binary::Multiply, &number(-2.0)?)?.unary(Unary::Sqrt)?;
        let angle = angle.binary(Binary::Multiply, &number(std::f64::consts::TAU)?)?.unary(Unary::Cos)?;
        radius.binary(Binary::Multiply, &angle)?.cast(dtype)
    }

    /// Integers in `low..high`.
    ///
    /// # Errors
    /// [`Error::Value`](crate::Error::Value) for a range without numbers.
    pub fn integers(&mut self, low: i64, high: i64, shape: &[u64], dtype: DType) -> Result<Array> {
        if low >= high {
            let what = format!("low >= high: there is no integer from {low} to below {high}");
            return Err(crate::Error::Value { function: "integers", what });
        }
        if !dtype.is_integer() {
            return Err(crate::Error::Type {
                function: "integers",
                dtype,
                what: "they are of an integer type",
            });
        }
        let bits = 8 * dtype.bytes() as u32 - u32::from(dtype.kind() == Kind::Signed);
        let least = if dtype.kind() == Kind::Signed { -(1i128 << bits) } else { 0 };
        if i128::from(low) < least || i128::from(high) > 1i128 << bits {
            let what = format!("integers from {low} to below {high} are not all of {dtype}");
            return Err(crate::Error::Value { function: "integers", what });
        }
        let range = i128::from(high) - i128::from(low);
        let range = self.number(DType::UInt64, Number::Int(range))?;
        // The whole part of 128 random bits, as a number below 1, times the range: no integer's chance differs by more than 2⁻⁶⁴.
        let (high, less) = (self.bits(shape)?, self.bits(shape)?);
        let low_part = range.binary(Binary::Multiply, &high)?;
        let carry =
            low_part.binary(Binary::Add, &high_part(&range, &less)?)?.binary(Binary::Less, &low_part)?;
        let whole = high_part(&range, &high)?.binary(Binary::Add, &carry.cast(DType::UInt64)?)?;
        let low = self.number(DType::Int64, Number::Int(low.into()))?;
        whole.cast(DType::Int64)?.binary(Binary::Add, &low)?.cast(dtype)
    }

    /// The integers below `n` in random order.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape).
    pub fn permutation(&mut self, n: u64) -> Result<Array> {
        let order = self.uniform(&[n], DType::Float64)?.sort(0, false)?.1;
        order.wait(TIMEOUT)?;
        Ok(order)
    }
}

/// The upper 64 bits of a product of 64-bit integers, of their halves' products.
fn high_part(a: &Array, b: &Array) -> Result<Array> {
    let number = |value: i128| Array::full(a.device(), DType::UInt64, &[], Number::Int(value));
    let (mask, half) = (number(u32::MAX.into())?, number(32)?);
    let low = |x: &Array| x.binary(Binary::BitwiseAnd, &mask);
    let high = |x: &Array| x.binary(Binary::BitwiseRightShift, &half);
    let product = |x: &Array, y: &Array| x.binary(Binary::Multiply, y);
    let sum = |x: &Array, y: &Array| x.binary(Binary::Add, y);
    let ([a0, a1], [b0, b1]) = ([low(a)?, high(a)?], [low(b)?, high(b)?]);
    let middle = sum(&product(&a1, &b0)?, &high(&product(&a0, &b0)?)?)?;
    let other = sum(&product(&a0, &b1)?, &low(&middle)?)?;
    sum(&sum(&product(&a1, &b1)?, &high(&middle)?)?, &high(&other)?)
}
