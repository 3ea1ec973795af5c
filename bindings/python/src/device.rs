//! Devices, and the one that is used where none is named.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use vm_array::{Accelerator, Array, Device};

use crate::error::{DeviceError, raised};

/// An accelerator that arrays are on.
#[pyclass(name = "Device", module = "vmaccel", frozen)]
pub(crate) struct PyDevice(pub(crate) Device);

/// The devices that were opened, by what they were asked for as, and the one that the process uses where none is named.
#[derive(Default)]
struct Opened {
    process: u32,
    devices: HashMap<String, Device>,
    default: Option<Device>,
}

static OPENED: Mutex<Option<Opened>> = Mutex::new(None);

thread_local! {
    /// The device, and the stream of it, that this thread uses where none is named, if it is not the process's.
    static CURRENT: RefCell<Option<Device>> = const { RefCell::new(None) };
}

fn with<T>(f: impl FnOnce(&mut Opened) -> T) -> T {
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let opened = opened.get_or_insert_with(Opened::default);
    if opened.process != std::process::id() {
        // A forked child has none of its parent's threads: their devices are left alone, not ended.
        std::mem::forget(std::mem::take(opened));
        opened.process = std::process::id();
    }
    f(opened)
}

/// Opens a device, or gives the one that was opened as this before.
pub(crate) fn open(py: Python<'_>, name: &str) -> PyResult<Device> {
    if let Some(device) = with(|opened| opened.devices.get(name).cloned()) {
        return Ok(device);
    }
    let device = py.detach(|| {
        let accelerator = Accelerator::open(name).map_err(|error| DeviceError::new_err(error.to_string()))?;
        Device::new(Arc::new(accelerator)).map_err(raised)
    })?;
    // The same one may have been opened as something else.
    let new = device.clone();
    let same = |other: &&Device| {
        let (a, b) = (new.info(), other.info());
        (a.backend, &a.address, &a.name) == (b.backend, &b.address, &b.name)
    };
    let (found, device) = with(|opened| {
        let found = opened.devices.values().find(same).cloned();
        let kept = found.clone().unwrap_or_else(|| device.clone());
        opened.devices.insert(name.to_owned(), kept.clone());
        (found.is_some().then_some(device), kept)
    });
    py.detach(|| drop(found));
    Ok(device)
}

/// The device that is used where none is named.
pub(crate) fn current(py: Python<'_>) -> PyResult<Device> {
    if let Some(device) = CURRENT.with_borrow(Clone::clone).or_else(|| with(|opened| opened.default.clone()))
    {
        return Ok(device);
    }
    let name = std::env::var("VMACCEL_DEVICE").unwrap_or_else(|_| "auto".into());
    let device = open(py, &name)?;
    with(|opened| opened.default = Some(device.clone()));
    Ok(device)
}

/// A device by the stream that this thread uses of it.
fn by_stream(device: &Device) -> Device {
    CURRENT.with_borrow(|current| match current {
        Some(current) if current.is_same(device) => current.clone(),
        _ => device.main(),
    })
}

/// An array for the stream that this thread uses of its device.
pub(crate) fn here(array: Array) -> Array {
    let is_here = CURRENT.with_borrow(|current| match current {
        Some(current) if current.is_same(array.device()) => current == array.device(),
        _ => array.device().number() == 0,
    });
    if is_here {
        return array;
    }
    // It is of the same device, which is all that could be wrong.
    array.on(&by_stream(array.device())).unwrap_or(array)
}

/// The device that a Python object names: none, a `Device`, or a string as `init` takes it.
pub(crate) fn of(py: Python<'_>, device: Option<&Bound<'_, PyAny>>) -> PyResult<Device> {
    let Some(device) = device.filter(|device| !device.is_none()) else { return current(py) };
    match device.cast::<PyDevice>() {
        Ok(device) => Ok(by_stream(&device.get().0)),
        Err(_) => open(py, &device.extract::<String>()?).map(|device| by_stream(&device)),
    }
}

#[pymethods]
impl PyDevice {
    /// The product's name.
    #[getter]
    fn name(&self) -> &str {
        &self.0.info().name
    }

    /// `cpu`, `cuda`, `rocm` or `guest`.
    #[getter]
    fn backend(&self) -> &str {
        self.0.info().backend
    }

    /// The PCI address, if it has one.
    #[getter]
    fn address(&self) -> Option<&str> {
        self.0.info().address.as_deref()
    }

    /// Free bytes of its memory, and all.
    #[getter]
    fn memory(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let memory = py.detach(|| self.0.memory()).map_err(raised)?;
        Ok((memory.free, memory.total))
    }

    /// How many kernels were compiled for it, or found in its cache.
    #[getter]
    fn kernels(&self) -> usize {
        self.0.kernels()
    }

    /// Waits until all that was given to it has run.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        self.0.streams().iter().try_for_each(|stream| crate::interchange::settle(py, stream))
    }

    /// It by a further stream.
    fn _by_stream(&self, py: Python<'_>) -> PyResult<PyDevice> {
        py.detach(|| self.0.stream()).map(PyDevice).map_err(raised)
    }

    /// Which of its streams is used; 0 is its own.
    #[getter]
    fn _stream(&self) -> usize {
        self.0.number()
    }

    /// Waits until all that its stream was given has run.
    fn _synchronize_stream(&self, py: Python<'_>) -> PyResult<()> {
        crate::interchange::settle(py, &self.0)
    }

    fn __repr__(&self) -> String {
        let info = self.0.info();
        match &info.address {
            Some(address) => format!("<vmaccel.Device {} {address} ({})>", info.backend, info.name),
            None => format!("<vmaccel.Device {} ({})>", info.backend, info.name),
        }
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<PyDevice>().is_ok_and(|other| other.get().0.is_same(&self.0))
    }

    fn __hash__(&self) -> usize {
        std::ptr::from_ref(self.0.info()) as usize
    }
}

#[pyfunction]
#[pyo3(name = "open", signature = (name=None))]
fn open_device(py: Python<'_>, name: Option<&Bound<'_, PyAny>>) -> PyResult<PyDevice> {
    of(py, name).map(PyDevice)
}

/// Makes a device the one that this thread uses where none is named, or the process's again; gives the one before.
#[pyfunction]
fn set_current(device: Option<&Bound<'_, PyDevice>>) -> Option<PyDevice> {
    CURRENT.replace(device.map(|device| device.get().0.clone())).map(PyDevice)
}

/// Makes a device the one that all threads use where none is named and that have no other.
#[pyfunction]
fn set_default(device: &Bound<'_, PyDevice>) {
    with(|opened| opened.default = Some(device.get().0.main()));
    CURRENT.take();
}

/// Ends all devices, once what was given to them has run.
#[pyfunction]
fn shutdown(py: Python<'_>) -> PyResult<()> {
    let devices: Vec<Device> = with(|opened| {
        opened.default = None;
        opened.devices.drain().map(|(_, device)| device).collect()
    });
    py.detach(|| devices.iter().try_for_each(Device::stop)).map_err(raised)
}

/// What devices there are, as `open` takes them.
#[pyfunction]
fn available(py: Python<'_>) -> Vec<String> {
    py.detach(|| Accelerator::all().iter().map(|device| device.spec()).collect())
}

pub(crate) fn add(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(open_device, m)?)?;
    m.add_function(wrap_pyfunction!(set_current, m)?)?;
    m.add_function(wrap_pyfunction!(set_default, m)?)?;
    m.add_function(wrap_pyfunction!(shutdown, m)?)?;
    m.add_function(wrap_pyfunction!(available, m)?)
}
