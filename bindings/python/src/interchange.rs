//! Arrays to and from other libraries without a copy: DLPack, and the array interfaces of numpy and of CUDA.

use pyo3::exceptions::{PyAttributeError, PyBufferError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use vm_array::{Array, DType, Device, Kind, Pinned, Place, Shared};

use crate::array::{PyArray, done};
use crate::convert;
use crate::device::{self, PyDevice};
use crate::error::raised;
use crate::sys::deferred::{self, Deferred, Keeper};
use crate::sys::dlpack::{self, Capsule, Export, Tensor};
use crate::sys::{adopt, copied, fill, follow, precede};

/// Types of devices in DLPack.
const CPU: i32 = 1;
const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;
const ROCM: i32 = 10;
const ROCM_HOST: i32 = 11;

/// Waits for a device, while signals are looked for: what a handler raises ends the wait, and the device works on.
pub(crate) fn settle(py: Python<'_>, device: &Device) -> PyResult<()> {
    deferred::drop_all(py);
    let waited = py.detach(|| device.synchronize_while(|| Python::attach(|py| py.check_signals())));
    waited.map_err(raised)?
}

/// A device as DLPack names it.
fn named(device: &Device) -> PyResult<[i32; 2]> {
    let kind = match device.info().backend {
        "cpu" => return Ok([CPU, 0]),
        "cuda" => CUDA,
        "rocm" => ROCM,
        backend => {
            let text = format!("DLPack has no name for a device of {backend}: take numpy.asarray");
            return Err(PyBufferError::new_err(text));
        }
    };
    Ok([kind, device.ordinal().unwrap_or_default().cast_signed()])
}

/// Kind, bits and lanes of a type in DLPack.
fn element(dtype: DType) -> (u8, u8, u16) {
    let code = match dtype.kind() {
        _ if dtype == DType::BFloat16 => 4,
        Kind::Signed => 0,
        Kind::Unsigned => 1,
        Kind::Float => 2,
        Kind::Complex => 5,
        Kind::Bool => 6,
    };
    (code, 8 * dtype.bytes() as u8, 1)
}

const DTYPES: [DType; 15] = [
    DType::Bool,
    DType::Int8,
    DType::Int16,
    DType::Int32,
    DType::Int64,
    DType::UInt8,
    DType::UInt16,
    DType::UInt32,
    DType::UInt64,
    DType::Float16,
    DType::BFloat16,
    DType::Float32,
    DType::Float64,
    DType::Complex64,
    DType::Complex128,
];

/// A type as the array interfaces name it; bfloat16, which they have not, is its bits.
fn typestr(dtype: DType) -> String {
    let (bytes, order) = (dtype.bytes(), if dtype.bytes() == 1 { '|' } else { '<' });
    let kind = match dtype.kind() {
        _ if dtype == DType::BFloat16 => 'u',
        Kind::Signed => 'i',
        Kind::Unsigned => 'u',
        Kind::Float => 'f',
        Kind::Complex => 'c',
        Kind::Bool => 'b',
    };
    format!("{order}{kind}{bytes}")
}

/// What an array interface says of elements.
fn interface<'py>(py: Python<'py>, place: &Place) -> PyResult<Bound<'py, PyDict>> {
    let bytes = place.dtype.bytes().cast_signed();
    let strides: Vec<i64> = place.strides.iter().map(|stride| stride * bytes).collect();
    let result = PyDict::new(py);
    result.set_item("shape", PyTuple::new(py, &place.shape)?)?;
    result.set_item("typestr", typestr(place.dtype))?;
    result.set_item("data", (place.address, true))?;
    result.set_item("strides", PyTuple::new(py, strides)?)?;
    result.set_item("version", 3)?;
    Ok(result)
}

/// An array's elements in the host's memory, for as long as this is there.
#[pyclass(name = "HostView", module = "vmaccel", frozen)]
pub(crate) struct PyHostView(Shared);

