//! A task on an accelerator: compiled for it, loaded, launched, read back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_ir::Trust;
use vm_ir::interp::Argument as Given;
use vm_ir::module::ParamKind;
use vm_passthrough::accelerator::{
    Argument, Buffer, CompileError, Error, JitCompiler, JitTarget, Launch, Limits, QueueOptions, Scalar,
    Worker, WorkerOptions,
};

use super::engine::{Ran, Spread, Task};
use super::{cache, vouch};
use crate::failure::Failure;

/// How long the device is waited for beyond the kernel's own deadline.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Compiles a task for an accelerator and runs it there.
///
/// # Errors
/// Whatever the compiler or the accelerator fails with.
pub(super) fn run<A: JitTarget>(
    task: Task,
    accelerator: A,
    adjust: impl FnOnce(JitCompiler<A>) -> JitCompiler<A>,
) -> Result<Ran, Failure> {
    let accelerator = Arc::new(accelerator);
    let device = accelerator.info().name.clone();
    tracing::debug!("the device is {device}");
    let trusted = task.module.trust() == Trust::Trusted;
    let timeout = task.deadline.saturating_add(TIMEOUT);
    let options = WorkerOptions {
        name: "kernel".into(),
        queue: QueueOptions { timeout, ..QueueOptions::default() },
        ..WorkerOptions::default()
    };
    let worker: Worker<A> = Worker::start(Arc::clone(&accelerator), options).map_err(Failure::failed)?;
    let start = Instant::now();
    let mut compiler =
        adjust(JitCompiler::new(accelerator).cache(cache::open(task.cache.as_deref(), cache::CODE_BYTES)));
    if trusted {
        compiler = vouch::trusted(compiler);
    }
    let kernel =
        task.module.kernel(&task.launch.kernel).cloned().ok_or_else(|| {
            Failure::failed(format_args!("the module has no kernel @{}", task.launch.kernel))
        })?;
    let compiled = compiler.compile_kernel(kernel.clone()).map_err(|error| match error {
        CompileError::Rejected(rejected) => {
            let reasons: Vec<_> = rejected.0.iter().map(|reject| reject.render(&task.source)).collect();
            Failure::failed(reasons.join("\nerror: "))
        }
        error => Failure::failed(error),
    })?;
    let loaded = worker.load(compiled.artifact()).map_err(Failure::failed)?;
    let compile = start.elapsed();
    let cached = compiler.statistics().misses == 0;
    tracing::debug!(
        "{} bytes of {} for {}, {}, loaded in {compile:.1?}",
        compiled.artifact().image().len(),
        compiled.format(),
        compiled.target(),
        if cached { "from the cache" } else { "compiled" }
    );

    let given = &task.launch.arguments;
    let buffers = given.iter().map(|argument| upload(&worker, argument)).collect::<Result<Vec<_>, _>>();
    let buffers = buffers.map_err(Failure::failed)?;
    let bytes: usize = given.iter().filter_map(Given::tensor).map(|tensor| tensor.bytes.len()).sum();
    tracing::debug!("{} arguments, {bytes} bytes of tensors copied to the device", given.len());
    let mut arguments = Vec::with_capacity(given.len());
    for ((param, argument), buffer) in kernel.params().iter().zip(given).zip(&buffers) {
        arguments.push(match (&param.kind, argument, buffer) {
            (_, Given::Tensor(tensor), Some(buffer)) => {
                let view = buffer.view(0, tensor.bytes.len() as u64).map_err(Failure::failed)?;
                view.shaped(&tensor.extents).map_err(Failure::failed)?.into()
            }
            (ParamKind::Scalar { value, .. }, Given::Bits(bits), _) => {
                Argument::Scalar(Scalar::from_bits(*bits, kernel.type_of(*value).scalar().bytes()))
            }
            // The launch was checked against the kernel.
            _ => return Err(Failure::failed(format_args!("argument {} is of the wrong kind", param.name))),
        });
    }
    let limits = Limits { time: task.deadline, fuel: task.fuel.unwrap_or(Limits::default().fuel) };
    let launch = Launch::over(task.launch.grid).within(limits);
    let mut times = Vec::new();
    for number in 0..task.launches() {
        if number > 0 {
            let written = kernel.params().iter().zip(given).zip(&buffers);
            written
                .filter(|((param, _), _)| {
                    matches!(&param.kind, ParamKind::View(view) if view.access.reads() && view.access.writes())
                })
                .try_for_each(|((_, argument), buffer)| restore(&worker, argument, buffer.as_ref()))
                .map_err(Failure::failed)?;
        }
        worker.synchronize(timeout).map_err(Failure::failed)?;
        let start = Instant::now();
        worker.launch(&loaded, launch, &arguments).map_err(Failure::failed)?;
        let ended = worker.synchronize(if trusted { task.deadline } else { timeout });
        ended.map_err(|error| match error {
            Error::Deadline { .. } if trusted => unstoppable(&task),
            error => Failure::failed(error),
        })?;
        times.push(start.elapsed());
    }
    let first = times.remove(0);
    tracing::debug!("ran in {first:.1?}");
    let repeated = Spread::of(times);
    let run = repeated.map_or(first, |spread| spread.median);
    drop(arguments);

    let mut arguments = task.launch.arguments;
    for ((param, argument), buffer) in kernel.params().iter().zip(&mut arguments).zip(&buffers) {
        if let (ParamKind::View(view), Given::Tensor(tensor), Some(buffer)) = (&param.kind, argument, buffer)
            && view.access.writes()
            && !tensor.bytes.is_empty()
        {
            let source = buffer.view(0, tensor.bytes.len() as u64).map_err(Failure::failed)?;
            worker.read(source, &mut tensor.bytes).map_err(Failure::failed)?;
        }
    }
    drop((buffers, loaded));
    worker.stop(TIMEOUT).map_err(Failure::failed)?;
    let target = Some(compiled.target().to_string());
    Ok(Ran { arguments, device, target, compile: Some(compile), run, repeated, out_of_bounds: None })
}

/// That the host's own kernel is not done.
fn unstoppable(task: &Task) -> Failure {
    Failure::failed(format_args!(
        "kernel @{} did not end within {} s: with --trusted it can't be stopped, and may keep the device busy until this process \
         ends; give it more time with --deadline, or leave out --trusted: a guest's kernel is stopped",
        task.launch.kernel,
        task.deadline.as_secs_f64()
    ))
}

/// Puts a tensor into its memory again.
fn restore<A: JitTarget>(
    worker: &Worker<A>,
    argument: &Given,
    buffer: Option<&Buffer<A>>,
) -> Result<(), Error> {
    match (argument.tensor(), buffer) {
        (Some(tensor), Some(buffer)) if !tensor.bytes.is_empty() => {
            worker.write(buffer.view(0, tensor.bytes.len() as u64)?, &tensor.bytes)
        }
        _ => Ok(()),
    }
}

/// A tensor in memory of the device; nothing for a number.
fn upload<A: JitTarget>(worker: &Worker<A>, argument: &Given) -> Result<Option<Buffer<A>>, Error> {
    let Some(tensor) = argument.tensor() else { return Ok(None) };
    let buffer = worker.allocate((tensor.bytes.len() as u64).max(1))?;
    restore(worker, argument, Some(&buffer))?;
    Ok(Some(buffer))
}
