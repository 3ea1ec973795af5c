//! A simulated accelerator, with faults on demand.
//!
//! It is as late as a GPU: commands are kept, and run only when somebody polls an event; while the
//! device is [paused](FakeAccelerator::pause) they do not run at all. A command that touches freed memory faults, and
//! the fault sticks. Fresh memory holds 0xA5 in every byte.

mod heap;
mod programs;
mod queue;
mod script;
mod stream;

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

pub use queue::{FakeEvent, FakeGraph, FakeKernel, FakeQueue};
pub use script::Script;

use crate::accelerator::Accelerator;
use crate::artifact::Artifact;
use crate::device::{DeviceInfo, QueueOptions};
use crate::error::{Error, Result};
use crate::programs::Program;

/// The image that the simulated device takes; the entry says which program it is.
const IMAGE: &[u8] = b"fake";

/// What the simulated driver maps, as the keeper of a [`BorrowedResource`](crate::sys::BorrowedResource): a file's bytes, which it takes
/// when they are mapped, and gives back when they are freed.
#[derive(Debug)]
pub struct FakeResource {
    /// The file, which is as long.
    pub file: File,
    /// How many bytes it has.
    pub bytes: u64,
}

/// A call in which a fault can be planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FakeCall {
    /// [`Accelerator::open`], [`Queue::stream`](crate::Queue::stream).
    Open,
    /// [`Queue::allocate`](crate::Queue::allocate).
    Allocate,
    /// [`Queue::free`](crate::Queue::free).
    Free,
    /// [`Queue::copy`](crate::Queue::copy).
    Copy,
    /// [`Queue::fill`](crate::Queue::fill).
    Fill,
    /// [`Queue::record`](crate::Queue::record).
    Record,
    /// [`Queue::wait_event`](crate::Queue::wait_event).
    WaitEvent,
    /// [`Queue::import_memory`](crate::Queue::import_memory), [`Queue::import_semaphore`](crate::Queue::import_semaphore),
    /// [`Queue::register_resource`](crate::Queue::register_resource), [`Queue::map_resource`](crate::Queue::map_resource).
    Import,
    /// [`Queue::wait_semaphore`](crate::Queue::wait_semaphore).
    WaitSemaphore,
    /// [`Queue::signal_semaphore`](crate::Queue::signal_semaphore).
    SignalSemaphore,
    /// [`Queue::acquire`](crate::Queue::acquire).
    Acquire,
    /// [`Queue::release`](crate::Queue::release).
    Release,
    /// [`Queue::launch`](crate::Queue::launch).
    Launch,
    /// [`Queue::end_capture`](crate::Queue::end_capture).
    EndCapture,
}

/// What a planted fault does.
#[derive(Clone, Debug)]
enum Fault {
    Fail(Error),
    Panic,
}

#[derive(Default)]
struct Controls {
    scripts: Mutex<HashMap<String, Script>>,
    faults: Mutex<VecDeque<(FakeCall, Fault)>>,
    paused: AtomicBool,
    captured: AtomicBool,
    /// Launches that ran as nodes of graph execs.
    graph_launches: AtomicU64,
    lost: AtomicBool,
    memory: AtomicU64,
    used: AtomicU64,
    registered: AtomicU64,
    imported: AtomicU64,
}

impl Controls {
    fn check(&self, call: FakeCall) -> Result<()> {
        if self.lost.load(Ordering::Acquire) {
            return Err(Error::Lost { cause: "the simulated device was lost".into() });
        }
        let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(index) = faults.iter().position(|(planned, _)| *planned == call) else { return Ok(()) };
        let fault = faults.remove(index);
        drop(faults);
        match fault {
            Some((_, Fault::Panic)) => panic!("planted in {call:?}"),
            Some((_, Fault::Fail(error))) => Err(error),
            None => Ok(()),
        }
    }
}

/// The simulated accelerator.
pub struct FakeAccelerator {
    info: DeviceInfo,
    controls: Arc<Controls>,
}

