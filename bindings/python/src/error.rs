//! Errors as Python's exceptions.

use pyo3::exceptions::{
    PyIndexError, PyMemoryError, PyRuntimeError, PyTimeoutError, PyTypeError, PyValueError,
};
use pyo3::{PyErr, create_exception};
use vm_array::Error;

create_exception!(vmaccel, DeviceError, PyRuntimeError, "A kernel was not compiled, or not run.");
create_exception!(vmaccel, DeviceLostError, DeviceError, "The device, or its context, is lost.");
create_exception!(
    vmaccel.linalg,
    LinAlgError,
    PyValueError,
    "A matrix has no such decomposition or inverse."
);

/// The exception of an error.
pub(crate) fn raised(error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Shape { .. } | Error::Value { .. } => PyValueError::new_err(text),
        Error::Type { .. } | Error::Argument { .. } => PyTypeError::new_err(text),
        Error::Index { .. } => PyIndexError::new_err(text),
        Error::Matrix { .. } => LinAlgError::new_err(text),
        Error::Devices { .. } => PyValueError::new_err(text),
        Error::OutOfMemory(_) => PyMemoryError::new_err(text),
        Error::Lost(_) => DeviceLostError::new_err(text),
        Error::Deadline(_) => PyTimeoutError::new_err(text),
        _ => DeviceError::new_err(text),
    }
}
