//! The driver's objects, owned: each is ended once, when it is dropped, and each status becomes a `Result`.
//!
//! What needs the context to be the thread's current one enters it. Handles never leave this module, so the unsafe calls in it
//! are given handles that are live.
#![allow(unsafe_code)]

mod external;
mod graph;
mod graphics;
#[cfg_attr(unix, path = "handle_unix.rs")]
#[cfg_attr(windows, path = "handle_windows.rs")]
mod handle;
#[cfg(unix)]
mod link;
mod log;
mod memory;
mod module;
mod pointer;
mod stream;
mod surface;
mod tensor;

use std::ffi::{CStr, c_char};
use std::marker::PhantomData;
use std::ptr;
use std::thread::ThreadId;

use vm_accel::{Error, Result};

pub(crate) use external::{ImportedMemory, ImportedSemaphore};
pub(crate) use graph::Graph;
pub(crate) use graphics::{GraphicsResource, MappedResource};
#[cfg(unix)]
pub(crate) use link::link;
pub(crate) use memory::Pool;
pub(crate) use module::{Function, Module};
pub use pointer::{Allocation, Place};
pub(crate) use stream::{Event, Stream};
pub(crate) use surface::Surface;
pub(crate) use tensor::Maps;

use crate::sys::{
    BorrowedAdapter, BorrowedContext, CUcontext, CUdevice, CUdevice_attribute, CUuuid, Driver, Status,
};

/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(crate) const OUT_OF_MEMORY: Status = 2;
/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: Status = 600;

/// Whether a status means that the context is gone. The codes are those whose description in `cuda.h` says that the
/// process must be ended and launched again, and those of a device that fell away.
fn is_sticky(status: Status) -> bool {
    matches!(status, 4 | 46 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 911 | 999)
}

impl Driver {
    /// A status as an error. Its call is named as the manual does, without the version.
    pub(crate) fn error(&self, call: &'static str, status: Status) -> Error {
        let call = call.strip_suffix("_v2").unwrap_or(call);
        let text = |get: unsafe extern "C" fn(Status, *mut *const c_char) -> Status| {
            let mut text = ptr::null();
            // SAFETY: the pointer is to a local; what the driver stores there is null or a string that is never freed.
            if unsafe { get(status, &raw mut text) } != 0 || text.is_null() {
                return "unknown".to_owned();
            }
            // SAFETY: as above.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        let (name, message) = (text(self.cuGetErrorName), text(self.cuGetErrorString));
        if is_sticky(status) {
            return Error::Lost { cause: format!("{call}: {name} ({status}), {message}") };
        }
        Error::Driver { call, code: i64::from(status), name, message }
    }

    #[inline]
    pub(crate) fn check(&self, call: &'static str, status: Status) -> Result<()> {
        if status == 0 { Ok(()) } else { Err(self.error(call, status)) }
    }

    /// How many devices there are.
    pub(crate) fn device_count(&self) -> Result<u32> {
        let mut count = 0;
        // SAFETY: the pointer is to a local.
        unsafe { self.cuDeviceGetCount(&raw mut count) }?;
        Ok(count.max(0) as u32)
    }

    /// The device with a number.
    pub(crate) fn device(&self, ordinal: u32) -> Result<Device> {
        let mut device = 0;
        // SAFETY: the pointer is to a local.
        unsafe { self.cuDeviceGet(&raw mut device, ordinal as i32) }?;
        Ok(Device(device))
    }

    /// The device that an adapter of Windows is.
    pub(crate) fn device_of(&self, adapter: &BorrowedAdapter) -> Result<Device> {
        let mut device = 0;
        // SAFETY: the adapter is there; the pointer is to a local.
        unsafe { self.cuD3D11GetDevice(&raw mut device, adapter.address()) }?;
        Ok(Device(device))
    }

    /// The newest CUDA that the driver knows, as `13.0`.
    pub(crate) fn version(&self) -> Result<String> {
        let mut version = 0;
        // SAFETY: the pointer is to a local.
        unsafe { self.cuDriverGetVersion(&raw mut version) }?;
        Ok(format!("{}.{}", version / 1000, version % 1000 / 10))
    }

    /// Free and total bytes of the current context's device.
    pub(crate) fn memory(&self) -> Result<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers are to locals.
        unsafe { self.cuMemGetInfo_v2(&raw mut free, &raw mut total) }?;
        Ok((free as u64, total as u64))
    }
}

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: u32 = 2;

