//! The server of CUDA programs: of this machine by a Unix socket, of guests and of this machine over vsock.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::Duration;

use vsock::{VMADDR_CID_ANY, VsockListener};

use super::BridgeError;
use super::gateway::{Gateway, PROGRAMS};
use super::limits::Limits;
use super::workers::Workers;

/// Nothing is tried for as long when something could not be had.
const PAUSE: Duration = Duration::from_millis(100);

/// Where programs connect.
#[derive(Debug)]
pub(crate) struct Places {
    /// A Unix socket's path.
    pub(crate) socket: PathBuf,
    /// A port of the host's vsock.
    pub(crate) vsock: Option<u32>,
}

/// Serves programs until this process is ended, and its workers with it.
///
/// # Errors
/// When nothing can be listened at, or the driver can't be opened.
pub(crate) fn serve(
    program: &Path,
    places: &Places,
    driver: &Path,
    limits: &Limits,
) -> Result<(), BridgeError> {
    let workers = Arc::new(Workers::new(program.to_owned(), driver.to_owned(), Vec::new(), limits)?);
    let listener = listen(&places.socket)?;
    if let Some(port) = places.vsock {
        listen_vsock(port, workers.clone())?;
    }
    tracing::info!(?places, driver = %driver.display(), "CUDA programs are served");
    let programs = Arc::new(AtomicUsize::new(0));
    for connection in listener.incoming() {
        if let Err(error) = connection.and_then(|connection| take(connection, &workers, &programs)) {
            tracing::error!(%error, "a CUDA program can't be served");
            // Whatever there is too little of may be there again then.
            sleep(PAUSE);
        }
    }
    Ok(())
}

/// Serves a program whose connection carries files.
fn take(connection: UnixStream, workers: &Workers, programs: &Arc<AtomicUsize>) -> io::Result<()> {
    if programs.load(Ordering::SeqCst) >= PROGRAMS {
        tracing::warn!("a CUDA program is refused: there are {PROGRAMS} already");
        return Ok(());
    }
    let (process, _messages) = workers.start(connection.into())?;
    programs.fetch_add(1, Ordering::SeqCst);
    let programs = programs.clone();
    let wait = move || {
        let ended = process.wait();
        programs.fetch_sub(1, Ordering::SeqCst);
        tracing::debug!(worker = process.id(), ?ended, "a CUDA program has ended");
    };
    std::thread::Builder::new().name("wait".into()).spawn(wait).map(drop)
}

/// Serves programs of guests and of this machine that connect over vsock, on a thread.
fn listen_vsock(port: u32, workers: Arc<Workers>) -> Result<(), BridgeError> {
    let failed = |source| BridgeError::Vsock { port, source };
    let listener = VsockListener::bind_with_cid_port(VMADDR_CID_ANY, port).map_err(failed)?;
    let gateway = Gateway::new(workers, None);
    let accept = move || {
        for connection in listener.incoming() {
            match connection {
                Ok(connection) => gateway.accept(OwnedFd::from(connection)),
                Err(error) => {
                    tracing::error!(%error, "a CUDA program can't be served");
                    sleep(PAUSE);
                }
            }
        }
    };
    std::thread::Builder::new().name("vsock".into()).spawn(accept).map(drop).map_err(failed)
}

/// Makes the socket; one that nobody listens on is replaced.
fn listen(path: &Path) -> Result<UnixListener, BridgeError> {
    let failed = |source| BridgeError::Socket { path: path.to_owned(), source };
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            if UnixStream::connect(path).is_ok() {
                return Err(BridgeError::Taken(path.to_owned()));
            }
            std::fs::remove_file(path).map_err(failed)?;
            UnixListener::bind(path).map_err(failed)
        }
        bound => bound.map_err(failed),
    }
}
