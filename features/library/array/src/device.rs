//! A device that arrays are on: an accelerator with a worker, and the kernels that were compiled for it.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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

/// The most streams that a device has beside its own.
pub const STREAMS: usize = 32;

/// A device, and the one of its streams that it is given work by. Clones are the same.
#[derive(Clone)]
pub struct Device {
    open: Arc<Open>,
    stream: Arc<Stream>,
}

struct Open {
    accelerator: Arc<Accelerator>,
    compiler: JitCompiler<Accelerator>,
    resources: Resources,
    /// Is a block of a kernel one thread?
    sequential: bool,
    /// The first is the device's own.
    streams: Mutex<Vec<Arc<Stream>>>,
    /// Which is given out next.
    next: AtomicUsize,
    pinned: crate::pinned::Blocks,
    process: u32,
    ended: AtomicBool,
    lease: Arc<()>,
}

struct Stream {
    number: usize,
    worker: Worker<Accelerator>,
    kernels: Mutex<HashMap<Key, Arc<Kernel<Accelerator>>, FxBuildHasher>>,
    left: Mutex<Option<Job<()>>>,
}

impl Stream {
    fn start(number: usize, accelerator: &Arc<Accelerator>) -> Result<Arc<Self>> {
        let name = if number == 0 { "arrays".into() } else { format!("arrays {number}") };
        let worker =
            Worker::start(Arc::clone(accelerator), WorkerOptions { name, ..WorkerOptions::default() })?;
        Ok(Arc::new(Self { number, worker, kernels: Mutex::default(), left: Mutex::default() }))
    }
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
        f.debug_struct("Device").field("name", &self.info().name).field("stream", &self.number()).finish()
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.stream, &other.stream)
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
        let stream = Stream::start(0, &accelerator)?;
        let open = Open {
            compiler: JitCompiler::new(Arc::clone(&accelerator)),
            resources: resources(accelerator.info()),
            accelerator,
            sequential,
            streams: Mutex::new(vec![Arc::clone(&stream)]),
            next: AtomicUsize::new(0),
            pinned: Mutex::default(),
            process: std::process::id(),
            ended: AtomicBool::new(false),
            lease: Arc::default(),
        };
        Ok(Self { open: Arc::new(open), stream })
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
        self.open.accelerator.info()
    }

    /// A further stream of it: what one is given runs beside what others are. There are at most [`STREAMS`], which are given out in turn.
    ///
    /// Arrays of one stream are used [on](crate::Array::on) another behind what computes them.
    ///
    /// # Errors
    /// What [`new`](Device::new) fails with; [`Error::Forked`], [`Error::Ended`].
    pub fn stream(&self) -> Result<Device> {
        self.worker()?;
        let mut streams = lock(&self.open.streams);
        let number = 1 + self.open.next.fetch_add(1, Ordering::Relaxed) % STREAMS;
        if let Some(stream) = streams.get(number) {
            return Ok(self.with(stream));
        }
        let stream = Stream::start(streams.len(), &self.open.accelerator)?;
        streams.push(Arc::clone(&stream));
        Ok(self.with(&stream))
    }

    /// All its streams, the first of which is its own.
    pub fn streams(&self) -> Vec<Device> {
        lock(&self.open.streams).iter().map(|stream| self.with(stream)).collect()
    }

    /// It with its own stream.
    #[must_use]
    pub fn main(&self) -> Device {
        self.with(&lock(&self.open.streams)[0])
    }

    fn with(&self, stream: &Arc<Stream>) -> Device {
        Device { open: Arc::clone(&self.open), stream: Arc::clone(stream) }
    }

    /// Which of its device's streams it has: 0 is the device's own.
    pub fn number(&self) -> usize {
        self.stream.number
    }

    /// Is it the same device, by whichever stream?
    pub fn is_same(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.open, &other.open)
    }

    /// Waits until all that its stream was given has run.
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
        lock(&self.stream.left).take()
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
                    *lock(&self.stream.left) = Some(ended);
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
        self.open.accelerator.ordinal()
    }

    /// How full its memory is.
    ///
    /// # Errors
    /// The driver's.
    pub fn memory(&self) -> Result<MemoryInfo> {
        Ok(self.worker()?.memory()?)
    }

    /// Takes no more work, waits for what there is, and ends the workers of all streams, with all memory that is not
    /// [shared](crate::Shared). Where some is, they end when that is let go of.
    ///
    /// # Errors
    /// [`Error::Deadline`] after [`TIMEOUT`].
    pub fn stop(&self) -> Result<()> {
        if self.worker().is_err() {
            return Ok(());
        }
        self.open.ended.store(true, Ordering::Release);
        let streams = lock(&self.open.streams).clone();
        // One stream may use what is of another.
        streams.iter().try_for_each(|stream| stream.worker.synchronize(TIMEOUT))?;
        if Arc::strong_count(&self.open.lease) > 1 {
            return Ok(());
        }
        Ok(streams.iter().try_for_each(|stream| stream.worker.stop(TIMEOUT))?)
    }

    /// Keeps its memory behind [`stop`](Device::stop).
    pub(crate) fn lease(&self) -> Arc<()> {
        Arc::clone(&self.open.lease)
    }

    /// How many kernels its stream has compiled or found in its cache so far.
    pub fn kernels(&self) -> usize {
        lock(&self.stream.kernels).len()
    }

    /// The worker, for launches of other kernels in order with the arrays'.
    ///
    /// # Errors
    /// [`Error::Forked`], [`Error::Ended`].
    pub fn worker(&self) -> Result<&Worker<Accelerator>> {
        match std::process::id() == self.open.process {
            true if self.open.ended.load(Ordering::Acquire) => Err(Error::Ended),
            true => Ok(&self.stream.worker),
            false => Err(Error::Forked),
        }
    }

    pub(crate) fn blocks(&self) -> &crate::pinned::Blocks {
        &self.open.pinned
    }

    pub(crate) fn resources(&self) -> &Resources {
        &self.open.resources
    }

    /// Is it this processor, whose kernels' addresses are the host's? A guest's device is not, although its host's may be one.
    pub fn is_cpu(&self) -> bool {
        self.info().backend == "cpu"
    }

    /// Is a block of its kernels one thread, which takes many elements?
    pub(crate) fn is_sequential(&self) -> bool {
        self.open.sequential
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
        let mut kernels = lock(&self.stream.kernels);
        if let Some(kernel) = kernels.get(&key) {
            return Ok(Arc::clone(kernel));
        }
        let written = write()?;
        let name = written.name().to_owned();
        let compiled = progress::reported(&name, || self.open.compiler.compile_kernel(written))?;
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// That two arrays are of one stream of one device.
pub(crate) fn same(function: &'static str, left: &Device, right: &Device) -> Result<()> {
    // One that was shut down, or is a parent's, is said to be so.
    left.worker()?;
    right.worker()?;
    match left == right {
        true => Ok(()),
        false => {
            let name = |device: &Device| match device.number() {
                0 => device.info().name.clone(),
                number => format!("{}, stream {number}", device.info().name),
            };
            Err(Error::Devices { function, left: name(left), right: name(right) })
        }
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;
    use crate::{Array, Binary, DType, Number};

    fn ones(device: &Device) -> Array {
        Array::full(device, DType::Int64, &[1 << 16], Number::Int(1)).expect("ones")
    }

    fn sum(a: &Array, b: &Array) -> Array {
        a.binary(Binary::Add, b).expect("a sum")
    }

    fn first(array: &Array) -> i64 {
        i64::from_le_bytes(array.to_bytes().expect("elements")[..8].try_into().expect("8 bytes"))
    }

    #[test]
    fn what_one_stream_computes_another_uses() {
        let device = Device::open("cpu").expect("the processor");
        let (a, b) = (device.stream().expect("a stream"), device.stream().expect("a stream"));
        assert_eq!([a.number(), b.number(), device.number()], [1, 2, 0]);
        assert!(a != b && a.is_same(&b) && a.main() == device);
        let mut x = ones(&device);
        for _ in 0..20 {
            let left = x.on(&a).expect("an array");
            let right = x.on(&b).expect("an array");
            let left = sum(&left, &left);
            let right = sum(&right, &ones(&b));
            // Those of other streams may be lazy, computed, or views, and be gone before they are used.
            right.evaluate().expect("a value");
            x = sum(&left.on(&device).expect("an array"), &right.on(&device).expect("an array"));
            x = sum(&x, &Array::full(&device, DType::Int64, &[], Number::Int(-2)).expect("a number"));
            drop((left, right));
        }
        // x becomes 3x - 1.
        let expect = (0..20).fold(1i64, |x, _| 3 * x - 1);
        assert_eq!(first(&x), expect);
        let error = x.binary(Binary::Add, &ones(&a)).expect_err("another stream's");
        assert!(error.to_string().contains("stream 1"), "{error}");
    }

    #[test]
    fn streams_are_given_out_in_turn_and_end_with_their_device() {
        let device = Device::open("cpu").expect("the processor");
        let numbers: Vec<_> = (0..STREAMS + 2).map(|_| device.stream().expect("a stream").number()).collect();
        assert_eq!(numbers, (1..=STREAMS).chain(1..=2).collect::<Vec<_>>());
        assert_eq!(device.streams().len(), STREAMS + 1);
        let stream = device.stream().expect("a stream");
        let array = sum(&ones(&stream), &ones(&stream));
        array.evaluate().expect("a value");
        stream.stop().expect("an end");
        assert!(matches!(device.stream(), Err(Error::Ended)));
        assert!(matches!(array.on(&device).and_then(|array| array.to_bytes()), Err(Error::Ended)));
    }
}
