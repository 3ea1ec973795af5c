//! Large and deep random kernels through the code generator: what a compiler takes for them, and whether the code is right.

use super::Machine;
use std::time::{Duration, Instant};
use vm_ir::arbitrary::{Options, kernel};
use vm_ir::filetest::{Tolerance, compare};
use vm_ir::interp::{Launch, Limits, run};
use vm_ir::{Trust, ValidModule, validate};

/// What became of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Outcome {
    /// It computes what the interpreter does.
    Equal,
    /// It was compiled; to run it takes the interpreter too long.
    Compiled,
    /// The target or the validator refuses it.
    Refused,
}

/// How long the interpreter may take.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The kernel of a seed with about N statements: compiled, and compared with the interpreter.
///
/// # Errors
/// What is wrong.
pub(crate) fn check(machine: &Machine, seed: u64, statements: u32) -> Result<Outcome, String> {
    let (module, launch) = kernel(seed, Options::large(seed, statements));
    // There may be more values in it than a kernel can have.
    let Ok(valid) = validate(module, Trust::Guest) else { return Ok(Outcome::Refused) };
    if valid.find(&launch.kernel).is_none() {
        // Nor could the builder write them.
        return Ok(Outcome::Refused);
    }
    compiled(machine, &valid, launch)
        .map_err(|error| format!("seed {seed}, {statements} statements: {error}"))
}

/// Compiles a module and compares a launch of it with the interpreter's.
///
/// # Errors
/// What differs, or why the compiler gave up.
pub(crate) fn compiled(machine: &Machine, valid: &ValidModule, launch: Launch) -> Result<Outcome, String> {
    let artifact = match machine.compile(valid, &launch.kernel) {
        Ok(artifact) => artifact,
        Err(error) if error.contains("[too-large]") || error.contains("[scratch-memory]") => {
            return Ok(Outcome::Refused);
        }
        Err(error) => return Err(error),
    };
    let (mut ours, mut theirs) = (launch.clone(), launch);
    let limits = Limits { races: false, deadline: Some(Instant::now() + TIMEOUT), ..Limits::default() };
    if run(valid, &mut theirs, &limits).is_err() {
        return Ok(Outcome::Compiled);
    }
    match machine.launch(&artifact, &mut ours, 1 << 40, 3 * TIMEOUT)? {
        0 => same(&ours, &theirs).map(|()| Outcome::Equal),
        word => Err(format!("stopped with {word:#x}")),
    }
}

/// Do two launches have the same results?
pub(crate) fn same(ours: &Launch, theirs: &Launch) -> Result<(), String> {
    let outputs = ours.arguments.iter().zip(&theirs.arguments);
    outputs.enumerate().try_for_each(|(number, (got, wanted))| match (got.tensor(), wanted.tensor()) {
        (Some(got), Some(wanted)) => compare(got, wanted, Tolerance::Exact)
            .map_err(|mismatch| format!("argument {number} ({}): {mismatch}", got.element)),
        _ => Ok(()),
    })
}
