//! Guests that L1 runs: by `vm-service`, or by another VMM to compare with.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::mount::{MountFlags, mount};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use serde_json::Value;

use super::hang::what_guests_do;
use super::{Finished, Function, L1, wait_until};
use crate::report::Report;
use crate::scenario::Variant;

/// Who runs the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// `vm-service run`.
    VmService,
    /// QEMU with `-accel kvm -device vfio-pci`.
    Qemu,
    /// cloud-hypervisor with `--device`.
    CloudHypervisor,
}

impl Engine {
    /// Its program in L1.
    pub fn program(self) -> &'static str {
        match self {
            Self::VmService => super::l1::VM_SERVICE,
            Self::Qemu => "/usr/bin/qemu-system-x86_64",
            Self::CloudHypervisor => CLOUD_HYPERVISOR,
        }
    }
}

/// Where L1 has cloud-hypervisor, when the testbed was given one.
pub const CLOUD_HYPERVISOR: &str = "/usr/bin/cloud-hypervisor";

/// How long a process may take to end after it has closed its sockets: it may write a core file.
const ENDING: Duration = Duration::from_secs(20);

/// What the guest boots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// The Linux kernel of L1, with the agent as its init process.
    Linux,
    /// The bare guest.
    Bare,
}

/// A guest to run.
#[derive(Clone, Debug)]
pub struct GuestPlan<'a> {
    /// Its name.
    pub name: &'a str,
    /// Who runs it.
    pub engine: Engine,
    /// What it boots.
    pub program: Program,
    /// Its RAM.
    pub memory_mib: u32,
    /// Its vCPUs.
    pub vcpus: u8,
    /// The Linux kernel's command line, beyond what the agent needs; or the bare guest's.
    pub cmdline: &'a str,
    /// The host's functions that it gets.
    pub devices: Vec<&'a Function>,
    /// More of its file's first table, as in `peer_to_peer = false`.
    pub settings: &'a str,
    /// More of its file, as in `[[accelerators]]`.
    pub file: &'a str,
    /// More arguments of `vm-service run`, or of QEMU.
    pub arguments: &'a [&'a str],
    /// Whether its console is a terminal, and so has [keys](Guest::press) for `vm-service run`. Then it gives no report.
    pub terminal: bool,
}

impl<'a> GuestPlan<'a> {
    /// A Linux guest with one device, run by `vm-service`.
    pub fn linux(name: &'a str, device: &'a Function) -> Self {
        Self {
            name,
            engine: Engine::VmService,
            program: Program::Linux,
            memory_mib: 256,
            vcpus: 1,
            cmdline: "",
            devices: vec![device],
            settings: "",
            file: "",
            arguments: &[],
            terminal: false,
        }
    }

    /// The bare guest with one device, run by `vm-service`.
    pub fn bare(name: &'a str, cmdline: &'a str, device: &'a Function) -> Self {
        Self { program: Program::Bare, memory_mib: 32, cmdline, ..Self::linux(name, device) }
    }

    /// The bare guest without a device of its own, run by `vm-service` with more in its file.
    pub fn sharing(name: &'a str, cmdline: &'a str, file: &'a str) -> Self {
        Self {
            name,
            engine: Engine::VmService,
            program: Program::Bare,
            memory_mib: 32,
            vcpus: 1,
            cmdline,
            devices: Vec::new(),
            settings: "",
            file,
            arguments: &[],
            terminal: false,
        }
    }
}

/// A guest that runs.
#[derive(Debug)]
pub struct Guest {
    name: String,
    process: Child,
    started: Instant,
    console: PathBuf,
    output: PathBuf,
    errors: PathBuf,
    text: String,
    parsed: usize,
    reports: Vec<(Duration, Report)>,
    /// The other side of the terminal that its console is.
    terminal: Option<OwnedFd>,
}

/// Process ids of all that `vm-service` runs in this role, each with its parent's.
pub fn processes(role: &str) -> Vec<(u32, u32)> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter_map(|pid| {
        let is_it = role_of(pid).as_deref() == Some(role);
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok().filter(|_| is_it)?;
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
        Some((pid, parent.trim().parse().ok()?))
    })
    .collect()
}

