//! The server of CUDA programs: of this machine by a Unix socket, and by streams that carry no files of guests and of other machines.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::Duration;

use rustix::fs::MemfdFlags;
use vsock::{VMADDR_CID_ANY, VMADDR_CID_HOST, VsockListener};

use super::BridgeError;
use super::gateway::{END, Gateway, PROGRAMS};
use super::limits::Limits;
use super::records::RecordOptions;
use super::tls::{self, Tls};
use super::window::Window;
use super::workers::Workers;
use crate::sandbox::Measure;
use crate::socket::listen;
use crate::vmm::memory::memfd;

/// Nothing is tried for as long when something could not be had.
const PAUSE: Duration = Duration::from_millis(100);

/// Where programs connect.
#[derive(Debug)]
pub(crate) struct Places {
    /// A Unix socket's path.
    pub(crate) socket: PathBuf,
    /// The path of one whose connections carry no files, as something forwards them.
    pub(crate) stream: Option<PathBuf>,
    /// A port of the host's vsock, for guests.
    pub(crate) vsock: Option<u32>,
    /// For other machines.
    pub(crate) tls: Option<Tls>,
    /// Bytes of the window.
    pub(crate) window: Option<u64>,
}

/// Serves programs until this process is ended, and its workers with it.
///
/// # Errors
/// When nothing can be listened at, or the driver can't be opened.
pub(crate) fn serve(
    program: &Path,
    places: &Places,
    driver: &Path,
    unconfined: &[Measure],
    limits: &Limits,
    record: Option<&RecordOptions>,
) -> Result<(), BridgeError> {
    let workers =
        Workers::new(program.to_owned(), driver.to_owned(), Vec::new(), unconfined, limits, None, record)?;
    let workers = Arc::new(workers);
    let listener = listen(&places.socket, None)?;
    let gateway = Gateway::new(workers.clone(), places.window.map(window).transpose()?);
    if let Some(port) = places.vsock {
        listen_vsock(port, gateway.clone())?;
    }
    if let Some(path) = &places.stream {
        listen_stream(path, gateway)?;
    }
    if let Some(tls) = &places.tls {
        // Other machines have no window.
        let address = tls::listen(tls, Gateway::new(workers.clone(), None))?;
        tracing::info!(%address, "CUDA programs are served over TLS");
    }
    tracing::info!("workers of CUDA programs are confined: {:#}", workers.confinement());
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

/// Makes a window, which programs of this machine open by the path that is told.
fn window(bytes: u64) -> Result<Window, BridgeError> {
    let file = memfd("bridge-window", bytes, MemfdFlags::empty()).map_err(BridgeError::Window)?;
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    tracing::info!(path, bytes, "programs have a window: VM_BRIDGE_WINDOW tells them where");
    Ok(Window::new(file.into(), bytes))
}

/// Serves a program whose connection carries files.
fn take(connection: UnixStream, workers: &Workers, programs: &Arc<AtomicUsize>) -> io::Result<()> {
    if programs.load(Ordering::SeqCst) >= PROGRAMS {
        tracing::warn!("a CUDA program is refused: there are {PROGRAMS} already");
        return Ok(());
    }
    let seen = connection.try_clone()?;
    let (process, _messages) = workers.start(connection.into())?;
    programs.fetch_add(1, Ordering::SeqCst);
    let programs = programs.clone();
    let wait = move || {
        // One that was taken over may go on without its program.
        let goes_on = || io::Result::Ok(!process.ends_before(&seen)? && !process.ends_within(Some(END))?);
        if goes_on().unwrap_or(true) {
            tracing::warn!(worker = process.id(), "a worker does not end with its program, and is killed");
            // It fails on one that has ended.
            let _ = process.kill();
        }
        // By its end the program sees that its worker has ended.
        drop(seen);
        let ended = process.wait();
        programs.fetch_sub(1, Ordering::SeqCst);
        tracing::debug!(worker = process.id(), ?ended, "a CUDA program has ended");
    };
    std::thread::Builder::new().name("wait".into()).spawn(wait).map(drop)
}

/// Serves programs of guests that connect over vsock, on a thread.
fn listen_vsock(port: u32, gateway: Gateway) -> Result<(), BridgeError> {
    let failed = |source| BridgeError::Vsock { port, source };
    let listener = VsockListener::bind_with_cid_port(VMADDR_CID_ANY, port).map_err(failed)?;
    accept("vsock", move || {
        let (connection, from) = listener.accept()?;
        if from.cid() > VMADDR_CID_HOST {
            gateway.accept(OwnedFd::from(connection));
        } else {
            tracing::warn!(cid = from.cid(), "a connection over vsock is closed: it is of no guest");
        }
        Ok(())
    })
    .map_err(failed)
}

/// Serves programs whose connections something forwards, on a thread.
fn listen_stream(path: &Path, gateway: Gateway) -> Result<(), BridgeError> {
    let listener = listen(path, None)?;
    accept("stream", move || listener.accept().map(|(connection, _)| gateway.accept(connection.into())))
        .map_err(BridgeError::Thread)
}

/// Takes connections for ever, on a thread.
fn accept(name: &str, mut take: impl FnMut() -> io::Result<()> + Send + 'static) -> io::Result<()> {
    let accept = move || {
        loop {
            if let Err(error) = take() {
                tracing::error!(%error, "a CUDA program can't be served");
                sleep(PAUSE);
            }
        }
    };
    std::thread::Builder::new().name(name.into()).spawn(accept).map(drop)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::Instant;

    use super::*;
    use crate::sandbox::Confinement;

    #[test]
    fn a_worker_that_ignores_everything_is_killed_when_its_program_has_gone() {
        let folder = tempfile::tempdir().expect("a folder");
        let worker = folder.path().join("worker");
        // It opens every driver, and then does nothing that it should.
        let said = serde_json::to_string(&Confinement::default()).expect("JSON");
        let text = format!(
            "#!/bin/sh\nfor word; do [ \"$word\" = probe ] && echo '{said}' >&0 && exit 0; done\n\
                    trap '' HUP INT TERM PIPE\nexec sleep 1000\n"
        );
        std::fs::write(&worker, text).expect("written");
        std::fs::set_permissions(&worker, PermissionsExt::from_mode(0o755)).expect("permissions");
        let workers = Workers::new(worker, "driver".into(), Vec::new(), &[], &Limits::default(), None, None);
        let workers = workers.expect("workers");
        let programs = Arc::new(AtomicUsize::new(0));
        let (ours, theirs) = UnixStream::pair().expect("a connection");
        take(theirs, &workers, &programs).expect("a worker");
        assert_eq!(programs.load(Ordering::SeqCst), 1);
        drop(ours);
        let end = Instant::now() + Duration::from_secs(60);
        while programs.load(Ordering::SeqCst) > 0 {
            assert!(Instant::now() < end, "it goes on");
            sleep(Duration::from_millis(10));
        }
    }
}
