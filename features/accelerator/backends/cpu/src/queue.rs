//! The queue that vm-accel sees.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use vm_accel::{
    Arguments, Artifact, Error, ExternalMemory, ExternalSemaphore, Grid, Memory, MemoryInfo, MemoryKind,
    Queue, QueueOptions, Region, Result, Semaphore, Timeline,
};

use crate::external::{DmaBuf, Mapping};
use crate::heap::Heap;
use crate::host;
use crate::kernel::{Codes, CpuKernel};
use crate::pool::{Pool, STACK};
use crate::stream::{Command, Mark, Stream};

/// A point in a stream.
pub struct CpuEvent {
    /// Where it was recorded last.
    mark: Mutex<Option<Arc<Mark>>>,
    timed: bool,
}

impl CpuEvent {
    fn mark(&self) -> Option<Arc<Mark>> {
        self.mark.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What the queues of a context share.
struct Context {
    pool: Arc<Pool>,
    codes: RefCell<Codes>,
    /// Ranges of registered memory: first byte and length.
    registered: RefCell<Vec<(u64, u64)>>,
    /// Memory of other APIs. Kernels that do not end keep it.
    imported: RefCell<Vec<Mapping>>,
    heap: Arc<Heap>,
    options: QueueOptions,
    device: String,
}

/// Recorded commands.
pub struct CpuGraph(Arc<[Command]>);

/// A stream of commands with a thread of its own.
pub struct CpuQueue {
    stream: Arc<Stream>,
    commands: Sender<Command>,
    thread: Option<JoinHandle<()>>,
    capture: RefCell<Option<Vec<Command>>>,
    context: Rc<Context>,
}

impl CpuQueue {
    pub(crate) fn open(pool: Arc<Pool>, device: &str, options: &QueueOptions) -> Result<CpuQueue> {
        Self::of(Rc::new(Context {
            pool,
            codes: RefCell::default(),
            registered: RefCell::default(),
            imported: RefCell::default(),
            heap: Arc::default(),
            options: *options,
            device: device.to_owned(),
        }))
    }

    /// A stream of a context.
    fn of(context: Rc<Context>) -> Result<Self> {
        let stream = Arc::new(Stream { heap: Arc::clone(&context.heap), ..Stream::default() });
        let (commands, receiver) = channel();
        let (theirs, pool) = (Arc::clone(&stream), Arc::clone(&context.pool));
        let thread = std::thread::Builder::new()
            .name("vm-cpu queue".into())
            .stack_size(STACK)
            .spawn(move || theirs.serve(&receiver, &pool))
            .map_err(|error| Error::Host { what: "starting a thread", cause: error.to_string() })?;
        Ok(Self { stream, commands, thread: Some(thread), capture: RefCell::default(), context })
    }

    fn check(&self) -> Result<()> {
        match &*self.stream.lost.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(cause) => Err(Error::Lost { cause: cause.clone() }),
            None => Ok(()),
        }
    }

    fn push(&self, command: Command) -> Result<()> {
        self.check()?;
        if let Some(captured) = self.capture.borrow_mut().as_mut() {
            captured.push(command);
            return Ok(());
        }
        self.send(command)
    }

    fn send(&self, command: Command) -> Result<()> {
        self.commands.send(command).map_err(|_| Error::Lost { cause: "the queue's thread has ended".into() })
    }

    fn dma_buf(&self, address: u64) -> Option<Arc<DmaBuf>> {
        let imported = self.context.imported.borrow();
        imported.iter().find(|mapping| mapping.address == address)?.dma_buf.clone()
    }

    /// Gives the stream a turn with another API, which no graph has.
    fn turn(&self, command: Command) -> Result<()> {
        if self.capture.borrow().is_some() {
            return Err(Error::Capturing { what: "a turn with another API" });
        }
        self.push(command)
    }

    /// Waits until all commands so far have run.
    fn drain(&self) -> Result<()> {
        let mark = Arc::new(Mark::default());
        self.send(Command::Record(Arc::clone(&mark)))?;
        if mark.wait(self.context.options.deadline()) {
            Ok(())
        } else {
            Err(Error::Deadline { what: "the end of the queue's commands".into() })
        }
    }

    fn unsupported(&self, what: &str) -> Error {
        Error::Unsupported { what: what.into(), device: self.context.device.clone() }
    }
}

impl Queue for CpuQueue {
    type Kernel = Arc<CpuKernel>;
    type Event = CpuEvent;
    type Graph = CpuGraph;

