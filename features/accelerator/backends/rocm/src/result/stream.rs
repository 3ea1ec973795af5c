//! Streams, events and graphs.

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;
use std::time::Duration;

use vm_accel::{Arguments, Grid, Result};

use super::{Device, Function, NOT_READY, ended};
use crate::sys::{self, PARAM_BUFFER, PARAM_END, PARAM_SIZE};

/// `hipStreamNonBlocking`: the stream does not wait for the default stream.
const NON_BLOCKING: u32 = 1;
/// `hipEventDisableTiming`.
const NO_TIME: u32 = 2;
/// `hipStreamCaptureModeThreadLocal`: other threads' calls do not spoil a capture.
const THREAD_LOCAL: u32 = 1;
/// `hipMemcpyDefault`: the addresses tell from where to where.
const BY_ADDRESS: u32 = 4;

/// A stream of a device.
pub(crate) struct Stream {
    handle: sys::Stream,
    /// Set when it does not end: to destroy it could wait without a deadline.
    left: Cell<bool>,
    device: Device,
}

impl Stream {
    pub(crate) fn new(device: Device) -> Result<Self> {
        let (_entered, mut handle) = (device.enter()?, ptr::null_mut());
        // SAFETY: the pointer is to a local; the device is current.
        unsafe { device.hip.hipStreamCreateWithFlags(&raw mut handle, NON_BLOCKING) }?;
        Ok(Self { handle, left: Cell::new(false), device })
    }

    /// Somebody else's stream.
    ///
    /// # Safety
    /// It is one of the device, and is there as long as this value.
    pub(crate) unsafe fn borrow(device: Device, handle: u64) -> Self {
        Self { handle: handle as sys::Stream, left: Cell::new(true), device }
    }

    pub(crate) fn handle(&self) -> u64 {
        self.handle as u64
    }

    /// Leaves it to the end of the process.
    pub(crate) fn leave(&self) {
        self.left.set(true);
    }

    /// Lets what follows wait for an event, of any device.
    pub(crate) fn wait(&self, event: &Event) -> Result<()> {
        let _entered = self.device.enter()?;
        // SAFETY: both are live; the library keeps what the stream waits for.
        unsafe { self.device.hip.hipStreamWaitEvent(self.handle, event.handle, 0) }
    }

    /// Sets bytes.
    ///
    /// # Safety
    /// They lie in memory of a queue, which is not freed until this has run; nothing else is there.
    pub(crate) unsafe fn fill(&self, address: u64, value: u8, bytes: u64) -> Result<()> {
        let _entered = self.device.enter()?;
        // SAFETY: the stream is live; of the memory the caller promises it.
        unsafe {
            self.device.hip.hipMemsetD8Async(address as *mut c_void, value, bytes as usize, self.handle)
        }
    }

    /// Copies bytes.
    ///
    /// # Safety
    /// Both are as for [`fill`](Self::fill).
    pub(crate) unsafe fn copy(&self, target: u64, source: u64, bytes: u64) -> Result<()> {
        let _entered = self.device.enter()?;
        let (target, source) = (target as *mut c_void, source as *const c_void);
        // SAFETY: the stream is live; of both the caller promises it.
        unsafe { self.device.hip.hipMemcpyAsync(target, source, bytes as usize, BY_ADDRESS, self.handle) }
    }

    /// Launches a kernel.
    ///
    /// # Safety
    /// The kernel was not unloaded, and the arguments are for it. They name memory that is there until the kernel has ended.
    pub(crate) unsafe fn launch(&self, kernel: &Function, grid: Grid, arguments: &Arguments) -> Result<()> {
        let _entered = self.device.enter()?;
        let mut bytes = arguments.bytes() as usize;
        let mut list: [*mut c_void; 5] = [
            ptr::without_provenance_mut(PARAM_BUFFER),
            arguments.words().as_ptr().cast_mut().cast(),
            ptr::without_provenance_mut(PARAM_SIZE),
            (&raw mut bytes).cast(),
            ptr::without_provenance_mut(PARAM_END),
        ];
        let extra = if arguments.bytes() == 0 { ptr::null_mut() } else { list.as_mut_ptr() };
        let (Grid([gx, gy, gz]), [bx, by, bz]) = (grid, kernel.block());
        // SAFETY: the function is live, as the caller promises; the block of parameters is given with its length, and the library
        // copies it before it returns. What the kernel does was promised by `Artifact::new`.
        unsafe {
            self.device.hip.hipModuleLaunchKernel(
                kernel.handle(),
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                kernel.shared_bytes(),
                self.handle,
                ptr::null_mut(),
                extra,
            )
        }
    }

