//! Does what batches ask: the guest's modules and buffers, its quotas, and its operations, handed to the accelerator in
//! their order.

pub(super) mod models;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use vm_accel::{Accelerator, Artifact, Buffer, Job, Kernel, Launch, Limits, ParameterKind, Scalar, Worker};
use vm_ir::{Trust, ValidModule};
use vm_paravirt::{
    Argument, Batch, Info, MAX_REPLY_BYTES, Malformed, Operation, Ranges, ReplyWriter, Span, Status, View,
    reply_bytes,
};

use self::models::{LoadedModel, Models};
use super::cost;
use super::log::Log;
use super::ram::Ram;
use super::status;
use super::usage::{Amount, Charge, Resource, Usage};
use super::watch::Watch;
use crate::accelerators::sys::Registered;

/// The most modules that a guest may have.
const MODULES: u64 = 256;
/// The most kernels of all its modules.
const KERNELS: u64 = 4096;
/// The most bytes of code of all its modules.
const CODE: u64 = 256 << 20;
/// The most buffers that it may have.
const BUFFERS: u64 = 4096;
/// The most ranges of its memory under all its buffers: each is a mapping of this process.
const RANGES: u64 = 16384;
/// Launches between two fences of our own: at most these stand between a fence and its answer. They are given to the
/// accelerator together.
const FENCED: u32 = 64;
/// What an operation may take beside a launch's deadline: to compile a module, to register memory.
pub(super) const GRACE: Duration = Duration::from_secs(30);

/// Makes code of modules.
pub(super) trait Compile: Send + Sync {
    /// What code is compiled for.
    fn target(&self) -> &str;

    /// Compiles a guest's module: an artifact for each kernel, in order.
    ///
    /// # Errors
    /// Why it can't be, in words.
    fn compile(&self, module: &ValidModule) -> Result<Vec<Artifact>, String>;
}

/// What a guest's modules are, and what makes them run.
#[derive(Clone)]
pub(super) enum Compiler {
    /// Kernels in the IR.
    Kernels(Arc<dyn Compile>),
    /// Graphs of array operations. Buffers are the host's memory then.
    #[cfg_attr(not(any(feature = "npu", test)), expect(dead_code, reason = "no accelerator runs them"))]
    Models(Arc<dyn Models>),
}

/// What a guest may use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Quotas {
    /// Bytes of the accelerator's memory.
    pub(super) memory: u64,
    /// What one launch may take, at most.
    pub(super) limits: Limits,
}

/// What a guest is answered.
#[derive(Debug, Default)]
pub(super) struct Answer {
    /// Why no operation was begun, if none was.
    refused: Option<Status>,
    results: Vec<(Status, Vec<u8>)>,
}

impl Answer {
    /// A batch none of which was begun.
    pub(super) fn refused(status: Status) -> Self {
        Self { refused: Some(status), results: Vec::new() }
    }

    /// Changes how an operation ended.
    pub(super) fn set_status(&mut self, operation: u32, status: Status) {
        if let Some(result) = self.results.get_mut(operation as usize) {
            result.0 = status;
        }
    }

    /// Writes the reply into at most `room` bytes. Nothing, if not even a header fits.
    pub(super) fn encode(&self, room: usize) -> Vec<u8> {
        let answers = self.results.iter().map(|(_, answer)| answer.len().next_multiple_of(8)).sum();
        let mut bytes = vec![0; reply_bytes(self.results.len(), answers).min(room)];
        let Ok(mut writer) = ReplyWriter::new(&mut bytes, self.refused.unwrap_or(Status::Ok)) else {
            return Vec::new();
        };
        for (status, answer) in &self.results {
            // That there is room was seen before the batch was begun.
            if writer.result(*status, answer).is_err() {
                break;
            }
        }
        let len = writer.finish();
        bytes.truncate(len);
        bytes
    }
}

/// A point that the accelerator is to reach.
#[derive(Debug)]
pub(super) struct Fence {
    /// The operation that asked for it; `None` for one of our own.
    pub(super) operation: Option<u32>,
    pub(super) job: Job<()>,
    /// Launches since the fence before it.
    pub(super) launches: u32,
}

