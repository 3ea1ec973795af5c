//! NVIDIA's compute-sanitizer over the kernels of the filetests.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use crate::skip::skip;
use crate::{Arguments, Test};

/// The tests of this section.
pub(crate) fn tests(arguments: &Arguments) -> Vec<Test> {
    let device = arguments.device;
    // initcheck knows only memory that was written, and the stop words of a pinned buffer are not the device's.
    ["memcheck", "racecheck", "synccheck", "initcheck"]
        .into_iter()
        .map(|tool| {
            Test::new(tool, move |_, report| {
                report.note(run(tool, device)?);
                Ok(())
            })
        })
        .collect()
}

/// Runs the section `filetests` of this program under a tool, and gives the tool's last line.
fn run(tool: &str, device: u32) -> anyhow::Result<String> {
    const FOUND: i32 = 86;
    let output = std::env::temp_dir().join(format!("gpu-{tool}-{}.log", std::process::id()));
    let program = std::env::current_exe().context("finding this program")?;
    let started = Command::new("compute-sanitizer")
        .args(["--tool", tool, "--error-exitcode", &FOUND.to_string(), "--log-file"])
        .arg(&output)
        .arg(program)
        .args(["--child", "filetests", "--device", &device.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn();
    let mut child = match started {
        Ok(child) => child,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return skip("no compute-sanitizer in PATH: it comes with the CUDA toolkit");
        }
        Err(error) => return Err(error).context("starting compute-sanitizer"),
    };
    let said = child.stdout.take().context("its output")?;
    let said = std::thread::spawn(move || std::io::read_to_string(said));
    let deadline = Instant::now() + Duration::from_secs(100);
    let status = loop {
        match child.try_wait()? {
            Some(status) => break status,
            None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(50)),
            None => {
                child.kill()?;
                bail!("it did not end in 100 s");
            }
        }
    };
    let said = said.join().unwrap_or_else(|_| Ok(String::new()))?;
    let log = std::fs::read_to_string(&output).unwrap_or_default();
    let _ = std::fs::remove_file(&output);
    if log.contains("Device not supported") {
        return skip("compute-sanitizer does not support this device here");
    }
    let lines: Vec<&str> = log.lines().collect();
    let tail = lines[lines.len().saturating_sub(30)..].join("\n");
    ensure!(status.success(), "{tool} ended with {status}:\n{tail}");
    ensure!(!said.contains("\"Failed\""), "a test failed under {tool}: {}", failed(&said));
    Ok(lines.last().copied().unwrap_or_default().trim_start_matches('=').trim().to_owned())
}

fn failed(said: &str) -> &str {
    said.lines().find(|line| line.contains("\"Failed\"")).unwrap_or_default()
}
