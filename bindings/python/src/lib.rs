//! The extension module of the Python package `vmaccel`: arrays, devices, random numbers. What is written in Python stands in `vmaccel/`.

#![allow(unsafe_op_in_unsafe_fn, reason = "PyO3's macros write such functions")]

mod array;
mod convert;
mod device;
mod error;
mod functions;
mod interchange;
mod kernel;
mod linalg;
mod random;
mod sys;

use pyo3::prelude::*;

#[pymodule]
fn _vmaccel(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add("DeviceLostError", m.py().get_type::<error::DeviceLostError>())?;
    m.add("LinAlgError", m.py().get_type::<error::LinAlgError>())?;
    m.add("DeviceError", m.py().get_type::<error::DeviceError>())?;
    m.add_class::<array::PyArray>()?;
    m.add_class::<device::PyDevice>()?;
    m.add_class::<kernel::PyKernel>()?;
    m.add_class::<random::PyGenerator>()?;
    functions::add(m)?;
    linalg::add(m)?;
    interchange::add(m)?;
    device::add(m)
}