#[pymethods]
impl PyHostView {
    /// Where they are, as numpy asks.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        interface(py, self.0.place())
    }
}

/// The stream that a consumer names, if it works on one: 0 is none of CUDA's names, and ROCm's for the default one.
fn consumer(kind: i32, stream: Option<i64>) -> PyResult<Option<u64>> {
    match (kind, stream) {
        (CPU, None) | (_, Some(-1)) => Ok(None),
        (CUDA, None) => Ok(Some(1)),
        (ROCM, None) => Ok(Some(0)),
        (CUDA, Some(stream @ 1..)) => Ok(Some(stream.cast_unsigned())),
        (ROCM, Some(stream)) if stream == 0 || stream > 2 => Ok(Some(stream.cast_unsigned())),
        (_, Some(stream)) => {
            Err(PyValueError::new_err(format!("a stream {stream} is none of this device's (DLPack)")))
        }
        (_, None) => Ok(None),
    }
}

/// Orders what a consumer does after what the device was given; waits where that needs the host.
fn order(py: Python<'_>, device: &Device, stream: u64) -> PyResult<()> {
    // The default stream of a thread is the caller's, and the worker is another.
    if stream == 2 {
        return settle(py, device);
    }
    py.detach(|| if device.handle()? == Some(stream) { Ok(()) } else { precede(device, stream) })
        .map_err(raised)
}

#[pymethods]
impl PyArray {
    /// Type and number of the device, as DLPack has them.
    fn __dlpack_device__(&self) -> PyResult<(i32, i32)> {
        named(self.array().device()).map(|[kind, number]| (kind, number))
    }

    /// A capsule of the array for another library, which must not write it. `stream` is the consumer's: what it does there comes after
    /// what the array is computed by. The memory is used again, by this device's stream, when the other library lets go of it.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let array = self.array();
        let device = array.device();
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        let to_host = dl_device.is_some_and(|(kind, _)| kind == CPU) && !device.is_cpu();
        if to_host {
            if copy == Some(false) {
                return Err(PyBufferError::new_err("the elements are on a device: they can only be copied"));
            }
            settle(py, evaluated(py, &array)?.device())?;
            let bytes = py.detach(|| array.to_bytes()).map_err(raised)?;
            let place = Place::dense(bytes.as_ptr() as u64, array.dtype(), array.shape());
            return dlpack::export(py, &tensor([CPU, 0], &place), Export { versioned, copied: true }, bytes);
        }
        let own = named(device)?;
        if let Some((kind, number)) = dl_device
            && [kind, number] != own
        {
            let text = format!("the array is on {own:?}, and can't go to ({kind}, {number})");
            return Err(PyBufferError::new_err(text));
        }
        let stream = consumer(own[0], stream)?;
        let copied = copy == Some(true);
        let shared = py.detach(|| if copied { array.copied()?.share() } else { array.share() });
        let shared = shared.map_err(raised)?;
        match stream {
            Some(stream) => order(py, device, stream)?,
            None if device.is_cpu() => settle(py, device)?,
            None => (),
        }
        let tensor = tensor(own, shared.place());
        dlpack::export(py, &tensor, Export { versioned, copied }, shared)
    }

    /// Where the elements are, for libraries that take CUDA's array interface. What it said stays there as long as this object.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let array = self.array();
        if array.device().info().backend != "cuda" {
            return Err(PyAttributeError::new_err(
                "only arrays on CUDA devices have __cuda_array_interface__",
            ));
        }
        let shared = py.detach(|| array.share()).map_err(raised)?;
        let result = interface(py, shared.place())?;
        // PyTorch takes nothing that says it is read only.
        result.set_item("data", (shared.place().address, false))?;
        result.set_item("stream", handle(py, array.device())?)?;
        self.keep(shared);
        Ok(result)
    }

    /// The elements as numpy takes them without a copy; none where the host can't read the device's memory.
    fn _host_view(&self, py: Python<'_>) -> PyResult<Option<PyHostView>> {
        let array = self.array();
        if !array.device().is_cpu() {
            return Ok(None);
        }
        let shared = evaluated(py, &array)?;
        settle(py, array.device())?;
        Ok(Some(PyHostView(shared)))
    }
}

