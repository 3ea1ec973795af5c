//! The ledger: what was taken from which driver, on disk, so that it can be returned whatever happens.
//!
//! Each claim has a record, the file `STATE/ledger/ADDRESS.claim`, in the format of the `journal` module. What is about to be
//! done is on disk before it is done, and the file goes when the last function is released.
//!
//! * **Whole or not at all**: a record is replaced by rename(2) of a new file, `ADDRESS.new`, that is complete and on disk. What
//!   can't be read all the same is kept and stands in the way of its own device only (the `unread` module).
//! * **One writer at a time**: a process that reads or writes records holds a lock on `STATE/ledger/lock` (flock(2)), which
//!   the Linux kernel drops with the process. It is held for the records alone, never while a driver is waited for: a binding
//!   is changed under the lock of its function (the `claim` module).
//! * **Who is alive**: the process that owns a claim, or uses a persistent one, holds a lock on the claim's file for
//!   all that time; a new file is locked before it takes the old one's place. A process ID, which may belong to another
//!   process by now, is only for people to read.
//! * **Another boot**: a reboot undoes all bindings, so the entries of another boot are void.
//!
//! Beside the claims lie the leases of those who share a function (the `lease` module).
//!
//! A process that is forked without exec shares its parent's locks: the claim counts as alive until both have gone.

#[cfg(test)]
pub(crate) mod crash;
mod error;
mod fuzz;
mod journal;
mod lease;
mod unread;

pub use error::LedgerError;
pub use fuzz::fuzz_record;
pub use journal::{ClaimedFunction, Entry, Owner};
pub use lease::{Sharer, sharers};
pub use unread::UnreadRecord;

pub(crate) use error::seconds;
pub(crate) use journal::Record;
#[cfg(test)]
pub(crate) use journal::line_of;
pub(crate) use unread::unread;

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read as _};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, openat};

use journal::{Unread, parse};

use crate::deadlines::until;
use crate::usb4::UniqueId;
use crate::{Host, PciAddress, files};

/// Name of the ledger's directory.
const LEDGER: &str = "ledger";
/// Takes a lock that one process may hold at a time.
pub(crate) const EXCLUSIVE: FlockOperation = FlockOperation::NonBlockingLockExclusive;
/// Largest record that is read, in bytes. A claim of all 256 functions below a bus has less than a tenth of it.
const MAX_RECORD: u64 = 1 << 20;
/// Most files in the ledger.
const MAX_ENTRIES: usize = 65_536;
/// How long to sleep between two tries to get the lock.
const LOCK_POLL: Duration = Duration::from_millis(10);

type Result<T, E = LedgerError> = std::result::Result<T, E>;

/// The ledger, locked for as long as the value lives.
#[derive(Debug)]
pub struct Ledger {
    host: Host,
    directory: PathBuf,
    boot: String,
    owner: Owner,
    _lock: File,
}

/// A claim in the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerEntry {
    /// What its journal says.
    pub entry: Entry,
    /// Whether the process that owns it, or uses it, is alive.
    pub alive: bool,
    /// Whether it belongs to another boot, so that nothing is left to undo.
    pub void: bool,
}

/// All claims of `host` in this boot, as [`Ledger::entries`] has them. It makes no ledger where there is none.
///
/// # Errors
/// As for [`Ledger::lock`].
pub fn claims(host: &Host, deadline: Duration) -> Result<Vec<Result<LedgerEntry, UnreadRecord>>> {
    if !host.state.join("ledger").exists() {
        return Ok(Vec::new());
    }
    let ledger = match host.writer().only_reads() {
        true => Ledger::of_files(host)?,
        false => Ledger::lock(host, deadline)?,
    };
    let mut entries = ledger.entries()?;
    entries.retain(|entry| entry.as_ref().map_or(true, |entry| !entry.void));
    Ok(entries)
}

