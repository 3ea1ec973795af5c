//! Any accelerator that this build has: which one is said when the program runs, and all else is as with one alone.
//!
//! What belongs to an accelerator of another kind is refused, as an event of a GPU's is by the processor.
#![allow(unsafe_code)]

mod open;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::thread::Thread;
use std::time::{Duration, Instant};

use vm_accel::sys::BorrowedResource;
use vm_accel::{
    Accelerator, Arguments, Artifact, DeviceInfo, DriverResource, Error, ExternalMemory, ExternalSemaphore,
    GraphNode, Grid, Memory, MemoryInfo, MemoryKind, Pixels, Queue, QueueOptions, Region, Result, Semaphore,
};
use vm_jit::Target;

pub use open::OpenError;

use super::{Assemble, CompileError, JitTarget};

type QueueOf<A> = <A as Accelerator>::Queue;
type KernelOf<A> = <QueueOf<A> as Queue>::Kernel;
type EventOf<A> = <QueueOf<A> as Queue>::Event;
type GraphOf<A> = <QueueOf<A> as Queue>::Graph;

fn foreign(thing: &str, queue: &str) -> Error {
    Error::Unsupported { what: thing.into(), device: queue.into() }
}

/// The enums of these accelerators, and all that is forwarded.
macro_rules! accelerators {
    ($($(#[$meta:meta])* $kind:ident = $accelerator:ty, $name:literal;)*) => {
        /// One of the accelerators that this build has features for; the things of each are a variant of [`AnyQueue`] and its like.
        #[non_exhaustive]
        pub enum AnyAccelerator {
            $($(#[$meta])* #[doc = concat!("One of `", $name, "`.")] $kind($accelerator),)*
        }

        accelerators!(@things AnyQueue, "a queue", QueueOf, $($(#[$meta])* $kind = $accelerator, $name;)*);
        accelerators!(@things AnyKernel, "a kernel", KernelOf, $($(#[$meta])* $kind = $accelerator, $name;)*);
        accelerators!(@things AnyEvent, "an event", EventOf, $($(#[$meta])* $kind = $accelerator, $name;)*);
        accelerators!(@things AnyGraph, "a graph", GraphOf, $($(#[$meta])* $kind = $accelerator, $name;)*);

        /// With what the value is of, whichever that is; `=> To(…)` makes of it a thing of the same kind.
        macro_rules! each {
            ($value:expr, $of:ident, $one:ident => $to:ident($done:expr)) => {
                match $value { $($(#[$meta])* $of::$kind($one) => $done.map($to::$kind),)* }
            };
            ($value:expr, $of:ident, $one:ident => $done:expr) => {
                match $value { $($(#[$meta])* $of::$kind($one) => $done,)* }
            };
        }

        /// With a queue and a thing of its kind; an error for one of another.
        macro_rules! both {
            ($queue:expr, $thing:expr, $of:ident, ($one:ident, $other:ident) => $done:expr) => {
                match ($queue, $thing) {
                    $($(#[$meta])* (AnyQueue::$kind($one), $of::$kind($other)) => $done,)*
                    #[allow(unreachable_patterns)]
                    (queue, thing) => Err(foreign(thing.shown(), queue.shown())),
                }
            };
        }

        /// The same with two things.
        macro_rules! all {
            ($queue:expr, $first:expr, $of:ident, $second:expr, $of_second:ident, ($one:ident, $a:ident, $b:ident) => $done:expr) => {
                match ($queue, $first, $second) {
                    $($(#[$meta])* (AnyQueue::$kind($one), $of::$kind($a), $of_second::$kind($b)) => $done,)*
                    $($(#[$meta])* #[allow(unreachable_patterns)] (queue @ AnyQueue::$kind(_), $of::$kind(_), second) => {
                        Err(foreign(second.shown(), queue.shown()))
                    })*
                    #[allow(unreachable_patterns)]
                    (queue, first, _) => Err(foreign(first.shown(), queue.shown())),
                }
            };
        }

        impl AnyQueue {
            /// The launches of a graph as the queue has them.
            fn graph_of(&self, nodes: &[GraphNode<'_, Self>]) -> Result<AnyGraph> {
                match self {
                    $($(#[$meta])* Self::$kind(queue) => {
                        let nodes = nodes.iter().map(|node| {
                            let GraphNode { kernel, grid, arguments, then } = node;
                            #[allow(irrefutable_let_patterns)]
                            let AnyKernel::$kind(kernel) = kernel else {
                                return Err(foreign(kernel.shown(), self.shown()));
                            };
                            let then = match then {
                                None => None,
                                Some(AnyEvent::$kind(event)) => Some(event),
                                #[allow(unreachable_patterns)]
                                Some(event) => return Err(foreign(event.shown(), self.shown())),
                            };
                            Ok(GraphNode { kernel, grid: *grid, arguments: arguments.clone(), then })
                        });
                        queue.graph_exec(&nodes.collect::<Result<Vec<_>>>()?).map(AnyGraph::$kind)
                    })*
                }
            }
        }
    };
    (@things $things:ident, $what:literal, $of:ident, $($(#[$meta:meta])* $kind:ident = $accelerator:ty, $name:literal;)*) => {
        #[doc = concat!("What for an [`AnyAccelerator`] is ", $what, ".")]
        #[non_exhaustive]
        pub enum $things {
            $($(#[$meta])* #[doc = concat!("Of `", $name, "`.")] $kind($of<$accelerator>),)*
        }

        impl $things {
            fn shown(&self) -> &'static str {
                match self { $($(#[$meta])* Self::$kind(_) => concat!($what, " of ", $name),)* }
            }
        }
    };
}

// Here a further one is added; `open` says how it is found.
accelerators! {
    #[cfg(feature = "guest")]
    Guest = super::GuestAccelerator, "guest";
    #[cfg(feature = "cuda")]
    Cuda = super::CudaAccelerator, "cuda";
    #[cfg(feature = "rocm")]
    Rocm = super::RocmAccelerator, "rocm";
    #[cfg(feature = "cpu")]
    Cpu = super::CpuAccelerator, "cpu";
    #[cfg(test)]
    Fake = vm_accel::fake::FakeAccelerator, "fake";
}

impl fmt::Debug for AnyAccelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceInfo { name, backend, address, .. } = self.info();
        f.debug_struct("AnyAccelerator")
            .field("name", name)
            .field("backend", backend)
            .field("address", address)
            .finish()
    }
}

impl Accelerator for AnyAccelerator {
    type Queue = AnyQueue;

    fn info(&self) -> &DeviceInfo {
        each!(self, Self, one => one.info())
    }

    fn uuid(&self) -> Result<Option<[u8; 16]>> {
        each!(self, Self, one => Accelerator::uuid(one))
    }

    fn luid(&self) -> Result<Option<[u8; 8]>> {
        each!(self, Self, one => Accelerator::luid(one))
    }

    fn open(&self, options: &QueueOptions) -> Result<AnyQueue> {
        each!(self, Self, one => AnyQueue(Accelerator::open(one, options)))
    }
}

impl JitTarget for AnyAccelerator {
    fn target(&self) -> Result<Target, CompileError> {
        each!(self, Self, one => one.target())
    }

    fn assembler(&self) -> Option<Arc<dyn Assemble>> {
        each!(self, Self, one => one.assembler())
    }
}

impl Queue for AnyQueue {
    type Kernel = AnyKernel;
    type Event = AnyEvent;
    type Graph = AnyGraph;

    unsafe fn stream(&self) -> Result<Self> {
        // SAFETY: as the caller promises.
        each!(self, Self, queue => Self(unsafe { queue.stream() }))
    }

    fn is_captured(&self) -> Result<bool> {
        each!(self, Self, queue => queue.is_captured())
    }

    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Memory> {
        each!(self, Self, queue => queue.allocate(kind, bytes))
    }

    fn allocate_polled(&self, bytes: u64) -> Result<Memory> {
        each!(self, Self, queue => queue.allocate_polled(bytes))
    }

    fn free(&self, memory: Memory) -> Result<()> {
        each!(self, Self, queue => queue.free(memory))
    }

    fn trim(&self, keep: u64) -> Result<()> {
        each!(self, Self, queue => queue.trim(keep))
    }

    fn memory(&self) -> Result<MemoryInfo> {
        each!(self, Self, queue => queue.memory())
    }

    unsafe fn register(&self, host: *mut u8, bytes: u64) -> Result<Memory> {
        // SAFETY: as the caller promises.
        each!(self, Self, queue => unsafe { queue.register(host, bytes) })
    }

    fn import_memory(&self, memory: ExternalMemory) -> Result<Memory> {
        each!(self, Self, queue => queue.import_memory(memory))
    }

    fn import_image(&self, memory: ExternalMemory, pixels: &Pixels) -> Result<Vec<Memory>> {
        each!(self, Self, queue => queue.import_image(memory, pixels))
    }

    fn register_resource(
        &self,
        resource: BorrowedResource,
        pixels: Option<&Pixels>,
    ) -> Result<DriverResource> {
        each!(self, Self, queue => queue.register_resource(resource, pixels))
    }

    fn map_resource(&self, resource: &DriverResource) -> Result<Vec<Memory>> {
        each!(self, Self, queue => queue.map_resource(resource))
    }

    fn import_semaphore(&self, semaphore: ExternalSemaphore) -> Result<Semaphore> {
        each!(self, Self, queue => queue.import_semaphore(semaphore))
    }

    fn wait_semaphore(&self, semaphore: &Semaphore, value: u64) -> Result<()> {
        each!(self, Self, queue => queue.wait_semaphore(semaphore, value))
    }

    fn signal_semaphore(&self, semaphore: &Semaphore, value: u64) -> Result<()> {
        each!(self, Self, queue => queue.signal_semaphore(semaphore, value))
    }

    fn acquire(&self, memory: Region<'_>) -> Result<()> {
        each!(self, Self, queue => queue.acquire(memory))
    }

    fn release(&self, memory: Region<'_>) -> Result<()> {
        each!(self, Self, queue => queue.release(memory))
    }

    fn fill(&self, target: Region<'_>, value: u8) -> Result<()> {
        each!(self, Self, queue => queue.fill(target, value))
    }

    fn copy(&self, target: Region<'_>, source: Region<'_>) -> Result<()> {
        each!(self, Self, queue => queue.copy(target, source))
    }

    fn event(&self, timed: bool) -> Result<AnyEvent> {
        each!(self, Self, queue => AnyEvent(queue.event(timed)))
    }

    fn record(&self, event: &AnyEvent) -> Result<()> {
        both!(self, event, AnyEvent, (queue, event) => queue.record(event))
    }

    fn wait_event(&self, event: &AnyEvent) -> Result<()> {
        both!(self, event, AnyEvent, (queue, event) => queue.wait_event(event))
    }

    fn handle(&self) -> Option<u64> {
        each!(self, Self, queue => queue.handle())
    }

    unsafe fn follow(&self, stream: u64) -> Result<()> {
        // SAFETY: as the caller promises.
        each!(self, Self, queue => unsafe { queue.follow(stream) })
    }

    unsafe fn precede(&self, stream: u64) -> Result<()> {
        // SAFETY: as the caller promises.
        each!(self, Self, queue => unsafe { queue.precede(stream) })
    }

    fn done(&self, event: &AnyEvent) -> Result<bool> {
        both!(self, event, AnyEvent, (queue, event) => queue.done(event))
    }

    fn notify(&self, event: &AnyEvent, thread: &Thread) -> Result<bool> {
        both!(self, event, AnyEvent, (queue, event) => queue.notify(event, thread))
    }

    fn elapsed(&self, from: &AnyEvent, to: &AnyEvent) -> Result<Duration> {
        all!(self, from, AnyEvent, to, AnyEvent, (queue, from, to) => queue.elapsed(from, to))
    }

    fn load(&self, artifact: &Artifact) -> Result<AnyKernel> {
        each!(self, Self, queue => AnyKernel(queue.load(artifact)))
    }

    fn unload(&self, kernel: AnyKernel) -> Result<()> {
        both!(self, kernel, AnyKernel, (queue, kernel) => queue.unload(kernel))
    }

    unsafe fn launch(&self, kernel: &AnyKernel, grid: Grid, arguments: &Arguments) -> Result<()> {
        // SAFETY: as the caller promises.
        both!(self, kernel, AnyKernel, (queue, kernel) => unsafe { queue.launch(kernel, grid, arguments) })
    }

    fn begin_capture(&self) -> Result<()> {
        each!(self, Self, queue => queue.begin_capture())
    }

    fn end_capture(&self) -> Result<AnyGraph> {
        each!(self, Self, queue => AnyGraph(queue.end_capture()))
    }

    unsafe fn replay(&self, graph: &AnyGraph) -> Result<()> {
        // SAFETY: as the caller promises.
        both!(self, graph, AnyGraph, (queue, graph) => unsafe { queue.replay(graph) })
    }

    fn graph_exec(&self, nodes: &[GraphNode<'_, Self>]) -> Result<AnyGraph> {
        self.graph_of(nodes)
    }

    fn update(
        &self,
        graph: &AnyGraph,
        place: usize,
        kernel: &AnyKernel,
        grid: Grid,
        arguments: &Arguments,
    ) -> Result<()> {
        all!(self, graph, AnyGraph, kernel, AnyKernel, (queue, graph, kernel) => {
            queue.update(graph, place, kernel, grid, arguments)
        })
    }

    fn discard(&self, graph: AnyGraph) -> Result<()> {
        both!(self, graph, AnyGraph, (queue, graph) => queue.discard(graph))
    }

    fn wait(&self, event: &AnyEvent, deadline: Instant) -> Result<()> {
        both!(self, event, AnyEvent, (queue, event) => queue.wait(event, deadline))
    }
}
