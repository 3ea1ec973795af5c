//! Raw mode of a terminal.

use std::os::fd::OwnedFd;

use rustix::termios::{self, OptionalActions, Termios};

/// A terminal in raw mode: every key goes through as it is typed. Dropping it, also while a panic unwinds, gives the
/// terminal its former mode.
#[derive(Debug)]
pub struct RawTerminal {
    terminal: OwnedFd,
    former: Termios,
}

impl RawTerminal {
    /// Puts a terminal into raw mode; `None` when `file` is no terminal, or one that belongs to another job of its
    /// shell, which would stop this process.
    ///
    /// # Errors
    /// When the terminal refuses.
    pub fn enter(file: impl std::os::fd::AsFd) -> std::io::Result<Option<Self>> {
        let file = file.as_fd();
        if !termios::isatty(file) {
            return Ok(None);
        }
        // A terminal that controls no session, or another one, has no jobs.
        if termios::tcgetpgrp(file).is_ok_and(|group| group != rustix::process::getpgrp()) {
            return Ok(None);
        }
        let former = termios::tcgetattr(file)?;
        let this = Self { terminal: file.try_clone_to_owned()?, former };
        let mut raw = this.former.clone();
        raw.make_raw();
        // Guests end lines as a terminal in raw mode shows them, but what this process tells on the same terminal
        // ends in a plain line feed.
        raw.output_modes |= termios::OutputModes::OPOST | termios::OutputModes::ONLCR;
        termios::tcsetattr(&this.terminal, OptionalActions::Now, &raw)?;
        Ok(Some(this))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // Not after a flush or drain: that would wait for a terminal that nobody reads.
        if let Err(error) = termios::tcsetattr(&self.terminal, OptionalActions::Now, &self.former) {
            tracing::warn!("the terminal's mode can't be restored: {error}; run `stty sane`");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::termios::LocalModes;

    #[test]
    fn raw_mode_ends_with_the_value_and_with_a_panic() {
        let controller =
            rustix::pty::openpt(rustix::pty::OpenptFlags::RDWR | rustix::pty::OpenptFlags::NOCTTY)
                .expect("a pseudo-terminal");
        rustix::pty::unlockpt(&controller).expect("unlocked");
        let name = rustix::pty::ptsname(&controller, Vec::new()).expect("a name");
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY;
        let terminal = rustix::fs::open(name, flags, rustix::fs::Mode::empty()).expect("the terminal");
        let is_raw = || {
            let modes = termios::tcgetattr(&terminal).expect("the mode").local_modes;
            !modes.intersects(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
        };
        assert!(!is_raw());
        {
            let _raw = RawTerminal::enter(&terminal).expect("raw mode").expect("a terminal");
            assert!(is_raw());
        }
        assert!(!is_raw());
        let panicked = std::panic::catch_unwind(|| {
            let _raw = RawTerminal::enter(&terminal).expect("raw mode").expect("a terminal");
            assert!(is_raw());
            std::panic::resume_unwind(Box::new(()));
        });
        assert!(panicked.is_err());
        assert!(!is_raw());
    }

    #[test]
    fn a_file_is_no_terminal() {
        let file = tempfile::tempfile().expect("a file");
        assert!(RawTerminal::enter(&file).expect("no error").is_none());
    }
}
