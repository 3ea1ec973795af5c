//! Models of a guest's programs on QNN's emulated Hexagon, in a worker's process that is confined as any is.

use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;

use gpt::config::Config;
use gpt::export::{Weights, next_token};
use gpt::parameters::Parameters;
use vm_graph::{Builder, Element, GraphError, Tensor, TensorType, ValidGraph};
use vm_paravirt_guest::Error;
use vm_paravirt_guest::linux::{Array, Model, ModelError, Stream, Window};
use vm_passthrough::accelerator::npu::{Libraries, Roots, devices};

use super::*;
use crate::accelerators::{Ready, WorkerProcess};
use crate::os::process::ChildProgram;
use crate::vmm::Stop;

const WINDOW: u64 = 16 << 20;
const MEMORY: u64 = 64 << 20;

#[test]
#[ignore = "it is the process that the other tests start"]
fn a_worker() {
    crate::accelerators::worker_main().unwrap();
}

/// A worker that has opened the emulated Hexagon, and its guest's window.
struct Host {
    worker: WorkerProcess,
    ready: Ready,
    window: File,
}

impl Host {
    /// Or why there is none.
    fn new(deadline: Duration) -> Result<Self, String> {
        if !cfg!(target_arch = "x86_64") {
            return Err("the emulator is for x86-64".into());
        }
        let script = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../features/accelerator/backends/npu/tests/fetch-onnxruntime");
        let fetched = std::process::Command::new(script).output().map_err(|error| error.to_string())?;
        if !fetched.status.success() {
            return Err(String::from_utf8_lossy(&fetched.stderr).trim().to_owned());
        }
        let folder = Libraries::folder().map_err(|error| error.to_string())?;
        folder.ok_or("there is no cache for the emulator")?;
        let window = File::from(rustix::fs::memfd_create("window", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        window.set_len(WINDOW).unwrap();
        // Those that Linux has come first.
        let number = devices(&Roots::system()).map_or(0, |devices| devices.len());
        let open = Open {
            device: format!("npu:{number}"),
            memory: MEMORY,
            deadline_us: deadline.as_micros() as u64,
            unconfined: Vec::new(),
            ram: vec![(0, WINDOW)],
            ..orders(Some(1))
        };
        let test = "accelerators::worker::tests::hexagon::a_worker";
        let arguments = ["--exact", test, "--ignored", "--nocapture", "--test-threads=1"];
        let path = std::env::current_exe().unwrap();
        let program = ChildProgram { path, arguments: arguments.map(Into::into).to_vec() };
        let (stop, meter) = (Stop::new().unwrap(), Meter::new().unwrap());
        let made = WorkerProcess::spawn(&program, &open, &[window.as_fd()], &meter, &stop);
        let (worker, ready) = made.unwrap_or_else(|error| panic!("{error}"));
        Ok(Self { worker, ready, window })
    }

    fn stream(&self) -> Stream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.worker.connect(theirs.as_fd()).unwrap();
        Stream::new(ours.into()).unwrap()
    }

    fn window(&self) -> Window {
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&self.window));
        Window::open(path, WINDOW).unwrap()
    }

    fn load(&self, graph: &ValidGraph) -> Result<Model, ModelError> {
        self.load_code(graph, &vm_graph::encode(graph).unwrap())
    }

    fn load_code(&self, graph: &ValidGraph, code: &[u8]) -> Result<Model, ModelError> {
        let of = |ty: &TensorType| Array { elements: ty.elements(), element_bytes: ty.element.bytes() };
        let inputs: Vec<_> = graph.inputs.iter().map(|input| of(&input.ty)).collect();
        let outputs: Vec<_> = (0..graph.outputs.len()).map(|number| of(graph.output_type(number))).collect();
        Model::load(self.stream(), &self.window(), code, &inputs, &outputs)
    }
}

/// Runs a test with a worker, or says why not.
fn on_hexagon(deadline: Duration, test: impl FnOnce(Host)) {
    match Host::new(deadline) {
        Ok(host) => test(host),
        Err(reason) => println!("skipped: {reason}"),
    }
}

fn numbers(count: u64, step: u64) -> Vec<f64> {
    (0..count).map(|at| ((at * step) % 17) as f64 / 16.0 - 0.5).collect()
}

fn graph(build: impl FnOnce(&mut Builder) -> Result<(), GraphError>) -> ValidGraph {
    let mut graph = Builder::new("test");
    build(&mut graph).unwrap();
    graph.finish().unwrap()
}

fn layer() -> ValidGraph {
    graph(|graph| {
        let x = graph.input("x", Element::F32, &[8, 64])?;
        let w = graph.input("w", Element::F32, &[64, 32])?;
        let y = graph.mat_mul(x, w)?;
        let y = graph.gelu(y)?;
        graph.output("y", y)
    })
}

/// One that the emulator takes long for.
fn slow(products: usize) -> ValidGraph {
    graph(|graph| {
        let x = graph.input("x", Element::F32, &[512, 512])?;
        let mut y = x;
        for _ in 0..products {
            y = graph.mat_mul(y, x)?;
        }
        graph.output("y", y)
    })
}

/// Runs it. On a busy machine a short one takes longer than its deadline, too.
fn run(model: &mut Model) {
    let until = Instant::now() + Duration::from_secs(60);
    while let Err(error) = model.run() {
        let is_late = matches!(error.error, Error::Status { status: Status::Deadline, .. });
        assert!(is_late && Instant::now() < until, "{error}");
    }
}

/// Runs it on numbers, and compares.
fn check(model: &mut Model, graph: &ValidGraph, first: u64) {
    let inputs = (first..).zip(&graph.inputs);
    let inputs: Vec<_> = inputs.map(|(n, input)| numbers(input.ty.elements(), 2 * n + 1)).collect();
    check_with(model, graph, &inputs);
}

