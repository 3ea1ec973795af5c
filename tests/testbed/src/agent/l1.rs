//! L1: the host, as the passthrough sees it.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::wait_until;
use crate::report::Report;
use crate::scenario::Variant;
use crate::sweep::Sweep;

/// The program under test.
pub const VM_SERVICE: &str = "/bin/vm-service";
/// The example of a VMM that implements the library's boundary itself.
pub const OWN_VMM: &str = "/bin/own_vmm";
/// The example of two processes that drive one device.
pub const VFIO_EDU: &str = "/bin/vfio_edu";
/// The example that measures mapping RAM for DMA.
pub const MAP_RAM: &str = "/bin/map_ram";
/// The example of a dma-buf that the processor uses in turns with others.
pub const DMA_BUF: &str = "/bin/dma_buf";

/// L1 and its line to the testbed.
#[derive(Debug)]
pub struct L1 {
    /// Which VFIO back end this Linux kernel has.
    pub variant: Variant,
    /// The scenario's name.
    pub scenario: &'static str,
    /// How much of its sweeps is taken.
    pub sweep: Sweep,
    channel: File,
}

/// A command that has ended.
#[derive(Clone, Debug)]
pub struct Finished {
    /// Its exit status; `None` when a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// How long it ran.
    pub took: Duration,
}

impl Finished {
    /// Itself, if it succeeded.
    ///
    /// # Errors
    /// When it failed, with what it said.
    pub fn succeeded(self) -> Result<Self> {
        ensure!(self.code == Some(0), "it failed ({:?}):\n{}{}", self.code, self.stderr, self.stdout);
        Ok(self)
    }

    /// Its standard output as JSON.
    ///
    /// # Errors
    /// When it is not JSON.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.stdout)
            .with_context(|| format!("this is not JSON:\n{}\nstandard error:\n{}", self.stdout, self.stderr))
    }
}

impl L1 {
    pub(super) fn new(scenario: &'static str, variant: Variant, sweep: Sweep) -> Result<Self> {
        let channel = OpenOptions::new().write(true).open("/dev/ttyS1").context("can't open /dev/ttyS1")?;
        let mut l1 = Self { variant, scenario, sweep, channel };
        l1.report(&Report::Up { level: 1, kernel: kernel_release() });
        Ok(l1)
    }

    /// Sends a report to the testbed.
    pub fn report(&mut self, report: &Report) {
        // When the channel is gone nobody can be informed; the testbed's deadline covers it.
        let _ = self.channel.write_all(format!("{}\n", report.line()).as_bytes());
    }

    /// Tells that a step begins.
    pub fn step(&mut self, what: impl Into<String>) {
        self.report(&Report::Step { what: what.into() });
    }

    /// Tells that something was checked and held.
    pub fn proved(&mut self, what: impl Into<String>) {
        self.report(&Report::Proved { what: what.into() });
    }

    /// Checks `holds`, and tells that `what` was proved.
    ///
    /// # Errors
    /// When it does not hold.
    pub fn prove(&mut self, holds: bool, what: impl Into<String>) -> Result<()> {
        let what = what.into();
        ensure!(holds, "this does not hold: {what}");
        self.proved(what);
        Ok(())
    }

    /// Gives a command to the monitor of the QEMU that L1 runs in.
    pub fn monitor(&mut self, command: &str) {
        self.report(&Report::Monitor { command: command.into() });
    }

    /// Tells a measured figure.
    pub fn figure(&mut self, name: &str, value: f64, unit: &str) {
        self.report(&Report::Figure { name: name.into(), value, unit: unit.into() });
    }

    /// Runs `vm-service` with these arguments, at most `timeout` long.
    ///
    /// # Errors
    /// When it can't be started or takes too long. That it fails is no error here.
    pub fn vm_service(&mut self, arguments: &[&str], timeout: Duration) -> Result<Finished> {
        self.program(VM_SERVICE, arguments, timeout)
    }

    /// Runs a program with these arguments, at most `timeout` long.
    ///
    /// # Errors
    /// When it can't be started or takes too long. That it fails is no error here.
    pub fn program(&mut self, program: &str, arguments: &[&str], timeout: Duration) -> Result<Finished> {
        let shown = format!("{} {}", program.trim_start_matches("/bin/"), arguments.join(" "));
        self.step(shown.clone());
        run(Command::new(program).args(arguments), timeout).with_context(|| shown)
    }
}

/// Runs a command, at most `timeout` long.
///
/// # Errors
/// When it can't be started or takes too long.
pub(super) fn run(command: &mut Command, timeout: Duration) -> Result<Finished> {
    let start = Instant::now();
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let stdout = child.stdout.take().context("no standard output")?;
    let stderr = child.stderr.take().context("no standard error")?;
    let out = std::thread::spawn(move || read_all(stdout));
    let err = std::thread::spawn(move || read_all(stderr));
    let status = wait_until("its end", timeout, || child.try_wait().transpose());
    let took = start.elapsed();
    if status.is_err() {
        // It ends the readers; they fail only on a process that has ended by now.
        let _ = child.kill();
        let _ = child.wait();
    }
    let (Ok(stdout), Ok(stderr)) = (out.join(), err.join()) else { bail!("a reader of its output panicked") };
    match status {
        Ok(status) => Ok(Finished { code: status?.code(), stdout, stderr, took }),
        Err(error) => Err(error.context(format!("it was killed; it had said:\n{stderr}{stdout}"))),
    }
}

fn read_all(mut from: impl Read) -> String {
    let mut bytes = Vec::new();
    // What was read until an error is still worth showing.
    let _ = from.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

pub(super) fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}
