//! Reads what is typed, until it is asked to end.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::{Escape, Input};

/// How long the thread may take to end. It waits in `read` only when somebody else reads what was there.
const DEADLINE: Duration = Duration::from_secs(1);

/// How often to look whether somebody opened a pseudo-terminal.
const HANGUP_POLL: Duration = Duration::from_millis(100);

/// A thread that reads a terminal, or anything else, and hands on what is typed. Dropping it ends the thread.
#[derive(Debug)]
pub struct Keyboard {
    end: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Keyboard {
    /// Reads `from` and hands each [`Input`] to `on_input`. Ctrl-A is a key as any other unless `from` is a terminal. A
    /// pseudo-terminal's other side may come and go.
    /// The end of the input ends nothing but the reading.
    ///
    /// # Errors
    /// When this process has no descriptors or threads left.
    pub fn start(from: BorrowedFd<'_>, mut on_input: impl FnMut(Input) + Send + 'static) -> io::Result<Self> {
        let from = from.try_clone_to_owned()?;
        let pty = rustix::pty::ptsname(&from, Vec::new()).is_ok();
        let terminal = !pty && rustix::termios::isatty(&from);
        let end = eventfd(0, EventfdFlags::CLOEXEC)?;
        let ended = end.try_clone()?;
        let thread = std::thread::Builder::new().name("keyboard".into()).spawn(move || {
            let mut escape = Escape::default();
            let mut keys = [0; 256];
            while wait(&from, &ended) {
                match rustix::io::read(&from, &mut keys) {
                    Ok(0) => return,
                    Ok(read) if terminal => escape.push(&keys[..read]).into_iter().for_each(&mut on_input),
                    Ok(read) => on_input(Input::Guest(keys[..read].to_vec())),
                    Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
                    // Nobody has it open, and nothing wakes who waits for somebody.
                    Err(rustix::io::Errno::IO) if pty => std::thread::sleep(HANGUP_POLL),
                    Err(error) => {
                        tracing::warn!(
                            "the console's input can't be read: {error}; the guest gets no more of it"
                        );
                        return;
                    }
                }
            }
        })?;
        Ok(Self { end, thread: Some(thread) })
    }
}

/// Waits until there is something to read, `true`, or until the end.
fn wait(from: &OwnedFd, ended: &OwnedFd) -> bool {
    loop {
        let mut files = [PollFd::new(from, PollFlags::IN), PollFd::new(ended, PollFlags::IN)];
        match poll(&mut files, None) {
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                tracing::warn!("standard input can't be waited for: {error}; the guest gets no more of it");
                return false;
            }
            Ok(_) if !files[1].revents().is_empty() => return false,
            Ok(_) => return true,
        }
    }
}

impl Drop for Keyboard {
    fn drop(&mut self) {
        // An eventfd that was never written to takes this write.
        let _ = rustix::io::write(self.end.as_fd(), &1u64.to_ne_bytes());
        let Some(thread) = self.thread.take() else { return };
        let until = Instant::now() + DEADLINE;
        while !thread.is_finished() {
            if Instant::now() >= until {
                tracing::warn!("another process reads standard input too, and took what was to be read here");
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if thread.join().is_err() {
            tracing::error!("the thread that reads standard input panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn hands_on_what_a_pipe_gives_and_ends_when_dropped() {
        let (reader, writer) = io::pipe().expect("a pipe");
        let (send, receive) = mpsc::channel();
        let keyboard = Keyboard::start(reader.as_fd(), move |input| {
            let _ = send.send(input);
        })
        .expect("a thread");
        rustix::io::write(&writer, b"a\x01x").expect("written");
        let got = receive.recv_timeout(Duration::from_secs(10)).expect("input");
        assert_eq!(got, Input::Guest(b"a\x01x".to_vec()), "a pipe has no keys for the VMM");
        drop(keyboard);
        assert!(receive.recv_timeout(Duration::from_secs(10)).is_err(), "the thread is gone");
    }

    #[test]
    fn another_reader_of_the_same_input_does_not_keep_it_from_ending() {
        let (reader, writer) = io::pipe().expect("a pipe");
        // All are woken by one byte, and all but one then wait in `read`.
        let keyboards: Vec<_> =
            (0..3).map(|_| Keyboard::start(reader.as_fd(), drop).expect("a thread")).collect();
        std::thread::sleep(Duration::from_millis(100));
        rustix::io::write(&writer, b"a").expect("written");
        std::thread::sleep(Duration::from_millis(100));
        let begin = Instant::now();
        drop(keyboards);
        assert!(begin.elapsed() < Duration::from_secs(20));
    }
}
