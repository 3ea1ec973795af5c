//! PTX to a cubin, in a process of its own with limits.
//!
//! Assemblers are closed programs of millions of lines. What a guest sent becomes PTX that they read, so they run
//! outside the caller's process, with a deadline, a limit on memory and on output, and no descriptors but their own.
//!
//! Two can be used:
//!
//! * NVIDIA's `ptxas`, which needs no GPU and some 10 ms for a small kernel. [`Assembler::find`] looks for it.
//! * The driver's own linker, where there is no `ptxas`. It is a library and wants a context on a GPU, so the process
//!   around it must be a program of ours. No library knows where its user installs programs; so the user's own program
//!   has an entry for it, which calls [`entry`], and [`Assembler::driver`] is told how to start it. Some 300 ms, most
//!   of them for the context.
//!
//! What comes back is looked at before anyone gives it to a driver: an ELF file whose parts lie within it.

mod find;
mod link;
mod process;
mod spawn;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

pub use find::VARIABLE;
pub use link::entry;

use crate::image;
use process::{Program, Scratch};

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

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Ptxas,
    /// With what comes before the arguments of [`entry`].
    Driver(Vec<OsString>),
}

/// Makes cubins of PTX, in processes with limits. Any number of threads may use one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assembler {
    program: PathBuf,
    kind: Kind,
    limits: Limits,
    level: u8,
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
        Self { program: program.into(), kind: Kind::Ptxas, limits: Limits::default(), level: 3 }
    }

    /// The driver's linker, in a program that calls [`entry`] when it is started with `arguments`.
    pub fn driver(program: impl Into<PathBuf>, arguments: impl IntoIterator<Item = OsString>) -> Self {
        let kind = Kind::Driver(arguments.into_iter().collect());
        Self { program: program.into(), kind, limits: Limits::default(), level: 3 }
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
        &self.program
    }

    /// The cubin of this PTX for an architecture such as `sm_90a`, which must be the PTX's own or a newer one. The
    /// driver's linker needs a GPU of that architecture.
    ///
    /// # Errors
    /// [`AssembleError`], with what the assembler said. The process has ended by then, with all that it started.
    pub fn assemble(&self, ptx: &[u8], architecture: &str) -> Result<Vec<u8>, AssembleError> {
        let digits = architecture.strip_prefix("sm_").unwrap_or_default();
        if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Err(AssembleError::Architecture(architecture.to_owned()));
        }
        let name = || self.program.display().to_string();
        let host = |what: &'static str| {
            move |error: std::io::Error| AssembleError::Start {
                program: name(),
                what,
                cause: error.to_string(),
            }
        };
        let input = Scratch::new("ptx").map_err(host("making its input"))?;
        input.fill(ptx).map_err(host("making its input"))?;
        let output = Scratch::new("cubin").map_err(host("making its output"))?;
        let messages = Scratch::new("messages").map_err(host("making its output"))?;

        let level = self.level.to_string();
        let mut arguments = Vec::new();
        match &self.kind {
            Kind::Ptxas => {
                arguments.extend(["--gpu-name", architecture, "--opt-level", &level].map(OsString::from));
                arguments.extend(["--output-file".into(), output.path(), input.path()]);
            }
            Kind::Driver(before) => {
                arguments.extend(before.iter().cloned());
                arguments.extend([architecture.into(), level.into(), input.path(), output.path()]);
            }
        }
        let program = Program {
            path: &self.program,
            arguments,
            reserves_memory: matches!(self.kind, Kind::Driver(_)),
            limits: self.limits,
        };
        let ended = process::run(&program, &[&input, &output], &messages).map_err(host("running it"))?;

        const MESSAGE_BYTES: u64 = 8 << 10;
        let said = || {
            let said = messages.read(MESSAGE_BYTES).unwrap_or_default();
            let said = String::from_utf8_lossy(&said).trim().to_owned();
            if said.is_empty() { "it said nothing".to_owned() } else { said }
        };
        match ended {
            process::Ended::Well => {}
            process::Ended::Late => {
                return Err(AssembleError::Late { program: name(), time: self.limits.time });
            }
            process::Ended::Status(status) => {
                let status = format!("exit status {status}");
                return Err(AssembleError::Refused { program: name(), status, messages: said() });
            }
            process::Ended::Signal(signal) => {
                let (program, limits, messages) = (name(), self.limits, said());
                return Err(AssembleError::Killed { program, signal, limits, messages });
            }
        }
        let no_cubin = |reason: String| AssembleError::NoCubin { program: name(), reason };
        let cubin = output.read(self.limits.output).map_err(host("reading its output"))?;
        if !image::is_elf(&cubin) {
            return Err(no_cubin(format!("what it wrote ({} bytes) is no cubin", cubin.len())));
        }
        image::checked(&cubin).map_err(no_cubin)?;
        Ok(cubin)
    }
}