/// A batch whose operations were handed over.
#[derive(Debug)]
pub(super) struct Executed {
    /// Its number.
    pub(super) batch: u64,
    pub(super) answer: Answer,
    pub(super) fences: Vec<Fence>,
    /// Why the guest can be served no further, if it can't.
    pub(super) lost: Option<String>,
}

impl Executed {
    /// Whether the answer must wait for the accelerator.
    pub(super) fn waits(&self) -> bool {
        self.fences.iter().any(|fence| fence.operation.is_some())
    }
}

/// Why an operation failed.
pub(super) type Failure = (Status, String);

/// What a guest may hold, all its programs together.
pub(super) fn most(quotas: &Quotas, ram: &Ram) -> Amount {
    Amount::of(&[
        (Resource::Modules, MODULES),
        (Resource::Kernels, KERNELS),
        (Resource::Code, CODE),
        (Resource::Buffers, BUFFERS),
        (Resource::Ranges, RANGES),
        (Resource::Held, quotas.memory),
        (Resource::Imported, ram.bytes()),
    ])
}

/// The modules and buffers that came over one link.
pub(super) struct Server<A: Accelerator> {
    worker: Worker<A>,
    compiler: Compiler,
    ram: Arc<Ram>,
    quotas: Quotas,
    log: Arc<Mutex<Log>>,
    watch: Watch,
    usage: Usage,
    modules: HashMap<u32, LoadedModule<A>>,
    buffers: HashMap<u32, Held<A>>,
    batches: u64,
    /// Launches since the last fence.
    unfenced: u32,
    /// Whether anything was handed over since the last fence.
    working: bool,
}

/// A module of the guest.
struct LoadedModule<A: Accelerator> {
    code: Code<A>,
    _charges: [Charge; 2],
}

enum Code<A: Accelerator> {
    Kernels(Vec<Loaded<A>>),
    Model(LoadedModel),
}

struct Loaded<A: Accelerator> {
    kernel: Kernel<A>,
    artifact: Artifact,
}

/// A buffer of the guest.
struct Held<A: Accelerator> {
    memory: Memory<A>,
    /// Where in the memory it begins.
    start: u64,
    bytes: u64,
    /// Given back after the memory was.
    _charge: Charge,
}

enum Memory<A: Accelerator> {
    Device(Buffer<A>),
    Guest(Registered<A>),
}

impl<A: Accelerator> Held<A> {
    fn buffer(&self) -> Option<&Buffer<A>> {
        match &self.memory {
            Memory::Device(buffer) => Some(buffer),
            Memory::Guest(registered) => registered.buffer(),
        }
    }

    /// A part of it, all of which must be there.
    fn view(&self, offset: u64, bytes: u64) -> Result<vm_accel::View<'_, A>, Failure> {
        let inside = offset <= self.bytes && bytes <= self.bytes - offset;
        match self.buffer().filter(|_| inside) {
            Some(buffer) => buffer.view(self.start + offset, bytes).map_err(failure),
            None => {
                let text =
                    format!("{bytes} bytes at {offset} do not lie in a buffer of {} bytes", self.bytes);
                Err((Status::Range, text))
            }
        }
    }
}

fn failure(error: vm_accel::Error) -> Failure {
    (status::of(&error), error.to_string())
}

fn missing(what: &str, number: u32) -> Failure {
    (Status::NoSuch, format!("there is no {what} {number}"))
}

impl<A: Accelerator> Server<A> {
    /// A guest that has nothing.
    pub(super) fn new(
        worker: Worker<A>,
        compiler: Compiler,
        ram: Arc<Ram>,
        quotas: Quotas,
        usage: Usage,
        log: Arc<Mutex<Log>>,
        watch: Watch,
    ) -> Self {
        Self {
            worker,
            compiler,
            ram,
            quotas,
            log,
            watch,
            usage,
            modules: HashMap::new(),
            buffers: HashMap::new(),
            batches: 0,
            unfenced: 0,
            working: false,
        }
    }

