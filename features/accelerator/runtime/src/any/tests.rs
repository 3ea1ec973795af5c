//! The suite over an accelerator behind the enum, things of one kind given to another, and texts that name accelerators.

use std::num::NonZero;
use std::sync::Arc;
use std::time::Instant;

use vm_accel::conformance;
use vm_accel::fake::FakeAccelerator;
use vm_accel::programs::{Program, SOURCE};
use vm_accel::{Extents, QueueArgument};
use vm_ir::{Trust, text, validate};

use super::*;
use crate::{CpuAccelerator, JitCompiler, Worker, WorkerOptions};

fn cpu() -> AnyAccelerator {
    AnyAccelerator::Cpu(CpuAccelerator::with_threads(NonZero::new(2).unwrap()).unwrap())
}

fn fake() -> AnyAccelerator {
    AnyAccelerator::Fake(FakeAccelerator::new())
}

/// A program for the processor, by the enum's own target.
fn program(program: Program) -> Artifact {
    let name = if program == Program::Broken { Program::Add.name() } else { program.name() };
    let compiler = JitCompiler::new(Arc::new(cpu()));
    let (trust, compiler) = match program {
        Program::Spin => (Trust::Guest, compiler),
        // SAFETY: the suite's programs stay within their views, and end.
        _ => (Trust::Trusted, unsafe { compiler.trusted() }),
    };
    let module = validate(text::parse(SOURCE).unwrap(), trust).unwrap();
    let kernels = compiler.compile_module(&module).unwrap();
    let artifact = kernels.into_iter().find(|kernel| kernel.name() == name).unwrap().artifact().clone();
    if program != Program::Broken {
        return artifact;
    }
    // SAFETY: it can't be loaded.
    unsafe { Artifact::new(&artifact.image()[..artifact.image().len() / 2], artifact.signature().clone()) }
        .unwrap()
}

#[test]
fn conforms_as_what_it_is() {
    assert!(conformance::check(&Arc::new(cpu()), &program) >= conformance::CASES);
    assert!(conformance::check(&Arc::new(fake()), &FakeAccelerator::artifact) >= conformance::CASES);
    conformance::events_between(&Arc::new(cpu()), &Arc::new(cpu()));
}

#[test]
fn what_is_of_another_kind_is_refused() {
    let options = QueueOptions::default();
    let (ours, theirs) =
        (Accelerator::open(&fake(), &options).unwrap(), Accelerator::open(&cpu(), &options).unwrap());
    let (artifact, our_artifact) = (program(Program::Add), FakeAccelerator::artifact(Program::Add));
    let (event, our_event) = (theirs.event(true).unwrap(), ours.event(true).unwrap());
    let (kernel, our_kernel) = (theirs.load(&artifact).unwrap(), ours.load(&our_artifact).unwrap());
    let memory = ours.allocate(MemoryKind::Device, 8).unwrap();
    let [x, y] = [0, 4].map(|at| QueueArgument::View(memory.region().slice(at, 4).unwrap(), Extents::WHOLE));
    let arguments = Arguments::new(&our_artifact, [x, y, QueueArgument::Scalar(1u32.into())]).unwrap();
    let grid = Grid([1; 3]);
    let node = |kernel, then| GraphNode { kernel, grid, arguments: arguments.clone(), then };
    let our_graph = ours.graph_exec(&[node(&our_kernel, Some(&our_event))]).unwrap();
    let graph = || {
        theirs.begin_capture().unwrap();
        theirs.end_capture().unwrap()
    };
    let captured = graph();
    let check = |done: Result<()>, what: &str| {
        let said = done.unwrap_err().to_string();
        assert_eq!(said, format!("a queue of fake does not support {what} of cpu"));
    };
    check(ours.record(&event), "an event");
    check(ours.wait_event(&event), "an event");
    check(ours.done(&event).map(drop), "an event");
    check(ours.wait(&event, Instant::now()), "an event");
    check(ours.elapsed(&event, &our_event).map(drop), "an event");
    check(ours.elapsed(&our_event, &event).map(drop), "an event");
    // SAFETY: it is refused, and nothing runs.
    check(unsafe { ours.launch(&kernel, grid, &arguments) }, "a kernel");
    check(ours.graph_exec(&[node(&kernel, None)]).map(drop), "a kernel");
    check(ours.graph_exec(&[node(&our_kernel, Some(&event))]).map(drop), "an event");
    check(ours.update(&our_graph, 0, &kernel, grid, &arguments), "a kernel");
    check(ours.update(&captured, 0, &our_kernel, grid, &arguments), "a graph");
    // SAFETY: it is refused, and nothing runs.
    check(unsafe { ours.replay(&captured) }, "a graph");
    check(ours.discard(graph()), "a graph");
    check(ours.unload(kernel), "a kernel");
    // Of a worker's events, too.
    let [ours, theirs] =
        [fake(), cpu()].map(|one| Worker::start(Arc::new(one), WorkerOptions::default()).unwrap());
    ours.wait_event(&theirs.record().unwrap()).unwrap();
    check(ours.synchronize(std::time::Duration::from_secs(30)), "an event");
}

#[test]
fn texts_name_accelerators() {
    let check = |spec: &str, want: Result<&str, &str>| match (AnyAccelerator::open(spec), want) {
        (Ok(opened), Ok(backend)) => assert_eq!(opened.info().backend, backend, "{spec}"),
        (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{spec}: {error}"),
        (got, want) => panic!("{spec}: {got:?}, not {want:?}"),
    };
    check("cpu", Ok("cpu"));
    check("cpu:0", Ok("cpu"));
    check("cpu:1", Err("cpu:1 can't be opened: there is no processor 1"));
    check("cuda:4000000000", Err("cuda:4000000000 can't be opened: "));
    check("rocm:4000000000", Err("rocm:4000000000 can't be opened: "));
    // What there is.
    check("cuda:4000000000", Err("cpu ("));
    check("ffff:ff:1f.7", Err("ffff:ff:1f.7 can't be opened: "));
    check("FF:1f.7", Err("the processor has no PCI address; there is "));
    for bad in [
        "",
        "gpu",
        "CPU",
        "cuda:",
        "cuda:-1",
        "cuda:+1",
        "cuda:1:2",
        "0000:65:20.0",
        "0000:65:00.8",
        "0:0:0:0.0",
        "é",
    ] {
        check(bad, Err("names no accelerator: write auto, cpu, cuda:N"));
    }
    check(&"x".repeat(1 << 20), Err("names no accelerator"));
    let all = AnyAccelerator::all();
    assert_eq!(AnyAccelerator::open("auto").unwrap().spec(), all[0].spec());
    assert_eq!(all.last().unwrap().spec(), "cpu");
    for one in &all {
        assert_eq!(AnyAccelerator::open(&one.spec()).unwrap().info(), one.info());
    }
}
