//! What handles are of.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use vm_accel::Signature;
use vm_runtime::{AnyAccelerator, AnyEvent, Buffer, JitCompiler};

use super::pending::Pending;

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
    pub(crate) buffer: Buffer<AnyAccelerator>,
    pub(crate) of: Arc<Worker>,
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

/// A function that was submitted.
pub(crate) struct Job(pub(crate) Pending<i32>);

/// The devices of the process, once they were looked for.
static DEVICES: Mutex<Option<Vec<Arc<Device>>>> = Mutex::new(None);

/// Does something with the devices, which it may add to.
pub(crate) fn devices<R>(f: impl FnOnce(&mut Vec<Arc<Device>>) -> R) -> R {
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    f(devices.get_or_insert_with(|| AnyAccelerator::all().into_iter().map(Device::of).collect()))
}
