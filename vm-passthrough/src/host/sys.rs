//! Reads and writes of sysfs attributes, and opens of disks, in a process of their own, so that one that the Linux kernel
//! never finishes cannot hold this process.
//!
//! While a function is held open, a write to `unbind` sleeps in the Linux kernel beyond the reach of any signal, and
//! so does every later access that needs the function's lock: `bind`, before some release even a read of
//! `driver_override`. A thread that sleeps so would keep its process from exiting. So the access is made by a child
//! that shares no descriptors with this process but one end of a pipe and, for a write under a function's lock, that lock
//! ([`SysfsWriter::write_locked`](super::SysfsWriter::write_locked)). When the deadline passes it is left behind; it is reaped by a later access, or by `init` when this
//! process has exited.
//!
//! The child sends no SIGCHLD, and nothing but this module reaps it: waiting for any child, as the rest of the
//! process may do, does not see it (`__WCLONE` in wait(2)). Between fork and exit it only makes system calls, as any
//! thread of this process may hold any lock at the moment of the fork. Memory of a guest should be shared or `MADV_DONTFORK`, as any child keeps private memory
//! of its parent alive.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::deadlines::until;

/// Most bytes of an attribute: one page.
const PAGE: usize = 4096;

/// What the child does.
#[derive(Clone, Copy)]
enum Task<'a> {
    /// Reads an attribute: an errno and what was read.
    Read(&'a CString),
    /// Writes an attribute, under a function's lock: an errno.
    Write(&'a CString, &'a [u8], Option<BorrowedFd<'a>>),
    /// Opens files exclusively, one after the other, and closes each: an errno for each.
    Exclusive(&'a [CString]),
}

/// Writes `value` to the attribute at `path`. The function's `lock` is held until the write has ended,
/// whatever becomes of this process.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`] when `deadline` passed first, else what the Linux kernel answered.
pub(super) fn write(
    path: &Path,
    value: &str,
    deadline: Duration,
    lock: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    access(Task::Write(&path, value.as_bytes(), lock), deadline).map(drop)
}

/// Reads the attribute at `path`, at most one page of it.
///
/// # Errors
/// As for [`write`].
pub(super) fn read(path: &Path, deadline: Duration) -> io::Result<Vec<u8>> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    access(Task::Read(&path), deadline)
}

/// Opens each file for reading with `O_EXCL | O_NONBLOCK` and closes it: nothing, or what the Linux kernel answered. All of
/// them together have until the deadline; [`io::ErrorKind::TimedOut`] for those that it did not come to.
pub(super) fn open_exclusively(paths: &[&Path], deadline: Duration) -> Vec<io::Result<()>> {
    let names: io::Result<Vec<CString>> =
        paths.iter().map(|path| Ok(CString::new(path.as_os_str().as_bytes())?)).collect();
    let (answers, ended) = match names {
        Ok(names) if names.is_empty() => return Vec::new(),
        Ok(names) => run(Task::Exclusive(&names), deadline),
        Err(error) => (Vec::new(), Err(error)),
    };
    let missing = || match &ended {
        Ok(()) => killed(),
        Err(error) => error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error),
    };
    let mut answers = answers.chunks_exact(size_of::<i32>());
    let answer = |bytes: &[u8]| match bytes.try_into().map(i32::from_ne_bytes) {
        Ok(0) => Ok(()),
        Ok(errno) => Err(io::Error::from_raw_os_error(errno)),
        Err(_) => Err(missing()),
    };
    paths.iter().map(|_| answers.next().map_or_else(|| Err(missing()), answer)).collect()
}

