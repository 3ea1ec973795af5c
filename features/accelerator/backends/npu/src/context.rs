//! Contexts: models that are compiled for a device, and inferences that run one after the other.
//!
//! The calls into ONNX Runtime are made by a thread of the context's own, as any of them may take long. A second thread watches
//! the time: it cancels what is too long by ONNX Runtime's own means. Where that does not help, whoever waits is told that the
//! context is lost, and the thread is left behind: only the end of the process ends it then.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use vm_graph::{TensorType, ValidGraph, onnx};

use crate::executable::{Loaded, Port};
use crate::watch::{GRACE, Watch};
use crate::{Buffer, NpuAccelerator, NpuError, Performance, Priority};

/// How a context is used.
#[derive(Clone, Debug)]
pub struct ContextOptions {
    /// Which context's work goes first.
    pub priority: Priority,
    /// What the device spends on it.
    pub performance: Performance,
    /// How long a model may be compiled.
    pub compile_limit: Duration,
    /// Threads of the processor that may help, for what a provider does there.
    pub threads: usize,
    /// May operations that the provider does not take run on the processor? By default that is an error.
    pub fallback: bool,
}

impl Default for ContextOptions {
    fn default() -> Self {
        Self {
            priority: Priority::default(),
            performance: Performance::default(),
            compile_limit: Duration::from_secs(300),
            threads: 1,
            fallback: false,
        }
    }
}

/// What is done by the context's thread.
enum Command {
    Load {
        model: Model,
        reply: SyncSender<Result<Loading, NpuError>>,
    },
    Run {
        loaded: Arc<Loaded>,
        inference: Inference,
        limit: Duration,
        reply: SyncSender<Result<Inference, NpuError>>,
    },
    /// A model is dropped there, as that may take long, too; or nothing is, and all before it has ended.
    Drop(Option<Arc<Loaded>>, SyncSender<()>),
}

enum Model {
    /// An ONNX model, to be compiled.
    Source(Vec<u8>),
    /// What a provider made of one.
    Blob(Arc<[u8]>),
}

struct Loading {
    loaded: Arc<Loaded>,
    blob: Arc<[u8]>,
}

/// The arrays of an inference, in the order of the graph's inputs and outputs.
#[derive(Debug)]
pub struct Inference {
    /// What is read.
    pub inputs: Vec<Buffer>,
    /// What is written.
    pub outputs: Vec<Buffer>,
}

/// One user's use of a device. Dropping it, or a model of it, waits for what it was given, and for what its library frees, for 10 s
/// at most: a process that ends meanwhile would have the library freed under its own calls.
#[derive(Debug)]
pub struct NpuContext {
    device: String,
    commands: Sender<Command>,
    state: Arc<State>,
    options: ContextOptions,
}

#[derive(Debug, Default)]
struct State {
    watch: Arc<Watch>,
    lost: Mutex<Option<String>>,
    is_lost: AtomicBool,
}

impl State {
    fn lose(&self, what: &str) {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| what.to_owned());
        self.is_lost.store(true, Ordering::Release);
    }

    fn check(&self, device: &str) -> Result<(), NpuError> {
        if !self.is_lost.load(Ordering::Acquire) {
            return Ok(());
        }
        let lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        Err(NpuError::Lost { device: device.to_owned(), what: lost.clone().unwrap_or_default() })
    }
}

impl NpuContext {
    pub(crate) fn start(accelerator: &NpuAccelerator, options: &ContextOptions) -> Result<Self, NpuError> {
        let device = accelerator.device().to_string();
        let state = Arc::new(State::default());
        let (commands, received) = mpsc::channel();
        let no = |error: std::io::Error| NpuError::Lost { device: device.clone(), what: error.to_string() };
        Watch::start(&state.watch).map_err(no)?;
        let worker =
            Worker { accelerator: accelerator.clone(), options: options.clone(), state: state.clone() };
        thread::Builder::new().name("vm-npu".to_owned()).spawn(move || worker.run(&received)).map_err(no)?;
        Ok(Self { device, commands, state, options: options.clone() })
    }

    /// Compiles a graph for the device.
    ///
    /// # Errors
    /// [`NpuError::Refused`], [`NpuError::Fallback`], [`NpuError::Deadline`], [`NpuError::Lost`].
    pub fn compile(&self, graph: &ValidGraph) -> Result<NpuExecutable, NpuError> {
        self.load(graph, Model::Source(onnx::model(graph)))
    }

