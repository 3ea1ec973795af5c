//! Random CUDA C++: nvcc compiles each function for the driver and, with the host's compiler, for the host, and both must
//! compute and print the same. `python/random_cuda.py` writes the programs.
//!
//! With a number in `SWEEP_SEED` one program is built, of kernels that this number chooses.
//! `VM_CUDA_SEEDS=FROM..TO cargo test -p vm-cuda-cpu --test random -- --nocapture` builds as many as wanted.

mod common;

use common::{driver, fetch, file};
use std::path::Path;
use std::process::{Command, Output};

/// Kernels in a program, which nvcc compiles within seconds.
const KERNELS: u64 = 40;

/// What keeps the host's compiler from contracting, reordering or assuming more than the language promises.
const HOST: &str = "-fwrapv,-ffp-contract=off,-fno-strict-aliasing,-frounding-math";

fn seeds() -> std::ops::Range<u64> {
    let number = |text: &str| text.parse::<u64>().expect("a number");
    if let Ok(given) = std::env::var("VM_CUDA_SEEDS") {
        let (from, to) = given.split_once("..").expect("FROM..TO");
        return number(from)..number(to);
    }
    match std::env::var("SWEEP_SEED") {
        Ok(seed) => number(&seed)..number(&seed) + KERNELS,
        Err(_) => 0..400,
    }
}

#[track_caller]
fn said(what: &str, output: &Output) -> String {
    let (said, wrong) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{what}: {}\n{said}{wrong}", output.status);
    said.into_owned()
}

/// Builds the program of these kernels, and returns the lines in which the device differs from the host.
fn differences(compiler: &Path, folder: &Path, first: u64, count: u64) -> Vec<String> {
    let (source, program) = (folder.join("random.cu"), folder.join("random"));
    let mut write = Command::new("python3");
    write.arg(file("tests/python/random_cuda.py")).args([first.to_string(), count.to_string()]);
    let text = said("random_cuda.py", &write.output().expect("python3"));
    std::fs::write(&source, text).expect("written");
    let mut nvcc = Command::new(compiler.join("bin/nvcc"));
    // Every other program has the instructions of a newer architecture.
    let architecture = if (first / KERNELS).is_multiple_of(2) { "75" } else { "90" };
    nvcc.args(["-w", "-std=c++17", "-cudart", "static", "-fmad=false", "-Xcompiler", HOST, "-gencode"]);
    nvcc.arg(format!("arch=compute_{architecture},code=compute_{architecture}"));
    nvcc.arg("-L").arg(compiler.join("lib")).arg("-o").arg(&program).arg(&source);
    said("nvcc", &nvcc.output().expect("nvcc"));
    let run = |side| {
        let output = Command::new(&program).arg(side).env("LD_LIBRARY_PATH", folder).output();
        said(side, &output.expect("the program"))
    };
    let (host, device) = (run("host"), run("device"));
    // Lines of printf come in the order of threads on the host, and in any on the device.
    let sorted = |text: &str| {
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let (host, device) = (sorted(&host), sorted(&device));
    if host == device {
        return Vec::new();
    }
    let only = |these: &[String], those: &[String], side: &str| -> Vec<String> {
        these.iter().filter(|line| !those.contains(line)).map(|line| format!("{side}: {line}")).collect()
    };
    let mut found = only(&device, &host, "device");
    found.extend(only(&host, &device, "host"));
    found
}

#[test]
fn the_device_computes_and_prints_what_the_host_does() {
    let compiler = match fetch("tests/fetch-nvcc", &[]) {
        Ok(compiler) => compiler,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let folder = driver();
    let seeds = seeds();
    let mut wrong = Vec::new();
    for first in seeds.clone().step_by(KERNELS as usize) {
        let count = KERNELS.min(seeds.end - first);
        let found = differences(&compiler, folder.path(), first, count);
        if !found.is_empty() {
            println!("{}", found.join("\n"));
        }
        wrong.extend(found);
    }
    assert!(wrong.is_empty(), "{} lines of {seeds:?} differ, from {}", wrong.len(), wrong[0]);
}
