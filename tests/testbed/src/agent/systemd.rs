//! systemd in L1: the first process of a PID namespace, with processes and mounts of its own, as in a container. The
//! root directory, `/dev` and `/run` are L1's.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};

use super::l1::{Finished, run};
use super::{L1, VM_SERVICE, sys, wait_until};

const CONTAIN: &str = "contain";
const ENTER: &str = "enter";
const START: Duration = Duration::from_secs(240);

/// A running systemd. Dropping it kills all that it runs.
#[derive(Debug)]
pub struct Systemd {
    process: Child,
    /// Its PID in L1.
    pid: String,
}

impl Systemd {
    /// Starts it, with the units of the project's package, and waits until it is up.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn start(l1: &mut L1) -> Result<Self> {
        fs::create_dir_all("/usr/bin")?;
        symlink(VM_SERVICE, "/usr/bin/vm-service").context("can't link vm-service")?;
        fs::write("/etc/machine-id", "0123456789abcdef0123456789abcdef\n")?;
        symlink("/usr/lib/systemd/system/multi-user.target", "/etc/systemd/system/default.target")?;
        l1.step("systemd");
        let mut process = Command::new("/init")
            .arg(CONTAIN)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("can't start systemd")?;
        let mut pid = String::new();
        BufReader::new(process.stdout.take().context("no output")?).read_line(&mut pid)?;
        let this = Self { process, pid: pid.trim().to_owned() };
        wait_until("systemd", START, || {
            let state = this.run("systemctl", &["is-system-running"], START).ok()?;
            matches!(state.stdout.trim(), "running" | "degraded").then_some(())
        })?;
        Ok(this)
    }

    /// Runs a program beside it, at most `timeout` long.
    ///
    /// # Errors
    /// When it can't be started or takes too long. That it fails is no error here.
    pub fn run(&self, program: &str, arguments: &[&str], timeout: Duration) -> Result<Finished> {
        run(Command::new("/init").args([ENTER, &self.pid, program]).args(arguments), timeout)
            .with_context(|| format!("{program} {}", arguments.join(" ")))
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        // With the first process of the namespace all others end. It has ended already otherwise.
        if let Some(pid) = self.pid.parse().ok().and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        let _ = self.process.wait();
    }
}

/// Serves the processes that [`Systemd`] starts, if these are their arguments.
pub(super) fn serve(arguments: impl Iterator<Item = String>) {
    let arguments: Vec<String> = arguments.skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        [CONTAIN] => contain(),
        [ENTER, pid, program, arguments @ ..] => enter(pid, program, arguments),
        _ => return,
    };
    match done {
        Ok(code) => std::process::exit(code),
        Err(error) => {
            eprintln!("testbed-agent: {error:#}");
            std::process::exit(125);
        }
    }
}

/// Becomes the parent of a namespace in which systemd is the first process.
fn contain() -> Result<i32> {
    sys::unshare_processes_and_mounts().context("there are no PID namespaces")?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    fs::create_dir_all("/sys/fs/cgroup")?;
    mount("cgroup2", "/sys/fs/cgroup", "cgroup2", MountFlags::empty(), None)
        .context("there are no cgroups")?;
    let systemd = ["/usr/lib/systemd/systemd", "/lib/systemd/systemd"];
    let systemd =
        systemd.iter().find(|path| fs::exists(path).unwrap_or(false)).context("there is no systemd")?;
    // `/proc` has to be that of the new namespace, which only a process within it can mount.
    let mut init = Command::new("/init");
    init.args([
        ENTER,
        "0",
        systemd,
        "--system",
        "--log-target=console",
        "--log-level=notice",
        "--show-status=no",
    ]);
    let mut child = init
        .env("container", "testbed")
        .env("PATH", "/usr/bin:/bin")
        .stdin(Stdio::null())
        .stdout(Stdio::from(rustix::io::dup(rustix::stdio::stderr())?))
        .spawn()?;
    println!("{}", child.id());
    Ok(child.wait()?.code().unwrap_or(126))
}

/// Runs a program where another process is, with its `/proc`; as that namespace's first process itself for `0`.
fn enter(pid: &str, program: &str, arguments: &[&str]) -> Result<i32> {
    let mut command = Command::new(program);
    command.args(arguments);
    if pid == "0" {
        mount("proc", "/proc", "proc", MountFlags::empty(), None)?;
        return Err(command.exec()).with_context(|| format!("can't run {program}"));
    }
    sys::enter_processes_and_mounts(pid.parse()?).context("can't enter the namespace")?;
    let status = command.env("PATH", "/usr/bin:/bin").status();
    Ok(status.with_context(|| format!("can't run {program}"))?.code().unwrap_or(126))
}
