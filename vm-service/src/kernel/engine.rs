//! What runs a kernel: the interpreter, or an accelerator behind vm-jit.

use std::time::{Duration, Instant};

use vm_ir::ValidModule;
use vm_ir::interp::{self, Argument, Launch, Limits};
use vm_passthrough::Host;

use super::args::DeviceArg;
use crate::cli::Failure;

/// A launch that fits its kernel, and how long it may take.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    /// The module that the kernel is in.
    pub(crate) module: ValidModule,
    /// Kernel, grid and arguments.
    pub(crate) launch: Launch,
    /// When to stop it.
    pub(crate) deadline: Duration,
    /// The most rounds that a thread of a guest's kernel may begin.
    pub(crate) rounds: Option<u64>,
}

/// How a launch went.
#[derive(Clone, Debug)]
pub(crate) struct Ran {
    /// The arguments with what the kernel wrote, in their order.
    pub(crate) arguments: Vec<Argument>,
    /// What ran it.
    pub(crate) device: String,
    /// What it was compiled for; `None` where nothing was compiled.
    pub(crate) target: Option<String>,
    /// How long compiling and loading took, where it was compiled.
    pub(crate) compile: Option<Duration>,
    /// How long the kernel ran, as the host saw it.
    pub(crate) run: Duration,
}

/// Runs a task on a device.
///
/// # Errors
/// When the device is not there or the kernel does not end well; the message says which.
pub(crate) fn run(task: Task, device: DeviceArg, _host: &Host) -> Result<Ran, Failure> {
    match device {
        DeviceArg::Interpreter => interpret(task),
        DeviceArg::Cpu => Err(missing("the CPU")),
        DeviceArg::Pci(address) => Err(missing(&address.to_string())),
    }
}

fn missing(device: &str) -> Failure {
    Failure::failed(format_args!(
        "this vm-service has no accelerator for {device}; --device interpreter runs anywhere"
    ))
}

/// Runs a task on the interpreter.
///
/// # Errors
/// As the interpreter says.
pub(crate) fn interpret(task: Task) -> Result<Ran, Failure> {
    let Task { module, mut launch, deadline, .. } = task;
    let start = Instant::now();
    // The deadline is the limit here: how many steps a kernel needs is the operator's to know.
    let limits = Limits { fuel: u64::MAX, deadline: start.checked_add(deadline), ..Limits::default() };
    interp::run(&module, &mut launch, &limits).map_err(|error| match *error.kind {
        interp::RunErrorKind::Deadline => Failure::failed(format_args!(
            "{error}; the interpreter takes one step at a time: give it a smaller grid, or more time with --deadline"
        )),
        _ => Failure::failed(error),
    })?;
    Ok(Ran {
        arguments: launch.arguments,
        device: "interpreter".into(),
        target: None,
        compile: None,
        run: start.elapsed(),
    })
}
