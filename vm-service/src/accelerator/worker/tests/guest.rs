//! The accelerator of a guest's programs (`vm-guest`) over streams to a worker, which is a process that is confined as any is.
#![allow(unsafe_code)]

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::UnixStream;

use vm_accel::conformance;
use vm_accel::programs::{Program, SOURCE};
use vm_guest::GuestAccelerator;
use vm_ir::{Trust, validate};
use vm_paravirt_guest::linux::{Stream, Window};
use vm_runtime::GuestJITCompiler;

use super::*;
use crate::accelerator::WorkerProcess;
use crate::process::ChildProgram;
use crate::vmm::Stop;

/// Room for what the suite has pinned at once.
const WINDOW: u64 = 512 << 20;
const MEMORY: u64 = 256 << 20;

#[test]
#[ignore = "it is the process that the other tests start"]
fn a_worker() {
    crate::accelerator::worker_main().unwrap();
}

/// A worker on the processor, and its guest's window.
struct Host {
    worker: WorkerProcess,
    window: File,
}

impl Host {
    fn new(deadline: Duration) -> Self {
        let window = File::from(rustix::fs::memfd_create("window", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        window.set_len(WINDOW).unwrap();
        let open = Open {
            device: "cpu".into(),
            memory: MEMORY,
            deadline_us: deadline.as_micros() as u64,
            measures: Measures { user: true, files: true },
            ram: vec![(0, WINDOW)],
            ..orders(Some(1))
        };
        let test = "accelerator::worker::tests::guest::a_worker";
        let arguments = ["--exact", test, "--ignored", "--nocapture", "--test-threads=1"];
        let path = std::env::current_exe().unwrap();
        let program = ChildProgram { path, arguments: arguments.map(Into::into).to_vec() };
        let (stop, meter) = (Stop::new().unwrap(), Meter::new().unwrap());
        let made = WorkerProcess::spawn(&program, &open, &[window.as_fd()], &meter, &stop);
        let (worker, _) = made.unwrap_or_else(|error| panic!("{error}"));
        Self { worker, window }
    }

    /// As a program of its guest finds it.
    fn accelerator(self: &Arc<Self>) -> Arc<GuestAccelerator> {
        let path = format!("/proc/self/fd/{}", self.window.as_raw_fd());
        let window = Window::open(path, WINDOW).unwrap();
        let host = Arc::clone(self);
        let connect = move || {
            let (ours, theirs) = UnixStream::pair().unwrap();
            host.worker.connect(theirs.as_fd()).unwrap();
            Stream::new(ours.into())
        };
        Arc::new(GuestAccelerator::over(window, connect).unwrap())
    }
}

fn program(accelerator: &Arc<GuestAccelerator>, program: Program) -> Artifact {
    let valid = validate(vm_ir::text::parse(SOURCE).unwrap(), Trust::Guest).unwrap();
    let name = if program == Program::Broken { Program::Add.name() } else { program.name() };
    let kernels = GuestJITCompiler::new(accelerator.clone()).compile_module(&valid).unwrap();
    let artifact = kernels.iter().find(|kernel| kernel.name() == name).unwrap().artifact();
    if program != Program::Broken {
        return artifact.clone();
    }
    let half = &artifact.image()[..artifact.image().len() / 2];
    // SAFETY: it can't be loaded.
    unsafe { Artifact::new(half, artifact.signature().clone()) }.unwrap()
}

#[test]
fn it_conforms() {
    let host = Arc::new(Host::new(Duration::from_secs(20)));
    let accelerator = host.accelerator();
    println!("{:?}", accelerator.info());
    let cases = conformance::check(&accelerator, &|which| program(&accelerator, which));
    assert_eq!(cases, conformance::CASES);
}
