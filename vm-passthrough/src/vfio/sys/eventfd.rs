//! Eventfds of vmm-sys-util, which do not implement [`AsFd`](std::os::fd::AsFd), as triggers.

use std::os::fd::{AsRawFd as _, BorrowedFd};

use vmm_sys_util::eventfd::EventFd;

use super::super::interface::IrqTrigger;

impl<'a> From<&'a EventFd> for IrqTrigger<'a> {
    fn from(eventfd: &'a EventFd) -> Self {
        // SAFETY: the file is open for as long as the eventfd is borrowed.
        Self::Eventfd(unsafe { BorrowedFd::borrow_raw(eventfd.as_raw_fd()) })
    }
}
