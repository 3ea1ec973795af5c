//! The command line: what can be said on it.

mod benchmark;
pub(crate) mod commands;
pub(crate) mod context;
pub(crate) mod kernel;
mod monitor;
mod usage;

use std::error::Error as _;
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser as _};
use clap::error::{ContextKind, ContextValue};
use clap::{ArgAction, Args, CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;
use vm_passthrough::Host;
use vm_passthrough::host::SysfsWriter;
use vm_passthrough::pci::{self, Meaning, ParsePciAddressError};
use vm_passthrough::sim::{SimDrivers, SimHost};

use crate::api::LogLevel;
use crate::cli::commands::SimArgs;
use crate::cli::commands::attach::AttachArgs;
use crate::cli::commands::bridge::BridgeArgs;
use crate::cli::commands::claim::ClaimArgs;
use crate::cli::commands::console::ConsoleArgs;
use crate::cli::commands::detach::DetachArgs;
use crate::cli::commands::egpu::EgpuArgs;
use crate::cli::commands::events::EventsArgs;
use crate::cli::commands::explain::ExplainArgs;
use crate::cli::commands::guests::GuestArgs;
use crate::cli::commands::info::InfoArgs;
use crate::cli::commands::list::ListArgs;
use crate::cli::commands::logs::LogsArgs;
use crate::cli::commands::release::ReleaseArgs;
use crate::cli::commands::run::RunArgs;
use crate::cli::commands::serve::DaemonArgs;
use crate::cli::commands::start::StartArgs;
use crate::cli::commands::stop::StopArgs;
use crate::cli::commands::vfs::VfsArgs;
use crate::cli::context::Context;
use crate::cli::kernel::args::{CompileArgs, LaunchArgs};
#[cfg(feature = "cuda")]
use crate::cli::kernel::engine::ASSEMBLE;
use crate::cli::kernel::tune::TuneArgs;
use crate::cli::kernel::{assembler, wait};
use crate::failure::{EXIT_FAILED, EXIT_OK, EXIT_USAGE, Failure};
use crate::log;
use crate::os::sandbox::Measure;
use crate::os::{limits, sys};
use crate::text::{describe, table};

const EXIT_HELP: &str = "Exit status:
  0  done
  1  failed; what was begun was undone, or the message says what was not
  2  the command line, the guest file or the kernel file is wrong; nothing was touched
  3  a device can't be passed to a guest as things are; every reason was reported, nothing was touched";

/// Boots KVM guests, gives them the host's PCI devices, and runs kernels on its accelerators.
#[derive(Debug, Parser)]
#[command(name = "vm-service", version, after_help = EXIT_HELP, max_term_width = 100)]
pub struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// The heading of options that every command has.
const GLOBAL: &str = "Options of every command";

/// Options of every command.
#[derive(Debug, Args)]
pub(crate) struct Global {
    /// Print one JSON document on standard output (schema: docs/vm-service.schema.json)
    #[arg(long, global = true, help_heading = GLOBAL)]
    json: bool,
    /// Keep claims and guests in DIR instead of /run/vm-passthrough; commands with another DIR do not see them
    #[arg(long, global = true, help_heading = GLOBAL, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Keep log files in DIR instead of /var/log/vm-service, or of .local/state/vm-service for other users than root; '' for none
    #[arg(long, global = true, help_heading = GLOBAL, value_name = "DIR", value_parser = OsStringValueParser::new().map(PathBuf::from))]
    log_dir: Option<PathBuf>,
    /// Log more: each step; twice, everything. RUST_LOG, where it is set, says instead what is logged
    #[arg(short, long, global = true, help_heading = GLOBAL, action = ArgAction::Count)]
    verbose: u8,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// List accelerators, each with its driver and whether it can be passed to a guest
    List(ListArgs),
    /// Show one PCI function in full
    #[command(visible_alias = "i")]
    Info(InfoArgs),
    /// Tell every reason why a function can't be passed to a guest, each with its remedy
    Explain(ExplainArgs),
    /// Take functions and their companions from their drivers, until `release`
    Claim(ClaimArgs),
    /// List what is claimed, with the former drivers and who has it
    Claims(SimArgs),
    /// Release claimed functions and their companions to their drivers
    Release(ReleaseArgs),
    /// List, create and remove virtual functions (SR-IOV)
    Vfs(VfsArgs),
    /// Show GPUs in enclosures of USB4 and Thunderbolt
    Egpu(EgpuArgs),
    /// Boot a guest in the foreground, with its devices
    Run(RunArgs),
    /// Be the daemon: start guests that outlive the shell, and serve the API that the commands below ask
    Serve(DaemonArgs),
    /// List the guests that run
    Guests(DaemonArgs),
    /// Have the daemon start a guest
    Start(StartArgs),
    /// Tell how a guest is
    Status(GuestArgs),
    /// Press a guest's power button, and cut its power if it does not power itself off
    Stop(StopArgs),
    /// Reset a guest's machine, as its button would
    Reset(GuestArgs),
    /// Give devices to a guest that runs
    Attach(AttachArgs),
    /// Take devices from guests that run
    Detach(DetachArgs),
    /// Print what happens to guests, as it happens
    Events(EventsArgs),
    /// Use this terminal as a guest's console
    Console(ConsoleArgs),
    /// Print what the process of a guest logged
    Logs(LogsArgs),
    /// Compile a kernel file for an accelerator
    Compile(CompileArgs),
    /// Run a kernel on an accelerator of this machine
    Launch(LaunchArgs),
    /// Measure the variants of a family of kernels on an accelerator, and keep the fastest
    Tune(TuneArgs),
    /// Serve this machine's GPUs to CUDA programs of machines without
    Bridge(BridgeArgs),
    /// Print what a shell needs to complete commands and options
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Write the man pages into a folder
    #[cfg(feature = "man")]
    #[command(hide = true)]
    Man {
        /// The folder
        folder: PathBuf,
    },
    /// Serve a guest's shared accelerator; `run` starts it, with a socket as standard input
    #[command(hide = true)]
    AcceleratorWorker,
    /// Assemble kernels for such a worker, which starts it with a socket as standard input
    #[cfg(feature = "rocm")]
    #[command(hide = true)]
    AcceleratorAssembler,
    /// Serve a CUDA program; `bridge serve` starts it, with a connection as standard input
    #[command(hide = true)]
    BridgeWorker {
        /// The driver's library
        driver: PathBuf,
        /// Parts of its confinement that are waived
        #[arg(long, hide = true, value_delimiter = ',')]
        unconfined: Vec<Measure>,
        /// Only open the driver
        #[arg(value_parser = ["probe"])]
        probe: Option<String>,
        /// Bytes of device memory for all programs of the pot, which is standard output
        #[arg(long, hide = true, requires = "slot")]
        memory: Option<u64>,
        /// The worker's place in that
        #[arg(long, hide = true, requires = "memory")]
        slot: Option<usize>,
        /// The most bytes of the program's recording, if there is one
        #[arg(long, hide = true)]
        record_limit: Option<u64>,
        /// How long its work on the device may make no progress, in microseconds
        #[arg(long, hide = true)]
        deadline: Option<u64>,
        /// How long of every 100 ms programs may keep the device busy together, in microseconds
        #[arg(long, hide = true)]
        time_slice: Option<u64>,
        /// The most bytes of host memory that the worker holds for its program
        #[arg(long, hide = true)]
        host_memory: Option<u64>,
    },
    /// Run a guest; `run` starts it, with a socket as standard input
    #[command(hide = true)]
    GuestVmm,
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
        assembler::end_all();
        sys::exit_at_once(exit);
    }
    exit.into()
}

