//! The device: the processor that this program runs on.

use std::num::NonZero;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use vm_accel::{Accelerator, Arguments, Artifact, DeviceInfo, Error, Grid, QueueOptions, Result};

use crate::fault;
use crate::host;
use crate::kernel::{Codes, CpuKernel};
use crate::pool::Pool;
use crate::queue::CpuQueue;
use crate::sys::{Scratch, visit};

/// Bytes of stack that a kernel takes of a thread that is not ours.
const CALLERS_STACK: u64 = 64 << 10;

/// The host's processor. Its queues share the threads that run blocks.
pub struct CpuAccelerator {
    info: DeviceInfo,
    pool: Arc<Pool>,
}

impl CpuAccelerator {
    /// The processor, with a thread for each core that this process may use.
    ///
    /// # Errors
    /// [`Error::Host`] if threads can't be started or `/proc` can't be read.
    pub fn new() -> Result<CpuAccelerator> {
        let threads = std::thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN);
        Self::with_threads(threads)
    }

    /// The processor, with N threads to run blocks, the queue's own among them.
    ///
    /// # Errors
    /// As [`CpuAccelerator::new`].
    pub fn with_threads(threads: NonZero<usize>) -> Result<CpuAccelerator> {
        let pool = Pool::start(threads.get())
            .map_err(|error| Error::Host { what: "starting a thread", cause: error.to_string() })?;
        let (_, memory_bytes) = host::memory()?;
        let info = DeviceInfo {
            name: host::name(),
            backend: "cpu",
            target: "cpu".into(),
            address: None,
            driver: host::version(),
            memory_bytes,
            compute_units: u32::try_from(threads.get()).unwrap_or(u32::MAX),
            warp_size: 32,
            block_threads: 1024,
            block: [1024, 1024, 64],
            grid: vm_abi::MAX_GRID,
            // The code's scratch memory is asked for as shared memory.
            shared_bytes: 1 << 30,
            parameter_bytes: vm_accel::MAX_PARAMETER_BYTES,
            unified: true,
            host_registration: true,
            guards: true,
        };
        Ok(CpuAccelerator { info, pool: Arc::new(pool) })
    }

    /// Loads a kernel for [`run`](Self::run).
    ///
    /// # Errors
    /// [`Error::Load`].
    pub fn load(&self, artifact: &Artifact) -> Result<Arc<CpuKernel>> {
        CpuKernel::load(artifact, &mut Codes::default()).map(Arc::new)
    }

    /// Runs a kernel and waits for its end, without a queue. Any thread that has 128 KiB of stack may call it, at the same time as others.
    /// It runs blocks itself if that is enough for the kernel; the others run on the device's threads but for one, of which there
    /// must be another.
    ///
    /// # Errors
    /// [`Error::Grid`] for a grid beyond the limits of compilers; [`Error::Arguments`] for arguments of another kernel; [`Error::Host`] where there is no memory or thread to
    /// run it.
    ///
    /// # Safety
    /// The memory that the arguments name is there meanwhile. The kernel can't be stopped, or its cancel flag was set in the
    /// arguments.
    #[allow(unsafe_code)]
    pub unsafe fn run(&self, kernel: &Arc<CpuKernel>, grid: Grid, arguments: &Arguments) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.launch(kernel, grid, arguments, None) }.map(drop)
    }

    /// The same where pages of `memory`, a range of addresses, may not be accessed: the kernel ends at the first that it touches, and the
    /// address is given; or one next to 0, where the kernel's code goes there with what is out of bounds. From the first call on the process has a handler of `SIGSEGV` and `SIGBUS`, which passes on what is not of a
    /// kernel.
    ///
    /// # Errors
    /// As for [`run`](Self::run), and [`Error::Host`] if the signals can't be handled.
    ///
    /// # Safety
    /// As for [`run`](Self::run), but for pages of `memory`.
    #[allow(unsafe_code)]
    pub unsafe fn run_within(
        &self,
        kernel: &Arc<CpuKernel>,
        grid: Grid,
        arguments: &Arguments,
        memory: &Range<u64>,
    ) -> Result<Option<u64>> {
        fault::expect().map_err(|error| Error::Host { what: "handling faults", cause: error.to_string() })?;
        // SAFETY: as the caller promises.
        unsafe { self.launch(kernel, grid, arguments, Some(memory)) }
    }

    /// # Safety
    /// As for [`run_within`](Self::run_within).
    #[allow(unsafe_code)]
    unsafe fn launch(
        &self,
        kernel: &Arc<CpuKernel>,
        grid: Grid,
        arguments: &Arguments,
        memory: Option<&Range<u64>>,
    ) -> Result<Option<u64>> {
        kernel.check(grid, arguments)?;
        let (stop, params, others) = (AtomicBool::new(false), arguments.words(), self.pool.threads() - 1);
        let launch = |scratch: Option<&mut Scratch>| {
            let others = others - usize::from(scratch.is_some()).min(others);
            // SAFETY: the arguments have the kernel's form, and no number of the grid is 0; the caller promises the rest.
            unsafe { self.pool.launch(kernel, params, grid, scratch, others, &stop, memory) }
        };
        let ran = match kernel.stack() {
            ..=CALLERS_STACK => visit(|scratch| launch(Some(scratch))),
            _ => launch(None),
        };
        ran.map_err(|error| Error::Host { what: "running a kernel", cause: error.to_string() })
    }
}

impl Accelerator for CpuAccelerator {
    type Queue = CpuQueue;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn open(&self, options: &QueueOptions) -> Result<CpuQueue> {
        CpuQueue::open(Arc::clone(&self.pool), &self.info.name, options)
    }
}
