//! Functions that make arrays, or take several.

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use vm_array::{Array, Binary, Number, Passed, Slice, call_by_name};

use crate::array::{PyArray, done};
use crate::convert;
use crate::device;
use crate::error::raised;

type Object<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// An array of the bytes of an object with Python's buffer protocol, read in order.
#[pyfunction]
#[pyo3(signature = (data, dtype, shape, device=None))]
fn from_buffer(
    py: Python<'_>,
    data: &Bound<'_, PyAny>,
    dtype: &str,
    shape: &Bound<'_, PyAny>,
    device: Object<'_, '_>,
) -> PyResult<PyArray> {
    let (device, dtype, shape) = (device::of(py, device)?, convert::dtype(dtype)?, convert::shape(shape)?);
    let bytes = py.import("builtins")?.call_method1("bytes", (data,))?;
    let bytes: &[u8] = bytes.extract()?;
    done(py.detach(|| Array::from_bytes(&device, dtype, &shape, bytes)))
}

/// An array of nested sequences.
#[pyfunction]
#[pyo3(signature = (data, dtype=None, device=None))]
fn from_sequence(
    py: Python<'_>,
    data: &Bound<'_, PyAny>,
    dtype: Option<&str>,
    device: Object<'_, '_>,
) -> PyResult<PyArray> {
    let device = device::of(py, device)?;
    convert::nested(&device, data, dtype.map(convert::dtype).transpose()?).map(PyArray::new)
}

#[pyfunction]
#[pyo3(signature = (shape, dtype, device=None))]
fn empty(py: Python<'_>, shape: &Bound<'_, PyAny>, dtype: &str, device: Object<'_, '_>) -> PyResult<PyArray> {
    done(Array::empty(&device::of(py, device)?, convert::dtype(dtype)?, &convert::shape(shape)?))
}

#[pyfunction]
#[pyo3(signature = (shape, value, dtype, device=None))]
fn full(
    py: Python<'_>,
    shape: &Bound<'_, PyAny>,
    value: &Bound<'_, PyAny>,
    dtype: &str,
    device: Object<'_, '_>,
) -> PyResult<PyArray> {
    let (device, dtype) = (device::of(py, device)?, convert::dtype(dtype)?);
    let number = convert::number(value)?
        .ok_or_else(|| pyo3::exceptions::PyTypeError::new_err("a fill value is a number"))?;
    convert::fits(number, dtype)?;
    done(Array::full(&device, dtype, &convert::shape(shape)?, number))
}

#[pyfunction]
#[pyo3(signature = (start, step, n, dtype, device=None))]
fn arange(
    py: Python<'_>,
    start: &Bound<'_, PyAny>,
    step: &Bound<'_, PyAny>,
    n: u64,
    dtype: &str,
    device: Object<'_, '_>,
) -> PyResult<PyArray> {
    let of = |value| Ok::<_, PyErr>(convert::number(value)?.unwrap_or(Number::Int(0)));
    done(Array::arange(&device::of(py, device)?, convert::dtype(dtype)?, of(start)?, of(step)?, n))
}

/// The index along an axis, for each element of a shape.
#[pyfunction]
#[pyo3(signature = (shape, axis, device=None))]
fn indices(
    py: Python<'_>,
    shape: &Bound<'_, PyAny>,
    axis: usize,
    device: Object<'_, '_>,
) -> PyResult<PyArray> {
    done(Array::indices(&device::of(py, device)?, &convert::shape(shape)?, axis, 0, 1))
}

#[pyfunction]
fn binary(op: &str, a: &Bound<'_, PyAny>, b: &Bound<'_, PyAny>) -> PyResult<PyArray> {
    let op: Binary = op
        .parse()
        .map_err(|_| pyo3::exceptions::PyValueError::new_err(format!("there is no function {op}")))?;
    let none = || pyo3::exceptions::PyTypeError::new_err("operands are arrays, or one of them is a number");
    match (a.cast::<PyArray>(), b.cast::<PyArray>()) {
        (Ok(a), _) => {
            let a = a.get().array();
            if op == Binary::Pow {
                crate::array::no_whole_power(&a, b)?;
            }
            crate::array::combined(op, &a, b, false)?.map(PyArray::new).ok_or_else(none)
        }
        (_, Ok(b)) => {
            let b = b.get().array();
            crate::array::combined(op, &b, a, true)?.map(PyArray::new).ok_or_else(none)
        }
        _ => Err(none()),
    }
}

