//! The command line: what can be said on it, and what its exit statuses mean.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use vm_passthrough::host::SysfsWriter;
use vm_passthrough::readiness::BlockerCode;
use vm_passthrough::{Host, PciAddress};

pub use crate::kernel::args::{CompileArgs, DeviceArg, GridArg, LaunchArgs};
use crate::kernel::wait;
use crate::{commands, limits, log, sys};

/// Exit status: the command did what it was asked.
pub const EXIT_OK: u8 = 0;
/// Exit status: the command failed; what it had begun was undone, or the message says what was not.
pub const EXIT_FAILED: u8 = 1;
/// Exit status: the command line, the guest file or the kernel file is wrong; nothing was touched.
pub const EXIT_USAGE: u8 = 2;
/// Exit status: a device can't be passed to a guest as things are; every reason was told, nothing was touched.
pub const EXIT_BLOCKED: u8 = 3;

const EXIT_HELP: &str = "Exit status:
  0  done
  1  failed; what was begun was undone, or the message says what was not
  2  the command line, the guest file or the kernel file is wrong; nothing was touched
  3  a device can't be passed to a guest as things are; every reason was told, nothing was touched";

/// Boots KVM guests, gives them the host's PCI devices, and runs kernels on its accelerators.
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
    /// Tell every reason why a function can't be passed to a guest, each with its remedy
    Explain(ExplainArgs),
    /// Take a function and its companions from their drivers, until `release`
    Claim(ClaimArgs),
    /// Give a claimed function and its companions back to their drivers
    Release(ReleaseArgs),
    /// Boot a guest in the foreground, with its devices
    Run(RunArgs),
    /// Compile a kernel file for an accelerator
    Compile(CompileArgs),
    /// Run a kernel on an accelerator of this machine
    Launch(LaunchArgs),
    /// Serve a guest's shared accelerator; `run` starts it, with a socket as standard input
    #[command(hide = true)]
    AcceleratorWorker,
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

/// Arguments of `explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// PCI address; without it, every accelerator
    #[arg(value_name = "ADDR")]
    pub address: Option<PciAddress>,
    /// Explain for this guest: for as much memory as it has and, without ADDR, all its devices
    #[arg(long, value_name = "GUEST.toml")]
    pub guest: Option<PathBuf>,
    /// Explain for giving away every function of its IOMMU group, also those of other devices
    #[arg(long)]
    pub with_group: bool,
    /// Go on although this stands in the way; it is told as a warning
    #[arg(long, value_enum, value_name = "CODE")]
    pub accept: Vec<Accept>,
}

/// Arguments of `claim`.
#[derive(Debug, Args)]
pub struct ClaimArgs {
    /// PCI address, as in 0000:65:00.0 or 65:00.0
    #[arg(value_name = "ADDR")]
    pub address: PciAddress,
    /// Take every function of its IOMMU group, also those of other devices
    #[arg(long)]
    pub with_group: bool,
    /// Go on although this stands in the way; it is told as a warning
    #[arg(long, value_enum, value_name = "CODE")]
    pub accept: Vec<Accept>,
}

/// Arguments of `release`.
#[derive(Debug, Args)]
pub struct ReleaseArgs {
    /// PCI address, as in 0000:65:00.0 or 65:00.0
    #[arg(value_name = "ADDR")]
    pub address: PciAddress,
}

/// Arguments of `run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The guest, as a TOML file (docs/guest-toml.md)
    #[arg(value_name = "GUEST.toml")]
    pub guest: PathBuf,
    /// Give this PCI function to the guest, beside those of its file
    #[arg(long = "device", value_name = "ADDR")]
    pub devices: Vec<PciAddress>,
    /// Take every function of the devices' IOMMU groups, also those of other devices
    #[arg(long)]
    pub with_group: bool,
    /// How to open devices; without it, iommufd where the Linux kernel has it
    #[arg(long, value_enum)]
    pub backend: Option<BackendArg>,
    /// End when the guest asks for a reboot, or crashes into one, instead of restarting it
    #[arg(long)]
    pub no_reboot: bool,
    /// Where the guest's serial console goes: stdio, none, or file=PATH
    #[arg(long, value_name = "WHERE", default_value = "stdio")]
    pub console: Console,
    /// Go on although this stands in the way; it is told as a warning
    #[arg(long, value_enum, value_name = "CODE")]
    pub accept: Vec<Accept>,
}

/// A blocker that an operator may accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Accept {
    /// Nothing can reset the device: it may hold what its last user left, and keep what this guest leaves
    NoReset,
}

impl From<&Accept> for BlockerCode {
    fn from(accept: &Accept) -> Self {
        match accept {
            Accept::NoReset => Self::NoReset,
        }
    }
}

/// A VFIO back end, as it is said on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendArg {
    /// /dev/iommu and /dev/vfio/devices
    Iommufd,
    /// /dev/vfio/vfio and /dev/vfio/GROUP
    Group,
}

