//! Opens, creates and replaces files at paths that lead through directories of other users.
//!
//! The process is often root's, and whoever can write to a directory on the path can put a symbolic link there at any time.
//! So the kernel never resolves a path here: each component is opened relative to the directory before it, and a link
//! is read through its own descriptor, which is the one whose owner was checked. A link is followed only if root or the user
//! of this process owns it, or if it belongs to procfs, where only the kernel creates links. Any other link is an error,
//! wherever it is in the path. A FIFO of another user is not opened either.
//!
//! [`regular`] reads files that a user names for reading.

pub mod regular;
mod walk;

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::hash::{BuildHasher as _, RandomState};
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{
    AtFlags, FileType, MemfdFlags, Mode, OFlags, fchmod, fstat, memfd_create, openat, renameat, statat,
    unlinkat,
};
use rustix::io::Errno;

use walk::{Place, check_node};

/// How long a write to a FIFO waits for its reader to open it, and then each time for room.
const READER: Duration = Duration::from_secs(10);
/// The interval at which [`READER`] is waited for.
const LOOK: Duration = Duration::from_millis(20);
/// Names that are tried for a new file.
const ATTEMPTS: usize = 16;

/// A name in an open directory. The name may be a link, or absent.
#[derive(Debug)]
pub struct Entry {
    /// The directory, opened with `O_PATH`.
    pub folder: OwnedFd,
    /// The last component of the path.
    pub name: OsString,
}

/// Resolves a path up to its last component.
///
/// # Errors
/// For a link that may not be followed, and the Linux kernel's.
pub fn entry(path: &Path) -> io::Result<Entry> {
    walk::entry(path)
}

/// Opens a file. With `CREATE` in `flags`, a missing one is created with `mode`, less the umask.
///
/// # Errors
/// For a link that may not be followed, another user's FIFO, and the Linux kernel's.
pub fn open(path: &Path, flags: OFlags, mode: u32) -> io::Result<File> {
    let (at, flags) = match walk::follow(path)? {
        Place::Named(at) => (at, flags | OFlags::NOFOLLOW),
        Place::Descriptor(at) => (at, flags),
    };
    let file = File::from(openat(&at.folder, &at.name, flags | OFlags::CLOEXEC, Mode::from_raw_mode(mode))?);
    // The file may have been replaced since the walk checked it.
    if flags.contains(OFlags::NOFOLLOW) {
        check_node(path, &fstat(&file)?)?;
    }
    Ok(file)
}

/// Opens a directory for reading. A missing one is created with `mode`; with `parents`, so are those above it. If the
/// last component is a link, it is an error, whoever owns the link.
///
/// # Errors
/// For a link that may not be followed, and the Linux kernel's.
pub fn open_folder(path: &Path, mode: u32, parents: bool) -> io::Result<File> {
    let folder = walk::make_folder(path, Mode::from_raw_mode(mode), parents)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat(folder, ".", flags, Mode::empty())?.into())
}

/// Has `write` write a file that takes the place of what is at `path`, so that whoever looks sees all of it or none, also
/// after a crash. A device or a pipe is written to, of which a FIFO's reader has some seconds to come and to read on. The file takes the place of a
/// link, and of another user's FIFO.
///
/// # Errors
/// The Linux kernel's, and `write`'s; what was there is as it was then.
pub fn replace(path: &Path, write: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
    match stream(path)? {
        Some(Stream::Waits(there)) => return write(&there),
        Some(Stream::Fifo(there)) => return write_fifo(&there, write),
        None => {}
    }
    let Entry { folder, name } = entry(path)?;
    let (file, beside) = make(&folder)?;
    let written = (|| {
        // Nobody may read it who could not read what it replaces.
        if let Ok(there) = statat(&folder, &name, AtFlags::SYMLINK_NOFOLLOW)
            && FileType::from_raw_mode(there.st_mode) == FileType::RegularFile
        {
            fchmod(&file, Mode::from_raw_mode(fstat(&file)?.st_mode & there.st_mode & 0o666))?;
        }
        write(&file)?;
        file.sync_data()?;
        Ok(renameat(&folder, &beside, &folder, &name)?)
    })();
    if written.is_err() {
        // It is hidden, and its name tells what it is.
        let _ = unlinkat(&folder, &beside, AtFlags::empty());
    }
    written
}