fn operate() -> u8 {
    let mut out = io::stdout();
    match parse(std::env::args_os(), None, &mut out, &mut io::stderr()) {
        Ok(cli) => {
            // A worker does not need that: it is killed when its time has come, and should have no more threads than it must.
            let is_relayed = cli.command.is_confined();
            if !is_relayed {
                log::never_wait();
            }
            log::start(cli.global.verbose, is_relayed);
            let logs = log_folder(cli.global.log_dir.as_deref());
            if cli.keeps_log() {
                start_log_files(logs.clone(), cli.command.other_host().1.is_some());
            }
            limits::raise();
            if let (Some(root), _) = cli.command.other_host() {
                stay_below(root, cli.command.guest_file());
            }
            let exit = execute(
                &cli,
                None,
                "/proc/self/exe".into(),
                Folders { cache: cache_folder(), logs },
                width(),
                &mut out,
                &mut log::Messages,
            );
            log::keep(LogLevel::Info, module_path!(), "the command ended", [("exit", exit.into())]);
            exit
        }
        Err(exit) => exit,
    }
}

/// Characters in a line of standard output; `None` where it is no terminal.
fn width() -> Option<usize> {
    let columns = rustix::termios::tcgetwinsize(io::stdout()).ok()?.ws_col;
    (columns > 0).then(|| columns.into())
}

