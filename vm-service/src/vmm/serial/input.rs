//! Carries what is typed to the guest.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::SerialConsole;

/// The thread that carries input to the console. Dropping it ends the thread.
pub(in crate::vmm) struct Input {
    end: EventFd,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Input {
    /// Carries what can be read from `source` to `console` until the end of file.
    ///
    /// # Errors
    /// When there are no file descriptors or threads left.
    pub(in crate::vmm) fn start(console: Arc<SerialConsole>, source: OwnedFd) -> io::Result<Self> {
        let end = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?;
        let watch = end.try_clone()?;
        let thread = std::thread::Builder::new()
            .name("console input".into())
            .spawn(move || carry(&console, File::from(source), &watch))?;
        Ok(Self { end, thread: Some(thread) })
    }
}

impl Drop for Input {
    fn drop(&mut self) {
        // It fails only when the counter is full, and then it is readable.
        let _ = self.end.write(1);
        // The thread waits for nothing but this event and a tenth of a second at most.
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the console input thread panicked");
        }
    }
}

fn readable(fd: &impl AsFd, timeout: Option<&Timespec>) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut fds, timeout).is_ok_and(|count| count > 0)
}

fn carry(console: &SerialConsole, mut source: File, end: &EventFd) {
    let ended = sys_fd(end);
    let mut buffer = [0; 256];
    loop {
        let mut fds = [PollFd::new(&source, PollFlags::IN), PollFd::new(&ended, PollFlags::IN)];
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => {
                tracing::warn!(%error, "the console takes no more input");
                return;
            }
            Ok(_) => {}
        }
        if !fds[1].revents().is_empty() {
            return;
        }
        match source.read(&mut buffer) {
            Ok(0) => return,
            Ok(count) => console.feed(&buffer[..count], || readable(&ended, Some(&Timespec::default()))),
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            Err(error) => {
                tracing::warn!(%error, "the console takes no more input");
                return;
            }
        }
    }
}

fn sys_fd(event: &EventFd) -> std::os::fd::BorrowedFd<'_> {
    crate::vmm::sys::borrow(event)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::time::Duration;

    use super::*;
    use crate::vmm::serial::tests::console;

    #[test]
    fn input_waits_for_the_guest_and_nothing_is_lost() {
        let (console, _interrupt) = console();
        let (reader, mut writer) = io::pipe().unwrap();
        let sent: Vec<u8> = (0..1000u32).map(|n| n as u8).collect();
        let expect = sent.clone();
        let writing = std::thread::spawn(move || writer.write_all(&sent));
        let input = Input::start(console.clone(), reader.into()).unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        let mut got = Vec::new();
        while got.len() < 1000 && std::time::Instant::now() < deadline {
            if console.read(5) & 1 != 0 {
                got.push(console.read(0));
            }
        }
        assert_eq!(got, expect);
        writing.join().unwrap().unwrap();
        drop(input);
    }

    #[test]
    fn dropping_the_input_ends_a_thread_whose_guest_never_reads() {
        let (console, _interrupt) = console();
        let (reader, mut writer) = io::pipe().unwrap();
        writer.write_all(&[b'x'; 200]).unwrap();
        let input = Input::start(console, reader.into()).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        drop(input);
    }
}