/// Runs it, and compares with what is computed by definition.
fn check_with(model: &mut Model, graph: &ValidGraph, inputs: &[Vec<f64>]) {
    for (number, (input, values)) in graph.inputs.iter().zip(inputs).enumerate() {
        let bytes = Tensor::from_f64s(input.ty.element, &input.ty.extents, values).bytes;
        model.set_input(number, &bytes).unwrap();
    }
    run(model);
    let expected = vm_graph::evaluate(graph, inputs).unwrap();
    for (number, expected) in expected.iter().enumerate() {
        let bytes = model.output(number).unwrap();
        let found = Tensor { ty: graph.output_type(number).clone(), bytes }.to_f64s();
        let greatest = expected.iter().fold(1e-3f64, |most, x| most.max(x.abs()));
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() <= 1e-2 * greatest, "{found} for {expected}");
        }
    }
}

#[test]
fn programs_run_models_in_a_confined_worker() {
    on_hexagon(Duration::from_secs(20), |host| {
        println!("{:?}", host.ready);
        let is_root = rustix::process::geteuid().is_root();
        let Ready { name, confinement } = &host.ready;
        assert_eq!((&**name, confinement.user.is_some()), ("Qualcomm Hexagon, emulated", is_root));
        // Of this process's variables it was told none but where the libraries are.
        let variables = std::fs::read(format!("/proc/{}/environ", host.worker.id())).unwrap_or_default();
        let mut names: Vec<_> = variables
            .split(|byte| *byte == 0)
            .filter_map(|one| str::from_utf8(one).ok()?.split_once('='))
            .map(|(name, _)| name)
            .filter(|name| *name != "LD_LIBRARY_PATH")
            .collect();
        names.sort_unstable();
        let expect = ["CUDA_CACHE_DISABLE", "CUDA_DEVICE_ORDER", "RUST_LOG", "VM_ONNXRUNTIME"];
        assert!(names == expect || !is_root && names.is_empty(), "{names:?}");
        let graph = layer();
        // Each compiles while the others run.
        std::thread::scope(|scope| {
            for first in 1..4 {
                let (host, graph) = (&host, &graph);
                scope.spawn(move || {
                    let mut model = host.load(graph).unwrap();
                    (first..first + 3).for_each(|number| check(&mut model, graph, number));
                });
            }
        });
        // What is no graph, or not one that the library takes, is an error that tells why, and harms nobody.
        let mut model = host.load(&graph).unwrap();
        let code = vm_graph::encode(&graph).unwrap();
        let refused = host.load_code(&graph, &code[..code.len() - 1]).unwrap_err();
        let status = |error: &ModelError| match error.error {
            Error::Status { status, .. } => status,
            other => panic!("{other}"),
        };
        assert_eq!(status(&refused), Status::Module);
        assert!(refused.log.starts_with("module 1: these bytes are no graph"), "{refused}");
        let doubles = self::graph(|graph| {
            let x = graph.input("x", Element::F64, &[4])?;
            let y = graph.tanh(x)?;
            graph.output("y", y)
        });
        let refused = host.load(&doubles).unwrap_err();
        println!("{refused}");
        assert_eq!(status(&refused), Status::Module);
        check(&mut model, &graph, 9);
    });
}

/// A whole GPT with its weights within: what a program generates with it is by its greatest logits, and they are those of the definition.
#[test]
fn a_program_generates_with_a_gpt() {
    let config =
        Config { element: vm_ir::Scalar::F32, width: 64, heads: 4, tokens: 12, batch: 1, ..Config::TINY };
    let parameters = Parameters::of(&config);
    let mut masters = parameters.initial(&config, 1);
    masters[..parameters.sizes[0] as usize].iter_mut().for_each(|x| *x *= 5.0);
    let graph = next_token(&config, config.tokens, Weights::Constants(&masters)).unwrap();
    on_hexagon(Duration::from_secs(20), |host| {
        let mut model = host.load(&graph).unwrap();
        let mut tokens = numbers(config.tokens, 5);
        tokens.iter_mut().for_each(|token| *token = (*token + 0.5) * 16.0);
        for last in 7..config.tokens as usize - 1 {
            check_with(&mut model, &graph, &[tokens.clone(), vec![last as f64]]);
            let token = model.output(1).unwrap();
            tokens[last + 1] = i32::from_le_bytes(token.try_into().unwrap()).into();
        }
        println!("{tokens:?}");
    });
}

#[test]
fn an_inference_that_is_too_long_is_an_error_and_the_next_one_runs() {
    on_hexagon(Duration::from_millis(50), |host| {
        let (long, short) = (slow(100), layer());
        let mut others = host.load(&short).unwrap();
        let mut model = host.load(&long).unwrap();
        let error = model.run().unwrap_err();
        assert!(matches!(error.error, Error::Status { operation: 0, status: Status::Deadline }), "{error}");
        assert!(error.log.contains("took longer than 50ms"), "{error}");
        check(&mut others, &short, 1);
    });
}

#[test]
fn the_end_of_a_worker_ends_what_its_programs_wait_for() {
    on_hexagon(Duration::from_secs(20), |mut host| {
        let mut model = host.load(&layer()).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let running = std::thread::spawn(move || {
            loop {
                if let Err(error) = model.run() {
                    return error.error;
                }
                // Nobody listens any more when it is told again.
                let _ = tell.send(());
            }
        });
        told.recv().unwrap();
        assert!(host.worker.kill().is_some());
        assert_eq!(running.join().unwrap(), Error::NeedsReset);
    });
}