impl Default for FakeAccelerator {
    fn default() -> Self {
        Self::new()
    }
}

impl FakeAccelerator {
    /// A device with 64 MiB of memory.
    pub fn new() -> Self {
        Self::with_memory(64 << 20)
    }

    /// A device with `bytes` bytes of memory.
    pub fn with_memory(bytes: u64) -> Self {
        let controls = Controls { memory: AtomicU64::new(bytes), ..Controls::default() };
        let info = DeviceInfo {
            name: "simulated accelerator".into(),
            backend: "fake",
            target: "fake".into(),
            address: None,
            driver: env!("CARGO_PKG_VERSION").into(),
            memory_bytes: bytes,
            compute_units: 1,
            warp_size: 32,
            block_threads: 1024,
            block: [1024, 1024, 64],
            grid: [i32::MAX as u32, 65535, 65535],
            shared_bytes: 48 << 10,
            parameter_bytes: vm_abi::PARAMETER_BYTES,
            unified: true,
            host_registration: true,
            guards: true,
        };
        Self { info, controls: Arc::new(controls) }
    }

    /// Makes the next such call fail with `error`.
    pub fn fail_next(&self, call: FakeCall, error: Error) {
        self.plant(call, Fault::Fail(error));
    }

    /// Makes the next such call panic.
    pub fn panic_next(&self, call: FakeCall) {
        self.plant(call, Fault::Panic);
    }

    fn plant(&self, call: FakeCall, fault: Fault) {
        self.controls.faults.lock().unwrap_or_else(PoisonError::into_inner).push_back((call, fault));
    }

    /// Makes kernels of this entry symbol that are loaded from now on do what `script` says, whatever their code and parameters.
    pub fn script(&self, entry: &str, script: Script) {
        let mut scripts = self.controls.scripts.lock().unwrap_or_else(PoisonError::into_inner);
        scripts.insert(entry.to_owned(), script);
    }

    /// Stops the device: what was started does not get done until [`FakeAccelerator::resume`].
    pub fn pause(&self) {
        self.controls.paused.store(true, Ordering::Release);
    }

    /// Lets the device go on.
    pub fn resume(&self) {
        self.controls.paused.store(false, Ordering::Release);
    }

    /// Says that the owner of all streams captures them, or that he has ended that.
    pub fn set_captured(&self, captured: bool) {
        self.controls.captured.store(captured, Ordering::Release);
    }

    /// Loses the context, as a fault on the device does.
    pub fn lose(&self) {
        self.controls.lost.store(true, Ordering::Release);
    }

    /// Launches so far that were given as nodes of a [graph exec](crate::Queue::graph_exec).
    pub fn graph_launches(&self) -> u64 {
        self.controls.graph_launches.load(Ordering::Acquire)
    }

    /// The bytes of device memory in use by all queues.
    pub fn used(&self) -> u64 {
        self.controls.used.load(Ordering::Acquire)
    }

    /// The bytes of host memory that are registered with queues.
    pub fn registered(&self) -> u64 {
        self.controls.registered.load(Ordering::Acquire)
    }

    /// The bytes of other APIs' memory that queues have imported.
    pub fn imported(&self) -> u64 {
        self.controls.imported.load(Ordering::Acquire)
    }

    /// A program, for this device.
    #[allow(unsafe_code)]
    pub fn artifact(program: Program) -> Artifact {
        let image = if program == Program::Broken { &b"?"[..] } else { IMAGE };
        // SAFETY: the simulated kernels keep to their views.
        unsafe { Artifact::new(image, program.signature()) }.expect("a program's signature is a valid one")
    }
}

impl Accelerator for FakeAccelerator {
    type Queue = FakeQueue;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn open(&self, options: &QueueOptions) -> Result<Self::Queue> {
        self.controls.check(FakeCall::Open)?;
        Ok(FakeQueue::new(Arc::clone(&self.controls), *options))
    }
}
