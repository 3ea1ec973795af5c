//! Decompositions and Fourier transforms, without the GIL.

use pyo3::prelude::*;

use crate::array::{PyArray, done};
use crate::error::raised;

type Pair = (PyArray, PyArray);

fn pair(made: vm_array::Result<(vm_array::Array, vm_array::Array)>) -> PyResult<Pair> {
    let (a, b) = made.map_err(raised)?;
    Ok((PyArray::new(a), PyArray::new(b)))
}

#[pyfunction]
fn cholesky(py: Python<'_>, x: &Bound<'_, PyArray>, upper: bool) -> PyResult<PyArray> {
    let x = x.get().array();
    done(py.detach(|| x.cholesky(upper)))
}

#[pyfunction]
fn qr(py: Python<'_>, x: &Bound<'_, PyArray>, complete: bool) -> PyResult<Pair> {
    let x = x.get().array();
    pair(py.detach(|| x.qr(complete)))
}

#[pyfunction]
fn svd(py: Python<'_>, x: &Bound<'_, PyArray>, full: bool) -> PyResult<(PyArray, PyArray, PyArray)> {
    let x = x.get().array();
    let (u, s, v) = py.detach(|| x.svd(full)).map_err(raised)?;
    Ok((PyArray::new(u), PyArray::new(s), PyArray::new(v)))
}

#[pyfunction]
fn eigh(py: Python<'_>, x: &Bound<'_, PyArray>) -> PyResult<Pair> {
    let x = x.get().array();
    pair(py.detach(|| x.eigh()))
}

#[pyfunction]
fn inv(py: Python<'_>, x: &Bound<'_, PyArray>) -> PyResult<PyArray> {
    let x = x.get().array();
    done(py.detach(|| x.inv()))
}

#[pyfunction]
fn solve(py: Python<'_>, a: &Bound<'_, PyArray>, b: &Bound<'_, PyArray>) -> PyResult<PyArray> {
    let (a, b) = (a.get().array(), b.get().array());
    done(py.detach(|| a.solve(&b)))
}

#[pyfunction]
fn slogdet(py: Python<'_>, x: &Bound<'_, PyArray>) -> PyResult<Pair> {
    let x = x.get().array();
    pair(py.detach(|| x.slogdet()))
}

#[pyfunction]
fn fft(py: Python<'_>, x: &Bound<'_, PyArray>, axis: i64, inverse: bool) -> PyResult<PyArray> {
    let x = x.get().array();
    done(py.detach(|| x.fft(axis, inverse)))
}

pub(crate) fn add(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(cholesky, m)?)?;
    m.add_function(wrap_pyfunction!(qr, m)?)?;
    m.add_function(wrap_pyfunction!(svd, m)?)?;
    m.add_function(wrap_pyfunction!(eigh, m)?)?;
    m.add_function(wrap_pyfunction!(inv, m)?)?;
    m.add_function(wrap_pyfunction!(solve, m)?)?;
    m.add_function(wrap_pyfunction!(slogdet, m)?)?;
    m.add_function(wrap_pyfunction!(fft, m)?)
}