/// The claim of `address` that another process holds, which is alive, and its file. It only reads. Where a record names such
/// a claim, it waits until nobody writes the ledger: whoever writes takes the locks of records too.
///
/// # Errors
/// When the ledger can't be read, or is written until `deadline` has passed.
pub(crate) fn held_elsewhere(
    host: &Host,
    address: PciAddress,
    deadline: Duration,
) -> Result<Option<(Owner, PathBuf)>> {
    let directory = host.state.join("ledger");
    let own = std::process::id();
    let holder = || {
        for name in files::names(&directory).map_err(io_error("list", &directory))? {
            let path = directory.join(&name);
            // One that can't be read is a matter of its own.
            let Some(Ok((file, entry))) = name.ends_with(".claim").then(|| read_record(host, &path)) else {
                continue;
            };
            let owner = entry.user.as_ref().unwrap_or(&entry.owner);
            if owner.pid != own && (entry.target == address || entry.function(address).is_some()) {
                return Ok(Some((owner.clone(), path, file)));
            }
        }
        Ok(None)
    };
    if holder()?.is_none() {
        return Ok(None);
    }
    let path = directory.join("lock");
    // A captured ledger has no lock, and no writer.
    let lock = if path.exists() { Some(open(&path, OFlags::RDONLY)?) } else { None };
    if let Some(lock) = &lock {
        wait_for(lock, &path, FlockOperation::NonBlockingLockShared, deadline, || false)?;
    }
    let Some((owner, path, file)) = holder()? else { return Ok(None) };
    if is_marked_held(&path) {
        return Ok(Some((owner, path)));
    }
    let ended = try_flock(&file, &path, FlockOperation::NonBlockingLockShared)?;
    Ok((!ended).then_some((owner, path)))
}

/// Whether a captured record was locked on the host that it was captured from: a file beside it says so.
fn is_marked_held(record: &Path) -> bool {
    let mut marker = record.as_os_str().to_owned();
    marker.push(".held");
    Path::new(&marker).exists()
}

/// The right to change what is noted of claims elsewhere, as for the next boot, until it is dropped. Who takes it before a claim
/// or release and keeps it until that is noted has nobody come between. The ledger itself is not locked by it.
#[derive(Debug)]
pub struct NotesLock {
    _lock: File,
}

impl NotesLock {
    /// Waits for it.
    ///
    /// # Errors
    /// As for [`Ledger::lock`].
    pub fn take(host: &Host, deadline: Duration) -> Result<Self> {
        let owner = this_process(host);
        Ok(Self { _lock: lock_file(host, (LEDGER, "notes.lock"), EXCLUSIVE, &owner, deadline, || false)?.1 })
    }
}

/// The right to do something about enclosures of USB4 and Thunderbolt, until it is dropped.
#[derive(Debug)]
pub struct EnclosureLock {
    _lock: File,
}

impl EnclosureLock {
    /// To have functions come, or to change what is noted of enclosures: one at a time, as what appears behind an enclosure is
    /// told from what was there before.
    ///
    /// # Errors
    /// As for [`Ledger::lock`]; also when it is given up.
    pub fn of_all(host: &Host, deadline: Duration, is_given_up: impl Fn() -> bool) -> Result<Self> {
        Self::named(host, "enclosures.lock", deadline, is_given_up)
    }

    /// To connect, reset or disconnect one. Who has it may take [`of_all`](Self::of_all) as well, and not the other way round.
    ///
    /// # Errors
    /// As for [`Ledger::lock`].
    pub fn of(host: &Host, id: UniqueId, deadline: Duration) -> Result<Self> {
        Self::named(host, &format!("enclosure-{id}.lock"), deadline, || false)
    }

    fn named(host: &Host, name: &str, deadline: Duration, is_given_up: impl Fn() -> bool) -> Result<Self> {
        let owner = this_process(host);
        Ok(Self { _lock: lock_file(host, (LEDGER, name), EXCLUSIVE, &owner, deadline, is_given_up)?.1 })
    }
}

/// Opens and locks `STATE/directory/name`, and returns the directory and the file, which names the process that locked it
/// exclusively last.
pub(crate) fn lock_file(
    host: &Host,
    (directory, name): (&str, &str),
    how: FlockOperation,
    owner: &Owner,
    deadline: Duration,
    is_given_up: impl Fn() -> bool,
) -> Result<(PathBuf, File)> {
    let directory = host.state.join(directory);
    if host.writer().only_reads() {
        return Err(io_error("write", &directory)(io::ErrorKind::ReadOnlyFilesystem.into()));
    }
    make_directory(&host.state, 0o755)?;
    make_directory(&directory, 0o700)?;
    let data = fs::symlink_metadata(&directory).map_err(io_error("look at", &directory))?;
    check_trusted(&directory, &data, true)?;

    let path = directory.join(name);
    let lock = open(&path, OFlags::RDWR | OFlags::CREATE)?;
    wait_for(&lock, &path, how, deadline, is_given_up)?;
    crash_point();
    if how != EXCLUSIVE {
        return Ok((directory, lock));
    }
    // Only for the message of those who wait, so that a failure here is none.
    let text = format!("{} {}\n", owner.pid, owner.command);
    if let Err(error) = lock.set_len(0).and_then(|()| lock.write_all_at(text.as_bytes(), 0)) {
        tracing::debug!(%error, "can't write who holds a lock of the ledger");
    }
    Ok((directory, lock))
}

