//! The lock of a function, which who changes it holds.
//!
//! A write to sysfs is made by a helper process (the `host::sys` module), which may outlive the process that asked for it. Such
//! an orphan may have its write still before it, or be asleep in it: whoever found the function with its former driver
//! meanwhile, and forgot the claim, would leave it without any once the orphan goes on.
//!
//! So a function is changed only by who has a lock (flock(2)) on `STATE/locks/ADDRESS`, and each helper shares that lock
//! until it ends: as long as one lives, nobody else gets it. Who has it next reads what the function is like after that.
//! The files stay; they are empty.

use std::fs::{self, File};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

use crate::deadlines::until;
use crate::ledger::{LedgerError, make_directory, open, try_lock};
use crate::{Host, PciAddress};

/// How long to sleep between two tries to get the lock.
const POLL: Duration = Duration::from_millis(5);

/// The right to change a function, until it is dropped and all helpers that share it have ended.
#[derive(Debug)]
pub(crate) struct FunctionLock {
    address: PciAddress,
    file: File,
}

impl FunctionLock {
    /// Waits for the lock; `None` when the deadline passes first.
    ///
    /// # Errors
    /// When the lock's file can't be made or used.
    pub(crate) fn take(
        host: &Host,
        address: PciAddress,
        deadline: Duration,
    ) -> Result<Option<Self>, LedgerError> {
        let directory = host.state.join("locks");
        make_directory(&host.state, 0o755)?;
        // A former version's, with what is locked there still; as a rule there is none.
        let _ = fs::rename(host.state.join("turns"), &directory);
        make_directory(&directory, 0o700)?;
        let path = directory.join(address.to_string());
        let file = open(&path, OFlags::RDWR | OFlags::CREATE)?;
        let until = until(deadline);
        while !try_lock(&file, &path)? {
            if Instant::now() >= until {
                return Ok(None);
            }
            std::thread::sleep(POLL);
        }
        Ok(Some(Self { address, file }))
    }

    /// The function.
    pub(crate) fn address(&self) -> PciAddress {
        self.address
    }

    /// What helpers share.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
