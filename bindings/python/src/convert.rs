//! Between Python's numbers and sequences and arrays'.

use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyComplex, PyFloat, PyInt, PyList, PySequence, PyTuple};
use vm_array::{Array, DType, Device, Kind, Number};

use crate::array::PyArray;
use crate::error::raised;

/// A type by its name.
pub(crate) fn dtype(name: &str) -> PyResult<DType> {
    name.parse().map_err(|_| PyTypeError::new_err(format!("data type {name:?} not understood")))
}

/// A number that Python has; none for anything else.
pub(crate) fn number(value: &Bound<'_, PyAny>) -> PyResult<Option<Number>> {
    if let Ok(value) = value.cast::<PyBool>() {
        return Ok(Some(Number::Bool(value.is_true())));
    }
    if let Ok(value) = value.cast::<PyFloat>() {
        return Ok(Some(Number::Float(value.value())));
    }
    if value.cast::<PyInt>().is_ok() {
        return match value.extract::<i128>() {
            Ok(value) => Ok(Some(Number::Int(value))),
            Err(_) => Err(PyOverflowError::new_err("Python integer is out of bounds for all types")),
        };
    }
    // A scalar of numpy's is a number as Python's are; its own floats and complex numbers are both.
    if value.hasattr("__array_interface__")? && value.hasattr("item")? && value.getattr("shape")?.len()? == 0
    {
        let item = value.call_method0("item")?;
        return if item.hasattr("__array_interface__")? { Ok(None) } else { number(&item) };
    }
    if value.cast::<PyComplex>().is_ok() {
        let [re, im] =
            ["real", "imag"].map(|part| value.getattr(part).and_then(|part| part.extract::<f64>()));
        return Ok(Some(Number::Complex(re?, im?)));
    }
    Ok(None)
}

/// A number of Python's or a scalar of numpy's, and the type that the latter has: numpy's scalars are not weak.
pub(crate) fn scalar(value: &Bound<'_, PyAny>) -> PyResult<Option<(Number, Option<DType>)>> {
    let Some(number) = number(value)? else { return Ok(None) };
    let plain = value.is_exact_instance_of::<PyFloat>()
        || value.is_exact_instance_of::<PyInt>()
        || !value.hasattr("__array_interface__")?;
    let own = match plain {
        true => None,
        false => value.getattr("dtype")?.getattr("name")?.extract::<String>()?.parse().ok(),
    };
    Ok(Some((number, own)))
}

/// The type of a number that no array is beside.
pub(crate) fn type_of(number: Number) -> DType {
    match number {
        Number::Bool(_) => DType::Bool,
        Number::Int(value) if i64::try_from(value).is_err() && u64::try_from(value).is_ok() => DType::UInt64,
        Number::Int(_) => DType::Int64,
        Number::Float(_) => DType::Float64,
        Number::Complex(..) => DType::Complex128,
    }
}

/// The type that a number takes beside an array: its own kind is weak.
pub(crate) fn beside(number: Number, array: DType) -> PyResult<DType> {
    let dtype = match (number, array.kind()) {
        (Number::Bool(_), _) => array,
        (Number::Int(_), Kind::Bool) => DType::Int64,
        (Number::Int(_), _) => array,
        (Number::Float(_), Kind::Float | Kind::Complex) => array,
        (Number::Float(_), _) => DType::Float64,
        (Number::Complex(..), Kind::Complex) => array,
        (Number::Complex(..), Kind::Float) => array.complex(),
        (Number::Complex(..), _) => DType::Complex128,
    };
    fits(number, dtype)?;
    Ok(dtype)
}

/// Checks that a type has a number: that an integer's range has it, and that it is not complex where the type is real.
pub(crate) fn fits(number: Number, dtype: DType) -> PyResult<()> {
    let bits = 8 * dtype.bytes() as u32;
    let range = match dtype.kind() {
        Kind::Signed => -(1i128 << (bits - 1))..1i128 << (bits - 1),
        Kind::Unsigned => 0..1i128 << bits,
        Kind::Float if number.kind() == Kind::Complex => 0..0,
        _ => return Ok(()),
    };
    let beyond = |value: String| Err(PyOverflowError::new_err(format!("{value} out of bounds for {dtype}")));
    match number {
        Number::Complex(..) => {
            Err(PyTypeError::new_err(format!("cannot convert a complex number to {dtype}")))
        }
        Number::Float(value) if !value.is_finite() => Err(PyValueError::new_err(format!(
            "cannot convert {value} to {dtype}, which has finite numbers only"
        ))),
        Number::Float(value) if !range.contains(&(value as i128)) => beyond(format!("Python float {value}")),
        Number::Int(value) if !range.contains(&value) => beyond(format!("Python integer {value}")),
        _ => Ok(()),
    }
}

