//! Models that ONNX Runtime has loaded, with a provider's compiled code in them.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ort::compiler::ModelCompiler;
use ort::memory::DeviceType as Hardware;
use ort::session::builder::SessionBuilder;
use ort::session::{RunOptions, Session};
use ort::value::{Outlet, Shape, TensorElementType, ValueType};
use vm_graph::TensorType;

use crate::buffer::element_type;
use crate::context::{ContextOptions, Inference};
use crate::error::line;
use crate::watch::{Cancel, Watch};
use crate::{NpuAccelerator, NpuError, Provider};

/// A model that is loaded.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) provider: Provider,
    pub(crate) inputs: Vec<Port>,
    pub(crate) outputs: Vec<Port>,
    session: Mutex<Session>,
}

/// An input or an output.
#[derive(Debug)]
pub(crate) struct Port {
    name: String,
    ty: Option<(TensorElementType, Shape)>,
}

impl Port {
    fn of(outlet: &Outlet) -> Port {
        let ty = match outlet.dtype() {
            ValueType::Tensor { ty, shape, .. } => Some((*ty, shape.clone())),
            _ => None,
        };
        Port { name: outlet.name().to_owned(), ty }
    }

    pub(crate) fn is(&self, name: &str, ty: &TensorType) -> bool {
        let extents = ty.extents.iter().map(|extent| *extent as i64);
        let is_type = |(element, shape): &(TensorElementType, Shape)| {
            *element == element_type(ty.element) && shape.iter().copied().eq(extents)
        };
        self.name == name && self.ty.as_ref().is_some_and(is_type)
    }
}

impl Loaded {
    /// Compiles a model; gives the compiled one beside, where the provider makes any.
    pub(crate) fn compile(
        accelerator: &NpuAccelerator,
        options: &ContextOptions,
        model: Vec<u8>,
        watch: &Watch,
    ) -> Result<(Loaded, Arc<[u8]>), NpuError> {
        let provider = accelerator.provider();
        if provider == Provider::Cpu {
            return Ok((Self::load(accelerator, options, &model, watch)?, Arc::default()));
        }
        let refused = |error: ort::Error| refused(provider, &error);
        let builder = builder(accelerator, options).map_err(refused)?;
        let compiler = ModelCompiler::new(builder.clone())
            .and_then(|compiler| compiler.with_model_from_memory(&model))
            .and_then(ModelCompiler::with_embed_ep_context)
            .map_err(refused)?;
        let cancel = Cancel::Load(builder.canceler());
        let compiled = watch.within(options.compile_limit, Some(cancel), || compiler.compile_to_buffer());
        let compiled =
            compiled.map_err(|error| too_long(watch, options).unwrap_or_else(|| refused(error)))?;
        let blob: Arc<[u8]> = compiled.as_slice().into();
        // Each is as large as the blob.
        drop(compiled);
        drop(compiler);
        drop(model);
        Ok((Self::load(accelerator, options, &blob, watch)?, blob))
    }

    /// Loads a model, compiled or not.
    pub(crate) fn load(
        accelerator: &NpuAccelerator,
        options: &ContextOptions,
        model: &[u8],
        watch: &Watch,
    ) -> Result<Loaded, NpuError> {
        let provider = accelerator.provider();
        let refused = |error: ort::Error| refused(provider, &error);
        let mut builder = builder(accelerator, options).map_err(refused)?;
        let cancel = Cancel::Load(builder.canceler());
        let session = watch.within(options.compile_limit, Some(cancel), || builder.commit_from_memory(model));
        let session = session.map_err(|error| too_long(watch, options).unwrap_or_else(|| refused(error)))?;
        let inputs = session.inputs().iter().map(Port::of).collect();
        let outputs = session.outputs().iter().map(Port::of).collect();
        Ok(Loaded { provider, inputs, outputs, session: Mutex::new(session) })
    }

    pub(crate) fn run(
        &self,
        inference: &mut Inference,
        limit: Duration,
        watch: &Watch,
    ) -> Result<(), NpuError> {
        let failed = |error: ort::Error| NpuError::Run { provider: self.provider, what: line(&error) };
        let mut session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
        let mut binding = session.create_binding().map_err(failed)?;
        for (port, buffer) in self.inputs.iter().zip(&inference.inputs) {
            binding.bind_input(&port.name, &buffer.tensor).map_err(failed)?;
        }
        for (port, buffer) in self.outputs.iter().zip(&mut inference.outputs) {
            binding.bind_output(&port.name, &mut buffer.tensor).map_err(failed)?;
        }
        let options = Arc::new(RunOptions::new().map_err(failed)?);
        let cancel = Cancel::Run(Arc::clone(&options));
        let ran = watch
            .within(limit, Some(cancel), || session.run_binding_with_options(&binding, &options).map(drop));
        match ran {
            // A provider that can't be stopped ends by itself, and late.
            _ if watch.was_cancelled() => Err(NpuError::Deadline { what: "the inference", limit }),
            ran => ran.map_err(failed),
        }
    }
}

fn too_long(watch: &Watch, options: &ContextOptions) -> Option<NpuError> {
    let limit = options.compile_limit;
    watch.was_cancelled().then_some(NpuError::Deadline { what: "compiling the model", limit })
}

/// What sessions of a context are made with.
fn builder(accelerator: &NpuAccelerator, options: &ContextOptions) -> ort::Result<SessionBuilder> {
    let (provider, environment) = (accelerator.provider(), &accelerator.runtime().environment);
    let mut builder = Session::builder(environment)?
        .with_no_environment_execution_providers()?
        .with_intra_threads(options.threads)?
        .with_inter_threads(1)?
        .with_intra_op_spinning(false)?
        // Without it, sums of products of bytes saturate on processors that have no VNNI.
        .with_precise_qmm()?;
    if !options.fallback && provider != Provider::Cpu {
        builder = builder.with_disable_cpu_fallback()?;
    }
    let settings = accelerator.settings(options);
    let is_plugin = accelerator.runtime().libraries().plugins.iter().any(|(other, _)| *other == provider);
    if !is_plugin && provider != Provider::Cpu {
        return Ok(builder.with_execution_providers([provider.dispatch(&settings)])?);
    }
    let name = provider.name();
    let prefixed: Vec<_> =
        settings.iter().map(|(key, value)| (format!("{name}.{key}"), (*value).to_owned())).collect();
    let is_processor = provider == Provider::Cpu || accelerator.device().emulated.is_some();
    let wanted = if is_processor { Hardware::CPU } else { Hardware::NPU };
    let devices = environment
        .devices()
        .filter(|device| device.ep().is_ok_and(|ep| ep == name) && device.hardware_device().ty() == wanted);
    // One device of a context: the first, as those of one kind are not told apart.
    Ok(builder.with_devices(devices.take(1), Some(&prefixed))?)
}

fn refused(provider: Provider, error: &ort::Error) -> NpuError {
    let what = line(error);
    if what.contains("disable_cpu_ep_fallback")
        || what.contains("fallback to CPU EP has been explicitly disabled")
    {
        return NpuError::Fallback { provider, what };
    }
    NpuError::Refused { provider, what }
}