    pub(crate) fn begin_capture(&self) -> Result<()> {
        let _entered = self.device.enter()?;
        // SAFETY: the stream is live.
        unsafe { self.device.hip.hipStreamBeginCapture(self.handle, THREAD_LOCAL) }
    }

    pub(crate) fn end_capture(&self) -> Result<Graph> {
        let (_entered, hip) = (self.device.enter()?, self.device.hip);
        let (mut captured, mut handle) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the stream is live, the pointer is to a local.
        unsafe { hip.hipStreamEndCapture(self.handle, &raw mut captured) }?;
        // SAFETY: the library made the graph for this capture; the pointer is to a local.
        let made = unsafe { hip.hipGraphInstantiateWithFlags(&raw mut handle, captured, 0) };
        // SAFETY: nobody else knows it, and the executable one does not need it.
        ended(unsafe { hip.hipGraphDestroy(captured) });
        made.map(|()| Graph { handle, device: self.device })
    }

    /// Runs a graph.
    ///
    /// # Safety
    /// No kernel that it launches was unloaded, and the memory that it uses is there until it has run.
    pub(crate) unsafe fn replay(&self, graph: &Graph) -> Result<()> {
        let _entered = self.device.enter()?;
        // SAFETY: both are live; of what the graph uses the caller promises it.
        unsafe { self.device.hip.hipGraphLaunch(graph.handle, self.handle) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.left.get() {
            let _entered = self.device.enter();
            // SAFETY: nobody uses the handle after this.
            ended(unsafe { self.device.hip.hipStreamDestroy(self.handle) });
        }
    }
}

/// An executable graph.
pub(crate) struct Graph {
    handle: sys::GraphExec,
    device: Device,
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _entered = self.device.enter();
        // SAFETY: nobody uses the handle after this.
        ended(unsafe { self.device.hip.hipGraphExecDestroy(self.handle) });
    }
}

/// An event of a device.
pub(crate) struct Event {
    handle: sys::Event,
    device: Device,
}

// SAFETY: the handle is the library's, which locks for itself.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub(crate) fn new(device: Device, timed: bool) -> Result<Self> {
        let (_entered, mut handle) = (device.enter()?, ptr::null_mut());
        // SAFETY: the pointer is to a local; the device is current.
        unsafe { device.hip.hipEventCreateWithFlags(&raw mut handle, if timed { 0 } else { NO_TIME }) }?;
        Ok(Self { handle, device })
    }

    pub(crate) fn record(&self, stream: &Stream) -> Result<()> {
        let _entered = self.device.enter()?;
        // SAFETY: both are live.
        unsafe { self.device.hip.hipEventRecord(self.handle, stream.handle) }
    }

    pub(crate) fn done(&self) -> Result<bool> {
        let hip = self.device.hip;
        let query = hip.hipEventQuery.ok_or_else(|| hip.absent("hipEventQuery"))?;
        let _entered = self.device.enter()?;
        // SAFETY: the event is live.
        match unsafe { query(self.handle) } {
            NOT_READY => Ok(false),
            status => hip.check("hipEventQuery", status).map(|()| true),
        }
    }

    pub(crate) fn until(&self, later: &Self) -> Result<Duration> {
        let _entered = self.device.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: both are live, the pointer is to a local.
        unsafe { self.device.hip.hipEventElapsedTime(&raw mut milliseconds, self.handle, later.handle) }?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _entered = self.device.enter();
        // SAFETY: nobody uses the handle after this.
        ended(unsafe { self.device.hip.hipEventDestroy(self.handle) });
    }
}
