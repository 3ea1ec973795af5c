//! What processes and threads give up that a guest may take over.
//!
//! A worker, which serves an accelerator to a guest, is a process of its own, and does so before it looks at anything that a
//! guest wrote:
//!
//! ```text
//! enter      descriptors, session, new privileges, core dumps
//! settle     its user, what it may open (Landlock), and its life beyond the VMM's; threads that begin later inherit it
//!            ── the accelerator is opened, and its first kernel runs ──
//! confine    system calls, and their arguments, on all threads
//! ```
//!
//! A process that cannot have all of them does not start, unless the operator [waives](Measure) a measure by name. Only what the
//! platform cannot offer is left out without a waiver: a user of its own where this process is not root's, and Landlock's limit on
//! signals before Linux 6.12, where seccomp alone refuses them. [`Confinement`] lists the parts in force and the missing ones.
//!
//! A guest's VMM goes the same way: it enters, opens all that the guest is made of, settles before it begins a thread, makes the
//! machine, and is confined before the guest runs. In it the threads of vCPUs and devices are [confined](spawn) further before they
//! serve the guest, and with them those that they begin. What takes rights is done by its keeper, at its request.

mod calls;
mod files;
mod sys;
#[cfg(test)]
mod tests;
mod threads;
mod user;

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use clap::ValueEnum;
use rustix::process::{DumpableBehavior, Resource, Rlimit, Signal, getrlimit, setrlimit};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub(crate) use calls::confine;
pub(crate) use files::{Nodes, restrict_to};
pub(crate) use sys::{end_with_parent, inherit_standard, join_cgroup};
pub(crate) use threads::{is_alone, spawn};

/// Descriptors that a worker may have: one for each of at most 1,024 lanes, and dozens of a GPU's driver.
pub(crate) const WORKER_FILES: u64 = 2048;
/// Threads that a worker with a user of its own may have.
const THREADS: u64 = 4096;
/// How far its first stack may grow.
const STACK: u64 = 64 << 20;

/// Why files are not confined.
const NO_LANDLOCK: &str = "this Linux kernel has no Landlock (5.13 or newer, with `landlock` in `lsm=`)";

/// Addresses for code, and for what the C library reserves for the heaps of threads. Page tables take a 512th.
const RESERVED: u64 = 64 << 30;

/// Who needs which system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Profile {
    /// A worker whose accelerator is code that this program maps itself: any call but a few ends the process.
    Own,
    /// One whose accelerator is a driver's library, which opens files and talks to device nodes: other calls fail.
    Driver,
    /// One whose accelerator is an NPU's libraries, which talk to its device node, or emulate it: other calls fail.
    Npu,
    /// A guest's VMM, which has opened all that the guest is made of: other calls fail.
    Vmm,
    /// vCPUs and devices, which work on what is open: other calls fail.
    Machine,
}

impl Profile {
    /// That of the worker for `cpu`, a PCI address, or `npu:` and a number.
    pub(crate) fn of(device: &str) -> Self {
        match device {
            "cpu" => Self::Own,
            device if device.starts_with("npu:") => Self::Npu,
            _ => Self::Driver,
        }
    }
}

/// A part of the confinement that an operator can waive by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Measure {
    /// A user that no other process has, without capabilities
    User,
    /// Landlock's limits on the files that the process opens
    Files,
    /// The list of system calls that the process may make
    Calls,
}

impl Measure {
    /// All of them.
    pub(crate) const ALL: [Self; 3] = [Self::User, Self::Files, Self::Calls];

    /// Its name on the command line and in guest files.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Files => "files",
            Self::Calls => "calls",
        }
    }

    /// The names of several, as the command line has them.
    pub(crate) fn names(measures: &[Self]) -> String {
        measures.iter().map(|measure| measure.name()).collect::<Vec<_>>().join(",")
    }

    /// The error of a process that cannot have it.
    pub(crate) fn refused(self, reason: &dyn fmt::Display) -> String {
        let (name, what) = (self.name(), self.what());
        format!(
            "cannot give it {what}: {reason}; to run without, waive it by `--unconfined {name}`, or by `unconfined = \
             [\"{name}\"]` in the guest's file"
        )
    }

    fn what(self) -> &'static str {
        match self {
            Self::User => "a user of its own",
            Self::Files => "Landlock's limits on files",
            Self::Calls => "a list of system calls",
        }
    }
}

