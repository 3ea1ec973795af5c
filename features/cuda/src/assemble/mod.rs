//! PTX to a cubin, in a process of its own with limits.
//!
//! Assemblers are closed programs of millions of lines. What a guest sent becomes PTX that they read, so they run
//! outside the caller's process, with a deadline, a limit on memory and on output, and no descriptors but their own.
//!
//! Two can be used:
//!
//! * NVIDIA's `ptxas`, which needs no GPU and some 10 ms for a small kernel; half of that if it was started before
//!   ([`Assembler::standby`]). [`Assembler::find`] looks for it.
//! * The driver's own linker, where there is no `ptxas`. It is a library and wants a context on a GPU, so the process
//!   around it must be a program of ours. No library knows where its user installs programs; so the user's own program
//!   has an entry for it, which calls [`entry`], and [`Assembler::driver`] is given the command that starts it. Some 300 ms, most
//!   of them for the context.
//!
//! What comes back is looked at before anyone gives it to a driver: an ELF file whose parts lie within it.

mod find;
mod job;
mod link;
mod process;
mod spawn;
mod standby;

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use thiserror::Error;

pub use find::VARIABLE;
pub use link::entry;

use crate::image;
use job::{Failed, Job, Kind, Order, Program, Written, failed};
use process::{Ended, Scratch};
use standby::Standby;

/// What an assembler's process may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Until it is killed; its processor time is limited to as much, in whole seconds.
    pub time: Duration,
    /// Bytes of memory: of address space for `ptxas`, and of data for the driver's linker, whose library reserves
    /// address space without using it.
    pub memory: u64,
    /// Bytes of each file that it writes: the cubin, the messages.
    pub output: u64,
}

impl Default for Limits {
    /// 20 seconds, 2 GiB of memory, 64 MiB of output.
    fn default() -> Self {
        Self { time: Duration::from_secs(20), memory: 2 << 30, output: 64 << 20 }
    }
}

/// Why PTX did not become a cubin.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AssembleError {
    /// There is no `ptxas`.
    #[error(
        "no ptxas in {}: install CUDA's compiler (Debian: nvidia-cuda-toolkit, NVIDIA's packages: cuda-nvcc-VERSION, \
         PyPI: nvidia-cuda-nvcc) or name the file in {VARIABLE}",
        places(.looked)
    )]
    Missing {
        /// Where it was looked for.
        looked: Vec<PathBuf>,
    },
    /// The architecture's name is none.
    #[error("{0:?} names no architecture: one is sm_ and a number, such as sm_90a")]
    Architecture(String),
    /// The process could not be started or waited for.
    #[error("{program}: {what} failed: {cause}")]
    Start {
        /// The program.
        program: String,
        /// What was tried.
        what: &'static str,
        /// The operating system's error.
        cause: String,
    },
    /// The assembler did not take it.
    #[error("{program} refused the code ({status}): {messages}")]
    Refused {
        /// The program.
        program: String,
        /// How it ended.
        status: String,
        /// What it said, cut after some kilobytes.
        messages: String,
    },
    /// It did not end in time, and was killed.
    #[error("{program} did not end in {time:?} and was killed: raise the limit, or make the kernel smaller")]
    Late {
        /// The program.
        program: String,
        /// The limit.
        time: Duration,
    },
    /// A signal ended it: it crashed, or met a limit that it did not look out for.
    #[error(
        "{program} was ended by signal {signal} ({}): {messages}; its limits were {limits:?}",
        signal_name(*.signal)
    )]
    Killed {
        /// The program.
        program: String,
        /// The signal's number.
        signal: i32,
        /// What it might have met.
        limits: Limits,
        /// What it said, cut after some kilobytes.
        messages: String,
    },
    /// It ended well, but what it wrote is no cubin.
    #[error("{program} ended well, but {reason}")]
    NoCubin {
        /// The program.
        program: String,
        /// What is wrong with its output.
        reason: String,
    },
}

fn places(looked: &[PathBuf]) -> String {
    let all: Vec<_> = looked.iter().map(|path| path.display().to_string()).collect();
    all.join(", ")
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        libc::SIGABRT => "it gave up, as without memory",
        libc::SIGBUS | libc::SIGSEGV => "it crashed, as without memory",
        libc::SIGKILL => "killed",
        libc::SIGXCPU => "its processor time was used up",
        libc::SIGXFSZ => "it wrote too much",
        _ => "it crashed",
    }
}

/// Makes cubins of PTX, in processes with limits. Any number of threads may use one. Clones share the processes that
/// wait ready.
#[derive(Clone, Debug)]
pub struct Assembler {
    program: Program,
    limits: Limits,
    level: u8,
    standby: Option<Arc<Standby>>,
}

impl Assembler {
    /// The machine's `ptxas`: the file that [`VARIABLE`] names, else that of `CUDA_HOME` or `CUDA_PATH`, in `PATH`, or
    /// where CUDA is usually installed.
    ///
    /// # Errors
    /// [`AssembleError::Missing`], with the places.
    pub fn find() -> Result<Self, AssembleError> {
        find::ptxas().map(Self::ptxas)
    }

    /// This `ptxas`.
    pub fn ptxas(program: impl Into<PathBuf>) -> Self {
        Self::new(program.into(), Kind::Ptxas)
    }

    /// The driver's linker, in a program that calls [`entry`] when it is started with `arguments`.
    pub fn driver(program: impl Into<PathBuf>, arguments: impl IntoIterator<Item = OsString>) -> Self {
        Self::new(program.into(), Kind::Driver(arguments.into_iter().collect()))
    }

