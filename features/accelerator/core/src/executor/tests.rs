//! The executor, checked with loom: every interleaving of a few threads, up to a bound on preemptions.
//!
//! `RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test -p vm-accel --profile quick --lib`
//!
//! loom has no clock: a deadline in the past has passed whenever somebody looks, one in the future never does. It takes
//! the modification order of an atomic for a partial one, so the executor writes only what a reader may see in any order
//! that fits: a compare-and-swap that fails writes nothing, where a swap would.

#[cfg(loom)]
#[allow(unsafe_code)]
mod interleavings {
    use std::sync::Mutex as Log;
    use std::time::{Duration, Instant};

    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use crate::error::Error;
    use crate::executor::{Executor, Idle, Refused};

    /// What the running thread owns: a log of what ran.
    type Seen = Log<Vec<u32>>;

    /// What a job borrows from its caller, though loom's cells are for one thread.
    struct Borrowed<'a>(&'a UnsafeCell<u32>);

    // SAFETY: loom checks that only one thread at a time is at it, which is what is tested.
    unsafe impl Send for Borrowed<'_> {}

    impl<'a> Borrowed<'a> {
        fn get(&self) -> &'a UnsafeCell<u32> {
            self.0
        }
    }

    fn model(preemptions: usize, f: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(preemptions);
        builder.check(f);
    }

    fn serve(executor: &Arc<Executor<Seen>>) -> thread::JoinHandle<Vec<u32>> {
        let executor = Arc::clone(executor);
        thread::spawn(move || {
            let seen = Seen::default();
            executor.run(&seen, || Idle::Sleep);
            seen.into_inner().unwrap()
        })
    }

    fn log(number: u32) -> impl FnOnce(&Seen) + Send + 'static {
        move |seen| seen.lock().unwrap().push(number)
    }

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(3600)
    }

    #[test]
    fn every_command_runs_once_and_the_sleeper_wakes() {
        model(2, || {
            let executor = Arc::new(Executor::new(4));
            let server = serve(&executor);
            let other = {
                let executor = Arc::clone(&executor);
                thread::spawn(move || assert!(executor.push(log(20)).is_ok()))
            };
            assert!(executor.push(log(10)).is_ok());
            other.join().unwrap();
            executor.close();
            let mut seen = server.join().unwrap();
            seen.sort_unstable();
            assert_eq!(seen, [10, 20]);
        });
    }

    #[test]
    fn a_full_ring_refuses_and_takes_again() {
        model(3, || {
            let executor = Arc::new(Executor::<Seen>::new(2));
            let server = serve(&executor);
            let mut taken = Vec::new();
            for number in 0..4 {
                match executor.push(log(number)) {
                    Ok(_) => taken.push(number),
                    Err((_, refused)) => assert_eq!(refused, Refused::Full),
                }
            }
            executor.close();
            assert!(matches!(executor.push(log(9)), Err((_, Refused::Closed))));
            assert_eq!(server.join().unwrap(), taken);
        });
    }

    #[test]
    fn a_command_is_taken_before_the_close_and_runs_or_is_refused() {
        model(3, || {
            let executor = Arc::new(Executor::new(2));
            let server = serve(&executor);
            let closer = {
                let executor = Arc::clone(&executor);
                thread::spawn(move || executor.close())
            };
            let taken = executor.push(log(1)).is_ok();
            closer.join().unwrap();
            assert_eq!(server.join().unwrap().len(), usize::from(taken));
        });
    }

    #[test]
    fn a_borrowed_job_ends_before_its_caller_goes_on() {
        model(3, || {
            let executor = Arc::new(Executor::<Seen>::new(2));
            let server = serve(&executor);
            let closer = {
                let executor = Arc::clone(&executor);
                thread::spawn(move || executor.close())
            };
            let mut local = 0;
            let result = executor.submit_and_wait(later(), |_| {
                local += 1;
                Ok(7)
            });
            assert!(matches!((local, result), (1, Ok(7)) | (0, Err(Error::Stopped))));
            closer.join().unwrap();
            server.join().unwrap();
        });
    }

    #[test]
    fn a_borrowed_job_whose_deadline_passes_is_taken_back_or_ends_first() {
        model(3, || {
            let executor = Arc::new(Executor::<Seen>::new(2));
            let server = serve(&executor);
            // loom sees it if both threads are at it at once.
            let local = UnsafeCell::new(0);
            let borrowed = Borrowed(&local);
            let result = executor.submit_and_wait(Instant::now(), move |_| {
                borrowed.get().with_mut(|local| {
                    // SAFETY: loom checks that nobody else is here.
                    unsafe { *local += 1 }
                });
                Ok(7)
            });
            // SAFETY: as above.
            let ran = local.with_mut(|local| unsafe { *local });
            match result {
                Ok(7) => assert_eq!(ran, 1),
                Err(Error::Deadline { .. }) => assert_eq!(ran, 0),
                other => panic!("{other:?}"),
            }
            executor.close();
            server.join().unwrap();
        });
    }

    #[test]
    fn a_borrowed_job_that_fails_has_ended_too() {
        model(2, || {
            let executor = Arc::new(Executor::<Seen>::new(2));
            let server = serve(&executor);
            let mut local = 0;
            let result = executor.submit_and_wait(later(), |_| -> Result<(), Error> {
                local += 1;
                Err(Error::Cancelled)
            });
            assert_eq!((local, result), (1, Err(Error::Cancelled)));
            executor.close();
            server.join().unwrap();
        });
    }

    #[test]
    fn two_callers_share_a_small_ring_and_each_keeps_its_order() {
        model(1, || {
            let executor = Arc::new(Executor::<Seen>::new(2));
            let server = serve(&executor);
            let other = {
                let executor = Arc::clone(&executor);
                thread::spawn(move || usize::from(executor.push(log(20)).is_ok()))
            };
            let mine = [10, 11].map(|number| usize::from(executor.push(log(number)).is_ok()));
            let taken = mine[0] + mine[1] + other.join().unwrap();
            executor.close();
            let seen = server.join().unwrap();
            assert_eq!(seen.len(), taken);
            assert!(
                seen.windows(2).all(|pair| pair[0] / 10 != pair[1] / 10 || pair[0] < pair[1]),
                "{seen:?}"
            );
        });
    }

    #[test]
    fn a_job_is_cancelled_or_runs_but_not_both() {
        model(3, || {
            let executor = Arc::new(Executor::new(2));
            let server = serve(&executor);
            let job = executor
                .submit(|seen: &Seen| {
                    seen.lock().unwrap().push(1);
                    Ok(())
                })
                .unwrap();
            let cancelled = job.cancel();
            let result = job.wait(later());
            assert_eq!(result, if cancelled { Err(Error::Cancelled) } else { Ok(()) });
            executor.close();
            assert_eq!(server.join().unwrap().len(), usize::from(!cancelled));
        });
    }

    #[test]
    fn a_command_that_never_runs_is_dropped_and_its_job_says_so() {
        model(3, || {
            let executor = Executor::<Seen>::new(2);
            let job = executor.submit(|_: &Seen| Ok(1)).unwrap();
            drop(executor);
            assert_eq!(job.wait(later()), Err(Error::Stopped));
        });
    }
}