#[pyfunction]
fn select(which: &Bound<'_, PyArray>, a: &Bound<'_, PyAny>, b: &Bound<'_, PyAny>) -> PyResult<PyArray> {
    let none =
        || pyo3::exceptions::PyTypeError::new_err("where chooses among arrays, or an array and a number");
    let which = which.get().array();
    let (a, b) = match (a.cast::<PyArray>(), b.cast::<PyArray>()) {
        (Ok(a), _) => {
            let a = a.get().array();
            let b = crate::array::operand(&a, b)?.ok_or_else(none)?;
            (a, b)
        }
        (_, Ok(b)) => {
            let b = b.get().array();
            (crate::array::operand(&b, a)?.ok_or_else(none)?, b)
        }
        _ => {
            let scalar = |value: &Bound<'_, PyAny>| {
                let (number, own) = convert::scalar(value)?.ok_or_else(none)?;
                Ok::<_, PyErr>((number, own.unwrap_or_else(|| convert::type_of(number))))
            };
            let ((a, of_a), (b, of_b)) = (scalar(a)?, scalar(b)?);
            let dtype = of_a.promote(of_b);
            let full = |number| Array::full(which.device(), dtype, &[], number).map_err(raised);
            (full(a)?, full(b)?)
        }
    };
    done(which.select(&a, &b))
}

#[pyfunction]
fn complex(re: &Bound<'_, PyArray>, im: &Bound<'_, PyArray>) -> PyResult<PyArray> {
    done(re.get().array().complex(&im.get().array()))
}

#[pyfunction]
fn concatenate(py: Python<'_>, arrays: Vec<Py<PyArray>>, axis: i64) -> PyResult<PyArray> {
    let arrays: Vec<Array> = arrays.iter().map(|array| array.get().array()).collect();
    done(py.detach(|| Array::concatenate(&arrays, axis)))
}

/// Elements of a flat array at places.
#[pyfunction]
fn gather(array: &Bound<'_, PyArray>, places: &Bound<'_, PyArray>) -> PyResult<PyArray> {
    done(array.get().array().gather(&places.get().array()))
}

/// The array with values at places of its elements, counted one behind the other.
#[pyfunction]
fn scatter(
    py: Python<'_>,
    array: &Bound<'_, PyArray>,
    places: &Bound<'_, PyArray>,
    values: &Bound<'_, PyArray>,
) -> PyResult<PyArray> {
    let (array, places, values) = (array.get().array(), places.get().array(), values.get().array());
    done(py.detach(|| array.scatter(&places, &values)))
}

/// The elements along an axis in order, and where they were.
#[pyfunction]
fn sort(
    py: Python<'_>,
    array: &Bound<'_, PyArray>,
    axis: i64,
    descending: bool,
) -> PyResult<(PyArray, PyArray)> {
    let array = array.get().array();
    let (values, places) = py.detach(|| array.sort(axis, descending)).map_err(raised)?;
    Ok((PyArray::new(values), PyArray::new(places)))
}

/// The elements along an axis in order alone.
#[pyfunction]
fn sorted(py: Python<'_>, array: &Bound<'_, PyArray>, axis: i64, descending: bool) -> PyResult<PyArray> {
    let array = array.get().array();
    done(py.detach(|| array.sorted(axis, descending)))
}

#[pyfunction]
#[pyo3(signature = (array, op, axis, dtype=None))]
fn scan(
    py: Python<'_>,
    array: &Bound<'_, PyArray>,
    op: &str,
    axis: i64,
    dtype: Option<&str>,
) -> PyResult<PyArray> {
    let op =
        op.parse().map_err(|_| pyo3::exceptions::PyValueError::new_err(format!("there is no scan {op}")))?;
    let (array, dtype) = (array.get().array(), dtype.map(convert::dtype).transpose()?);
    done(py.detach(|| array.scan(op, axis, dtype)))
}

