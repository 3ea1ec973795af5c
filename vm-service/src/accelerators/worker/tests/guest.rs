//! The accelerator of a guest's programs (`vm-guest`) over streams to a worker, which is a process that is confined as any is: on the
//! processor, or on what `SHARED_DEVICE` names, as `[[accelerators]]` does.
#![allow(unsafe_code)]

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::UnixStream;

use vm_accel::conformance;
use vm_accel::programs::{Program, SOURCE};
use vm_accel::{Error, Session, View, arguments};
use vm_guest::GuestAccelerator;
use vm_ir::op::Axis;
use vm_ir::view::Access;
use vm_ir::{GuestAddr, IRBlock, Scalar, Trust, validate};
use vm_kernels::call::{Function as _, Operand};
use vm_kernels::softmax::Softmax;
use vm_paravirt_guest::Transport as _;
use vm_paravirt_guest::linux::{Part, Stream, Window};
use vm_runtime::{GuestJITCompiler, JitCompiler, JitTarget, resources};

use super::*;
use crate::accelerators::WorkerProcess;
use crate::os::process::ChildProgram;
use crate::vmm::Stop;

/// Room for what the suite has pinned at once.
const WINDOW: u64 = 512 << 20;
const MEMORY: u64 = 256 << 20;

#[test]
#[ignore = "it is the process that the other tests start"]
fn a_worker() {
    crate::accelerators::worker_main().unwrap();
}

/// A worker, and its guest's window.
struct Host {
    worker: WorkerProcess,
    window: File,
}

impl Host {
    fn new(deadline: Duration) -> Self {
        Self::of(deadline, MEMORY)
    }