/// A new file in a folder, and its name.
fn make(folder: &OwnedFd) -> io::Result<(File, String)> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    for _ in 0..ATTEMPTS {
        let name = format!(".vm-service-{:016x}.tmp", RandomState::new().hash_one(std::process::id()));
        match openat(folder, &name, flags, Mode::from_raw_mode(0o666)) {
            Err(Errno::EXIST) => {}
            file => return Ok((file?.into(), name)),
        }
    }
    Err(Errno::EXIST.into())
}

/// Something that is neither a file nor absent, open for writing.
enum Stream {
    /// A device, or a descriptor of this process.
    Waits(File),
    /// A FIFO with a reader, which may stop to read: writes to it fail where there is no room.
    Fifo(File),
}

/// What is at `path`, if it is neither a file nor absent.
fn stream(path: &Path) -> io::Result<Option<Stream>> {
    let Entry { folder, name } = match walk::follow(path) {
        Ok(Place::Named(at)) => at,
        Ok(Place::Descriptor(at)) => {
            let flags = OFlags::WRONLY | OFlags::CLOEXEC;
            let there = openat(at.folder, at.name, flags, Mode::empty())?;
            return Ok(Some(Stream::Waits(there.into())));
        }
        // The new file replaces it. A link on the way to it is an error again when its directory is opened.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(None),
        Err(error) => return Err(error),
    };
    match statat(&folder, &name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(there) if FileType::from_raw_mode(there.st_mode) == FileType::Fifo => {
            fifo(path, &folder, &name).map(Some)
        }
        Ok(there) if FileType::from_raw_mode(there.st_mode) != FileType::RegularFile => {
            let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            Ok(Some(Stream::Waits(openat(folder, name, flags, Mode::empty())?.into())))
        }
        Ok(_) | Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// A FIFO, once somebody reads it.
fn fifo(path: &Path, folder: &OwnedFd, name: &OsStr) -> io::Result<Stream> {
    let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let until = Instant::now() + READER;
    loop {
        match openat(folder, name, flags, Mode::empty()) {
            Err(Errno::NXIO) if Instant::now() < until => std::thread::sleep(LOOK),
            Err(Errno::NXIO) => return Err(nobody_reads("nobody opened the FIFO to read it")),
            there => {
                let there = File::from(there?);
                check_node(path, &fstat(&there)?)?;
                return Ok(Stream::Fifo(there));
            }
        }
    }
}

/// Has `write` write a file in memory, and a FIFO's reader take that.
fn write_fifo(fifo: &File, write: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
    let file = File::from(memfd_create("output", MemfdFlags::CLOEXEC)?);
    write(&file)?;
    let (mut at, mut part) = (0, vec![0; 64 << 10]);
    loop {
        let read = file.read_at(&mut part, at)?;
        let mut rest = &part[..read];
        if rest.is_empty() {
            return Ok(());
        }
        at += read as u64;
        while !rest.is_empty() {
            match (&*fifo).write(rest) {
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => room(fifo)?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Waits until a FIFO has room.
fn room(fifo: &File) -> io::Result<()> {
    let timeout = Timespec::try_from(READER).map_err(io::Error::other)?;
    match poll(&mut [PollFd::new(fifo, PollFlags::OUT)], Some(&timeout)) {
        Ok(0) => Err(nobody_reads("whoever opened the FIFO does not read it")),
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn nobody_reads(what: &str) -> io::Error {
    let what = format!("{what} within {} s; name a file, or start the reader first", READER.as_secs());
    io::Error::new(io::ErrorKind::TimedOut, what)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{Read as _, Write as _};
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt, lchown, symlink};

    use rustix::fs::CWD;
    use rustix::process::geteuid;

    use super::*;

    const TEXT: &[u8] = b"new";
    const FRESH: OFlags = OFlags::WRONLY.union(OFlags::CREATE).union(OFlags::TRUNC);

    fn save(path: &Path) -> io::Result<()> {
        replace(path, |mut file| file.write_all(TEXT))
    }

    #[test]
    fn what_is_there_is_replaced_and_a_stream_is_written_to() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("secret"), "old").unwrap();
        fs::set_permissions(path("secret"), PermissionsExt::from_mode(0o600)).unwrap();
        fs::write(path("aim"), "old").unwrap();
        symlink("aim", path("link")).unwrap();
        for name in ["fresh", "secret", "link"] {
            save(&path(name)).unwrap();
            assert_eq!(fs::read(path(name)).unwrap(), TEXT, "{name}");
        }
        assert_eq!(path("secret").metadata().unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::read(path("aim")).unwrap(), b"old");
        rustix::fs::mknodat(CWD, path("fifo"), FileType::Fifo, 0o600.into(), 0).unwrap();
        let fifo = path("fifo");
        let reader = std::thread::spawn(move || {
            let mut got = Vec::new();
            File::open(fifo).unwrap().read_to_end(&mut got).unwrap();
            got
        });
        save(&path("fifo")).unwrap();
        assert_eq!(reader.join().unwrap(), TEXT);
        // More than it holds, of which all is read.
        let fifo = path("fifo");
        let reader = std::thread::spawn(move || fs::read(fifo).unwrap());
        let large = vec![7; 1 << 20];
        replace(&path("fifo"), |mut file| file.write_all(&large)).unwrap();
        assert!(reader.join().unwrap() == large);
        // Nobody opens it; then somebody does, and does not read.
        let error = save(&path("fifo")).unwrap_err().to_string();
        assert!(error.contains("nobody opened the FIFO") && error.contains("name a file"), "{error}");
        let deaf = File::options().read(true).write(true).open(path("fifo")).unwrap();
        let error = replace(&path("fifo"), |mut file| file.write_all(&large)).unwrap_err().to_string();
        assert!(error.contains("does not read it"), "{error}");
        drop(deaf);
        save(Path::new("/dev/null")).unwrap();
        save(Path::new("/dev/stderr")).unwrap();
        for (name, expect) in [("", "directory"), ("absent/file", "No such file")] {
            let error = save(&path(name)).unwrap_err().to_string();
            assert!(error.contains(expect), "{name}: {error}");
        }
        // What fails leaves nothing behind.
        replace(&path("fresh"), |_| Err(io::Error::other("full"))).unwrap_err();
        assert_eq!(fs::read(path("fresh")).unwrap(), TEXT);
        let hidden = fs::read_dir(folder.path()).unwrap().flatten();
        assert_eq!(hidden.filter(|entry| entry.file_name().to_string_lossy().starts_with('.')).count(), 0);
    }

    #[test]
    fn a_link_of_another_user_is_not_followed() {
        if !geteuid().is_root() {
            println!("skipped: only root can make another user's link");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("aim"), "root's").unwrap();
        for aim in ["aim", "/dev/full", "absent"] {
            symlink(aim, path("link")).unwrap();
            lchown(path("link"), Some(12345), Some(12345)).unwrap();
            let error = open(&path("link"), FRESH, 0o666).unwrap_err();
            assert!(error.to_string().contains("the user 12345 made"), "{error}");
            save(&path("link")).unwrap();
            assert!(path("link").symlink_metadata().unwrap().is_file());
            fs::remove_file(path("link")).unwrap();
        }
        assert_eq!(fs::read(path("aim")).unwrap(), b"root's");
        assert!(!path("absent").exists());
        // A FIFO of another user is not written to either.
        let fifo = path("fifo");
        rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, 0o666.into(), 0).unwrap();
        lchown(&fifo, Some(12345), Some(12345)).unwrap();
        let mut reader =
            File::from(openat(CWD, &fifo, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty()).unwrap());
        let error = open(&fifo, OFlags::WRONLY | OFlags::NONBLOCK, 0).unwrap_err();
        assert!(error.to_string().contains("is a FIFO that the user 12345 made"), "{error}");
        save(&fifo).unwrap();
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        assert!(fifo.symlink_metadata().unwrap().is_file());
        // Root's own link is followed.
        symlink("aim", path("link")).unwrap();
        drop(open(&path("link"), FRESH, 0o666).unwrap());
        assert_eq!(fs::read(path("aim")).unwrap(), b"");
    }

    /// Has `write` write below a folder with a link `alice/link` to `aim`, which root or the user 12345 owns.
    fn through_a_link(owner: u32, write: impl Fn(&Path) -> io::Result<()>) -> io::Result<()> {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("alice")).unwrap();
        fs::create_dir(path("aim")).unwrap();
        symlink("../aim/", path("alice/link")).unwrap();
        lchown(path("alice/link"), Some(owner), None).unwrap();
        let written = write(&path("alice/link/new"));
        assert_eq!(path("aim/new").exists(), written.is_ok());
        written
    }

    #[test]
    fn a_link_on_the_way_is_followed_if_no_other_user_made_it() {
        if !geteuid().is_root() {
            println!("skipped: only root can make another user's link");
            return;
        }
        type Write = fn(&Path) -> io::Result<()>;
        let ways: [(&str, Write); 4] = [
            ("replace", save),
            ("open", |path| open(path, FRESH, 0o666).map(drop)),
            ("open_folder", |path| open_folder(path, 0o700, false).map(drop)),
            ("entry", |path| {
                let at = entry(path)?;
                Ok(rustix::fs::mkdirat(at.folder, at.name, Mode::RWXU)?)
            }),
        ];
        for (way, write) in ways {
            through_a_link(0, write).unwrap();
            let error = through_a_link(12345, write).unwrap_err().to_string();
            assert!(error.contains("alice/link is a link that the user 12345 made"), "{way}: {error}");
        }
    }

    #[test]
    fn paths_lead_where_the_kernel_leads() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        open_folder(&path("a/b/c"), 0o700, true).unwrap();
        symlink(path("a/b"), path("absolute")).unwrap();
        symlink("absolute/c/..//.", path("relative")).unwrap();
        symlink("loop", path("loop")).unwrap();
        fs::write(path("file"), "").unwrap();
        let held = fs::File::open(path("a")).unwrap();
        let held = format!("/proc/self/fd/{}/b/../b/f", std::os::fd::AsRawFd::as_raw_fd(&held));
        assert_eq!(entry(Path::new("/../..")).unwrap().name, ".");
        for name in ["relative/f", "absolute/c/../f", "relative/c/../../b/./f", &held] {
            save(&path(name)).unwrap();
            assert_eq!(fs::read(path("a/b/f")).unwrap(), TEXT, "{name}");
            drop(open(&path(name), FRESH, 0o666).unwrap());
            assert_eq!(fs::read(path("a/b/f")).unwrap(), b"", "{name}");
            fs::remove_file(path("a/b/f")).unwrap();
        }
        for (name, expect) in [
            ("loop/f", "Too many levels"),
            ("file/f", "Not a directory"),
            ("none/f", "No such file"),
            ("relative", "it is a symbolic link"),
            ("loop", "it is a symbolic link"),
            ("file", "Not a directory"),
        ] {
            let error = open_folder(&path(name), 0o700, false).unwrap_err().to_string();
            assert!(error.contains(expect), "{name}: {error}");
        }
    }
}