fn evaluated(py: Python<'_>, array: &Array) -> PyResult<Shared> {
    py.detach(|| array.share()).map_err(raised)
}

fn tensor(device: [i32; 2], place: &Place) -> Tensor {
    let Place { address, dtype, shape, strides } = place.clone();
    Tensor { device, element: element(dtype), address, shape, strides }
}

/// The device's stream, as other libraries name it.
fn handle(py: Python<'_>, device: &Device) -> PyResult<Option<u64>> {
    py.detach(|| device.handle()).map_err(raised)
}

/// An array of elements that another library keeps: in place, or a copy where `copy` says so, or it must be and may.
fn taken(
    py: Python<'_>,
    device: &Device,
    on_host: bool,
    place: Place,
    keeper: Keeper,
    copy: Option<bool>,
) -> PyResult<PyArray> {
    let in_place = place.span().map_err(raised).map(|_| place.is_aligned() && on_host == device.is_cpu());
    let deferred = Deferred::new(keeper);
    let in_place = in_place?;
    if !in_place && copy == Some(false) {
        let why = if on_host == device.is_cpu() {
            "it is not aligned as kernels need it"
        } else {
            "it lies on another device"
        };
        return Err(PyBufferError::new_err(format!("the memory can only be copied: {why}")));
    }
    if in_place && copy != Some(true) {
        return done(adopt(place, device, deferred));
    }
    // What is large is copied once, in its turn; what is small need not wait for the device.
    let bytes = place.shape.iter().product::<u64>() * place.dtype.bytes();
    if in_place && (!on_host || bytes > 4 << 20) {
        let copied = py.detach(|| adopt(place, device, deferred).and_then(|array| array.copied()));
        if on_host {
            settle(py, device)?;
        }
        return done(copied);
    }
    if !on_host {
        return Err(PyBufferError::new_err("the memory is not aligned as kernels need it: copy it first"));
    }
    let result = py.detach(|| copied(&place, device));
    drop(deferred);
    done(result)
}

/// An array of another library's that has `__dlpack__`. Without a device it is one of the memory's.
#[pyfunction]
#[pyo3(signature = (x, device=None, copy=None))]
fn from_dlpack(
    py: Python<'_>,
    x: &Bound<'_, PyAny>,
    device: Option<&Bound<'_, PyAny>>,
    copy: Option<bool>,
) -> PyResult<PyArray> {
    deferred::drop_all(py);
    let (kind, number): (i32, i32) = x.call_method0("__dlpack_device__")?.extract()?;
    let on_host = matches!(kind, CPU | CUDA_HOST | ROCM_HOST);
    let target = match device.filter(|device| !device.is_none()) {
        Some(_) => device::of(py, device)?,
        None => memory_device(py, kind, number)?,
    };
    let theirs = [if on_host { CPU } else { kind }, if on_host { 0 } else { number }];
    let is_there = named(&target).is_ok_and(|own| own == theirs);
    if !is_there && copy == Some(false) {
        return Err(PyBufferError::new_err("the memory lies on another device: it can only be copied"));
    }
    let arguments = PyDict::new(py);
    arguments.set_item("max_version", (1, 0))?;
    if is_there && !on_host {
        arguments.set_item("stream", handle(py, &target)?)?;
    } else if !on_host {
        arguments.set_item("dl_device", (CPU, 0))?;
    }
    let capsule = match x.call_method("__dlpack__", (), Some(&arguments)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) && (is_there || on_host) => {
            // It is of a time before versions.
            arguments.del_item("max_version")?;
            x.call_method("__dlpack__", (), Some(&arguments))?
        }
        capsule => capsule?,
    };
    let capsule = Capsule::new(capsule)?;
    let Tensor { device: said, element: of, address, shape, strides } = capsule.tensor.clone();
    let Some(dtype) = DTYPES.into_iter().find(|dtype| element(*dtype) == of) else {
        let (code, bits, lanes) = of;
        let text =
            format!("elements of {bits} bits in {lanes} lanes of DLPack's kind {code} have no type here");
        return Err(PyBufferError::new_err(text));
    };
    let said_host = matches!(said[0], CPU | CUDA_HOST | ROCM_HOST);
    if said_host != on_host && is_there || !said_host && said != [kind, number] {
        return Err(PyBufferError::new_err(format!(
            "the tensor is on {said:?}, which is not what was asked for"
        )));
    }
    let keeper = Keeper::Tensor(capsule.consume()?);
    taken(py, &target, said_host, Place { address, dtype, shape, strides }, keeper, copy)
}

