//! A device that arrays are on: an accelerator with a worker, and the kernels that were compiled for it.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustc_hash::FxBuildHasher;
use vm_ir::Kernel as Written;
use vm_runtime::kernels::family::{Kind, Resources};
use vm_runtime::{
    Accelerator as _, Argument, DeviceInfo, JitCompiler, Job, Kernel, MemoryInfo, Queue as _, Worker,
    WorkerOptions, resources,
};

use crate::Accelerator;
use crate::emit;
use crate::error::{Error, Result};
use crate::program::{Form, Program};
use crate::progress;
use crate::sys::Held;

/// How long anything of a device may be waited for.
pub const TIMEOUT: Duration = Duration::from_secs(300);

/// A device. Clones are the same one.
#[derive(Clone)]
pub struct Device(Arc<Open>);

struct Open {
    worker: Worker<Accelerator>,
    compiler: JitCompiler<Accelerator>,
    kernels: Mutex<HashMap<Key, Arc<Kernel<Accelerator>>, FxBuildHasher>>,
    resources: Resources,
    /// Is a block of a kernel one thread?
    sequential: bool,
    pinned: crate::pinned::Blocks,
    process: u32,
    ended: AtomicBool,
    left: Mutex<Option<Job<()>>>,
    lease: Arc<()>,
}

/// What a kernel is found by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    Program(Program, Form),
    /// One of the kernel library's.
    Library(vm_runtime::kernels::call::Entry),
    /// One of this crate's own, by its name.
    Own(&'static str, Vec<u64>),
    /// A caller's, by its text.
    Written(Arc<str>),
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.info().name).finish()
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Device {}

impl Device {
    /// Starts a worker on an accelerator.
    ///
    /// # Errors
    /// What [`Worker::start`] fails with.
    pub fn new(accelerator: Arc<Accelerator>) -> Result<Self> {
        let sequential = resources(accelerator.info()).kind == Kind::Cpu;
        Self::with_blocks(accelerator, sequential)
    }

    /// The same with kernels of blocks of one thread, or of many: each runs on every accelerator, if not as fast.
    pub(crate) fn with_blocks(accelerator: Arc<Accelerator>, sequential: bool) -> Result<Self> {
        let compiler = JitCompiler::new(Arc::clone(&accelerator));
        let resources = resources(accelerator.info());
        let options = WorkerOptions { name: "arrays".into(), ..WorkerOptions::default() };
        let worker = Worker::start(accelerator, options)?;
        let (kernels, pinned, ended, left, lease) = Default::default();
        let process = std::process::id();
        Ok(Self(Arc::new(Open {
            worker,
            compiler,
            kernels,
            resources,
            sequential,
            pinned,
            process,
            ended,
            left,
            lease,
        })))
    }

    /// Opens one by what it is called: `auto`, `cpu`, `cuda:N`, `rocm:N`, `guest` or a PCI address ([`Accelerator::open`]).
    ///
    /// # Errors
    /// [`Error::Device`] if there is none, and what [`new`](Device::new) fails with.
    pub fn open(spec: &str) -> Result<Self> {
        let accelerator = Accelerator::open(spec).map_err(|error| Error::Device(error.to_string()))?;
        Self::new(Arc::new(accelerator))
    }

    /// What it is.
    pub fn info(&self) -> &DeviceInfo {
        self.0.worker.accelerator().info()
    }

    /// Waits until all that was given to it has run.
    ///
    /// # Errors
    /// What failed meanwhile; [`Error::Deadline`] after [`TIMEOUT`].
    pub fn synchronize(&self) -> Result<()> {
        if let Some(left) = self.left() {
            left.wait(Instant::now() + TIMEOUT)?;
        }
        Ok(self.worker()?.synchronize(TIMEOUT)?)
    }

