//! What every accelerator can do.

use std::thread::Thread;
use std::time::{Duration, Instant};

use crate::artifact::Artifact;
use crate::device::{DeviceInfo, MemoryInfo, QueueOptions};
use crate::error::{Error, Result};
use crate::external::{DriverResource, ExternalMemory, ExternalSemaphore, Pixels, Semaphore};
use crate::launch::{Arguments, Grid};
use crate::memory::{Memory, MemoryKind, Region};
use crate::sys::BorrowedResource;

/// One device. Any thread may hold it; the work goes through a [`Queue`] that one thread owns.
pub trait Accelerator: Send + Sync + 'static {
    /// The queue of this device.
    type Queue: Queue;

    /// Identity and limits.
    fn info(&self) -> &DeviceInfo;

    /// The number by which other APIs, as Vulkan, know the device; none where it is no device of theirs.
    ///
    /// # Errors
    /// The driver's.
    fn uuid(&self) -> Result<Option<[u8; 16]>> {
        Ok(None)
    }

    /// The number by which Windows knows the adapter that it is; none elsewhere.
    ///
    /// # Errors
    /// The driver's.
    fn luid(&self) -> Result<Option<[u8; 8]>> {
        Ok(None)
    }

    /// Opens a context and one stream in it, for the calling thread.
    ///
    /// # Errors
    /// The driver's.
    fn open(&self, options: &QueueOptions) -> Result<Self::Queue>;
}

/// One launch of a [`Queue::graph_exec`].
pub struct GraphNode<'a, Q: Queue + ?Sized> {
    /// What is launched, as [`Queue::launch`] takes it.
    pub kernel: &'a Q::Kernel,
    /// Its blocks.
    pub grid: Grid,
    /// What was packed for it.
    pub arguments: Arguments,
    /// Recorded behind it, at each replay. Who polls it lets the replay end before the next.
    pub then: Option<&'a Q::Event>,
}