/// Where this user's compiled kernels are kept (XDG Base Directory Specification).
fn cache_folder() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(caches.join("vm-service/kernels"))
}

/// Where this user's log files are; `None` for none.
fn log_folder(option: Option<&Path>) -> Option<PathBuf> {
    log::folder(option, |name| std::env::var_os(name), rustix::process::geteuid().is_root())
}

/// Has this process write log files, of which the first record says what was asked for.
fn start_log_files(folder: Option<PathBuf>, simulated: bool) {
    let Some(folder) = folder else { return };
    let (settings, wrong) = log::Settings::of(folder, |name| std::env::var_os(name));
    wrong.iter().for_each(|wrong| tracing::warn!("{}, and has no effect", table::printable(wrong)));
    log::start_files(log::Settings { simulated, ..settings });
    let words = std::env::args_os().skip(1).map(|word| match word.to_string_lossy() {
        word if word.is_empty() || word.contains(|letter: char| letter.is_whitespace()) => {
            format!("{word:?}")
        }
        word => word.into_owned(),
    });
    let words = format!("the command began: {}", words.collect::<Vec<_>>().join(" "));
    let fields =
        [("version", env!("CARGO_PKG_VERSION").into()), ("user", rustix::process::getuid().as_raw().into())];
    log::keep(LogLevel::Info, module_path!(), &words, fields);
}

