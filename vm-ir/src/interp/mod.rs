//! The reference interpreter: slow, obvious, and the judge of every other way to run a kernel.
//!
//! It runs block after block. Within a block it takes one op at a time and applies it to all threads that
//! are there (those whose conditions led here), in the order of their index, before it takes the next. So a
//! barrier, a shuffle or a vote finds its threads assembled, as the validator proved they would be.
//!
//! A run that breaks a rule which only shows at run time ends in an error instead of some result:
//!
//! * two threads that touch one element without a barrier between them, one of them writing (a race);
//! * in a trusted module, an index out of bounds or a shared element read before it was written.
//!
//! Every run has a limit on steps and may have a deadline, so no kernel hangs it.

mod bounds;
mod control;
mod error;
mod exec;
mod launch;
mod memory;
mod observe;
mod place;
mod race;
mod tile;
mod warp;

pub use bounds::{BoundsCounter, OutOfBounds};
pub use error::{RunError, RunErrorKind};
pub use launch::{Argument, Launch, LaunchError, Limits, Report, Tensor};
pub use observe::{Observer, State};

use crate::valid::ValidModule;

/// Runs a kernel over a whole grid. Views are read from and written to the launch's arguments.
///
/// # Errors
///
/// The launch does not fit the kernel, or the run broke a rule or a limit; the error names the kernel, the
/// op, its line and the thread. What was written until then stays written.
pub fn run(module: &ValidModule, launch: &mut Launch, limits: &Limits) -> Result<Report, RunError> {
    exec::run(module, launch, limits, None)
}

/// The same with an onlooker.
///
/// # Errors
///
/// Those of [`run`].
pub fn observe<'m>(
    module: &'m ValidModule,
    launch: &mut Launch,
    limits: &'m Limits,
    observer: &'m mut dyn Observer,
) -> Result<Report, RunError> {
    exec::run(module, launch, limits, Some(observer))
}
