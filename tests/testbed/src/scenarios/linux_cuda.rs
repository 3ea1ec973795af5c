//! A stock Linux guest runs a CUDA program as NVIDIA's compiler makes it, where there is no GPU: by the bridge, on the host's processor.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::FileExt as _;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::agent::{Guest, GuestPlan, L1, L2, Program, processes, wait_until};
use crate::report::Report;
use crate::scenario::{Contents, Scenario, Variant, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "linux-cuda",
    about: "unmodified CUDA programs of a stock Linux guest, where no GPU is anywhere, compute on the host's processor",
    // The self-built Linux kernel has no vsock, and no device is passed.
    variants: Variants::Only(Variant::Group),
    ports: 0,
    devices: &[],
    disks: &[],
    memory_mib: 1024,
    deadline: Duration::from_secs(1800),
    contents: Contents { accelerators: true, linux_guest: true, cuda: true, ..Contents::NONE },
    l1,
    l2: Some(l2),
};

const SHARED: &str = "[[accelerators]]\ndevice = \"cpu\"\nmemory = \"64M\"\ndeadline = \"600s\"\nwindow = \"32M\"\n\
                      trust = \"driver\"\n";
const TIMEOUT: Duration = Duration::from_secs(1200);
/// What the guest says when its server may be killed.
const KILL: &str = "kill-the-server";
/// What it says when it runs a program after its restart.
const AGAIN: &str = "again";
/// A disk by which the guest knows that it has restarted; it is the guest's only one.
const MARK: &str = "/tmp/mark.raw";

/// What can't be a guest's CUDA driver, and what is said of it before the guest starts.
const REFUSED: [(&str, &str); 3] = [
    ("device = \"cpu\"\ndriver = \"/init\"", "cannot open the CUDA driver /init: dlopen failed"),
    ("device = \"cpu\"\ndriver = \"/libcuda.so.1\"", "`accelerators[0].driver`"),
    ("device = \"ffff:ff:1f.7\"", "ffff:ff:1f.7"),
];

fn refuses(l1: &mut L1) -> Result<()> {
    for (keys, expect) in REFUSED {
        let file =
            format!("[[accelerators]]\n{keys}\nmemory = \"64M\"\nwindow = \"32M\"\ntrust = \"driver\"\n");
        let plan = GuestPlan {
            program: Program::Linux,
            memory_mib: 256,
            ..GuestPlan::sharing("refused", "", &file)
        };
        let ended = Guest::start(l1, &plan)?.end(TIMEOUT)?;
        let said = ended.process.stderr.trim();
        l1.prove(
            ended.process.code != Some(0) && ended.console.is_empty() && said.contains(expect),
            format!("no guest starts with {}: {said}", keys.replace('\n', ", ")),
        )?;
    }
    Ok(())
}

fn l1(l1: &mut L1) -> Result<()> {
    refuses(l1)?;
    let plan =
        GuestPlan { program: Program::Linux, memory_mib: 256, ..GuestPlan::sharing("cuda", "", SHARED) };
    let mut guest = Guest::start(l1, &plan)?;
    let says_kill =
        |report: &Report| matches!(report, Report::Value { name, .. } if name == KILL).then_some(());
    guest.wait_for("the word to kill the server", TIMEOUT, says_kill)?;
    let one = wait_until("the end of the other workers", Duration::from_secs(60), || {
        (processes("bridge-worker").len() == 1).then_some(())
    });
    l1.prove(one.is_ok(), "one program has a worker: those of programs that ended are gone".to_owned())?;
    let servers = guest.workers();
    ensure!(servers.len() == 1, "the guest has {} servers", servers.len());
    let server = rustix::process::Pid::from_raw(servers[0].cast_signed()).context("a process id")?;
    rustix::process::kill_process(server, rustix::process::Signal::KILL)?;
    let ended = guest.end(TIMEOUT)?.succeeded(l1)?;
    l1.figure("run of the guest, from start to its end", ended.process.took.as_secs_f64(), "s");
    l1.prove(none_left(), "no server and no worker outlives its guest".to_owned())?;
    ends(l1)
}

/// A guest restarts, and then its VMM is killed, in the middle of a kernel without an end.
fn ends(l1: &mut L1) -> Result<()> {
    File::create(MARK)?.set_len(1 << 20)?;
    let file = format!("{SHARED}\n[[disks]]\npath = \"{MARK}\"\n");
    let plan = GuestPlan {
        program: Program::Linux,
        memory_mib: 256,
        ..GuestPlan::sharing("ends", "cuda=ends", &file)
    };
    let mut guest = Guest::start(l1, &plan)?;
    let says = |report: &Report| matches!(report, Report::Value { name, .. } if name == AGAIN).then_some(());
    guest.wait_for("a program after the restart", TIMEOUT, says)?;
    let (servers, workers) = (guest.workers().len(), processes("bridge-worker").len());
    l1.prove(
        (servers, workers) == (1, 1),
        format!("after a restart within a kernel there are {servers} server and {workers} worker, of a new program"),
    )?;
    let vmm = rustix::process::Pid::from_raw(guest.vmm()?.cast_signed()).context("a process id")?;
    rustix::process::kill_process(vmm, rustix::process::Signal::KILL)?;
    let ended = guest.end(Duration::from_secs(120))?;
    let gone = none_left();
    l1.prove(
        gone && ended.process.code != Some(0),
        "a VMM that is killed within a kernel leaves neither a server nor a worker".to_owned(),
    )
}