/// As long as it is there, the calling thread may do what would else spoil captures that are open: load modules.
#[must_use]
pub(crate) struct Relaxed {
    driver: &'static Driver,
    before: u32,
    _thread: PhantomData<*const ()>,
}

impl Driver {
    /// Lets the calling thread load modules while streams are captured.
    pub(crate) fn relax_captures(&'static self) -> Result<Relaxed> {
        let mut mode = RELAXED;
        // SAFETY: the pointer is to a local.
        unsafe { self.cuThreadExchangeStreamCaptureMode(&raw mut mode) }?;
        Ok(Relaxed { driver: self, before: mode, _thread: PhantomData })
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: the pointer is to what is this value's.
        ended(unsafe { self.driver.cuThreadExchangeStreamCaptureMode(&raw mut self.before) });
    }
}

/// A device of the driver.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Device(pub(crate) CUdevice);

impl Device {
    pub(crate) fn attribute(self, driver: &Driver, attribute: CUdevice_attribute) -> Result<u32> {
        let mut value = 0;
        // SAFETY: the pointer is to a local.
        unsafe { driver.cuDeviceGetAttribute(&raw mut value, attribute, self.0) }?;
        Ok(value.max(0) as u32)
    }

    pub(crate) fn name(self, driver: &Driver) -> Result<String> {
        text(driver, "cuDeviceGetName", driver.cuDeviceGetName, self.0)
    }

    /// The PCI address in the Linux kernel's form.
    pub(crate) fn address(self, driver: &Driver) -> Result<String> {
        Ok(text(driver, "cuDeviceGetPCIBusId", driver.cuDeviceGetPCIBusId, self.0)?.to_ascii_lowercase())
    }

    /// The number by which other APIs know the device, or the part of it that MIG made.
    pub(crate) fn uuid(self, driver: &Driver) -> Result<[u8; 16]> {
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: the pointer is to a local.
        unsafe { driver.cuDeviceGetUuid_v2(&raw mut uuid, self.0) }?;
        Ok(uuid.bytes.map(|byte| byte.cast_unsigned()))
    }

    /// The number by which Windows knows the device; none elsewhere.
    pub(crate) fn luid(self, driver: &Driver) -> Result<Option<[u8; 8]>> {
        if driver.cuDeviceGetLuid.is_none() {
            return Ok(None);
        }
        let (mut luid, mut node) = ([0u8; 8], 0);
        // SAFETY: the pointers are to locals, of which the first has the 8 bytes that such a number has.
        unsafe { driver.cuDeviceGetLuid(luid.as_mut_ptr().cast(), &raw mut node, self.0) }?;
        Ok(Some(luid))
    }

    pub(crate) fn memory(self, driver: &Driver) -> Result<u64> {
        let mut bytes = 0;
        // SAFETY: the pointer is to a local.
        unsafe { driver.cuDeviceTotalMem_v2(&raw mut bytes, self.0) }?;
        Ok(bytes as u64)
    }
}

/// A string that the driver writes into a buffer.
fn text(
    driver: &Driver,
    call: &'static str,
    function: unsafe extern "C" fn(*mut c_char, i32, CUdevice) -> Status,
    device: CUdevice,
) -> Result<String> {
    let mut buffer = [0u8; 256];
    // SAFETY: the driver writes at most the length given.
    let status = unsafe { function(buffer.as_mut_ptr().cast(), buffer.len() as i32 - 1, device) };
    driver.check(call, status)?;
    let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
    Ok(text.to_string_lossy().trim().to_owned())
}

/// A context of a device, which all that is made in it keeps.
pub(crate) struct Context {
    driver: &'static Driver,
    handle: CUcontext,
    /// The device whose primary context it is, if it is to be released.
    retained: Option<Device>,
    /// The thread that had no current context before.
    thread: Option<ThreadId>,
}

