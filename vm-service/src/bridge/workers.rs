//! Starts workers.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use vm_bridge::orders;
use vm_bridge::server::{Exports, Permit};
use vm_bridge::wire::control;

use super::BridgeError;
use super::capacity::{Amount, Reserved};
use super::limits::{Limits, Place, Places, Share};
use super::worker::to_try;
use crate::process::{Messages, Process};

/// How long opening the driver may take.
const OPEN: Duration = Duration::from_secs(60);
/// Variables that a worker gets: where the driver's libraries are, and what is said to the driver.
const KEPT: [&str; 4] = ["LD_LIBRARY_PATH", "CUDA_", "NVIDIA_", "VM_CUDA_FAKE_"];
/// What a worker is told to show that the driver opens, and to end.
const PROBE: &str = "probe";

/// What it takes to start one.
#[derive(Debug)]
pub(super) struct Workers {
    program: PathBuf,
    driver: PathBuf,
    variables: Vec<(&'static str, String)>,
    /// What they give up, by its place among those to try.
    measures: usize,
    /// Where it is counted what they hold.
    places: Option<Places>,
    /// The folder where programs are recorded, and how many were.
    records: Option<(PathBuf, AtomicU64)>,
    /// What their programs share.
    exports: Exports,
    deadline: Option<Duration>,
    host_memory: u64,
    slice: Option<Arc<Share>>,
}

impl Workers {
    /// Workers of this program over a driver, which get these variables, have no more together than the limits, and record their programs into a
    /// folder. What they owe of their time is in the file `time`, where it outlives them. Tries what the driver can do without.
    ///
    /// # Errors
    /// When the driver does not open, or there is no memory file.
    pub(super) fn new(
        program: PathBuf,
        driver: PathBuf,
        variables: Vec<(&'static str, String)>,
        limits: &Limits,
        time: Option<OwnedFd>,
        record: Option<&Path>,
    ) -> Result<Self, BridgeError> {
        let records = record.map(|folder| (folder.to_owned(), AtomicU64::new(0)));
        let places = limits.memory.map(Places::new).transpose().map_err(BridgeError::Share)?;
        let slice = Share::new(limits.time_slice, time).map_err(BridgeError::Share)?;
        let mut workers = Self {
            program,
            driver,
            variables,
            measures: 0,
            places,
            exports: Exports::default(),
            deadline: limits.deadline,
            host_memory: limits.host_memory(),
            slice: slice.map(Arc::new),
            records,
        };
        for measures in 0..to_try().count() {
            workers.measures = measures;
            if workers.opens() {
                let driver = workers.driver.display();
                tracing::info!(%driver, measures, "workers of CUDA programs open the driver");
                return Ok(workers);
            }
        }
        Err(BridgeError::Driver(workers.driver))
    }

    /// Does the driver open in a worker?
    fn opens(&self) -> bool {
        let until = Instant::now() + OPEN;
        // It ends when it is dropped.
        let started = UnixStream::pair()
            .and_then(|(_, theirs)| self.start_with(Some(PROBE), theirs.into(), None, None));
        let (process, messages) = match started {
            Ok(started) => started,
            Err(error) => {
                tracing::error!(%error, "a worker can't be started; see `ulimit -n` and `ulimit -u`");
                return false;
            }
        };
        let opens = loop {
            match process.try_wait() {
                Ok(Some(status)) => break status.success(),
                Ok(None) if Instant::now() < until => sleep(Duration::from_millis(5)),
                _ => {
                    tracing::warn!(driver = %self.driver.display(), "the CUDA driver did not open in time");
                    // It fails on one that has ended.
                    let _ = process.kill();
                    break false;
                }
            }
        };
        messages.wait();
        // A guest's server shows errors alone, and this is why it fails.
        if !opens && !tracing::enabled!(tracing::Level::WARN) {
            tracing::error!("{}", messages.last());
        }
        opens
    }

    /// Starts a worker, whose standard input is its connection. Files that it exports are reserved for the peer of its session.
    ///
    /// # Errors
    /// The Linux kernel's, and when there is no thread for it.
    pub(super) fn start(
        &self,
        connection: OwnedFd,
        reserved: Option<Arc<Reserved>>,
    ) -> io::Result<(Process, Messages)> {
        let place = self.places.as_ref().map(Places::take).transpose()?;
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(OPEN))?;
        let (process, messages) = self.start_with(None, connection, Some(theirs.into()), place.as_ref())?;
        let (worker, exports) = (process.clone(), self.exports.clone());
        let slice = self.slice.clone();
        let serve = move || {
            let files: Vec<_> =
                place.iter().map(Place::file).chain(slice.iter().map(|slice| slice.file())).collect();
            if let Err(error) = attend(&ours, &files, &exports, reserved.as_deref()) {
                tracing::warn!(%error, worker = worker.id(), "a worker shares nothing more");
                // It fails on one that has ended.
                let _ = worker.kill();
            }
            if let Err(error) = worker.wait() {
                tracing::error!(%error, worker = worker.id(), "a worker can't be waited for");
            }
            drop((place, reserved));
        };
        std::thread::Builder::new().name("worker".into()).spawn(serve).inspect_err(|_| {
            // As above.
            let _ = process.kill();
        })?;
        Ok((process, messages))
    }

    fn start_with(
        &self,
        word: Option<&str>,
        connection: OwnedFd,
        control: Option<OwnedFd>,
        place: Option<&Place>,
    ) -> io::Result<(Process, Messages)> {
        let mut command = Command::new(&self.program);
        command.arg("bridge-worker").arg(&self.driver).arg(self.measures.to_string()).args(word).env_clear();
        let kept = |name: &str| KEPT.iter().any(|kept| name.starts_with(kept));
        command.envs(std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(kept)));
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        // A cache in the user's home is one program's to fill and another's to read.
        command.env("CUDA_CACHE_DISABLE", "1");
        command.env("RUST_LOG", std::env::var_os("RUST_LOG").unwrap_or_else(|| "warn".into()));
        if is_name(&self.driver) {
            command.current_dir("/");
        }
        if let (Some((folder, count)), None) = (&self.records, word) {
            let number = count.fetch_add(1, Ordering::Relaxed);
            command.arg("--record").arg(folder.join(format!("{}-{number}", std::process::id())));
        }
        if let (Some(deadline), None) = (self.deadline, word) {
            command.arg(format!("--deadline={}", deadline.as_micros()));
        }
        if word.is_none() {
            command.arg(format!("--host-memory={}", self.host_memory));
        }
        command.args(self.slice.as_ref().filter(|_| word.is_none()).map(|slice| slice.argument()));
        command.args(place.map(Place::arguments).into_iter().flatten());
        let (process, messages) = Process::start_on(command, connection, control)?;
        let messages = Messages::start(Some(process.id()), std::fs::File::from(messages))?;
        Ok((process, messages))
    }
}

/// Gives a worker what it counts its memory and its time in, then answers what it asks of other programs, until it ends.
fn attend(
    worker: &UnixStream,
    files: &[BorrowedFd<'_>],
    exports: &Exports,
    reserved: Option<&Reserved>,
) -> io::Result<()> {
    if !files.is_empty() {
        orders::give(worker, [0; control::WORDS], &[], files)?;
    }
    worker.set_read_timeout(None)?;
    let Some(reserved) = reserved else { return exports.serve(worker) };
    exports.serve_with(worker, &|| reserved.more(Amount::FILE).map(|file| Box::new(file) as Permit))
}

/// Is it a library that is looked for where libraries are?
pub(super) fn is_name(driver: &Path) -> bool {
    driver.components().count() == 1
}