/// A number as Python has it.
pub(crate) fn object<'py>(py: Python<'py>, number: Number) -> PyResult<Bound<'py, PyAny>> {
    Ok(match number {
        Number::Bool(value) => PyBool::new(py, value).to_owned().into_any(),
        Number::Int(value) => value.into_pyobject(py)?.into_any(),
        Number::Float(value) => PyFloat::new(py, value).into_any(),
        Number::Complex(re, im) => PyComplex::from_doubles(py, re, im).into_any(),
    })
}

/// A shape: an integer, or a sequence of them.
pub(crate) fn shape(value: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    let extent = |value: i64| {
        u64::try_from(value).map_err(|_| PyValueError::new_err("negative dimensions are not allowed"))
    };
    if value.hasattr("__index__")? {
        return match value.extract::<i64>() {
            Ok(value) => Ok(vec![extent(value)?]),
            Err(_) => Err(PyValueError::new_err("the dimension is too large")),
        };
    }
    few(value)?.into_iter().map(extent).collect()
}

/// Integers of a sequence that is no longer than an array has dimensions.
pub(crate) fn few(value: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    const DIMENSIONS: usize = 64;
    if value.len()? > DIMENSIONS {
        return Err(PyValueError::new_err(format!("an array has at most {DIMENSIONS} dimensions")));
    }
    value.try_iter()?.take(DIMENSIONS).map(|item| item?.extract()).collect()
}

/// Axes: none, an integer, or a sequence of them.
pub(crate) fn axes(value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Vec<i64>>> {
    let Some(value) = value.filter(|value| !value.is_none()) else { return Ok(None) };
    if let Ok(axis) = value.extract::<i64>() {
        return Ok(Some(vec![axis]));
    }
    few(value).map(Some)
}

/// An array of nested sequences of numbers and arrays.
pub(crate) fn nested(device: &Device, value: &Bound<'_, PyAny>, dtype: Option<DType>) -> PyResult<Array> {
    let (mut shape, mut numbers, mut found) = (Vec::new(), Vec::new(), None);
    flatten(value, 0, &mut shape, &mut numbers, &mut found)?;
    let dtype = dtype.or(found).unwrap_or(DType::Float64);
    let mut bytes = Vec::with_capacity(numbers.len() * dtype.bytes() as usize);
    for number in numbers {
        fits(number, dtype)?;
        let part = (dtype.bytes() / if dtype.is_complex() { 2 } else { 1 }) as usize;
        let bits = number.bits(dtype);
        let parts = if dtype.is_complex() { 2 } else { 1 };
        bits.iter().take(parts).for_each(|bits| bytes.extend_from_slice(&bits.to_le_bytes()[..part]));
    }
    Array::from_bytes(device, dtype, &shape, &bytes).map_err(raised)
}

fn flatten(
    value: &Bound<'_, PyAny>,
    depth: usize,
    shape: &mut Vec<u64>,
    numbers: &mut Vec<Number>,
    found: &mut Option<DType>,
) -> PyResult<()> {
    const DEPTH: usize = 32;
    let ragged = || {
        PyValueError::new_err(
            "setting an array element with a sequence: the nested sequences differ in length",
        )
    };
    if let Ok(array) = value.cast::<PyArray>() {
        let array = array.get().array();
        check_shape(shape, depth, array.shape(), numbers.is_empty()).then_some(()).ok_or_else(ragged)?;
        let bytes = array.to_bytes().map_err(raised)?;
        let size = array.dtype().bytes() as usize;
        numbers.extend(bytes.chunks_exact(size).map(|bytes| Number::from_bytes(array.dtype(), bytes)));
        *found = Some(found.map_or(array.dtype(), |dtype| dtype.promote(array.dtype())));
        return Ok(());
    }
    if let Some((number, own)) = scalar(value)? {
        if depth != shape.len() {
            return Err(ragged());
        }
        let own = own.unwrap_or_else(|| type_of(number));
        *found = Some(found.map_or(own, |dtype| dtype.promote(own)));
        numbers.push(number);
        return Ok(());
    }
    let is_sequence = value.cast::<PyList>().is_ok()
        || value.cast::<PyTuple>().is_ok()
        || value.cast::<PySequence>().is_ok();
    if !is_sequence || value.is_instance_of::<pyo3::types::PyString>() || depth >= DEPTH {
        let name = value.get_type().name()?.to_string();
        return Err(PyTypeError::new_err(format!("an array can't be made of a {name}")));
    }
    let n = value.len()? as u64;
    if shape.len() == depth {
        if !numbers.is_empty() {
            return Err(ragged());
        }
        shape.push(n);
    } else if shape[depth] != n {
        return Err(ragged());
    }
    for item in value.try_iter()? {
        flatten(&item?, depth + 1, shape, numbers, found)?;
    }
    Ok(())
}

/// That what is at a depth has the shape that others had there, which the first decides.
fn check_shape(shape: &mut Vec<u64>, depth: usize, own: &[u64], first: bool) -> bool {
    if first && shape.len() == depth {
        shape.extend(own);
    }
    shape[depth.min(shape.len())..] == *own
}
