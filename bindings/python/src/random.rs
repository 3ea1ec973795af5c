//! Random numbers.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use vm_array::{Array, Generator};

use crate::array::PyArray;
use crate::error::raised;
use crate::{convert, device};

/// A stream of random numbers of a counter and a key (Philox4x32-10): a seed gives the same ones on every device.
#[pyclass(name = "Generator", module = "vmaccel.random", frozen)]
pub(crate) struct PyGenerator(Mutex<Generator>);

impl PyGenerator {
    fn draw(&self, f: impl FnOnce(&mut Generator) -> vm_array::Result<Array>) -> PyResult<PyArray> {
        let mut generator = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        f(&mut generator).map(PyArray::new).map_err(raised)
    }
}

#[pymethods]
impl PyGenerator {
    #[new]
    #[pyo3(signature = (seed=None, *, device=None))]
    fn new(py: Python<'_>, seed: Option<u64>, device: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let seed = match seed {
            Some(seed) => seed,
            None => {
                let bytes: Vec<u8> = py.import("os")?.call_method1("urandom", (8,))?.extract()?;
                bytes.iter().fold(0, |seed, byte| seed << 8 | u64::from(*byte))
            }
        };
        Ok(Self(Mutex::new(Generator::new(&device::of(py, device)?, seed))))
    }

    /// Numbers in [0, 1).
    #[pyo3(signature = (size=None, dtype="float64"))]
    fn random(&self, size: Option<&Bound<'_, PyAny>>, dtype: &str) -> PyResult<PyArray> {
        let (shape, dtype) = (size.map_or(Ok(Vec::new()), convert::shape)?, convert::dtype(dtype)?);
        self.draw(|generator| generator.uniform(&shape, dtype))
    }

    /// Of the normal distribution with mean 0 and variance 1.
    #[pyo3(signature = (size=None, dtype="float64"))]
    fn standard_normal(&self, size: Option<&Bound<'_, PyAny>>, dtype: &str) -> PyResult<PyArray> {
        let (shape, dtype) = (size.map_or(Ok(Vec::new()), convert::shape)?, convert::dtype(dtype)?);
        self.draw(|generator| generator.normal(&shape, dtype))
    }

    /// Integers from `low` to below `high`; from 0 to below `low` where that is all.
    #[pyo3(signature = (low, high=None, size=None, dtype="int64"))]
    fn integers(
        &self,
        low: i64,
        high: Option<i64>,
        size: Option<&Bound<'_, PyAny>>,
        dtype: &str,
    ) -> PyResult<PyArray> {
        let (low, high) = high.map_or((0, low), |high| (low, high));
        let (shape, dtype) = (size.map_or(Ok(Vec::new()), convert::shape)?, convert::dtype(dtype)?);
        self.draw(|generator| generator.integers(low, high, &shape, dtype))
    }

    /// The integers below `n` in random order.
    fn permutation(&self, py: Python<'_>, n: u64) -> PyResult<PyArray> {
        py.detach(|| self.draw(|generator| generator.permutation(n)))
    }
}
