//! The simulated stream: commands in a list, run when somebody polls.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::heap::heap;
use super::programs::{Run, WORDS, same_layout};
use super::script::{Script, Scripted};
use super::stream::{Command, Context, Owner, State, Stream};
use super::{Controls, FakeCall, FakeResource, IMAGE};
use crate::accelerator::{GraphNode, Queue};
use crate::artifact::Artifact;
use crate::device::{MemoryInfo, QueueOptions};
use crate::error::{Error, Result};
use crate::external::{
    DriverResource, ExternalKind, ExternalMemory, ExternalSemaphore, Pixels, Semaphore, Timeline,
};
use crate::launch::{Arguments, Grid};
use crate::memory::{Memory, MemoryKind, Region};
use crate::programs::Program;
use crate::sys::BorrowedResource;

/// A point in a simulated stream.
pub struct FakeEvent {
    point: Arc<Point>,
    timed: bool,
}

/// Where an event was recorded last.
type Point = Mutex<Arc<State>>;

/// A loaded kernel.
#[derive(Debug)]
pub struct FakeKernel {
    program: Program,
    bytes: u32,
    /// What it does instead, and the word of its cancel flag.
    script: Option<(Script, Option<usize>)>,
}

/// Recorded commands.
pub struct FakeGraph {
    commands: RefCell<Vec<Command>>,
    /// Of a graph exec of launches: the events behind its launches.
    behind: Option<Vec<Option<Arc<Point>>>>,
}

/// The simulated queue.
pub struct FakeQueue {
    stream: Arc<Stream>,
    options: QueueOptions,
    capture: RefCell<Option<Vec<Command>>>,
}

fn last(point: &Point) -> MutexGuard<'_, Arc<State>> {
    point.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FakeQueue {
    pub(super) fn new(controls: Arc<Controls>, options: QueueOptions) -> Self {
        Self::of(Arc::new(Context::new(controls)), options)
    }

    fn of(context: Arc<Context>, options: QueueOptions) -> Self {
        Self { stream: Arc::new(Stream::new(context)), options, capture: RefCell::default() }
    }

    fn controls(&self) -> &Controls {
        &self.stream.context.controls
    }

    /// The command that reaches an event.
    fn recorded(&self, point: &Point) -> Command {
        let state = Arc::new(State { stream: Arc::downgrade(&self.stream), ..State::default() });
        *last(point) = Arc::clone(&state);
        Command::Record(state)
    }

    fn run_of(&self, kernel: &FakeKernel, grid: Grid, arguments: &Arguments) -> Result<Run> {
        if arguments.bytes() != kernel.bytes {
            let reason = format!("{} bytes of parameters given, {} wanted", arguments.bytes(), kernel.bytes);
            let entry = kernel.program.name().into();
            return Err(Error::Arguments { kernel: entry, parameter: "all".into(), reason });
        }
        let given = arguments.words();
        let scripted = kernel
            .script
            .map(|(script, flag)| Scripted { script, flag: flag.and_then(|word| given.get(word).copied()) });
        let mut words = [0; WORDS];
        words.iter_mut().zip(given).for_each(|(word, given)| *word = *given);
        Ok(Run { program: kernel.program, grid, words, iterations: 0, scripted })
    }

    fn drained(&self) -> Result<()> {
        let event = self.event(false)?;
        self.record(&event)?;
        self.wait(&event, self.options.deadline())
    }

    fn check(&self, call: FakeCall) -> Result<()> {
        self.stream.context.alive()?;
        self.controls().check(call)
    }

    fn turn(&self, command: Command) -> Result<()> {
        if self.capture.borrow().is_some() {
            return Err(Error::Capturing { what: "a turn with another API" });
        }
        self.push(command);
        Ok(())
    }

    fn push(&self, command: Command) {
        match self.capture.borrow_mut().as_mut() {
            Some(captured) => captured.push(command),
            None => self.stream.push([command]),
        }
    }
}

impl Drop for FakeQueue {
    fn drop(&mut self) {
        // Others may wait for it.
        let _ = self.stream.run();
    }
}

impl Queue for FakeQueue {
    type Kernel = FakeKernel;
    type Event = FakeEvent;
    type Graph = FakeGraph;

