//! Who waits for a job, from any thread, and what ends the wait: the deadline, the worker's end, a panic.
#![cfg(not(loom))]

use std::sync::Arc;
use std::sync::mpsc::channel;
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

/// What borrows nothing goes on by itself: a thread that draws a user interface waits no longer than it says.
#[test]
fn a_submitted_job_that_runs_is_left_at_the_deadline() {
    let worker = start();
    let ((begun, runs), (go, gone)) = (channel(), channel());
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
    let ((begun, runs), (go, gone)) = (channel(), channel());
    drop(worker.submit(move |_| {
        begun.send(()).unwrap();
        let () = gone.recv_timeout(TIMEOUT).unwrap();
        Ok(())
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
