//! The guest's serial console, where the command line wants it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use crate::cli;
use crate::console::{Escape, Input, Keyboard, RawTerminal};
use crate::vmm::{self, Stop};

/// What serves the console while the guest runs. Dropping it gives the terminal its former mode.
#[derive(Debug)]
pub(super) struct ConsoleService {
    // The keyboard ends before the terminal's mode is restored: keys that come later are the shell's.
    _keyboard: Option<Keyboard>,
    _terminal: Option<RawTerminal>,
}

/// Opens the console. With `json`, standard output is for the report, so what a guest says on the `stdio` console goes
/// to standard error.
///
/// # Errors
/// What could not be opened, and what to do.
pub(super) fn open(
    console: &cli::Console,
    json: bool,
    stop: &Stop,
) -> Result<(vmm::Console, ConsoleService), String> {
    let silent = ConsoleService { _keyboard: None, _terminal: None };
    match console {
        cli::Console::None => Ok((vmm::Console { output: Box::new(io::sink()), input: None }, silent)),
        cli::Console::File(path) => {
            let output = create(path).map_err(|error| {
                format!("the console's file {} can't be written: {error}; name another", path.display())
            })?;
            Ok((vmm::Console { output: Box::new(output), input: None }, silent))
        }
        cli::Console::Stdio => stdio(json, stop)
            .map_err(|error| format!("the console can't be opened: {error}; try `--console none`")),
    }
}

/// Creates a file, or opens what is there without waiting for the other end of a FIFO.
fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(true).custom_flags(libc::O_NOCTTY).open(path)
}

fn stdio(json: bool, stop: &Stop) -> io::Result<(vmm::Console, ConsoleService)> {
    let output: Box<dyn Write + Send> =
        if json { Box::new(io::stderr()) } else { Box::new(Flushed(io::stdout())) };
    let (input, mut keys) = io::pipe()?;
    // The guest may read slowly or never. What does not fit is lost, as on a real serial line, and the keys for the
    // VMM still work.
    rustix::io::ioctl_fionbio(&keys, true)?;
    let stdin = io::stdin();
    let terminal = RawTerminal::enter(&stdin)?;
    let stop = stop.clone();
    let keyboard = Keyboard::start(stdin.as_fd(), move |input| match input {
        Input::Guest(bytes) => drop(keys.write(&bytes)),
        Input::Help => eprintln!("{}", Escape::HELP),
        Input::Quit => stop.request(),
    })?;
    if terminal.is_some() {
        tracing::info!("{}", Escape::HELP);
    }
    let console = vmm::Console { output, input: Some(input.into()) };
    Ok((console, ConsoleService { _keyboard: Some(keyboard), _terminal: terminal }))
}

/// Writes through: a guest's prompt has no line feed.
struct Flushed<W>(W);

impl<W: Write> Write for Flushed<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let written = self.0.write(data)?;
        self.0.flush()?;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}