/// The measures that a process must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Measures {
    /// Becomes a user that nobody else is.
    pub(crate) user: bool,
    /// Opens only what it needs.
    pub(crate) files: bool,
    /// Makes only the system calls that it needs.
    pub(crate) calls: bool,
}

impl Measures {
    /// All but those that the operator waived.
    pub(crate) fn without(waived: &[Measure]) -> Self {
        let [user, files, calls] = Measure::ALL.map(|measure| !waived.contains(&measure));
        Self { user, files, calls }
    }
}

/// Lists the waivers to try when an accelerator does not open: each measure alone, then all of them.
pub(crate) fn further_waivers<'a>(
    may: &'a [Measure],
    waived: &'a [Measure],
) -> impl Iterator<Item = Vec<Measure>> + 'a {
    let left: Vec<_> = may.iter().copied().filter(|measure| !waived.contains(measure)).collect();
    let all = Some(left.clone()).filter(|left| left.len() > 1);
    let more = left.into_iter().map(|measure| vec![measure]).chain(all);
    more.map(|more| waived.iter().copied().chain(more).collect())
}

/// How far a worker or a VMM is confined, beyond what all are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Confinement {
    /// Whether it makes only the system calls that it needs.
    pub(crate) calls: bool,
    /// The user that only this process is.
    pub(crate) user: Option<u32>,
    /// Whether it can open only what it needs, and reaches no other process through `/proc`.
    pub(crate) files: bool,
    /// Whether the Linux kernel refuses its signals to others, whoever they belong to.
    pub(crate) signals: bool,
    /// What it goes without, and why.
    pub(crate) missing: Vec<String>,
}

impl fmt::Display for Confinement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [("system calls", self.calls), ("files", self.files), ("signals", self.signals)];
        let parts: Vec<_> = parts.iter().filter(|(_, is_on)| *is_on).map(|(part, _)| *part).collect();
        f.write_str(if parts.is_empty() { "nothing listed" } else { "" })?;
        f.write_str(&parts.join(", "))?;
        match self.user {
            // Of several processes, of which each has another one.
            Some(_) if f.alternate() => f.write_str(", each as a user of its own")?,
            Some(user) => write!(f, ", as user {user}")?,
            None => {}
        }
        for missing in &self.missing {
            write!(f, "; without {missing}")?;
        }
        Ok(())
    }
}

/// The first part. Answers with the socket, which was standard input: a worker is given no more than the three standard
/// descriptors. It has `files` at most then, if given.
///
/// # Errors
/// The Linux kernel's, with what it refused.
pub(crate) fn enter(files: Option<u64>) -> Result<OwnedFd, String> {
    let failed = |what: &'static str| move |error: io::Error| format!("{what} failed: {error}");
    let socket = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)
        .map_err(|error| failed("taking the socket")(error.into()))?;
    File::open("/dev/null")
        .and_then(|null| Ok(rustix::stdio::dup2_stdin(null)?))
        .map_err(failed("opening /dev/null"))?;
    // It is read once, by calls that are refused later.
    let _ = rustix::param::page_size();
    // It fails when the process leads a session already, as when it is started by hand.
    let _ = rustix::process::setsid();
    // Whoever ends all of a unit's processes means that the guest's own is asked, which ends this one.
    sys::ignore_requests_to_end();
    rustix::thread::set_no_new_privs(true)
        .map_err(|error| failed("giving up new privileges")(error.into()))?;
    limit(Resource::Core, 0)?;
    files.map_or(Ok(()), |files| limit(Resource::Nofile, files))?;
    limit(Resource::Stack, STACK)?;
    Ok(socket)
}

/// The second part, while there is one thread. Of device nodes only `nodes` can be opened, and libraries are also read in
/// `folders`.
///
/// # Errors
/// When one of the measures cannot be had.
pub(crate) fn settle(
    profile: Profile,
    measures: Measures,
    nodes: Nodes,
    folders: &[&Path],
) -> Result<Confinement, String> {
    settle_below(Path::new("/"), profile, measures, nodes, folders)
}

