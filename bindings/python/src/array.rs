//! The array as Python has it.

use std::sync::{Mutex, PoisonError};

use pyo3::basic::CompareOp;
use pyo3::exceptions::{PyIndexError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyEllipsis, PyInt, PySlice, PyTuple};
use vm_array::{Array, Binary, DType, Number, Reduction, Shared, Slice, Unary};

use crate::convert::{self, object};
use crate::device::PyDevice;
use crate::error::raised;
use crate::interchange::settle;

/// An array on an accelerator.
///
/// It is a value: slices and other views are arrays of their own, and none sees what becomes of another. `a[...] = b` and `a += b` make this object another array.
/// Functions of elements and reductions are fused, and run when a value is needed.
#[pyclass(name = "Array", module = "vmaccel", frozen, weakref)]
pub(crate) struct PyArray(pub(crate) Mutex<Array>, Mutex<Vec<Shared>>);

impl PyArray {
    pub(crate) fn new(array: Array) -> Self {
        Self(Mutex::new(array), Mutex::default())
    }

    /// Keeps elements whose place was told to somebody who keeps this object.
    pub(crate) fn keep(&self, shared: Shared) {
        let mut kept = self.1.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.iter().all(|other| other.place().address != shared.place().address) {
            kept.push(shared);
        }
    }

    /// The array as it is.
    fn own(&self) -> Array {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The array for the stream of its device that this thread uses.
    pub(crate) fn array(&self) -> Array {
        crate::device::here(self.own())
    }
}

pub(crate) fn done(array: vm_array::Result<Array>) -> PyResult<PyArray> {
    array.map(PyArray::new).map_err(raised)
}

/// What stands beside an array in an operation: another, or a number of a type that goes with it. None for anything else.
pub(crate) fn operand(array: &Array, other: &Bound<'_, PyAny>) -> PyResult<Option<Array>> {
    if let Ok(other) = other.cast::<PyArray>() {
        return Ok(Some(other.get().array()));
    }
    let Some((number, own)) = convert::scalar(other)? else {
        if other.hasattr("__array_interface__")? {
            let text = "an array of numpy's is beside one of vmaccel's: bring it to the device by vmaccel.asarray first";
            return Err(PyTypeError::new_err(text));
        }
        return Ok(None);
    };
    let dtype = own.map_or_else(|| convert::beside(number, array.dtype()), Ok)?;
    Array::full(array.device(), dtype, &[], number).map(Some).map_err(raised)
}

/// Applies a binary function to an array and another operand, which comes first if `turned`. Returns none as [`operand`] does.
pub(crate) fn combined(
    op: Binary,
    array: &Array,
    other: &Bound<'_, PyAny>,
    turned: bool,
) -> PyResult<Option<Array>> {
    let result = match (compared_with_any(op, array, other, turned)?, turned) {
        (Some(result), _) => Ok(result),
        (None, turned) => {
            let Some(other) = operand(array, other)? else { return Ok(None) };
            if turned { other.binary(op, array) } else { array.binary(op, &other) }
        }
    };
    result.map(Some).map_err(raised)
}

/// Compares an array of integers with a Python integer outside its type's range, which is greater or less than every element.
fn compared_with_any(
    op: Binary,
    array: &Array,
    other: &Bound<'_, PyAny>,
    turned: bool,
) -> PyResult<Option<Array>> {
    let dtype = if array.dtype() == DType::Bool { DType::Int64 } else { array.dtype() };
    if !op.is_comparison() || !dtype.is_integer() || !other.is_exact_instance_of::<PyInt>() {
        return Ok(None);
    }
    if other.extract::<i128>().is_ok_and(|value| convert::fits(Number::Int(value), dtype).is_ok()) {
        return Ok(None);
    }
    let above = other.gt(0)?;
    let value = match if turned { op.mirrored() } else { op } {
        Binary::Less | Binary::LessEqual => above,
        Binary::Greater | Binary::GreaterEqual => !above,
        op => op == Binary::NotEqual,
    };
    Array::full(array.device(), DType::Bool, array.shape(), Number::Bool(value)).map(Some).map_err(raised)
}

/// That integers are not taken to the power of a negative integer, which is no integer.
pub(crate) fn no_whole_power(array: &Array, other: &Bound<'_, PyAny>) -> PyResult<()> {
    match convert::number(other)? {
        Some(Number::Int(power)) if power < 0 && array.dtype().is_integer() => {
            Err(PyValueError::new_err("Integers to negative integer powers are not allowed."))
        }
        _ => Ok(()),
    }
}

/// What is beside an array, or that there is no such operation.
macro_rules! binary {
    ($py:expr, $this:expr, $other:expr, $op:expr, $turned:expr) => {{
        match combined($op, &$this.array(), $other, $turned)? {
            Some(result) => Ok(Bound::new($py, PyArray::new(result))?.into_any().unbind()),
            None => Ok($py.NotImplemented()),
        }
    }};
}

macro_rules! operators {
    ($($name:ident $turned:ident $place:ident $op:ident;)+) => {
        #[pymethods]
        impl PyArray {
            $(
                fn $name(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
                    binary!(py, self, other, Binary::$op, false)
                }

                fn $turned(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
                    binary!(py, self, other, Binary::$op, true)
                }

                fn $place(&self, other: &Bound<'_, PyAny>) -> PyResult<()> {
                    self.in_place(other, Binary::$op)
                }
            )+
        }
    };
}

operators! {
    __add__ __radd__ __iadd__ Add;
    __sub__ __rsub__ __isub__ Subtract;
    __mul__ __rmul__ __imul__ Multiply;
    __truediv__ __rtruediv__ __itruediv__ Divide;
    __floordiv__ __rfloordiv__ __ifloordiv__ FloorDivide;
    __mod__ __rmod__ __imod__ Remainder;
    __and__ __rand__ __iand__ BitwiseAnd;
    __or__ __ror__ __ior__ BitwiseOr;
    __xor__ __rxor__ __ixor__ BitwiseXor;
    __lshift__ __rlshift__ __ilshift__ BitwiseLeftShift;
    __rshift__ __rrshift__ __irshift__ BitwiseRightShift;
}

impl PyArray {
    fn in_place(&self, other: &Bound<'_, PyAny>, op: Binary) -> PyResult<()> {
        let array = self.array();
        let Some(other) = operand(&array, other)? else {
            return Err(PyTypeError::new_err("unsupported operand type"));
        };
        let result = array.binary(op, &other).map_err(raised)?;
        if result.shape() != array.shape() {
            let (to, from) = (array.shape(), result.shape());
            return Err(PyValueError::new_err(format!(
                "non-broadcastable output operand with shape {to:?} doesn't match the broadcast shape {from:?}"
            )));
        }
        if result.dtype().kind() > array.dtype().kind() {
            return Err(PyTypeError::new_err(format!(
                "cannot cast output from {} to {}",
                result.dtype(),
                array.dtype()
            )));
        }
        let result = result.cast(array.dtype()).map_err(raised)?;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = result;
        Ok(())
    }

