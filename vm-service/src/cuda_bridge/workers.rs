//! Starts workers.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use vm_bridge::orders;
use vm_bridge::server::{Exports, Permit};
use vm_bridge::wire::control;

use super::BridgeError;
use super::capacity::{Amount, Reserved};
use super::limits::{Limits, Place, Places, Share};
use super::records::{RecordOptions, Recording, Records};
use crate::os::process::{Messages, Process, packets};
use crate::os::sandbox::{Confinement, Measure, further_waivers};

/// How long opening the driver may take.
const OPEN: Duration = Duration::from_secs(60);
/// Variables that a worker gets: where the driver's libraries are, and what is said to the driver.
const KEPT: [&str; 4] = ["LD_LIBRARY_PATH", "CUDA_", "NVIDIA_", "VM_CUDA_"];
/// What a worker is told to show that the driver opens, and to end.
const PROBE: &str = "probe";

/// What it takes to start one.
#[derive(Debug)]
pub(super) struct Workers {
    program: PathBuf,
    driver: PathBuf,
    variables: Vec<(&'static str, String)>,
    /// The measures of their confinement that the operator waived.
    unconfined: Vec<Measure>,
    /// How a worker was confined that opened the driver.
    confinement: Confinement,
    /// Where it is counted what they hold.
    places: Option<Places>,
    /// Where programs are recorded.
    records: Option<Records>,
    /// What their programs share.
    exports: Exports,
    deadline: Option<Duration>,
    host_memory: u64,
    slice: Option<Arc<Share>>,
}

impl Workers {
    /// Workers of this program over a driver, which get these variables, have no more together than the limits, and record their programs into a
    /// folder. What they owe of their time is in the file `time`, where it outlives them. Opens the driver once, in a worker that is
    /// confined but for what the operator waived.
    ///
    /// # Errors
    /// When the driver does not open, with what could be waived so that it does; when there is no memory file.
    pub(super) fn new(
        program: PathBuf,
        driver: PathBuf,
        variables: Vec<(&'static str, String)>,
        unconfined: &[Measure],
        limits: &Limits,
        time: Option<OwnedFd>,
        record: Option<&RecordOptions>,
    ) -> Result<Self, BridgeError> {
        // The dynamic linker would block on a FIFO. Its own messages name all other errors.
        if !is_name(&driver) && driver.metadata().is_ok_and(|file| !file.is_file()) {
            return Err(BridgeError::DriverFile(driver));
        }
        let records = record.map(Records::open).transpose()?;
        let places = limits.memory.map(Places::new).transpose().map_err(BridgeError::Share)?;
        let slice = Share::new(limits.time_slice, time).map_err(BridgeError::Share)?;
        let mut workers = Self {
            program,
            driver,
            variables,
            unconfined: unconfined.to_vec(),
            confinement: Confinement::default(),
            places,
            exports: Exports::default(),
            deadline: limits.deadline,
            host_memory: limits.host_memory(),
            slice: slice.map(Arc::new),
            records,
        };
        if let Some(confinement) = workers.opens() {
            workers.confinement = confinement;
            return Ok(workers);
        }
        let helps = further_waivers(&Measure::ALL, unconfined).find(|waived| {
            workers.unconfined.clone_from(waived);
            workers.opens().is_some()
        });
        Err(match helps {
            Some(waived) => {
                let names = Measure::names(&waived);
                let list = names.replace(',', "\", \"");
                BridgeError::Unconfined { driver: workers.driver, names, list }
            }
            None => BridgeError::Driver(workers.driver),
        })
    }

    /// How far workers are confined.
    pub(super) fn confinement(&self) -> &Confinement {
        &self.confinement
    }

    /// How a worker is confined that opens the driver; `None` when it does not open.
    fn opens(&self) -> Option<Confinement> {
        let until = Instant::now() + OPEN;
        // It ends when it is dropped.
        let started = UnixStream::pair().and_then(|(ours, theirs)| {
            Ok((ours, self.start_with(Some(PROBE), theirs.into(), None, None, None)?))
        });
        let (ours, (process, messages)) = match started {
            Ok(started) => started,
            Err(error) => {
                tracing::error!(%error, "a worker can't be started; see `ulimit -n` and `ulimit -u`");
                return None;
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
        if !opens || ours.set_nonblocking(true).is_err() {
            return None;
        }
        // It has ended, and said that before.
        let said = packets::receive::<Confinement>(&ours);
        let said = said.inspect_err(|error| tracing::error!(%error, "cannot read how a worker is confined"));
        said.ok().flatten().map(|(confinement, _)| confinement)
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
        let recording = self.record(reserved.as_deref());
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(OPEN))?;
        let (process, messages) =
            self.start_with(None, connection, Some(theirs.into()), place.as_ref(), recording.as_ref())?;
        let (worker, exports) = (process.clone(), self.exports.clone());
        let slice = self.slice.clone();
        let serve = move || {
            let files: Vec<_> =
                place.iter().map(Place::file).chain(slice.iter().map(|slice| slice.file())).collect();
            let given = give(&ours, &files, recording.as_ref());
            let end = recording.map(Recording::close);
            if let Err(error) = given.and_then(|()| attend(&ours, &exports, reserved.as_deref())) {
                tracing::warn!(%error, worker = worker.id(), "a worker shares nothing more");
                // It fails on one that has ended.
                let _ = worker.kill();
            }
            if let Err(error) = worker.wait() {
                tracing::error!(%error, worker = worker.id(), "a worker can't be waited for");
            }
            drop((place, reserved, end));
        };
        std::thread::Builder::new().name("worker".into()).spawn(serve).inspect_err(|_| {
            // As above.
            let _ = process.kill();
        })?;
        Ok((process, messages))
    }

    /// Begins the recording of a program, whose descriptors count for its peer.
    fn record(&self, reserved: Option<&Reserved>) -> Option<Recording> {
        let records = self.records.as_ref()?;
        let reserved = reserved.map(|reserved| reserved.more(Amount::RECORDING));
        match reserved {
            Some(None) => {
                tracing::warn!("a CUDA program is not recorded: its peer uses as many descriptors as it may");
                None
            }
            reserved => records.begin(reserved.flatten()),
        }
    }

    fn start_with(
        &self,
        word: Option<&str>,
        connection: OwnedFd,
        control: Option<OwnedFd>,
        place: Option<&Place>,
        recording: Option<&Recording>,
    ) -> io::Result<(Process, Messages)> {
        let mut command = Command::new(&self.program);
        command.arg("bridge-worker").arg(&self.driver).args(word).env_clear();
        if !self.unconfined.is_empty() {
            command.arg(format!("--unconfined={}", Measure::names(&self.unconfined)));
        }
        let kept = |name: &str| KEPT.iter().any(|kept| name.starts_with(kept));
        command.envs(std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(kept)));
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        // A cache in the user's home is one program's to fill and another's to read.
        command.env("CUDA_CACHE_DISABLE", "1");
        command.env("RUST_LOG", std::env::var_os("RUST_LOG").unwrap_or_else(|| "warn".into()));
        if is_name(&self.driver) {
            command.current_dir("/");
        }
        if let Some(recording) = recording {
            command.arg(format!("--record-limit={}", recording.limit));
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

/// Gives a worker the files in which it counts its memory and its time, and the socket for its recording.
fn give(worker: &UnixStream, files: &[BorrowedFd<'_>], recording: Option<&Recording>) -> io::Result<()> {
    let recording = recording.map(Recording::theirs);
    for files in [files, recording.as_slice()] {
        if !files.is_empty() {
            orders::give(worker, [0; control::WORDS], &[], files)?;
        }
    }
    Ok(())
}

/// Answers what a worker asks of other programs, until it ends.
fn attend(worker: &UnixStream, exports: &Exports, reserved: Option<&Reserved>) -> io::Result<()> {
    worker.set_read_timeout(None)?;
    let Some(reserved) = reserved else { return exports.serve(worker) };
    exports.serve_with(worker, &|| reserved.more(Amount::FILE).map(|file| Box::new(file) as Permit))
}

/// Is it a library that is looked for where libraries are?
pub(super) fn is_name(driver: &Path) -> bool {
    driver.components().count() == 1
}