    #[allow(unsafe_code)]
    unsafe fn stream(&self) -> Result<Self> {
        self.check(FakeCall::Open)?;
        Ok(Self::of(Arc::clone(&self.stream.context), self.options))
    }

    fn is_captured(&self) -> Result<bool> {
        Ok(self.controls().captured.load(Ordering::Acquire))
    }

    #[allow(unsafe_code)]
    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Memory> {
        self.check(FakeCall::Allocate)?;
        let total = self.controls().memory.load(Ordering::Acquire);
        let used = self.controls().used.load(Ordering::Acquire);
        let out = Error::OutOfMemory { kind: kind.name(), bytes, free: total - used, total };
        if kind.is_lent() {
            return Err(Error::Unsupported {
                what: format!("allocating {} memory", kind.name()),
                device: "the simulated accelerator".into(),
            });
        }
        if kind == MemoryKind::Device && bytes > total - used {
            return Err(out);
        }
        let address = heap().allocate(bytes).ok_or(out)?;
        let owner = if kind == MemoryKind::Device { Owner::Device } else { Owner::Host };
        self.stream.context.insert(address, bytes, owner);
        let host = if kind.host_visible() { address } else { 0 };
        // SAFETY: the heap keeps the allocation until it is freed or its context ends.
        Ok(unsafe { Memory::from_raw(kind, address, host, bytes) })
    }

    fn free(&self, memory: Memory) -> Result<()> {
        self.check(FakeCall::Free)?;
        if memory.kind() == MemoryKind::Device {
            self.push(Command::Free { address: memory.address() });
            return Ok(());
        }
        self.drained()?;
        self.stream.context.free(memory.address());
        Ok(())
    }

    fn trim(&self, _keep: u64) -> Result<()> {
        self.stream.run()
    }

    fn memory(&self) -> Result<MemoryInfo> {
        let total = self.controls().memory.load(Ordering::Acquire);
        let free = total - self.controls().used.load(Ordering::Acquire);
        Ok(MemoryInfo { free, total, reserved: self.stream.context.bytes() })
    }

    #[allow(unsafe_code)]
    unsafe fn register(&self, host: *mut u8, bytes: u64) -> Result<Memory> {
        if !heap().register(host as u64, bytes) {
            return Err(Error::Host { what: "registering memory", cause: "it is registered already".into() });
        }
        self.stream.context.insert(host as u64, bytes, Owner::Registered);
        // SAFETY: the caller keeps it mapped until it is freed or the queue is dropped.
        Ok(unsafe { Memory::from_raw(MemoryKind::Registered, host as u64, host as u64, bytes) })
    }

    #[allow(unsafe_code)]
    fn import_memory(&self, memory: ExternalMemory) -> Result<Memory> {
        self.check(FakeCall::Import)?;
        memory.check()?;
        if memory.kind != ExternalKind::HostFd {
            return Err(memory.refused("the simulated accelerator"));
        }
        let (kind, bytes) = (MemoryKind::External, memory.bytes);
        let address = heap().allocate(bytes).ok_or(Error::OutOfMemory {
            kind: kind.name(),
            bytes,
            free: 0,
            total: 0,
        })?;
        self.stream.context.import(address, memory);
        // SAFETY: the heap keeps the copy until it is freed or its context ends.
        Ok(unsafe { Memory::from_raw(kind, address, 0, bytes) })
    }

    #[allow(unsafe_code)]
    fn import_image(&self, memory: ExternalMemory, pixels: &Pixels) -> Result<Vec<Memory>> {
        self.check(FakeCall::Import)?;
        memory.check()?;
        // No program takes a surface: what is there is a handle for each level.
        let level = |_| {
            let kind = MemoryKind::Surface;
            let out = Error::OutOfMemory { kind: kind.name(), bytes: 1, free: 0, total: 0 };
            let handle = heap().allocate(1).ok_or(out)?;
            self.stream.context.insert(handle, 1, Owner::Host);
            // SAFETY: it has no bytes; the heap keeps what its handle is until it is freed or its context ends.
            Ok(unsafe { Memory::from_raw(kind, handle, 0, 0) })
        };
        (0..pixels.levels).map(level).collect()
    }

