//! What every accelerator must do, as one suite: run [`check`] against an implementation.
//!
//! # What an implementation provides
//! - An [`Accelerator`] with its [`Queue`](crate::Queue). Memory of kind `Pinned` is a must; `Unified` and registered
//!   host memory are where [`DeviceInfo`](crate::DeviceInfo) says so, and so are guards.
//! - Every [`Program`], compiled for it: a function that gives the artifact. The signature is
//!   [`Program::signature`], but the entry, `shared_bytes` and the offsets of the parameters may differ.
//!
//! ```
//! use std::sync::Arc;
//! use vm_accel::{conformance, fake::FakeAccelerator};
//!
//! let accelerator = Arc::new(FakeAccelerator::new());
//! let cases = conformance::check(&accelerator, &FakeAccelerator::artifact);
//! assert!(cases >= conformance::CASES);
//! ```
//!
//! The suite panics at the first thing that is not as it must be, with the name of the case. It leaves nothing behind:
//! no memory, no thread, no lost context. What only a fault on the device shows is not in it, because that would end the
//! process's use of a real one; the simulated accelerator's own tests have it.

mod adopted;
mod graph;
mod guard;
mod launch;
mod queue;
mod registered;
mod streams;
mod turns;
mod worker;

use std::sync::Arc;
use std::time::{Duration, Instant};

pub use streams::events_between;
pub use turns::turns;

use crate::accelerator::Accelerator;
use crate::artifact::Artifact;
use crate::pool::PoolOptions;
use crate::programs::Program;
use crate::worker::{Worker, WorkerOptions};

/// How long anything here may take.
const TIMEOUT: Duration = Duration::from_secs(30);

/// How many cases there are.
pub const CASES: usize = 49;

/// Where the suite gets its programs from, compiled for the accelerator.
pub type Programs<'a> = &'a (dyn Fn(Program) -> Artifact + Sync);

type Case<A> = (&'static str, fn(&Arc<A>, Programs<'_>));

/// Runs every case, and gives how many there were.
///
/// # Panics
/// When the accelerator does not conform.
pub fn check<A: Accelerator>(accelerator: &Arc<A>, programs: Programs<'_>) -> usize {
    let cases: [Case<A>; CASES] = [
        ("info", queue::info),
        ("memory of each kind", queue::memory),
        ("copies between all kinds, at odd offsets", queue::copies),
        ("fills", queue::fills),
        ("events and their times", queue::events),
        ("streams of a context take turns", streams::turns),
        ("queues of two threads wait for each other's events", streams::threads),
        ("a stream known by its handle", streams::handles),
        ("a session without a worker, on borrowed memory", streams::session),
        ("streams of a session's scope", streams::scope),
        ("limits of memory, blocks and images", queue::limits),
        ("a launch by hand", launch::by_hand),
        ("grids of any size do all the work", launch::grids),
        ("launches that break what compilers assume", launch::refused),
        ("views of one to four dimensions", launch::ranks),
        ("views without elements", launch::empty),
        ("scalars of every size", launch::scalars),
        ("shared memory", launch::shared),
        ("blocks and threads know where they are", launch::ids),
        ("a launch that is waited for by itself", launch::jobs),
        ("batches of launches", launch::batches),
        ("batches that come again with other arguments", launch::batches_again),
        ("a cancel flag by hand", guard::by_hand),
        ("out of fuel", guard::fuel),
        ("out of time", guard::time),
        ("a launch behind one that is stopped", guard::behind),
        ("guarded graphs", guard::graphs),
        ("a guarded batch with one in it that is stopped", guard::batches),
        ("graphs keep what they use", graph::keep_what_they_use),
        ("graphs of many commands", graph::of_many_commands),
        ("registered host memory", registered::round_trip),
        ("graphs keep registered memory", registered::graphs_keep_it),
        ("registered memory goes back in order", registered::goes_back_in_order),
        ("batches keep no registered memory", registered::batches_keep_none),
        ("the end of a worker gives registered memory back", registered::ends_with_the_worker),
        ("adopted memory goes back to its owner in order", adopted::goes_back_in_order),
        ("the end of a worker gives adopted memory back", adopted::ends_with_the_worker),
        ("write, launch, read", worker::round_trip),
        ("large transfers", worker::large),
        ("a view's part", worker::views),
        ("memory is reused in order", worker::reuse),
        ("the pool's limits and statistics", worker::limits),
        ("zeroed memory", worker::zeroed),
        ("trim", worker::trim),
        ("errors", worker::errors),
        ("waits without an end", worker::waits_without_an_end),
        ("many threads", worker::threads),
        ("pinned and unified buffers", worker::host_kinds),
        ("the device's time for some work", worker::timed),
    ];
    for (name, case) in cases {
        println!("conformance of {}: {name}", accelerator.info().backend);
        case(accelerator, programs);
    }
    cases.len()
}

fn start<A: Accelerator>(accelerator: &Arc<A>, pool: PoolOptions) -> Worker<A> {
    let options = WorkerOptions { pool, ..WorkerOptions::default() };
    Worker::start(Arc::clone(accelerator), options).expect("a worker starts")
}

fn stop<A: Accelerator>(worker: &Worker<A>) {
    worker.stop(TIMEOUT).expect("a worker stops");
}

fn soon() -> Instant {
    Instant::now() + TIMEOUT
}

/// Numbers that differ in all their bytes.
fn numbers(count: u32) -> Vec<u32> {
    (0..count).map(|n| n.wrapping_mul(2_654_435_761)).collect()
}
