//! The worker of a CUDA program.

use std::fs::File;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use vm_bridge::recording::Recorder;
use vm_bridge::server::{Driver, HostMemory, Prints, Session, serve};
use vm_bridge::wire::code;

use super::limits::Limits;
use super::workers::is_name;
use super::{BridgeError, limits};
use crate::os::process::packets;
use crate::os::sandbox::{self, Measure, Measures, Nodes, Profile};

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
        crate::os::sys::exit_at_once(1)
    };
    std::thread::Builder::new().name("end".into()).spawn(end).map(drop)
}

/// Added to the server's `oom_score_adj`, in thousandths of the host's memory.
const OOM_SCORE: i32 = 500;

/// Has Linux kill this process before its server when the host runs out of memory.
fn volunteer_for_oom_kill() {
    const FILE: &str = "/proc/self/oom_score_adj";
    let raised = std::fs::read_to_string(FILE).and_then(|text| {
        let score = text.trim().parse::<i32>().map_err(io::Error::other)?;
        std::fs::write(FILE, score.saturating_add(OOM_SCORE).min(1000).to_string())
    });
    if let Err(error) = raised {
        tracing::warn!(%error, "cannot raise the worker's oom_score_adj: the host may kill others for its memory");
    }
}

/// The worker: serves the program at the other end of standard input, and ends with it. Its `share` of the device's memory is bytes, and its slot,
/// `limits` the rest that it may have; the program is recorded in `record` bytes, if given, which the server writes.
///
/// # Errors
/// When it can't be confined, the driver can't be opened, or the connection fails.
pub(crate) fn main(
    driver: &Path,
    unconfined: &[Measure],
    is_probe: bool,
    share: Option<(u64, usize)>,
    limits: &Limits,
    record: Option<u64>,
) -> Result<(), BridgeError> {
    volunteer_for_oom_kill();
    let server = server().map_err(BridgeError::Server)?;
    let (pot, slice) = limits::given(share, limits.time_slice, &server).map_err(BridgeError::Share)?;
    let recorder = record.map(|limit| Recorder::new(limits::given_recording(&server)?, limit));
    let recorder = recorder.transpose().map_err(BridgeError::Recorder)?;
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
    let deadline = limits.deadline;
    let watched = deadline.is_some() || slice.is_some();
    let host = HostMemory::new(limits.host_memory());
    let session = Session::with_limits(Arc::new(driver), pot, deadline, slice).with_host_memory(host.clone());
    // What kernels print is the program's; what this process logs stays where it was.
    let printing = crate::log::stay().and_then(|()| Prints::begin(&host)).map_err(BridgeError::Print)?;
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
    crate::os::sys::exit_at_once(status)
}
