//! What handles are of.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use vm_accel::Signature;
use vm_runtime::{AnyAccelerator, AnyEvent, Buffer, JitCompiler};

use super::error::Failure;
use super::pending::Pending;
use super::resource::{Mapped, Resource};

/// A device, and the compiler for it, whose cache its workers share.
pub(crate) struct Device(pub(crate) JitCompiler<AnyAccelerator>);

impl Device {
    pub(crate) fn of(accelerator: AnyAccelerator) -> Arc<Self> {
        Arc::new(Self(JitCompiler::new(Arc::new(accelerator))))
    }

    pub(crate) fn accelerator(&self) -> &Arc<AnyAccelerator> {
        self.0.accelerator()
    }
}

/// A worker.
pub(crate) struct Worker {
    pub(crate) worker: vm_accel::Worker<AnyAccelerator>,
    pub(crate) device: Arc<Device>,
    /// How long a call waits where it is not told.
    pub(crate) timeout: Duration,
}

/// Memory of a worker.
pub(crate) struct Memory {
    /// Before the worker, which is to be there when it is freed.
    pub(crate) holds: Holds,
    pub(crate) of: Arc<Worker>,
}

/// Whose memory it is.
pub(crate) enum Holds {
    /// The worker's.
    Own(Buffer<AnyAccelerator>),
    /// A resource's, as long as that is mapped.
    Resource(Arc<Resource>),
}

/// A buffer that is there as long as this is.
pub(crate) enum Lent<'a> {
    Own(&'a Buffer<AnyAccelerator>),
    Mapped(Arc<Mapped>),
}

impl Deref for Lent<'_> {
    type Target = Buffer<AnyAccelerator>;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Own(buffer) => buffer,
            Self::Mapped(mapped) => mapped.buffer(),
        }
    }
}

impl Memory {
    /// Its buffer, which `parameter` named.
    ///
    /// # Errors
    /// [`Failure::State`] for that of a resource that is not mapped.
    pub(crate) fn buffer(&self, parameter: impl fmt::Display) -> Result<Lent<'_>, Failure> {
        match &self.holds {
            Holds::Own(buffer) => Ok(Lent::Own(buffer)),
            Holds::Resource(resource) => resource.mapped(parameter).map(Lent::Mapped),
        }
    }
}

/// Kernels, each with its handle.
pub(crate) struct Module(pub(crate) Vec<(Arc<Kernel>, u64)>);

/// A kernel.
pub(crate) struct Kernel {
    pub(crate) kernel: vm_accel::Kernel<AnyAccelerator>,
    pub(crate) name: String,
    pub(crate) signature: Signature,
    pub(crate) of: Arc<Worker>,
}

/// A point in a worker's stream.
pub(crate) struct Event {
    pub(crate) event: Arc<AnyEvent>,
    pub(crate) of: Arc<Worker>,
}

/// How a worker and graphics take turns.
pub(crate) struct Link(pub(crate) vm_accel::Link<AnyAccelerator>);

/// A function that was submitted.
pub(crate) struct Job(pub(crate) Pending<i32>);

/// The devices of the process, once they were looked for.
static DEVICES: Mutex<Option<Vec<Arc<Device>>>> = Mutex::new(None);

/// Does something with the devices, which it may add to.
pub(crate) fn devices<R>(f: impl FnOnce(&mut Vec<Arc<Device>>) -> R) -> R {
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    f(devices.get_or_insert_with(|| AnyAccelerator::all().into_iter().map(Device::of).collect()))
}
