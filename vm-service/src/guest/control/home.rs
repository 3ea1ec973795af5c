//! A guest's directory, `STATE/guests/NAME`, and its name: one living guest has it at a time.
//!
//! The process that runs the guest holds a lock on the file `lock` (flock(2)) for all that time, which the Linux kernel drops
//! with it: a process ID, which may belong to another process by now, tells nothing. What a guest that died has left is removed by
//! whoever takes the lock next.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, openat};
use rustix::io::Errno;
use rustix::process::geteuid;
use thiserror::Error;
use vm_passthrough::Host;
use vm_passthrough::ledger::check_trusted;

/// How long a lock is asked for: another command may look whether the guest lives.
const LOOKED_AT: Duration = Duration::from_millis(500);

/// Guests that have ended whose logs are kept: those that ended last.
const KEPT: usize = 100;

/// Why a guest can't have its directory.
#[derive(Debug, Error)]
pub(crate) enum HomeError {
    /// A guest of this name lives.
    #[error(
        "a guest named {0} runs already; stop it (`vm-service stop {0}`), or give this one another `name`"
    )]
    Taken(String),
    /// It can't be made.
    #[error("the guest's directory {path} can't be used: {source}", path = .path.display())]
    Unusable {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl HomeError {
    /// Whether this user may not write where guests have their directories.
    pub(crate) fn is_forbidden(&self) -> bool {
        use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
        matches!(self, Self::Unusable { source, .. } if matches!(source.kind(), PermissionDenied | ReadOnlyFilesystem))
    }
}

/// The directory of a guest, which has the name as long as this lives.
#[derive(Debug)]
pub(crate) struct GuestHome {
    path: PathBuf,
    lock: File,
    /// Whether what is in it stays when the guest ends, for whoever looks what became of it.
    is_kept: bool,
}

/// What a guest's process that the daemon started logs.
pub(crate) const LOG: &str = "log";
/// What that of the guest of this name before it logged.
pub(crate) const PREVIOUS_LOG: &str = "log.previous";

/// Where guests have their directories.
fn folder(host: &Host) -> PathBuf {
    host.state.join("guests")
}

/// The names of all guests that have a directory, dead ones too.
///
/// # Errors
/// When the directories can't be listed.
pub(crate) fn names(host: &Host) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    match fs::read_dir(folder(host)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(names),
        listed => {
            for entry in listed? {
                names.extend(
                    entry?.file_name().into_string().ok().filter(|name| crate::config::is_name(name)),
                );
            }
        }
    }
    names.sort();
    Ok(names)
}

impl GuestHome {
    /// The path of a guest's directory, whether there is one or not.
    pub(crate) fn path_of(host: &Host, name: &str) -> PathBuf {
        folder(host).join(name)
    }

    /// What tells a guest that lives from a later one of its name.
    pub(crate) fn id_of(host: &Host, name: &str) -> Option<(u64, u64)> {
        let control = fs::symlink_metadata(Self::path_of(host, name).join("control")).ok()?;
        Some((control.dev(), control.ino()))
    }

    /// Whether the guest that had this ID does not live any more, when `deadline` has passed at the latest. Where it had none any more,
    /// it had ended, and who has its name is the next guest.
    pub(crate) fn has_ended(host: &Host, name: &str, id: Option<(u64, u64)>, deadline: Duration) -> bool {
        let until = Instant::now() + deadline;
        while id.is_some() && Self::is_taken(host, name) && Self::id_of(host, name) == id {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }

    /// Takes a name, and removes what an earlier guest has left but for its log.
    ///
    /// # Errors
    /// When a guest that lives has it, or the directory can't be made.
    pub(crate) fn take(host: &Host, name: &str) -> Result<Self, HomeError> {
        let path = Self::path_of(host, name);
        let home = take(host, &path).map_err(|source| HomeError::Unusable { path: path.clone(), source })?;
        let home = home.ok_or_else(|| HomeError::Taken(name.to_owned()))?;
        let cleared = match fs::rename(path.join(LOG), path.join(PREVIOUS_LOG)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => home.clear(&["lock", PREVIOUS_LOG]),
        };
        cleared.map_err(|source| HomeError::Unusable { path, source })?;
        forget_others(host);
        Ok(home)
    }

    /// The directory that another process has taken, whose lock it passed on; it is kept when the guest ends.
    ///
    /// # Errors
    /// When `lock` is not that directory's lock.
    pub(crate) fn inherit(host: &Host, name: &str, lock: File) -> Result<Self, HomeError> {
        let path = Self::path_of(host, name);
        let is_ours = || -> io::Result<bool> {
            let (ours, there) = (lock.metadata()?, fs::symlink_metadata(path.join("lock"))?);
            Ok((ours.dev(), ours.ino()) == (there.dev(), there.ino()) && try_lock(&lock)?)
        };
        match is_ours() {
            Ok(true) => Ok(Self { path, lock, is_kept: true }),
            Ok(false) => Err(HomeError::Taken(name.to_owned())),
            Err(source) => Err(HomeError::Unusable { path, source }),
        }
    }

    /// Whether a process that lives has the directory of this guest.
    pub(crate) fn is_taken(host: &Host, name: &str) -> bool {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let lock = openat(CWD, Self::path_of(host, name).join("lock"), flags, Mode::empty());
        lock.is_ok_and(|lock| flock(lock, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK))
    }

    /// The directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// What [`inherit`](Self::inherit) takes.
    ///
    /// # Errors
    /// When this process has no descriptors left.
    pub(crate) fn into_lock(mut self) -> io::Result<File> {
        self.is_kept = true;
        self.lock.try_clone()
    }

    /// The control socket, which listens.
    ///
    /// # Errors
    /// When it can't be made.
    pub(crate) fn listen(&self) -> io::Result<UnixListener> {
        crate::os::socket::listen(&self.path.join("control"), Some(0o600)).map_err(io::Error::other)
    }

    /// Removes all but these files.
    fn clear(&self, kept: &[&str]) -> io::Result<()> {
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            if kept.iter().all(|name| entry.file_name() != *name) {
                remove(&entry.path())?;
            }
        }
        Ok(())
    }
}

