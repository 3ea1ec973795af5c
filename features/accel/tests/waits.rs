//! Who waits for a job, from any thread, and what ends the wait: the deadline, the worker's end, a panic.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use vm_accel::{Error, Worker, WorkerOptions, deadline, fake::FakeAccelerator};

const TIMEOUT: Duration = Duration::from_secs(60);
const MOMENT: Duration = Duration::from_millis(20);

fn start() -> Worker<FakeAccelerator> {
    Worker::start(Arc::new(FakeAccelerator::new()), WorkerOptions::default()).unwrap()
}

fn soon() -> Instant {
    deadline(TIMEOUT)
}

/// What a job says when it begins, and what it waits for.
fn held() -> ((Sender<()>, Receiver<()>), (Sender<()>, Receiver<()>)) {
    (channel(), channel())
}

/// The job uses what it borrowed, so the wait is as long as it runs; what is behind it is taken back.
#[test]
fn a_borrowed_job_that_runs_is_waited_for_past_its_deadline() {
    let worker = start();
    let ((begun, runs), (go, gone)) = held();
    thread::scope(|scope| {
        let first = scope.spawn(|| {
            let mut local = 0;
            let result = worker.submit_and_wait(deadline(MOMENT), |_| {
                begun.send(()).unwrap();
                gone.recv_timeout(TIMEOUT).unwrap();
                local += 1;
                Ok(7)
            });
            (result, local)
        });
        runs.recv_timeout(TIMEOUT).unwrap();
        let behind = worker.submit_and_wait(deadline(2 * MOMENT), |_| Ok(()));
        assert!(matches!(behind, Err(Error::Deadline { .. })), "{behind:?}");
        assert!(!first.is_finished(), "the job uses what it borrowed");
        go.send(()).unwrap();
        assert_eq!(first.join().unwrap(), (Ok(7), 1));
    });
    worker.stop(TIMEOUT).unwrap();
}

/// What borrows nothing goes on by itself: a thread that draws a user interface waits no longer than it says.
#[test]
fn a_submitted_job_that_runs_is_left_at_the_deadline() {
    let worker = start();
    let ((begun, runs), (go, gone)) = held();
    let (ended, end) = channel();
    let job = worker.submit(move |_| {
        begun.send(()).unwrap();
        gone.recv_timeout(TIMEOUT).unwrap();
        ended.send(()).unwrap();
        Ok(7)
    });
    let job = job.unwrap();
    runs.recv_timeout(TIMEOUT).unwrap();
    assert!(!job.ends_by(deadline(MOMENT)) && !job.cancel());
    let late = job.wait(deadline(MOMENT));
    assert!(matches!(late, Err(Error::Deadline { .. })), "{late:?}");
    go.send(()).unwrap();
    end.recv_timeout(TIMEOUT).expect("it runs to its end");
    worker.stop(TIMEOUT).unwrap();
}

/// Jobs that a stop finds waiting are run, and those that come later refused.
#[test]
fn a_worker_that_stops_meanwhile_answers_who_waits() {
    let worker = start();
    let ((begun, runs), (go, gone)) = held();
    drop(worker.submit(move |_| {
        begun.send(()).unwrap();
        Ok(gone.recv_timeout(TIMEOUT).unwrap())
    }));
    runs.recv_timeout(TIMEOUT).unwrap();
    let behind = worker.submit(|_| Ok(8)).unwrap();
    let stopped = worker.stop(MOMENT);
    assert!(matches!(stopped, Err(Error::Deadline { .. })), "{stopped:?}");
    assert_eq!(worker.submit_and_wait(soon(), |_| Ok(())), Err(Error::Stopped));
    thread::scope(|scope| {
        let waits = scope.spawn(|| behind.wait(soon()));
        go.send(()).unwrap();
        assert_eq!(waits.join().unwrap(), Ok(8));
    });
    worker.stop(TIMEOUT).unwrap();
    assert_eq!(worker.submit_and_wait(soon(), |_| Ok(())), Err(Error::Stopped));
}

/// Each thread that waits for a job that panics has the panic's message, and the worker goes on.
#[test]
fn a_panic_is_the_error_of_who_waits_for_it() {
    let worker = start();
    thread::scope(|scope| {
        for number in 0..8 {
            let worker = &worker;
            scope.spawn(move || {
                let failed =
                    worker.submit_and_wait(soon(), |_| -> vm_accel::Result<()> { panic!("number {number}") });
                assert_eq!(failed, Err(Error::Panicked { message: format!("number {number}") }));
                let job = worker.submit(move |_| -> vm_accel::Result<()> { panic!("job {number}") }).unwrap();
                assert_eq!(job.wait(soon()), Err(Error::Panicked { message: format!("job {number}") }));
                assert_eq!(worker.submit_and_wait(soon(), |_| Ok(number)), Ok(number));
            });
        }
    });
    worker.stop(TIMEOUT).unwrap();
}
