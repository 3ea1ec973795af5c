//! The server of CUDA programs: of this machine by a Unix socket, and by streams that carry no files of guests and of other machines.

use std::io::{self, Write as _};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use rustix::fs::MemfdFlags;
use vm_bridge::wire::code;
use vsock::{VMADDR_CID_ANY, VMADDR_CID_HOST, VsockListener};

use super::BridgeError;
use super::capacity::{Amount, Capacity, Peer, SESSION_FILES, TLS_FILES};
use super::gateway::{END, Gateway};
use super::limits::Limits;
use super::records::RecordOptions;
use super::tls::{self, HANDSHAKES, Tls};
use super::waiting::{Entered, WAITING, Waiting};
use super::window::{PAGE, Window};
use super::workers::Workers;
use crate::os::sandbox::Measure;
use crate::os::socket::listen;
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
    // Connections wait for --socket, for --stream and --vsock, and for TLS handshakes. After its handshake a TLS connection uses descriptors of its peer.
    let connections = if places.tls.is_some() { 2 * TLS_FILES } else { 0 };
    let capacity = Capacity::new(2 * WAITING + HANDSHAKES, SESSION_FILES + connections)?;
    let workers =
        Workers::new(program.to_owned(), driver.to_owned(), Vec::new(), unconfined, limits, None, record)?;
    let workers = Arc::new(workers);
    let listener = listen(&places.socket, None)?;
    let window = places.window.map(window).transpose()?;
    let gateway = Gateway::new(workers.clone(), capacity.clone(), window);
    if let Some(port) = places.vsock {
        listen_vsock(port, gateway.clone())?;
    }
    if let Some(path) = &places.stream {
        listen_stream(path, gateway)?;
    }
    if let Some(tls) = &places.tls {
        // Other machines have no window.
        let gateway = Gateway::new(workers.clone(), capacity.clone(), None);
        let address = tls::listen(tls, gateway, capacity.clone())?;
        tracing::info!(%address, "CUDA programs are served over TLS");
    }
    tracing::info!("workers of CUDA programs are confined: {:#}", workers.confinement());
    tracing::info!(?places, driver = %driver.display(), "CUDA programs are served");
    let local = Local { workers, capacity, waiting: Waiting::new(WAITING) };
    for connection in listener.incoming() {
        if let Err(error) = connection.and_then(|connection| local.accept(connection)) {
            tracing::error!(%error, "a CUDA program can't be served");
            // Whatever there is too little of may be there again then.
            sleep(PAUSE);
        }
    }
    Ok(())
}

/// Makes a window, which programs of this machine open by the path that is told.
fn window(bytes: u64) -> Result<Window, BridgeError> {
    // The last page is the gateway's.
    let len = bytes.checked_next_multiple_of(PAGE).and_then(|bytes| bytes.checked_add(PAGE));
    let len = len.ok_or_else(|| BridgeError::Window(io::ErrorKind::OutOfMemory.into()))?;
    let file = memfd("bridge-window", len, MemfdFlags::empty()).map_err(BridgeError::Window)?;
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    tracing::info!(path, bytes, "programs have a window: VM_BRIDGE_WINDOW tells them where");
    Ok(Window::new(file.into(), len))
}

/// Serves programs whose connections carry files.
#[derive(Clone, Debug)]
struct Local {
    workers: Arc<Workers>,
    capacity: Capacity,
    waiting: Waiting,
}

impl Local {
    /// Serves a program on a thread, once it has begun to speak.
    fn accept(&self, connection: UnixStream) -> io::Result<()> {
        let peer = Peer::of_socket(&connection)?;
        let connection = Arc::new(connection);
        let entered = self.waiting.enter(connection.clone(), peer.clone());
        let this = self.clone();
        let serve = move || {
            if let Err(error) = this.serve(entered, connection, &peer) {
                tracing::error!(%error, "a CUDA program can't be served");
            }
        };
        std::thread::Builder::new().name("program".into()).spawn(serve).map(drop)
    }