/// Reads or writes an attribute.
fn access(task: Task<'_>, deadline: Duration) -> io::Result<Vec<u8>> {
    let (answer, ended) = run(task, deadline);
    ended?;
    match answer.split_first_chunk() {
        Some((errno, data)) => match i32::from_ne_bytes(*errno) {
            0 => Ok(data.to_vec()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        },
        None => Err(killed()),
    }
}

fn killed() -> io::Error {
    io::Error::other(
        "the helper process was killed before it could say how the access went; look in dmesg for what killed it",
    )
}

/// Has a child do the task: what it answered, and whether it came to the end before the deadline.
fn run(task: Task<'_>, deadline: Duration) -> (Vec<u8>, io::Result<()>) {
    reap();
    let until = until(deadline);
    let mut answer = Vec::new();
    let begin = || {
        let (result, result_end) = pipe_with(PipeFlags::CLOEXEC)?;
        let child = Child(spawn(task, result_end.as_raw_fd())?);
        Ok((std::fs::File::from(result), child))
    };
    let ended = begin().and_then(|(result, child)| {
        receive(result, until, &mut answer)?;
        child.wait();
        Ok(())
    });
    (answer, ended)
}

/// Reads what the child answers until it has closed its end.
fn receive(mut result: std::fs::File, until: Instant, answer: &mut Vec<u8>) -> io::Result<()> {
    loop {
        let Some(left) = until.checked_duration_since(Instant::now()) else {
            return Err(io::ErrorKind::TimedOut.into());
        };
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut [PollFd::new(&result, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        let mut part = [0; PAGE];
        match result.read(&mut part) {
            Ok(0) => return Ok(()),
            Ok(count) => answer.extend_from_slice(part.get(..count).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Children that had not exited when they were last looked at.
static LEFT_BEHIND: Mutex<Vec<i32>> = Mutex::new(Vec::new());

/// A child of [`spawn`], which is reaped when it is done, or by a later access.
struct Child(i32);

impl Child {
    /// Waits for a child that has closed its end of the pipe, and so is exiting.
    fn wait(self) {
        // SAFETY: no status is asked for. Until this call returns it is an unreaped child of this module's.
        while unsafe { libc::waitpid(self.0, std::ptr::null_mut(), libc::__WALL) } < 0
            && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
        {}
        std::mem::forget(self);
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        LEFT_BEHIND.lock().unwrap_or_else(PoisonError::into_inner).push(self.0);
    }
}

/// Reaps the children that were left behind and have exited since.
fn reap() {
    LEFT_BEHIND.lock().unwrap_or_else(PoisonError::into_inner).retain(|&child| {
        // SAFETY: no status is asked for. It is a child of this module's that was not reaped, so the number is still
        // its own.
        let reaped = unsafe { libc::waitpid(child, std::ptr::null_mut(), libc::WNOHANG | libc::__WALL) };
        reaped == 0
    });
}

/// Forks the child and returns its process ID.
fn spawn(task: Task<'_>, result: RawFd) -> io::Result<i32> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(65_536);
    let limit = i32::try_from(limit.min(65_536)).unwrap_or(65_536);
    // All signals are blocked across the fork, so that no handler of this process ever runs in the children.
    // SAFETY: an all-zero sigset_t is a value of its type, and it is filled by the next call.
    let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
    let mut before = all;
    // SAFETY: `all` is a valid place for a signal set.
    unsafe { libc::sigfillset(&raw mut all) };
    // SAFETY: both point to valid signal sets.
    let blocked = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) };
    if blocked != 0 {
        return Err(io::Error::from_raw_os_error(blocked));
    }
    let child = fork();
    if child == 0 {
        run_child(task, result, limit);
    }
    let error = io::Error::last_os_error();
    // SAFETY: `before` was filled by the call above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    if child < 0 { Err(error) } else { Ok(child as i32) }
}

/// `fork` without the handlers that `pthread_atfork` registered, which are not safe in the child.
fn fork() -> libc::c_long {
    // SAFETY: without flags and stack, clone is fork, less the signal at the child's exit: the child runs on a copy of
    // this stack. The caller's child only makes system calls and exits.
    unsafe { libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) }
}

/// The child.
fn run_child(task: Task<'_>, result: RawFd, limit: RawFd) -> ! {
    let lock = match task {
        Task::Write(_, _, lock) => lock.map(|lock| lock.as_raw_fd()),
        Task::Read(_) | Task::Exclusive(_) => None,
    };
    close_all_but(result, lock.unwrap_or(result), limit);
    // SAFETY: a constant C string. Nothing here may keep a file system of the host busy.
    unsafe { libc::chdir(c"/".as_ptr()) };
    // SAFETY: a constant C string of less than 16 bytes: the name in ps and in hung-task messages.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"vm-passthrough".as_ptr()) };
    match task {
        Task::Read(path) => {
            let mut buffer = [0u8; PAGE];
            let file = open(path, libc::O_RDONLY);
            // SAFETY: the buffer is as long as said. A descriptor below 0 is refused.
            let count = unsafe { libc::read(file, buffer.as_mut_ptr().cast(), PAGE) };
            match usize::try_from(count) {
                _ if file < 0 => answer(result, -file, &[]),
                Err(_) => answer(result, errno(), &[]),
                Ok(count) => answer(result, 0, buffer.get(..count).unwrap_or_default()),
            }
        }
        Task::Write(path, value, _) => {
            let file = open(path, libc::O_WRONLY);
            // SAFETY: the value is as long as said. A descriptor below 0 is refused.
            let count = unsafe { libc::write(file, value.as_ptr().cast(), value.len()) };
            match usize::try_from(count) {
                _ if file < 0 => answer(result, -file, &[]),
                Err(_) => answer(result, errno(), &[]),
                // A sysfs attribute takes a value whole or not at all.
                Ok(count) => answer(result, if count == value.len() { 0 } else { libc::EIO }, &[]),
            }
        }
        Task::Exclusive(paths) => {
            for path in paths {
                let file = open(path, libc::O_RDONLY | libc::O_EXCL | libc::O_NONBLOCK);
                if file >= 0 {
                    // SAFETY: it was just opened, and nothing else uses it.
                    unsafe { libc::close(file) };
                }
                answer(result, (-file).max(0), &[]);
            }
        }
    }
    exit()
}

/// Opens a file: its descriptor, or its errno below 0.
fn open(path: &CString, flags: i32) -> i32 {
    // SAFETY: `path` is a C string made before the fork.
    let file = unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC) };
    if file < 0 { -errno() } else { file }
}

fn errno() -> i32 {
    // No allocation and no lock: this reads the thread's errno.
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

fn exit() -> ! {
    // SAFETY: ends the process at once, without running anything of its parent's.
    unsafe { libc::_exit(0) }
}

/// Closes every descriptor but these two, which may be one.
fn close_all_but(one: RawFd, other: RawFd, limit: RawFd) {
    let (low, high) = (one.min(other), one.max(other));
    let range = |first: RawFd, end: RawFd| {
        if first >= end {
            return true;
        }
        let last = if end == RawFd::MAX { libc::c_uint::MAX } else { end as libc::c_uint - 1 };
        // SAFETY: closes descriptors of this child only; nothing in it uses them.
        unsafe { libc::syscall(libc::SYS_close_range, first as libc::c_uint, last, 0) == 0 }
    };
    if range(0, low) && range(low + 1, high) && range(high + 1, RawFd::MAX) {
        return;
    }
    // Before Linux 5.9 there is no close_range.
    for descriptor in (0..limit).filter(|&descriptor| descriptor != low && descriptor != high) {
        // SAFETY: as above.
        unsafe { libc::close(descriptor) };
    }
}

/// Sends the outcome to the parent: errno and data, at most a page and so in one piece.
fn answer(result: RawFd, errno: i32, data: &[u8]) {
    for part in [&errno.to_ne_bytes()[..], data] {
        // SAFETY: the slice is valid for its length. When the parent has gone there is nobody left to tell.
        unsafe { libc::write(result, part.as_ptr().cast(), part.len()) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn writes_and_reads() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("attribute");
        std::fs::write(&path, "").unwrap();
        write(&path, "vfio-pci\n", SECOND * 10, None).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "vfio-pci\n");
        assert_eq!(read(&path, SECOND * 10).unwrap(), b"vfio-pci\n");
        assert_eq!(read(&path, Duration::MAX).unwrap(), b"vfio-pci\n");
        std::fs::write(&path, vec![b'x'; 3 * PAGE]).unwrap();
        assert_eq!(read(&path, SECOND * 10).unwrap().len(), PAGE);
    }

    #[test]
    fn reports_what_the_kernel_answers() {
        fn check(path: &str, expect: i32) {
            let error = write(Path::new(path), "1", SECOND * 10, None).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(expect), "{path}: {error}");
        }
        check("/no/such/attribute", libc::ENOENT);
        check("/proc", libc::EISDIR);
        check("/dev/full", libc::ENOSPC);
        assert_eq!(
            write(Path::new("a\0b"), "1", SECOND, None).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
        let error = read(Path::new("/no/such/attribute"), SECOND).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    /// Opening a FIFO that nobody reads blocks, as a write to `unbind` does.
    #[test]
    fn gives_up_at_the_deadline_and_leaves_no_zombie() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let start = Instant::now();
        let error = write(&path, "0000:01:00.0", Duration::from_millis(200), None).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(start.elapsed() >= Duration::from_millis(200) && start.elapsed() < SECOND * 60);
        // The child is still there and writes when it can.
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "0000:01:00.0");
        assert_eq!(read(&path, Duration::ZERO).unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(std::fs::OpenOptions::new().write(true).open(&path).unwrap());
        // A later access reaps both.
        let until = Instant::now() + SECOND * 10;
        while !LEFT_BEHIND.lock().unwrap().is_empty() {
            assert!(Instant::now() < until, "children were not reaped");
            read(Path::new("/proc/self/comm"), SECOND).unwrap();
        }
    }

    #[test]
    fn opens_one_after_the_other_until_the_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let missing = dir.path().join("missing");
        let all = |paths: &[&Path], deadline| -> Vec<_> {
            open_exclusively(paths, deadline)
                .into_iter()
                .map(|result| result.map_err(|error| (error.kind(), error.raw_os_error())).err())
                .collect()
        };
        let not_found = Some((io::ErrorKind::NotFound, Some(libc::ENOENT)));
        assert_eq!(all(&[], SECOND), []);
        assert_eq!(all(&[&file, &missing, &file], SECOND * 10), [None, not_found, None]);
        assert_eq!(all(&[file.as_path(); 3], Duration::ZERO), [Some((io::ErrorKind::TimedOut, None)); 3]);
        assert_eq!(all(&[Path::new("a\0b")], SECOND), [Some((io::ErrorKind::InvalidInput, None))]);
        // A FIFO is not waited for.
        let fifo = dir.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert_eq!(all(&[&fifo], SECOND * 10), [None]);
    }

    #[test]
    fn the_child_holds_no_descriptor() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let (watched, held) = pipe_with(PipeFlags::empty()).unwrap();
        write(&path, "x", Duration::from_millis(100), None).unwrap_err();
        drop(held);
        // Readable at once, with end-of-file, as nobody else holds the writing end.
        let mut rest = Vec::new();
        std::fs::File::from(watched).read_to_end(&mut rest).unwrap();
        assert!(rest.is_empty());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "x");
    }

    /// Also when the lock's descriptor is next to, below or above the pipe's.
    #[test]
    fn the_child_keeps_the_turn_until_it_has_ended() {
        use rustix::fs::{FlockOperation, flock};
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        for number in [None, Some(900)] {
            let name = dir.path().join("lock");
            let mut lock = std::os::fd::OwnedFd::from(std::fs::File::create(&name).unwrap());
            if let Some(number) = number {
                lock = rustix::io::fcntl_dupfd_cloexec(&lock, number).unwrap();
            }
            flock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
            write(&fifo, "x", Duration::from_millis(100), Some(lock.as_fd())).unwrap_err();
            drop(lock);
            let next = std::fs::File::create(&name).unwrap();
            flock(&next, FlockOperation::NonBlockingLockExclusive).unwrap_err();
            assert_eq!(std::fs::read_to_string(&fifo).unwrap(), "x");
            let until = Instant::now() + SECOND * 10;
            while flock(&next, FlockOperation::NonBlockingLockExclusive).is_err() {
                assert!(Instant::now() < until, "the child did not end");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}
