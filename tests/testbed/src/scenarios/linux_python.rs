//! A stock Linux guest with CPython, numpy and the wheel of the Python package: its arrays are computed on the accelerator that
//! the host shares.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::agent::{Guest, GuestPlan, L1, L2, Program};
use crate::scenario::{Contents, Scenario, Variant, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "linux-python",
    about: "Python in a stock Linux guest computes arrays, and kernels of its own, on a shared accelerator",
    // The self-built Linux kernel has no vsock, and no device is passed.
    variants: Variants::Only(Variant::Group),
    ports: 0,
    devices: &[],
    disks: &[],
    memory_mib: 2048,
    deadline: Duration::from_secs(1800),
    contents: Contents {
        accelerators: true,
        linux_guest: true,
        examples: true,
        python: true,
        ..Contents::NONE
    },
    l1,
    l2: Some(l2),
};

const SHARED: &str = "[[accelerators]]\ndevice = \"cpu\"\nmemory = \"64M\"\ndeadline = \"5s\"\nwindow = \"64M\"\n\n\
                      [vsock]\ncid = 42\n";
const TIMEOUT: Duration = Duration::from_secs(1500);
/// What the guest runs. It says what holds, a line each.
const PROGRAM: &str = include_str!("linux_python.py");

fn l1(l1: &mut L1) -> Result<()> {
    let plan = GuestPlan {
        program: Program::Linux,
        // Of its initial RAM disk, and what is unpacked of it, Python and numpy are 100 MB each.
        memory_mib: 896,
        ..GuestPlan::sharing("python", "", SHARED)
    };
    let ended = Guest::start(l1, &plan)?.end(TIMEOUT)?.succeeded(l1)?;
    l1.figure("run of the guest, from start to its end", ended.process.took.as_secs_f64(), "s");
    Ok(())
}

/// A program of Python, to be run by what lies below `/python`.
pub(super) fn python(program: &str) -> Result<Command> {
    const FILE: &str = "/tmp/program.py";
    fs::write(FILE, program).context("can't write the program")?;
    let mut command = Command::new("/python/bin/python3");
    command.arg(FILE).env("PYTHONHOME", "/python").env("PYTHONPATH", "/python/site");
    // What crashes says where, and what was said before is not lost.
    command.env("PYTHONFAULTHANDLER", "1").env("PYTHONUNBUFFERED", "1");
    Ok(command)
}

fn l2(l2: &mut L2) -> Result<()> {
    let since = Instant::now();
    let output = python(PROGRAM)?.output().context("can't run Python")?;
    let said = String::from_utf8_lossy(&output.stdout);
    for line in said.lines() {
        l2.prove(true, line.to_owned())?;
    }
    let wrong = String::from_utf8_lossy(&output.stderr);
    let took = since.elapsed().as_secs();
    l2.prove(
        output.status.success(),
        format!("the program ends well after {took} s ({}){}", output.status, wrong.trim_end()),
    )
}