/// What a process of `vm-service` is: the first word after its name.
pub(super) fn role_of(pid: u32) -> Option<String> {
    let words = fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
    words.split('\0').nth(1).map(str::to_owned)
}

/// A guest that has ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// The process that ran it.
    pub process: Finished,
    /// All that it wrote on its console.
    pub console: String,
    /// What its agent reported, and when after the start.
    pub reports: Vec<(Duration, Report)>,
}

impl Guest {
    /// Starts a guest.
    ///
    /// # Errors
    /// When the process can't be started.
    pub fn start(l1: &mut L1, plan: &GuestPlan<'_>) -> Result<Self> {
        let file = |suffix: &str| PathBuf::from(format!("/tmp/{}.{suffix}", plan.name));
        let (console, output, errors) = (file("console"), file("out"), file("err"));
        // A console of an earlier guest of this name must not be taken for this one's.
        fs::write(&console, "")?;
        let cmdline = match plan.program {
            Program::Linux => format!(
                "console=ttyS0 quiet panic=-1 testbed.level=2 testbed.scenario={} testbed.variant={} {}",
                l1.scenario, l1.variant, plan.cmdline
            ),
            Program::Bare => plan.cmdline.to_owned(),
        };
        let mut command = match plan.engine {
            Engine::VmService => vm_service(plan, &cmdline, &console)?,
            Engine::Qemu => qemu(plan, &cmdline, &console, l1.variant)?,
            Engine::CloudHypervisor => cloud_hypervisor(plan, &cmdline, &console, l1.variant)?,
        };
        l1.step(format!("guest {}: {command:?}", plan.name));
        let started = Instant::now();
        let (stdin, stdout, terminal) = if plan.terminal {
            let (terminal, here) = terminal().context("no terminal can be made")?;
            (Stdio::from(here), &console, Some(terminal))
        } else {
            (Stdio::null(), &output, None)
        };
        let process = command
            .stdin(stdin)
            .stdout(File::create(stdout)?)
            .stderr(File::create(&errors)?)
            .spawn()
            .with_context(|| format!("can't start guest {}", plan.name))?;
        Ok(Self {
            name: plan.name.to_owned(),
            process,
            started,
            console,
            output,
            errors,
            text: String::new(),
            parsed: 0,
            reports: Vec::new(),
            terminal,
        })
    }

    /// Types on its console.
    ///
    /// # Errors
    /// When that is no terminal.
    pub fn press(&self, keys: &[u8]) -> Result<()> {
        let terminal = self.terminal.as_ref().context("its console is no terminal")?;
        rustix::io::write(terminal, keys)?;
        Ok(())
    }

    /// Process id of what runs it: of its keeper, for `vm-service run`.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Process id of its VMM, which its keeper started.
    ///
    /// # Errors
    /// When there is none.
    pub fn vmm(&self) -> Result<u32> {
        self.processes("guest-vmm").next().with_context(|| format!("guest {} has no VMM", self.name))
    }

    /// Process ids of the workers that its keeper started.
    pub fn workers(&self) -> Vec<u32> {
        self.processes("accelerator-worker").collect()
    }

    fn processes(&self, role: &str) -> impl Iterator<Item = u32> {
        let parent = self.pid();
        processes(role).into_iter().filter(move |(_, of)| *of == parent).map(|(pid, _)| pid)
    }

    /// How long ago it was started.
    pub fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// Whether it still runs.
    pub fn runs(&mut self) -> bool {
        matches!(self.process.try_wait(), Ok(None))
    }