/// Whether no server and no worker is there, in the end.
fn none_left() -> bool {
    let none = || processes("bridge-worker").is_empty() && processes("accelerator-worker").is_empty();
    wait_until("the end of the workers", Duration::from_secs(60), || none().then_some(())).is_ok()
}

fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new("/cuda/program");
    command.args(arguments).env("LD_LIBRARY_PATH", "/cuda").stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn start(arguments: &[&str]) -> Result<Child> {
    program(arguments).spawn().with_context(|| format!("can't start the program {arguments:?}"))
}

fn said(output: &Output) -> String {
    let all = [&output.stdout[..], &output.stderr].concat();
    format!("{} ({})", String::from_utf8_lossy(&all).trim().replace('\n', ", "), output.status)
}

/// A program whose kernel has no end, once that runs.
fn endless() -> Result<(Child, BufReader<std::process::ChildStdout>)> {
    let mut child = start(&["spin"])?;
    let mut output = BufReader::new(child.stdout.take().context("its output")?);
    let mut line = String::new();
    output.read_line(&mut line)?;
    ensure!(line == "spins\n", "the endless program says {line:?}");
    Ok((child, output))
}

/// Restarts within a kernel, and then waits within another.
fn ends_in_guest(l2: &mut L2) -> Result<()> {
    let mark = wait_until("the disk", Duration::from_secs(30), || {
        File::options().read(true).write(true).open("/dev/vda").ok()
    })?;
    let mut bytes = [0; 512];
    mark.read_exact_at(&mut bytes, 0)?;
    if bytes[0] == 0 {
        let _endless = endless()?;
        mark.write_all_at(&[1; 512], 0)?;
        mark.sync_all()?;
        l2.restart();
    }
    let output = program(&["add"]).output()?;
    l2.prove(output.status.success(), format!("after a restart within a kernel: {}", said(&output)))?;
    let (mut child, _output) = endless()?;
    l2.report(&Report::Value { name: AGAIN.into(), value: String::new() });
    bail!("the endless program has ended: {}", child.wait()?)
}

/// The guest's vsock driver resets its device while a program is in a kernel.
fn resets(l2: &mut L2) -> Result<()> {
    const DRIVER: &str = "/sys/bus/virtio/drivers/vmw_vsock_virtio_transport";
    let devices = fs::read_dir(DRIVER).with_context(|| format!("can't read {DRIVER}"))?;
    let name = devices.flatten().find_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        name.strip_prefix("virtio")?.parse::<u32>().is_ok().then_some(name)
    });
    let name = name.context("the driver has no device")?;
    let (mut child, mut rest) = endless()?;
    fs::write(format!("{DRIVER}/unbind"), &name)?;
    let mut line = String::new();
    rest.read_line(&mut line)?;
    child.wait()?;
    l2.prove(line.starts_with("46, "), format!("a program whose vsock was reset says: {}", line.trim()))?;
    fs::write(format!("{DRIVER}/bind"), &name)?;
    next(l2, "the next program is served after the reset")
}

fn next(l2: &mut L2, what: &str) -> Result<()> {
    let output = wait_until("another server", Duration::from_secs(120), || {
        program(&["add"]).output().ok().filter(|output| output.status.success())
    });
    l2.prove(output.is_ok(), what.to_owned())
}

fn l2(l2: &mut L2) -> Result<()> {
    if l2.parameter("cuda").is_ok() {
        return ends_in_guest(l2);
    }
    let output = program(&["add"]).output().context("can't run the program")?;
    let says = said(&output);
    l2.prove(output.status.success() && says.contains("1 sums of 100000 elements are right"), says)?;

    let (first, second, third) = (start(&["add", "20"])?, start(&["add", "20"])?, start(&["stray"])?);
    let strays = third.wait_with_output()?;
    let says = said(&strays);
    l2.prove(says.starts_with("700, "), format!("one program strays: {says}"))?;
    for child in [first, second] {
        let output = child.wait_with_output()?;
        let says = said(&output);
        l2.prove(output.status.success() && says.contains("20 sums"), format!("one beside it: {says}"))?;
    }

    let (mut child, _output) = endless()?;
    child.kill()?;
    child.wait()?;
    let output = program(&["add"]).output()?;
    l2.prove(output.status.success(), format!("after one was killed in a kernel: {}", said(&output)))?;

    let (mut child, mut rest) = endless()?;
    l2.report(&Report::Value { name: KILL.into(), value: String::new() });
    let mut line = String::new();
    rest.read_line(&mut line)?;
    let status = child.wait()?;
    l2.prove(
        line.starts_with("46, "),
        format!("a program whose server was killed says: {} ({status})", line.trim()),
    )?;
    next(l2, "the next program has another server")?;
    resets(l2)
}
