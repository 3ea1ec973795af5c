//! A stock Linux guest runs a CUDA program as NVIDIA's compiler makes it, where there is no GPU: by the bridge, on the host's processor.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::agent::{Guest, GuestPlan, L1, L2, Program, processes, wait_until};
use crate::report::Report;
use crate::scenario::{Contents, Scenario, Variant};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "linux-cuda",
    about: "unmodified CUDA programs of a stock Linux guest, where no GPU is anywhere, compute on the host's processor",
    // The self-built Linux kernel has no vsock, and no device is passed.
    variants: &[Variant::Group],
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

fn l1(l1: &mut L1) -> Result<()> {
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
    let gone = wait_until("the end of the workers", Duration::from_secs(60), || {
        (processes("bridge-worker").is_empty() && processes("accelerator-worker").is_empty()).then_some(())
    });
    l1.prove(gone.is_ok(), "no server and no worker outlives its guest".to_owned())
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

fn l2(l2: &mut L2) -> Result<()> {
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
    let output = wait_until("another server", Duration::from_secs(120), || {
        program(&["add"]).output().ok().filter(|output| output.status.success())
    });
    l2.prove(output.is_ok(), "the next program has another server".to_owned())
}