#[pyfunction]
fn search_sorted(
    py: Python<'_>,
    sorted: &Bound<'_, PyArray>,
    values: &Bound<'_, PyArray>,
    right: bool,
) -> PyResult<PyArray> {
    let (sorted, values) = (sorted.get().array(), values.get().array());
    done(py.detach(|| sorted.search_sorted(&values, right)))
}

/// The places of elements that are not 0, counted one behind the other.
#[pyfunction]
fn nonzero(py: Python<'_>, array: &Bound<'_, PyArray>) -> PyResult<PyArray> {
    let array = array.get().array();
    done(py.detach(|| array.nonzero()))
}

#[pyfunction]
#[pyo3(signature = (q, k, v, causal, scale))]
fn attention(
    py: Python<'_>,
    q: &Bound<'_, PyArray>,
    k: &Bound<'_, PyArray>,
    v: &Bound<'_, PyArray>,
    causal: bool,
    scale: Option<f32>,
) -> PyResult<PyArray> {
    let (q, k, v) = (q.get().array(), k.get().array(), v.get().array());
    done(py.detach(|| q.attention(&k, &v, causal, scale)))
}

/// What the function of a name of the kernel library gives: an array, or a tuple of them.
#[pyfunction]
#[pyo3(signature = (function, *passed))]
fn run_kernel<'py>(
    py: Python<'py>,
    function: &str,
    passed: &Bound<'py, PyTuple>,
) -> PyResult<Bound<'py, PyAny>> {
    let one = |value: Bound<'py, PyAny>| {
        if value.is_none() {
            return Ok(Passed::Nothing);
        }
        if let Ok(array) = value.cast::<PyArray>() {
            return Ok(Passed::Array(array.get().array()));
        }
        match convert::number(&value) {
            Ok(Some(number)) => Ok(Passed::Number(number)),
            Ok(None) => Ok(Passed::Other(format!("a {}", value.get_type().name()?))),
            Err(error) if error.is_instance_of::<PyOverflowError>(py) => {
                Ok(Passed::Other("an int of more than 128 bits".into()))
            }
            Err(error) => Err(error),
        }
    };
    let passed = passed.iter().map(one).collect::<PyResult<Vec<Passed>>>()?;
    let made = py.detach(|| call_by_name(function, &passed)).map_err(raised)?;
    let made = made.into_iter().map(|array| Bound::new(py, PyArray::new(array)));
    match <[_; 1]>::try_from(made.collect::<PyResult<Vec<_>>>()?) {
        Ok([only]) => Ok(only.into_any()),
        Err(made) => Ok(PyTuple::new(py, made)?.into_any()),
    }
}

/// The type that two promote to.
#[pyfunction]
fn promote(a: &str, b: &str) -> PyResult<String> {
    Ok(convert::dtype(a)?.promote(convert::dtype(b)?).to_string())
}

/// Every other element of each axis, backwards: what `flip` is.
#[pyfunction]
fn flip(array: &Bound<'_, PyArray>, axes: Option<Vec<i64>>) -> PyResult<PyArray> {
    let array = array.get().array();
    let rank = array.ndim() as i64;
    let is = |d: i64| axes.as_ref().is_none_or(|axes| axes.contains(&d) || axes.contains(&(d - rank)));
    let slice = |(d, n): (usize, &u64)| {
        let back = is(d as i64);
        Slice::of(None, None, Some(if back { -1 } else { 1 }), *n)
    };
    let slices =
        array.shape().iter().enumerate().map(slice).collect::<vm_array::Result<Vec<_>>>().map_err(raised)?;
    done(array.slice(&slices))
}

pub(crate) fn add(m: &Bound<'_, PyModule>) -> PyResult<()> {
    macro_rules! functions {
        ($($name:ident)+) => { $( m.add_function(wrap_pyfunction!($name, m)?)?; )+ };
    }
    functions! {
        from_buffer from_sequence empty full arange indices binary select complex concatenate gather scatter sort sorted scan search_sorted
        nonzero attention run_kernel promote flip
    }
    Ok(())
}