    /// Does what a batch asks, for an answer of at most `room` bytes. The bytes are this process's own, so that nobody
    /// changes them meanwhile.
    pub(super) fn execute(&mut self, bytes: &[u8], room: usize) -> Executed {
        let batch = self.batches;
        self.batches += 1;
        let mut executed = Executed { batch, answer: Answer::default(), fences: Vec::new(), lost: None };
        let decoded = match Batch::decode(bytes) {
            Ok(decoded) => decoded,
            Err(error) => {
                let Malformed { what, .. } = error;
                let status = if what == Batch::OTHER_VERSION { Status::Version } else { Status::Malformed };
                self.note(batch, 0, status, error.to_string());
                executed.answer = Answer::refused(status);
                return executed;
            }
        };
        let queries = decoded.operations().flatten().filter(|one| matches!(one, Operation::Query)).count();
        let needed = reply_bytes(decoded.len(), queries * Info::MAX_BYTES);
        let Some(mut spare) = room.min(MAX_REPLY_BYTES).checked_sub(needed) else {
            self.note(
                batch,
                0,
                Status::ReplyRoom,
                format!("the reply needs {needed} bytes, {room} were given"),
            );
            executed.answer = Answer::refused(Status::ReplyRoom);
            return executed;
        };
        let results = &mut executed.answer.results;
        results.reserve(decoded.len());
        // Decoding saw that none of them is malformed.
        let mut operations = (0..).zip(decoded.operations().flatten()).peekable();
        while let Some((index, operation)) = operations.next() {
            let turn = self.turn(&operation);
            let turn = turn.as_ref().map(|turn| turn.lock().unwrap_or_else(PoisonError::into_inner));
            let limit = match operation {
                Operation::CreateModuleFrom { .. } => self.backlog().saturating_add(self.quotas.limits.time),
                _ => self.quotas.limits.time,
            };
            let under_way = self.watch.begin("an operation", limit.saturating_add(GRACE));
            let (done, result) = match operation {
                Operation::Launch(first) if let Compiler::Models(_) = self.compiler => {
                    let ran = self.infer(&first);
                    (u32::from(ran.is_ok()), ran)
                }
                Operation::Launch(first) => {
                    let more = std::iter::from_fn(|| match operations.peek() {
                        Some((_, Operation::Launch(launch))) => {
                            let launch = *launch;
                            operations.next();
                            Some(launch)
                        }
                        _ => None,
                    });
                    self.launches(std::iter::once(first).chain(more), &mut executed.fences)
                }
                other => match self.operation(&other, index, spare, &mut executed.fences) {
                    Ok(answer) => {
                        if let Operation::Log = other {
                            spare -= answer.len().next_multiple_of(8);
                        }
                        results.push((Status::Ok, answer));
                        (0, Ok(()))
                    }
                    Err(failure) => (0, Err(failure)),
                },
            };
            drop((under_way, turn));
            results.extend(std::iter::repeat_n((Status::Ok, Vec::new()), done as usize));
            if let Err((status, text)) = result {
                if let (Status::Lost, Compiler::Models(_)) = (status, &self.compiler) {
                    executed.lost = Some(text.clone());
                }
                self.note(batch, index + done, status, text);
                results.push((status, Vec::new()));
                results.resize(decoded.len(), (Status::Skipped, Vec::new()));
                break;
            }
        }
        if self.working {
            match self.fence(None) {
                Ok(fence) => executed.fences.push(fence),
                Err((status, text)) => self.note(batch, 0, status, text),
            }
        }
        executed
    }

    /// What is held while an operation compiles or runs a model.
    fn turn(&self, operation: &Operation<'_>) -> Option<Arc<Mutex<()>>> {
        use Operation::{CreateModule, CreateModuleFrom, Launch};
        match (&self.compiler, operation) {
            (Compiler::Models(models), CreateModule { .. } | CreateModuleFrom { .. } | Launch(_)) => {
                Some(models.turn())
            }
            _ => None,
        }
    }

