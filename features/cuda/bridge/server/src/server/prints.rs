//! What the driver prints for kernels, which is the program's: what `printf` in a kernel writes to standard output, and what an assertion that fails says to
//! standard error.
//!
//! Both are pipes of this process from the start of its session. A thread reads them, so that nobody who prints waits; of what it read a bound is kept, and
//! what is beyond is dropped. Behind a call that waits for the device what was printed is looked for, and each answer says whether there is any.

use std::io::{self, PipeReader, Read as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use vm_cuda_api::{FUNCTIONS, names::base};

use super::host::{Charge, HostMemory};
use super::session::locked;
use super::sys;
use crate::wire::CHUNK;

/// The most bytes that are kept of each until the program takes them.
const KEPT: usize = 16 << 20;
/// Bytes that are read at once.
const BUFFER: usize = 64 << 10;

/// Standard output and error of this process.
#[derive(Debug)]
pub struct Prints {
    ends: Mutex<[(PipeReader, Vec<u8>, Charge); 2]>,
    any: AtomicBool,
}

/// Descriptors of what is printed.
const OUTPUT: u64 = 1;

impl Prints {
    /// Takes what this process prints from now on, as far as its program's budget has room for it: nothing else of it may write there.
    ///
    /// # Errors
    /// When there are no pipes, or no threads.
    pub fn begin(host: &HostMemory) -> io::Result<Arc<Self>> {
        let end = || {
            let (read, write) = io::pipe()?;
            fcntl_setfl(&read, fcntl_getfl(&read)? | OFlags::NONBLOCK)?;
            Ok::<_, io::Error>((read, write))
        };
        let ((output, to_output), (error, to_error)) = (end()?, end()?);
        let watched: [OwnedFd; 2] =
            [output.as_fd().try_clone_to_owned()?, error.as_fd().try_clone_to_owned()?];
        rustix::stdio::dup2_stdout(to_output)?;
        rustix::stdio::dup2_stderr(to_error)?;
        let ends = Mutex::new([output, error].map(|pipe| (pipe, Vec::new(), host.charge(0))));
        let prints = Arc::new(Self { ends, any: AtomicBool::new(false) });
        let reading = prints.clone();
        std::thread::Builder::new().name("prints".into()).spawn(move || {
            loop {
                let mut fds = watched.each_ref().map(|fd| PollFd::new(fd, PollFlags::IN));
                if poll(&mut fds, None).is_err() {
                    // Interrupted, or the system has no memory for it now.
                    std::thread::sleep(Duration::from_millis(10));
                }
                reading.read();
            }
        })?;
        Ok(prints)
    }

    /// Reads what is there.
    fn read(&self) {
        let (mut ends, mut buffer) = (locked(&self.ends), [0; BUFFER]);
        for (pipe, kept, charge) in &mut *ends {
            // It fails where nothing is there. What prints without end is read no longer than this.
            let mut left = KEPT;
            while left > 0
                && let Ok(len @ 1..) = pipe.read(&mut buffer)
            {
                left = left.saturating_sub(len);
                let room = KEPT.saturating_sub(kept.len()).min(len);
                let room = if charge.grow(room as u64).is_ok() { room } else { 0 };
                kept.extend_from_slice(&buffer[..room]);
                self.any.store(true, Ordering::Release);
            }
        }
    }

    /// Looks for what was printed behind a call that waits for the device.
    pub(super) fn look(&self) {
        sys::flush();
        self.read();
    }

    /// Is there anything?
    pub(super) fn has_any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Takes some: a descriptor, and bytes; nothing where there is nothing.
    pub(super) fn take(&self) -> Option<(u64, Vec<u8>)> {
        let mut ends = locked(&self.ends);
        let at = ends.iter().position(|(_, kept, _)| !kept.is_empty());
        let taken = at.map(|at| {
            let (_, kept, charge) = &mut ends[at];
            let rest = kept.split_off(kept.len().min(CHUNK));
            charge.shrink(rest.len() as u64);
            (OUTPUT + at as u64, std::mem::replace(kept, rest))
        });
        if ends.iter().all(|(_, kept, _)| kept.is_empty()) {
            self.any.store(false, Ordering::Release);
        }
        taken
    }
}

/// Does the driver print behind this call?
pub(super) fn flushes(number: usize) -> bool {
    static FLUSHES: LazyLock<Vec<bool>> = LazyLock::new(|| {
        let begins = [
            "cuCtxSynchronize",
            "cuStreamSynchronize",
            "cuEventSynchronize",
            "cuMemcpy",
            "cuModuleLoad",
            "cuModuleUnload",
            "cuLibraryUnload",
            "cuCtxDestroy",
            "cuDevicePrimaryCtxRe",
        ];
        let flushes =
            |name: &str| begins.iter().any(|begin| name.starts_with(begin)) && !name.ends_with("Async");
        FUNCTIONS.iter().map(|function| flushes(base(&function.name))).collect()
    });
    FLUSHES.get(number).copied().unwrap_or(false)
}