impl Ledger {
    /// Locks the ledger of `host`, which is made if there is none.
    ///
    /// # Errors
    /// When another process has it until `deadline` has passed, when it can't be made, or when others than this
    /// user could have written to it.
    pub fn lock(host: &Host, deadline: Duration) -> Result<Self> {
        let owner = this_process(host);
        let (directory, lock) = lock_file(host, (LEDGER, "lock"), EXCLUSIVE, &owner, deadline, || false)?;
        let boot = fs::read_to_string(host.proc.join("sys/kernel/random/boot_id")).unwrap_or_default();
        let ledger = Self { host: host.clone(), directory, boot: boot.trim().to_owned(), owner, _lock: lock };
        // What writers that died had not come to put in place.
        for path in ledger.files("new")? {
            remove(&path)?;
        }
        Ok(ledger)
    }

    /// The ledger of a host that is only files: nobody writes it, and nothing in it is written.
    fn of_files(host: &Host) -> Result<Self> {
        let directory = host.state.join("ledger");
        let file = File::open(&directory).map_err(io_error("open", &directory))?;
        check_trusted(&directory, &file.metadata().map_err(io_error("look at", &directory))?, true)?;
        let boot = fs::read_to_string(host.proc.join("sys/kernel/random/boot_id")).unwrap_or_default();
        let (boot, owner) = (boot.trim().to_owned(), this_process(host));
        Ok(Self { host: host.clone(), directory, boot, owner, _lock: file })
    }

    /// Its files with this extension, in order.
    fn files(&self, extension: &str) -> Result<Vec<PathBuf>> {
        let mut paths = Vec::new();
        for file in fs::read_dir(&self.directory).map_err(io_error("list", &self.directory))? {
            let path = file.map_err(io_error("list", &self.directory))?.path();
            if path.extension().is_some_and(|own| own == extension) && paths.len() < MAX_ENTRIES {
                paths.push(path);
            }
        }
        paths.sort();
        Ok(paths)
    }

    /// All claims in it. A record that can't be read is an error of its own.
    ///
    /// # Errors
    /// When the directory can't be read.
    pub fn entries(&self) -> Result<Vec<Result<LedgerEntry, UnreadRecord>>> {
        let journals = self.journals()?;
        Ok(journals
            .into_iter()
            .map(|journal| {
                journal.map(|journal| LedgerEntry {
                    alive: !journal.locked,
                    void: self.is_void(&journal.entry),
                    entry: journal.entry,
                })
            })
            .collect())
    }

    /// The journals, each locked if nobody else has it.
    pub(crate) fn journals(&self) -> Result<Vec<Result<Journal, UnreadRecord>>> {
        let paths = self.files("claim")?;
        Ok(paths.iter().map(|path| Journal::open(&self.host, path)).collect())
    }

    /// Whether a claim belongs to another boot.
    pub(crate) fn is_void(&self, entry: &Entry) -> bool {
        !self.boot.is_empty() && !entry.boot.is_empty() && self.boot != entry.boot
    }

    /// What this process does, it does for a guest.
    pub(crate) fn for_guest(mut self, name: Option<&String>) -> Self {
        self.owner.guest = name.cloned();
        self
    }

    /// Where its files are.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// This process, as it is named in the ledger.
    pub(crate) fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Opens a new claim's journal.
    pub(crate) fn create(&self, target: PciAddress, persistent: bool) -> Result<Journal> {
        let entry = Entry::new(target, persistent, self.owner.clone(), self.boot.clone());
        let path = self.directory.join(format!("{target}.claim"));
        if path.symlink_metadata().is_ok() {
            return Err(LedgerError::Untrusted { path, what: "is in the way of a new record".into() });
        }
        let file = put(&path, &entry)?;
        Ok(Journal { path, file, entry, locked: true })
    }
}

/// The journal of one claim, open.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    /// Holds the lock.
    file: File,
    pub(crate) entry: Entry,
    /// Whether this process holds its lock; otherwise its owner or user lives.
    pub(crate) locked: bool,
}

impl Journal {
    fn open(host: &Host, path: &Path) -> Result<Self, UnreadRecord> {
        let (file, entry) = read_record(host, path)?;
        let locked = try_lock(&file, path).map_err(|error| UnreadRecord::new(host, path, &error))?;
        Ok(Self { path: path.into(), file, entry, locked })
    }