/// The device that arrays of some memory are on: the one in use, if its memory that is, else one that is opened.
fn memory_device(py: Python<'_>, kind: i32, number: i32) -> PyResult<Device> {
    let (own, name) = match kind {
        CPU | CUDA_HOST | ROCM_HOST => ([CPU, 0], "cpu".to_owned()),
        CUDA => ([kind, number], format!("cuda:{number}")),
        ROCM => ([kind, number], format!("rocm:{number}")),
        _ => {
            let text =
                format!("memory of DLPack's devices of type {kind} can't be reached; copy it to the host");
            return Err(PyBufferError::new_err(text));
        }
    };
    let current = device::current(py)?;
    if named(&current).is_ok_and(|device| device == own) { Ok(current) } else { device::open(py, &name) }
}

/// Where the elements are that an array interface tells of. `dtype` is for elements that it has no name for.
fn place_of(interface: &Bound<'_, PyDict>, dtype: Option<&str>) -> PyResult<(Place, bool)> {
    let wanted = |name: &str| {
        let value = interface.get_item(name)?;
        value.ok_or_else(|| PyValueError::new_err(format!("the array interface has no {name:?}")))
    };
    let given = |name: &str| given(interface, name);
    let text: String = wanted("typestr")?.extract()?;
    // bfloat16 is said by `dtype`.
    let is = |dtype: &DType| *dtype != DType::BFloat16 && typestr(*dtype)[1..] == text[text.len().min(1)..];
    let order = text.chars().next();
    let said = DTYPES.into_iter().find(is).filter(|of| order != Some('>') || of.bytes() == 1);
    let dtype = match (said, dtype.map(convert::dtype).transpose()?) {
        (Some(said), Some(dtype)) if said.bytes() == dtype.bytes() => dtype,
        (Some(said), None) => said,
        _ => return Err(PyTypeError::new_err(format!("elements of {text:?} have no type here"))),
    };
    if given("mask")?.is_some() {
        return Err(PyTypeError::new_err("there are no masked arrays here"));
    }
    let (address, read_only): (u64, bool) = wanted("data")?.extract()?;
    let shape = convert::shape(&wanted("shape")?)?;
    let mut place = Place::dense(address, dtype, &[]);
    if shape.len() > 64 {
        return Err(PyValueError::new_err("an array has at most 64 dimensions"));
    }
    let bytes = dtype.bytes().cast_signed();
    let mut is_whole = true;
    place.strides = match given("strides")? {
        Some(strides) => {
            let strides: Vec<i64> = strides.extract()?;
            is_whole = strides.iter().zip(&shape).all(|(stride, extent)| *extent < 2 || stride % bytes == 0);
            strides.iter().map(|stride| stride / bytes).collect()
        }
        None => {
            let mut dense = vec![1i64; shape.len()];
            for d in (1..shape.len()).rev() {
                dense[d - 1] = dense[d].saturating_mul(shape[d].max(1).cast_signed());
            }
            dense
        }
    };
    place.shape = shape;
    if !is_whole {
        return Err(PyBufferError::new_err(
            "its elements are not a whole number of elements apart: copy it first",
        ));
    }
    Ok((place, read_only))
}

