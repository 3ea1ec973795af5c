//! The guest's serial console, where the command line wants it.

use std::fs::{File, FileType};
use std::io::{self, IsTerminal as _, PipeReader, Write};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::guest::console::{Escape, Filtered, Input, Keyboard, Link, Pty, RawTerminal};
use crate::log;
use crate::os::output::Standard;
use crate::vmm::{self, PowerButton, Stop};

/// Where a guest's serial console goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Console {
    /// This process's standard input and output. A terminal gets what passes the filter.
    Stdio,
    /// The same, and a terminal gets all.
    RawStdio,
    /// Nowhere.
    None,
    /// A pseudo-terminal, with a link to it where a path is given.
    Pty(Option<PathBuf>),
    /// What the guest writes goes to a file; it reads nothing.
    File(PathBuf),
}

impl std::str::FromStr for Console {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "stdio" => Ok(Self::Stdio),
            "stdio=raw" => Ok(Self::RawStdio),
            "none" => Ok(Self::None),
            "pty" => Ok(Self::Pty(None)),
            _ => match text.split_once('=') {
                Some(("pty", link)) if !link.is_empty() => Ok(Self::Pty(Some(link.into()))),
                Some(("file", path)) if !path.is_empty() => Ok(Self::File(path.into())),
                _ => Err("write stdio, stdio=raw, none, pty, pty=LINK or file=PATH"),
            },
        }
    }
}

/// What serves the console while the guest runs. Dropping it gives the terminal its former mode.
#[derive(Debug)]
pub(super) struct ConsoleService {
    // The keyboard ends before the terminal's mode is restored: keys that come later are the shell's.
    _keyboard: Option<Keyboard>,
    _terminal: Option<RawTerminal>,
    _link: Option<Link>,
    pty: Option<PathBuf>,
}

impl ConsoleService {
    /// The pseudo-terminal that is the console, if one is.
    pub(super) fn terminal(&self) -> Option<String> {
        Some(self.pty.as_ref()?.display().to_string())
    }
}

/// Opens the console. With `json`, standard output is for the report, so what a guest says on the `stdio` console goes
/// to standard error.
///
/// # Errors
/// What could not be opened, and what to do.
pub(super) fn open(
    console: &Console,
    json: bool,
    stop: &Stop,
    button: &PowerButton,
) -> Result<(vmm::Console, ConsoleService), String> {
    let silent = ConsoleService { _keyboard: None, _terminal: None, _link: None, pty: None };
    match console {
        Console::None => Ok((vmm::Console { output: Box::new(io::sink()), input: None }, silent)),
        Console::File(path) => {
            let output = create(path).map_err(|error| {
                format!("the console's file {} can't be written: {error}; name another", path.display())
            })?;
            Ok((vmm::Console { output, input: None }, silent))
        }
        Console::Pty(link) => pty(link.as_deref(), stop, button),
        Console::Stdio | Console::RawStdio => stdio(*console == Console::RawStdio, json, stop, button)
            .map_err(|error| format!("the console can't be opened: {error}; try `--console none`")),
    }
}

/// Creates a file, or opens what is there. It never waits: neither for a reader of a FIFO nor for a terminal's carrier.
fn create(path: &Path) -> io::Result<Box<dyn Write + Send>> {
    let is = |kind: fn(&FileType) -> bool| path.metadata().is_ok_and(|there| kind(&there.file_type()));
    if is(FileType::is_block_device) {
        return Err(io::Error::other("it is a block device, and its contents would be overwritten"));
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOCTTY | OFlags::NONBLOCK;
    match vm_files::open(path, flags, 0o666) {
        Ok(file) => {
            // What the guest says is written by a thread that may wait.
            rustix::io::ioctl_fionbio(&file, false)?;
            Ok(Box::new(file))
        }
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) && is(FileType::is_fifo) => {
            tracing::info!(
                "nobody reads the FIFO {} yet: the guest's console waits for a reader",
                path.display()
            );
            Ok(Box::new(Fifo { path: path.to_owned(), file: None }))
        }
        Err(error) => Err(error),
    }
}

/// A FIFO that waits for its first reader when it is first written to.
#[derive(Debug)]
struct Fifo {
    path: PathBuf,
    file: Option<File>,
}

