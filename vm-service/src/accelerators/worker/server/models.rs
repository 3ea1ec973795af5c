//! Modules that are models: graphs of array operations, whose inferences read and write buffers.
//!
//! A model has one kernel, 0, of one block. Its arguments are views of its inputs' and then its outputs' arrays. They are copied to
//! where the library has its own, so what else happens to the guest's memory meanwhile is no matter of the library's.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use vm_accel::Accelerator;
use vm_graph::{Element, TensorType, ValidGraph, Value};
use vm_paravirt::{Argument, Launch, MAX_ARGUMENTS, Status, View};

use super::{Code, Failure, LoadedModule, Resource, Server, failure, missing};

/// What is said of a model where there is no NPU.
pub(super) const ON_KERNELS: &str =
    "it is a model, and this accelerator runs kernels; share an NPU with the guest (`device = \"npu:0\"`)";

/// What is said of kernels on an NPU.
const ON_MODELS: &str = "it is no model, and an NPU runs models alone: graphs in vm-graph's binary form; share a GPU or the \
                         processor with the guest (`device = \"cpu\"`) for kernels";

/// Makes models run.
pub(in super::super) trait Models: Send + Sync {
    /// The product's name.
    fn name(&self) -> &str;

    /// What models are compiled for.
    fn target(&self) -> &str;

    /// Held by who compiles or runs one: a library does one thing at a time, whoever asks, and what one program of the guest has is not of
    /// another's time.
    fn turn(&self) -> Arc<Mutex<()>>;

    /// Compiles a guest's model, in less than what ends the worker.
    ///
    /// # Errors
    /// Why it can't be, in words.
    fn compile(&self, graph: &ValidGraph) -> Result<Box<dyn Model>, Failure>;
}

/// A model that can run, with an array for each of its inputs and outputs.
pub(in super::super) trait Model {
    /// Bytes that it has beside its arrays.
    fn bytes(&self) -> u64;

    /// The inputs' arrays, to be written.
    ///
    /// # Errors
    /// When there is no memory for them.
    fn inputs(&mut self) -> Result<Vec<&mut [u8]>, Failure>;

    /// Runs it on the inputs' arrays, for `limit` at most.
    ///
    /// # Errors
    /// [`Status::Deadline`]; [`Status::Lost`] where what runs does not end, or nothing more can run.
    fn run(&mut self, limit: Duration) -> Result<(), Failure>;

    /// The outputs' arrays, after a run.
    fn outputs(&self) -> Vec<&[u8]>;
}

/// A model of the guest.
pub(super) struct LoadedModel {
    model: Box<dyn Model>,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
}

/// An input or an output.
struct Port {
    name: String,
    ty: TensorType,
}

impl Port {
    /// That a view is of such an array.
    fn check(&self, number: usize, argument: &Argument) -> Result<View, Failure> {
        let Self { name, ty } = self;
        let wrong = |what: &str| {
            let text = format!(
                "argument {number} is {name}, {ty}; {what}: give it a view of these extents, or of [{}]",
                ty.elements()
            );
            Err((Status::Arguments, text))
        };
        let Argument::View(view) = argument else { return wrong("it is a scalar") };
        if view.strides().is_some() {
            return wrong("it has strides, and a model's arrays lie without gaps");
        }
        if *view.extents() != *ty.extents && *view.extents() != [ty.elements()] {
            return wrong(&format!("its extents are {:?}", view.extents()));
        }
        Ok(*view)
    }
}