    unsafe fn stream(&self) -> Result<Self> {
        self.check()?;
        Self::of(Rc::clone(&self.context))
    }

    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Memory> {
        self.check()?;
        if matches!(kind, MemoryKind::Registered | MemoryKind::External | MemoryKind::Surface) {
            return Err(self.unsupported(&format!("allocating {} memory", kind.name())));
        }
        let (free, total) = host::memory()?;
        let memory = if bytes <= free { self.context.heap.allocate(kind, bytes) } else { None };
        memory.ok_or(Error::OutOfMemory { kind: kind.name(), bytes, free, total })
    }

    fn free(&self, memory: Memory) -> Result<()> {
        if self.capture.borrow().is_some() {
            return Err(Error::Capturing { what: "freeing memory" });
        }
        if memory.kind() == MemoryKind::Registered {
            // The host may take it away as soon as this returns.
            self.drain()?;
            self.context.registered.borrow_mut().retain(|(at, _)| *at != memory.address());
            return Ok(());
        }
        if memory.kind() == MemoryKind::External {
            self.drain()?;
            self.context.imported.borrow_mut().retain(|mapping| mapping.address != memory.address());
            return Ok(());
        }
        self.send(Command::Free { address: memory.address() })
    }

    fn trim(&self, _keep: u64) -> Result<()> {
        // What is freed is returned at once; so what is left to do is to free it.
        self.drain()
    }

    fn memory(&self) -> Result<MemoryInfo> {
        let (free, total) = host::memory()?;
        Ok(MemoryInfo { free, total, reserved: self.context.heap.bytes() })
    }

    unsafe fn register(&self, host: *mut u8, bytes: u64) -> Result<Memory> {
        self.check()?;
        let address = host as u64;
        let Some(end) = address.checked_add(bytes).filter(|_| address != 0 && bytes != 0) else {
            return Err(Error::Host {
                what: "registering memory",
                cause: "it is no range of addresses".into(),
            });
        };
        let mut registered = self.context.registered.borrow_mut();
        if registered.iter().any(|(at, length)| *at < end && address < at + length) {
            return Err(Error::Host { what: "registering memory", cause: "it is registered already".into() });
        }
        registered.push((address, bytes));
        // SAFETY: the caller keeps it mapped until it is freed or the queue is dropped.
        Ok(unsafe { Memory::from_raw(MemoryKind::Registered, address, address, bytes) })
    }

    fn import_memory(&self, memory: ExternalMemory) -> Result<Memory> {
        self.check()?;
        let bytes = memory.bytes;
        let mapping = Mapping::new(memory, &self.context.device)?;
        let address = mapping.address;
        self.context.imported.borrow_mut().push(mapping);
        // SAFETY: it is mapped until it is freed or the context ends.
        Ok(unsafe { Memory::from_raw(MemoryKind::External, address, 0, bytes) })
    }

    fn import_semaphore(&self, semaphore: ExternalSemaphore) -> Result<Semaphore> {
        self.check()?;
        Ok(Semaphore::new(semaphore.host))
    }

    fn wait_semaphore(&self, semaphore: &Semaphore, value: u64) -> Result<()> {
        let timeline = Arc::clone(semaphore.imported::<Arc<dyn Timeline>>()?);
        self.turn(Command::Await { timeline, value })
    }

    fn signal_semaphore(&self, semaphore: &Semaphore, value: u64) -> Result<()> {
        let timeline = Arc::clone(semaphore.imported::<Arc<dyn Timeline>>()?);
        self.turn(Command::Signal { timeline, value })
    }

    fn acquire(&self, memory: Region<'_>) -> Result<()> {
        self.dma_buf(memory.address()).map_or(Ok(()), |buffer| self.turn(Command::Begin(buffer)))
    }

    fn release(&self, memory: Region<'_>) -> Result<()> {
        self.dma_buf(memory.address()).map_or(Ok(()), |buffer| self.turn(Command::End(buffer)))
    }

    fn fill(&self, target: Region<'_>, value: u8) -> Result<()> {
        self.push(Command::Fill { address: target.address(), bytes: target.bytes(), value })
    }

