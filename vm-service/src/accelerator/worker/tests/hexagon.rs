//! Models of a guest's programs on QNN's emulated Hexagon, in a worker's process that is confined as any is.

use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;

use vm_graph::{Builder, Element, GraphError, Tensor, ValidGraph};
use vm_paravirt_guest::linux::{Stream as Client, Window};
use vm_paravirt_guest::{Error, Transport as _};
use vm_passthrough::accelerator::npu::Libraries;

use super::*;
use crate::accelerator::{Ready, WorkerProcess};
use crate::process::ChildProgram;
use crate::vmm::Stop;

const WINDOW: u64 = 1 << 20;
const MEMORY: u64 = 64 << 20;

#[test]
#[ignore = "it is the process that the other tests start"]
fn a_worker() {
    crate::accelerator::worker_main().unwrap();
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
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../features/npu/tests/fetch-onnxruntime");
        let fetched = std::process::Command::new(script).output().map_err(|error| error.to_string())?;
        if !fetched.status.success() {
            return Err(String::from_utf8_lossy(&fetched.stderr).trim().to_owned());
        }
        let folder = Libraries::folder().map_err(|error| error.to_string())?;
        folder.ok_or("there is no cache for the emulator")?;
        let window = File::from(rustix::fs::memfd_create("window", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        window.set_len(WINDOW).unwrap();
        let open = Open {
            device: "npu:0".into(),
            memory: MEMORY,
            deadline_us: deadline.as_micros() as u64,
            measures: Measures { user: true, files: true },
            ram: vec![(0, WINDOW)],
            ..orders(Some(1))
        };
        let test = "accelerator::worker::tests::hexagon::a_worker";
        let arguments = ["--exact", test, "--ignored", "--nocapture", "--test-threads=1"];
        let path = std::env::current_exe().unwrap();
        let program = ChildProgram { path, arguments: arguments.map(Into::into).to_vec() };
        let (stop, meter) = (Stop::new().unwrap(), Meter::new().unwrap());
        let made = WorkerProcess::spawn(&program, &open, &[window.as_fd()], &meter, &stop);
        let (worker, ready) = made.unwrap_or_else(|error| panic!("{error}"));
        Ok(Self { worker, ready, window })
    }

    fn program(&self) -> Program {
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.worker.connect(theirs.as_fd()).unwrap();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&self.window));
        Program {
            accelerator: Client::new(ours.into()).unwrap(),
            window: Window::open(path, WINDOW).unwrap(),
        }
    }
}

struct Program {
    accelerator: Client,
    window: Window,
}

impl Program {
    fn run(
        &mut self,
        fill: impl FnOnce(&mut BatchWriter<'_>) -> Result<(), NoRoom>,
    ) -> Result<Result<(), (usize, Status)>, Error> {
        let mut frame = self.accelerator.frame();
        let mut batch = frame.batch()?;
        fill(&mut batch)?;
        let bytes = batch.finish();
        let frame = self.accelerator.call(frame, bytes)?;
        Ok(frame.reply()?.check())
    }
}

fn layer() -> Result<ValidGraph, GraphError> {
    let mut graph = Builder::new("layer");
    let x = graph.input("x", Element::F32, &[8, 64])?;
    let w = graph.input("w", Element::F32, &[64, 32])?;
    let y = graph.mat_mul(x, w)?;
    let y = graph.gelu(y)?;
    graph.output("y", y)?;
    graph.finish()
}

#[test]
fn a_guests_model_runs_in_a_confined_worker() {
    let host = match Host::new(Duration::from_secs(20)) {
        Ok(host) => host,
        Err(reason) => {
            println!("skipped: {reason}");
            return;
        }
    };
    println!("{:?}", host.ready);
    let graph = layer().unwrap();
    let model = vm_graph::encode(&graph).unwrap();
    let numbers = |count: usize, step: usize| -> Vec<f64> {
        (0..count).map(|at| ((at * step) % 17) as f64 / 16.0 - 0.5).collect()
    };
    let inputs = [numbers(8 * 64, 5), numbers(64 * 32, 7)];
    let expected = vm_graph::evaluate(&graph, &inputs).unwrap().remove(0);
    let mut program = host.program();
    let parts = [4 * 8 * 64, 4 * 64 * 32, 4 * 8 * 32].map(|bytes| program.window.take(bytes).unwrap());
    for (part, (values, input)) in parts.iter().zip(inputs.iter().zip(&graph.inputs)) {
        part.write(0, &Tensor::from_f64s(Element::F32, &input.ty.extents, values).bytes).unwrap();
    }
    let ranges = [4 * 8 * 64, 4 * 64 * 32, 4 * 8 * 32]
        .iter()
        .zip(&parts)
        .map(|(bytes, part)| part.range(0, *bytes).unwrap())
        .collect::<Vec<_>>();
    let done = program.run(|batch| {
        batch.create_module(1, &model)?;
        for (number, range) in ranges.iter().enumerate() {
            batch.import_buffer(number as u32, std::slice::from_ref(range))?;
        }
        let view = |buffer, extents: &[u64]| Argument::view(buffer, 0, extents);
        batch.launch(1, 0, [1; 3], &[view(0, &[8, 64])?, view(1, &[64, 32])?, view(2, &[8, 32])?])?;
        batch.fence()
    });
    assert_eq!(done, Ok(Ok(())));
    let mut bytes = vec![0; 4 * 8 * 32];
    parts[2].read(0, &mut bytes).unwrap();
    let ty = graph.output_type(0).clone();
    let found = Tensor { ty, bytes }.to_f64s();
    let greatest = expected.iter().fold(0f64, |most, x| most.max(x.abs()));
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() <= 1e-2 * greatest, "{found} for {expected}");
    }
}