/// The same, with device nodes below a folder.
fn settle_below(
    root: &Path,
    profile: Profile,
    measures: Measures,
    nodes: Nodes,
    folders: &[&Path],
) -> Result<Confinement, String> {
    let devices = nodes.below(root);
    let mut confinement = Confinement { calls: measures.calls, ..Confinement::default() };
    let missing = &mut confinement.missing;
    // It takes a right that goes with the user. Who is not root gains nothing without new privileges.
    let is_root = rustix::process::geteuid().is_root();
    let bounded = if is_root { user::bound_capabilities() } else { Ok(()) };
    // The user then: changing it takes rights and a signal between threads that Landlock could refuse.
    match (measures.user, is_root) {
        (true, true) => {
            bounded
                .map_err(|error| Measure::User.refused(&format_args!("its capabilities stay: {error}")))?;
            let user = user::become_nobody_else(&devices)
                .and_then(|user| limit(Resource::Nproc, THREADS).map(|()| user));
            confinement.user = Some(user.map_err(|reason| Measure::User.refused(&reason))?);
        }
        (true, false) => missing.push("a user of its own (vm-service does not run as root)".into()),
        (false, _) => {
            missing.push("a user of its own (waived)".into());
            if let Err(error) = bounded {
                missing.push(format!("an end to capabilities of other programs ({error})"));
            }
        }
    }
    // It would be reset by a change of the user. Whoever starts workers is a thread that stays.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| format!("cannot end with its parent: {error}"))?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(|error| format!("cannot be kept from other processes of its user: {error}"))?;
    let reach = match measures.files {
        true => files::restrict(profile, &devices, folders).and_then(|reach| match reach.files {
            true => Ok(reach),
            false => Err(NO_LANDLOCK.into()),
        }),
        false => {
            missing.push("Landlock's limits on files (waived)".into());
            files::restrict_signals()
        }
    };
    let reach = reach.map_err(|reason| Measure::Files.refused(&reason))?;
    (confinement.files, confinement.signals) = (reach.files, reach.signals);
    if !reach.signals {
        missing.push("Landlock's limits on signals (Linux has them from 6.12 on)".into());
    }
    if !measures.calls {
        missing.push("a list of system calls (waived)".into());
    }
    Ok(confinement)
}

/// From here on this thread, and those that it begins, gain no privileges and open no files.
///
/// # Errors
/// When this cannot be had.
pub(crate) fn open_nothing(measures: Measures) -> Result<(), String> {
    if !measures.files {
        return Ok(());
    }
    files::restrict_all()
        .and_then(|is_on| is_on.then_some(()).ok_or_else(|| NO_LANDLOCK.into()))
        .map_err(|reason: String| Measure::Files.refused(&reason))
}

/// Limits the memory that only this process has (`RLIMIT_DATA`) to `bytes`: the guest's RAM does not count. Mappings that
/// the limit does not know are refused by [`confine`].
///
/// Page tables are in no limit: those of mappings that are only read, or of the guest's RAM mapped many times, could take all of
/// the host's memory. So where it is known what is `mapped` of others' memory, the address space is limited too.
///
/// # Errors
/// The Linux kernel's.
pub(crate) fn limit_memory(bytes: u64, mapped: Option<u64>) -> Result<(), String> {
    if let Some(mapped) = mapped {
        limit(Resource::As, RESERVED.saturating_add(bytes).saturating_add(mapped))?;
    }
    limit(Resource::Data, bytes)
}

/// Has this process lock `bytes` of memory at most, by which devices reach it: with its user it gives up to lock without limit.
///
/// # Errors
/// The Linux kernel's: only root raises a limit.
pub(crate) fn limit_locked(bytes: u64) -> Result<(), String> {
    let limit = Rlimit { current: Some(bytes), maximum: Some(bytes) };
    setrlimit(Resource::Memlock, limit).map_err(|error| format!("limiting locked memory failed: {error}"))
}

fn limit(resource: Resource, most: u64) -> Result<(), String> {
    let now = getrlimit(resource);
    let hard = now.maximum.map_or(most, |hard| hard.min(most));
    let soft = match resource {
        // The C library takes it for the stacks of a driver's threads.
        Resource::Stack => now.current.map_or(hard, |soft| soft.min(hard)),
        _ => hard,
    };
    let limit = Rlimit { current: Some(soft), maximum: Some(hard) };
    setrlimit(resource, limit).map_err(|error| format!("limiting resources failed: {error}"))
}