    fn copy(&self, target: Region<'_>, source: Region<'_>) -> Result<()> {
        if target.bytes() != source.bytes() {
            return Err(Error::Lengths { source_bytes: source.bytes(), destination_bytes: target.bytes() });
        }
        self.push(Command::Copy { target: target.address(), source: source.address(), bytes: source.bytes() })
    }

    fn event(&self, timed: bool) -> Result<CpuEvent> {
        Ok(CpuEvent { mark: Mutex::default(), timed })
    }

    fn record(&self, event: &CpuEvent) -> Result<()> {
        let mark = Arc::new(Mark::default());
        self.push(Command::Record(Arc::clone(&mark)))?;
        *event.mark.lock().unwrap_or_else(PoisonError::into_inner) = Some(mark);
        Ok(())
    }

    fn wait_event(&self, event: &CpuEvent) -> Result<()> {
        if self.capture.borrow().is_some() {
            return Err(Error::Capturing { what: "a wait for an event" });
        }
        self.check()?;
        event.mark().map_or(Ok(()), |mark| self.send(Command::Wait(mark)))
    }

    fn done(&self, event: &CpuEvent) -> Result<bool> {
        self.check()?;
        Ok(event.mark().is_none_or(|mark| mark.at().is_some()))
    }

    fn notify(&self, event: &CpuEvent, thread: &Thread) -> Result<bool> {
        self.check()?;
        match event.mark() {
            Some(mark) => mark.notify(thread),
            None => thread.unpark(),
        }
        Ok(true)
    }

    fn elapsed(&self, from: &CpuEvent, to: &CpuEvent) -> Result<Duration> {
        if !from.timed || !to.timed {
            return Err(self.unsupported("the time of an event without a time stamp"));
        }
        let at = |event: &CpuEvent| event.mark().and_then(|mark| mark.at());
        match (at(from), at(to)) {
            (Some(from), Some(to)) => Ok(to.saturating_duration_since(from)),
            _ => Err(self.unsupported("the time of an event that is not done")),
        }
    }

    fn load(&self, artifact: &Artifact) -> Result<Arc<CpuKernel>> {
        CpuKernel::load(artifact, &mut self.context.codes.borrow_mut()).map(Arc::new)
    }

    fn unload(&self, _kernel: Arc<CpuKernel>) -> Result<()> {
        // Commands that still use it hold it.
        Ok(())
    }

    unsafe fn launch(&self, kernel: &Arc<CpuKernel>, grid: Grid, arguments: &Arguments) -> Result<()> {
        kernel.check(grid, arguments)?;
        self.push(Command::Launch { kernel: Arc::clone(kernel), params: arguments.words().into(), grid })
    }

    fn begin_capture(&self) -> Result<()> {
        *self.capture.borrow_mut() = Some(Vec::new());
        Ok(())
    }

    fn end_capture(&self) -> Result<CpuGraph> {
        Ok(CpuGraph(self.capture.borrow_mut().take().unwrap_or_default().into()))
    }

    unsafe fn replay(&self, graph: &CpuGraph) -> Result<()> {
        self.push(Command::Replay(Arc::clone(&graph.0)))
    }

    fn discard(&self, _graph: CpuGraph) -> Result<()> {
        Ok(())
    }

    fn wait(&self, event: &CpuEvent, deadline: Instant) -> Result<()> {
        self.check()?;
        if event.mark().is_none_or(|mark| mark.wait(deadline)) {
            self.check()
        } else {
            Err(Error::Deadline { what: "the device's work".into() })
        }
    }
}

impl Drop for CpuQueue {
    fn drop(&mut self) {
        self.stream.stop.store(true, Ordering::Release);
        let ended = Arc::new(Mark::default());
        let sent = self.send(Command::Record(Arc::clone(&ended))).and_then(|()| self.send(Command::Stop));
        let waited = sent.is_err() || ended.wait(self.context.options.deadline());
        let Some(thread) = self.thread.take() else { return };
        if !waited {
            // The thread keeps the memory and the code that its kernel works with.
            std::mem::forget(std::mem::take(&mut *self.context.imported.borrow_mut()));
            tracing::error!("a kernel does not end: its queue's thread and memory are left to it");
        } else if thread.join().is_err() {
            tracing::error!("a queue's thread panicked");
        }
    }
}
