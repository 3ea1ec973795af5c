//! Fourier transforms, by `rustfft` on the host's processor.

use rustfft::num_complex::Complex;
use rustfft::{FftDirection, FftNum, FftPlanner};

use crate::dtype::DType;
use crate::error::Result;
use crate::host::{self, Element};
use crate::layout;
use crate::node::Array;

impl Array {
    /// The discrete Fourier transform along an axis, or back, which is not divided by the number of elements.
    ///
    /// # Errors
    /// [`Error::Value`](crate::Error::Value) for an axis that there is not.
    pub fn fft(&self, axis: i64, inverse: bool) -> Result<Array> {
        let axis = layout::axis("fft", axis, self.ndim())? as i64;
        let last = self.ndim() as i64 - 1;
        let mut order: Vec<i64> = (0..self.ndim() as i64).collect();
        order.swap(axis as usize, last as usize);
        let rows = self.cast(self.dtype().to_inexact().complex())?.permute(&order)?;
        let direction = if inverse { FftDirection::Inverse } else { FftDirection::Forward };
        let result = match rows.dtype() {
            DType::Complex64 => transformed::<f32>(&rows, direction),
            _ => transformed::<f64>(&rows, direction),
        };
        result?.permute(&order)
    }
}

fn transformed<T: FftNum + Element>(rows: &Array, direction: FftDirection) -> Result<Array> {
    let mut elements = host::elements::<Complex<T>>(rows)?;
    let n = rows.shape().last().map_or(0, |n| *n as usize);
    if n != 0 {
        FftPlanner::new().plan_fft(n, direction).process(&mut elements);
    }
    host::array(rows.device(), rows.dtype(), rows.shape(), elements)
}