    /// Loads what [`NpuExecutable::blob`] of the same graph gave, for a context of the same
    /// [identity](NpuAccelerator::identity). A blob is code: it comes from where only this user writes.
    ///
    /// # Errors
    /// As [`compile`](Self::compile).
    pub fn load_blob(&self, graph: &ValidGraph, blob: Arc<[u8]>) -> Result<NpuExecutable, NpuError> {
        self.load(graph, Model::Blob(blob))
    }

    fn load(&self, graph: &ValidGraph, model: Model) -> Result<NpuExecutable, NpuError> {
        let (reply, loading) = mpsc::sync_channel(1);
        self.send(Command::Load { model, reply })?;
        let Loading { loaded, blob } = self.wait(&loading)??;
        let executable = NpuExecutable {
            commands: self.commands.clone(),
            state: self.state.clone(),
            inputs: graph.inputs.iter().map(|input| (input.name.clone(), input.ty.clone())).collect(),
            outputs: (0..graph.outputs.len())
                .map(|number| (graph.outputs[number].name.clone(), graph.output_type(number).clone()))
                .collect(),
            loaded: Some(loaded),
            blob,
        };
        executable.check_ports()?;
        Ok(executable)
    }

    /// An array of zeros that inferences can read and write.
    ///
    /// # Errors
    /// [`NpuError::Binding`] for one without elements, with too many, or that does not fit into memory.
    pub fn buffer(&self, ty: &TensorType) -> Result<Buffer, NpuError> {
        Buffer::new(ty)
    }

    /// Buffers for every input and output of a model.
    ///
    /// # Errors
    /// As [`buffer`](Self::buffer).
    pub fn buffers(&self, executable: &NpuExecutable) -> Result<Inference, NpuError> {
        let all = |ports: &[(String, TensorType)]| {
            ports.iter().map(|(_, ty)| self.buffer(ty)).collect::<Result<Vec<_>, _>>()
        };
        Ok(Inference { inputs: all(&executable.inputs)?, outputs: all(&executable.outputs)? })
    }

    /// Gives an inference to the device, behind those that it was given before. It may take as long as `limit` from when it begins.
    ///
    /// # Errors
    /// [`NpuError::Binding`] if the buffers are not what the model has, [`NpuError::Lost`].
    pub fn submit(
        &self,
        executable: &NpuExecutable,
        inference: Inference,
        limit: Duration,
    ) -> Result<Fence<'_>, NpuError> {
        executable.check(&inference)?;
        let loaded = executable.loaded.clone().ok_or_else(|| NpuError::Lost {
            device: self.device.clone(),
            what: "the model is gone".to_owned(),
        })?;
        let (reply, done) = mpsc::sync_channel(1);
        self.send(Command::Run { loaded, inference, limit, reply })?;
        Ok(Fence { context: self, done })
    }

    /// The options that it was opened with.
    pub fn options(&self) -> &ContextOptions {
        &self.options
    }

    fn send(&self, command: Command) -> Result<(), NpuError> {
        self.state.check(&self.device)?;
        let gone = |_| NpuError::Lost { device: self.device.clone(), what: "its thread ended".to_owned() };
        self.commands.send(command).map_err(gone)
    }

    /// Waits for all that was given so far, for a while.
    fn settle(commands: &Sender<Command>, state: &State, loaded: Option<Arc<Loaded>>) {
        let (reply, done) = mpsc::sync_channel(1);
        // Where the thread is gone, a model is dropped here.
        if commands.send(Command::Drop(loaded, reply)).is_ok() && !state.is_lost.load(Ordering::Acquire) {
            let _ = done.recv_timeout(GRACE);
        }
    }

    /// Waits for an answer, for as long as what is done keeps its time.
    fn wait<T>(&self, answer: &Receiver<T>) -> Result<T, NpuError> {
        const LOOK: Duration = Duration::from_millis(100);
        loop {
            match answer.recv_timeout(LOOK) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Disconnected) => self.state.lose("its thread ended"),
                Err(RecvTimeoutError::Timeout) if self.state.watch.is_overdue() => {
                    self.state.lose(&format!("a call did not end within {GRACE:?} of being cancelled"));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.state.check(&self.device)?;
        }
    }
}

/// An inference that was given to a device.
#[derive(Debug)]
pub struct Fence<'a> {
    context: &'a NpuContext,
    done: Receiver<Result<Inference, NpuError>>,
}