    fn register_resource(&self, resource: BorrowedResource, _: Option<&Pixels>) -> Result<DriverResource> {
        self.check(FakeCall::Import)?;
        let wrong = |_| Error::NotShareable { cause: "it is no FakeResource".into() };
        let file = resource.into_parts().1.downcast::<FakeResource>().map_err(wrong)?;
        Ok(DriverResource::new((*file, Arc::new(AtomicBool::new(false)))))
    }

    #[allow(unsafe_code)]
    fn map_resource(&self, resource: &DriverResource) -> Result<Vec<Memory>> {
        self.check(FakeCall::Import)?;
        let failed = |cause: String| Error::Host { what: "mapping a resource", cause };
        let (FakeResource { file, bytes }, mapped) =
            resource.imported::<(FakeResource, Arc<AtomicBool>)>()?;
        if mapped.swap(true, Ordering::AcqRel) {
            return Err(failed("it is mapped".into()));
        }
        let (kind, bytes) = (MemoryKind::External, *bytes);
        let out = Error::OutOfMemory { kind: kind.name(), bytes, free: 0, total: 0 };
        let (address, file) = (heap().allocate(bytes).ok_or(out)?, file.try_clone());
        let file = file.map_err(|error| failed(error.to_string()))?;
        let read = self.stream.context.map(address, file, bytes, Arc::clone(mapped));
        read.ok_or_else(|| failed("its file is too short".into()))?;
        // SAFETY: the heap keeps the copy until it is freed or its context ends.
        Ok(vec![unsafe { Memory::from_raw(kind, address, 0, bytes) }])
    }

    fn import_semaphore(&self, semaphore: ExternalSemaphore) -> Result<Semaphore> {
        self.check(FakeCall::Import)?;
        Ok(Semaphore::new(semaphore.host))
    }

    fn wait_semaphore(&self, semaphore: &Semaphore, value: u64) -> Result<()> {
        self.check(FakeCall::WaitSemaphore)?;
        self.turn(Command::Await(Arc::clone(semaphore.imported::<Arc<dyn Timeline>>()?), value))
    }

    fn signal_semaphore(&self, semaphore: &Semaphore, value: u64) -> Result<()> {
        self.check(FakeCall::SignalSemaphore)?;
        self.turn(Command::Signal(Arc::clone(semaphore.imported::<Arc<dyn Timeline>>()?), value))
    }

    fn acquire(&self, memory: Region<'_>) -> Result<()> {
        self.check(FakeCall::Acquire)?;
        self.turn(Command::Acquire(memory.address()))
    }

    fn release(&self, memory: Region<'_>) -> Result<()> {
        self.check(FakeCall::Release)?;
        self.turn(Command::Release(memory.address()))
    }

    fn fill(&self, target: Region<'_>, value: u8) -> Result<()> {
        self.check(FakeCall::Fill)?;
        self.push(Command::Fill { address: target.address(), bytes: target.bytes(), value });
        Ok(())
    }

    fn copy(&self, target: Region<'_>, source: Region<'_>) -> Result<()> {
        self.check(FakeCall::Copy)?;
        if target.bytes() != source.bytes() {
            return Err(Error::Lengths { source_bytes: source.bytes(), destination_bytes: target.bytes() });
        }
        self.push(Command::Copy {
            target: target.address(),
            source: source.address(),
            bytes: source.bytes(),
        });
        Ok(())
    }

    fn event(&self, timed: bool) -> Result<FakeEvent> {
        Ok(FakeEvent { point: Arc::default(), timed })
    }

    fn record(&self, event: &FakeEvent) -> Result<()> {
        self.check(FakeCall::Record)?;
        self.push(self.recorded(&event.point));
        Ok(())
    }

    fn wait_event(&self, event: &FakeEvent) -> Result<()> {
        self.check(FakeCall::WaitEvent)?;
        if self.capture.borrow().is_some() {
            return Err(Error::Capturing { what: "a wait for an event" });
        }
        self.push(Command::Wait(Arc::clone(&last(&event.point))));
        Ok(())
    }

    fn done(&self, event: &FakeEvent) -> Result<bool> {
        self.check(FakeCall::Record)?;
        self.stream.run()?;
        let state = Arc::clone(&last(&event.point));
        if !state.is_done() {
            // It may be another stream's.
            state.stream.upgrade().map_or(Ok(()), |stream| stream.run())?;
        }
        Ok(state.is_done())
    }

