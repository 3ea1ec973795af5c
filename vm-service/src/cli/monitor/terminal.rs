//! The terminal while it shows a screen: raw mode, the alternate screen, and no cursor.
//!
//! It is given back on every way out: when the value is dropped, and before a panic of the thread that draws says what
//! happened. The frames go through a description of the terminal of this process's own, which never blocks: one that
//! nobody reads from, as behind a broken connection, holds up nobody.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::{Mutex, Once, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use crossterm::Command;
use crossterm::cursor::{Hide, Show};
use crossterm::style::ResetColor;
use crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen};
use ratatui::layout::Rect;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::termios;

use crate::guest::console::RawTerminal;

/// What is drawn of a terminal at most, whatever size it says that it has.
const MOST_COLUMNS: u16 = 1000;
const MOST_ROWS: u16 = 500;

/// How long a terminal may take to accept a frame.
const DEADLINE: Duration = Duration::from_millis(500);

/// What gives the terminal back.
struct Held {
    out: OwnedFd,
    /// Standard error, which is a terminal, and leads nowhere meanwhile: what is logged would be written over the screen.
    errors: Option<OwnedFd>,
    thread: ThreadId,
    _raw: RawTerminal,
}

static HELD: Mutex<Option<Held>> = Mutex::new(None);

/// A terminal that shows a screen until this is dropped. There is one at a time.
#[derive(Debug)]
pub(crate) struct Screen {
    out: OwnedFd,
    /// What of a frame the terminal has not taken. A sequence that was cut would spoil all that comes.
    left: Vec<u8>,
}

impl Screen {
    /// Takes the terminal; `None` when one of these is none, or it belongs to another job of its shell.
    ///
    /// # Errors
    /// When the terminal refuses, or is gone.
    pub(crate) fn enter(input: BorrowedFd<'_>, output: BorrowedFd<'_>) -> io::Result<Option<Self>> {
        if !termios::isatty(output) {
            return Ok(None);
        }
        let Some(raw) = RawTerminal::enter(input)? else { return Ok(None) };
        let mut screen = Self { out: own(output)?, left: Vec::new() };
        restore_on_panic();
        let errors = io::stderr();
        let errors = if termios::isatty(&errors) { mute(errors.as_fd()) } else { None };
        let held =
            Held { out: screen.out.try_clone()?, errors, thread: std::thread::current().id(), _raw: raw };
        *HELD.lock().unwrap_or_else(PoisonError::into_inner) = Some(held);
        screen.show(&sequence(&[&EnterAlternateScreen, &Hide]))?;
        Ok(Some(screen))
    }

    /// Its size; nothing where it does not say.
    pub(crate) fn size(&self) -> Rect {
        let size = termios::tcgetwinsize(&self.out);
        size.map_or(Rect::ZERO, |size| {
            Rect::new(0, 0, size.ws_col.min(MOST_COLUMNS), size.ws_row.min(MOST_ROWS))
        })
    }

    /// Shows a frame; `false` where the terminal has not taken all of it in time. What is left goes before the next one.
    ///
    /// # Errors
    /// When the terminal is gone.
    pub(crate) fn show(&mut self, frame: &[u8]) -> io::Result<bool> {
        self.left.extend_from_slice(frame);
        self.flush()
    }

    /// Whether the terminal has not taken all that was shown.
    pub(crate) fn is_behind(&self) -> bool {
        !self.left.is_empty()
    }

    /// Whether all that was shown has been taken; it waits a little for that.
    ///
    /// # Errors
    /// When the terminal is gone.
    pub(crate) fn flush(&mut self) -> io::Result<bool> {
        let written = write(&self.out, &self.left, DEADLINE)?;
        self.left.drain(..written);
        Ok(self.left.is_empty())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // The rest of a sequence, so that what follows is not taken for it.
        let _ = self.flush();
        restore(None);
    }
}

/// Gives the terminal back, when it is this thread's or any.
fn restore(of: Option<ThreadId>) {
    let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(held) = held.take_if(|held| of.is_none_or(|of| held.thread == of)) {
        // One that is gone needs nothing.
        let _ = write(&held.out, &sequence(&[&ResetColor, &LeaveAlternateScreen, &Show]), DEADLINE);
        if let Some(errors) = &held.errors {
            let _ = rustix::stdio::dup2_stderr(errors);
        }
    }
}

/// Has a panic of the thread that draws give the terminal back first.
fn restore_on_panic() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let former = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore(Some(std::thread::current().id()));
            former(panic);
        }));
    });
}

