//! `vmhook run`: a program in the place of this one, with the hook.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::{env, io, process};

use clap::{Args, ValueEnum};

use crate::units;

/// Run a program with the hook
#[derive(Args)]
pub(crate) struct Run {
    /// Device memory that the process may have, as in 24G
    #[arg(long, value_parser = units::parsed)]
    quota: Option<u64>,
    /// Page-locked host memory to keep for pauses, as in 16G: devices copy what fits straight there
    #[arg(long, value_parser = units::parsed)]
    reserve: Option<u64>,
    /// Call the driver's own functions, and only write the log
    #[arg(long)]
    monitor: bool,
    /// Where the log goes; standard error without it
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// How much is logged; `info` if there is a file
    #[arg(long, value_enum)]
    level: Option<Level>,
    /// The hook's library; beside this program, or in ../lib, without it
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

/// How much is logged.
#[derive(Clone, Copy, ValueEnum)]
enum Level {
    /// What fails
    Error,
    /// Allocations and what is moved, too
    Info,
    /// And copies that are put off
    Debug,
}

/// Why a program can't be run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The hook's library is nowhere.
    #[error("no libvmhook.so at {}: say where it is by --library", .0.iter().map(|at| at.display().to_string()).collect::<Vec<_>>().join(" or "))]
    NoLibrary(Vec<PathBuf>),
    /// `LD_PRELOAD` would take it for two files.
    #[error("{} has a space or a colon in its name, which LD_PRELOAD takes for the name's end: move it", .0.display())]
    Name(PathBuf),
    /// The program can't be executed.
    #[error("can't run {}: {source}", program.display())]
    Program {
        /// The program.
        program: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

impl Run {
    /// Becomes the program.
    ///
    /// # Errors
    /// [`Error`]; without one it doesn't come back.
    pub(crate) fn run(self) -> Result<(), Error> {
        let preload = preload(&library(self.library.as_deref())?, env::var_os("LD_PRELOAD"))?;
        let level = self.level.or(self.log.is_some().then_some(Level::Info));
        let (program, arguments) = self.program.split_first().expect("clap asks for one");
        let mut command = process::Command::new(program);
        command.args(arguments).env("LD_PRELOAD", preload);
        if self.monitor {
            command.env("VMM_MODE", "MONITOR");
        }
        if let Some(bytes) = self.quota {
            command.env("VMM_QUOTA", bytes.to_string());
        }
        if let Some(bytes) = self.reserve {
            command.env("VMM_RESERVE", bytes.to_string());
        }
        if let Some(file) = &self.log {
            // The program may change its directory.
            command.env("VMM_LOG_FILE", std::path::absolute(file).unwrap_or_else(|_| file.clone()));
        }
        if let Some(level) = level {
            let level = match level {
                Level::Error => "ERROR",
                Level::Info => "INFO",
                Level::Debug => "DEBUG",
            };
            command.env("VMM_LOG_LEVEL", level);
        }
        Err(Error::Program { program: program.into(), source: command.exec() })
    }
}

/// The hook's library: where it is said to be, or beside this program.
///
/// # Errors
/// [`Error::NoLibrary`].
pub(crate) fn library(given: Option<&Path>) -> Result<PathBuf, Error> {
    let places = match given {
        Some(library) => vec![library.to_owned()],
        None => {
            let this = env::current_exe().unwrap_or_default();
            let folder = this.parent().unwrap_or(Path::new("/"));
            vec![folder.join("libvmhook.so"), folder.join("../lib/libvmhook.so")]
        }
    };
    let found = places.iter().find_map(|place| place.canonicalize().ok().filter(|file| file.is_file()));
    found.ok_or(Error::NoLibrary(places))
}

/// What `LD_PRELOAD` is with it, before what others there are.
///
/// # Errors
/// [`Error::Name`].
pub(crate) fn preload(library: &Path, others: Option<OsString>) -> Result<OsString, Error> {
    if library.to_string_lossy().contains([' ', ':', '\t', '\n']) {
        return Err(Error::Name(library.into()));
    }
    let mut preload = OsString::from(library);
    if let Some(others) = others.filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    Ok(preload)
}