    /// What it has said on standard error so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.errors).unwrap_or_default()
    }

    /// Whether its keeper or its VMM has a VFIO device open, or mapped, which is as good.
    pub fn holds_a_device(&self) -> bool {
        // Both names that Linux has for one: of its cdev's file, and of the one that a group gives.
        let is_device = |name: &str| name.contains("/dev/vfio/devices/") || name.contains("[vfio-device]");
        let holds = |pid: u32| {
            let process = PathBuf::from(format!("/proc/{pid}"));
            let files = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
            let mut names =
                files.filter_map(|file| Some(fs::read_link(file.path()).ok()?.display().to_string()));
            names.any(|name| is_device(&name))
                || is_device(&fs::read_to_string(process.join("maps")).unwrap_or_default())
        };
        holds(self.pid()) || self.vmm().is_ok_and(holds)
    }

    /// Waits until the guest's agent reports something that `wanted` takes; the report and when it came, counted
    /// from the start.
    ///
    /// # Errors
    /// When it fails, ends or takes longer than `timeout` before.
    pub fn wait_for<T>(
        &mut self,
        what: &str,
        timeout: Duration,
        wanted: impl Fn(&Report) -> Option<T>,
    ) -> Result<(Duration, T)> {
        let deadline = Instant::now() + timeout;
        loop {
            let running = self.runs();
            self.read_console()?;
            for (when, report) in &self.reports {
                if let Some(value) = wanted(report) {
                    return Ok((*when, value));
                }
                if let Report::Failed { reason } = report {
                    bail!("guest {} failed: {reason}", self.name);
                }
            }
            ensure!(running, "guest {} ended before {what}\n{}", self.name, self.evidence());
            ensure!(
                Instant::now() < deadline,
                "{what} did not come from guest {} within {} s\n{}",
                self.name,
                timeout.as_secs(),
                self.evidence()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until the guest's console has `text`.
    ///
    /// # Errors
    /// When it ends or takes longer than `timeout` before.
    pub fn wait_for_text(&mut self, text: &str, timeout: Duration) -> Result<()> {
        self.wait_for_texts(text, 1, timeout)
    }

    /// Waits until the guest's console has `text` N times.
    ///
    /// # Errors
    /// As for [`wait_for_text`](Self::wait_for_text).
    pub fn wait_for_texts(&mut self, text: &str, times: usize, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        loop {
            let running = self.runs();
            self.read_console()?;
            if self.text.matches(text).count() >= times {
                return Ok(());
            }
            ensure!(running, "guest {} ended before it said {text:?}\n{}", self.name, self.evidence());
            ensure!(
                Instant::now() < deadline,
                "guest {} did not say {text:?} within {} s\n{}",
                self.name,
                timeout.as_secs(),
                self.evidence()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until the process that runs it has said `text` on standard error.
    ///
    /// # Errors
    /// When it ends or takes longer than `timeout` before.
    pub fn wait_for_log(&mut self, text: &str, timeout: Duration) -> Result<()> {
        let what = format!("{text:?} from the process of guest {}", self.name);
        let waited = wait_until(&what, timeout, || {
            let said = self.log().contains(text);
            (said || !self.runs()).then_some(said)
        });
        match waited {
            Ok(true) => Ok(()),
            Ok(false) => bail!("it ended before {what}\n{}", self.evidence()),
            Err(error) => Err(error.context(self.evidence())),
        }
    }

    /// Waits until it has powered off and its process has ended, whatever its exit status.
    ///
    /// # Errors
    /// When that takes longer than `timeout`.
    pub fn end(mut self, timeout: Duration) -> Result<Ended> {
        let status = wait_until(&format!("the end of guest {}", self.name), timeout, || {
            self.process.try_wait().transpose()
        });
        let took = self.started.elapsed();
        self.read_console()?;
        let status = status.with_context(|| format!("{}{}", what_guests_do(), self.evidence()))??;
        Ok(Ended {
            process: Finished {
                code: status.code(),
                stdout: fs::read_to_string(&self.output).unwrap_or_default(),
                stderr: fs::read_to_string(&self.errors)?,
                took,
            },
            console: std::mem::take(&mut self.text),
            reports: std::mem::take(&mut self.reports),
        })
    }

    fn read_console(&mut self) -> Result<()> {
        let mut file = File::open(&self.console)?;
        file.seek(SeekFrom::Start(self.parsed as u64))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        // Only whole lines, so that no report is read in halves.
        let Some(end) = bytes.iter().rposition(|&byte| byte == b'\n') else { return Ok(()) };
        let now = self.started.elapsed();
        let fresh = String::from_utf8_lossy(&bytes[..=end]).into_owned();
        self.parsed += end + 1;
        self.reports.extend(fresh.lines().filter_map(Report::parse_console).map(|report| (now, report)));
        self.text.push_str(&fresh);
        Ok(())
    }

    /// What it has said on its console so far.
    pub fn text(&mut self) -> &str {
        // What can't be read of its console is not there.
        let _ = self.read_console();
        &self.text
    }

    /// Adds the process's exit status and the end of its output and of the console to an error.
    pub fn explain(&mut self, error: anyhow::Error) -> anyhow::Error {
        // One that has closed its sockets is about to end.
        let ended = wait_until("its end", ENDING, || self.process.try_wait().ok().flatten());
        let fate = match ended {
            Ok(status) => format!("the process of guest {} ended with {status}", self.name),
            Err(_) => format!("the process of guest {} still runs", self.name),
        };
        error.context(format!("{fate}\n{}", self.said()))
    }

    /// The end of what it and its process have said so far.
    pub fn said(&mut self) -> String {
        // What can't be read of its console is not shown.
        let _ = self.read_console();
        self.evidence()
    }

    fn evidence(&self) -> String {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let end = |text: &str| {
            text.lines().rev().take(15).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join("\n")
        };
        format!(
            "--- its console ---\n{}\n--- what its process said ---\n{}\n{}",
            end(&self.text),
            end(&read(&self.errors)),
            end(&read(&self.output))
        )
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Both fail only on a process that has ended and was waited for.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Ended {
    /// Itself, if the process succeeded and the guest's own checks, of which there is at least one, held. Passes the
    /// guest's reports on to the testbed.
    ///
    /// # Errors
    /// When something failed.
    pub fn succeeded(self, l1: &mut L1) -> Result<Self> {
        let end = self
            .console
            .lines()
            .rev()
            .take(15)
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
            .collect::<Vec<_>>()
            .join("\n");
        let mut passed = self.console.lines().any(|line| line.trim() == "bare: PASS");
        for (_, report) in &self.reports {
            match report {
                Report::Failed { reason } => bail!("the guest failed: {reason}"),
                Report::Passed => passed = true,
                Report::Proved { what } => l1.proved(format!("in the guest: {what}")),
                _ => {}
            }
        }
        for line in self.console.lines() {
            if let Some((check, "ok")) =
                line.trim().strip_prefix("bare: ").and_then(|line| line.rsplit_once(' '))
            {
                l1.proved(format!("in the guest: {check}"));
            }
        }
        ensure!(
            self.process.code == Some(0),
            "the guest's process failed ({:?}): {}\n--- its console ---\n{end}",
            self.process.code,
            self.process.stderr
        );
        ensure!(
            passed,
            "the guest did not say that it passed\n--- its console ---\n{end}\n{}",
            self.process.stderr
        );
        Ok(self)
    }

    /// Exits to user space for the guest's accesses, from `run --json`.
    ///
    /// # Errors
    /// When they were not reported.
    pub fn access_exits(&self) -> Result<u64> {
        let document = self.process.json()?;
        let exits = document.get("exits").context("`run --json` tells no exits")?;
        ["port_reads", "port_writes", "memory_reads", "memory_writes"]
            .iter()
            .map(|kind| {
                exits
                    .get(kind)
                    .and_then(Value::as_u64)
                    .with_context(|| format!("`run --json` tells no {kind}"))
            })
            .sum()
    }
}

/// A terminal: the side of who types, and that of who reads it.
fn terminal() -> Result<(OwnedFd, OwnedFd)> {
    fs::create_dir_all("/dev/pts")?;
    // An earlier terminal may have mounted it.
    let _ = mount("devpts", "/dev/pts", "devpts", MountFlags::empty(), None);
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let typed = openpt(flags)?;
    unlockpt(&typed)?;
    let read = ioctl_tiocgptpeer(&typed, flags)?;
    Ok((typed, read))
}

fn vm_service(plan: &GuestPlan<'_>, cmdline: &str, console: &std::path::Path) -> Result<Command> {
    let (kernel, initrd) = match plan.program {
        Program::Linux => ("/guest/kernel", "initrd = \"/guest/initrd\"\n"),
        Program::Bare => ("/guest/bare", ""),
    };
    let file = format!("/tmp/{}.toml", plan.name);
    fs::write(
        &file,
        format!(
            "name = \"{}\"\nvcpus = {}\nmemory = \"{}M\"\n{}\n\n[boot]\nkernel = \"{kernel}\"\n{initrd}cmdline = \"{cmdline}\"\n\n{}",
            plan.name, plan.vcpus, plan.memory_mib, plan.settings, plan.file
        ),
    )?;
    let mut command = Command::new(plan.engine.program());
    command.args(["run", &file]);
    if !plan.terminal {
        command.args(["--json", "--console"]).arg(format!("file={}", console.display()));
    }
    if plan.program == Program::Bare {
        // It knows no power button.
        command.args(["--shutdown-timeout", "0"]);
    }
    for device in &plan.devices {
        command.args(["--device", &device.address]);
    }
    command.args(plan.arguments);
    Ok(command)
}

fn qemu(plan: &GuestPlan<'_>, cmdline: &str, console: &std::path::Path, variant: Variant) -> Result<Command> {
    ensure!(plan.program == Program::Linux, "QEMU boots Linux guests only");
    let mut command = Command::new(plan.engine.program());
    let cpu = match variant {
        Variant::Group => "host",
        // KVM is built in, and learns the time stamp counter's frequency before Linux has refined it: a guest that waits
        // for a deadline of that counter may wait for ever. QEMU can't put that right, so it does without.
        Variant::Iommufd => "host,-tsc-deadline",
    };
    command
        .args([
            "-machine",
            "q35",
            "-accel",
            "kvm",
            "-cpu",
            cpu,
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
        ])
        .args(["-no-reboot", "-monitor", "none", "-kernel", "/guest/kernel", "-initrd", "/guest/initrd"])
        .args(["-m", &plan.memory_mib.to_string(), "-smp", &plan.vcpus.to_string(), "-append", cmdline])
        .arg("-serial")
        .arg(format!("file:{}", console.display()));
    if variant == Variant::Iommufd {
        command.args(["-object", "iommufd,id=iommufd0"]);
    }
    for (number, device) in plan.devices.iter().enumerate() {
        let back_end = if variant == Variant::Iommufd { ",iommufd=iommufd0" } else { "" };
        command
            .arg("-device")
            .arg(format!("pcie-root-port,id=port{number},chassis={number}"))
            .arg("-device")
            .arg(format!("vfio-pci,host={},bus=port{number}{back_end}", device.address));
    }
    command.args(plan.arguments);
    Ok(command)
}

fn cloud_hypervisor(
    plan: &GuestPlan<'_>,
    cmdline: &str,
    console: &std::path::Path,
    variant: Variant,
) -> Result<Command> {
    ensure!(plan.program == Program::Linux, "cloud-hypervisor boots Linux guests only");
    let mut command = Command::new(plan.engine.program());
    command
        .args(["--kernel", "/guest/kernel", "--initramfs", "/guest/initrd", "--cmdline", cmdline])
        .arg("--memory")
        .arg(format!("size={}M", plan.memory_mib))
        .arg("--cpus")
        .arg(format!("boot={}", plan.vcpus))
        // The self-built Linux has no seccomp.
        .args(["--seccomp", "false", "--console", "off", "--serial"])
        .arg(format!("file={}", console.display()));
    if variant == Variant::Iommufd {
        // This Linux maps no BARs through iommufd, which cloud-hypervisor takes for an error; no device needs it here.
        command.args(["--platform", "iommufd=on,vfio_p2p_dma=off"]);
    }
    for device in &plan.devices {
        command.arg("--device").arg(format!("path={}", device.path().display()));
    }
    Ok(command)
}
