//! What the worker costs, on the simulated accelerator: a launch on the caller's thread beside the packing of its
//! arguments, a job's round trip, and memory from the pool.
//!
//! `cargo bench -p vm-accel`

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use vm_accel::fake::FakeAccelerator;
use vm_accel::programs::Program;
use vm_accel::{Worker, WorkerOptions, arguments};

const TIMEOUT: Duration = Duration::from_secs(20);

fn worker(criterion: &mut Criterion) {
    let options = WorkerOptions { capacity: 4096, ..WorkerOptions::default() };
    let worker =
        Worker::<FakeAccelerator>::start(Arc::new(FakeAccelerator::new()), options).expect("a worker");
    let add = worker.load(&FakeAccelerator::artifact(Program::Add)).expect("a kernel");
    let (input, output) = (worker.allocate(4).expect("memory"), worker.allocate(4).expect("memory"));
    let mut launches = |name: &str| {
        criterion.bench_function(name, |bencher| {
            bencher.iter_custom(|count| {
                let mut time = Duration::ZERO;
                let mut left = count;
                while left > 0 {
                    // As many as fit, so that the caller never waits for room.
                    let now = left.min(2048);
                    let start = Instant::now();
                    for _ in 0..now {
                        worker.launch(&add, 1, &arguments![&input, &output, 1u32]).expect("a launch");
                    }
                    time += start.elapsed();
                    worker.synchronize(TIMEOUT).expect("a wait");
                    left -= now;
                }
                time
            });
        });
    };
    launches("launch, on the caller");
    criterion.bench_function("submit_and_wait, there and back", |bencher| {
        bencher.iter(|| worker.submit_and_wait(Instant::now() + TIMEOUT, |_| Ok(())).expect("a job"));
    });
    criterion.bench_function("allocate and free 2 MiB from the pool", |bencher| {
        bencher.iter(|| worker.allocate(2 << 20).expect("memory"));
    });
    drop((input, output));
    worker.stop(TIMEOUT).expect("a worker stops");
}

criterion_group!(benches, worker);
criterion_main!(benches);
