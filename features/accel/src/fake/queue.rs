//! The simulated stream: commands in a list, run when somebody looks.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::heap::Heap;
use super::programs::{Progress, Run, WORDS, same_layout};
use super::script::{Script, Scripted};
use super::{Controls, FakeCall, IMAGE};
use crate::accelerator::{Link, Queue};
use crate::artifact::Artifact;
use crate::device::{MemoryInfo, QueueOptions};
use crate::error::{Error, Result};
use crate::launch::{Arguments, Grid};
use crate::memory::{Memory, MemoryKind, Region};
use crate::programs::Program;

#[derive(Clone)]
enum Command {
    Fill { address: u64, bytes: u64, value: u8 },
    Copy { target: u64, source: u64, bytes: u64 },
    Run(Run),
    Free { address: u64, bytes: u64 },
    Record(Rc<State>),
}

#[derive(Default)]
struct State {
    done: Cell<bool>,
    recorded: Cell<bool>,
    at: Cell<u64>,
}

/// A point in the simulated stream.
pub struct FakeEvent {
    point: Rc<Point>,
    timed: bool,
}

/// Where an event was recorded last.
type Point = RefCell<Rc<State>>;

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
    /// Of a chain: the events behind its launches.
    behind: Option<Vec<Option<Rc<Point>>>>,
}

/// The simulated queue.
pub struct FakeQueue {
    controls: Arc<Controls>,
    options: QueueOptions,
    heap: RefCell<Heap>,
    commands: RefCell<VecDeque<Command>>,
    capture: RefCell<Option<Vec<Command>>>,
    lost: RefCell<Option<Error>>,
    /// Commands run so far: the simulated clock, in microseconds.
    clock: Cell<u64>,
    device_bytes: Cell<u64>,
    registered_bytes: Cell<u64>,
}

/// The command that reaches an event.
fn recorded(point: &Point) -> Command {
    let state = Rc::new(State { recorded: Cell::new(true), ..State::default() });
    *point.borrow_mut() = Rc::clone(&state);
    Command::Record(state)
}

impl FakeQueue {
    pub(super) fn new(controls: Arc<Controls>, options: QueueOptions) -> Self {
        Self {
            controls,
            options,
            heap: RefCell::default(),
            commands: RefCell::default(),
            capture: RefCell::default(),
            lost: RefCell::default(),
            clock: Cell::new(0),
            device_bytes: Cell::new(0),
            registered_bytes: Cell::new(0),
        }
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
        if let Some(error) = self.lost.borrow().as_ref() {
            return Err(error.clone());
        }
        self.controls.check(call)
    }

    fn push(&self, command: Command) {
        match self.capture.borrow_mut().as_mut() {
            Some(captured) => captured.push(command),
            None => self.commands.borrow_mut().push_back(command),
        }
    }

    fn run(&self) -> Result<()> {
        if self.controls.paused.load(Ordering::Acquire) {
            return Ok(());
        }
        loop {
            let mut commands = self.commands.borrow_mut();
            let Some(command) = commands.front_mut() else { return Ok(()) };
            self.clock.set(self.clock.get() + 1);
            match self.execute(command) {
                Progress::Running => return Ok(()),
                Progress::Done => drop(commands.pop_front()),
                Progress::Fault => {
                    commands.pop_front();
                    let error = Error::Lost { cause: "illegal address".into() };
                    *self.lost.borrow_mut() = Some(error.clone());
                    return Err(error);
                }
            }
        }
    }

    fn execute(&self, command: &mut Command) -> Progress {
        match command {
            Command::Run(run) => run.go(&self.heap.borrow()),
            _ => self.execute_at_once(command).map_or(Progress::Fault, |()| Progress::Done),
        }
    }

    fn execute_at_once(&self, command: &Command) -> Option<()> {
        let mut heap = self.heap.borrow_mut();
        match *command {
            Command::Fill { address, bytes, value } => heap.write(address, &vec![value; bytes as usize]),
            Command::Copy { target, source, bytes } => {
                let bytes = heap.read(source, bytes)?;
                heap.write(target, &bytes)
            }
            Command::Run(_) => None,
            Command::Free { address, bytes } => {
                self.device_bytes.set(self.device_bytes.get() - bytes);
                self.controls.used.fetch_sub(bytes, Ordering::AcqRel);
                heap.free(address).then_some(())
            }
            Command::Record(ref state) => {
                state.done.set(true);
                state.at.set(self.clock.get());
                Some(())
            }
        }
    }
}

impl Drop for FakeQueue {
    fn drop(&mut self) {
        self.controls.used.fetch_sub(self.device_bytes.get(), Ordering::AcqRel);
        self.controls.registered.fetch_sub(self.registered_bytes.get(), Ordering::AcqRel);
    }
}

impl Queue for FakeQueue {
    type Kernel = FakeKernel;
    type Event = FakeEvent;
    type Graph = FakeGraph;