impl Drop for GuestHome {
    fn drop(&mut self) {
        // Under the lock: whoever has opened it meanwhile sees that the file is gone.
        let removed = match self.is_kept {
            true => remove(&self.path.join("control")),
            false => self
                .clear(&["lock"])
                .and_then(|()| remove(&self.path.join("lock")))
                .and_then(|()| fs::remove_dir(&self.path)),
        };
        if let Err(error) = removed {
            tracing::warn!("the guest's directory {} can't be cleared: {error}", self.path.display());
        }
    }
}

/// Does something with a socket of a directory by a short path: those of sockets have no more than 107 bytes.
///
/// # Errors
/// What `act` answers, and when the directory can't be opened.
pub(super) fn in_folder<T>(
    folder: &Path,
    name: &str,
    act: impl FnOnce(PathBuf) -> io::Result<T>,
) -> io::Result<T> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = openat(CWD, folder, flags, Mode::empty())?;
    act(format!("/proc/self/fd/{}/{name}", folder.as_raw_fd()).into())
}

/// Takes a directory's lock; `None` when a process that lives has it.
fn take(host: &Host, path: &Path) -> io::Result<Option<GuestHome>> {
    let until = Instant::now() + LOOKED_AT;
    loop {
        for (folder, mode) in [(&*host.state, 0o755), (&folder(host), 0o700), (path, 0o700)] {
            let data = vm_files::open_folder(folder, mode, true)?.metadata()?;
            if data.uid() == 0 && !geteuid().is_root() {
                return Err(io::ErrorKind::PermissionDenied.into());
            }
            check_trusted(folder, &data, true).map_err(io::Error::other)?;
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let lock = match openat(CWD, path.join("lock"), flags, Mode::RUSR | Mode::WUSR) {
            // The guest that had it has just ended.
            Err(Errno::NOENT) => continue,
            lock => File::from(lock?),
        };
        if try_lock(&lock)? {
            if lock.metadata()?.nlink() > 0 {
                return Ok(Some(GuestHome { path: path.into(), lock, is_kept: false }));
            }
        } else if super::client::is_served(path) || Instant::now() >= until {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Removes what guests have left that ended before the last [`KEPT`]. What can't be removed is left to the next guest that starts.
fn forget_others(host: &Host) {
    let ended = |name: String| {
        let path = GuestHome::path_of(host, &name);
        let changed = fs::symlink_metadata(&path).and_then(|data| data.modified()).ok()?;
        (!GuestHome::is_taken(host, &name)).then_some((changed, path))
    };
    let mut ended: Vec<_> = names(host).unwrap_or_default().into_iter().filter_map(ended).collect();
    ended.sort();
    let surplus = ended.len().saturating_sub(KEPT);
    for (_, path) in ended.into_iter().take(surplus) {
        // Its directory goes with it.
        drop(take(host, &path));
    }
}

fn try_lock(lock: &File) -> io::Result<bool> {
    match flock(lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use vm_passthrough::sim::SimHost;

    use std::os::unix::fs::PermissionsExt as _;
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn who_else_may_write_to_a_directory_could_put_another_in_its_place() {
        let sim = SimHost::new().expect("a simulated host");
        let host = sim.plain_host();
        drop(GuestHome::take(&host, "web1").expect("a home"));
        for open in [host.state.clone(), folder(&host)] {
            fs::set_permissions(&open, fs::Permissions::from_mode(0o1777)).expect("a mode");
            let refused = GuestHome::take(&host, "web1").expect_err("others may write to it").to_string();
            assert!(refused.contains("can be written to by others (mode 1777)"), "{refused}");
            fs::set_permissions(&open, fs::Permissions::from_mode(0o755)).expect("a mode");
        }
        drop(GuestHome::take(&host, "web1").expect("a home"));
    }

    #[test]
    fn one_living_guest_has_a_name() {
        let sim = SimHost::new().expect("a simulated host");
        let host = sim.plain_host();
        let home = GuestHome::take(&host, "web1").expect("a home");
        let refused = GuestHome::take(&host, "web1").expect_err("it is taken");
        assert!(
            GuestHome::has_ended(&host, "web1", None, Duration::ZERO),
            "who is watched is an earlier guest"
        );
        assert!(matches!(refused, HomeError::Taken(_)), "{refused}");
        GuestHome::take(&host, "web2").expect("another name");
        assert_eq!(names(&host).expect("names"), ["web1"]);
        // It dies: nothing is removed, and the lock goes.
        let path = home.path().to_owned();
        let listener = home.listen().expect("a socket");
        fs::write(path.join("log"), "earlier").expect("written");
        drop(home.into_lock().expect("a lock"));
        fs::write(path.join("control"), "").expect("written");
        drop(listener);
        let home = GuestHome::take(&host, "web1").expect("a home again");
        let mut left: Vec<_> =
            fs::read_dir(&path).expect("a directory").flatten().map(|file| file.file_name()).collect();
        left.sort();
        assert_eq!(left, ["lock", "log.previous"]);
        assert_eq!(fs::read_to_string(path.join("log.previous")).expect("its log"), "earlier");
        drop(home);
        assert!(!path.exists());
    }

    #[test]
    fn the_logs_of_those_that_ended_last_are_kept() {
        let sim = SimHost::new().expect("a simulated host");
        let host = sim.plain_host();
        let living = GuestHome::take(&host, "living").expect("a home");
        let begin = SystemTime::now() - Duration::from_secs(1000);
        let name = |number: usize| format!("web{number}");
        for number in 0..KEPT + 3 {
            let mut home = GuestHome::take(&host, &name(number)).expect("a home");
            fs::write(home.path().join("log"), "").expect("written");
            home.is_kept = true;
            let folder = File::open(home.path()).expect("opened");
            drop(home);
            folder.set_modified(begin + Duration::from_secs(number as u64)).expect("a time");
        }
        assert_eq!(names(&host).expect("names").len(), KEPT + 1 + 1, "the last one began before it ended");
        let next = GuestHome::take(&host, "next").expect("a home");
        let left = names(&host).expect("names");
        assert_eq!(left.len(), KEPT + 2);
        assert!(left.contains(&name(3)) && !left.contains(&name(2)) && !left.contains(&name(0)), "{left:?}");
        drop((living, next));
    }

    #[test]
    fn the_name_goes_with_its_lock_to_another_process() {
        let sim = SimHost::new().expect("a simulated host");
        let host = sim.plain_host();
        let home = GuestHome::take(&host, "web1").expect("a home");
        let path = home.path().to_owned();
        fs::write(path.join("log"), "").expect("written");
        let lock = home.into_lock().expect("a lock");
        assert!(path.join("log").exists(), "what is in it stays");
        let other = File::create(sim.path("other")).expect("a file");
        GuestHome::inherit(&host, "web1", other).expect_err("another file");
        let home = GuestHome::inherit(&host, "web1", lock).expect("the home");
        let _listener = home.listen().expect("a socket");
        GuestHome::take(&host, "web1").expect_err("it is taken");
        drop(home);
        assert!(path.join("log").exists() && !path.join("control").exists());
        GuestHome::take(&host, "web1").expect("a home");
    }

    #[test]
    fn directories_that_others_could_have_written_to_are_refused() {
        let sim = SimHost::new().expect("a simulated host");
        let host = sim.plain_host();
        let folder = host.state.join("guests");
        fs::create_dir_all(&folder).expect("a directory");
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).expect("a mode");
        let error = GuestHome::take(&host, "web1").expect_err("refused").to_string();
        assert!(error.contains("can be written to by others"), "{error}");
    }
}