    fn number(&self, py: Python<'_>) -> PyResult<Number> {
        let array = self.array();
        if array.size() == 1 {
            py.detach(|| array.evaluate()).map_err(raised)?;
            settle(py, array.device())?;
        }
        py.detach(|| array.item()).map_err(raised)
    }
}

/// An index into an array: parts of axes, or something that needs more than a view.
fn slices(array: &Array, key: &Bound<'_, PyAny>) -> PyResult<Option<Vec<Slice>>> {
    let tuple;
    let keys: Vec<Bound<'_, PyAny>> = match key.cast::<PyTuple>() {
        Ok(keys) => {
            tuple = keys;
            tuple.iter().collect()
        }
        Err(_) => vec![key.clone()],
    };
    let dots = keys.iter().filter(|key| key.is_instance_of::<PyEllipsis>()).count();
    if dots > 1 {
        return Err(PyIndexError::new_err("an index can only have a single ellipsis ('...')"));
    }
    let named = keys.iter().filter(|key| !key.is_none() && !key.is_instance_of::<PyEllipsis>()).count();
    let (mut result, mut axis) = (Vec::with_capacity(keys.len()), 0);
    for key in &keys {
        if key.is_none() {
            result.push(Slice::New);
        } else if key.is_instance_of::<PyEllipsis>() {
            for _ in 0..array.ndim().saturating_sub(named) {
                result.push(Slice::Range { start: 0, step: 1, count: array.shape()[axis] });
                axis += 1;
            }
        } else if let Ok(slice) = key.cast::<PySlice>() {
            let Some(extent) = array.shape().get(axis) else { return Err(too_many(array, named)) };
            let part = |name: &str| -> PyResult<Option<i64>> {
                let value = slice.getattr(name)?;
                if value.is_none() { Ok(None) } else { index(&value).map(Some) }
            };
            result.push(Slice::of(part("start")?, part("stop")?, part("step")?, *extent).map_err(raised)?);
            axis += 1;
        } else if key.is_instance_of::<pyo3::types::PyBool>() || key.cast::<PyArray>().is_ok() {
            return Ok(None);
        } else if key.is_instance_of::<PyInt>() || key.hasattr("__index__")? {
            result.push(Slice::At(index(key)?));
            axis += 1;
        } else {
            return Ok(None);
        }
    }
    if named > array.ndim() { Err(too_many(array, named)) } else { Ok(Some(result)) }
}