    fn serve(&self, mut entered: Entered, seen: Arc<UnixStream>, peer: &Peer) -> io::Result<()> {
        if let Err(error) = entered.await_bytes() {
            tracing::debug!(%error, "a connection that has sent nothing is closed");
            return Ok(());
        }
        entered.know();
        let Some(reserved) = self.capacity.reserve(peer, Amount::SESSION).map(Arc::new) else {
            tracing::warn!(
                ?peer,
                "a CUDA program is refused: its peer has as many as it may, or the server has"
            );
            return (&*seen).write_all(&u64::from(code::NO_DEVICE).to_ne_bytes());
        };
        let (process, _messages) = self.workers.start(seen.try_clone()?.into(), Some(reserved.clone()))?;
        // One that was taken over may go on without its program.
        let goes_on = || io::Result::Ok(!process.ends_before(&seen)? && !process.ends_within(Some(END))?);
        if goes_on().unwrap_or(true) {
            tracing::warn!(worker = process.id(), "a worker does not end with its program, and is killed");
            // It fails on one that has ended.
            let _ = process.kill();
        }
        // By its end the program sees that its worker has ended.
        drop((entered, seen));
        let ended = process.wait();
        drop(reserved);
        tracing::debug!(worker = process.id(), ?ended, "a CUDA program has ended");
        Ok(())
    }
}

/// Serves programs of guests that connect over vsock, on a thread.
fn listen_vsock(port: u32, gateway: Gateway) -> Result<(), BridgeError> {
    let failed = |source| BridgeError::Vsock { port, source };
    let listener = VsockListener::bind_with_cid_port(VMADDR_CID_ANY, port).map_err(failed)?;
    accept("vsock", move || {
        let (connection, from) = listener.accept()?;
        if from.cid() > VMADDR_CID_HOST {
            gateway.accept(OwnedFd::from(connection), Peer::Guest(from.cid()));
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
    accept("stream", move || {
        let (connection, _) = listener.accept()?;
        let peer = Peer::of_socket(&connection)?;
        gateway.accept(connection.into(), peer);
        Ok(())
    })
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
    use crate::os::sandbox::Confinement;

    #[test]
    fn only_a_connection_that_has_sent_bytes_gets_a_worker() {
        let folder = tempfile::tempdir().expect("a folder");
        let (worker, started) = (folder.path().join("worker"), folder.path().join("started"));
        let confinement = serde_json::to_string(&Confinement::default()).expect("JSON");
        let text = format!(
            "#!/bin/sh\nfor word; do [ \"$word\" = probe ] && echo '{confinement}' >&0 && exit 0; done\n\
                    echo >> '{}'\n",
            started.display()
        );
        std::fs::write(&worker, text).expect("written");
        std::fs::set_permissions(&worker, PermissionsExt::from_mode(0o755)).expect("permissions");
        let workers = Workers::new(worker, "driver".into(), Vec::new(), &[], &Limits::default(), None, None);
        let (workers, capacity) = (
            Arc::new(workers.expect("workers")),
            Capacity::new(WAITING, SESSION_FILES).expect("descriptors"),
        );
        let local = Local { workers, capacity: capacity.clone(), waiting: Waiting::new(4) };
        let connect = || {
            let (ours, theirs) = UnixStream::pair().expect("a connection");
            let (theirs, peer) = (Arc::new(theirs), Peer::User(1));
            let entered = local.waiting.enter(theirs.clone(), peer.clone());
            let local = local.clone();
            (ours, std::thread::spawn(move || local.serve(entered, theirs, &peer)))
        };
        // The last four wait until their peer closes them; the others are closed to make room.
        let silent: Vec<_> = (0..20).map(|_| connect()).collect();
        for (stream, thread) in silent {
            drop(stream);
            thread.join().expect("a thread").expect("a silent connection");
        }
        assert!(!started.exists() && capacity.is_unused());
        let (mut stream, thread) = connect();
        stream.write_all(&[0]).expect("sent");
        thread.join().expect("a thread").expect("a program");
        assert_eq!(std::fs::read(&started).expect("a worker"), b"\n");
    }

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
        let workers = Arc::new(workers.expect("workers"));
        let capacity = Capacity::new(WAITING, SESSION_FILES).expect("descriptors");
        let local = Local { workers, capacity: capacity.clone(), waiting: Waiting::new(WAITING) };
        let until = |is_so: &dyn Fn() -> bool| {
            let end = Instant::now() + Duration::from_secs(60);
            while !is_so() {
                assert!(Instant::now() < end, "it goes on");
                sleep(Duration::from_millis(10));
            }
        };
        let (mut ours, theirs) = UnixStream::pair().expect("a connection");
        local.accept(theirs).expect("a thread");
        ours.write_all(&[0]).expect("it begins to speak");
        until(&|| !capacity.is_unused());
        drop(ours);
        until(&|| capacity.is_unused());
    }
}
