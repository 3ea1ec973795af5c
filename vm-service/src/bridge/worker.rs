//! The worker of a CUDA program.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use vm_bridge::recording::Recorder;
use vm_bridge::server::{Driver, Prints, Session, serve};
use vm_bridge::wire::code;

use super::workers::is_name;
use super::{BridgeError, limits};
use crate::process::packets;
use crate::sandbox::{self, Measure, Measures, Nodes, Profile};

/// The most bytes of the host's memory that only this process has.
const MEMORY: u64 = 32 << 30;

/// How long the server is waited for.
const ANSWER: Duration = Duration::from_secs(30);

/// The connection to the server, which is standard output: that is nothing from now on.
fn server() -> io::Result<UnixStream> {
    let server = UnixStream::from(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3)?);
    // What is printed before there is a program is not to go there.
    rustix::stdio::dup2_stdout(File::options().write(true).open("/dev/null")?)?;
    // A probe has none, and asks nothing.
    if server.local_addr().is_ok() {
        server.set_read_timeout(Some(ANSWER))?;
    }
    Ok(server)
}

/// How long a worker may take to end once its session has.
const END: Duration = Duration::from_secs(2);

/// Ends this process when its session has ended, whatever its threads wait for: what it has on the device ends with it.
fn end_in_any_case(session: Arc<Session>) -> std::io::Result<()> {
    let end = move || {
        while !session.has_ended() {
            sleep(Duration::from_millis(100));
        }
        sleep(END);
        tracing::warn!("a worker of the bridge does not end by itself, and is ended");
        crate::sys::exit_at_once(1)
    };
    std::thread::Builder::new().name("end".into()).spawn(end).map(drop)
}

/// The worker: serves the program at the other end of standard input, and ends with it. Its `share` of the device's memory is bytes, and its slot,
/// `slice` that of the device's time; `record` is where the program is recorded, and in how many bytes.
///
/// # Errors
/// When it can't be confined, the driver can't be opened, or the connection fails.
pub(crate) fn main(
    driver: &Path,
    unconfined: &[Measure],
    is_probe: bool,
    share: Option<(u64, usize)>,
    deadline: Option<Duration>,
    slice: Option<Duration>,
    record: Option<(&Path, u64)>,
) -> Result<(), BridgeError> {
    let server = server().map_err(BridgeError::Server)?;
    let (pot, slice) = limits::given(share, slice, &server).map_err(BridgeError::Share)?;
    let failed = |path: &Path| {
        let path = path.to_owned();
        |source| BridgeError::Record { path, source }
    };
    let recorder = record.map(|(path, limit)| {
        // It may hold a program's secrets. A link at its name is not followed (`O_EXCL`).
        let mut options = File::options();
        let file = options.write(true).create_new(true).mode(0o600).open(path);
        file.and_then(|file| Recorder::new(file, limit)).map_err(failed(path))
    });
    let recorder = recorder.transpose()?;
    let path = if is_name(driver) {
        driver.to_owned()
    } else {
        std::path::absolute(driver).unwrap_or_else(|_| driver.to_owned())
    };
    let connection = sandbox::enter(Some(sandbox::WORKER_FILES)).map_err(BridgeError::Confine)?;
    let measures = Measures::without(unconfined);
    // Where the library is, and where links to it lead.
    let real = path.canonicalize().ok();
    let folders = [Some(&path), real.as_ref()].into_iter().flatten().filter_map(|path| path.parent());
    let folders: Vec<_> = folders.filter(|folder| folder.is_absolute()).collect();
    let confinement = sandbox::settle(Profile::Driver, measures, Nodes::Nvidia, &folders);
    let confinement = confinement.map_err(BridgeError::Confine)?;
    sandbox::limit_memory(MEMORY, None).map_err(BridgeError::Confine)?;
    let driver = Driver::open(&path)?;
    if is_probe {
        match driver.start() {
            0 if measures.calls => {
                sandbox::confine(Profile::Driver, &confinement).map_err(BridgeError::Confine)?;
            }
            0 => {}
            code => return Err(BridgeError::Init(code)),
        }
        return match driver.try_device() {
            0 => packets::send(&connection, &confinement, &[]).map_err(BridgeError::Server),
            code => Err(BridgeError::Init(code)),
        };
    }
    let watched = deadline.is_some() || slice.is_some();
    let session = Session::with_limits(Arc::new(driver), pot, deadline, slice);
    // What kernels print is the program's; what this process logs stays where it was.
    let printing = crate::log::stay().and_then(|()| Prints::begin()).map_err(BridgeError::Print)?;
    let session = Arc::new(session.share_by(server).recorded_by(recorder).printing(printing));
    if measures.calls {
        // The driver begins with calls that are not listed, as of sockets of its own, and after the program has said by variables how it is to begin.
        session.when_started(move || match sandbox::confine(Profile::Driver, &confinement) {
            Ok(()) => 0,
            Err(error) => {
                tracing::error!(%error, "a worker of the bridge");
                code::OPERATING_SYSTEM
            }
        });
    }
    if watched {
        end_in_any_case(session.clone()).map_err(BridgeError::Thread)?;
    }
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