impl Fence<'_> {
    /// Waits for its end, and gives the buffers back.
    ///
    /// # Errors
    /// [`NpuError::Run`], [`NpuError::Deadline`], [`NpuError::Lost`].
    pub fn wait(self) -> Result<Inference, NpuError> {
        self.context.wait(&self.done)?
    }

    /// Has a call of the context not ended, long after it was cancelled? Then [`wait`](Self::wait) says that the context is lost.
    pub fn is_overdue(&self) -> bool {
        self.context.state.watch.is_overdue()
    }
}

/// A model that is compiled for a device.
#[derive(Debug)]
pub struct NpuExecutable {
    commands: Sender<Command>,
    state: Arc<State>,
    loaded: Option<Arc<Loaded>>,
    blob: Arc<[u8]>,
    inputs: Vec<(String, TensorType)>,
    outputs: Vec<(String, TensorType)>,
}

impl NpuExecutable {
    /// What the provider made of the model, which [`NpuContext::load_blob`] loads sooner than the model is compiled; empty if it
    /// makes none.
    pub fn blob(&self) -> &Arc<[u8]> {
        &self.blob
    }

    /// The same, which is freed with its last user: what was loaded does without it.
    pub fn take_blob(&mut self) -> Arc<[u8]> {
        std::mem::take(&mut self.blob)
    }

    /// Does the compiled model have the graph's inputs and outputs? A blob may be another's.
    fn check_ports(&self) -> Result<(), NpuError> {
        let Some(loaded) = &self.loaded else { return Ok(()) };
        let same = |own: &[(String, TensorType)], other: &[Port]| {
            own.len() == other.len() && own.iter().zip(other).all(|((name, ty), port)| port.is(name, ty))
        };
        if same(&self.inputs, &loaded.inputs) && same(&self.outputs, &loaded.outputs) {
            return Ok(());
        }
        let what = "its inputs and outputs are not the graph's".to_owned();
        Err(NpuError::Refused { provider: loaded.provider, what })
    }

    fn check(&self, inference: &Inference) -> Result<(), NpuError> {
        let all = |ports: &[(String, TensorType)], buffers: &[Buffer], what: &str| {
            if ports.len() != buffers.len() {
                return Err(NpuError::Binding {
                    name: what.to_owned(),
                    expected: format!("{} arrays", ports.len()),
                    given: buffers.len().to_string(),
                });
            }
            match ports.iter().zip(buffers).find(|((_, ty), buffer)| ty != buffer.ty()) {
                Some(((name, ty), buffer)) => Err(NpuError::Binding {
                    name: name.clone(),
                    expected: ty.to_string(),
                    given: buffer.ty().to_string(),
                }),
                None => Ok(()),
            }
        };
        all(&self.inputs, &inference.inputs, "what it reads")?;
        all(&self.outputs, &inference.outputs, "what it writes")
    }
}

impl Drop for NpuExecutable {
    fn drop(&mut self) {
        NpuContext::settle(&self.commands, &self.state, self.loaded.take());
    }
}

impl Drop for NpuContext {
    fn drop(&mut self) {
        Self::settle(&self.commands, &self.state, None);
    }
}

/// What the context's thread has.
struct Worker {
    accelerator: NpuAccelerator,
    options: ContextOptions,
    state: Arc<State>,
}

impl Worker {
    fn run(self, commands: &Receiver<Command>) {
        while let Ok(command) = commands.recv() {
            // The library's wrapper panics where ONNX Runtime answers what it can't.
            if catch_unwind(AssertUnwindSafe(|| self.answer(command))).is_err() {
                self.state.lose("a call into ONNX Runtime failed in a way that it can't");
                break;
            }
        }
        self.state.watch.end();
    }

    fn answer(&self, command: Command) {
        match command {
            Command::Load { model, reply } => {
                let _ = reply.send(self.load(model));
            }
            Command::Run { loaded, mut inference, limit, reply } => {
                let ran = loaded.run(&mut inference, limit, &self.state.watch);
                let _ = reply.send(ran.map(|()| inference));
            }
            Command::Drop(loaded, reply) => {
                self.state.watch.within(GRACE, None, || drop(loaded));
                let _ = reply.send(());
            }
        }
    }

    fn load(&self, model: Model) -> Result<Loading, NpuError> {
        let watch = &self.state.watch;
        match model {
            Model::Source(source) => {
                let (loaded, blob) = Loaded::compile(&self.accelerator, &self.options, source, watch)?;
                Ok(Loading { loaded: Arc::new(loaded), blob })
            }
            Model::Blob(blob) => {
                let loaded = Loaded::load(&self.accelerator, &self.options, &blob, watch)?;
                Ok(Loading { loaded: Arc::new(loaded), blob })
            }
        }
    }
}
