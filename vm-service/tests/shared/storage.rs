//! Storage that does not answer: the Linux kernel asks a listener (fanotify(7)) before each read of a file, and the listener
//! takes its time.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A file whose reads wait until they are allowed. Dropping this allows all.
pub(crate) struct Storage(File);

impl Storage {
    /// Has reads of a file wait. `None`, with the reason printed, where this user may not, or the Linux kernel can't.
    pub(crate) fn hold(path: &Path) -> Option<Self> {
        Self::try_hold(path).inspect_err(|error| println!("skipped: reads can't be held up: {error}")).ok()
    }

    fn try_hold(path: &Path) -> io::Result<Self> {
        // SAFETY: there are no pointers.
        let group = unsafe {
            libc::fanotify_init(
                libc::FAN_CLASS_CONTENT | libc::FAN_CLOEXEC | libc::FAN_NONBLOCK,
                libc::O_RDONLY as u32,
            )
        };
        if group < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it is a new descriptor, and nobody else's.
        let group = unsafe { File::from_raw_fd(group) };
        let path = CString::new(path.as_os_str().as_bytes())?;
        let descriptor = std::os::fd::AsRawFd::as_raw_fd(&group);
        // SAFETY: the path ends with a zero byte.
        let marked = unsafe {
            libc::fanotify_mark(
                descriptor,
                libc::FAN_MARK_ADD,
                libc::FAN_ACCESS_PERM,
                libc::AT_FDCWD,
                path.as_ptr(),
            )
        };
        if marked < 0 { Err(io::Error::last_os_error()) } else { Ok(Self(group)) }
    }

    /// Waits until somebody wants to read; answers whether that came within a time.
    pub(crate) fn is_read(&self, within: Duration) -> bool {
        let within = Timespec::try_from(within).expect("a time");
        poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&within)) == Ok(1)
    }

    /// Lets one read go on, if somebody still wants to: not a process that has ended.
    pub(crate) fn allow(&self) {
        let mut event = [0; size_of::<libc::fanotify_event_metadata>()];
        if (&self.0).read_exact(&mut event).is_err() {
            return;
        }
        let descriptor: [u8; 4] = event[16..20].try_into().expect("four bytes");
        // SAFETY: the event came with a descriptor of its own.
        let _theirs = unsafe { OwnedFd::from_raw_fd(i32::from_ne_bytes(descriptor)) };
        let answer = [descriptor, libc::FAN_ALLOW.to_ne_bytes()].concat();
        // It fails when nobody waits for it any more.
        let _ = (&self.0).write_all(&answer);
    }
}
