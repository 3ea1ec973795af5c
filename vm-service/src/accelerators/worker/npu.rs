//! An NPU that a worker opens: ONNX Runtime, with the execution provider of the NPU's maker, is loaded into this process.
//!
//! A compiled model is code, which a provider trusts. So a guest's models are compiled here each time, in the guest's own process: no
//! worker reads what another compiled, and none is left behind.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use super::backend::Opened;

/// The folder of the libraries, as it was opened.
pub(super) struct Folder {
    /// Where it is found, whoever this process becomes and whatever lies above it.
    pub(super) path: PathBuf,
    _file: OwnedFd,
}

#[cfg(not(feature = "npu"))]
pub(super) fn folder() -> Result<Option<Folder>, String> {
    Ok(None)
}

#[cfg(not(feature = "npu"))]
pub(super) fn open(
    _number: &str,
    _folder: Option<&Folder>,
    _memory: u64,
    _deadline: Duration,
) -> Result<Opened, String> {
    Err("this vm-service was built without NPUs; build it with `--features npu`".into())
}

#[cfg(feature = "npu")]
pub(super) use onnx::{folder, open};

#[cfg(feature = "npu")]
mod onnx {
    use std::num::NonZero;
    use std::os::fd::AsRawFd as _;
    use std::sync::{Arc, Mutex};

    use rustix::fs::{Mode, OFlags};
    use vm_accel::Worker;
    use vm_graph::{Builder, Element, GraphError, ValidGraph};
    use vm_paravirt::Status;
    use vm_passthrough::accelerator::CpuAccelerator;
    use vm_passthrough::accelerator::npu::{
        ContextOptions, FOLDER_VARIABLE, Inference, Libraries, NpuAccelerator, NpuContext, NpuError,
        NpuExecutable, Roots, Runtime,
    };

    use super::*;
    use crate::accelerators::worker::backend;
    use crate::accelerators::worker::link::AnyLink;
    use crate::accelerators::worker::server::models::{Model, Models};
    use crate::accelerators::worker::server::{Compiler, Failure, GRACE};
    use crate::accelerators::worker::session;

    /// What a model may take to be compiled beside a launch's deadline: it is refused before the worker is ended, which is 10 s after that for
    /// a library that does not end.
    const COMPILE: Duration = Duration::from_secs(15);

    /// The folder that the operator, or the VMM's keeper, named; it is opened before this process becomes somebody who may not
    /// reach it.
    ///
    /// # Errors
    /// When it can't be opened.
    pub(in super::super) fn folder() -> Result<Option<Folder>, String> {
        let Some(named) = std::env::var_os(FOLDER_VARIABLE) else { return Ok(None) };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let file = rustix::fs::open(&named, flags, Mode::empty())
            .map_err(|error| format!("the folder {} can't be opened: {error}", named.display()))?;
        Ok(Some(Folder { path: format!("/proc/self/fd/{}", file.as_raw_fd()).into(), _file: file }))
    }

