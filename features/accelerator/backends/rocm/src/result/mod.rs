//! HIP's objects, owned: each is ended once, when it is dropped, and each status becomes a `Result`.
//!
//! What needs the device to be the thread's current one enters it. Handles never leave this module, so the unsafe calls in it are
//! given handles that are live.
#![allow(unsafe_code)]

mod memory;
mod module;
mod stream;

use std::ffi::{CStr, c_char, c_int};
use std::marker::PhantomData;

use vm_accel::{Error, Result};

pub(crate) use memory::Live;
pub(crate) use module::{Function, Module};
pub(crate) use stream::{Event, Graph, Stream};

use crate::sys::{Attribute, Hip, Status};

/// `hipErrorOutOfMemory`.
pub(crate) const OUT_OF_MEMORY: i64 = 2;
/// `hipErrorNotReady`.
const NOT_READY: Status = 600;

impl Hip {
    /// How many devices there are.
    pub(crate) fn device_count(&self) -> Result<u32> {
        let mut count = 0;
        // SAFETY: the pointer is to a local.
        unsafe { self.hipGetDeviceCount(&raw mut count) }?;
        Ok(count.max(0) as u32)
    }

    /// The library's version, as `6.2.41134`.
    pub(crate) fn version(&self) -> Result<String> {
        let mut version = 0;
        // SAFETY: the pointer is to a local.
        unsafe { self.hipRuntimeGetVersion(&raw mut version) }?;
        Ok(format!("{}.{}.{}", version / 10_000_000, version / 100_000 % 100, version % 100_000))
    }
}

/// A device of the library's. Copies are the same one.
#[derive(Clone, Copy)]
pub(crate) struct Device {
    pub(crate) hip: &'static Hip,
    ordinal: c_int,
}

/// As long as it is there, a device is the calling thread's current one.
#[must_use]
pub(crate) struct Entered {
    hip: &'static Hip,
    before: Option<c_int>,
    _thread: PhantomData<*const ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: it was this thread's device before.
            ended(unsafe { self.hip.hipSetDevice(before) });
        }
    }
}

impl Device {
    pub(crate) fn ordinal(self) -> u32 {
        self.ordinal.cast_unsigned()
    }

    /// The device with a number, of which there are more.
    pub(crate) fn new(hip: &'static Hip, ordinal: u32) -> Self {
        Self { hip, ordinal: c_int::try_from(ordinal).unwrap_or(c_int::MAX) }
    }

    /// Makes it the thread's current one, and the one before again when the result is dropped.
    pub(crate) fn enter(self) -> Result<Entered> {
        let mut current = 0;
        // SAFETY: the pointer is to a local.
        unsafe { self.hip.hipGetDevice(&raw mut current) }?;
        let before = (current != self.ordinal).then_some(current);
        if before.is_some() {
            // SAFETY: a number that is no device's is refused.
            unsafe { self.hip.hipSetDevice(self.ordinal) }?;
        }
        Ok(Entered { hip: self.hip, before, _thread: PhantomData })
    }

    pub(crate) fn attribute(self, attribute: Attribute) -> Result<u32> {
        let mut value = 0;
        // SAFETY: the pointer is to a local.
        unsafe { self.hip.hipDeviceGetAttribute(&raw mut value, attribute as u32, self.ordinal) }?;
        Ok(value.max(0) as u32)
    }

    pub(crate) fn name(self) -> Result<String> {
        // SAFETY: it writes at most the length given.
        self.text(|text, bytes| unsafe { self.hip.hipDeviceGetName(text, bytes, self.ordinal) })
    }

    /// The PCI address in the Linux kernel's form.
    pub(crate) fn address(self) -> Result<String> {
        // SAFETY: it writes at most the length given.
        let address =
            self.text(|text, bytes| unsafe { self.hip.hipDeviceGetPCIBusId(text, bytes, self.ordinal) })?;
        Ok(address.to_ascii_lowercase())
    }

    fn text(self, get: impl FnOnce(*mut c_char, c_int) -> Result<()>) -> Result<String> {
        let mut buffer = [0u8; 256];
        get(buffer.as_mut_ptr().cast(), buffer.len() as c_int - 1)?;
        let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
        Ok(text.to_string_lossy().trim().to_owned())
    }

    pub(crate) fn memory_bytes(self) -> Result<u64> {
        let mut bytes = 0;
        // SAFETY: the pointer is to a local.
        unsafe { self.hip.hipDeviceTotalMem(&raw mut bytes, self.ordinal) }?;
        Ok(bytes as u64)
    }

    /// Free and total bytes.
    pub(crate) fn memory(self) -> Result<(u64, u64)> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers are to locals.
        unsafe { self.hip.hipMemGetInfo(&raw mut free, &raw mut total) }?;
        Ok((free as u64, total as u64))
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "device {} of {}", self.ordinal, self.hip.library)
    }
}

/// Says that an object could not be ended, as after a fault on the device.
fn ended(result: Result<()>) {
    if let Err(error) = result {
        tracing::debug!(%error, "an object was not ended");
    }
}

/// The error as it is if all is lost or the library lacks the function, else as one of loading.
fn or_bad(error: Error, bad: impl FnOnce(String) -> Error) -> Error {
    match error {
        Error::Lost { .. } | Error::Unavailable { .. } => error,
        error => bad(error.to_string()),
    }
}
