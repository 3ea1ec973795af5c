//! Compiles the kernels of all variants, on as many threads as the machine has processors.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Instant;

use vm_accel::Artifact;

use super::{Task, TuneError, TuneEvent};
use crate::{JitCompiler, JitTarget};

/// Threads at most: each may have an assembler's process.
const THREADS: usize = 8;
/// The part of the limit after which what is not compiled is left out.
const PART: f64 = 0.6;

/// What became of a variant's kernels; `None` if it is not known in time.
pub(super) type Compiled = Option<Result<Vec<Artifact>, String>>;

/// A variant, and one of its kernels.
type Place = (usize, usize);

/// Kernels that are being compiled. Threads that are late end with the one that they are at.
pub(super) struct Compiling(mpsc::Receiver<(Place, Result<Artifact, String>)>);

/// Begins to compile.
pub(super) fn begin<A: JitTarget>(task: &Arc<Task>, compiler: &JitCompiler<A>) -> Compiling {
    let (sender, receiver) = mpsc::channel();
    let next = Arc::new(AtomicUsize::new(0));
    let of_variant =
        |(index, kernels): (usize, &Vec<_>)| (0..kernels.len()).map(move |number| (index, number));
    let places: Arc<[Place]> = task.kernels.iter().enumerate().flat_map(of_variant).collect();
    let processors = std::thread::available_parallelism().map_or(1, |number| number.get());
    for number in 0..processors.min(THREADS).min(places.len()) {
        let (task, compiler, sender) = (Arc::clone(task), compiler.clone(), sender.clone());
        let (next, places) = (Arc::clone(&next), Arc::clone(&places));
        let thread = std::thread::Builder::new().name(format!("tuner-{number}"));
        let started = thread.spawn(move || {
            loop {
                let place = places.get(next.fetch_add(1, Ordering::Relaxed));
                let over = task.options.cancel.is_cancelled() || Instant::now() >= task.part(PART);
                let Some(&(index, number)) = place.filter(|_| !over) else { return };
                let compiled = compiler.compile_kernel(task.kernels[index][number].clone());
                let result =
                    compiled.map(|kernel| kernel.artifact().clone()).map_err(|error| error.to_string());
                if sender.send(((index, number), result)).is_err() {
                    return;
                }
            }
        });
        if let Err(error) = started {
            // With one thread less, or none: then nothing is compiled in time.
            tracing::warn!(%error, "a thread that compiles could not be started");
        }
    }
    Compiling(receiver)
}

impl Compiling {
    /// Waits until all are compiled, or the time for it is up.
    pub(super) fn wait(self, task: &Task) -> Result<Vec<Compiled>, TuneError> {
        let mut all: Vec<Compiled> = task.kernels.iter().map(|_| None).collect();
        let mut parts: Vec<Vec<Option<Artifact>>> =
            task.kernels.iter().map(|kernels| vec![None; kernels.len()]).collect();
        let deadline = task.part(PART);
        // Short waits, so that who cancels is heard.
        let step = std::time::Duration::from_millis(10);
        while all.iter().any(Option::is_none) {
            task.cancelled()?;
            let left = deadline.saturating_duration_since(Instant::now());
            match self.0.recv_timeout(left.min(step)) {
                // The first of its kernels that is rejected decides.
                Ok(((index, _), _)) if all[index].is_some() => {}
                Ok(((index, number), result)) => {
                    let rejected = result.as_ref().err().cloned();
                    parts[index][number] = result.ok();
                    let whole = || parts[index].iter().cloned().collect::<Option<Vec<_>>>();
                    let Some(known) = rejected.clone().map(Err).or_else(|| whole().map(Ok)) else { continue };
                    task.tell(&TuneEvent::Compiled { name: task.names[index].clone(), rejected });
                    all[index] = Some(known);
                }
                Err(mpsc::RecvTimeoutError::Timeout) if !left.is_zero() => {}
                Err(_) => break,
            }
        }
        Ok(all)
    }
}