    /// Opens the NPU with a number.
    ///
    /// # Errors
    /// Why it can't be, and what to do.
    pub(in super::super) fn open(
        number: &str,
        folder: Option<&Folder>,
        memory: u64,
        deadline: Duration,
    ) -> Result<Opened, String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let npu = accelerator(number, folder).map_err(|error| text(&error))?;
        // Buffers are memory of the host, which one thread copies.
        let host = CpuAccelerator::with_threads(NonZero::<usize>::MIN).map_err(|error| text(&error))?;
        let worker: Worker<CpuAccelerator> =
            Worker::start(Arc::new(host), backend::options(memory, deadline))
                .map_err(|error| text(&error))?;
        let name = npu.device().to_string();
        let target = format!("onnx:{}", npu.provider());
        let options =
            ContextOptions { compile_limit: deadline.saturating_add(COMPILE), ..ContextOptions::default() };
        let context = Arc::new(npu.context(&options).map_err(|error| text(&error))?);
        let npu = Npu { context, name: name.clone(), target: target.clone(), turn: Arc::default() };
        warm_up(&npu, &worker, deadline).map_err(|error| format!("its first model failed: {error}"))?;
        let compiler = Compiler::Models(Arc::new(npu));
        let serve = move |link, guest: &session::Guest| match link {
            AnyLink::Queue(ring) => session::serve(&worker, compiler.clone(), ring, guest),
            AnyLink::Stream(stream) => session::serve(&worker, compiler.clone(), stream, guest),
        };
        Ok(Opened { name, target, serve: Arc::new(serve) })
    }

    fn accelerator(number: &str, folder: Option<&Folder>) -> Result<NpuAccelerator, NpuError> {
        let libraries = match folder {
            Some(folder) => Libraries::below(&folder.path).ok_or_else(|| NpuError::NoRuntime {
                what: "there is no libonnxruntime.so below its folder".into(),
            })?,
            None => Libraries::find()?,
        };
        let runtime = Runtime::load(&libraries)?;
        let devices = runtime.devices(&Roots::system())?;
        let found = number.parse().ok().and_then(|number: usize| devices.get(number));
        let wanted = || NpuError::NoDevice { wanted: number.to_owned() };
        NpuAccelerator::open(&runtime, found.ok_or_else(wanted)?)
    }

    /// Compiles and runs a small model, so that whatever is loaded at the first use is loaded.
    fn warm_up(npu: &Npu, worker: &Worker<CpuAccelerator>, deadline: Duration) -> Result<(), String> {
        const ELEMENTS: u64 = 64;
        let model = || -> Result<ValidGraph, GraphError> {
            let mut graph = Builder::new("warm_up");
            let x = graph.input("x", Element::F32, &[1, ELEMENTS])?;
            let y = graph.add(x, x)?;
            graph.output("y", y)?;
            graph.finish()
        };
        let failed = |(_, text): Failure| text;
        let graph = model().map_err(|error| error.to_string())?;
        let limit = deadline.saturating_add(GRACE);
        let mut model = npu.compile(&graph).map_err(failed)?;
        for input in model.inputs().map_err(failed)? {
            input.copy_from_slice(&1f32.to_le_bytes().repeat(ELEMENTS as usize));
        }
        model.run(limit).map_err(failed)?;
        for output in model.outputs() {
            let (values, _) = output.as_chunks();
            // An NPU may compute in f16, or in less.
            let is_off = |value: &&[u8; 4]| (f32::from_le_bytes(**value) - 2.0).abs() > 0.1;
            if let Some(value) = values.iter().find(is_off) {
                return Err(format!("it computed {} instead of 2", f32::from_le_bytes(*value)));
            }
        }
        let buffer = worker.allocate_zeroed(ELEMENTS).map_err(|error| error.to_string())?;
        let mut bytes = [1u8; ELEMENTS as usize];
        worker.read(&buffer, &mut bytes).map_err(|error| error.to_string())?;
        worker.write(&buffer, &bytes).map_err(|error| error.to_string())?;
        worker.synchronize(limit).map_err(|error| error.to_string())
    }

    /// An NPU's context, which all programs of the guest use.
    struct Npu {
        context: Arc<NpuContext>,
        name: String,
        target: String,
        turn: Arc<Mutex<()>>,
    }

    impl Models for Npu {
        fn name(&self) -> &str {
            &self.name
        }

        fn target(&self) -> &str {
            &self.target
        }

        fn turn(&self) -> Arc<Mutex<()>> {
            self.turn.clone()
        }

        fn compile(&self, graph: &ValidGraph) -> Result<Box<dyn Model>, Failure> {
            let mut executable = self.context.compile(graph).map_err(|error| match error {
                NpuError::Lost { .. } => (Status::Lost, error.to_string()),
                error => (Status::Module, error.to_string()),
            })?;
            // The library has a copy of its own.
            let bytes = executable.take_blob().len() as u64;
            Ok(Box::new(Compiled { context: self.context.clone(), executable, bytes, arrays: None }))
        }
    }

    /// A model that an NPU runs.
    struct Compiled {
        context: Arc<NpuContext>,
        executable: NpuExecutable,
        bytes: u64,
        /// None before the first inference, and after one that failed.
        arrays: Option<Inference>,
    }

    impl Model for Compiled {
        fn bytes(&self) -> u64 {
            self.bytes
        }

        fn inputs(&mut self) -> Result<Vec<&mut [u8]>, Failure> {
            if self.arrays.is_none() {
                self.arrays = Some(self.context.buffers(&self.executable).map_err(failed)?);
            }
            let arrays = self.arrays.iter_mut().flat_map(|arrays| &mut arrays.inputs);
            Ok(arrays.map(|buffer| buffer.bytes_mut()).collect())
        }

        fn run(&mut self, limit: Duration) -> Result<(), Failure> {
            let arrays = self.arrays.take().map_or_else(|| self.context.buffers(&self.executable), Ok);
            let ran = arrays.and_then(|arrays| self.context.submit(&self.executable, arrays, limit)?.wait());
            self.arrays = Some(ran.map_err(failed)?);
            Ok(())
        }

        fn outputs(&self) -> Vec<&[u8]> {
            let arrays = self.arrays.iter().flat_map(|arrays| &arrays.outputs);
            arrays.map(|buffer| buffer.bytes()).collect()
        }
    }

    fn failed(error: NpuError) -> Failure {
        let status = match error {
            NpuError::Deadline { .. } => Status::Deadline,
            NpuError::Lost { .. } => Status::Lost,
            NpuError::Binding { .. } => Status::OutOfMemory,
            _ => Status::Device,
        };
        (status, error.to_string())
    }
}