impl Write for Fifo {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let file = match &mut self.file {
            Some(file) => file,
            none => {
                let opened = vm_files::open(&self.path, OFlags::WRONLY | OFlags::NOCTTY, 0)?;
                none.insert(opened)
            }
        };
        file.write(data)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn stdio(
    raw: bool,
    json: bool,
    stop: &Stop,
    button: &PowerButton,
) -> io::Result<(vmm::Console, ConsoleService)> {
    let (output, is_terminal) = match json {
        true => (Standard::Error, io::stderr().is_terminal()),
        false => (Standard::Output, io::stdout().is_terminal()),
    };
    let output: Box<dyn Write + Send> =
        if is_terminal && !raw { Box::new(Filtered::new(output)) } else { Box::new(output) };
    let stdin = io::stdin();
    let terminal = RawTerminal::enter(&stdin)?;
    let (keyboard, input) = keyboard(stdin.as_fd(), stop, button)?;
    if terminal.is_some() {
        tracing::info!("{}", Escape::HELP);
    }
    let console = vmm::Console { output, input: Some(input.into()) };
    Ok((console, ConsoleService { _keyboard: Some(keyboard), _terminal: terminal, _link: None, pty: None }))
}

fn pty(
    at: Option<&Path>,
    stop: &Stop,
    button: &PowerButton,
) -> Result<(vmm::Console, ConsoleService), String> {
    let no_pty = |error| {
        format!("the console can't be a pseudo-terminal: {error}; see whether devpts is mounted on /dev/pts")
    };
    let (pty, path) = Pty::open().map_err(no_pty)?;
    let (keyboard, input) = keyboard(pty.as_fd(), stop, button).map_err(no_pty)?;
    let link = |link: &Path| {
        Link::new(&path, link).map_err(|error| {
            format!("{} can't be made a link to the console: {error}; name another", link.display())
        })
    };
    let link = at.map(link).transpose()?;
    tracing::info!("the guest's console is {}", path.display());
    let console = vmm::Console { output: Box::new(pty), input: Some(input.into()) };
    Ok((console, ConsoleService { _keyboard: Some(keyboard), _terminal: None, _link: link, pty: Some(path) }))
}

/// Reads what is typed, and carries it to where the guest reads it.
fn keyboard(from: BorrowedFd<'_>, stop: &Stop, button: &PowerButton) -> io::Result<(Keyboard, PipeReader)> {
    let (input, mut keys) = io::pipe()?;
    // The guest may read slowly or never. What does not fit is lost, as on a real serial line, and the keys for the
    // VMM still work.
    rustix::io::ioctl_fionbio(&keys, true)?;
    let (stop, button) = (stop.clone(), button.clone());
    let keyboard = Keyboard::start(from, move |input| match input {
        Input::Guest(bytes) => drop(keys.write(&bytes)),
        Input::Help => log::say(format_args!("{}\n", Escape::HELP)),
        Input::PowerButton => button.press(),
        Input::Quit => stop.request(),
    })?;
    Ok((keyboard, input))
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use rustix::fs::{CWD, FileType as Kind, mknodat};

    use super::*;

    #[test]
    fn what_the_console_can_be_written_to() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        let refused = |name: &str, expect: &str| {
            let error = create(&path(name)).err().expect("an error").to_string();
            assert!(error.contains(expect), "{name}: {error}");
        };
        refused("", "Is a directory");
        refused("absent/file", "No such file");
        std::fs::write(path("file"), "from an earlier run").expect("written");
        create(&path("file")).expect("a file").write_all(b"new").expect("written");
        assert_eq!(std::fs::read(path("file")).expect("a file"), b"new");
        let _listener = std::os::unix::net::UnixListener::bind(path("socket")).expect("a socket");
        refused("socket", "No such device");
        // A number that no disk has.
        match mknodat(CWD, path("disk"), Kind::BlockDevice, 0o600.into(), rustix::fs::makedev(7, 0xfffff)) {
            Ok(()) => refused("disk", "block device"),
            Err(error) => println!("skipped: no block device can be made: {error}"),
        }
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only root can make another user's link");
        }
        std::os::unix::fs::symlink(".", path("link")).expect("a link");
        create(&path("link/file")).expect("root's own link");
        std::os::unix::fs::lchown(path("link"), Some(12345), None).expect("another owner");
        std::fs::write(path("file"), "root's").expect("written");
        refused("link/file", "link is a link that the user 12345 made");
        assert_eq!(std::fs::read(path("file")).expect("a file"), b"root's");
    }

    #[test]
    fn a_fifo_is_opened_without_waiting_and_written_once_there_is_a_reader() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("fifo");
        mknodat(CWD, &path, Kind::Fifo, 0o600.into(), 0).expect("a FIFO");
        let mut early = create(&path).expect("a FIFO without a reader");
        let writing = std::thread::spawn(move || early.write_all(b"early"));
        let mut reader = File::open(&path).expect("its reader");
        // With a reader it is opened at once, and is as a pipe is: writing waits.
        let late = create(&path).expect("a FIFO with a reader");
        writing.join().expect("a thread").expect("written");
        drop(late);
        let mut got = String::new();
        reader.read_to_string(&mut got).expect("what was written");
        assert_eq!(got, "early");
    }
}
