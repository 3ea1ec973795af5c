//! Guarded launches on the simulated accelerator: stopped when they are out of fuel or time, and only then.
#![cfg(not(loom))]

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use vm_accel::fake::FakeAccelerator;
use vm_accel::programs::Program;
use vm_accel::{
    Buffer, Error, Kernel, Launch, Limits, QueueOptions, Session, Worker, WorkerOptions, arguments,
};

const TIMEOUT: Duration = Duration::from_secs(20);
const FOREVER: u64 = u64::MAX;

struct Fixture {
    device: Arc<FakeAccelerator>,
    worker: Worker<FakeAccelerator>,
    spin: Kernel<FakeAccelerator>,
    output: Buffer<FakeAccelerator>,
}

fn fixture(options: WorkerOptions) -> Fixture {
    let device = Arc::new(FakeAccelerator::new());
    let worker = Worker::start(Arc::clone(&device), options).unwrap();
    let spin = worker.load(&FakeAccelerator::artifact(Program::Spin)).unwrap();
    let output = worker.allocate_zeroed(4).unwrap();
    Fixture { device, worker, spin, output }
}

fn limits(fuel: u64, time: Duration) -> Launch {
    Launch::over(1).within(Limits { fuel, time })
}

fn soon() -> Instant {
    Instant::now() + TIMEOUT
}

impl Fixture {
    fn launch(&self, turns: u64, launch: Launch) {
        self.worker.launch(&self.spin, launch, &arguments![&self.output, turns]).unwrap();
    }

    fn output(&self) -> u32 {
        let mut value = [0u32];
        self.worker.read(&self.output, &mut value).unwrap();
        value[0]
    }
}

fn out_of_fuel(fuel: u64) -> Result<(), Error> {
    Err(Error::OutOfFuel { kernel: "spin".into(), fuel })
}

fn too_late(limit: Duration) -> Result<(), Error> {
    Err(Error::DeadlineExceeded { kernel: "spin".into(), limit })
}

#[test]
fn rounds_and_time_are_limits_and_the_wait_says_which_was_passed() {
    let short = Duration::from_millis(10);
    let it = fixture(WorkerOptions::default());
    let check = |turns: u64, launch: Launch, want: Result<(), Error>| {
        it.worker.fill(&it.output, 0).unwrap();
        it.launch(turns, launch);
        assert_eq!(it.worker.synchronize(TIMEOUT), want, "{turns} {launch:?}");
        assert_eq!(it.output(), u32::from(want.is_ok()));
        it.worker.fill(&it.output, 0).unwrap();
        let job = it.worker.launch_job(&it.spin, launch, &arguments![&it.output, turns]).unwrap();
        assert_eq!(job.wait(soon()), want, "its own ticket says so too");
        assert_eq!(it.worker.synchronize(TIMEOUT), want);
        assert_eq!(it.worker.synchronize(TIMEOUT), Ok(()), "it is said once");
    };
    check(10, limits(1000, TIMEOUT), Ok(()));
    check(10, Launch::over(1), Ok(()));
    check(5000, limits(5000, TIMEOUT), Ok(()));
    check(5001, limits(5000, TIMEOUT), out_of_fuel(5000));
    check(FOREVER, limits(1 << 61, short), too_late(short));
    check(1, limits(0, TIMEOUT), out_of_fuel(0));
    it.worker.stop(TIMEOUT).unwrap();
}

#[test]
fn a_launch_behind_one_that_is_stopped_is_not() {
    let it = fixture(WorkerOptions::default());
    let job = |turns: u64, time: Duration| {
        let launch = limits(1 << 61, time);
        it.worker.launch_job(&it.spin, launch, &arguments![&it.output, turns]).unwrap()
    };
    let short = Duration::from_millis(10);
    let (first, second) = (job(FOREVER, short), job(3000, TIMEOUT));
    let (third, fourth) = (job(FOREVER, short), job(3000, TIMEOUT));
    assert_eq!(first.wait(soon()), too_late(short));
    assert_eq!(second.wait(soon()), Ok(()));
    assert_eq!(third.wait(soon()), too_late(short));
    assert_eq!(fourth.wait(soon()), Ok(()));
    assert_eq!(it.worker.synchronize(TIMEOUT), too_late(short), "the first error of all");
    assert_eq!(it.output(), 1);
    it.worker.stop(TIMEOUT).unwrap();
}

#[test]
fn the_time_passes_while_the_worker_is_busy_or_waits() {
    let short = Duration::from_millis(10);
    let it = fixture(WorkerOptions::default());
    // It waits: nothing comes in between.
    let arguments = arguments![&it.output, FOREVER];
    let waited = it.worker.submit_and_wait(soon(), |session: &Session<_>| {
        session.launch(&it.spin, limits(1 << 61, short), &arguments)?;
        session.synchronize(soon())
    });
    assert_eq!(waited, Ok(()));
    assert_eq!(it.worker.synchronize(TIMEOUT), too_late(short));
    // It is busy: the cancel flag is set by the time it polls.
    it.launch(FOREVER, limits(1 << 61, short));
    let (release, wait) = channel::<()>();
    let job = it.worker.submit(move |_| wait.recv().map_err(|_| Error::Cancelled)).unwrap();
    std::thread::sleep(5 * short);
    let start = Instant::now();
    release.send(()).unwrap();
    job.wait(soon()).unwrap();
    assert_eq!(it.worker.synchronize(TIMEOUT), too_late(short));
    assert!(start.elapsed() < TIMEOUT / 2);
    it.worker.stop(TIMEOUT).unwrap();
}