    fn elapsed(&self, from: &FakeEvent, to: &FakeEvent) -> Result<Duration> {
        if !from.timed || !to.timed {
            return Err(Error::Unsupported {
                what: "the time of an event without a time stamp".into(),
                device: "the simulated accelerator".into(),
            });
        }
        let [from, to] = [from, to].map(|event| last(&event.point).at.load(Ordering::Acquire));
        Ok(Duration::from_micros(to.saturating_sub(from)))
    }

    fn load(&self, artifact: &Artifact) -> Result<FakeKernel> {
        let bytes = artifact.parameter_bytes();
        let scripts = self.controls().scripts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(script) = scripts.get(artifact.entry()) {
            let flag = artifact.params().guard.map(|guard| guard.stop as usize / 8);
            return Ok(FakeKernel { program: Program::Broken, bytes, script: Some((*script, flag)) });
        }
        let known = artifact.entry().parse::<Program>().ok();
        let Some(program) = known.filter(|_| artifact.image() == IMAGE) else {
            let reason = "the simulated accelerator runs its own programs only".into();
            return Err(Error::Load { kernel: artifact.entry().into(), reason });
        };
        if !same_layout(artifact.signature(), &program.signature()) {
            let reason = "the parameters do not lie where the program looks for them".into();
            return Err(Error::Load { kernel: artifact.entry().into(), reason });
        }
        Ok(FakeKernel { program, bytes, script: None })
    }

    fn unload(&self, _kernel: FakeKernel) -> Result<()> {
        Ok(())
    }

    #[allow(unsafe_code)]
    unsafe fn launch(&self, kernel: &FakeKernel, grid: Grid, arguments: &Arguments) -> Result<()> {
        self.check(FakeCall::Launch)?;
        self.push(Command::Run(self.run_of(kernel, grid, arguments)?));
        Ok(())
    }

    fn begin_capture(&self) -> Result<()> {
        *self.capture.borrow_mut() = Some(Vec::new());
        Ok(())
    }

    fn end_capture(&self) -> Result<FakeGraph> {
        let captured = self.capture.borrow_mut().take().unwrap_or_default();
        self.check(FakeCall::EndCapture)?;
        Ok(FakeGraph { commands: RefCell::new(captured), behind: None })
    }

    #[allow(unsafe_code)]
    unsafe fn replay(&self, graph: &FakeGraph) -> Result<()> {
        self.check(FakeCall::Launch)?;
        let commands = graph.commands.borrow();
        let Some(behind) = &graph.behind else {
            self.stream.push(commands.iter().cloned());
            return Ok(());
        };
        for (command, event) in commands.iter().zip(behind) {
            let event = event.as_deref().map(|event| self.recorded(event));
            self.stream.push([command.clone()].into_iter().chain(event));
        }
        self.controls().graph_launches.fetch_add(commands.len() as u64, Ordering::AcqRel);
        Ok(())
    }

    fn graph_exec(&self, nodes: &[GraphNode<'_, Self>]) -> Result<FakeGraph> {
        self.check(FakeCall::EndCapture)?;
        let run = |node: &GraphNode<'_, Self>| {
            self.run_of(node.kernel, node.grid, &node.arguments).map(Command::Run)
        };
        let commands = RefCell::new(nodes.iter().map(run).collect::<Result<_>>()?);
        let behind = nodes.iter().map(|node| node.then.map(|event| Arc::clone(&event.point))).collect();
        Ok(FakeGraph { commands, behind: Some(behind) })
    }

    fn update(
        &self,
        graph: &FakeGraph,
        place: usize,
        kernel: &FakeKernel,
        grid: Grid,
        arguments: &Arguments,
    ) -> Result<()> {
        let mut commands = graph.commands.borrow_mut();
        let Some(command) = commands.get_mut(place).filter(|_| graph.behind.is_some()) else {
            let (what, device) = ("updating it".into(), "the simulated accelerator".into());
            return Err(Error::Unsupported { what, device });
        };
        *command = Command::Run(self.run_of(kernel, grid, arguments)?);
        Ok(())
    }

    fn discard(&self, _graph: FakeGraph) -> Result<()> {
        Ok(())
    }
}
