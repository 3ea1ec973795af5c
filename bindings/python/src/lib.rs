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

use std::io::{IsTerminal as _, Write as _, stderr};
use std::time::Duration;

use pyo3::prelude::*;

/// Says on a terminal what is compiled for long, on a line that is cleared at its end.
fn report(name: &str, since: Option<Duration>) {
    let mut out = stderr().lock();
    // A terminal that is gone ends no computation.
    let _ = match since {
        Some(since) => write!(out, "\r\x1b[Kvmaccel: compiling {name}: {} s", since.as_secs()),
        None => write!(out, "\r\x1b[K"),
    };
    let _ = out.flush();
}

#[pymodule]
fn _vmaccel(m: &Bound<'_, PyModule>) -> PyResult<()> {
    if stderr().is_terminal() && std::env::var_os("VMACCEL_PROGRESS").is_none_or(|value| value != "0") {
        vm_array::report_compilation(report);
    }
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
