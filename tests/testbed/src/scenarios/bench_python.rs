//! Measures arrays of the Python package in a Linux guest, on the accelerator that the host shares, beside the same program on the host
//! (here L1), before and after:
//!
//! ```sh
//! cargo testbed --jobs 1 --processors 2 --markdown bench-python
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

use super::bench::{median, tell};
use super::linux_python::python;
use crate::agent::{Guest, GuestPlan, L1, L2, Program};
use crate::report::Report;
use crate::scenario::{Contents, Scenario, Variant, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "bench-python",
    about: "measures Python's arrays in a Linux guest beside the same program on the host",
    variants: Variants::Only(Variant::Group),
    ports: 0,
    devices: &[],
    disks: &[],
    memory_mib: 6144,
    deadline: Duration::from_secs(3600),
    contents: Contents {
        accelerators: true,
        linux_guest: true,
        examples: true,
        python: true,
        python_in_l1: true,
        ..Contents::NONE
    },
    l1,
    l2: Some(l2),
};

const SHARED: &str = "[[accelerators]]\ndevice = \"cpu\"\nmemory = \"2G\"\ndeadline = \"60s\"\nwindow = \"64M\"\n\n\
                      [vsock]\ncid = 42\n";
const TIMEOUT: Duration = Duration::from_secs(500);
const PROGRAM: &str = include_str!("bench_python.py");

/// What the program says.
#[derive(Deserialize)]
struct Said {
    device: String,
    seconds: BTreeMap<String, Vec<f64>>,
}

fn measured(device: &str) -> Result<String> {
    // What it says meanwhile is the console's.
    let output = python(PROGRAM)?
        .env("VMACCEL_DEVICE", device)
        .stderr(Stdio::inherit())
        .output()
        .context("can't run Python")?;
    ensure!(output.status.success(), "Python ended with {}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn l1(l1: &mut L1) -> Result<()> {
    let plan =
        GuestPlan { program: Program::Linux, memory_mib: 896, ..GuestPlan::sharing("python", "", SHARED) };

    let before: Said = serde_json::from_str(&measured("cpu")?)?;
    let mut guest = Guest::start(l1, &plan)?;
    guest.wait_for_text("round 4: ", TIMEOUT)?;
    let age = guest.age().as_secs_f64();
    for (what, pid) in [("machine", guest.vmm()?), ("worker", *guest.workers().first().context("no worker")?)]
    {
        l1.figure(
            &format!("processors that the guest's {what} kept busy"),
            processor_time(pid)? / age,
            "processors",
        );
    }
    let said = |report: &Report| match report {
        Report::Proved { what } if what.starts_with('{') => Some(what.clone()),
        _ => None,
    };
    let within: Said = serde_json::from_str(&guest.wait_for("its figures", TIMEOUT, said)?.1)?;
    guest.end(TIMEOUT)?.succeeded(l1)?;
    let after: Said = serde_json::from_str(&measured("cpu")?)?;
    ensure!(within.device == "guest" && before.device == "cpu", "the guest computed on {}", within.device);
    for (name, first) in before.seconds {
        let own = within.seconds.get(&name).context("a case that the guest did not measure")?;
        let host = [first.as_slice(), after.seconds.get(&name).map_or(&[], Vec::as_slice)].concat();
        tell(l1, &format!("{name}: on the host"), &host, "s");
        tell(l1, &format!("{name}: in the guest"), own, "s");
        l1.figure(&format!("{name}: host / guest"), median(&host) / median(own), "ratio");
    }
    Ok(())
}

/// Seconds that a process has computed.
fn processor_time(pid: u32) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat.rsplit_once(") ").context("no process")?.1.split(' ').collect();
    let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok()).context("no time");
    // Of the user's and the kernel's 100 ticks a second (proc_pid_stat(5), 14 and 15).
    Ok((ticks(11)? + ticks(12)?) / 100.0)
}

fn l2(l2: &mut L2) -> Result<()> {
    let said = measured("guest")?;
    l2.prove(true, said)
}