    /// Takes a step up, once it is on disk.
    pub(crate) fn append(&mut self, record: &Record) -> Result<()> {
        let mut entry = self.entry.clone();
        entry.apply(record);
        self.file = put(&self.path, &entry)?;
        self.entry = entry;
        Ok(())
    }

    /// Ends the claim: everything is released.
    pub(crate) fn remove(&self) -> Result<()> {
        crash_point();
        remove(&self.path)
    }

    /// The claim's functions as they were before, in the order to release them.
    pub(crate) fn undo_order(&self) -> Vec<ClaimedFunction> {
        self.entry.functions.iter().rev().filter(|function| !function.restored).cloned().collect()
    }
}

/// The record at `path`, and its file.
pub(crate) fn read_record(host: &Host, path: &Path) -> Result<(File, Entry), UnreadRecord> {
    let mut bytes = Vec::new();
    let mut read = || {
        let flags = if host.writer().only_reads() { OFlags::RDONLY } else { OFlags::RDWR };
        let file = open(path, flags)?;
        (&file).take(MAX_RECORD + 1).read_to_end(&mut bytes).map_err(io_error("read", path))?;
        if bytes.len() as u64 > MAX_RECORD {
            let what = "is too big for a record".into();
            return Err(LedgerError::Untrusted { path: path.into(), what });
        }
        Ok(file)
    };
    let file = read().map_err(|error| UnreadRecord::new(host, path, &error))?;
    let damaged = |unread| UnreadRecord::of(host, path, &bytes, &unread);
    let entry = parse(&bytes).map_err(damaged)?;
    let name = format!("{}.claim", entry.target);
    if path.file_name().is_none_or(|own| own != name.as_str()) {
        let what = format!("it is the record of {}, but its name is not {name}", entry.target);
        return Err(damaged(Unread::Damaged(what)));
    }
    Ok((file, entry))
}

/// Puts a record in place, on disk, and locks it. Nobody ever finds a part of one.
fn put(path: &Path, entry: &Entry) -> Result<File> {
    let new = path.with_extension("new");
    crash_point();
    let file = open(&new, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL)?;
    let write = || {
        try_lock(&file, &new)?;
        let text = entry.text();
        tear_point(&file, &text);
        file.write_all_at(text.as_bytes(), 0).map_err(io_error("write to", &new))?;
        crash_point();
        file.sync_all().map_err(io_error("sync", &new))?;
        crash_point();
        fs::rename(&new, path).map_err(io_error("put in its place", &new))
    };
    if let Err(error) = write() {
        if let Err(error) = remove(&new) {
            tracing::warn!(%error, "can't remove a record that was not put in place");
        }
        return Err(error);
    }
    crash_point();
    path.parent().map_or(Ok(()), sync_directory)?;
    Ok(file)
}

/// This process: its ID and the name of its command.
pub(crate) fn this_process(host: &Host) -> Owner {
    let command = fs::read_to_string(host.proc.join("self/comm"))
        .ok()
        .or_else(|| Some(std::env::current_exe().ok()?.file_name()?.to_string_lossy().into_owned()))
        .unwrap_or_else(|| "?".into());
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok().map(|time| time.as_secs());
    let command = command.trim_end().chars().take(64).collect();
    Owner { pid: std::process::id(), command, since, guest: None }
}

pub(crate) fn read_owner(lock: &File) -> Option<Owner> {
    let mut bytes = [0; 512];
    let count = lock.read_at(&mut bytes, 0).ok()?;
    let text = String::from_utf8_lossy(bytes.get(..count)?).into_owned();
    let (pid, command) = text.trim_end().split_once(' ')?;
    Some(Owner { pid: pid.parse().ok()?, command: command.to_owned(), since: None, guest: None })
}

pub(crate) fn make_directory(path: &Path, mode: u32) -> Result<()> {
    let made = DirBuilder::new().recursive(mode == 0o755).mode(mode).create(path);
    match made {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(io_error("make", path)(error)),
        _ => Ok(()),
    }
}

/// Whether only this user can have written to a file or directory.
///
/// # Errors
/// What is wrong.
pub fn check_trusted(path: &Path, data: &fs::Metadata, directory: bool) -> Result<()> {
    check_trusted_by(rustix::process::geteuid().as_raw(), path, data, directory)
}

