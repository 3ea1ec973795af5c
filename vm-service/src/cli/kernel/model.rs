//! What runs a model: the evaluator, ONNX Runtime on the processor, or an NPU.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_graph::ValidGraph;
use vm_ir::interp::Tensor;
use vm_passthrough::Host;

use super::args::DeviceArg;
use super::engine::{Ran, Spread};
use crate::failure::Failure;

/// A model with what it is given, and how long it may take.
#[derive(Clone, Debug)]
#[cfg_attr(not(feature = "npu"), expect(dead_code, reason = "no accelerator asks"))]
pub(crate) struct Task {
    /// The model.
    pub(crate) graph: Arc<ValidGraph>,
    /// Its inputs, in their order.
    pub(crate) inputs: Arc<Vec<Tensor>>,
    /// How long compiling may take, and each inference.
    pub(crate) deadline: Duration,
    /// Where compiled models are kept.
    pub(crate) cache: Option<PathBuf>,
    /// How often it is run again to be timed.
    pub(crate) repeat: Option<u32>,
}

/// Runs a model on a device; gives its outputs.
///
/// # Errors
/// When the device is not there, or can't take the model.
pub(crate) fn run(task: &Task, device: DeviceArg, host: &Host) -> Result<(Ran, Vec<Tensor>), Failure> {
    match device {
        DeviceArg::Interpreter => evaluate(task),
        _ => on_provider(task, device, host),
    }
}

/// Computes a model in f64.
///
/// # Errors
/// When a value is none that an input's type has.
pub(crate) fn evaluate(task: &Task) -> Result<(Ran, Vec<Tensor>), Failure> {
    let inputs = task.graph.inputs.iter().zip(&*task.inputs).map(|(input, tensor)| {
        let ty = input.ty.clone();
        vm_graph::Tensor { ty, bytes: tensor.bytes.clone() }.to_f64s()
    });
    let inputs: Vec<_> = inputs.collect();
    let (mut times, mut found) = (Vec::new(), Vec::new());
    for _ in 0..=task.repeat.unwrap_or(0) {
        let start = Instant::now();
        found = vm_graph::evaluate(&task.graph, &inputs).map_err(Failure::failed)?;
        times.push(start.elapsed());
    }
    let outputs = found.iter().enumerate().map(|(number, values)| {
        let ty = task.graph.output_type(number);
        tensor(ty, vm_graph::Tensor::from_f64s(ty.element, &ty.extents, values).bytes)
    });
    Ok((ran("interpreter".to_owned(), None, times), outputs.collect()))
}

fn tensor(ty: &vm_graph::TensorType, bytes: Vec<u8>) -> Tensor {
    Tensor { element: ty.element.scalar(), extents: ty.extents.clone(), bytes }
}

fn ran(device: String, compile: Option<Duration>, mut times: Vec<Duration>) -> Ran {
    let first = times.remove(0);
    let repeated = Spread::of(times);
    let run = repeated.map_or(first, |spread| spread.median);
    let target = compile.map(|_| "onnx".to_owned());
    Ran { arguments: Vec::new(), device, target, compile, run, repeated, out_of_bounds: None }
}

#[cfg(not(feature = "npu"))]
fn on_provider(_: &Task, _: DeviceArg, _: &Host) -> Result<(Ran, Vec<Tensor>), Failure> {
    Err(Failure::failed(
        "models run on NPUs and by ONNX Runtime with the cargo feature `npu`, which this vm-service was built without; build it \
         with --features npu, or use --device interpreter",
    ))
}

#[cfg(feature = "npu")]
fn on_provider(task: &Task, device: DeviceArg, host: &Host) -> Result<(Ran, Vec<Tensor>), Failure> {
    use vm_passthrough::accelerator::compile_graph;
    use vm_passthrough::accelerator::npu::{ContextOptions, NpuAccelerator, NpuError, Roots, Runtime};

    let failed = |error: NpuError| Failure::failed(error);
    let runtime = Runtime::system().map_err(failed)?;
    let roots = Roots { sys: host.sys.clone(), dev: host.dev.clone() };
    // Nobody claims a device whole while it is used.
    let mut _lease = None;
    let device = match device {
        DeviceArg::Npu(number) => {
            let devices = runtime.devices(&roots).map_err(failed)?;
            let found = devices.get(number).cloned();
            found.ok_or_else(|| failed(NpuError::NoDevice { wanted: number.to_string() }))?
        }
        DeviceArg::Pci(address) => {
            let devices = runtime.devices(&roots).map_err(failed)?;
            let wanted = address.to_string();
            let found = devices.into_iter().find(|device| device.address.as_ref() == Some(&wanted));
            found.ok_or_else(|| failed(NpuError::NoDevice { wanted }))?
        }
        DeviceArg::Rocm(number) => {
            return Err(Failure::usage(format_args!(
                "rocm:{number} is a GPU, which runs kernels: give a model --device npu:0 or cpu"
            )));
        }
        DeviceArg::Cpu | DeviceArg::Interpreter => runtime.processor(),
    };
    if let Some(address) = device.address.as_ref().and_then(|address| address.parse().ok()) {
        _lease = super::engine::lease(address, host)?;
    }
    let npu = NpuAccelerator::open(&runtime, &device).map_err(failed)?;
    let options = ContextOptions { compile_limit: task.deadline, ..ContextOptions::default() };
    let context = npu.context(&options).map_err(failed)?;
    let cache = super::cache::open(task.cache.as_deref(), super::cache::CODE_BYTES);
    let start = Instant::now();
    let model = compile_graph(&npu, &context, &task.graph, &cache).map_err(failed)?;
    let compile = start.elapsed();
    let mut arrays = context.buffers(&model).map_err(failed)?;
    for (buffer, tensor) in arrays.inputs.iter_mut().zip(&*task.inputs) {
        buffer.bytes_mut().copy_from_slice(&tensor.bytes);
    }
    let mut times = Vec::new();
    for _ in 0..=task.repeat.unwrap_or(0) {
        let start = Instant::now();
        arrays =
            context.submit(&model, arrays, task.deadline).and_then(|fence| fence.wait()).map_err(failed)?;
        times.push(start.elapsed());
    }
    let outputs = arrays.outputs.iter().map(|buffer| tensor(buffer.ty(), buffer.bytes().to_vec())).collect();
    let name = match npu.provider() {
        vm_passthrough::accelerator::npu::Provider::Cpu => npu.provider().to_string(),
        provider => format!("{device}, by {provider}"),
    };
    Ok((ran(name, Some(compile), times), outputs))
}