fn index(value: &Bound<'_, PyAny>) -> PyResult<i64> {
    // An integer beyond 64 bits is beyond every axis, too.
    let value = value.call_method0("__index__")?;
    match value.extract::<i64>() {
        Ok(value) => Ok(value),
        Err(_) => Ok(if value.lt(0)? { i64::MIN } else { i64::MAX }),
    }
}

fn too_many(array: &Array, named: usize) -> PyErr {
    let rank = array.ndim();
    PyIndexError::new_err(format!(
        "too many indices for array: array is {rank}-dimensional, but {named} were indexed"
    ))
}

#[pymethods]
impl PyArray {
    /// The type's name.
    #[getter]
    fn _dtype(&self) -> String {
        self.own().dtype().to_string()
    }

    /// The extents.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.own().shape())
    }

    /// Dimensions.
    #[getter]
    fn ndim(&self) -> usize {
        self.own().ndim()
    }

    /// Elements.
    #[getter]
    fn size(&self) -> u64 {
        self.own().size()
    }

    /// Bytes of an element.
    #[getter]
    fn itemsize(&self) -> u64 {
        self.own().dtype().bytes()
    }

    /// Bytes of all elements.
    #[getter]
    fn nbytes(&self) -> u64 {
        let array = self.own();
        array.dtype().bytes() * array.size()
    }

    /// The device.
    #[getter]
    fn device(&self) -> PyDevice {
        PyDevice(self.own().device().clone())
    }

    /// The array with its dimensions in reverse.
    #[getter(T)]
    fn transposed(&self) -> PyResult<PyArray> {
        let array = self.array();
        let order: Vec<i64> = (0..array.ndim() as i64).rev().collect();
        done(array.permute(&order))
    }

    /// The array with its last two dimensions exchanged.
    #[getter(mT)]
    fn matrix_transposed(&self) -> PyResult<PyArray> {
        let array = self.array();
        let rank = array.ndim() as i64;
        if rank < 2 {
            return Err(PyValueError::new_err("matrix transpose with ndim < 2 is undefined"));
        }
        let order: Vec<i64> = (0..rank - 2).chain([rank - 1, rank - 2]).collect();
        done(array.permute(&order))
    }

    fn __neg__(&self) -> PyResult<PyArray> {
        done(self.array().unary(Unary::Negative))
    }

    fn __pos__(&self) -> PyResult<PyArray> {
        done(self.array().unary(Unary::Positive))
    }

    fn __abs__(&self) -> PyResult<PyArray> {
        done(self.array().unary(Unary::Abs))
    }

    fn __invert__(&self) -> PyResult<PyArray> {
        done(self.array().unary(Unary::BitwiseInvert))
    }

    fn __pow__(
        &self,
        py: Python<'_>,
        other: &Bound<'_, PyAny>,
        _modulo: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        // A square is a product.
        let power = convert::scalar(other)?;
        let dtype = self.array().dtype();
        if power == Some((Number::Int(2), None)) && dtype != DType::Bool
            || power == Some((Number::Float(2.0), None)) && dtype.is_inexact()
        {
            return Ok(Bound::new(py, done(self.array().unary(Unary::Square))?)?.into_any().unbind());
        }
        no_whole_power(&self.array(), other)?;
        binary!(py, self, other, Binary::Pow, false)
    }

    fn __rpow__(
        &self,
        py: Python<'_>,
        other: &Bound<'_, PyAny>,
        _modulo: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        binary!(py, self, other, Binary::Pow, true)
    }

    fn __ipow__(&self, other: &Bound<'_, PyAny>, _modulo: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        self.in_place(other, Binary::Pow)
    }

    fn __matmul__(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        match other.cast::<PyArray>() {
            Ok(other) => Ok(Bound::new(py, self.matmul(py, other)?)?.into_any().unbind()),
            Err(_) => Ok(py.NotImplemented()),
        }
    }

    fn __rmatmul__(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let _ = other;
        Ok(py.NotImplemented())
    }

    fn __imatmul__(&self, py: Python<'_>, other: &Bound<'_, PyArray>) -> PyResult<()> {
        let result = self.matmul(py, other)?.array();
        if result.shape() != self.array().shape() {
            return Err(PyValueError::new_err("the product has another shape than what it would replace"));
        }
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = result;
        Ok(())
    }

    /// The product of matrices of the last two dimensions.
    fn matmul(&self, py: Python<'_>, other: &Bound<'_, PyArray>) -> PyResult<PyArray> {
        let (a, b) = (self.array(), other.get().array());
        done(py.detach(|| a.matmul(&b)))
    }

    fn __richcmp__(&self, py: Python<'_>, other: &Bound<'_, PyAny>, op: CompareOp) -> PyResult<Py<PyAny>> {
        let op = match op {
            CompareOp::Lt => Binary::Less,
            CompareOp::Le => Binary::LessEqual,
            CompareOp::Eq => Binary::Equal,
            CompareOp::Ne => Binary::NotEqual,
            CompareOp::Gt => Binary::Greater,
            CompareOp::Ge => Binary::GreaterEqual,
        };
        binary!(py, self, other, op, false)
    }

    fn __bool__(&self, py: Python<'_>) -> PyResult<bool> {
        if self.array().size() != 1 {
            let text =
                "The truth value of an array with more than one element is ambiguous. Use any() or all()";
            return Err(PyValueError::new_err(text));
        }
        Ok(match self.number(py)? {
            Number::Bool(value) => value,
            Number::Int(value) => value != 0,
            Number::Float(value) => value != 0.0,
            Number::Complex(re, im) => re != 0.0 || im != 0.0,
        })
    }

    fn __int__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.get_type::<PyInt>().call1((self.item(py)?,))
    }

    fn __float__(&self, py: Python<'_>) -> PyResult<f64> {
        match self.number(py)? {
            Number::Bool(value) => Ok(f64::from(u8::from(value))),
            Number::Int(value) => Ok(value as f64),
            Number::Float(value) => Ok(value),
            Number::Complex(..) => Err(PyTypeError::new_err("can't convert complex to float")),
        }
    }

    fn __complex__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.get_type::<pyo3::types::PyComplex>().call1((self.item(py)?,))
    }

    fn __index__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let array = self.array();
        match array.dtype().is_integer() && array.ndim() == 0 {
            true => self.item(py),
            false => {
                Err(PyTypeError::new_err("only integer scalar arrays can be converted to a scalar index"))
            }
        }
    }

    fn __len__(&self) -> PyResult<usize> {
        match self.array().shape().first() {
            Some(extent) => Ok(*extent as usize),
            None => Err(PyTypeError::new_err("len() of unsized object")),
        }
    }

    fn __hash__(&self) -> PyResult<isize> {
        Err(PyTypeError::new_err("unhashable type: 'Array'"))
    }

    /// The only element.
    fn item<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        object(py, self.number(py)?)
    }

    fn __getitem__<'py>(slf: &Bound<'py, Self>, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let array = slf.get().array();
        match slices(&array, key)? {
            Some(slices) => Ok(Bound::new(slf.py(), done(array.slice(&slices))?)?.into_any()),
            None => slf.py().import("vmaccel._indexing")?.call_method1("get", (slf, key)),
        }
    }

    fn __setitem__(slf: &Bound<'_, Self>, key: &Bound<'_, PyAny>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = slf.py();
        let this = slf.get();
        let array = this.array();
        let Some(slices) = slices(&array, key)? else {
            let result = py.import("vmaccel._indexing")?.call_method1("replaced", (slf, key, value))?;
            let result = result.cast::<PyArray>()?.get().array();
            *this.0.lock().unwrap_or_else(PoisonError::into_inner) = result;
            return Ok(());
        };
        if let Some((number @ Number::Int(_), Some(_))) = convert::scalar(value)? {
            convert::fits(number, array.dtype())?;
        }
        let Some(values) = operand(&array, value)? else {
            let name = value.get_type().name()?.to_string();
            return Err(PyTypeError::new_err(format!("elements can't be set to a {name}")));
        };
        let widens = values.dtype().kind() > array.dtype().kind() && array.dtype() != DType::Bool;
        if widens && value.cast::<PyArray>().is_err() {
            return Err(PyTypeError::new_err(format!(
                "elements of {} can't be set to a number of {}",
                array.dtype(),
                values.dtype()
            )));
        }
        drop(array);
        let mut place = this.0.lock().unwrap_or_else(PoisonError::into_inner);
        *place = place.replace(&slices, &values).map_err(raised)?;
        Ok(())
    }

    /// In another type.
    fn _astype(&self, dtype: &str) -> PyResult<PyArray> {
        done(self.array().cast(convert::dtype(dtype)?))
    }

    /// In another shape, of which one extent may be -1.
    #[pyo3(signature = (*shape))]
    fn reshape(&self, shape: &Bound<'_, PyTuple>) -> PyResult<PyArray> {
        let array = self.array();
        let extents: Vec<i64> = match shape.len() {
            1 if shape.get_item(0)?.extract::<i64>().is_err() => convert::few(&shape.get_item(0)?)?,
            _ => shape.extract()?,
        };
        let known: u64 = extents.iter().filter(|extent| **extent >= 0).map(|extent| *extent as u64).product();
        let unknown = extents.iter().filter(|extent| **extent < 0).count();
        let bad = || {
            PyValueError::new_err(format!(
                "cannot reshape array of size {} into shape {extents:?}",
                array.size()
            ))
        };
        if unknown > 1 || extents.iter().any(|extent| *extent < -1) {
            return Err(bad());
        }
        let rest = if unknown == 1 { array.size().checked_div(known).ok_or_else(bad)? } else { 0 };
        let shape: Vec<u64> = extents.iter().map(|extent| u64::try_from(*extent).unwrap_or(rest)).collect();
        done(array.reshape(&shape))
    }

    /// Its dimensions in another order.
    fn _permute(&self, order: Vec<i64>) -> PyResult<PyArray> {
        done(self.array().permute(&order))
    }

    fn _broadcast_to(&self, shape: &Bound<'_, PyAny>) -> PyResult<PyArray> {
        done(self.array().broadcast_to(&convert::shape(shape)?))
    }

    fn _unary(&self, op: &str) -> PyResult<PyArray> {
        let op: Unary =
            op.parse().map_err(|_| PyValueError::new_err(format!("there is no function {op}")))?;
        done(self.array().unary(op))
    }

    #[pyo3(signature = (op, axis=None, keepdims=false, dtype=None))]
    fn _reduce(
        &self,
        op: &str,
        axis: Option<&Bound<'_, PyAny>>,
        keepdims: bool,
        dtype: Option<&str>,
    ) -> PyResult<PyArray> {
        let op: Reduction =
            op.parse().map_err(|_| PyValueError::new_err(format!("there is no reduction {op}")))?;
        let dtype = dtype.map(convert::dtype).transpose()?;
        done(self.array().reduce(op, convert::axes(axis)?.as_deref(), keepdims, dtype))
    }

    #[pyo3(signature = (axis=-1))]
    fn softmax(&self, py: Python<'_>, axis: i64) -> PyResult<PyArray> {
        let array = self.array();
        done(py.detach(|| array.softmax(axis)))
    }

    /// Gives it to the device to be computed, and returns it.
    fn evaluate(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        let array = slf.get().array();
        slf.py().detach(|| array.evaluate()).map_err(raised)?;
        Ok(slf)
    }

    /// Its bytes, one element behind the other.
    fn tobytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let array = self.array();
        let n = usize::try_from(array.size() * array.dtype().bytes())?;
        py.detach(|| array.evaluate()).map_err(raised)?;
        settle(py, array.device())?;
        PyBytes::new_with(py, n, |bytes| py.detach(|| array.read(bytes)).map_err(raised))
    }
}