    #[allow(unsafe_code)]
    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Memory> {
        self.check(FakeCall::Allocate)?;
        let total = self.controls.memory.load(Ordering::Acquire);
        let used = self.controls.used.load(Ordering::Acquire);
        let out = Error::OutOfMemory { kind: kind.name(), bytes, free: total - used, total };
        if kind == MemoryKind::Registered {
            return Err(Error::Unsupported {
                what: "allocating registered memory".into(),
                device: "the simulated accelerator".into(),
            });
        }
        if kind == MemoryKind::Device && bytes > total - used {
            return Err(out);
        }
        let address = self.heap.borrow_mut().allocate(bytes).ok_or(out)?;
        if kind == MemoryKind::Device {
            self.device_bytes.set(self.device_bytes.get() + bytes);
            self.controls.used.fetch_add(bytes, Ordering::AcqRel);
        }
        let host = if kind.host_visible() { address } else { 0 };
        // SAFETY: the heap keeps the allocation until it is freed or the queue is dropped.
        Ok(unsafe { Memory::from_raw(kind, address, host, bytes) })
    }

    fn free(&self, memory: Memory) -> Result<()> {
        self.check(FakeCall::Free)?;
        if memory.kind() == MemoryKind::Device {
            self.push(Command::Free { address: memory.address(), bytes: memory.bytes() });
            return Ok(());
        }
        self.drained()?;
        self.heap.borrow_mut().free(memory.address());
        if memory.kind() == MemoryKind::Registered {
            self.registered_bytes.set(self.registered_bytes.get() - memory.bytes());
            self.controls.registered.fetch_sub(memory.bytes(), Ordering::AcqRel);
        }
        Ok(())
    }

    fn trim(&self, _keep: u64) -> Result<()> {
        self.run()
    }

    fn memory(&self) -> Result<MemoryInfo> {
        let total = self.controls.memory.load(Ordering::Acquire);
        let free = total - self.controls.used.load(Ordering::Acquire);
        Ok(MemoryInfo { free, total, reserved: self.heap.borrow().bytes() })
    }

    #[allow(unsafe_code)]
    unsafe fn register(&self, host: *mut u8, bytes: u64) -> Result<Memory> {
        if !self.heap.borrow_mut().register(host as u64, bytes) {
            return Err(Error::Host { what: "registering memory", cause: "it is registered already".into() });
        }
        self.registered_bytes.set(self.registered_bytes.get() + bytes);
        self.controls.registered.fetch_add(bytes, Ordering::AcqRel);
        // SAFETY: the caller keeps it mapped until it is freed or the queue is dropped.
        Ok(unsafe { Memory::from_raw(MemoryKind::Registered, host as u64, host as u64, bytes) })
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
        Ok(FakeEvent { point: Rc::default(), timed })
    }

    fn record(&self, event: &FakeEvent) -> Result<()> {
        self.check(FakeCall::Record)?;
        self.push(recorded(&event.point));
        Ok(())
    }

    fn done(&self, event: &FakeEvent) -> Result<bool> {
        self.check(FakeCall::Record)?;
        self.run()?;
        let state = event.point.borrow();
        Ok(state.done.get() || !state.recorded.get())
    }

    fn elapsed(&self, from: &FakeEvent, to: &FakeEvent) -> Result<Duration> {
        if !from.timed || !to.timed {
            return Err(Error::Unsupported {
                what: "the time of an event without a time stamp".into(),
                device: "the simulated accelerator".into(),
            });
        }
        let (from, to) = (from.point.borrow().at.get(), to.point.borrow().at.get());
        Ok(Duration::from_micros(to.saturating_sub(from)))
    }

    fn load(&self, artifact: &Artifact) -> Result<FakeKernel> {
        let bytes = artifact.parameter_bytes();
        let scripts = self.controls.scripts.lock().unwrap_or_else(PoisonError::into_inner);
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
            self.commands.borrow_mut().extend(commands.iter().cloned());
            return Ok(());
        };
        for (command, event) in commands.iter().zip(behind) {
            let event = event.as_deref().map(recorded);
            self.commands.borrow_mut().extend([command.clone()].into_iter().chain(event));
        }
        self.controls.chained.fetch_add(commands.len() as u64, Ordering::AcqRel);
        Ok(())
    }

    fn chain(&self, links: &[Link<'_, Self>]) -> Result<FakeGraph> {
        self.check(FakeCall::EndCapture)?;
        let run =
            |link: &Link<'_, Self>| self.run_of(link.kernel, link.grid, &link.arguments).map(Command::Run);
        let commands = RefCell::new(links.iter().map(run).collect::<Result<_>>()?);
        let behind = links.iter().map(|link| link.then.map(|event| Rc::clone(&event.point))).collect();
        Ok(FakeGraph { commands, behind: Some(behind) })
    }

    fn amend(
        &self,
        graph: &FakeGraph,
        place: usize,
        kernel: &FakeKernel,
        grid: Grid,
        arguments: &Arguments,
    ) -> Result<()> {
        let mut commands = graph.commands.borrow_mut();
        let Some(command) = commands.get_mut(place).filter(|_| graph.behind.is_some()) else {
            let (what, device) = ("amending it".into(), "the simulated accelerator".into());
            return Err(Error::Unsupported { what, device });
        };
        *command = Command::Run(self.run_of(kernel, grid, arguments)?);
        Ok(())
    }

    fn discard(&self, _graph: FakeGraph) -> Result<()> {
        Ok(())
    }
}
