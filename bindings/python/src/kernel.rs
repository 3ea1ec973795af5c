//! Kernels that `vmaccel/_kernel.py` wrote in the text of the IR.

use std::sync::{MutexGuard, PoisonError};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use vm_array::{Array, DType, Error, Given, Kernel, Kind, Number};

use crate::array::PyArray;
use crate::convert;
use crate::device::{self, PyDevice};
use crate::error::raised;

/// A kernel of the IR.
#[pyclass(name = "Kernel", module = "vmaccel._vmaccel", frozen)]
pub(crate) struct PyKernel(Kernel);

/// An argument, as it is held for a launch.
enum Held<'a> {
    Read(Array),
    Write(MutexGuard<'a, Array>),
    Update(MutexGuard<'a, Array>),
    Number(Number, DType),
}

#[pymethods]
impl PyKernel {
    /// The kernel of a text; `ValueError` with lines and what is wrong on each.
    #[new]
    fn new(text: &str) -> PyResult<Self> {
        match Kernel::parse(text) {
            Ok(kernel) => Ok(Self(kernel)),
            Err(Error::Kernel(faults)) => {
                let faults: Vec<(u32, String)> =
                    faults.into_iter().map(|fault| (fault.line, fault.what)).collect();
                Err(PyValueError::new_err(faults))
            }
            Err(other) => Err(raised(other)),
        }
    }

    /// The text as it is printed.
    #[getter]
    fn text(&self) -> &str {
        self.0.text()
    }

    /// Compiles it for a device, if that was not done yet.
    #[pyo3(signature = (device=None))]
    fn compile(&self, py: Python<'_>, device: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let device = device::of(py, device)?;
        py.detach(|| self.0.compile(&device)).map_err(raised)
    }

    /// Launches so many blocks with arguments: for each `read`, `write` or `readwrite` and an array, or a type's name and a number.
    fn launch(
        &self,
        py: Python<'_>,
        device: &Bound<'_, PyDevice>,
        blocks: [u32; 3],
        arguments: Vec<(String, Bound<'_, PyAny>)>,
    ) -> PyResult<()> {
        let device = &device.get().0;
        // All that may take long comes first, without the interpreter's lock.
        let arrays =
            arguments.iter().filter_map(|(_, value)| Some(value.cast::<PyArray>().ok()?.get().array()));
        let arrays: Vec<Array> = arrays.collect();
        py.detach(move || {
            self.0.compile(device)?;
            arrays.iter().try_for_each(Array::evaluate)
        })
        .map_err(raised)?;
        let is_written = |how: &str| matches!(how, "write" | "readwrite");
        // What is read is taken before what is written is locked: one array may be both, and is then read as it was.
        let mut held = Vec::with_capacity(arguments.len());
        for (how, value) in &arguments {
            held.push(match (how.as_str(), value.cast::<PyArray>()) {
                (how, Ok(_)) if is_written(how) => None,
                ("read", Ok(array)) => Some(Held::Read(array.get().array())),
                (dtype, Err(_)) => {
                    let number = convert::number(value)?
                        .ok_or_else(|| PyTypeError::new_err(format!("{dtype} takes a number")))?;
                    let dtype = convert::dtype(dtype)?;
                    if number.kind() > dtype.kind().max(Kind::Signed) {
                        return Err(PyTypeError::new_err(format!("a parameter of {dtype} takes no {value}")));
                    }
                    convert::fits(number, dtype)?;
                    Some(Held::Number(number, dtype))
                }
                (dtype, Ok(_)) => return Err(PyTypeError::new_err(format!("{dtype} takes a number"))),
            });
        }
        let written: Vec<*mut pyo3::ffi::PyObject> =
            arguments.iter().filter(|(how, _)| is_written(how)).map(|(_, value)| value.as_ptr()).collect();
        if (1..written.len()).any(|at| written[..at].contains(&written[at])) {
            return Err(PyValueError::new_err("an array is written by two parameters"));
        }
        // With the interpreter's lock, under which nothing waits for another's array: the launch itself waits for nothing.
        for (slot, (how, value)) in held.iter_mut().zip(&arguments) {
            if let (None, Ok(array)) = (&slot, value.cast::<PyArray>()) {
                let locked = array.get().0.lock().unwrap_or_else(PoisonError::into_inner);
                *slot = Some(if how == "write" { Held::Write(locked) } else { Held::Update(locked) });
            }
        }
        let given = held.iter_mut().flatten().map(|held| match held {
            Held::Read(array) => Given::Read(array),
            Held::Write(array) => Given::Write(array),
            Held::Update(array) => Given::Update(array),
            Held::Number(number, dtype) => Given::Number(*number, *dtype),
        });
        self.0.launch(device, blocks, given.collect()).map_err(raised)
    }
}
