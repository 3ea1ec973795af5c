//! This program once more, as a CUDA program with the hook or without.

use std::ffi::OsStr;
use std::fs::File;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, io, thread};

use serde::de::DeserializeOwned;

use crate::run;
use crate::units::printable;

/// How a program meets the hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Not at all.
    Off,
    /// It is watched.
    Monitor,
    /// Its memory is the hook's.
    Vmm,
}

/// Why it has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The hook's library is nowhere.
    #[error(transparent)]
    Library(#[from] run::Error),
    /// It can't be started or read.
    #[error("can't run this program once more: {0}")]
    Start(#[from] io::Error),
    /// It took too long.
    #[error(
        "the program was killed, as it had not ended after {0} s: ask for less, or say more by --timeout"
    )]
    Timeout(u64),
    /// It failed.
    #[error("{says}")]
    Failed {
        /// Its own words.
        says: String,
    },
    /// What it answers is none.
    #[error("the program ended with {status}, and its answer is none: {wrong}")]
    Answer {
        /// How it ended.
        status: ExitStatus,
        /// What is wrong with the answer.
        wrong: serde_json::Error,
    },
}

/// How programs are run.
pub(crate) struct Runner<'a> {
    /// The hook's library, where it is not beside this program.
    pub(crate) library: Option<&'a Path>,
    /// For what they write.
    pub(crate) folder: &'a Path,
    pub(crate) timeout: Duration,
}

impl Runner<'_> {
    /// Runs this program with some arguments, and reads what it answers in JSON.
    ///
    /// # Errors
    /// [`Error`].
    pub(crate) fn ask<T: DeserializeOwned>(
        &self,
        mode: Mode,
        log: Option<&Path>,
        arguments: &[&OsStr],
    ) -> Result<T, Error> {
        let (out, errors) = (self.folder.join("answer"), self.folder.join("errors"));
        let mut command = Command::new(env::current_exe()?);
        command.args(arguments).stdin(Stdio::null());
        command.stdout(File::create(&out)?).stderr(File::create(&errors)?);
        // The only difference is the hook.
        for name in ["LD_PRELOAD", "VMM_MODE", "VMM_LOG_LEVEL", "VMM_LOG_FILE", "VMM_QUOTA", "VMM_RESERVE"] {
            command.env_remove(name);
        }
        if mode != Mode::Off {
            command.env("LD_PRELOAD", run::preload(&run::library(self.library)?, None)?);
        }
        if mode == Mode::Monitor {
            command.env("VMM_MODE", "MONITOR");
        }
        if let Some(log) = log {
            command.env("VMM_LOG_FILE", log).env("VMM_LOG_LEVEL", "INFO");
        }
        let mut child = command.spawn()?;
        let until = Instant::now() + self.timeout;
        let status = loop {
            match child.try_wait()? {
                Some(status) => break status,
                None if Instant::now() < until => thread::sleep(Duration::from_millis(5)),
                None => {
                    child.kill()?;
                    child.wait()?;
                    return Err(Error::Timeout(self.timeout.as_secs()));
                }
            }
        };
        if !status.success() {
            let says = String::from_utf8_lossy(&fs::read(&errors)?).into_owned();
            let last = says
                .lines()
                .rfind(|line| !line.trim().is_empty())
                .map(|line| line.trim_start_matches("vmhook: "));
            let says =
                last.map_or_else(|| format!("the program ended with {status}"), |line| printable(line, 500));
            return Err(Error::Failed { says });
        }
        serde_json::from_slice(&fs::read(&out)?).map_err(|wrong| Error::Answer { status, wrong })
    }
}