    fn of(deadline: Duration, memory: u64) -> Self {
        let window = File::from(rustix::fs::memfd_create("window", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        window.set_len(WINDOW).unwrap();
        let open = Open {
            device: std::env::var("SHARED_DEVICE").unwrap_or_else(|_| "cpu".into()),
            memory,
            deadline_us: deadline.as_micros() as u64,
            unconfined: Vec::new(),
            ram: vec![(0, WINDOW)],
            ..orders(Some(1))
        };
        let test = "accelerators::worker::tests::guest::a_worker";
        let arguments = ["--exact", test, "--ignored", "--nocapture", "--test-threads=1"];
        let path = std::env::current_exe().unwrap();
        let program = ChildProgram { path, arguments: arguments.map(Into::into).to_vec() };
        let (stop, meter) = (Stop::new().unwrap(), Meter::new().unwrap());
        let made = WorkerProcess::spawn(&program, &open, &[window.as_fd()], &meter, &stop);
        let (worker, _) = made.unwrap_or_else(|error| panic!("{error}"));
        Self { worker, window }
    }

    fn connect(&self) -> Result<Stream, vm_paravirt_guest::Error> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.worker.connect(theirs.as_fd()).unwrap();
        Stream::new(ours.into())
    }

    fn window(&self) -> Window {
        Window::open(format!("/proc/self/fd/{}", self.window.as_raw_fd()), WINDOW).unwrap()
    }

    /// As a program of its guest finds it.
    fn accelerator(self: &Arc<Self>) -> Arc<GuestAccelerator> {
        let host = Arc::clone(self);
        Arc::new(GuestAccelerator::over(self.window(), move || host.connect()).unwrap())
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

fn start(host: &Arc<Host>) -> (Arc<GuestAccelerator>, Worker<GuestAccelerator>) {
    let accelerator = host.accelerator();
    let worker = Worker::start(accelerator.clone(), WorkerOptions::default()).unwrap();
    (accelerator, worker)
}

/// A kernel that a builder wrote, and a function of the library, behind one another.
#[test]
fn a_program_computes_as_on_the_host() {
    const ROWS: u64 = 64;
    const COLUMNS: u64 = 1000;
    let host = Arc::new(Host::new(Duration::from_secs(20)));
    let (accelerator, worker) = start(&host);
    let mut compiler = GuestJITCompiler::new(accelerator.clone());
    let block = IRBlock::new(GuestAddr(0x1000));
    let k = block.builder();
    k.name("halve").block_size([256, 1, 1]);
    let x = k.view("x", Scalar::F32, 1, Access::ReadWrite);
    let i = k.global_id(Axis::X);
    k.if_(i.lt(x.extent(0)), || x.at([i]).store(x.at([i]).load() * 0.5));
    let halve = worker.load(compiler.compile(&block).unwrap().artifact()).unwrap();

    let given: Vec<f32> = (0..ROWS * COLUMNS).map(|i| (i * 37 % 1013) as f32 / 16.0 - 32.0).collect();
    let x = worker.upload(&given).unwrap();
    let y = worker.allocate_typed::<f32>(given.len()).unwrap();
    worker.launch(&halve, (given.len() as u32).div_ceil(256), &arguments![&x]).unwrap();
    let call = Softmax::of(ROWS, COLUMNS, Scalar::F32).call(&resources(accelerator.info())).unwrap();
    for launch in &call.launches {
        let kernel = launch.entry.kernel(GuestAddr(0)).unwrap();
        let kernel = worker.load(compiler.compile_kernel(kernel).unwrap().artifact()).unwrap();
        let views = launch.operands.iter().map(|operand| {
            let Operand::Buffer(number, region) = operand else { panic!("{operand:?}") };
            let buffer = [&x, &y][*number];
            View::from(buffer).shaped(&region.extents).unwrap().into()
        });
        worker.launch(&kernel, launch.grid, &views.collect::<Vec<_>>()).unwrap();
    }
    let found = worker.download(&y).unwrap();
    for (x, y) in given.chunks(COLUMNS as usize).zip(found.chunks(COLUMNS as usize)) {
        let sum: f64 = x.iter().map(|x| (f64::from(*x) / 2.0).exp()).sum();
        for (x, y) in x.iter().zip(y) {
            let expect = (f64::from(*x) / 2.0).exp() / sum;
            assert!((f64::from(*y) - expect).abs() < 1e-6, "{y} for {expect}");
        }
    }
}

#[test]
fn a_kernel_that_takes_too_long_is_an_error_and_the_next_one_runs() {
    const LIMIT: Duration = Duration::from_secs(1);
    let host = Arc::new(Host::new(LIMIT));
    let (accelerator, worker) = start(&host);
    let load = |which| worker.load(&program(&accelerator, which)).unwrap();
    let (spin, bump) = (load(Program::Spin), load(Program::Bump));
    let data = worker.allocate_zeroed(4).unwrap();
    let late = Err(Error::DeadlineExceeded { kernel: spin.entry().into(), limit: LIMIT });
    let soon = Duration::from_secs(60);
    for round in 1..=2u32 {
        worker.launch(&spin, 1, &arguments![&data, 1u64 << 60]).unwrap();
        worker.launch(&bump, 1, &arguments![&data, 1u32]).unwrap();
        assert_eq!(worker.synchronize(soon), late, "round {round}");
        assert_eq!(worker.synchronize(soon), Ok(()), "it is said once");
        let mut count = [0u32];
        worker.read(&data, &mut count).unwrap();
        assert_eq!(count, [round], "what is behind it runs");
    }
    let job = worker.launch_job(&spin, 1, &arguments![&data, 1u64 << 60]).unwrap();
    assert_eq!(job.wait(Instant::now() + soon), late);
}

#[test]
fn the_end_of_a_worker_is_the_loss_of_its_context() {
    let host = Arc::new(Host::new(Duration::from_secs(20)));
    let (accelerator, worker) = start(&host);
    let spin = worker.load(&program(&accelerator, Program::Spin)).unwrap();
    let data = worker.allocate_zeroed(4).unwrap();
    let job = worker.launch_job(&spin, 1, &arguments![&data, 1u64 << 60]).unwrap();
    let process = rustix::process::Pid::from_raw(host.worker.id().cast_signed()).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    let ended = job.wait(Instant::now() + Duration::from_secs(60));
    assert!(matches!(&ended, Err(error) if error.is_lost()), "{ended:?}");
    let after = worker.allocate(4096);
    assert!(matches!(&after, Err(error) if error.is_lost()), "{after:?}");
}

/// The client of the protocol by itself, with a module, and a buffer of the device and one in the window.
struct Client {
    stream: Stream,
    part: Part,
}

impl Client {
    const BYTES: u64 = 64 << 20;

    fn new(host: &Host, code: &[u8]) -> Self {
        let part = host.window().take(Self::BYTES).unwrap();
        let range = part.range(0, Self::BYTES).unwrap();
        let mut this = Self { stream: host.connect().unwrap(), part };
        this.call(|batch| {
            batch.create_module(1, code)?;
            batch.create_buffer(1, Self::BYTES)?;
            batch.import_buffer(2, &[range])?;
            batch.fence()
        });
        this
    }

    fn call(&mut self, fill: impl FnOnce(&mut BatchWriter<'_>) -> Result<(), NoRoom>) {
        let mut frame = self.stream.frame();
        let mut batch = frame.batch().unwrap();
        fill(&mut batch).unwrap();
        let bytes = batch.finish();
        let frame = self.stream.call(frame, bytes).unwrap();
        frame.reply().unwrap().check().unwrap();
    }

    /// Launches a kernel so often, in batches of some hundreds, of which the next is sent before the one before is answered.
    fn launches(&mut self, kernel: u32, count: u32) {
        let mut under_way = 0;
        for first in (0..count).step_by(512) {
            let mut frame = self.stream.frame();
            let mut batch = frame.batch().unwrap();
            for _ in first..count.min(first + 512) {
                let arguments = [Argument::view(1, 0, &[1]).unwrap(), Argument::i32(1)];
                batch.launch(1, kernel, [1; 3], &arguments).unwrap();
            }
            if first + 512 >= count {
                batch.fence().unwrap();
            }
            let bytes = batch.finish();
            self.stream.submit(frame, bytes).map_err(|(error, _)| error).unwrap();
            under_way += 1;
        }
        for _ in 0..under_way {
            self.stream.wait().unwrap().1.reply().unwrap().check().unwrap();
        }
    }
}

/// The median of some runs.
fn median(mut run: impl FnMut()) -> Duration {
    let mut times: Vec<_> = (0..9)
        .map(|_| {
            let begun = Instant::now();
            run();
            begun.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[times.len() / 2]
}

#[test]
#[ignore = "it measures: run it by itself, with --release and --nocapture"]
fn figures() {
    const LAUNCHES: u32 = 20_000;
    let host = Arc::new(Host::new(Duration::from_secs(20)));
    let accelerator = host.accelerator();
    let artifact = program(&accelerator, Program::Bump);
    let kernels = vm_ir::binary::decode(artifact.image()).unwrap();
    let number =
        kernels.kernels().iter().position(|kernel| kernel.name() == artifact.entry()).unwrap() as u32;
    let mut client = Client::new(&host, artifact.image());

    let session = Session::open(accelerator, WorkerOptions::default()).unwrap();
    let kernel = session.load(&artifact).unwrap();
    let (one, large) = (session.allocate(4).unwrap(), session.allocate(Client::BYTES).unwrap());
    let soon = || Instant::now() + Duration::from_secs(60);
    let arguments = arguments![&one, 1u32];
    let mut bytes = vec![1u8; Client::BYTES as usize];
    let show = |what: &str, raw: Duration, ours: Duration| {
        println!("{what}: the client {raw:?}, the accelerator {ours:?}");
    };
    let alone = |batch: &mut BatchWriter<'_>| {
        batch.launch(1, number, [1; 3], &[Argument::view(1, 0, &[1])?, Argument::i32(1)])?;
        batch.fence()
    };
    let raw = median(|| (0..1000).for_each(|_| client.call(alone)));
    let ours = median(|| {
        for _ in 0..1000 {
            session.launch(&kernel, 1, &arguments).unwrap();
            session.synchronize(soon()).unwrap();
        }
    });
    show("a launch that is waited for", raw / 1000, ours / 1000);
    let raw = median(|| client.launches(number, LAUNCHES));
    let ours = median(|| {
        (0..LAUNCHES).for_each(|_| session.launch(&kernel, 1, &arguments).unwrap());
        session.synchronize(soon()).unwrap();
    });
    show("a launch of many", raw / LAUNCHES, ours / LAUNCHES);
    let raw = median(|| {
        client.part.write(0, &bytes).unwrap();
        client.call(|batch| {
            batch.copy((1, 0), (2, 0), Client::BYTES)?;
            batch.fence()
        });
    });
    let ours = median(|| {
        session.write(&large, &bytes).unwrap();
        session.synchronize(soon()).unwrap();
    });
    show("64 MiB to the device", raw, ours);
    let raw = median(|| {
        client.call(|batch| {
            batch.copy((2, 0), (1, 0), Client::BYTES)?;
            batch.fence()
        });
        client.part.read(0, &mut bytes).unwrap();
    });
    let ours = median(|| session.read(&large, &mut bytes).unwrap());
    show("64 MiB from the device", raw, ours);
}

/// Launches over so many elements of a device's memory, and waits; gives how long each took.
fn runner<A: JitTarget>(accelerator: Arc<A>, elements: u32) -> impl FnMut(u32) -> Duration {
    let block = IRBlock::new(GuestAddr(0x1000));
    let k = block.builder();
    k.name("axpy").block_size([256, 1, 1]);
    let x = k.view("x", Scalar::F32, 1, Access::Read);
    let y = k.view("y", Scalar::F32, 1, Access::ReadWrite);
    let i = k.global_id(Axis::X);
    k.if_(i.lt(x.extent(0)), || y.at([i]).store(x.at([i]).load() * 0.5 + y.at([i]).load()));
    let artifact = JitCompiler::new(accelerator.clone()).compile(&block).unwrap().artifact().clone();
    let worker = Worker::start(accelerator, WorkerOptions::default()).unwrap();
    let kernel = worker.load(&artifact).unwrap();
    let [x, y] = [(); 2].map(|()| worker.allocate_zeroed(4 * u64::from(elements)).unwrap());
    move |launches| {
        let begun = Instant::now();
        for _ in 0..launches {
            worker.launch(&kernel, elements.div_ceil(256), &arguments![&x, &y]).unwrap();
        }
        worker.synchronize(Duration::from_secs(60)).unwrap();
        begun.elapsed() / launches
    }
}

#[test]
#[ignore = "it measures: run it by itself, with --release and --nocapture"]
fn figures_beside_the_host() {
    let host = Arc::new(Host::of(Duration::from_secs(20), 2 << 30));
    for (elements, launches) in
        [(1 << 26, 1), (1 << 26, 8), (1 << 22, 1), (1 << 16, 1), (256, 1), (256, 1000)]
    {
        let mut guest = runner(host.accelerator(), elements);
        let mut direct = runner(Arc::new(vm_passthrough::CpuAccelerator::new().unwrap()), elements);
        let mut times: [Vec<Duration>; 2] = Default::default();
        for _ in 0..31 {
            times[0].push(direct(launches));
            times[1].push(guest(launches));
        }
        let [host, guest] = times.map(|mut times| {
            times.sort_unstable();
            times[times.len() / 2]
        });
        let ratio = host.as_secs_f64() / guest.as_secs_f64();
        println!("{launches} of {elements}: {host:?} on the host, {guest:?} in a guest: {ratio:.3}");
    }
}