/// Where a guest's serial console goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Console {
    /// This process's standard input and output.
    Stdio,
    /// Nowhere.
    None,
    /// What the guest writes goes to a file; it reads nothing.
    File(PathBuf),
}

impl std::str::FromStr for Console {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "stdio" => Ok(Self::Stdio),
            "none" => Ok(Self::None),
            _ => match text.strip_prefix("file=") {
                Some(path) if !path.is_empty() => Ok(Self::File(path.into())),
                _ => Err("write stdio, none or file=PATH"),
            },
        }
    }
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
    /// Whether the host is a captured tree, in which nothing can be changed.
    pub captured: bool,
    /// Where compiled kernels are kept; `None` for memory.
    pub cache: Option<PathBuf>,
    /// Standard output.
    pub out: &'a mut dyn Write,
}

impl Context<'_> {
    /// Refuses a command that changes the host when the host is a captured tree.
    ///
    /// # Errors
    /// [`Failure::usage`] then.
    pub fn require_live(&self, command: &str) -> Result<(), Failure> {
        if self.captured {
            return Err(Failure::usage(format_args!(
                "`{command}` changes the host, and `--root` names a captured tree, which is only read; leave `--root` out"
            )));
        }
        Ok(())
    }

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
pub fn main() -> ExitCode {
    #[cfg(feature = "cuda")]
    if std::env::args_os().nth(1).is_some_and(|first| first == ASSEMBLE) {
        return vm_passthrough::accelerator::assemble::entry(std::env::args_os().skip(2));
    }
    let exit = operate();
    log::flush();
    if wait::gave_up() {
        sys::exit_at_once(exit);
    }
    exit.into()
}

fn operate() -> u8 {
    let mut out = io::stdout();
    match parse(std::env::args_os(), &mut out, &mut io::stderr()) {
        Ok(cli) => {
            // A worker does not need that: it is killed when its time has come, and should have no more threads than it must.
            if !matches!(cli.command, Command::AcceleratorWorker) {
                log::never_wait();
            }
            log::start(cli.global.verbose);
            limits::raise();
            execute(&cli, None, cache_folder(), &mut out, &mut log::Messages)
        }
        Err(exit) => exit,
    }
}

/// What the first argument is when this program is not the operator's but an assembler's process: it then makes a cubin
/// of PTX, with limits that the process which started it has set.
#[cfg(feature = "cuda")]
pub(crate) const ASSEMBLE: &str = "assemble-ptx";

/// Where this user's compiled kernels are kept (XDG Base Directory Specification).
fn cache_folder() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(caches.join("vm-service/kernels"))
}

/// Runs one command line. `host` is the host to work on instead of what `--root` names, for a simulated one.
pub fn run(
    args: impl IntoIterator<Item = OsString>,
    host: Option<Host>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> u8 {
    match parse(args, out, err) {
        Ok(cli) => execute(&cli, host, None, out, err),
        Err(exit) => exit,
    }
}

/// Reads a command line. One that asks for help, or is wrong, is answered here and has an exit status.
fn parse(
    args: impl IntoIterator<Item = OsString>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> Result<Cli, u8> {
    Cli::try_parse_from(args).map_err(|error| {
        // Help and version are answers, not errors.
        let text = error.render();
        let (to, exit): (&mut dyn Write, u8) =
            if error.use_stderr() { (err, EXIT_USAGE) } else { (out, EXIT_OK) };
        match write!(to, "{text}") {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => EXIT_FAILED,
            _ => exit,
        }
    })
}

fn execute(
    cli: &Cli,
    host: Option<Host>,
    cache: Option<PathBuf>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> u8 {
    let (host, captured) = match (host, &cli.global.root) {
        (_, Some(root)) => (host_at(root), true),
        (Some(host), None) => (host, false),
        (None, None) => (Host::system(), false),
    };
    let mut context = Context { host, json: cli.global.json, captured, cache, out };
    let result = match &cli.command {
        Command::List(args) => commands::list::run(&mut context, args),
        Command::Info(args) => commands::info::run(&mut context, args),
        Command::Explain(args) => commands::explain::run(&mut context, args),
        Command::Claim(args) => commands::claim::run(&mut context, args),
        Command::Release(args) => commands::release::run(&mut context, args),
        Command::Run(args) => commands::run::run(&mut context, args),
        Command::Compile(args) => commands::compile::run(&mut context, args),
        Command::Launch(args) => commands::launch::run(&mut context, args),
        Command::AcceleratorWorker => crate::accelerator::worker_main().map_err(Failure::failed),
    };
    match result {
        Ok(()) => EXIT_OK,
        Err(Failure { message, exit }) => {
            if !message.is_empty() {
                // Nothing can be done about an error stream that can't be written.
                let _ = err.write_all(format!("error: {message}\n").as_bytes());
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
