//! DLPack's structures, and the capsules that they travel in (`dlpack.h` 1.0).

use std::any::Any;
use std::ffi::{CStr, c_int, c_void};
use std::mem::offset_of;
use std::ptr;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

const NAMES: [&CStr; 2] = [c"dltensor", c"dltensor_versioned"];
const USED: [&CStr; 2] = [c"used_dltensor", c"used_dltensor_versioned"];
const MAJOR: u32 = 1;
/// The most dimensions that are taken.
const MAX_RANK: i32 = 64;
const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;

#[repr(C)]
struct DLTensor {
    data: *mut c_void,
    device: [i32; 2],
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Unversioned {
    tensor: DLTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: DLTensor,
}

/// A tensor of another library's, which is let go of once.
pub(crate) enum Managed {
    Unversioned(*mut c_void),
    Versioned(*mut c_void),
}

// SAFETY: DLPack lets the deleter be called on any thread, and nothing else is done with the pointer.
unsafe impl Send for Managed {}
// SAFETY: as above; shared references give nothing.
unsafe impl Sync for Managed {}

impl Managed {
    /// Calls the deleter, which may use the interpreter.
    pub(crate) fn release(self, _: Python<'_>) {
        match self {
            // SAFETY: the pointer came of a capsule that was renamed, so the tensor is this value's, which is gone after this.
            Self::Unversioned(raw) => unsafe { delete_unversioned(raw.cast()) },
            // SAFETY: as above.
            Self::Versioned(raw) => unsafe { delete_versioned(raw.cast()) },
        }
    }
}

/// # Safety
/// The tensor is the caller's, who does not use it again.
unsafe fn delete_unversioned(raw: *mut Unversioned) {
    // SAFETY: as the caller promises.
    if let Some(deleter) = unsafe { (*raw).deleter } {
        // SAFETY: as above.
        unsafe { deleter(raw) };
    }
}

/// # Safety
/// The tensor is the caller's, who does not use it again.
unsafe fn delete_versioned(raw: *mut Versioned) {
    // SAFETY: as the caller promises.
    if let Some(deleter) = unsafe { (*raw).deleter } {
        // SAFETY: as above.
        unsafe { deleter(raw) };
    }
}

/// What a tensor says of itself. Whether it is true, nobody knows.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    /// Type and number of the device.
    pub(crate) device: [i32; 2],
    /// Code, bits and lanes of an element.
    pub(crate) element: (u8, u8, u16),
    /// Of the first element.
    pub(crate) address: u64,
    pub(crate) shape: Vec<u64>,
    /// In elements.
    pub(crate) strides: Vec<i64>,
}

fn refused(what: String) -> PyErr {
    PyBufferError::new_err(what)
}

/// What is in a capsule that was not consumed, and how it is consumed.
pub(crate) struct Capsule<'py> {
    capsule: Bound<'py, PyAny>,
    /// Is it versioned?
    kind: usize,
    raw: *mut c_void,
    pub(crate) tensor: Tensor,
}

impl<'py> Capsule<'py> {
    /// Looks into a capsule, which goes on owning the tensor.
    pub(crate) fn new(capsule: Bound<'py, PyAny>) -> PyResult<Self> {
        let is = |name: &&CStr| {
            // SAFETY: any object may be asked.
            unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) != 0 }
        };
        let Some(kind) = NAMES.iter().position(is) else {
            return Err(refused("__dlpack__ gave no capsule of a tensor that is not consumed yet".into()));
        };
        // SAFETY: it is a capsule of this name.
        let raw = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAMES[kind].as_ptr()) };
        let tensor = match kind {
            // SAFETY: a capsule of this name has such a structure, which it keeps while it is not consumed.
            0 => unsafe { read(raw.cast()) }?,
            _ => {
                // SAFETY: as above; the version comes first in all versions.
                let major = unsafe { (*raw.cast::<Versioned>()).major };
                if major != MAJOR {
                    return Err(refused(format!("the tensor is of DLPack {major}, {MAJOR} is known here")));
                }
                let tensor = raw.wrapping_byte_add(offset_of!(Versioned, tensor)).cast();
                // SAFETY: as above, of a version that is known.
                unsafe { read(tensor) }?
            }
        };
        Ok(Self { capsule, kind, raw, tensor })
    }

    /// Takes the tensor out.
    pub(crate) fn consume(self) -> PyResult<Managed> {
        // SAFETY: it is a capsule, and the name is there for ever.
        if unsafe { ffi::PyCapsule_SetName(self.capsule.as_ptr(), USED[self.kind].as_ptr()) } != 0 {
            return Err(PyErr::fetch(self.capsule.py()));
        }
        Ok(if self.kind == 0 { Managed::Unversioned(self.raw) } else { Managed::Versioned(self.raw) })
    }
}

