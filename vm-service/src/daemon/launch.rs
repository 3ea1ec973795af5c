//! Makes a process for a guest, which outlives the daemon.
//!
//! The process has a session of its own, takes the lock of the guest's directory over as its standard input, and the
//! connection by which the daemon hears of it as its standard output, and logs into a file. Where systemd runs, it is in a scope unit
//! of its own, `vm-guest-NAME.scope`: whoever stops the daemon's unit stops no guest. Elsewhere it is in a cgroup of its own.
//! It inherits no other descriptor of the daemon, and little of its environment.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use vm_passthrough::Host;

use super::cgroup::Cgroup;
use crate::api::StartOptions;
use crate::deadlines::guest_stop;
use crate::log;
use crate::os::sandbox::inherit_standard;

/// What a guest's process has of the daemon's environment.
const ENVIRONMENT: [&str; 5] = ["PATH", "LD_LIBRARY_PATH", "RUST_LOG", log::SIZE, log::KEPT];

/// What a guest's process is made of.
pub(super) struct Plan<'a> {
    /// The host that it is on.
    pub(super) host: &'a Host,
    /// The guest's name.
    pub(super) name: &'a str,
    /// Its directory, with its file.
    pub(super) home: &'a Path,
    /// The lock of the directory, which the process keeps.
    pub(super) lock: File,
    /// What it logs to.
    pub(super) log: File,
    /// Where the daemon hears of it: a connection to its control socket, which has subscribed.
    pub(super) connection: UnixStream,
    /// How many devices it starts with.
    pub(super) devices: usize,
    /// What was asked for.
    pub(super) options: &'a StartOptions,
}

/// Makes processes for guests.
pub(super) trait Launch: Send + Sync {
    /// Makes one.
    ///
    /// # Errors
    /// When that fails.
    fn launch(&self, plan: Plan<'_>) -> io::Result<Box<dyn Launched>>;
}

/// A guest's process.
pub(super) trait Launched: Send {
    /// Its exit status, once it has ended; `None` within for a signal.
    ///
    /// # Errors
    /// When the Linux kernel does not tell.
    fn ended(&mut self) -> io::Result<Option<Option<i32>>>;

    /// Kills it.
    ///
    /// # Errors
    /// The Linux kernel's.
    fn kill(&mut self) -> io::Result<()>;

    /// Waits for its end.
    fn wait(&mut self);
}

/// Makes them of this program.
pub(super) struct Processes;

impl Launch for Processes {
    fn launch(&self, plan: Plan<'_>) -> io::Result<Box<dyn Launched>> {
        let mut cgroup = None;
        let mut command = match has_systemd() {
            true => {
                let mut command = Command::new("systemd-run");
                // When the host shuts down, guests have their time, and what they use is there as long.
                let time = plan.options.shutdown_timeout().saturating_add(guest_stop(plan.devices));
                command.arg(format!("--property=TimeoutStopSec={}", time.as_secs()));
                command
                    .arg("--property=After=basic.target network.target remote-fs.target vm-claims.service");
                command.args(["--scope", "--quiet", "--collect", "--unit"]);
                command.arg(format!("vm-guest-{}.scope", plan.name)).arg("--").arg(program()?);
                command
            }
            false => {
                cgroup = Cgroup::of(plan.host, plan.name);
                Command::new(program()?)
            }
        };
        let mut console = OsString::from("pty=");
        console.push(plan.home.join("console"));
        command.arg("run").arg(plan.home.join("guest.toml")).arg("--managed");
        command
            .arg("--state")
            .arg(&plan.host.state)
            .arg("--console")
            .arg(console)
            .args(plan.options.arguments());
        let environment = ENVIRONMENT.iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
        command.env_clear().envs(environment);
        crate::devices::npus::name_libraries(&mut command);
        // What the daemon writes to, it does too; nothing if the daemon writes no log files.
        command.env(log::FOLDER, log::files().map_or(Path::new(""), |files| &files.folder));
        inherit_standard(&mut command);
        if let Some(Err(error)) = cgroup.as_ref().map(|cgroup| cgroup.take(&mut command)) {
            tracing::warn!(guest = plan.name, "the guest {} has no cgroup of its own: {error}", plan.name);
        }
        let connection = Stdio::from(OwnedFd::from(plan.connection));
        let child = command.stdin(plan.lock).stdout(connection).stderr(plan.log).current_dir("/").spawn()?;
        Ok(Box::new(Process { child, _cgroup: cgroup }))
    }
}

/// A guest's process, and the cgroup that goes with it.
struct Process {
    child: Child,
    _cgroup: Option<Cgroup>,
}

impl Launched for Process {
    fn ended(&mut self) -> io::Result<Option<Option<i32>>> {
        Ok(self.child.try_wait()?.map(|status| status.code()))
    }

    fn kill(&mut self) -> io::Result<()> {
        self.child.kill()
    }

    fn wait(&mut self) {
        if let Err(error) = self.child.wait() {
            tracing::warn!("a guest's process can't be waited for: {error}");
        }
    }
}

/// Whether systemd runs this machine, and this user may ask it for units.
fn has_systemd() -> bool {
    Path::new("/run/systemd/system").is_dir() && rustix::process::geteuid().is_root()
}

/// This program; after an upgrade, the one that took its place.
fn program() -> io::Result<PathBuf> {
    let path = std::env::current_exe()?;
    let replaced = path.as_os_str().as_bytes().strip_suffix(b" (deleted)");
    Ok(replaced.map_or_else(|| path.clone(), |path| OsString::from_vec(path.to_vec()).into()))
}
