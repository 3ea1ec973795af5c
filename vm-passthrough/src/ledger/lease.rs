//! Leases of functions: who runs kernels on one, so that nobody takes it away meanwhile.
//!
//! A lease is a file `STATE/ledger/ADDRESS.PID.NUMBER.shared`, of which its process holds a lock (flock(2)) as long as
//! the lease lives. So it is gone with its process, however that ends; what is left of the file is removed by the next
//! who looks with the ledger locked. Any number of leases of one function may live at once.
//!
//! The file has one line, in the form of a journal's: who has the lease, for people.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FlockOperation, OFlags, flock};

use super::journal::{checked_line, escape, line_of, unescape};
use super::{Ledger, LedgerError, Owner, io_error, is_marked_held, open, remove, try_lock};
use crate::{Host, PciAddress, files};

/// Most leases that are looked at.
const MAX_LEASES: usize = 65_536;
/// Most bytes of a lease that are read.
const MAX_BYTES: u64 = 4096;

/// A process that shares a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharer {
    /// The function.
    pub address: PciAddress,
    /// Who it is.
    pub owner: Owner,
    /// When it was started, in clock ticks after the boot (the field `starttime` of proc_pid_stat(5)); `None` where that
    /// could not be read. It tells whether the process ID means another process by now: then a child of the owner keeps
    /// the lease.
    pub started: Option<u64>,
    /// The file of the lease.
    pub path: PathBuf,
}

impl Sharer {
    /// Whether the process that took the lease still runs, by its start.
    pub fn is_running(&self, host: &Host) -> bool {
        self.started.is_none() || start_of(host, self.owner.pid) == self.started
    }
}

/// Who shares `address` now. It only reads, and needs no lock of the ledger.
///
/// # Errors
/// When the ledger's directory can't be read.
pub fn sharers(host: &Host, address: PciAddress) -> Result<Vec<Sharer>, LedgerError> {
    sharers_in(&host.state.join("ledger"), address, |_| Ok(()))
}

/// Who shares `address` by the leases in a directory. `ended` is given the file of each lease that has ended.
fn sharers_in(
    directory: &Path,
    address: PciAddress,
    ended: impl Fn(&Path) -> Result<(), LedgerError>,
) -> Result<Vec<Sharer>, LedgerError> {
    let prefix = format!("{address}.");
    let names = files::names(directory).map_err(io_error("list", directory))?;
    let leases = names.into_iter().filter(|name| name.starts_with(&prefix) && name.ends_with(".shared"));
    let mut sharers = Vec::new();
    for path in leases.take(MAX_LEASES).map(|name| directory.join(name)) {
        match sharer(address, &path)? {
            Some(sharer) => sharers.push(sharer),
            None => ended(&path)?,
        }
    }
    Ok(sharers)
}

impl Ledger {
    /// Makes the file of a lease of `address` for this process, and locks it.
    pub(crate) fn create_lease(&self, address: PciAddress) -> Result<(PathBuf, File), LedgerError> {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        let owner = self.owner();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = self.directory().join(format!("{address}.{}.{number}.shared", owner.pid));
        let started = start_of(&self.host, owner.pid).map_or_else(|| "-".into(), |ticks| ticks.to_string());
        let command = escape(Some(&owner.command));
        let line = line_of(&format!("shared 1 {address} {} {started} {command}", owner.pid));
        // What an earlier process with this ID left; nobody else makes files of this name.
        if path.exists() {
            remove(&path)?;
        }
        let file = open(&path, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL)?;
        let written = try_lock(&file, &path)
            .and_then(|_| file.write_all_at(line.as_bytes(), 0).map_err(io_error("write to", &path)));
        match written {
            Ok(()) => Ok((path, file)),
            Err(error) => remove(&path).and(Err(error)),
        }
    }

    /// Who shares `address` now, after what dead processes left was removed.
    pub(crate) fn sharers(&self, address: PciAddress) -> Result<Vec<Sharer>, LedgerError> {
        // Its owner may have removed it just now.
        let remove = |path: &Path| if path.exists() { remove(path) } else { Ok(()) };
        sharers_in(self.directory(), address, remove)
    }
}

/// Who has the lease in a file; `None` when it has ended.
fn sharer(address: PciAddress, path: &Path) -> Result<Option<Sharer>, LedgerError> {
    let file = match open(path, OFlags::RDONLY) {
        Ok(file) => file,
        Err(LedgerError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    // Several may look at once: their locks are shared, and the owner's is not.
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) if is_marked_held(path) => {}
        Ok(()) => return Ok(None),
        Err(rustix::io::Errno::WOULDBLOCK) => {}
        Err(error) => return Err(io_error("lock", path)(error.into())),
    }
    let mut bytes = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut bytes).map_err(io_error("read", path))?;
    // The lock alone says that it lives; a line that can't be read costs only the name.
    let (owner, started) = parse(&bytes, address).unwrap_or_else(|| {
        let pid = path.file_name().and_then(|name| name.to_str()?.split('.').nth_back(2)?.parse().ok());
        (Owner { pid: pid.unwrap_or(0), command: "?".into(), since: None, guest: None }, None)
    });
    Ok(Some(Sharer { address, owner, started, path: path.into() }))
}

fn parse(bytes: &[u8], address: PciAddress) -> Option<(Owner, Option<u64>)> {
    let mut words = checked_line(bytes)?.split(' ');
    if (words.next()?, words.next()?) != ("shared", "1") || words.next()?.parse() != Ok(address) {
        return None;
    }
    let pid = words.next()?.parse().ok()?;
    let started = match words.next()? {
        "-" => None,
        ticks => Some(ticks.parse().ok()?),
    };
    Some((Owner { pid, command: unescape(words.next()?)??, since: None, guest: None }, started))
}

/// When a process was started, in clock ticks after the boot; `None` when there is no such process.
fn start_of(host: &Host, pid: u32) -> Option<u64> {
    let stat = files::read(&host.proc.join(pid.to_string()).join("stat")).ok()??;
    // The command, in parentheses, may have any character; the 20th word behind it is the start.
    stat.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()
}