/// Copies what a tensor says.
///
/// # Safety
/// It is a tensor, as are its shape and its strides, if it has some, of so many dimensions.
unsafe fn read(tensor: *const DLTensor) -> PyResult<Tensor> {
    // SAFETY: as the caller promises.
    let DLTensor { data, device, ndim, code, bits, lanes, shape, strides, byte_offset } =
        unsafe { ptr::read(tensor) };
    if !(0..=MAX_RANK).contains(&ndim) {
        return Err(refused(format!("a tensor of {ndim} dimensions; up to {MAX_RANK} are taken")));
    }
    let numbers = |at: *const i64| -> Vec<i64> {
        // SAFETY: as the caller promises.
        (0..ndim as usize).map(|d| unsafe { at.wrapping_add(d).read_unaligned() }).collect()
    };
    if shape.is_null() && ndim != 0 {
        return Err(refused("a tensor without a shape".into()));
    }
    let mut extents = Vec::with_capacity(ndim as usize);
    for extent in numbers(shape) {
        extents.push(
            u64::try_from(extent).map_err(|_| refused(format!("a tensor with an extent of {extent}")))?,
        );
    }
    let strides = if strides.is_null() {
        let mut dense = vec![1i64; extents.len()];
        for d in (1..extents.len()).rev() {
            let stride =
                i64::try_from(extents[d].max(1)).ok().and_then(|extent| dense[d].checked_mul(extent));
            dense[d - 1] = stride.ok_or_else(|| refused(format!("a tensor of extents {extents:?}")))?;
        }
        dense
    } else {
        numbers(strides)
    };
    let address = (data as u64).checked_add(byte_offset);
    let address = address.ok_or_else(|| refused(format!("a tensor at {data:?} and {byte_offset} bytes")))?;
    Ok(Tensor { device, element: (code, bits, lanes), address, shape: extents, strides })
}

/// A tensor of ours, which comes first, with what it points to and what keeps its memory.
#[repr(C)]
struct Exported<T> {
    managed: T,
    _extents: [Vec<i64>; 2],
    _keeper: Box<dyn Any + Send>,
}

impl<T> Exported<T> {
    fn raw(managed: T, extents: [Vec<i64>; 2], keeper: Box<dyn Any + Send>) -> *mut c_void {
        Box::into_raw(Box::new(Self { managed, _extents: extents, _keeper: keeper })).cast()
    }
}

unsafe extern "C" fn drop_unversioned(raw: *mut Unversioned) {
    // SAFETY: this is the deleter of what `export` put into such a box, with the tensor first; consumers call it once.
    drop(unsafe { Box::from_raw(raw.cast::<Exported<Unversioned>>()) });
}

unsafe extern "C" fn drop_versioned(raw: *mut Versioned) {
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(raw.cast::<Exported<Versioned>>()) });
}

/// What a capsule that nobody consumed had is let go of with it.
unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    for (kind, name) in NAMES.iter().enumerate() {
        // SAFETY: the interpreter calls this with the capsule, once; that it has this name says that the tensor is its own.
        let is_valid = unsafe { ffi::PyCapsule_IsValid(capsule, name.as_ptr()) };
        if is_valid == 0 {
            continue;
        }
        // SAFETY: as above.
        let raw = unsafe { ffi::PyCapsule_GetPointer(capsule, name.as_ptr()) };
        match kind {
            // SAFETY: as above.
            0 => unsafe { delete_unversioned(raw.cast()) },
            // SAFETY: as above.
            _ => unsafe { delete_versioned(raw.cast()) },
        }
    }
}

/// How a tensor is given away.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Export {
    /// In the structure that has a version and flags; read only, if it is no copy. The other can't say that.
    pub(crate) versioned: bool,
    /// Is it a copy for the consumer, who may write it?
    pub(crate) copied: bool,
}

/// A capsule of a tensor, which `keeper` keeps.
pub(crate) fn export<'py>(
    py: Python<'py>,
    tensor: &Tensor,
    how: Export,
    keeper: impl Any + Send,
) -> PyResult<Bound<'py, PyAny>> {
    let mut shape: Vec<i64> = tensor.shape.iter().map(|extent| extent.cast_signed()).collect();
    let mut strides = tensor.strides.clone();
    let keeper: Box<dyn Any + Send> = Box::new(keeper);
    let ours = DLTensor {
        data: tensor.address as *mut c_void,
        device: tensor.device,
        ndim: shape.len() as c_int,
        code: tensor.element.0,
        bits: tensor.element.1,
        lanes: tensor.element.2,
        shape: shape.as_mut_ptr(),
        strides: strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let extents = [shape, strides];
    let raw = if how.versioned {
        let (context, deleter) = (ptr::null_mut(), Some(drop_versioned as _));
        let flags = if how.copied { IS_COPIED } else { READ_ONLY };
        let managed = Versioned { major: MAJOR, minor: 0, context, deleter, flags, tensor: ours };
        Exported::raw(managed, extents, keeper)
    } else {
        let (context, deleter) = (ptr::null_mut(), Some(drop_unversioned as _));
        Exported::raw(Unversioned { tensor: ours, context, deleter }, extents, keeper)
    };
    let name = NAMES[usize::from(how.versioned)].as_ptr();
    // SAFETY: the pointer is not null, the name is there for ever, and the destructor takes such capsules.
    let capsule = unsafe { ffi::PyCapsule_New(raw, name, Some(drop_capsule)) };
    if capsule.is_null() {
        match how.versioned {
            // SAFETY: nobody else has the tensor.
            true => unsafe { drop_versioned(raw.cast()) },
            // SAFETY: as above.
            false => unsafe { drop_unversioned(raw.cast()) },
        }
        return Err(PyErr::fetch(py));
    }
    // SAFETY: it is a new reference.
    Ok(unsafe { Bound::from_owned_ptr(py, capsule) })
}
