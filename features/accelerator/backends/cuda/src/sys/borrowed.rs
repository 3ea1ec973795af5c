//! What others own, and promise to keep.

use std::ffi::c_void;

use super::{CUcontext, CUstream};

/// An adapter of Windows that somebody else has: an `IDXGIAdapter`.
#[derive(Debug)]
pub struct BorrowedAdapter(*mut c_void);

impl BorrowedAdapter {
    /// The adapter at an address.
    ///
    /// # Safety
    /// It is an `IDXGIAdapter`, and there as long as this value.
    pub unsafe fn new(adapter: *mut c_void) -> Self {
        Self(adapter)
    }

    pub(crate) fn address(&self) -> *mut c_void {
        self.0
    }
}

/// A context that somebody else made and ends.
#[derive(Debug)]
pub struct BorrowedContext(CUcontext);

impl BorrowedContext {
    /// The context behind a handle.
    ///
    /// # Safety
    /// It is a context of the driver, and is neither destroyed nor reset before the queue that is opened in it is dropped, with
    /// all that came of the queue: its sessions, streams, events and graphs.
    pub unsafe fn new(context: CUcontext) -> Self {
        Self(context)
    }

    pub(crate) fn handle(&self) -> CUcontext {
        self.0
    }
}

/// A stream that somebody else made and ends. 0 is the default stream of its context; PyTorch gives the number of its current
/// stream as `torch.cuda.current_stream().cuda_stream`, which becomes a handle by `as CUstream`.
#[derive(Debug)]
pub struct BorrowedStream(CUstream);

impl BorrowedStream {
    /// The stream behind a handle.
    ///
    /// # Safety
    /// * It is a stream of the context that it is used with, and is not destroyed before the queue that gives it commands is
    ///   dropped.
    /// * Where its owner captures what that queue is given into a graph, the graph is launched only as long as the queue is
    ///   there, and all that the commands in it use: kernels, buffers, borrowed memory.
    pub unsafe fn new(stream: CUstream) -> Self {
        Self(stream)
    }

    pub(crate) fn handle(&self) -> CUstream {
        self.0
    }
}
