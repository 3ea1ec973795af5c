//! Files that the operator has written, in folders that may be another user's.
//!
//! Whoever owns the folder can put a link at any name in it at any time, and the operator is often root. So a link is
//! followed only if root or the operator made it, and a FIFO written to; a new file is made under a name that nobody knows before, and between
//! two looks at the folder it is held open.

use std::ffi::OsString;
use std::fs::File;
use std::hash::{BuildHasher as _, RandomState};
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{
    AtFlags, CWD, FileType, MemfdFlags, Mode, OFlags, PROC_SUPER_MAGIC, fchmod, fstat, fstatfs, memfd_create,
    openat, readlinkat, renameat, statat, unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;

/// Links that are followed, one behind the other.
const LINKS: usize = 8;
/// How long somebody is waited for who reads a FIFO, and then for each time that he makes room.
const READER: Duration = Duration::from_secs(10);
/// How often it is looked whether there is one.
const LOOK: Duration = Duration::from_millis(20);
/// Names that are tried for a new file.
const ATTEMPTS: usize = 16;

/// Opens a file, or makes it if `flags` say so. A link is followed as this module says.
///
/// # Errors
/// The Linux kernel's; for a link of another user.
pub(crate) fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    let (path, flags) = match follow(path)? {
        Place::Named(path) => (path, flags | OFlags::NOFOLLOW),
        Place::Descriptor(path) => (path, flags),
    };
    let file = File::from(openat(CWD, &path, flags | OFlags::CLOEXEC, Mode::from_raw_mode(0o666))?);
    // The file may have been replaced since `follow` checked it.
    if flags.contains(OFlags::NOFOLLOW) {
        check_node(&path, &fstat(&file)?)?;
    }
    Ok(file)
}

/// Checks that root or the operator owns a link or a FIFO: any user can create these.
fn check_node(path: &Path, data: &rustix::fs::Stat) -> io::Result<()> {
    let what = match FileType::from_raw_mode(data.st_mode) {
        FileType::Symlink => "link",
        FileType::Fifo => "FIFO",
        _ => return Ok(()),
    };
    if data.st_uid == 0 || data.st_uid == geteuid().as_raw() {
        return Ok(());
    }
    let what = format!("{} is a {what} that the user {} made; remove it", path.display(), data.st_uid);
    Err(io::Error::new(io::ErrorKind::PermissionDenied, what))
}

/// Has `write` write a file that takes the place of what is at `path`, so that whoever looks sees all of it or none, also
/// after a crash. A device or a pipe is written to, of which a FIFO's reader has some seconds to come and to read on. The file takes the place of a
/// link, and of another user's FIFO.
///
/// # Errors
/// The Linux kernel's, and `write`'s; what was there is as it was then.
pub(crate) fn replace(path: &Path, write: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
    match stream(path)? {
        Some(Stream::Waits(there)) => return write(&there),
        Some(Stream::Fifo(there)) => return write_fifo(&there, write),
        None => {}
    }
    let name = path.file_name().ok_or(Errno::ISDIR)?;
    let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
    let folder = openat(CWD, folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let (file, beside) = make(&folder)?;
    let written = (|| {
        // Nobody may read it who could not read what it replaces.
        if let Ok(there) = statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW)
            && FileType::from_raw_mode(there.st_mode) == FileType::RegularFile
        {
            fchmod(&file, Mode::from_raw_mode(fstat(&file)?.st_mode & there.st_mode & 0o666))?;
        }
        write(&file)?;
        file.sync_data()?;
        Ok(renameat(&folder, &beside, &folder, name)?)
    })();
    if written.is_err() {
        // It is hidden, and its name tells what it is.
        let _ = unlinkat(&folder, &beside, AtFlags::empty());
    }
    written
}

/// A new file in a folder, and its name.
fn make(folder: &rustix::fd::OwnedFd) -> io::Result<(File, String)> {
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
    let path = match follow(path) {
        Ok(Place::Named(path)) => path,
        Ok(Place::Descriptor(path)) => {
            let there = openat(CWD, path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
            return Ok(Some(Stream::Waits(there.into())));
        }
        // Its place is taken.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(None),
        Err(error) => return Err(error),
    };
    match statat(CWD, &path, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(there) if FileType::from_raw_mode(there.st_mode) == FileType::Fifo => fifo(&path).map(Some),
        Ok(there) if FileType::from_raw_mode(there.st_mode) != FileType::RegularFile => {
            let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            Ok(Some(Stream::Waits(openat(CWD, path, flags, Mode::empty())?.into())))
        }
        Ok(_) | Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// A FIFO, once somebody reads it.
fn fifo(path: &Path) -> io::Result<Stream> {
    let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let until = Instant::now() + READER;
    loop {
        match openat(CWD, path, flags, Mode::empty()) {
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

/// Where a path leads.
enum Place {
    /// To this, which is no link, or not there.
    Named(PathBuf),
    /// To a descriptor of this process, as `/dev/stdout` does.
    Descriptor(PathBuf),
}

fn follow(path: &Path) -> io::Result<Place> {
    let mut path = path.to_owned();
    for _ in 0..LINKS {
        let node = match openat(CWD, &path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
        {
            Err(Errno::NOENT) => return Ok(Place::Named(path)),
            node => node?,
        };
        let data = fstat(&node)?;
        let is_link = FileType::from_raw_mode(data.st_mode) == FileType::Symlink;
        if is_link && fstatfs(&node)?.f_type == PROC_SUPER_MAGIC {
            return Ok(Place::Descriptor(path));
        }
        check_node(&path, &data)?;
        if !is_link {
            return Ok(Place::Named(path));
        }
        let target = OsString::from_vec(readlinkat(&node, "", Vec::new())?.into_bytes());
        path = path.parent().unwrap_or(Path::new("")).join(target);
    }
    Err(Errno::LOOP.into())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{Read as _, Write as _};
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt, lchown, symlink};

    use super::*;

    const TEXT: &[u8] = b"new";

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
            let error = open(&path("link"), OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC).unwrap_err();
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
        let error = open(&fifo, OFlags::WRONLY | OFlags::NONBLOCK).unwrap_err();
        assert!(error.to_string().contains("is a FIFO that the user 12345 made"), "{error}");
        save(&fifo).unwrap();
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        assert!(fifo.symlink_metadata().unwrap().is_file());
        // Root's own link is followed.
        symlink("aim", path("link")).unwrap();
        drop(open(&path("link"), OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC).unwrap());
        assert_eq!(fs::read(path("aim")).unwrap(), b"");
    }
}