fn given<'py>(interface: &Bound<'py, PyDict>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    Ok(interface.get_item(name)?.filter(|value| !value.is_none()))
}

/// An array of what an object's array interface says, numpy's or CUDA's. `dtype` is for elements that it has no name for.
#[pyfunction]
#[pyo3(signature = (interface, owner, device=None, copy=None, dtype=None, cuda=false))]
fn from_interface(
    py: Python<'_>,
    interface: &Bound<'_, PyDict>,
    owner: &Bound<'_, PyAny>,
    device: Option<&Bound<'_, PyAny>>,
    copy: Option<bool>,
    dtype: Option<&str>,
    cuda: bool,
) -> PyResult<PyArray> {
    deferred::drop_all(py);
    let device = device::of(py, device)?;
    let (place, _) = place_of(interface, dtype)?;
    if cuda && device.info().backend != "cuda" {
        return Err(PyBufferError::new_err(
            "the memory is on a CUDA device: name one, or copy it to the host first",
        ));
    }
    if cuda && let Some(stream) = given(interface, "stream")? {
        let stream: u64 = stream.extract()?;
        if matches!(stream, 0 | 2) {
            return Err(PyValueError::new_err(
                "the producer's stream is 0 or 2, which say nothing to another thread",
            ));
        }
        py.detach(|| follow(&device, stream)).map_err(raised)?;
    }
    taken(py, &device, !cuda, place, Keeper::Object(owner.clone().unbind()), copy)
}

/// Copies an array's elements into memory of the host that an object's array interface tells of.
#[pyfunction]
fn read_to(py: Python<'_>, array: &Bound<'_, PyArray>, interface: &Bound<'_, PyDict>) -> PyResult<()> {
    let (place, read_only) = place_of(interface, None)?;
    if read_only {
        return Err(PyValueError::new_err("the memory can't be written"));
    }
    let array = array.get().array();
    let shared = evaluated(py, &array)?;
    settle(py, shared.device())?;
    py.detach(|| fill(&place, &array)).map_err(raised)
}

/// Memory of the host that a device copies from and to by itself.
#[pyclass(name = "Pinned", module = "vmaccel", frozen)]
pub(crate) struct PyPinned(Pinned);

#[pymethods]
impl PyPinned {
    /// Its bytes, for numpy.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let bytes = self.0.bytes();
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("shape", (bytes.len(),))?;
        interface.set_item("data", (bytes.as_ptr() as u64, false))?;
        Ok(interface)
    }
}

#[pyfunction]
#[pyo3(signature = (n, device=None))]
fn pinned(py: Python<'_>, n: u64, device: Option<&Bound<'_, PyAny>>) -> PyResult<PyPinned> {
    let device = device::of(py, device)?;
    py.detach(|| device.pinned(n)).map(PyPinned).map_err(raised)
}

#[pymethods]
impl PyDevice {
    /// The device's stream for libraries that order their work with it (`CUstream`, `hipStream_t`); none on others.
    #[getter]
    fn stream_handle(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        handle(py, &self.0)
    }

    /// Live arrays' bytes and their number, as the device's pool counts them.
    #[getter]
    fn in_use(&self) -> PyResult<(u64, u64)> {
        self.0.streams().iter().try_fold((0, 0), |(bytes, buffers), stream| {
            let statistics = stream.worker().map_err(raised)?.statistics();
            Ok((bytes + statistics.in_use, buffers + statistics.buffers))
        })
    }
}

pub(crate) fn add(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyHostView>()?;
    m.add_class::<PyPinned>()?;
    m.add_function(wrap_pyfunction!(read_to, m)?)?;
    m.add_function(wrap_pyfunction!(pinned, m)?)?;
    m.add_function(wrap_pyfunction!(from_dlpack, m)?)?;
    m.add_function(wrap_pyfunction!(from_interface, m)?)
}
