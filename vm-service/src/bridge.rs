//! The process that serves CUDA programs over the bridge, and those that it starts: a worker for each program, which opens the driver.
//!
//! A worker has no more than its connection. It gives up what a driver's library can do without: new privileges, core dumps, its user, and files
//! but libraries and the driver's own nodes. Which of these the driver does without is tried once, before the first program is served.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use thiserror::Error;
use vm_bridge::server::{Driver, OpenError, Session, SessionError, serve as serve_session};

use crate::process::Messages;
use crate::sandbox::{self, Measures, Nodes, Profile, end_with_parent, inherit_standard};

/// The most programs at a time.
const PROGRAMS: usize = 256;
/// How long opening the driver may take.
const OPEN: Duration = Duration::from_secs(60);
/// Variables that a worker gets: where the driver's libraries are, and what is said to the driver.
const KEPT: [&str; 4] = ["LD_LIBRARY_PATH", "CUDA_", "NVIDIA_", "VM_CUDA_FAKE_"];
/// What a worker is told to show that the driver opens, and to end.
const PROBE: &str = "probe";

/// Why programs can't be served.
#[derive(Debug, Error)]
pub(crate) enum BridgeError {
    /// There is no socket.
    #[error("the socket {path} can't be made: {source}; name another by --socket")]
    Socket {
        /// Where.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A server listens there.
    #[error("a server listens on {0} already; name another socket by --socket")]
    Taken(PathBuf),
    /// The driver does not open, however little a worker gives up.
    #[error("the CUDA driver {0} does not open in a worker; its messages above say why")]
    Driver(PathBuf),
    /// The worker can't be confined.
    #[error("the worker can't be confined: {0}")]
    Confine(String),
    /// The driver does not open.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The driver has no GPU.
    #[error("the CUDA driver does not start: {0}; see whether `nvidia-smi` shows a GPU")]
    Init(u32),
    /// The program's connection failed.
    #[error(transparent)]
    Session(#[from] SessionError),
}

/// Serves programs until this process is ended, and its workers with it.
///
/// # Errors
/// When the socket can't be made, or the driver can't be opened.
pub(crate) fn serve(program: &Path, socket: &Path, driver: &Path) -> Result<(), BridgeError> {
    let measures = (0..Measures::to_try("").len())
        .find(|measures| probe(program, driver, *measures))
        .ok_or_else(|| BridgeError::Driver(driver.to_owned()))?;
    let listener = listen(socket)?;
    tracing::info!(socket = %socket.display(), driver = %driver.display(), measures, "CUDA programs are served");
    let programs = Arc::new(AtomicUsize::new(0));
    for connection in listener.incoming() {
        let started = connection.and_then(|connection| {
            if programs.load(Ordering::SeqCst) >= PROGRAMS {
                tracing::warn!("a CUDA program is refused: there are {PROGRAMS} already");
                return Ok(());
            }
            let mut child = start(program, driver, measures, None, OwnedFd::from(connection).into())?;
            programs.fetch_add(1, Ordering::SeqCst);
            let programs = programs.clone();
            // The worker ends with the thread that started it, which is this one: another waits for it.
            let wait = move || {
                let ended = child.wait();
                programs.fetch_sub(1, Ordering::SeqCst);
                tracing::debug!(worker = child.id(), ?ended, "a CUDA program has ended");
            };
            std::thread::Builder::new().name("wait".into()).spawn(wait).map(drop)
        });
        if let Err(error) = started {
            tracing::error!(%error, "a CUDA program can't be served");
            // Whatever there is too little of may be there again then.
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    Ok(())
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

/// Does the driver open in a worker that gives up so much?
fn probe(program: &Path, driver: &Path, measures: usize) -> bool {
    let until = Instant::now() + OPEN;
    let mut child = match start(program, driver, measures, Some(PROBE), Stdio::null()) {
        Ok(child) => child,
        Err(error) => {
            tracing::error!(%error, "a worker can't be started; see `ulimit -n` and `ulimit -u`");
            return false;
        }
    };
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return status.success(),
            Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
            _ => {
                tracing::warn!(driver = %driver.display(), "the CUDA driver did not open in time");
                // It fails on one that has ended.
                let _ = child.kill();
                return child.wait().is_ok_and(|status| status.success());
            }
        }
    }
}

/// Starts a worker, whose standard input is its connection.
fn start(
    program: &Path,
    driver: &Path,
    measures: usize,
    word: Option<&str>,
    connection: Stdio,
) -> io::Result<Child> {
    let mut command = Command::new(program);
    command.arg("bridge-worker").arg(driver).arg(measures.to_string()).args(word).env_clear();
    let kept = |name: &str| KEPT.iter().any(|kept| name.starts_with(kept));
    command.envs(std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(kept)));
    // A cache in the user's home is one program's to fill and another's to read.
    command.env("CUDA_CACHE_DISABLE", "1");
    command.env("RUST_LOG", std::env::var_os("RUST_LOG").unwrap_or_else(|| "warn".into()));
    if driver.components().count() == 1 {
        command.current_dir("/");
    }
    inherit_standard(&mut command);
    end_with_parent(&mut command);
    let mut child = command.stdin(connection).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    if let Some(messages) = child.stderr.take() {
        Messages::start(Some(child.id()), messages)?;
    }
    Ok(child)
}

/// The worker: serves the program at the other end of standard input, and ends with it.
///
/// # Errors
/// When it can't be confined, the driver can't be opened, or the connection fails.
pub(crate) fn worker_main(driver: &Path, measures: usize, is_probe: bool) -> Result<(), BridgeError> {
    let path = if driver.components().count() == 1 {
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
    let served = serve_session(&UnixStream::from(connection), &session);
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