#[test]
fn cancel_flags_are_used_again() {
    let it = fixture(WorkerOptions::default());
    for round in 0..3 {
        for _ in 0..5000 {
            it.launch(1, limits(10, TIMEOUT));
        }
        it.launch(2000, limits(10, TIMEOUT));
        assert_eq!(it.worker.synchronize(TIMEOUT), out_of_fuel(10), "{round}");
    }
    // All of them wait, and the worker waits for one of them.
    it.device.pause();
    let (send, receive) = channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..5000 {
                it.launch(1, limits(10, TIMEOUT));
            }
            send.send(()).unwrap();
        });
        assert!(receive.recv_timeout(Duration::from_millis(200)).is_err(), "there are not that many");
        it.device.resume();
        receive.recv_timeout(TIMEOUT).unwrap();
    });
    assert_eq!(it.worker.synchronize(TIMEOUT), Ok(()));
    it.worker.stop(TIMEOUT).unwrap();
}

#[test]
fn graphs_keep_their_cancel_flags() {
    let time = Duration::from_millis(100);
    let it = fixture(WorkerOptions::default());
    let capture = |turns: u64, launch: Launch| {
        let arguments = arguments![&it.output, turns];
        it.worker.capture(|session| session.launch(&it.spin, launch, &arguments)).unwrap()
    };
    let bad = capture(5000, limits(100, TIMEOUT));
    let good = capture(5000, limits(5000, time));
    for _ in 0..3 {
        it.worker.fill(&it.output, 0).unwrap();
        it.worker.replay(&bad).unwrap();
        it.worker.replay(&bad).unwrap();
        assert_eq!(it.worker.synchronize(TIMEOUT), out_of_fuel(100));
        assert_eq!(it.output(), 0);
        it.worker.replay(&bad).unwrap();
        it.worker.replay(&good).unwrap();
        assert_eq!(it.worker.synchronize(TIMEOUT), out_of_fuel(100));
        assert_eq!(it.output(), 1, "one graph's cancel flags are not another's");
    }
    // A graph that was stopped for its time can be replayed.
    it.device.pause();
    it.worker.fill(&it.output, 0).unwrap();
    it.worker.replay(&good).unwrap();
    it.worker.replay(&good).unwrap();
    std::thread::sleep(2 * time);
    it.device.resume();
    assert_eq!(it.worker.synchronize(TIMEOUT), too_late(time));
    assert_eq!(it.output(), 0, "the replay behind it was stopped with it");
    it.worker.replay(&good).unwrap();
    assert_eq!(it.worker.synchronize(TIMEOUT), Ok(()));
    assert_eq!(it.output(), 1);
    // Graphs that are gone release their cancel flags.
    for _ in 0..3 {
        let many = it.worker.capture(|session| {
            let arguments = arguments![&it.output, 1u64];
            (0..2000).try_for_each(|_| session.launch(&it.spin, 1, &arguments))
        });
        let many = many.unwrap();
        it.worker.replay(&many).unwrap();
        drop(many);
        it.worker.synchronize(TIMEOUT).unwrap();
        it.worker.synchronize(TIMEOUT).unwrap();
    }
    let too_many = it.worker.capture(|session| {
        let arguments = arguments![&it.output, 1u64];
        (0..5000).try_for_each(|_| session.launch(&it.spin, 1, &arguments))
    });
    assert!(matches!(too_many, Err(Error::Capturing { .. })), "{too_many:?}");
    it.launch(1, Launch::over(1));
    assert_eq!(it.worker.synchronize(TIMEOUT), Ok(()));
    it.worker.stop(TIMEOUT).unwrap();
}

#[test]
fn a_worker_that_stops_stops_what_loops() {
    let queue = QueueOptions { timeout: Duration::from_millis(300), ..QueueOptions::default() };
    let it = fixture(WorkerOptions { queue, ..WorkerOptions::default() });
    it.launch(FOREVER, limits(1 << 61, Duration::MAX));
    assert_eq!(it.worker.stop(TIMEOUT), too_late(Duration::MAX));
}

#[test]
fn a_lost_device_does_not_hang_what_is_guarded() {
    let it = fixture(WorkerOptions::default());
    let job = it.worker.launch_job(&it.spin, Launch::over(1), &arguments![&it.output, FOREVER]).unwrap();
    it.device.lose();
    assert!(job.wait(soon()).is_err_and(|error| error.is_lost()));
    assert!(it.worker.stop(TIMEOUT).is_err_and(|error| error.is_lost()));
}

#[test]
fn a_launch_that_has_not_begun_can_be_cancelled() {
    let it = fixture(WorkerOptions::default());
    let (release, wait) = channel::<()>();
    drop(it.worker.submit(move |_| wait.recv().map_err(|_| Error::Cancelled)).unwrap());
    let launch = || it.worker.launch_job(&it.spin, 1, &arguments![&it.output, 1u64]).unwrap();
    let job = launch();
    assert!(job.cancel());
    release.send(()).unwrap();
    assert_eq!(job.wait(soon()), Err(Error::Cancelled));
    assert_eq!((it.worker.synchronize(TIMEOUT), it.output()), (Ok(()), 0));
    let job = launch();
    it.worker.synchronize(TIMEOUT).unwrap();
    assert!(!job.cancel());
    assert_eq!((job.wait(soon()), it.output()), (Ok(()), 1));
    it.worker.stop(TIMEOUT).unwrap();
}