    /// A fence that somebody stopped to wait for: what failed before it is told by it alone.
    fn left(&self) -> Option<Job<()>> {
        self.0.left.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// As [`synchronize`](Device::synchronize), but every 50 ms `go_on` is asked. What it fails with ends the wait, not the work.
    ///
    /// # Errors
    /// As [`synchronize`](Device::synchronize).
    pub fn synchronize_while<E>(
        &self,
        mut go_on: impl FnMut() -> Result<(), E>,
    ) -> Result<std::result::Result<(), E>> {
        let deadline = Instant::now() + TIMEOUT;
        let mut wait = |ended: Job<()>| {
            while !ended.ends_by(deadline.min(Instant::now() + Duration::from_millis(50))) {
                if let Err(error) = go_on() {
                    *self.0.left.lock().unwrap_or_else(PoisonError::into_inner) = Some(ended);
                    return Ok(Err(error));
                }
                if Instant::now() >= deadline {
                    break;
                }
            }
            Ok::<_, Error>(Ok(ended.wait(deadline)?))
        };
        if let Some(left) = self.left()
            && let Err(error) = wait(left)?
        {
            return Ok(Err(error));
        }
        wait(self.worker()?.fence()?)
    }

    /// Its stream as other libraries name it, to order their work with the arrays'; none where there are no such streams.
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub fn handle(&self) -> Result<Option<u64>> {
        self.with_queue(|queue| Ok(queue.handle()))
    }

    pub(crate) fn with_queue<R: Send>(
        &self,
        f: impl FnOnce(
            &<Accelerator as vm_runtime::Accelerator>::Queue,
        ) -> std::result::Result<R, vm_runtime::Error>
        + Send,
    ) -> Result<R> {
        let deadline = Instant::now() + TIMEOUT;
        Ok(self.worker()?.submit_and_wait(deadline, |session| f(session.queue()))?)
    }

    /// Its number, as the driver of its kind counts the devices that it shows this process.
    pub fn ordinal(&self) -> Option<u32> {
        self.0.worker.accelerator().ordinal()
    }

    /// How full its memory is.
    ///
    /// # Errors
    /// The driver's.
    pub fn memory(&self) -> Result<MemoryInfo> {
        Ok(self.worker()?.memory()?)
    }

    /// Takes no more work, waits for what there is, and ends the worker, with all memory that is not [shared](crate::Shared). Where some
    /// is, it ends when that is let go of.
    ///
    /// # Errors
    /// [`Error::Deadline`] after [`TIMEOUT`].
    pub fn stop(&self) -> Result<()> {
        let Ok(worker) = self.worker() else { return Ok(()) };
        self.0.ended.store(true, Ordering::Release);
        if Arc::strong_count(&self.0.lease) > 1 {
            return Ok(worker.synchronize(TIMEOUT)?);
        }
        Ok(worker.stop(TIMEOUT)?)
    }

    /// Keeps its memory behind [`stop`](Device::stop).
    pub(crate) fn lease(&self) -> Arc<()> {
        Arc::clone(&self.0.lease)
    }

    /// How many kernels it has compiled or found in its cache so far.
    pub fn kernels(&self) -> usize {
        self.0.kernels.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// The worker, for launches of other kernels in order with the arrays'.
    ///
    /// # Errors
    /// [`Error::Forked`], [`Error::Ended`].
    pub fn worker(&self) -> Result<&Worker<Accelerator>> {
        match std::process::id() == self.0.process {
            true if self.0.ended.load(Ordering::Acquire) => Err(Error::Ended),
            true => Ok(&self.0.worker),
            false => Err(Error::Forked),
        }
    }

    pub(crate) fn blocks(&self) -> &crate::pinned::Blocks {
        &self.0.pinned
    }

    pub(crate) fn resources(&self) -> &Resources {
        &self.0.resources
    }

    /// Is it this processor, whose kernels' addresses are the host's? A guest's device is not, although its host's may be one.
    pub fn is_cpu(&self) -> bool {
        self.info().backend == "cpu"
    }

    /// Is a block of its kernels one thread, which takes many elements?
    pub(crate) fn is_sequential(&self) -> bool {
        self.0.sequential
    }

    pub(crate) fn allocate(&self, bytes: u64) -> Result<Arc<Held>> {
        Ok(Arc::new(Held::new(self.worker()?.allocate(bytes.max(1))?)))
    }

    pub(crate) fn program(&self, program: &Program, form: &Form) -> Result<Arc<Kernel<Accelerator>>> {
        self.kernel(Key::Program(program.clone(), form.clone()), || emit::kernel(program, form))
    }

    pub(crate) fn library(
        &self,
        entry: &vm_runtime::kernels::call::Entry,
    ) -> Result<Arc<Kernel<Accelerator>>> {
        self.kernel(Key::Library(*entry), || Ok(entry.kernel(vm_ir::GuestAddr(0))?))
    }

    pub(crate) fn own(
        &self,
        name: &'static str,
        numbers: Vec<u64>,
        write: impl FnOnce() -> Result<Written>,
    ) -> Result<Arc<Kernel<Accelerator>>> {
        self.kernel(Key::Own(name, numbers), write)
    }

    pub(crate) fn written(&self, text: &Arc<str>, kernel: &Written) -> Result<Arc<Kernel<Accelerator>>> {
        self.kernel(Key::Written(Arc::clone(text)), || Ok(kernel.clone()))
    }

    fn kernel(&self, key: Key, write: impl FnOnce() -> Result<Written>) -> Result<Arc<Kernel<Accelerator>>> {
        let worker = self.worker()?;
        let mut kernels = self.0.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = kernels.get(&key) {
            return Ok(Arc::clone(kernel));
        }
        let written = write()?;
        let name = written.name().to_owned();
        let compiled = progress::reported(&name, || self.0.compiler.compile_kernel(written))?;
        let kernel = Arc::new(worker.load(compiled.artifact())?);
        kernels.insert(key, Arc::clone(&kernel));
        Ok(kernel)
    }

    pub(crate) fn launch(
        &self,
        kernel: &Kernel<Accelerator>,
        grid: [u32; 3],
        arguments: &[Argument<'_, Accelerator>],
    ) -> Result<()> {
        Ok(self.worker()?.launch(kernel, grid, arguments)?)
    }
}

/// That two arrays are of one device.
pub(crate) fn same(function: &'static str, left: &Device, right: &Device) -> Result<()> {
    // One that was shut down, or is a parent's, is said to be so.
    left.worker()?;
    right.worker()?;
    match left == right {
        true => Ok(()),
        false => {
            Err(Error::Devices { function, left: left.info().name.clone(), right: right.info().name.clone() })
        }
    }
}
