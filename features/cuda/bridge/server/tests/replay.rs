//! Recordings of real programs, replayed: `tests/recordings`, which `tests/record` made.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use vm_bridge::recording::{Recording, ReplayError, Report, replay};
use vm_bridge::server::{Driver, Session, serve};

/// Keeps the driver's library built.
use vm_cuda_fake as _;

/// The driver's contexts are the process's: one program at a time has them.
static DRIVER: Mutex<()> = Mutex::new(());

fn played(recording: &Recording) -> Result<Report, ReplayError> {
    let _alone = DRIVER.lock().unwrap_or_else(PoisonError::into_inner);
    let path = std::env::current_exe().expect("the test's path").with_file_name("libvm_cuda_fake.so");
    let session = Arc::new(Session::new(Arc::new(Driver::open(&path).expect("the driver"))));
    let (ours, theirs) = UnixStream::pair().expect("a connection");
    let server = std::thread::spawn(move || drop(serve(&theirs, &session)));
    let report = replay(&ours, recording);
    drop(ours);
    server.join().expect("the server");
    report
}

fn read(name: &str) -> Recording {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recordings").join(name);
    let bytes = std::fs::read(&path).expect("a recording");
    Recording::read(&bytes).expect("a recording")
}

#[test]
fn a_program_of_the_runtime_is_answered_as_when_it_was_recorded() {
    let report = played(&read("runtime")).expect("a report");
    assert_eq!((report.differences, report.different), (vec![], 0));
    assert!(report.calls > 50 && report.answers > 30, "{} {}", report.calls, report.answers);
}

/// A program that a recording only claims: calls that are none, without answers, of lanes that nobody began.
#[test]
fn a_recording_that_no_program_made_is_a_report_or_an_error() {
    let good = read("runtime");
    let mut changed = good.clone();
    for (at, call) in changed.calls.iter_mut().enumerate() {
        call.lane = at as u64 % 7;
        call.payload.kept.truncate(at % 40);
        call.payload.len = call.payload.kept.len();
    }
    if let Ok(report) = played(&changed) {
        assert!(report.different > 0);
    }
    let mut backwards = good;
    backwards.calls.reverse();
    backwards.orders.clear();
    if let Ok(report) = played(&backwards) {
        assert!(report.different > 0);
    }
}

/// The server's end is an error, and no wait.
#[test]
fn a_server_that_is_gone_ends_a_replay() {
    let (ours, theirs) = UnixStream::pair().expect("a connection");
    drop(theirs);
    assert!(matches!(replay(&ours, &read("runtime")), Err(ReplayError::Begin(_))));
    let (ours, theirs) = UnixStream::pair().expect("a connection");
    ours.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    let server = std::thread::spawn(move || {
        use std::io::{Read as _, Write as _};
        // It says that it begins, and no more.
        let _ = (&theirs).read_exact(&mut [0; 32]).and_then(|()| (&theirs).write_all(&[0; 8]));
    });
    let error = replay(&ours, &read("runtime")).expect_err("an error");
    assert!(matches!(error, ReplayError::Begin(_) | ReplayError::Server { .. }), "{error}");
    server.join().expect("the server");
}