/// A stream of a context, owned by one thread. [`Queue::stream`] opens more streams of the same context.
///
/// Everything but [`Queue::wait`] returns before the device has done it; the device does it in the order of the calls.
/// Once a call fails with [`Error::Lost`], all do. Dropping the last queue of a context frees all that was allocated and
/// loaded in it.
pub trait Queue: 'static {
    /// A loaded kernel.
    type Kernel: Send + Sync + 'static;
    /// A point in a stream. Any thread may have queues of its own wait for it.
    type Event: Send + Sync + 'static;
    /// Commands recorded once, to be run often.
    type Graph: 'static;

    /// Opens another stream in the same context, for the same thread. Kernels and memory are the context's: what one of its
    /// queues loaded or allocated, all may use, and any may unload or free. Commands of two streams run in no order, but
    /// for what [`Queue::wait_event`] says.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// Memory is freed, and kernels are unloaded, only by a queue whose commands so far come behind all that use them, by
    /// [`Queue::wait_event`] where those were given to another stream.
    #[allow(unsafe_code)]
    unsafe fn stream(&self) -> Result<Self>
    where
        Self: Sized;

    /// Whether the stream is somebody else's, who captures what it is given into a graph: then it runs later, or never.
    ///
    /// # Errors
    /// The driver's.
    fn is_captured(&self) -> Result<bool> {
        Ok(false)
    }

    /// Memory of `bytes` bytes (at least 1), aligned to 256. Its content is whatever was there.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Unsupported`] for a kind that the device lacks; for
    /// [`MemoryKind::Registered`] too, which is not allocated.
    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Memory>;

    /// Memory of `bytes` bytes that kernels poll all the time: the host writes there while they
    /// run, and they see it soon. They may write there too.
    ///
    /// # Errors
    /// As [`Queue::allocate`].
    fn allocate_polled(&self, bytes: u64) -> Result<Memory> {
        self.allocate(MemoryKind::Pinned, bytes)
    }

    /// Frees memory, once the commands before have run. Registered memory is returned to the host.
    ///
    /// # Errors
    /// The driver's; [`Error::Deadline`] where the queue waits for the device longer than its timeout. The memory is
    /// then kept until the queue is dropped.
    fn free(&self, memory: Memory) -> Result<()>;

    /// Gives memory that was freed back to the device, but for `keep` bytes.
    ///
    /// # Errors
    /// The driver's.
    fn trim(&self, keep: u64) -> Result<()>;

    /// How full the device's memory is.
    ///
    /// # Errors
    /// The driver's.
    fn memory(&self) -> Result<MemoryInfo>;

    /// Makes existing host memory reachable for the device.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; the driver's, as when a range is registered already.
    ///
    /// # Safety
    /// The `bytes` bytes at `host` stay mapped, and no Rust reference to them is live, until the memory is freed or
    /// the queue dropped.
    #[allow(unsafe_code)]
    unsafe fn register(&self, host: *mut u8, bytes: u64) -> Result<Memory>;

    /// Makes memory of another API reachable for the device, as memory of kind [`MemoryKind::External`]. [`Queue::free`] lets
    /// go of it, once the commands before have run.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a descriptor that the device does not take; [`Error::OutOfRange`]; the driver's.
    fn import_memory(&self, memory: ExternalMemory) -> Result<Memory> {
        Err(memory.refused("this accelerator"))
    }

    /// Makes an image of another API reachable for kernels, whose pixels lie as the device likes: memory of kind
    /// [`MemoryKind::Surface`] for each of its levels, to be freed as that of [`Queue::import_memory`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a device without surfaces; as [`Queue::import_memory`].
    fn import_image(&self, memory: ExternalMemory, pixels: &Pixels) -> Result<Vec<Memory>> {
        let _ = (memory, pixels);
        Err(Error::Unsupported { what: "images of its own tiling".into(), device: "this accelerator".into() })
    }

    /// Takes a resource that the device's driver itself hands to and fro between kernels and the API that made it: a buffer, or an
    /// image with such pixels.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where there are no such; the driver's.
    fn register_resource(
        &self,
        resource: BorrowedResource,
        pixels: Option<&Pixels>,
    ) -> Result<DriverResource> {
        let _ = (resource, pixels);
        Err(Error::Unsupported { what: "resources that it maps".into(), device: "this accelerator".into() })
    }

    /// Maps such a resource: what the queue is given next runs behind what the API was given for it. The result is the memory of
    /// kind [`MemoryKind::External`] of a buffer, or that of kind [`MemoryKind::Surface`] of each level of an image, another one each
    /// time. Once all of it was [freed](Queue::free), the resource is that API's again.
    ///
    /// # Errors
    /// [`Error::WrongWorker`]; the driver's, as for one that is mapped.
    fn map_resource(&self, resource: &DriverResource) -> Result<Vec<Memory>> {
        let _ = resource;
        Err(Error::WrongWorker { what: "resource" })
    }

    /// Takes a semaphore of another API.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device can't wait for it; the driver's.
    fn import_semaphore(&self, semaphore: ExternalSemaphore) -> Result<Semaphore> {
        drop(semaphore);
        Err(Error::Unsupported { what: "semaphores of other APIs".into(), device: "this accelerator".into() })
    }

    /// Lets the commands that follow begin when a semaphore has reached a value, which may be long after this call. The calling
    /// thread does not wait.
    ///
    /// # Errors
    /// [`Error::Capturing`], [`Error::WrongWorker`]; the driver's.
    fn wait_semaphore(&self, semaphore: &Semaphore, value: u64) -> Result<()> {
        let _ = (semaphore, value);
        Err(Error::WrongWorker { what: "semaphore" })
    }

    /// Sets a semaphore to a value, larger than all before, when the commands so far have run.
    ///
    /// # Errors
    /// As [`Queue::wait_semaphore`].
    fn signal_semaphore(&self, semaphore: &Semaphore, value: u64) -> Result<()> {
        let _ = (semaphore, value);
        Err(Error::WrongWorker { what: "semaphore" })
    }

    /// Makes what another API wrote in memory that was imported from it seen by the commands that follow: called for each such memory
    /// when it is mapped, behind the wait for that API's semaphore, and to be done in the order of the commands.
    ///
    /// # Errors
    /// The driver's.
    fn acquire(&self, memory: Region<'_>) -> Result<()> {
        let _ = memory;
        Ok(())
    }

    /// Makes what the commands so far wrote there seen by that API: called when it is unmapped, before its semaphore is signalled, and
    /// also where the wait or [`Queue::acquire`] failed.
    ///
    /// # Errors
    /// The driver's. The API is signalled all the same.
    fn release(&self, memory: Region<'_>) -> Result<()> {
        let _ = memory;
        Ok(())
    }

    /// Sets every byte, of which there is at least one, to `value`.
    ///
    /// # Errors
    /// The driver's.
    fn fill(&self, target: Region<'_>, value: u8) -> Result<()>;

    /// Copies `source` to `target`, of the same length, which is not 0, of any kinds.
    ///
    /// # Errors
    /// [`Error::Lengths`]; the driver's.
    fn copy(&self, target: Region<'_>, source: Region<'_>) -> Result<()>;

    /// An event that has not been recorded, with a time stamp if `timed`.
    ///
    /// # Errors
    /// The driver's.
    fn event(&self, timed: bool) -> Result<Self::Event>;

    /// Puts the event after the commands so far.
    ///
    /// # Errors
    /// The driver's.
    fn record(&self, event: &Self::Event) -> Result<()>;

    /// Lets the commands that follow begin when the event has been reached. The event may be of another queue, context or device
    /// of this kind. What counts is where it was recorded last when this is called: for one that was never recorded nothing
    /// waits, nor for one whose context is lost. The calling thread does not wait.
    ///
    /// # Errors
    /// [`Error::Capturing`] or the driver's while commands are recorded, as the event is no part of the recording.
    fn wait_event(&self, event: &Self::Event) -> Result<()>;

    /// The stream as other users of the device's driver name it (`CUstream`, `hipStream_t`), if they may order their work
    /// with its; it is theirs to wait for as long as this queue is there.
    fn handle(&self) -> Option<u64> {
        None
    }

    /// Lets the commands that follow begin when those so far of somebody else's stream of this device have run.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where there are no such streams; the driver's.
    ///
    /// # Safety
    /// It is a handle of a stream of this device, of the context that queues of it are opened in, and is not destroyed meanwhile.
    #[allow(unsafe_code)]
    unsafe fn follow(&self, stream: u64) -> Result<()> {
        let _ = stream;
        Err(Error::Unsupported { what: "streams of others".into(), device: "this accelerator".into() })
    }

    /// Lets what somebody else's stream of this device is given from here on begin when the commands so far have run.
    ///
    /// # Errors
    /// As [`Queue::follow`].
    ///
    /// # Safety
    /// As [`Queue::follow`].
    #[allow(unsafe_code)]
    unsafe fn precede(&self, stream: u64) -> Result<()> {
        let _ = stream;
        Err(Error::Unsupported { what: "streams of others".into(), device: "this accelerator".into() })
    }

    /// Whether the commands before the event have run. True for an event that was never recorded.
    ///
    /// # Errors
    /// [`Error::Lost`] when one of them faulted.
    fn done(&self, event: &Self::Event) -> Result<bool>;

    /// Has `thread` unparked when the commands before the event have run, or at once if they have. False where nothing tells of
    /// that: then [`done`](Queue::done) is to be asked now and then.
    ///
    /// # Errors
    /// The driver's.
    fn notify(&self, event: &Self::Event, thread: &Thread) -> Result<bool> {
        let _ = (event, thread);
        Ok(false)
    }

    /// The device's time between two timed events, both done.
    ///
    /// # Errors
    /// The driver's, as for events without a time stamp.
    fn elapsed(&self, from: &Self::Event, to: &Self::Event) -> Result<Duration>;

    /// Loads a kernel. Its block and its shared memory were checked against [`DeviceInfo`].
    ///
    /// # Errors
    /// [`Error::Load`], with the driver's log where it gives one.
    fn load(&self, artifact: &Artifact) -> Result<Self::Kernel>;

    /// Unloads a kernel that no command still uses.
    ///
    /// # Errors
    /// The driver's.
    fn unload(&self, kernel: Self::Kernel) -> Result<()>;

    /// Launches a kernel, in the blocks that its artifact says, with arguments that were packed for it. The grid was
    /// checked against [`DeviceInfo::grid`]; the queue checks it by [`Grid::check_compiled`].
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// Until the kernel has ended, the memory that its arguments name is not freed, but by a command of this queue behind
    /// the launch; nor is the cancel flag's.
    #[allow(unsafe_code)]
    unsafe fn launch(&self, kernel: &Self::Kernel, grid: Grid, arguments: &Arguments) -> Result<()>;

    /// Records the commands that follow instead of running them.
    ///
    /// # Errors
    /// The driver's.
    fn begin_capture(&self) -> Result<()>;

    /// Ends the recording.
    ///
    /// # Errors
    /// The driver's, as when something was recorded that can't be.
    fn end_capture(&self) -> Result<Self::Graph>;

    /// Runs recorded commands.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// All memory that the commands use is still there, and no kernel that they launch was unloaded; both until they have
    /// ended, but for frees by commands of this queue behind the replay.
    #[allow(unsafe_code)]
    unsafe fn replay(&self, graph: &Self::Graph) -> Result<()>;

    /// Makes a graph of launches, one behind the other.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where it would be no faster than the launches; the driver's.
    fn graph_exec(&self, nodes: &[GraphNode<'_, Self>]) -> Result<Self::Graph> {
        let _ = nodes;
        Err(Error::Unsupported { what: "graphs of launches".into(), device: "this accelerator".into() })
    }

    /// Gives the launch at a place of a graph that [`Queue::graph_exec`] made other arguments: for the replays that follow,
    /// not for those before. The kernel and the grid are the same.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for another graph; the driver's.
    fn update(
        &self,
        graph: &Self::Graph,
        place: usize,
        kernel: &Self::Kernel,
        grid: Grid,
        arguments: &Arguments,
    ) -> Result<()> {
        let _ = (graph, place, kernel, grid, arguments);
        Err(Error::Unsupported { what: "graphs of launches".into(), device: "this accelerator".into() })
    }

    /// Drops recorded commands that no longer run.
    ///
    /// # Errors
    /// The driver's.
    fn discard(&self, graph: Self::Graph) -> Result<()>;

    /// Waits until the commands before the event have run.
    ///
    /// # Errors
    /// [`Error::Lost`]; [`Error::Deadline`].
    fn wait(&self, event: &Self::Event, deadline: Instant) -> Result<()> {
        let start = Instant::now();
        loop {
            if self.done(event)? {
                return Ok(());
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(Error::Deadline { what: "the device's work".into() });
            }
            // Short work is waited for at full speed; long work need not keep a core busy.
            match now - start {
                waited if waited < Duration::from_micros(200) => std::hint::spin_loop(),
                waited if waited < Duration::from_millis(2) => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(50)),
            }
        }
    }
}
