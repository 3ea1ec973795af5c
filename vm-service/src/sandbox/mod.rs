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
//! The first and the last are essential: a worker that can't have them does not start. A machine may refuse the second
//! (a container without the right to change users, a Linux kernel without Landlock); the worker then goes on without, and
//! [`Confinement`] says so.
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

use rustix::process::{DumpableBehavior, Resource, Rlimit, Signal, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};

pub(crate) use calls::confine;
pub(crate) use files::{Nodes, restrict_to};
pub(crate) use sys::{end_with_parent, inherit_standard, join_cgroup};
pub(crate) use threads::spawn;

/// Descriptors that a worker may have: those of a GPU's driver are dozens.
pub(crate) const WORKER_FILES: u64 = 1024;
/// Threads that a worker with a user of its own may have.
const THREADS: u64 = 4096;
/// How far its first stack may grow.
const STACK: u64 = 64 << 20;

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

/// What [`settle`] tries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Measures {
    /// Becomes a user that nobody else is.
    pub(crate) user: bool,
    /// Opens only what it needs.
    pub(crate) files: bool,
}

impl Measures {
    /// What to try, one after the other, until the accelerator opens: a driver's library may have been put where only root
    /// gets at it. The CPU opens with all of them.
    pub(crate) fn to_try(device: &str) -> &'static [Self] {
        const ALL: &[Measures] = &[
            Measures { user: true, files: true },
            Measures { user: true, files: false },
            Measures { user: false, files: false },
        ];
        match Profile::of(device) {
            Profile::Driver | Profile::Npu => ALL,
            Profile::Own | Profile::Machine | Profile::Vmm => &ALL[..1],
        }
    }
}

/// How far a worker or a VMM is confined, beyond what all are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Confinement {
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
        f.write_str("system calls")?;
        if self.files {
            f.write_str(", files")?;
        }
        if self.signals {
            f.write_str(", signals")?;
        }
        if let Some(user) = self.user {
            write!(f, ", as user {user}")?;
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

/// The second part, while there is one thread. What can't be had is reported in the answer. Of device nodes only these can be opened, and a library
/// of an NPU is read below `folder`.
pub(crate) fn settle(
    profile: Profile,
    measures: Measures,
    nodes: Nodes,
    folder: Option<&Path>,
) -> Confinement {
    settle_below(Path::new("/"), profile, measures, nodes, folder)
}

/// The same, with device nodes below a folder.
fn settle_below(
    root: &Path,
    profile: Profile,
    measures: Measures,
    nodes: Nodes,
    folder: Option<&Path>,
) -> Confinement {
    let devices = nodes.below(root);
    let mut confinement = Confinement::default();
    let missing = &mut confinement.missing;
    // It takes a right that goes with the user. Who is not root gains nothing without new privileges.
    if let (true, Err(error)) = (rustix::process::geteuid().is_root(), user::bound_capabilities()) {
        missing.push(format!("an end to capabilities of other programs ({error})"));
    }
    // The user then: changing it takes rights and a signal between threads that Landlock could refuse.
    if measures.user {
        match user::become_nobody_else(&devices)
            .and_then(|user| limit(Resource::Nproc, THREADS).map(|()| user))
        {
            Ok(user) => confinement.user = Some(user),
            Err(reason) => missing.push(format!("a user of its own ({reason})")),
        }
    } else {
        missing.push("a user of its own (the accelerator does not open so)".into());
    }
    // It would be reset by a change of the user. Whoever starts workers is a thread that stays.
    if let Err(error) = rustix::process::set_parent_process_death_signal(Some(Signal::KILL)) {
        missing.push(format!("its end with the VMM's ({error})"));
    }
    if let Err(error) = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        missing.push(format!("protection from other processes of its user ({error})"));
    }
    if profile == Profile::Vmm && !threads::is_alone() {
        missing.push("Landlock's limits on threads that began before".into());
    }
    let landlock = match measures.files {
        true => files::restrict(profile, &devices, folder),
        false => {
            missing.push("Landlock's limits on files (the accelerator does not open so)".into());
            files::restrict_signals()
        }
    };
    match landlock {
        Ok(reach) => {
            (confinement.files, confinement.signals) = (reach.files, reach.signals);
            if measures.files && !reach.files {
                missing.push("Landlock's limits on files (the Linux kernel has none)".into());
            }
            if !reach.signals {
                missing.push("Landlock's limits on signals (Linux has them from 6.12 on)".into());
            }
        }
        Err(reason) => missing.push(format!("Landlock ({reason})")),
    }
    confinement
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
