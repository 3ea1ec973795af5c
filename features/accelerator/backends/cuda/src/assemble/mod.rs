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
mod standby;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use vm_assemble::{Job, Scratch, failed};

pub use find::VARIABLE;
pub use link::entry;
pub use vm_assemble::{AssembleError, Limits, end_all};

use crate::image;
use job::{Kind, Order, Program};
use standby::Standby;

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

    /// With other limits. That on memory is on address space for `ptxas`, and on data for the driver's linker.
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
        format!("{kind} O{} {}", self.level, vm_assemble::find::identity(self.program()))
    }

    fn order(&self, architecture: &str) -> Result<Order, AssembleError> {
        let digits = architecture.strip_prefix("sm_").unwrap_or_default();
        if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            let wanted = "one is sm_ and a number, such as sm_90a";
            return Err(AssembleError::Architecture { name: architecture.to_owned(), wanted });
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
        let written = self.run(&order, ptx, self.limits.deadline())?;
        let cubin = written.read(self.limits.output).map_err(failed(self.program(), "reading its output"))?;
        let wrong = match image::is_elf(&cubin) {
            true => image::checked(&cubin).err(),
            false => Some(format!("what it wrote ({} bytes) is no cubin", cubin.len())),
        };
        match wrong {
            Some(reason) => {
                Err(AssembleError::NoCode { program: self.program().display().to_string(), reason })
            }
            None => Ok(cubin),
        }
    }

    /// Has a process do it: one that waits, or else one that is started.
    fn run(&self, order: &Order, ptx: &[u8], deadline: Instant) -> Result<Scratch, AssembleError> {
        let waiting = self.standby.as_deref().and_then(|all| Some((all, all.take(order, ptx, deadline)?)));
        let mut refused_by = None;
        if let Some((all, job)) = waiting {
            let done = job.end(deadline);
            match done {
                Ok(_) => all.worked(),
                Err(AssembleError::Refused { .. } | AssembleError::Killed { .. }) => refused_by = Some(all),
                Err(_) => {}
            }
            if refused_by.is_none() {
                return done;
            }
        }
        // Nothing fails that would not fail otherwise: how a program takes its input is its own affair, and somebody may
        // have ended one that waited.
        let done = self.start(order, ptx)?.end(deadline);
        if let (Some(all), Ok(_)) = (refused_by, &done) {
            all.failed("the code that it refused is right");
        }
        done
    }

    /// Starts a process that has its input.
    fn start(&self, order: &Order, ptx: &[u8]) -> Result<Job, AssembleError> {
        let input = Scratch::of("ptx", ptx).map_err(failed(self.program(), "making its input"))?;
        job::start(&self.program, order, input.path(), &[&input])
    }
}
