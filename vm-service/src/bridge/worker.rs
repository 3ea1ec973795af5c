//! The worker of a CUDA program.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use vm_bridge::server::{Driver, Session, serve};

use super::BridgeError;
use super::workers::is_name;
use crate::sandbox::{self, Measures, Nodes, Profile};

/// The worker: serves the program at the other end of standard input, and ends with it.
///
/// # Errors
/// When it can't be confined, the driver can't be opened, or the connection fails.
pub(crate) fn main(driver: &Path, measures: usize, is_probe: bool) -> Result<(), BridgeError> {
    let path = if is_name(driver) {
        driver.to_owned()
    } else {
        std::path::absolute(driver).unwrap_or_else(|_| driver.to_owned())
    };
    let connection = sandbox::enter(Some(sandbox::WORKER_FILES)).map_err(BridgeError::Confine)?;
    let all = Measures::to_try("");
    let measures = all.get(measures).unwrap_or(&all[0]);
    let confinement = sandbox::settle(
        Profile::Driver,
        *measures,
        Nodes::Nvidia,
        path.parent().filter(|folder| folder.is_absolute()),
    );
    let driver = Driver::open(&path)?;
    if is_probe {
        tracing::info!("a worker of the bridge is confined: {confinement}");
        return match driver.start() {
            0 => Ok(()),
            code => Err(BridgeError::Init(code)),
        };
    }
    let session = Arc::new(Session::new(Arc::new(driver)));
    let served = serve(&UnixStream::from(connection), &session);
    // Its lanes may be in calls that never end: it does not wait for them.
    let status = match served {
        Ok(()) => 0,
        Err(error) => {
            tracing::warn!(%error, "a CUDA program is served no more");
            1
        }
    };
    crate::log::flush();
    crate::sys::exit_at_once(status)
}