impl<A: Accelerator> Server<A> {
    /// Compiles a model.
    pub(super) fn create_model(
        &self,
        models: &Arc<dyn Models>,
        bytes: &[u8],
    ) -> Result<LoadedModule<A>, Failure> {
        let refused = |error: &dyn std::fmt::Display| (Status::Module, error.to_string());
        if !bytes.starts_with(&vm_graph::MAGIC) {
            return Err(refused(&ON_MODELS));
        }
        let graph = vm_graph::decode(bytes).map_err(|error| refused(&error))?;
        let graph = vm_graph::validate(graph).map_err(|error| refused(&error))?;
        let inputs: Vec<_> = graph
            .inputs
            .iter()
            .map(|input| Port { name: input.name.clone(), ty: input.ty.clone() })
            .collect();
        let outputs: Vec<_> = graph
            .outputs
            .iter()
            .map(|output| Port { name: output.name.clone(), ty: graph.type_of(output.value).clone() })
            .collect();
        let count = inputs.len() + outputs.len();
        if count > MAX_ARGUMENTS {
            let text = format!(
                "it has {count} inputs and outputs, and a launch has {MAX_ARGUMENTS} arguments at most"
            );
            return Err((Status::Module, text));
        }
        self.check_size(&graph)?;
        let arrays = inputs.iter().chain(&outputs).map(|port| port.ty.bytes());
        let held = arrays.fold(bytes.len() as u64, u64::saturating_add);
        let charge =
            self.charge(&[(Resource::Modules, 1), (Resource::Kernels, 1), (Resource::Held, held)])?;
        let model = models.compile(&graph)?;
        let code = self.charge(&[(Resource::Held, model.bytes())])?;
        let loaded = LoadedModel { model, inputs, outputs };
        Ok(LoadedModule { code: Code::Model(loaded), _charges: [charge, code] })
    }

    /// That no array within a graph is larger than all that the guest may hold.
    fn check_size(&self, graph: &ValidGraph) -> Result<(), Failure> {
        let most = self.quotas.memory;
        let results = graph
            .nodes
            .iter()
            .enumerate()
            .flat_map(|(number, node)| std::iter::repeat_n((number, node.op.name()), node.op.results()));
        for ((number, name), value) in results.zip(graph.inputs.len() as u32..) {
            let ty = graph.type_of(Value(value));
            if ty.bytes() > most {
                let text = format!(
                    "operation {number} ({name}) gives {ty}, and the guest may hold {most} bytes; make it smaller, or give the \
                     guest more memory of the accelerator"
                );
                return Err((Status::Quota, text));
            }
        }
        Ok(())
    }

    /// Runs a model, and waits for its end.
    pub(super) fn infer(&mut self, launch: &Launch<'_>) -> Result<(), Failure> {
        let Self { modules, buffers, worker, quotas, working, .. } = self;
        let module = modules.get_mut(&launch.module).ok_or_else(|| missing("module", launch.module))?;
        let Code::Model(loaded) = &mut module.code else { return Err(missing("model", launch.module)) };
        if launch.kernel != 0 {
            return Err(missing("kernel", launch.kernel));
        }
        if launch.grid != [1; 3] || launch.fuel != 0 {
            let text = "a model has one block and no fuel: give it a grid of 1×1×1 and the fuel 0".into();
            return Err((Status::Arguments, text));
        }
        let LoadedModel { model, inputs, outputs } = loaded;
        let count = inputs.len() + outputs.len();
        let given = launch.arguments.count();
        if given != count {
            let (inputs, outputs) = (inputs.len(), outputs.len());
            let text = format!(
                "the model has {inputs} inputs and {outputs} outputs, and is given {given} arguments"
            );
            return Err((Status::Arguments, text));
        }
        let mut views = Vec::with_capacity(count);
        // Decoding saw that none of them is malformed.
        for (number, (port, argument)) in
            inputs.iter().chain(&*outputs).zip(launch.arguments.flatten()).enumerate()
        {
            let view = port.check(number, &argument)?;
            let held = buffers.get(&view.buffer).ok_or_else(|| missing("buffer", view.buffer))?;
            views.push(held.view(view.offset, port.ty.bytes())?);
        }
        let (read, written) = views.split_at(inputs.len());
        let arrays = model.inputs()?;
        for (number, ((view, port), array)) in read.iter().zip(&*inputs).zip(arrays).enumerate() {
            worker.read(*view, &mut *array).map_err(failure)?;
            if port.ty.element == Element::Bool && array.iter().any(|byte| *byte > 1) {
                let text = format!(
                    "argument {number} is {}, of truth values; a byte of it is neither 0 nor 1",
                    port.name
                );
                return Err((Status::Arguments, text));
            }
        }
        // Whatever it has taken is of the guest's time.
        *working = true;
        model.run(quotas.limits.time)?;
        for (view, array) in written.iter().zip(model.outputs()) {
            worker.write(*view, array).map_err(failure)?;
        }
        Ok(())
    }
}
