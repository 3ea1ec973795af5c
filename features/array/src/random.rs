//! Random numbers: of a counter, so that a seed gives the same ones on every device (Salmon et al. 2011).

use crate::device::Device;
use crate::dtype::DType;
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

    /// Numbers in [0, 1), each of the same chance.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape).
    pub fn uniform(&mut self, shape: &[u64], dtype: DType) -> Result<Array> {
        let (counter, key) = self.next(shape)?;
        let of = if dtype == DType::Float64 { dtype } else { DType::Float32 };
        Array::lazy(&self.device, of, shape.to_vec(), Expression::Uniform(counter, key))?.cast(dtype)
    }

    /// Of the normal distribution with mean 0 and variance 1 (Box and Muller 1958).
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape).
    pub fn normal(&mut self, shape: &[u64], dtype: DType) -> Result<Array> {
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
        let (counter, key) = self.next(shape)?;
        let bits = Array::lazy(&self.device, DType::UInt64, shape.to_vec(), Expression::Bits(counter, key))?;
        let range = i128::from(high) - i128::from(low);
        let range = self.number(DType::UInt64, Number::Int(range))?;
        let rest = bits.binary(Binary::Remainder, &range)?.cast(DType::Int64)?;
        rest.binary(Binary::Add, &self.number(DType::Int64, Number::Int(low.into()))?)?.cast(dtype)
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