/// Runs one command line. `host` is the host to work on instead of what `--root` names, for a simulated one; `program` is
/// `vm-service`, for child processes.
pub fn run(
    args: impl IntoIterator<Item = OsString>,
    host: Option<Host>,
    program: &Path,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> u8 {
    match parse(args, host.as_ref(), out, err) {
        Ok(cli) => {
            // The environment is the caller's, and nothing of it holds here.
            let logs = log::folder(cli.global.log_dir.as_deref(), |_| None, false);
            execute(&cli, host, program.into(), Folders { cache: None, logs }, None, out, err)
        }
        Err(exit) => exit,
    }
}

/// Reads a command line. One that asks for help, or is wrong, is answered here and has an exit status. `host` is the host to
/// name functions of, for a simulated one.
fn parse(
    args: impl IntoIterator<Item = OsString>,
    host: Option<&Host>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> Result<Cli, u8> {
    let args: Vec<OsString> = args.into_iter().collect();
    Cli::try_parse_from(&args).map_err(|mut error| {
        let address = error.source().and_then(|source| source.downcast_ref::<ParsePciAddressError>());
        if let Some(meaning) = address.and_then(ParsePciAddressError::meaning)
            && let Some(tip) = suggest(meaning, &args, host)
        {
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
        }
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

/// Returns a tip that lists the functions of the host which a vendor:device ID or a slot matches.
fn suggest(meaning: Meaning, args: &[OsString], host: Option<&Host>) -> Option<String> {
    let other = other_tree(args);
    if let (Some(root), None) = (&other, host) {
        stay_below(root, None);
    }
    let host = other.as_deref().map(host_at).or_else(|| host.cloned()).unwrap_or_else(Host::system);
    let functions = pci::scan(&host).ok()?;
    let meant = functions
        .iter()
        .filter(|function| meaning.includes(function.address, function.ids.vendor, function.ids.device));
    let named: Vec<_> = match meaning {
        Meaning::Ids(..) => meant.map(|function| function.address.to_string()).collect(),
        Meaning::Slot(_) => {
            meant.map(|function| format!("{} ({})", function.address, describe::name(function))).collect()
        }
    };
    let tip = match (&*named, meaning) {
        ([], _) => "no function of this host has it; `vm-service list --all` lists all functions".to_owned(),
        (_, Meaning::Ids(..)) => format!("did you mean {}?", named.join(" or ")),
        (_, Meaning::Slot(_)) => format!("the slot has {}", named.join(", ")),
    };
    Some(table::printable(&tip))
}

/// The captured tree or the simulated host of a command line that could not be parsed.
fn other_tree(args: &[OsString]) -> Option<PathBuf> {
    args.iter().enumerate().find_map(|(at, arg)| {
        let arg = arg.to_str()?;
        let value = arg.strip_prefix("--root").or_else(|| arg.strip_prefix("--sim"))?;
        match value.strip_prefix('=') {
            Some(value) => Some(value.into()),
            None if value.is_empty() => args.get(at + 1).map(PathBuf::from),
            None => None,
        }
    })
}

/// Folders of this user.
struct Folders {
    /// Compiled kernels.
    cache: Option<PathBuf>,
    /// Log files.
    logs: Option<PathBuf>,
}

impl Command {
    /// The captured tree and the simulated host that it works on instead of this machine.
    fn other_host(&self) -> (Option<&Path>, Option<&Path>) {
        match self {
            Self::List(ListArgs { source, .. })
            | Self::Info(InfoArgs { source, .. })
            | Self::Explain(ExplainArgs { source, .. })
            | Self::Egpu(EgpuArgs { source, .. }) => (source.root.as_deref(), source.sim.sim.as_deref()),
            Self::Claims(SimArgs { sim })
            | Self::Claim(ClaimArgs { sim: SimArgs { sim }, .. })
            | Self::Release(ReleaseArgs { sim: SimArgs { sim }, .. })
            | Self::Vfs(VfsArgs { sim: SimArgs { sim }, .. }) => (None, sim.as_deref()),
            _ => (None, None),
        }
    }

    /// The guest file, which may lie outside the captured tree.
    fn guest_file(&self) -> Option<&Path> {
        match self {
            Self::Explain(args) => args.guest.as_deref(),
            _ => None,
        }
    }

    /// Whether it is a process that another one starts, and confines itself.
    fn is_confined(&self) -> bool {
        match self {
            Self::AcceleratorWorker | Self::BridgeWorker { .. } | Self::GuestVmm => true,
            #[cfg(feature = "rocm")]
            Self::AcceleratorAssembler => true,
            _ => false,
        }
    }

    /// Whether it only reads and prints, or another process has what it logs: such a command writes no log files.
    fn only_reads(&self) -> bool {
        match self {
            Self::List(_) | Self::Info(_) | Self::Explain(_) | Self::Claims(_) => true,
            Self::Guests(_) | Self::Status(_) | Self::Events(_) | Self::Console(_) | Self::Logs(_) => true,
            Self::Compile(_) | Self::Completions { .. } => true,
            #[cfg(feature = "man")]
            Self::Man { .. } => true,
            confined if confined.is_confined() => true,
            Self::Egpu(args) => args.only_reads(),
            Self::Vfs(args) => args.only_reads(),
            Self::Bridge(args) => args.only_reads(),
            _ => false,
        }
    }
}

impl Cli {
    /// Whether it writes log files. Those of this machine say nothing of simulated hosts.
    fn keeps_log(&self) -> bool {
        let is_simulated = self.command.other_host() != (None, None);
        !self.command.only_reads() && (!is_simulated || self.global.log_dir.is_some())
    }
}

fn execute(
    cli: &Cli,
    host: Option<Host>,
    program: PathBuf,
    folders: Folders,
    width: Option<usize>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> u8 {
    let (root, sim) = cli.command.other_host();
    let sim_host = match sim.map(SimHost::open).transpose() {
        Ok(sim) => sim,
        Err(error) => {
            let _ = writeln!(err, "error: {}", table::printable(&error.to_string()));
            return EXIT_USAGE;
        }
    };
    if let Some(dir) = sim {
        let _ = writeln!(err, "simulated host: {}", table::printable(&dir.display().to_string()));
    }
    let simulated = sim_host.as_ref().map(|sim| SimDrivers::new(sim).host());
    let mut host = simulated.or(root.map(host_at)).or(host).unwrap_or_else(Host::system);
    if let Some(state) = &cli.global.state {
        host.state = std::path::absolute(state).unwrap_or_else(|_| state.clone());
    }
    let Folders { cache, logs } = folders;
    let json = cli.global.json;
    let mut context =
        Context { host, sim: sim_host, is_labelled: false, program, json, cache, logs, width, out };
    let result = match &cli.command {
        Command::List(args) => commands::list::run(&mut context, args),
        Command::Info(args) => commands::info::run(&mut context, args),
        Command::Explain(args) => commands::explain::run(&mut context, args),
        Command::Claim(args) => commands::claim::run(&mut context, args),
        Command::Claims(_) => commands::claims::run(&mut context),
        Command::Release(args) => commands::release::run(&mut context, args),
        Command::Vfs(args) => commands::vfs::run(&mut context, args),
        Command::Egpu(args) => commands::egpu::run(&mut context, args),
        Command::Run(args) => commands::run::run(&mut context, args),
        Command::Serve(args) => commands::serve::run(&mut context, args),
        Command::Guests(args) => commands::guests::list(&mut context, args),
        Command::Start(args) => commands::start::run(&mut context, args),
        Command::Status(args) => commands::guests::status(&mut context, args),
        Command::Stop(args) => commands::stop::run(&mut context, args),
        Command::Reset(args) => commands::stop::reset(&mut context, args),
        Command::Attach(args) => commands::attach::run(&mut context, args),
        Command::Detach(args) => commands::detach::run(&mut context, args),
        Command::Events(args) => commands::events::run(&mut context, args),
        Command::Console(args) => commands::console::run(&mut context, args),
        Command::Logs(args) => commands::logs::run(&mut context, args),
        Command::Compile(args) => commands::compile::run(&mut context, args),
        Command::Launch(args) => commands::launch::run(&mut context, args),
        Command::Tune(args) => commands::tune::run(&mut context, args),
        Command::Bridge(args) => commands::bridge::run(&mut context, args),
        Command::BridgeWorker {
            driver,
            unconfined,
            probe,
            memory,
            slot,
            deadline,
            time_slice,
            host_memory,
            record_limit,
        } => {
            let share = memory.zip(*slot);
            let limits = crate::cuda_bridge::Limits {
                memory: *memory,
                host_memory: *host_memory,
                deadline: deadline.map(Duration::from_micros),
                time_slice: time_slice.map(Duration::from_micros),
            };
            let is_probe = probe.is_some();
            crate::cuda_bridge::worker_main(driver, unconfined, is_probe, share, &limits, *record_limit)
                .map_err(Failure::failed)
        }
        Command::Completions { .. } if context.json => {
            Err(Failure::usage("`completions` prints a script for a shell, not JSON; leave `--json` out"))
        }
        Command::Completions { shell } => completions(*shell, context.out),
        #[cfg(feature = "man")]
        Command::Man { folder } => clap_mangen::generate_to(Cli::command(), folder).map_err(Failure::failed),
        Command::GuestVmm => crate::guest::vmm_main().map_err(Failure::failed),
        Command::AcceleratorWorker => crate::accelerators::worker_main().map_err(Failure::failed),
        #[cfg(feature = "rocm")]
        Command::AcceleratorAssembler => crate::accelerators::assembler_main().map_err(Failure::failed),
    };
    match result {
        Ok(()) => EXIT_OK,
        Err(Failure { message, exit }) => {
            if !message.is_empty() {
                log::keep_fatal(module_path!(), &message);
                // It may name files and what is in them.
                let message = message.lines().map(table::printable).collect::<Vec<_>>().join("\n");
                // Nothing can be done about an error stream that can't be written.
                let _ = err.write_all(format!("error: {message}\n").as_bytes());
            }
            exit
        }
    }
}

/// Prints the completions of a shell.
fn completions(shell: Shell, out: &mut dyn Write) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "vm-service", &mut script);
    Ok(out.write_all(&script)?)
}

/// Keeps this process from following links out of a captured tree. It may read `guest` too.
fn stay_below(root: &Path, guest: Option<&Path>) {
    let reason = match crate::os::sandbox::restrict_to(root, guest) {
        Ok(true) => return,
        Ok(false) => "this Linux kernel has no Landlock".to_owned(),
        Err(error) => error,
    };
    tracing::warn!("links that lead out of {} are followed: {}", root.display(), table::printable(&reason));
}

/// The host below `root`, which can only be read.
fn host_at(root: &Path) -> Host {
    Host::at(root, Arc::new(ReadOnly))
}

/// A host of files: writing to one would change the file and nothing else.
#[derive(Debug)]
struct ReadOnly;

impl SysfsWriter for ReadOnly {
    fn only_reads(&self) -> bool {
        true
    }

    fn write(&self, path: &Path, _value: &str, _deadline: Duration) -> io::Result<()> {
        Err(io::Error::new(
            io::ErrorKind::ReadOnlyFilesystem,
            format!("{} is in a captured tree, which is only read", path.display()),
        ))
    }
}