/// Has standard error lead nowhere, and answers where it led.
fn mute(errors: BorrowedFd<'_>) -> Option<OwnedFd> {
    let former = errors.try_clone_to_owned().ok()?;
    let nowhere = rustix::fs::open("/dev/null", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    rustix::stdio::dup2_stderr(&nowhere).ok()?;
    Some(former)
}

/// A description of the same terminal that does not block, and is nobody else's.
///
/// # Errors
/// When it can't be opened again. The description that there is would have to be made one that does not block, for all
/// that have it, the shell too.
fn own(terminal: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let again = rustix::fs::open(format!("/proc/self/fd/{}", terminal.as_raw_fd()), flags, Mode::empty());
    let again = again.or_else(|error| {
        // It may be another user's, as behind `su`; this process's own terminal opens all the same.
        let session = termios::tcgetsid(terminal)?;
        match session == rustix::process::getsid(None)? {
            true => rustix::fs::open("/dev/tty", flags, Mode::empty()),
            false => Err(error),
        }
    });
    again.map_err(|error| io::Error::new(error.kind(), format!("it can't be opened again: {error}")))
}

/// Writes as much as the terminal takes in time, and answers how many bytes that is.
fn write(out: &OwnedFd, bytes: &[u8], deadline: Duration) -> io::Result<usize> {
    let until = Instant::now() + deadline;
    let mut written = 0;
    while let Some(left) = bytes.get(written..).filter(|left| !left.is_empty()) {
        let wait = until.saturating_duration_since(Instant::now());
        let wait = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() };
        let mut files = [PollFd::new(out, PollFlags::OUT)];
        match poll(&mut files, Some(&wait)) {
            Ok(0) => break,
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if files[0].revents().intersects(PollFlags::HUP | PollFlags::ERR) {
            return Err(rustix::io::Errno::IO.into());
        }
        match rustix::io::write(out, left) {
            Ok(0) => break,
            Ok(more) => written += more,
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {
                if Instant::now() >= until {
                    break;
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(written)
}

fn sequence(commands: &[&dyn Ansi]) -> Vec<u8> {
    let mut text = String::new();
    commands.iter().for_each(|command| command.put(&mut text));
    text.into_bytes()
}

/// Commands of crossterm, as the text that has a terminal do them.
trait Ansi {
    fn put(&self, text: &mut String);
}

impl<T: Command> Ansi for T {
    fn put(&self, text: &mut String) {
        // A String takes any write.
        let _ = self.write_ansi(text);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read as _;

    use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};
    use rustix::termios::LocalModes;

    use super::*;

    fn pty() -> (File, OwnedFd) {
        let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)
            .expect("a pseudo-terminal");
        unlockpt(&controller).expect("unlocked");
        let name = ptsname(&controller, Vec::new()).expect("a name");
        let terminal =
            rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).expect("the terminal");
        (File::from(controller), terminal)
    }

    /// What was written to a terminal, at least until that.
    fn read_until(controller: &mut File, until: &str) -> String {
        let (mut text, mut bytes) = (String::new(), [0; 4096]);
        while !text.contains(until) {
            let read = controller.read(&mut bytes).expect("readable");
            text += &String::from_utf8_lossy(&bytes[..read]);
        }
        text
    }

    // One at a time, as a process has one screen.
    #[test]
    fn the_terminal_is_given_back() {
        let (mut controller, terminal) = pty();
        let is_raw = || {
            let modes = termios::tcgetattr(&terminal).expect("the mode").local_modes;
            !modes.intersects(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
        };
        let enter =
            || Screen::enter(terminal.as_fd(), terminal.as_fd()).expect("no error").expect("a terminal");
        let (begin, end) = ("\u{1b}[?1049h\u{1b}[?25l", "\u{1b}[?1049l\u{1b}[?25h");
        let mut screen = enter();
        assert!(is_raw());
        read_until(&mut controller, begin);
        assert!(screen.show(b"frame").expect("shown"));
        drop(screen);
        assert!(!is_raw());
        let text = read_until(&mut controller, end);
        assert!(text.starts_with("frame"), "{text:?}");

        // What a panic says comes behind the end of the screen.
        let panicked = std::panic::catch_unwind(|| {
            let _screen = enter();
            panic!("for this test");
        });
        assert!(panicked.is_err() && !is_raw());
        let text = read_until(&mut controller, end);
        assert_eq!(text.matches(end).count(), 1, "{text:?}");

        // One that nobody reads from holds up nobody, and gets all of it in order at last.
        let mut screen = enter();
        let frame = [b'x'; 1 << 20];
        assert!(!screen.show(&frame).expect("not gone"));
        assert!(!screen.show(b"last").expect("not gone"));
        let reader = std::thread::spawn(move || {
            let text = read_until(&mut controller, "last");
            (controller, text)
        });
        while !screen.flush().expect("not gone") {}
        let (controller, text) = reader.join().expect("what was written");
        assert_eq!(text.matches('x').count(), frame.len());

        // One that is gone is an error.
        drop(controller);
        assert!(screen.show(b"more").is_err());
        drop(screen);
    }

    #[test]
    fn a_file_is_no_terminal() {
        let file = tempfile::tempfile().expect("a file");
        assert!(Screen::enter(file.as_fd(), file.as_fd()).expect("no error").is_none());
    }
}
