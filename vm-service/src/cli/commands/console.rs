//! `console`: this terminal on a guest's console.

use std::io::{self, IsTerminal as _, Read as _, Write};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};

use super::asking::Asking;
use super::guests::GuestArgs;
use crate::cli::context::Context;
use crate::failure::Failure;
use crate::guest::console::{Filtered, Input, Keyboard, RawTerminal};
use crate::log;

/// Arguments of `console`.
#[derive(Debug, Args)]
pub(crate) struct ConsoleArgs {
    #[command(flatten)]
    guest: GuestArgs,
    /// Pass every control sequence of the guest to this terminal, also those that change its title or clipboard, or have it type
    #[arg(long)]
    raw: bool,
}

/// How often is looked whether the operator leaves.
const POLL: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// What Ctrl-A h shows.
const HELP: &str = "Ctrl-A x leaves the console, Ctrl-A Ctrl-A sends Ctrl-A, Ctrl-A h shows this";

/// Shows what the guest writes, and sends it what is typed, until Ctrl-A x or the guest's end.
///
/// # Errors
/// When no such guest runs, or its console is no pseudo-terminal.
pub(crate) fn run(context: &mut Context<'_>, args: &ConsoleArgs) -> Result<(), Failure> {
    let ConsoleArgs { guest: args, raw } = args;
    if context.json {
        return Err(Failure::usage("`console` is a terminal, not JSON; leave `--json` out"));
    }
    let guest = Asking::of(context, &args.daemon)?.guest(&args.guest)?;
    let path = guest.console.ok_or_else(|| {
        Failure::failed(format_args!(
            "the console of {} is where `run` put it; start the guest by `vm-service start` or with `--console pty`",
            args.guest
        ))
    })?;
    attach(&args.guest, Path::new(&path), *raw).map_err(|error| {
        Failure::failed(format_args!("the console {path} of {} can't be used: {error}", args.guest))
    })
}

fn attach(guest: &str, path: &Path, raw: bool) -> io::Result<()> {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let mut console = std::fs::File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let (leaves, stdin) = (Arc::new(AtomicBool::new(false)), io::stdin());
    let terminal = RawTerminal::enter(&stdin)?;
    if terminal.is_some() {
        log::say(format_args!("{guest}: {HELP}\n"));
    }
    let (mut keys, left, name) = (console.try_clone()?, leaves.clone(), guest.to_owned());
    let keyboard = Keyboard::start(stdin.as_fd(), move |input| match input {
        // What the guest does not take is lost, as on a serial line.
        Input::Guest(bytes) => drop(keys.write(&bytes)),
        Input::PowerButton => log::say(format_args!("`vm-service stop {name}` presses the power button\n")),
        Input::Help => log::say(format_args!("{HELP}\n")),
        Input::Quit => left.store(true, Ordering::SeqCst),
    })?;
    let mut bytes = [0; 4096];
    let filters = io::stdout().is_terminal() && !raw;
    let mut output: Box<dyn Write> =
        if filters { Box::new(Filtered::new(io::stdout())) } else { Box::new(io::stdout()) };
    let ended = loop {
        if leaves.load(Ordering::SeqCst) {
            break Ok(());
        }
        let polled = poll(&mut [PollFd::new(&console, PollFlags::IN)], Some(&POLL));
        match polled.map_err(io::Error::from).and_then(|_| console.read(&mut bytes)) {
            // The other side is gone, with the guest.
            Ok(0) => break Ok(()),
            Ok(read) => output.write_all(&bytes[..read]).and_then(|()| output.flush())?,
            Err(error) if error.raw_os_error() == Some(libc::EIO) => break Ok(()),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => break Err(error),
        }
    };
    // The filter resets the terminal before its keys are the shell's.
    drop(output);
    drop((keyboard, terminal));
    ended
}
