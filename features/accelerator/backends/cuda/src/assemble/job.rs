//! What an assembler is started with.

use std::ffi::OsString;
use std::path::PathBuf;

use vm_assemble::{Job, Limits, Memory, Scratch, failed};

use super::AssembleError;

/// What is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Program {
    pub(super) path: PathBuf,
    pub(super) kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Ptxas,
    /// With what comes before the arguments of [`entry`](super::entry).
    Driver(Vec<OsString>),
}

/// What it is to make, whatever the code is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Order {
    pub(super) architecture: String,
    pub(super) level: u8,
    pub(super) limits: Limits,
}

/// Starts the program. It opens `input` by its name; `given` is open in it.
pub(super) fn start(
    program: &Program,
    order: &Order,
    input: OsString,
    given: &[&Scratch],
) -> Result<Job, AssembleError> {
    let output = Scratch::new("cubin").map_err(failed(&program.path, "making its output"))?;
    let (architecture, level) = (order.architecture.as_str(), order.level.to_string());
    let mut arguments = Vec::new();
    let (memory, environment) = match &program.kind {
        Kind::Ptxas => {
            arguments.extend(["--gpu-name", architecture, "--opt-level", &level].map(OsString::from));
            arguments.extend(["--output-file".into(), output.path(), input]);
            (Memory::Space, Vec::new())
        }
        Kind::Driver(before) => {
            arguments.extend(before.iter().cloned());
            arguments.extend([architecture.into(), level.into(), input, output.path()]);
            // The driver's library reserves address space without using it.
            (Memory::Data, driver_environment())
        }
    };
    let program = vm_assemble::Program {
        path: &program.path,
        arguments,
        environment,
        memory,
        prints: false,
        limits: order.limits,
    };
    Job::start(program, output, given)
}

/// What leads the driver's library to where this process found it, and to the same devices.
fn driver_environment() -> Vec<(OsString, OsString)> {
    let kept =
        |name: &str| name == "LD_LIBRARY_PATH" || name.starts_with("CUDA_") || name.starts_with("NVIDIA_");
    std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(kept)).collect()
}