fn check_trusted_by(user: u32, path: &Path, data: &fs::Metadata, directory: bool) -> Result<()> {
    if data.uid() == 0 && user != 0 {
        // It is the host's ledger, and nobody but root may change the host.
        return Err(io_error("use", path)(io::ErrorKind::PermissionDenied.into()));
    }
    let what = if directory && !data.is_dir() {
        "is not a directory".into()
    } else if !directory && !data.is_file() {
        "is not a regular file".into()
    } else if data.uid() != user {
        format!("belongs to user {} and not to {user}", data.uid())
    } else if data.mode() & 0o022 != 0 {
        format!("can be written to by others (mode {:o})", data.mode() & 0o7777)
    } else {
        return Ok(());
    };
    Err(LedgerError::Untrusted { path: path.into(), what })
}

pub(crate) fn open(path: &Path, flags: OFlags) -> Result<File> {
    // Not following a link, and not waiting for the other end of a FIFO.
    let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = match openat(rustix::fs::CWD, path, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => File::from(file),
        Err(rustix::io::Errno::LOOP) => {
            return Err(LedgerError::Untrusted { path: path.into(), what: "is a symbolic link".into() });
        }
        Err(error) => return Err(io_error("open", path)(error.into())),
    };
    check_trusted(path, &file.metadata().map_err(io_error("look at", path))?, false)?;
    Ok(file)
}

/// Waits for the ledger's own lock.
fn wait_for(
    lock: &File,
    path: &Path,
    how: FlockOperation,
    deadline: Duration,
    is_given_up: impl Fn() -> bool,
) -> Result<()> {
    let until = until(deadline);
    while !try_flock(lock, path, how)? {
        if Instant::now() >= until || is_given_up() {
            return Err(LedgerError::Busy { holder: read_owner(lock), path: path.into(), deadline });
        }
        wait_point();
        std::thread::sleep(LOCK_POLL);
    }
    Ok(())
}

pub(crate) fn try_lock(file: &File, path: &Path) -> Result<bool> {
    try_flock(file, path, EXCLUSIVE)
}

fn try_flock(file: &File, path: &Path, how: FlockOperation) -> Result<bool> {
    loop {
        match flock(file, how) {
            Ok(()) => return Ok(true),
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(false),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(io_error("lock", path)(error.into())),
        }
    }
}

pub(crate) fn remove(path: &Path) -> Result<()> {
    fs::remove_file(path).map_err(io_error("remove", path))?;
    crash_point();
    path.parent().map_or(Ok(()), sync_directory)
}

fn sync_directory(directory: &Path) -> Result<()> {
    File::open(directory).and_then(|file| file.sync_all()).map_err(io_error("sync", directory))
}

pub(crate) fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LedgerError {
    let path = path.to_owned();
    move |source| {
        let remedy = match source.kind() {
            io::ErrorKind::PermissionDenied => "run as root",
            io::ErrorKind::StorageFull => "make room on its file system",
            io::ErrorKind::ReadOnlyFilesystem => {
                "give the state directory a file system that can be written to"
            }
            io::ErrorKind::Unsupported => {
                "give the state directory a file system that has locks, such as tmpfs"
            }
            _ => "look at the file and its file system",
        };
        LedgerError::Io { operation, path, source, remedy }
    }
}

#[cfg(not(test))]
fn crash_point() {}

#[cfg(not(test))]
fn tear_point(_file: &File, _text: &str) {}

#[cfg(not(test))]
pub(crate) fn wait_point() {}

#[cfg(test)]
pub(crate) use crash::wait_point;
#[cfg(test)]
use crash::{crash_point, tear_point};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ledger_is_trusted_by_its_owner_alone() {
        fn check(user: u32, path: &Path, expect: Result<(), &str>) {
            let data = fs::symlink_metadata(path).unwrap();
            match (check_trusted_by(user, path, &data, data.is_dir()), expect) {
                (Ok(()), Ok(())) => {}
                (Err(error), Err(expect)) => assert!(error.to_string().contains(expect), "{error}"),
                (got, _) => panic!("{user} {}: {got:?}", path.display()),
            }
        }
        // Root's on every machine.
        let roots = Path::new("/proc");
        check(0, roots, Ok(()));
        check(1000, roots, Err("run as root"));
        let own = tempfile::NamedTempFile::new().unwrap();
        let user = own.as_file().metadata().unwrap().uid();
        check(user, own.path(), Ok(()));
        // Root trusts no other user's.
        check(u32::MAX, own.path(), Err(if user == 0 { "run as root" } else { "can't be trusted" }));
    }
}
