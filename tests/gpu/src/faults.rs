//! Faults on the device, each in a process of its own: they become typed errors, and a new process can use the device.
#![allow(unsafe_code)]

use std::io::Read;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use vm_accel::programs::Program;
use vm_accel::{
    Artifact, Element, Error, Extent, Parameter, ParameterKind, Signature, Worker, WorkerOptions, arguments,
};
use vm_cuda::CudaAccelerator;

use crate::gpu::Gpu;
use crate::{Arguments, Test, programs};

/// Faults by name, with the instructions that make them; `%base` is the address of a buffer.
const FAULTS: &[(&str, &str)] = &[
    ("illegal address", "mov.u64 %base, 4096;\nst.global.u32 [%base], 7;"),
    ("misaligned address", "add.u64 %base, %base, 1;\nst.global.u32 [%base], 7;"),
    ("trap", "trap;"),
];
const WORKS: &str = "works";
const ENDLESS: &str = "endless";

/// The tests of this section.
pub(crate) fn tests(arguments: &Arguments) -> Vec<Test> {
    let device = arguments.device;
    let mut tests: Vec<Test> = FAULTS
        .iter()
        .map(|&(name, _)| {
            Test::new(format!("{name}: the context is lost, and a new process works"), move |_, report| {
                report.note(probe(name, device)?);
                probe(WORKS, device)?;
                Ok(())
            })
        })
        .collect();
    tests.push(Test::new(
        "an endless kernel of the host's own keeps nobody from leaving",
        move |_, report| {
            report.note(probe(ENDLESS, device)?);
            probe(WORKS, device)?;
            Ok(())
        },
    ));
    tests
}

/// Runs this program again for one probe, and gives what it says.
fn probe(name: &str, device: u32) -> anyhow::Result<String> {
    probe_with(name, device, &[])
}

/// The same with further arguments.
pub(crate) fn probe_with(name: &str, device: u32, more: &[&str]) -> anyhow::Result<String> {
    let program = std::env::current_exe().context("finding this program")?;
    let mut child = Command::new(program)
        .args(["--probe", name, "--device", &device.to_string()])
        .args(more)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting the probe {name}"))?;
    let mut output = child.stdout.take().context("the probe's output")?;
    let deadline = Instant::now() + Duration::from_secs(60);
    let status = loop {
        match child.try_wait()? {
            Some(status) => break status,
            None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            None => {
                child.kill()?;
                bail!("the probe {name} did not end in a minute");
            }
        }
    };
    let mut said = String::new();
    output.read_to_string(&mut said)?;
    ensure!(status.success(), "the probe {name} ended with {status}: {said}");
    Ok(said.trim().to_owned())
}

/// One probe, in this process.
pub(crate) fn run(name: &str, device: u32) -> ExitCode {
    let result = match FAULTS.iter().find(|(fault, _)| *fault == name) {
        Some((_, instructions)) => fault(device, instructions),
        None if name == WORKS => works(device),
        None if name == ENDLESS => endless(device),
        None => Err(anyhow::anyhow!("no probe {name}")),
    };
    told(result)
}

/// Says what came of a probe, and gives the status of its process.
pub(crate) fn told(result: anyhow::Result<String>) -> ExitCode {
    match result {
        Ok(said) => {
            println!("{said}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(device: u32) -> anyhow::Result<Worker<CudaAccelerator>> {
    let mut options = WorkerOptions::default();
    options.queue.timeout = Duration::from_secs(2);
    Ok(Worker::start(Arc::new(CudaAccelerator::new(device)?), options)?)
}

/// A kernel of these instructions.
fn artifact(instructions: &str) -> anyhow::Result<Artifact> {
    let text = format!(
        ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry probe(.param .align 8 .b8 args[16])\n{{\n\
         .reg .b64 %base;\nld.param.u64 %base, [args];\n{instructions}\nret;\n}}\n"
    );
    let kind =
        ParameterKind::View { extents: vec![Extent::Any], element: Element::U32, align: 4, writes: true };
    let signature = Signature {
        entry: "probe".into(),
        block: [32, 1, 1],
        cluster: 1,
        shared_bytes: 0,
        parameters: vec![Parameter { name: "buffer".into(), kind }],
        tiles: vec![],
        guarded: false,
        cost_bound: u64::MAX,
    };
    // SAFETY: it does not keep to what is asked for here, on purpose: it faults at once or does nothing, in a process
    // that ends after it.
    Ok(unsafe { Artifact::new(text.into_bytes(), signature) }?)
}

fn fault(device: u32, instructions: &str) -> anyhow::Result<String> {
    let worker = start(device)?;
    let kernel = worker.load(&artifact(instructions)?)?;
    let buffer = worker.allocate_zeroed(256)?;
    worker.launch(&kernel, 1, &arguments![&buffer])?;
    let timeout = Duration::from_secs(20);
    let first = worker.synchronize(timeout).err().context("the fault was not seen")?;
    ensure!(first.is_lost(), "the fault is {first}");
    // From then on all that is asked of it says so.
    let lost = |what: &str, result: Result<(), Error>| match result {
        Err(error) if error.is_lost() => Ok(()),
        other => bail!("{what} after the fault: {other:?}"),
    };
    lost("a wait", worker.synchronize(timeout))?;
    lost("an allocation", worker.allocate(1 << 20).map(drop))?;
    lost("a launch", worker.launch(&kernel, 1, &arguments![&buffer]))?;
    lost("a read", worker.read(&buffer, &mut [0u8; 256]))?;
    lost("loading", worker.load(&artifact("")?).map(drop))?;
    drop((buffer, kernel));
    lost("stopping", worker.stop(timeout))?;
    // Another worker of this process has the same context.
    let again = start(device).and_then(|worker| Ok(worker.allocate_zeroed(256).map(drop)?));
    ensure!(again.is_err(), "a second worker works after the fault");
    Ok(first.to_string())
}

fn works(device: u32) -> anyhow::Result<String> {
    let worker = start(device)?;
    let add = worker.load(&programs::artifact(Program::Add, &Gpu::open(device)?)?)?;
    let (input, output) = (worker.allocate(4000)?, worker.allocate(4000)?);
    worker.write(&input, &[40u32; 1000])?;
    worker.launch(&add, 4, &arguments![&input, &output, 2u32])?;
    let mut sums = [0u32; 1000];
    worker.read(&output, &mut sums)?;
    ensure!(sums == [42; 1000], "the sums are wrong");
    drop((input, output, add));
    worker.stop(Duration::from_secs(20))?;
    Ok("it works".into())
}

fn endless(device: u32) -> anyhow::Result<String> {
    let worker = start(device)?;
    let kernel = worker.load(&artifact("again:\nst.global.u32 [%base], 7;\nbra again;")?)?;
    let buffer = worker.allocate_zeroed(256)?;
    worker.launch(&kernel, 1, &arguments![&buffer])?;
    let begin = Instant::now();
    let late = worker.synchronize(Duration::from_millis(500));
    ensure!(matches!(late, Err(Error::Deadline { .. })), "a wait for it: {late:?}");
    let read = worker.read(&buffer, &mut [0u8; 256]);
    ensure!(matches!(read, Err(Error::Deadline { .. })), "a read behind it: {read:?}");
    drop((buffer, kernel));
    let stopped = worker.stop(Duration::from_secs(20));
    ensure!(matches!(stopped, Err(Error::Deadline { .. })), "stopping: {stopped:?}");
    let taken = begin.elapsed();
    ensure!(taken < Duration::from_secs(15), "all that took {taken:?}");
    Ok(format!("left after {:.1} s", taken.as_secs_f64()))
}
