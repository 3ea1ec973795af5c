//! The command line: what can be said on it, and what its exit statuses mean.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{ArgAction, Args, Parser, Subcommand};
use vm_passthrough::host::SysfsWriter;
use vm_passthrough::{Host, PciAddress};

use crate::commands;

/// Exit status: the command did what it was asked.
pub const EXIT_OK: u8 = 0;
/// Exit status: the command failed; what it had begun was undone, or the message says what was not.
pub const EXIT_FAILED: u8 = 1;
/// Exit status: the command line or the guest file is wrong; nothing was touched.
pub const EXIT_USAGE: u8 = 2;
/// Exit status: a device can't be passed to a guest as things are; every reason was told, nothing was touched.
pub const EXIT_BLOCKED: u8 = 3;

const EXIT_HELP: &str = "Exit status:
  0  done
  1  failed; what was begun was undone, or the message says what was not
  2  the command line or the guest file is wrong; nothing was touched
  3  a device can't be passed to a guest as things are; every reason was told, nothing was touched";

/// Boots KVM guests and gives them the host's PCI devices.
#[derive(Debug, Parser)]
#[command(name = "vm-service", version, after_help = EXIT_HELP, max_term_width = 100)]
pub struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// Options of every command.
#[derive(Debug, Args)]
pub struct Global {
    /// Print one JSON document on standard output (schema: docs/vm-service.schema.json)
    #[arg(long, global = true)]
    pub json: bool,
    /// Use the host below DIR (DIR/sys, DIR/dev, DIR/proc, DIR/run) instead of this one, as with a captured sysfs
    /// tree
    #[arg(long, global = true, value_name = "DIR")]
    pub root: Option<PathBuf>,
    /// Tell more on standard error; twice, tell everything
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub verbose: u8,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List accelerators, each with its driver and whether it can be passed to a guest
    List(ListArgs),
    /// Show one PCI function in full
    #[command(visible_alias = "i")]
    Info(InfoArgs),
}

/// Arguments of `list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// List every PCI function, not only accelerators
    #[arg(long)]
    pub all: bool,
}

/// Arguments of `info`.
#[derive(Debug, Args)]
pub struct InfoArgs {
    /// PCI address, as in 0000:65:00.0 or 65:00.0
    #[arg(value_name = "ADDR")]
    pub address: PciAddress,
}

/// Why a command did not succeed: a message, and the exit status that goes with it.
#[derive(Debug)]
pub struct Failure {
    /// What, where and what to do; empty when the output has said it.
    pub message: String,
    /// Exit status.
    pub exit: u8,
}

impl Failure {
    /// A failure of the work itself.
    pub fn failed(error: impl std::fmt::Display) -> Self {
        Self { message: error.to_string(), exit: EXIT_FAILED }
    }

    /// The command line or the guest file is wrong.
    pub fn usage(error: impl std::fmt::Display) -> Self {
        Self { message: error.to_string(), exit: EXIT_USAGE }
    }

    /// A device can't be passed to a guest, and the output or `message` says why.
    pub fn blocked(message: String) -> Self {
        Self { message, exit: EXIT_BLOCKED }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        // The reader of the output has had enough, as in `vm-service list | head -1`.
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Self { message: String::new(), exit: EXIT_OK };
        }
        Self::failed(format!("standard output can't be written: {error}; see where it goes"))
    }
}

/// What a command works with.
pub struct Context<'a> {
    /// The host.
    pub host: Host,
    /// Whether the output is JSON.
    pub json: bool,
    /// Standard output.
    pub out: &'a mut dyn Write,
}

impl Context<'_> {
    /// Prints a JSON document when JSON was asked for, and `text` otherwise.
    ///
    /// # Errors
    /// When the output can't be written.
    pub fn print(
        &mut self,
        body: impl FnOnce() -> crate::json::Body,
        text: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        if self.json {
            let document = crate::json::Document::new(body());
            let json = serde_json::to_string_pretty(&document).map_err(Failure::failed)?;
            writeln!(self.out, "{json}")?;
        } else {
            self.out.write_all(text().as_bytes())?;
        }
        Ok(self.out.flush()?)
    }
}

/// Runs the command line of this process and answers its exit status.
pub fn main() -> u8 {
    let mut out = io::stdout();
    let mut err = io::stderr();
    run(std::env::args_os(), None, &mut out, &mut err)
}

/// Runs one command line. `host` is the host to work on instead of what `--root` names, for a simulated one.
pub fn run(
    args: impl IntoIterator<Item = OsString>,
    host: Option<Host>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> u8 {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are answers, not errors.
            let text = error.render();
            let (to, exit): (&mut dyn Write, u8) =
                if error.use_stderr() { (err, EXIT_USAGE) } else { (out, EXIT_OK) };
            return match write!(to, "{text}") {
                Err(error) if error.kind() != io::ErrorKind::BrokenPipe => EXIT_FAILED,
                _ => exit,
            };
        }
    };
    let host = match (host, &cli.global.root) {
        (Some(host), _) => host,
        (None, None) => Host::system(),
        (None, Some(root)) => host_at(root),
    };
    let mut context = Context { host, json: cli.global.json, out };
    let result = match &cli.command {
        Command::List(args) => commands::list::run(&mut context, args),
        Command::Info(args) => commands::info::run(&mut context, args),
    };
    match result {
        Ok(()) => EXIT_OK,
        Err(Failure { message, exit }) => {
            if !message.is_empty() {
                // Nothing can be done about an error stream that can't be written.
                let _ = writeln!(err, "error: {message}");
            }
            exit
        }
    }
}

/// The host below `root`, which can only be read.
fn host_at(root: &Path) -> Host {
    Host::at(root, Arc::new(ReadOnly))
}

/// A host of files: writing to one would change the file and nothing else.
#[derive(Debug)]
struct ReadOnly;

impl SysfsWriter for ReadOnly {
    fn write(&self, path: &Path, _value: &str, _deadline: Duration) -> io::Result<()> {
        Err(io::Error::new(
            io::ErrorKind::ReadOnlyFilesystem,
            format!("{} is in a captured tree, which is only read", path.display()),
        ))
    }
}