// SAFETY: the handle is the driver's, which locks for itself; what needs a current context enters it on its own thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// As long as it is there, a context is the calling thread's current one.
#[must_use]
pub struct Entered<'a> {
    pushed: Option<&'a Driver>,
    _thread: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(driver) = self.pushed {
            let mut popped = ptr::null_mut();
            // SAFETY: `enter` pushed one on this thread, and what was pushed since was popped. The pointer is to a local.
            ended(unsafe { driver.cuCtxPopCurrent_v2(&raw mut popped) });
        }
    }
}

impl Context {
    /// The device's primary context, which PyTorch and the CUDA runtime use too.
    pub(crate) fn retain(driver: &'static Driver, device: Device) -> Result<Self> {
        let mut handle = ptr::null_mut();
        // SAFETY: the pointer is to a local.
        unsafe { driver.cuDevicePrimaryCtxRetain(&raw mut handle, device.0) }?;
        Ok(Self { driver, handle, retained: Some(device), thread: None })
    }

    /// The same, as the current one of a thread that has none: then nothing is to be pushed there.
    pub(crate) fn for_thread(driver: &'static Driver, device: Device) -> Result<Self> {
        let mut this = Self::retain(driver, device)?;
        if this.current()?.is_null() {
            // SAFETY: the context is retained as long as this value is there.
            unsafe { driver.cuCtxSetCurrent(this.handle) }?;
            this.thread = Some(std::thread::current().id());
        }
        Ok(this)
    }

    /// Somebody else's context, which must be one of the device.
    pub(crate) fn borrow(driver: &'static Driver, device: Device, context: &BorrowedContext) -> Result<Self> {
        let this = Self { driver, handle: context.handle(), retained: None, thread: None };
        let mut found = 0;
        {
            let _entered = this.enter()?;
            // SAFETY: the pointer is to a local.
            unsafe { driver.cuCtxGetDevice(&raw mut found) }?;
        }
        if found == device.0 {
            return Ok(this);
        }
        let what = "borrowing a context";
        Err(Error::Host {
            what,
            cause: format!("it is one of device {found}, the accelerator is {}", device.0),
        })
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.driver
    }

    pub(crate) fn handle(&self) -> CUcontext {
        self.handle
    }

    fn current(&self) -> Result<CUcontext> {
        let mut current = ptr::null_mut();
        // SAFETY: the pointer is to a local.
        unsafe { self.driver.cuCtxGetCurrent(&raw mut current) }?;
        Ok(current)
    }

    /// Makes it the thread's current context, and the one before again when the result is dropped.
    #[inline]
    pub(crate) fn enter(&self) -> Result<Entered<'static>> {
        self.enter_from(self.current()?)
    }

    /// The same of a thread whose current context is known.
    #[inline]
    pub(crate) fn enter_from(&self, current: CUcontext) -> Result<Entered<'static>> {
        let pushed = if current == self.handle { None } else { Some(self.push()?) };
        Ok(Entered { pushed, _thread: PhantomData })
    }

    #[cold]
    fn push(&self) -> Result<&'static Driver> {
        // SAFETY: the context is retained, or borrowed from somebody who keeps it, as long as this value is there.
        unsafe { self.driver.cuCtxPushCurrent_v2(self.handle) }?;
        Ok(self.driver)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let Some(device) = self.retained else { return };
        if self.thread == Some(std::thread::current().id())
            && self.current().is_ok_and(|it| it == self.handle)
        {
            // SAFETY: no context is current any more after this, as it was before.
            ended(unsafe { self.driver.cuCtxSetCurrent(ptr::null_mut()) });
        }
        // SAFETY: it was retained once by `retain`; what was made in it has been dropped before.
        ended(unsafe { self.driver.cuDevicePrimaryCtxRelease_v2(device.0) });
    }
}

/// Says that an object could not be ended, as after a fault on the device.
fn ended(result: Result<()>) {
    if let Err(error) = result {
        tracing::debug!(%error, "an object was not ended");
    }
}
