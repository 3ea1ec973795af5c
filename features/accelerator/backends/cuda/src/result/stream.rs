//! Streams and events.

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use vm_accel::{Arguments, Grid, Result};

use super::{Context, Function, Graph, NOT_READY, ended};
use crate::sys::{BorrowedStream, CUevent, CUstream, Driver};

/// `CU_STREAM_NON_BLOCKING`: the stream does not wait for the legacy default stream.
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const NO_TIME: u32 = 2;
/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`: other threads' calls do not spoil a capture.
const THREAD_LOCAL: u32 = 1;
// `CU_LAUNCH_PARAM_END`, `_BUFFER_POINTER` and `_BUFFER_SIZE`.
const END: usize = 0;
const BUFFER: usize = 1;
const SIZE: usize = 2;

/// A block of parameters as the driver takes it.
pub(super) struct Parameters<'a> {
    bytes: usize,
    block: &'a [u64],
    /// Is the block one parameter, which the driver places?
    single: bool,
    list: [*mut c_void; 5],
}

impl<'a> Parameters<'a> {
    pub(super) fn of(kernel: &Function, arguments: &'a Arguments) -> Self {
        let (bytes, block) = (arguments.bytes() as usize, arguments.words());
        Self { bytes, block, single: kernel.is_single(), list: [ptr::null_mut(); 5] }
    }

    /// `kernelParams` and `extra`, which tell where the block is. They are good as long as this value is neither moved nor
    /// dropped.
    pub(super) fn lists(&mut self) -> (*mut *mut c_void, *mut *mut c_void) {
        let block = self.block.as_ptr().cast_mut().cast();
        if self.single {
            self.list[0] = block;
            return (self.list.as_mut_ptr(), ptr::null_mut());
        }
        self.list = [
            ptr::without_provenance_mut(BUFFER),
            block,
            ptr::without_provenance_mut(SIZE),
            (&raw mut self.bytes).cast(),
            ptr::without_provenance_mut(END),
        ];
        (ptr::null_mut(), self.list.as_mut_ptr())
    }
}

impl Driver {
    /// Launches a kernel on a stream of the current context.
    ///
    /// # Safety
    /// As for [`Stream::launch`]; the stream is live.
    pub(crate) unsafe fn launch(
        &self,
        kernel: &Function,
        grid: Grid,
        arguments: &Arguments,
        stream: CUstream,
    ) -> Result<()> {
        let mut parameters = Parameters::of(kernel, arguments);
        let (single, extra) = parameters.lists();
        let Grid([gx, gy, gz]) = grid;
        let [bx, by, bz] = kernel.block();
        let (function, shared) = (kernel.handle(), kernel.shared_bytes());
        // SAFETY: the function is live, as the caller promises; the block of parameters is given with its length, and the
        // driver copies it before it returns. What the kernel does was promised by `Artifact::new`.
        unsafe { self.cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, single, extra) }
    }
}

/// A stream of the context.
pub(crate) struct Stream {
    handle: CUstream,
    /// Is it somebody else's?
    borrowed: bool,
    /// Set when it does not end: to destroy it would wait without a deadline.
    left: Cell<bool>,
    context: Arc<Context>,
}

impl Stream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self> {
        let mut handle = ptr::null_mut();
        let _entered = context.enter()?;
        // SAFETY: the pointer is to a local; the context is current.
        unsafe { context.driver.cuStreamCreate(&raw mut handle, NON_BLOCKING) }?;
        Ok(Self { handle, borrowed: false, left: Cell::new(false), context: Arc::clone(context) })
    }

    /// Somebody else's stream.
    pub(crate) fn borrow(context: &Arc<Context>, stream: &BorrowedStream) -> Self {
        Self { handle: stream.handle(), borrowed: true, left: Cell::new(false), context: Arc::clone(context) }
    }

    /// Leaves it to the end of the process.
    pub(crate) fn leave(&self) {
        self.left.set(true);
    }

    /// Whether its owner records what it is given into a graph.
    pub(crate) fn is_captured_by_its_owner(&self) -> Result<bool> {
        if !self.borrowed {
            return Ok(false);
        }
        let _entered = self.context.enter()?;
        let mut status = 0;
        // SAFETY: the stream is live, the pointer is to a local.
        unsafe { self.context.driver.cuStreamIsCapturing(self.handle, &raw mut status) }?;
        Ok(status != 0)
    }

    /// Lets what follows wait for an event, of any context.
    pub(crate) fn wait(&self, event: &Event) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: both are live; the driver keeps what the stream waits for.
        unsafe { self.context.driver.cuStreamWaitEvent(self.handle, event.handle, 0) }
    }

    pub(crate) fn handle(&self) -> CUstream {
        self.handle
    }

    /// Waits for all of the stream, however long that takes.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream is live.
        unsafe { self.context.driver.cuStreamSynchronize(self.handle) }
    }

    /// Sets bytes.
    ///
    /// # Safety
    /// They lie in memory of a queue, which is not freed but by a command of this stream behind this one; nothing else is there.
    pub(crate) unsafe fn fill(&self, address: u64, value: u8, bytes: u64) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream is live; of the memory the caller promises it.
        unsafe { self.context.driver.cuMemsetD8Async(address, value, bytes as usize, self.handle) }
    }

    /// Copies bytes: to any address of the process, if it is given one.
    ///
    /// # Safety
    /// Both are as for [`fill`](Self::fill).
    pub(crate) unsafe fn copy(&self, target: u64, source: u64, bytes: u64) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream is live; of both the caller promises it.
        unsafe { self.context.driver.cuMemcpyAsync(target, source, bytes as usize, self.handle) }
    }

    /// Launches a kernel.
    ///
    /// # Safety
    /// The kernel was not unloaded, and the arguments are for it. They name memory that is there until the kernel has ended, but
    /// for frees by commands of this stream behind the launch.
    pub(crate) unsafe fn launch(&self, kernel: &Function, grid: Grid, arguments: &Arguments) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream is live, and one of the context; the caller promises the rest.
        unsafe { self.context.driver.launch(kernel, grid, arguments, self.handle) }
    }

    pub(crate) fn begin_capture(&self) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream is live.
        unsafe { self.context.driver.cuStreamBeginCapture_v2(self.handle, THREAD_LOCAL) }
    }

    pub(crate) fn end_capture(&self) -> Result<Graph> {
        let _entered = self.context.enter()?;
        let mut graph = ptr::null_mut();
        // SAFETY: the stream is live, the pointer is to a local.
        unsafe { self.context.driver.cuStreamEndCapture(self.handle, &raw mut graph) }?;
        // SAFETY: the driver made the graph for this capture, and nobody else knows it.
        unsafe { Graph::instantiate(&self.context, graph) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.borrowed || self.left.get() {
            return;
        }
        let _entered = self.context.enter();
        // SAFETY: nobody uses the handle after this.
        ended(unsafe { self.context.driver.cuStreamDestroy_v2(self.handle) });
    }
}

/// An event of the context.
pub(crate) struct Event {
    handle: CUevent,
    context: Arc<Context>,
}

// SAFETY: the handle is the driver's, which locks for itself.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub(crate) fn new(context: &Arc<Context>, timed: bool) -> Result<Self> {
        let mut handle = ptr::null_mut();
        let _entered = context.enter()?;
        // SAFETY: the pointer is to a local; the context is current.
        unsafe { context.driver.cuEventCreate(&raw mut handle, if timed { 0 } else { NO_TIME }) }?;
        Ok(Self { handle, context: Arc::clone(context) })
    }

    pub(super) fn handle(&self) -> CUevent {
        self.handle
    }

    pub(crate) fn record(&self, stream: &Stream) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: both are live.
        unsafe { self.context.driver.cuEventRecord(self.handle, stream.handle) }
    }

    pub(crate) fn done(&self) -> Result<bool> {
        let driver = self.context.driver;
        let _entered = self.context.enter()?;
        // SAFETY: the event is live.
        match unsafe { (driver.cuEventQuery)(self.handle) } {
            NOT_READY => Ok(false),
            status => driver.check("cuEventQuery", status).map(|()| true),
        }
    }

    pub(crate) fn until(&self, later: &Self) -> Result<Duration> {
        let _entered = self.context.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: both are live, the pointer is to a local.
        unsafe { self.context.driver.cuEventElapsedTime(&raw mut milliseconds, self.handle, later.handle) }?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: nobody uses the handle after this.
        ended(unsafe { self.context.driver.cuEventDestroy_v2(self.handle) });
    }
}