    fn note(&self, batch: u64, operation: u32, status: Status, text: String) {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).add(batch, operation, status, text);
    }

    fn fence(&mut self, operation: Option<u32>) -> Result<Fence, Failure> {
        let job = self.worker.fence().map_err(failure)?;
        self.working = false;
        Ok(Fence { operation, job, launches: std::mem::take(&mut self.unfenced) })
    }

    fn operation(
        &mut self,
        operation: &Operation<'_>,
        index: u32,
        spare: usize,
        fences: &mut Vec<Fence>,
    ) -> Result<Vec<u8>, Failure> {
        match operation {
            Operation::Query => return self.query(),
            Operation::Log => {
                return Ok(self.log.lock().unwrap_or_else(PoisonError::into_inner).take(spare & !7));
            }
            Operation::CreateModule { module, code } => self.create_module(*module, code)?,
            Operation::CreateModuleFrom { module, source } => {
                self.new_module(*module)?;
                let code = self.code(source)?;
                self.create_module(*module, &code)?;
            }
            Operation::DestroyModule { module } => {
                self.modules.remove(module).ok_or_else(|| missing("module", *module))?;
            }
            Operation::CreateBuffer { buffer, bytes } => self.create_buffer(*buffer, *bytes)?,
            Operation::ImportBuffer { buffer, ranges } => self.import_buffer(*buffer, *ranges)?,
            Operation::DestroyBuffer { buffer } => self.destroy_buffer(*buffer)?,
            Operation::Copy { target, source } => {
                self.worker.copy(self.span(target)?, self.span(source)?).map_err(failure)?;
                self.working = true;
            }
            Operation::Fill { target, value } => {
                self.worker.fill(self.span(target)?, *value).map_err(failure)?;
                self.working = true;
            }
            Operation::Launch(launch) => self.launches(std::iter::once(*launch), fences).1?,
            Operation::Fence => fences.push(self.fence(Some(index))?),
        }
        Ok(Vec::new())
    }

    fn query(&self) -> Result<Vec<u8>, Failure> {
        let device = self.worker.accelerator().info();
        let info = Info {
            name: &device.name,
            target: "",
            memory_bytes: self.quotas.memory,
            memory_free: self.quotas.memory - self.usage.now(Resource::Held),
            deadline_us: u64::try_from(self.quotas.limits.time.as_micros()).unwrap_or(u64::MAX),
            fuel: self.quotas.limits.fuel,
            units: device.compute_units,
            lanes: device.warp_size,
            block_threads: device.block_threads,
            shared_bytes: device.shared_bytes,
            grid: device.grid,
            modules: MODULES as u32,
            buffers: BUFFERS as u32,
        };
        let info = match &self.compiler {
            Compiler::Kernels(compiler) => Info { target: compiler.target(), ..info },
            // Who launches a model sees one thread of one block.
            Compiler::Models(models) => Info {
                name: models.name(),
                target: models.target(),
                units: 1,
                lanes: 1,
                block_threads: 1,
                shared_bytes: 0,
                grid: [1; 3],
                ..info
            },
        };
        let mut bytes = vec![0; Info::MAX_BYTES];
        let len = info.encode(&mut bytes).map_err(|error| (Status::Device, error.to_string()))?;
        bytes.truncate(len);
        Ok(bytes)
    }

    fn new_module(&self, number: u32) -> Result<(), Failure> {
        if self.modules.contains_key(&number) {
            return Err((Status::NumberTaken, format!("there is a module {number} already")));
        }
        Ok(())
    }

    /// What the launches may take that nobody has waited for.
    fn backlog(&self) -> Duration {
        self.quotas.limits.time.saturating_mul(FENCED)
    }

    /// A module's code that lies in a buffer: this process's own copy, once the launches before have made it what it is.
    fn code(&self, source: &Span) -> Result<Vec<u8>, Failure> {
        let view = self.span(source)?;
        let most = match self.compiler {
            Compiler::Kernels(_) => vm_ir::limits::MAX_MODULE_BYTES as u64,
            Compiler::Models(_) => self.quotas.memory.min(vm_graph::limits::MAX_BYTES as u64),
        };
        if source.bytes > most {
            let text = format!("{} bytes of code: a module of this guest has {most} at most", source.bytes);
            return Err((Status::Quota, text));
        }
        self.worker.synchronize(self.backlog()).map_err(failure)?;
        let mut code = vec![0; source.bytes as usize];
        self.worker.read(view, &mut code).map_err(failure)?;
        Ok(code)
    }

    fn create_module(&mut self, number: u32, ir: &[u8]) -> Result<(), Failure> {
        self.new_module(number)?;
        let refused = |error: &dyn std::fmt::Display| (Status::Module, format!("module {number}: {error}"));
        let compiler = match &self.compiler {
            Compiler::Models(models) => {
                let module = self
                    .create_model(models, ir)
                    .map_err(|(status, text)| (status, format!("module {number}: {text}")))?;
                self.modules.insert(number, module);
                return Ok(());
            }
            Compiler::Kernels(_) if ir.starts_with(&vm_graph::MAGIC) => {
                return Err(refused(&models::ON_KERNELS));
            }
            Compiler::Kernels(compiler) => compiler,
        };
        let module = vm_ir::binary::decode(ir).map_err(|error| refused(&error))?;
        let valid = vm_ir::validate(module, Trust::Guest).map_err(|errors| refused(&errors))?;
        if let Some((kernel, surface)) =
            valid.kernels().iter().find_map(|kernel| Some((kernel, kernel.surfaces().next()?)))
        {
            let (kernel, surface) = (kernel.name(), &surface.name);
            let what = format!("kernel @{kernel} takes the surface @{surface}; guests are given no images");
            return Err(refused(&what));
        }
        let count = valid.kernels().len() as u64;
        let charge = self.charge(&[(Resource::Modules, 1), (Resource::Kernels, count)])?;
        let artifacts = compiler.compile(&valid).map_err(|error| refused(&error))?;
        let code = artifacts.iter().map(|artifact| artifact.image().len() as u64).sum();
        let code = self.charge(&[(Resource::Code, code)])?;
        let mut kernels = Vec::with_capacity(artifacts.len());
        for artifact in artifacts {
            let kernel = self.worker.load(&artifact).map_err(failure)?;
            kernels.push(Loaded { kernel, artifact });
        }
        let loaded = LoadedModule { code: Code::Kernels(kernels), _charges: [charge, code] };
        self.modules.insert(number, loaded);
        Ok(())
    }

    /// Takes of the guest's quotas.
    fn charge(&self, parts: &[(Resource, u64)]) -> Result<Charge, Failure> {
        self.usage.charge(Amount::of(parts)).map_err(|resource| {
            let text = match resource {
                Resource::Modules => format!("a guest has at most {MODULES} modules"),
                Resource::Kernels => format!("a guest has at most {KERNELS} kernels"),
                Resource::Code => format!("a guest's modules have at most {CODE} bytes of code"),
                Resource::Buffers => format!("a guest has at most {BUFFERS} buffers"),
                Resource::Ranges => format!("a guest's buffers have at most {RANGES} ranges"),
                Resource::Held => {
                    let (held, quota) = (self.usage.now(Resource::Held), self.quotas.memory);
                    format!("it is more than the guest's {quota} bytes leave: it holds {held}")
                }
                Resource::Imported => {
                    let ram = self.ram.bytes();
                    format!("no more than the guest's {ram} bytes of memory can be in buffers at a time")
                }
            };
            (Status::Quota, text)
        })
    }

    fn new_buffer(&self, number: u32) -> Result<(), Failure> {
        if self.buffers.contains_key(&number) {
            return Err((Status::NumberTaken, format!("there is a buffer {number} already")));
        }
        Ok(())
    }

    fn create_buffer(&mut self, number: u32, bytes: u64) -> Result<(), Failure> {
        self.new_buffer(number)?;
        if bytes == 0 {
            return Err((Status::Range, "a buffer has at least one byte".into()));
        }
        let charge = self.charge(&[(Resource::Buffers, 1), (Resource::Held, bytes)])?;
        // It is given to nobody before it is zero: the fill stands before whatever comes later.
        let buffer = self.worker.allocate_zeroed(bytes).map_err(failure)?;
        self.working = true;
        let memory = Memory::Device(buffer);
        self.buffers.insert(number, Held { memory, start: 0, bytes, _charge: charge });
        Ok(())
    }

    fn import_buffer(&mut self, number: u32, ranges: Ranges<'_>) -> Result<(), Failure> {
        self.new_buffer(number)?;
        let bytes = ranges.iter().fold(0u64, |sum, range| sum.saturating_add(range.bytes));
        let charge = self.charge(&[
            (Resource::Buffers, 1),
            (Resource::Ranges, ranges.len() as u64),
            (Resource::Imported, bytes),
        ])?;
        let (window, start) = self.ram.window(ranges.iter())?;
        let memory = Memory::Guest(Registered::new(window, &self.worker).map_err(failure)?);
        self.buffers.insert(number, Held { memory, start, bytes, _charge: charge });
        Ok(())
    }

    fn destroy_buffer(&mut self, number: u32) -> Result<(), Failure> {
        // The accelerator's pool, which counts it until another buffer needs the room, may keep it.
        self.buffers.remove(&number).map(drop).ok_or_else(|| missing("buffer", number))
    }

    fn held(&self, number: u32) -> Result<&Held<A>, Failure> {
        self.buffers.get(&number).ok_or_else(|| missing("buffer", number))
    }

    fn span(&self, span: &Span) -> Result<vm_accel::View<'_, A>, Failure> {
        self.held(span.buffer)?.view(span.offset, span.bytes)
    }

    /// Hands over launches that follow each other, as many as one fence may stand behind; the rest is left. How many
    /// were handed over, and why the next was not.
    fn launches<'b>(
        &mut self,
        launches: impl Iterator<Item = vm_paravirt::Launch<'b>>,
        fences: &mut Vec<Fence>,
    ) -> (u32, Result<(), Failure>) {
        let (mut batch, mut arguments) = (self.worker.batch(), Vec::new());
        let mut packed = Ok(());
        for launch in launches.take(FENCED.saturating_sub(self.unfenced).max(1) as usize) {
            packed = self.pack(&mut batch, &mut arguments, &launch);
            if packed.is_err() {
                break;
            }
        }
        let count = batch.len() as u32;
        if count == 0 {
            return (0, packed);
        }
        if let Err(error) = self.worker.launch_batch(batch) {
            return (0, Err(failure(error)));
        }
        self.unfenced += count;
        self.working = true;
        if self.unfenced >= FENCED {
            match self.fence(None) {
                Ok(fence) => fences.push(fence),
                // Said of the last of them.
                Err(failure) if packed.is_ok() => return (count - 1, Err(failure)),
                Err(_) => {}
            }
        }
        (count, packed)
    }

    fn pack<'s>(
        &'s self,
        batch: &mut vm_accel::Batch<'s, A>,
        arguments: &mut Vec<vm_accel::Argument<'s, A>>,
        launch: &vm_paravirt::Launch<'_>,
    ) -> Result<(), Failure> {
        let module = self.modules.get(&launch.module).ok_or_else(|| missing("module", launch.module))?;
        let Code::Kernels(kernels) = &module.code else {
            return Err(missing("kernel", launch.kernel));
        };
        let loaded = kernels.get(launch.kernel as usize).ok_or_else(|| missing("kernel", launch.kernel))?;
        let parameters = &loaded.artifact.signature().parameters;
        arguments.clear();
        let mut over_bus = false;
        // Decoding saw that none of them is malformed.
        for (index, argument) in launch.arguments.flatten().enumerate() {
            arguments.push(match argument {
                Argument::View(view) => {
                    over_bus |= matches!(self.held(view.buffer)?.memory, Memory::Guest(_));
                    self.shaped(&view)?
                }
                Argument::Scalar(bits) => {
                    let bytes = match parameters.get(index).map(|parameter| &parameter.kind) {
                        Some(ParameterKind::Scalar { bytes, .. }) => *bytes,
                        _ => 8,
                    };
                    if bytes < 8 && bits >> (8 * bytes) != 0 {
                        let text = format!("argument {index}: {bits:#x} has more than {bytes} bytes");
                        return Err((Status::Arguments, text));
                    }
                    vm_accel::Argument::Scalar(Scalar::from_bits(bits, bytes))
                }
            });
        }
        let most = self.quotas.limits;
        let over_bus = over_bus && !self.worker.accelerator().info().unified;
        cost::check(loaded.artifact.signature(), launch.grid, over_bus, most.time)?;
        let fuel = if launch.fuel == 0 { most.fuel } else { launch.fuel.min(most.fuel) };
        let how = Launch::over(launch.grid).within(Limits { fuel, ..most });
        batch.launch(&loaded.kernel, how, arguments).map_err(failure)
    }

    fn shaped(&self, view: &View) -> Result<vm_accel::Argument<'_, A>, Failure> {
        let held = self.held(view.buffer)?;
        let rest = held.bytes.checked_sub(view.offset).unwrap_or(u64::MAX);
        let memory = held.view(view.offset, rest)?;
        let shaped = match view.strides() {
            Some(strides) => memory.strided(view.extents(), strides),
            None => memory.shaped(view.extents()),
        };
        Ok(shaped.map_err(failure)?.into())
    }
}