    fn new(path: PathBuf, kind: Kind) -> Self {
        Self { program: Program { path, kind }, limits: Limits::default(), level: 3, standby: None }
    }

    /// Keeps up to `processes` of `ptxas` started, for the architecture that was last assembled for, so that code up to
    /// 64 KiB need not wait for a start. They are started in the background by [`prepare`](Self::prepare) and by each
    /// [`assemble`](Self::assemble), wait in some 14 MB each, and end after a minute without work and when the last clone
    /// of this is dropped. Two are enough for a thread that assembles one kernel after the other.
    ///
    /// Without effect on the driver's linker, which would hold a context on the GPU.
    #[must_use]
    pub fn standby(self, processes: usize) -> Self {
        let keeps = processes > 0 && self.program.kind == Kind::Ptxas;
        let standby = keeps.then(|| Arc::new(Standby::new(self.program.clone(), processes)));
        Self { standby, ..self }
    }

    /// With other limits.
    #[must_use]
    pub fn limits(self, limits: Limits) -> Self {
        Self { limits, ..self }
    }

    /// With a level of optimisation from 0 to 3; 3 without.
    #[must_use]
    pub fn level(self, level: u8) -> Self {
        Self { level: level.min(3), ..self }
    }

    /// The program that is run.
    pub fn program(&self) -> &std::path::Path {
        &self.program.path
    }

    /// Has the processes of [`standby`](Self::standby) started for `architecture`, and does not wait for them. Whether they
    /// can be used is seen when there is work; nothing depends on it but its speed.
    ///
    /// # Errors
    /// [`AssembleError::Architecture`].
    pub fn prepare(&self, architecture: &str) -> Result<(), AssembleError> {
        let order = self.order(architecture)?;
        if let Some(standby) = &self.standby {
            standby.prepare(&order);
        }
        Ok(())
    }

    /// What tells what this makes from what others do: the program, as it is now, and its options.
    pub fn identity(&self) -> String {
        let kind = match self.program.kind {
            Kind::Ptxas => "ptxas",
            Kind::Driver(_) => "driver",
        };
        let file = std::fs::metadata(self.program());
        let file = file.map(|file| (file.len(), file.mtime(), file.mtime_nsec())).unwrap_or_default();
        format!("{kind} O{} {}-{}.{}", self.level, file.0, file.1, file.2)
    }

    fn order(&self, architecture: &str) -> Result<Order, AssembleError> {
        let digits = architecture.strip_prefix("sm_").unwrap_or_default();
        if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Err(AssembleError::Architecture(architecture.to_owned()));
        }
        Ok(Order { architecture: architecture.to_owned(), level: self.level, limits: self.limits })
    }

    /// The cubin of this PTX for an architecture such as `sm_90a`, which must be the PTX's own or a newer one. The
    /// driver's linker needs a GPU of that architecture.
    ///
    /// # Errors
    /// [`AssembleError`], with what the assembler said. The process has ended by then, with all that it started.
    pub fn assemble(&self, ptx: &[u8], architecture: &str) -> Result<Vec<u8>, AssembleError> {
        let order = self.order(architecture)?;
        let now = Instant::now();
        // A time that no clock can count to is as good as a year.
        let deadline = now.checked_add(self.limits.time).unwrap_or(now + Duration::from_secs(365 * 86_400));
        let program = self.program().display().to_string();
        let host = |Failed { what, error }| AssembleError::Start {
            program: program.clone(),
            what,
            cause: error.to_string(),
        };
        let (ended, written) = self.run(&order, ptx, deadline).map_err(host)?;
        match ended {
            Ended::Well => {}
            Ended::Late => return Err(AssembleError::Late { program, time: self.limits.time }),
            Ended::Status(status) => {
                let (status, messages) = (format!("exit status {status}"), written.messages());
                return Err(AssembleError::Refused { program, status, messages });
            }
            Ended::Signal(signal) => {
                let (limits, messages) = (self.limits, written.messages());
                return Err(AssembleError::Killed { program, signal, limits, messages });
            }
        }
        let cubin = written.output(self.limits.output).map_err(host)?;
        let wrong = match image::is_elf(&cubin) {
            true => image::checked(&cubin).err(),
            false => Some(format!("what it wrote ({} bytes) is no cubin", cubin.len())),
        };
        match wrong {
            Some(reason) => Err(AssembleError::NoCubin { program, reason }),
            None => Ok(cubin),
        }
    }

    /// Has a process do it: one that waits, or else one that is started.
    fn run(&self, order: &Order, ptx: &[u8], deadline: Instant) -> Result<(Ended, Written), Failed> {
        let waiting = self.standby.as_deref().and_then(|all| Some((all, all.take(order, ptx, deadline)?)));
        let mut refused_by = None;
        if let Some((all, job)) = waiting {
            let done = job.end(deadline)?;
            match done.0 {
                Ended::Well => all.worked(),
                Ended::Late => {}
                Ended::Status(_) | Ended::Signal(_) => refused_by = Some(all),
            }
            if refused_by.is_none() {
                return Ok(done);
            }
        }
        // Nothing fails that would not fail otherwise: how a program takes its input is its own affair, and somebody may
        // have ended one that waited.
        let done = self.start(order, ptx)?.end(deadline)?;
        if let (Some(all), Ended::Well) = (refused_by, done.0) {
            all.failed("the code that it refused is right");
        }
        Ok(done)
    }

    /// Starts a process that has its input.
    fn start(&self, order: &Order, ptx: &[u8]) -> Result<Job, Failed> {
        let input = Scratch::new("ptx").map_err(failed("making its input"))?;
        input.fill(ptx).map_err(failed("making its input"))?;
        Job::start(&self.program, order, input.path(), Some(&input))
    }
}
