//! What can go wrong with an accelerator, as values.

use std::any::Any;
use std::time::Duration;

use thiserror::Error;

use crate::checksum::Direction;
use crate::launch::Grid;

/// The result of everything that touches an accelerator.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation on an accelerator failed: what, where, and what to do next.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Error {
    /// The native library is not there, or is too old.
    #[error("{library} can't be used: {cause}; {remedy}")]
    Unavailable {
        /// The library's file name.
        library: String,
        /// What the loader said.
        cause: String,
        /// What to install.
        remedy: String,
    },
    /// No such device.
    #[error("no accelerator {wanted}: {found} found; list them to see their numbers and addresses")]
    NoDevice {
        /// The number or address asked for.
        wanted: String,
        /// How many there are.
        found: u32,
    },
    /// The device has too little free memory.
    #[error(
        "out of {kind} memory: {bytes} bytes wanted, {free} of {total} free; free buffers or use smaller ones"
    )]
    OutOfMemory {
        /// The kind of memory.
        kind: &'static str,
        /// The bytes asked for.
        bytes: u64,
        /// The bytes that the device said were free.
        free: u64,
        /// The device's bytes.
        total: u64,
    },
    /// The pool's own limit would be passed.
    #[error(
        "the memory pool's limit of {limit} bytes would be passed: {in_use} in use, {bytes} wanted; \
         free buffers or raise the limit"
    )]
    PoolLimit {
        /// The bytes asked for, rounded up to what the pool hands out.
        bytes: u64,
        /// The bytes that live buffers hold.
        in_use: u64,
        /// The limit.
        limit: u64,
    },
    /// A range that does not lie in its buffer.
    #[error("bytes {offset}..{offset}+{bytes} do not lie in a buffer of {size} bytes")]
    OutOfRange {
        /// First byte.
        offset: u64,
        /// Length.
        bytes: u64,
        /// The buffer's length.
        size: u64,
    },
    /// Source and destination of a copy differ in length.
    #[error("a copy from {source_bytes} to {destination_bytes} bytes: both must have the same length")]
    Lengths {
        /// Bytes of the source.
        source_bytes: u64,
        /// Bytes of the destination.
        destination_bytes: u64,
    },
    /// The host can't reach this memory.
    #[error("the host can't reach {kind} memory: copy it to pinned memory first")]
    NotHostVisible {
        /// The kind of memory.
        kind: &'static str,
    },
    /// The arguments do not fit the kernel's parameters.
    #[error("kernel {kernel}, parameter {parameter}: {reason}")]
    Arguments {
        /// The kernel's entry symbol.
        kernel: String,
        /// The parameter's name or number.
        parameter: String,
        /// What does not fit.
        reason: String,
    },
    /// The grid is not one that the device can launch.
    #[error("kernel {kernel} can't be launched over {grid} blocks: {reason}")]
    Grid {
        /// The kernel's entry symbol.
        kernel: String,
        /// The blocks.
        grid: Grid,
        /// Which limit is passed.
        reason: String,
    },
    /// Extents and strides that no view has.
    #[error("no view has such extents: {reason}")]
    Extents {
        /// What does not fit.
        reason: String,
    },
    /// An artifact that the device does not take.
    #[error("kernel {kernel} can't be loaded: {reason}")]
    Load {
        /// The kernel's entry symbol.
        kernel: String,
        /// What was wrong, with the driver's log where it gives one.
        reason: String,
    },
    /// A part of a checked copy arrived wrong each time that it was sent.
    #[error(
        "bytes {offset}..{} of a copy {direction} arrived corrupted {attempts} times in a row: CRC-32 {sent:#010x} was sent, \
         {received:#010x} arrived; check cable, plugs and riser, or have the link run at a lower speed",
        .offset + .bytes
    )]
    Corrupted {
        /// Which way.
        direction: Direction,
        /// First byte of the part, from the beginning of the copy.
        offset: u64,
        /// Length of the part.
        bytes: u64,
        /// How often it was sent.
        attempts: u64,
        /// The CRC-32 of what was sent last.
        sent: u32,
        /// The CRC-32 of what arrived last.
        received: u32,
    },
    /// The worker's queue is full.
    #[error("the worker's queue of {capacity} commands is full: wait, or give the worker a larger one")]
    QueueFull {
        /// How many commands fit.
        capacity: usize,
    },
    /// A wait ended before what it waited for.
    #[error("{what} did not come in time: wait longer, or find out what keeps the device busy")]
    Deadline {
        /// What was waited for.
        what: String,
    },
    /// The job was taken back before it started.
    #[error("the job was cancelled before it started")]
    Cancelled,
    /// The worker takes no more work.
    #[error("the worker has stopped: start another one")]
    Stopped,
    /// A job panicked. The worker goes on.
    #[error("a job on the worker panicked: {message}")]
    Panicked {
        /// The panic's message.
        message: String,
    },
    /// The context is lost: a fault on the device that sticks. Nothing that was on it can be used again.
    #[error("the device's context is lost ({cause}): stop this worker, and start again in a new process")]
    Lost {
        /// The first fault.
        cause: String,
    },
    /// A thread of a guarded launch used up its fuel. All of its threads have stopped.
    #[error(
        "kernel {kernel} was stopped: a thread took more than {fuel} iterations of its loops; give it more or less to do"
    )]
    OutOfFuel {
        /// The kernel's entry symbol.
        kernel: String,
        /// The iterations that each thread was given.
        fuel: u64,
    },
    /// A guarded launch took longer than it was given. All of its threads have stopped.
    #[error("kernel {kernel} was stopped: it took longer than {limit:?}; give it more time or less to do")]
    DeadlineExceeded {
        /// The kernel's entry symbol.
        kernel: String,
        /// The time that it was given.
        limit: Duration,
    },
    /// A buffer, kernel or graph of another worker.
    #[error("this {what} belongs to another worker: each worker has memory and kernels of its own")]
    WrongWorker {
        /// Buffer, kernel or graph.
        what: &'static str,
    },
    /// A job tried to use memory whose former owner's commands still wait behind it.
    #[error(
        "this buffer's memory is still in use by commands queued behind this job: use it from a later job"
    )]
    OutOfOrder,
    /// Registered memory that a graph uses was to be unregistered.
    #[error(
        "this registered memory is part of a graph, which may be replayed: drop the graph first; \
         the memory goes back when it is gone"
    )]
    InGraph,
    /// Resources of graphics that were to be let go are still held.
    #[error("still held: {resources}; drop them, or unmap and unregister them, and try again")]
    Held {
        /// Name and state of each.
        resources: String,
    },
    /// Memory of another API that is not what it was said to be, or not safe to use.
    #[error("this memory can't be shared: {cause}")]
    NotShareable {
        /// What is wrong with it.
        cause: String,
    },
    /// Something that can't be part of a graph was done while one was captured.
    #[error("{what} can't be captured into a graph: do it before or after")]
    Capturing {
        /// What was tried.
        what: &'static str,
    },
    /// The device or its driver can't do this.
    #[error("{device} does not support {what}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// The device's name.
        device: String,
    },
    /// A call of the driver failed.
    #[error("{call} failed: {name} ({code}), {message}")]
    Driver {
        /// The function.
        call: &'static str,
        /// The driver's code.
        code: i64,
        /// The code's name.
        name: String,
        /// What the driver says about it.
        message: String,
    },
    /// The host refused something.
    #[error("{what} failed: {cause}")]
    Host {
        /// What was tried.
        what: &'static str,
        /// The operating system's error.
        cause: String,
    },
}

impl Error {
    /// Whether the context is gone for good.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. })
    }

    /// The error for a panic that was caught.
    pub(crate) fn from_panic(panic: Box<dyn Any + Send>) -> Self {
        let message = match panic.downcast::<String>().map_err(|panic| panic.downcast::<&'static str>()) {
            Ok(message) => *message,
            Err(Ok(message)) => (*message).to_owned(),
            Err(Err(other)) => {
                // To drop it could panic again, here where nobody catches it.
                std::mem::forget(other);
                "no message".into()
            }
        };
        Self::Panicked { message }
    }
}
