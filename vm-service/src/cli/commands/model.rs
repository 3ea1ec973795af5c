//! `launch` and `compile` of a model: a graph of array operations.

use std::io::IsTerminal as _;
use std::path::Path;
use std::sync::Arc;

use vm_graph::{Input, ValidGraph};
use vm_ir::interp::Tensor;

use super::launch::{Check, GRACE, Launched, Output, check, differing, document, summary};
use crate::api::{self, Body};
use crate::cli::context::Context;
use crate::cli::kernel::args::{CompileArgs, DeviceArg, LaunchArgs};
use crate::cli::kernel::model::{self, Task};
use crate::cli::kernel::{argument, file, npy, wait};
use crate::failure::Failure;
use crate::text::table::{Table, printable};

/// How far an NPU's outputs may be off: it may compute in f16, or in integers of 8 bits.
const NPU_TOLERANCE: f64 = 1e-2;

/// Runs a model.
///
/// # Errors
/// When the file or the arguments are wrong, the device is not there or can't take the model, or `--check` finds a difference.
pub(super) fn run(context: &mut Context<'_>, arguments: &LaunchArgs) -> Result<(), Failure> {
    check_options(arguments)?;
    let graph = file::load_graph(&arguments.file)?;
    arguments.outs.iter().try_for_each(|out| file::spare(&arguments.file, &out.path))?;
    let inputs = argument::bind_model(&graph, &arguments.args, &arguments.outs)?;
    let task = Task {
        graph: Arc::new(graph),
        inputs: Arc::new(inputs),
        deadline: arguments.deadline,
        cache: context.cache.clone(),
        repeat: arguments.repeat,
    };
    let deadline = arguments.deadline.saturating_add(GRACE);
    let what = format!("model {}", task.graph.name);
    let (ran, found) = {
        let (task, host, device) = (task.clone(), context.host.clone(), arguments.device);
        wait::run(&what, deadline, move || model::run(&task, device, &host))?
    };
    let wanted = match arguments.check {
        true => {
            let task = Task { repeat: None, ..task.clone() };
            let what = format!("{what} in f64");
            Some(wait::run(&what, deadline, move || model::evaluate(&task))?.1)
        }
        false => None,
    };
    let outputs = outputs(arguments, &task.graph, &found, wanted.as_deref());
    for Output { tensor, file, .. } in &outputs {
        if let Some(path) = file {
            npy::write(path, tensor).map_err(Failure::failed)?;
        }
    }
    let what = Launched { name: &task.graph.name, grid: [1; 3], block: [1; 3] };
    context.print(
        || Body::Launch(document(arguments, &what, &ran, &outputs)),
        || summary(&what, &ran, &outputs),
    )?;
    let wrong = differing(&outputs);
    if wrong.is_empty() { Ok(()) } else { Err(Failure::failed(wrong.join("\nerror: "))) }
}

fn check_options(arguments: &LaunchArgs) -> Result<(), Failure> {
    let of_kernels = [
        ("--grid", arguments.grid.is_some()),
        ("--kernel", arguments.kernel.is_some()),
        ("--fuel", arguments.fuel.is_some()),
        ("--trusted", arguments.trusted),
        ("--allow-out-of-bounds", arguments.allow_out_of_bounds),
    ];
    if let Some((option, _)) = of_kernels.iter().find(|(_, is_given)| *is_given) {
        return Err(Failure::usage(format_args!(
            "{option} is for kernels, and this is a model; leave it out"
        )));
    }
    if arguments.check && arguments.device == DeviceArg::Interpreter {
        return Err(Failure::usage(
            "--check compares with the interpreter, and this is the interpreter; leave it out",
        ));
    }
    Ok(())
}

fn outputs<'a>(
    arguments: &'a LaunchArgs,
    graph: &'a ValidGraph,
    found: &'a [Tensor],
    wanted: Option<&[Tensor]>,
) -> Vec<Output<'a>> {
    let tolerance = match arguments.device {
        DeviceArg::Npu(_) | DeviceArg::Pci(_) => Some(arguments.tolerance.unwrap_or(NPU_TOLERANCE)),
        DeviceArg::Interpreter | DeviceArg::Cpu | DeviceArg::Rocm(_) => arguments.tolerance,
    };
    let output = |(number, tensor): (usize, &'a Tensor)| {
        let name = &graph.outputs[number].name;
        let check: Option<Check> = wanted.map(|wanted| check(tensor, &wanted[number], tolerance));
        let file = arguments.outs.iter().find(|out| out.name == *name).map(|out| out.path.as_path());
        Output { name, tensor, file, check }
    };
    found.iter().enumerate().map(output).collect()
}

/// Compiles a model to ONNX.
///
/// # Errors
/// When the file has no valid model, or the output can't be written.
pub(super) fn compile(
    context: &mut Context<'_>,
    arguments: &CompileArgs,
    path: &Path,
) -> Result<(), Failure> {
    let graph = file::load_graph(path)?;
    if arguments.legal || arguments.trusted {
        return Err(Failure::usage(
            "--legal and --trusted are for kernels, and this is a model; leave them out",
        ));
    }
    let model = vm_graph::onnx::model(&graph);
    let Some(output) = &arguments.output else {
        if context.json || std::io::stdout().is_terminal() {
            return Err(Failure::usage("ONNX is no text; write it to a file with --output"));
        }
        context.out.write_all(&model)?;
        return Ok(context.out.flush()?);
    };
    file::spare(path, output)?;
    super::compile::write(output, &model)?;
    let shown = output.display().to_string();
    context.print(
        || {
            Body::Compile(api::Compiled {
                target: "onnx".to_owned(),
                format: "ONNX".to_owned(),
                code_bytes: model.len(),
                code: None,
                file: Some(shown.clone()),
                kernels: Vec::new(),
            })
        },
        || {
            let mut table = Table::new(["NAME", "TYPE", "IS"]);
            for Input { name, ty } in &graph.inputs {
                table.push([name.clone(), ty.to_string(), "input".to_owned()]);
            }
            for (number, output) in graph.outputs.iter().enumerate() {
                table.push([output.name.clone(), graph.output_type(number).to_string(), "output".to_owned()]);
            }
            format!(
                "onnx: opset {}, {} operations, {} bytes in {}\n{table}",
                vm_graph::onnx::OPSET,
                graph.nodes.len(),
                model.len(),
                printable(&shown)
            )
        },
    )
}
