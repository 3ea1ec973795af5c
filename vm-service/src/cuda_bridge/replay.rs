//! Replays a recording of a program before a driver, in a worker as the program had one.

use std::os::unix::net::UnixStream;
use std::path::Path;

use vm_bridge::recording::{self, Recording, Report};

use super::BridgeError;
use super::limits::Limits;
use super::workers::Workers;
use crate::os::sandbox::{self, Measure, Measures};

/// The most bytes of a recording that are read: more than any has that a server writes.
const MOST: u64 = 2 << 30;

/// Replays the recording at a path; what came of it.
///
/// # Errors
/// When it is no recording, the driver can't be opened, or the worker ends.
pub(crate) fn replay(
    program: &Path,
    path: &Path,
    driver: &Path,
    unconfined: &[Measure],
    limits: &Limits,
) -> Result<Report, BridgeError> {
    let bytes = vm_files::regular::read(path, MOST)
        .map_err(|source| BridgeError::Read { path: path.to_owned(), source })?;
    let workers =
        Workers::new(program.to_owned(), driver.to_owned(), Vec::new(), unconfined, limits, None, None)?;
    let (ours, theirs) = UnixStream::pair().map_err(BridgeError::Worker)?;
    let (process, _messages) = workers.start(theirs.into(), None).map_err(BridgeError::Worker)?;
    tracing::info!("the recording is replayed; its worker is confined: {}", workers.confinement());
    // A recording may be anybody's: what reads it opens nothing.
    sandbox::open_nothing(Measures::without(unconfined)).map_err(BridgeError::ConfineReplay)?;
    let recording = Recording::read(&bytes)?;
    if recording.calls.is_empty() {
        return Err(BridgeError::NoCalls(path.to_owned()));
    }
    let result = recording::replay(&ours, &recording);
    // It ends with its connection; a call that it is in may never end.
    drop(ours);
    let _ = process.kill();
    Ok(result?)
}
