//! The queue that vm-accel sees.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use vm_accel::image::Images;
use vm_accel::{
    Arguments, Artifact, DeviceInfo, Error, Grid, Memory, MemoryInfo, MemoryKind, Queue, QueueOptions,
    Region, Result,
};
use vm_paravirt_guest::Error as Client;
use vm_paravirt_guest::linux::Part;
use vm_paravirt_guest::protocol::{Argument, BatchWriter, Info, MAX_BATCH_BYTES, NoRoom, Span, Status};

use crate::connection::{Connection, Fill, Refused, Shared};
use crate::kernel::{self, GuestKernel, Module};
use crate::{address, error, sys};

/// What a batch has beside the code of a module.
const OVERHEAD: usize = 64;

/// A point in the order of a connection's operations.
#[derive(Debug)]
pub struct GuestEvent {
    timed: bool,
    mark: Mutex<Option<Mark>>,
}

/// Where an event was recorded last.
#[derive(Clone, Debug)]
struct Mark {
    connection: Arc<Shared>,
    position: u64,
    /// When this process heard that it was reached.
    at: Option<Arc<OnceLock<Instant>>>,
}

impl GuestEvent {
    fn mark(&self) -> Option<Mark> {
        self.mark.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Recorded operations.
#[derive(Debug)]
pub struct GuestGraph(Vec<Operation>);

/// An operation that a graph has.
#[derive(Clone, Debug)]
enum Operation {
    Fill(Span, u8),
    Copy((u32, u64), (u32, u64), u64),
    Launch(u32, u32, Grid, Vec<Argument>),
}

impl Operation {
    fn write(&self, batch: &mut BatchWriter<'_>) -> Result<(), NoRoom> {
        match self {
            Self::Fill(target, value) => batch.fill(*target, *value),
            Self::Copy(target, source, bytes) => batch.copy(*target, *source, *bytes),
            Self::Launch(module, kernel, grid, arguments) => {
                batch.launch(*module, *kernel, grid.0, arguments)
            }
        }
    }
}

/// What the queues of a context share.
struct Context {
    connection: Arc<Connection>,
    user: u64,
    info: Arc<DeviceInfo>,
    options: QueueOptions,
    modules: RefCell<Images<Module>>,
    /// Its buffers of the device, with their lengths, and the addresses of its parts of the window.
    buffers: RefCell<HashMap<u32, u64>>,
    pinned: RefCell<HashSet<u64>>,
    /// Parts that were freed, and what has to be done before another may have them.
    freed: RefCell<Vec<(u64, Part)>>,
    held: Cell<u64>,
}

/// A stream of a context. All streams of an accelerator are one to the host.
pub struct GuestQueue {
    context: Rc<Context>,
    capture: RefCell<Option<Vec<Operation>>>,
    /// Room for the arguments of a launch.
    arguments: RefCell<Vec<Argument>>,
}

impl GuestQueue {
    pub(crate) fn open(connection: Arc<Connection>, info: Arc<DeviceInfo>, options: &QueueOptions) -> Self {
        let user = connection.shared().join();
        Self::of(Rc::new(Context {
            connection,
            user,
            info,
            options: *options,
            modules: RefCell::default(),
            buffers: RefCell::default(),
            pinned: RefCell::default(),
            freed: RefCell::default(),
            held: Cell::new(0),
        }))
    }

    fn of(context: Rc<Context>) -> Self {
        Self { context, capture: RefCell::default(), arguments: RefCell::default() }
    }

    fn shared(&self) -> &Arc<Shared> {
        self.context.connection.shared()
    }

    fn not_capturing(&self, what: &'static str) -> Result<()> {
        if self.capture.borrow().is_some() { Err(Error::Capturing { what }) } else { Ok(()) }
    }

    /// Gives an operation, or records it.
    fn push(&self, operation: Operation) -> Result<()> {
        if let Some(captured) = self.capture.borrow_mut().as_mut() {
            self.shared().check()?;
            captured.push(operation);
            return Ok(());
        }
        self.context.give(&|batch| operation.write(batch))
    }

    fn place(&self, region: Region<'_>) -> Result<(u32, u64)> {
        self.context.find(region.address())
    }
}

impl Context {
    fn shared(&self) -> &Shared {
        self.connection.shared()
    }

    fn give(&self, operation: Fill<'_>) -> Result<()> {
        self.shared().give(self.user, &mut std::iter::once(operation))
    }

    /// Does something, and waits for what the host says to it.
    fn call(&self, bytes: usize, operations: Fill<'_>) -> Result<Result<(), Refused>> {
        self.shared().call(self.options.deadline(), bytes, operations, |_| Ok(()))
    }

    /// The buffer that an address is in, and where.
    fn find(&self, address: u64) -> Result<(u32, u64)> {
        address::buffer(address).or_else(|| self.shared().find(address)).ok_or_else(|| Error::Unsupported {
            what: format!("memory at {address:#x}, which is neither its own nor pinned"),
            device: self.info.name.clone(),
        })
    }

    fn unsupported(&self, what: &str) -> Error {
        Error::Unsupported { what: what.into(), device: self.info.name.clone() }
    }

    /// Waits until the host has done all so far.
    fn drain(&self) -> Result<()> {
        self.shared().wait(Some(self.user), self.shared().position(), self.options.deadline())
    }

    /// Gives back the parts of the window that nothing uses any more.
    fn sweep(&self) {
        let reached = self.shared().reached();
        self.freed.borrow_mut().retain(|(position, _)| *position > reached);
    }

    fn memory(&self) -> Result<MemoryInfo> {
        let shared = self.shared();
        let query = shared.call(self.options.deadline(), 0, &|batch| batch.query(), |reply| {
            let answer = reply.results().next().and_then(Result::ok).map(|(_, answer)| answer);
            let info =
                Info::decode(answer.unwrap_or_default()).map_err(|error| error::lost(Client::from(error)))?;
            Ok(MemoryInfo { free: info.memory_free, total: info.memory_bytes, reserved: self.held.get() })
        });
        query?.map_err(|refused| refused.error(shared.limits()))
    }

    fn allocate_device(&self, bytes: u64) -> Result<Memory> {
        let shared = self.shared();
        let number = shared.take_number();
        let created = match bytes <= address::MAX_BYTES {
            true => self.call(0, &|batch| batch.create_buffer(number, bytes)),
            false => Ok(Err(Refused { status: Status::OutOfMemory, words: String::new() })),
        };
        match created {
            Ok(Ok(())) => {
                self.buffers.borrow_mut().insert(number, bytes);
                self.held.update(|held| held + bytes);
                Ok(sys::device(address::of(number), bytes))
            }
            Ok(Err(refused)) => {
                shared.give_number(number);
                let MemoryInfo { free, total, .. } = self.memory()?;
                let full =
                    refused.status == Status::OutOfMemory || refused.status == Status::Quota && bytes > free;
                let kind = MemoryKind::Device.name();
                Err(if full {
                    Error::OutOfMemory { kind, bytes, free, total }
                } else {
                    refused.error(shared.limits())
                })
            }
            Err(error) => Err(error),
        }
    }

    fn allocate_pinned(&self, bytes: u64) -> Result<Memory> {
        let part = self.take_part(bytes)?;
        let shared = self.shared();
        let number = shared.take_number();
        let range = part.range(0, bytes).map_err(error::host("a part of the window"))?;
        if let Err(refused) = self.call(0, &|batch| batch.import_buffer(number, &[range]))? {
            shared.give_number(number);
            return Err(refused.error(shared.limits()));
        }
        let address = shared.window().address() + part.offset();
        shared.keep(number, part);
        self.pinned.borrow_mut().insert(address);
        Ok(sys::pinned(address, bytes))
    }

    /// A part of the window; where there is none, once what was freed is.
    fn take_part(&self, bytes: u64) -> Result<Part> {
        let window = self.shared().window();
        let full =
            || Error::OutOfMemory { kind: MemoryKind::Pinned.name(), bytes, free: 0, total: window.bytes() };
        self.sweep();
        match window.take(bytes) {
            Err(Client::WindowFull) if self.freed.borrow().is_empty() => return Err(full()),
            Err(Client::WindowFull) => self.drain()?,
            taken => return taken.map_err(error::host("taking a part of the window")),
        }
        self.sweep();
        window.take(bytes).map_err(|error| match error {
            Client::WindowFull => full(),
            other => error::host("taking a part of the window")(other),
        })
    }

    fn load(&self, artifact: &Artifact) -> Result<Module> {
        let bad = |reason: String| Error::Load { kernel: artifact.entry().to_owned(), reason };
        let (shared, code) = (self.shared(), artifact.image());
        let number = shared.module_number();
        let created = if code.len() + OVERHEAD <= MAX_BATCH_BYTES {
            self.call(code.len() + OVERHEAD, &|batch| batch.create_module(number, code))?
        } else {
            self.load_from_window(number, code)?
        };
        created.map_err(|refused| match refused.words.is_empty() {
            true => bad(refused.status.to_string()),
            false => bad(refused.words),
        })?;
        // The host has decoded it.
        let module = vm_ir::binary::decode(code).map_err(|error| bad(error.to_string()))?;
        let kernels = module.kernels().iter().map(|kernel| kernel.name().to_owned()).collect();
        Ok(Module { number, kernels })
    }

    /// Has the host read a module that no batch has room for.
    fn load_from_window(&self, number: u32, code: &[u8]) -> Result<Result<(), Refused>> {
        // What failed before would be told as the module's failure.
        self.drain()?;
        let bytes = code.len() as u64;
        let part = self.take_part(bytes)?;
        part.write(0, code).map_err(error::host("writing a module"))?;
        let range = part.range(0, bytes).map_err(error::host("writing a module"))?;
        let buffer = self.shared().take_number();
        let created = self.call(0, &|batch| {
            batch.import_buffer(buffer, &[range])?;
            batch.create_module_from(number, Span { buffer, offset: 0, bytes })?;
            batch.destroy_buffer(buffer)
        });
        self.shared().give_number(buffer);
        created
    }
}

impl Queue for GuestQueue {
    type Kernel = GuestKernel;
    type Event = GuestEvent;
    type Graph = GuestGraph;

    unsafe fn stream(&self) -> Result<Self> {
        self.shared().check()?;
        Ok(Self::of(Rc::clone(&self.context)))
    }

    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Memory> {
        self.shared().check()?;
        match kind {
            MemoryKind::Device => self.context.allocate_device(bytes),
            MemoryKind::Pinned => self.context.allocate_pinned(bytes),
            MemoryKind::Unified => Err(self.context.unsupported("unified memory")),
            kind @ (MemoryKind::Registered | MemoryKind::External | MemoryKind::Surface) => {
                Err(self.context.unsupported(&format!("allocating {} memory", kind.name())))
            }
        }
    }

    fn free(&self, memory: Memory) -> Result<()> {
        self.not_capturing("freeing memory")?;
        let (context, shared) = (&self.context, self.shared());
        if let Some((number, _)) = address::buffer(memory.address()) {
            let bytes = context.buffers.borrow_mut().remove(&number).unwrap_or_default();
            context.held.update(|held| held - bytes);
            let freed = context.give(&|batch| batch.destroy_buffer(number));
            shared.give_number(number);
            return freed;
        }
        context.pinned.borrow_mut().remove(&memory.address());
        let Some((number, part)) = shared.release(memory.address()) else { return Ok(()) };
        let freed = context.give(&|batch| batch.destroy_buffer(number));
        shared.give_number(number);
        context.freed.borrow_mut().push((shared.position(), part));
        context.sweep();
        freed
    }

    fn trim(&self, _keep: u64) -> Result<()> {
        // The host has what was freed; the window has it when nothing uses it any more.
        self.context.drain()?;
        self.context.sweep();
        Ok(())
    }

    fn memory(&self) -> Result<MemoryInfo> {
        self.context.memory()
    }

    unsafe fn register(&self, _host: *mut u8, _bytes: u64) -> Result<Memory> {
        Err(self
            .context
            .unsupported("registering host memory: the host reaches no more of the guest than the window"))
    }

    fn fill(&self, target: Region<'_>, value: u8) -> Result<()> {
        let (buffer, offset) = self.place(target)?;
        self.push(Operation::Fill(Span { buffer, offset, bytes: target.bytes() }, value))
    }

    fn copy(&self, target: Region<'_>, source: Region<'_>) -> Result<()> {
        if target.bytes() != source.bytes() {
            return Err(Error::Lengths { source_bytes: source.bytes(), destination_bytes: target.bytes() });
        }
        self.push(Operation::Copy(self.place(target)?, self.place(source)?, target.bytes()))
    }

    fn event(&self, timed: bool) -> Result<GuestEvent> {
        Ok(GuestEvent { timed, mark: Mutex::default() })
    }

    fn record(&self, event: &GuestEvent) -> Result<()> {
        self.not_capturing("an event")?;
        let connection = Arc::clone(self.shared());
        connection.check()?;
        let (position, at) = match event.timed {
            true => connection.stamp(self.context.user).map(|(position, at)| (position, Some(at)))?,
            false => (connection.position(), None),
        };
        *event.mark.lock().unwrap_or_else(PoisonError::into_inner) = Some(Mark { connection, position, at });
        Ok(())
    }

    /// For an event of another connection the calling thread waits: the host has no operation for that.
    fn wait_event(&self, event: &GuestEvent) -> Result<()> {
        self.not_capturing("a wait for an event")?;
        self.shared().check()?;
        match event.mark() {
            Some(mark) if !Arc::ptr_eq(&mark.connection, self.shared()) => {
                let waited = mark.connection.wait(None, mark.position, self.context.options.deadline());
                // Who is lost is not waited for.
                waited.or_else(|error| if error.is_lost() { Ok(()) } else { Err(error) })
            }
            _ => Ok(()),
        }
    }

    fn done(&self, event: &GuestEvent) -> Result<bool> {
        let user = Some(self.context.user);
        event.mark().map_or(Ok(true), |mark| mark.connection.done(user, mark.position))
    }

    fn notify(&self, event: &GuestEvent, thread: &Thread) -> Result<bool> {
        match event.mark() {
            Some(mark) => mark.connection.notify(mark.position, thread)?,
            None => thread.unpark(),
        }
        Ok(true)
    }

    fn elapsed(&self, from: &GuestEvent, to: &GuestEvent) -> Result<Duration> {
        if !from.timed || !to.timed {
            return Err(self.context.unsupported("the time of an event without a time stamp"));
        }
        let at = |event: &GuestEvent| event.mark()?.at?.get().copied();
        match (at(from), at(to)) {
            (Some(from), Some(to)) => Ok(to.saturating_duration_since(from)),
            _ => Err(self.context.unsupported("the time of an event that is not done")),
        }
    }

    fn load(&self, artifact: &Artifact) -> Result<GuestKernel> {
        kernel::check(artifact)?;
        let mut modules = self.context.modules.borrow_mut();
        let module = modules.take(artifact, || self.context.load(artifact))?;
        let index = module.kernels.iter().position(|name| name == artifact.entry());
        if let Some(index) = index {
            return Ok(GuestKernel {
                artifact: artifact.clone(),
                module: module.number,
                index: index as u32,
            });
        }
        let reason = "the module has no kernel of this name".into();
        let unused = modules.give(artifact);
        unused.map_or(Ok(()), |module| self.context.give(&|batch| batch.destroy_module(module.number)))?;
        Err(Error::Load { kernel: artifact.entry().to_owned(), reason })
    }

    fn unload(&self, kernel: GuestKernel) -> Result<()> {
        let unused = self.context.modules.borrow_mut().give(&kernel.artifact);
        unused.map_or(Ok(()), |module| self.context.give(&|batch| batch.destroy_module(module.number)))
    }

    unsafe fn launch(&self, kernel: &GuestKernel, grid: Grid, arguments: &Arguments) -> Result<()> {
        let mut sent = self.arguments.borrow_mut();
        kernel.arguments(arguments, |address| self.context.find(address), &mut sent)?;
        if self.capture.borrow().is_some() {
            return self.push(Operation::Launch(kernel.module, kernel.index, grid, sent.clone()));
        }
        self.context.give(&|batch| batch.launch(kernel.module, kernel.index, grid.0, &sent))
    }

    fn begin_capture(&self) -> Result<()> {
        *self.capture.borrow_mut() = Some(Vec::new());
        Ok(())
    }

    fn end_capture(&self) -> Result<GuestGraph> {
        Ok(GuestGraph(self.capture.borrow_mut().take().unwrap_or_default()))
    }

    unsafe fn replay(&self, graph: &GuestGraph) -> Result<()> {
        self.not_capturing("a replay")?;
        let writes: Vec<_> = graph
            .0
            .iter()
            .map(|operation| move |batch: &mut BatchWriter<'_>| operation.write(batch))
            .collect();
        self.shared().give(self.context.user, &mut writes.iter().map(|write| write as Fill<'_>))
    }

    fn discard(&self, _graph: GuestGraph) -> Result<()> {
        Ok(())
    }

    fn wait(&self, event: &GuestEvent, deadline: Instant) -> Result<()> {
        let user = Some(self.context.user);
        event.mark().map_or(Ok(()), |mark| mark.connection.wait(user, mark.position, deadline))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let shared = self.connection.shared();
        let mut parts = Vec::new();
        let mut buffers: Vec<_> = self.buffers.borrow_mut().drain().map(|(number, _)| number).collect();
        for address in self.pinned.borrow_mut().drain() {
            if let Some((number, part)) = shared.release(address) {
                buffers.push(number);
                parts.push(part);
            }
        }
        parts.extend(self.freed.borrow_mut().drain(..).map(|(_, part)| part));
        let modules: Vec<_> = self.modules.borrow_mut().drain().collect();
        let released = buffers
            .iter()
            .try_for_each(|number| self.give(&|batch| batch.destroy_buffer(*number)))
            .and_then(|()| {
                modules.iter().try_for_each(|module| self.give(&|batch| batch.destroy_module(module.number)))
            });
        buffers.into_iter().for_each(|number| shared.give_number(number));
        let ended = released.and_then(|()| match parts.is_empty() {
            true => Ok(()),
            false => shared.wait(None, shared.position(), self.options.deadline()),
        });
        shared.leave(self.user);
        if let Err(Error::Deadline { .. }) = ended {
            tracing::error!(
                "a kernel does not end: its parts of the window are left to it until this process ends"
            );
            std::mem::forget(parts);
        }
    }
}
