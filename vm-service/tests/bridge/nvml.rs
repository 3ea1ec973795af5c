//! NVML of the bridge: what programs and scripts read of a server's driver and devices by `libnvidia-ml.so.1`.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::process::{Running, beside, until};

pub(crate) fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../features/cuda/bridge/nvml").join(name)
}

pub(crate) fn gcc(to: &Path, source: &Path, more: &[&str]) {
    let mut gcc = Command::new("gcc");
    gcc.args(["-std=gnu11", "-pthread", "-o"]).arg(to).arg(source).arg("-ldl").args(more);
    assert!(gcc.status().expect("gcc").success());
}

/// A server of two devices, and a folder with the bridge's libraries and the program.
pub(crate) struct Place {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) server: Running,
}

impl Place {
    pub(crate) fn new() -> Self {
        Self::with(|_, _| beside("libvm_cuda_fake.so"))
    }

    /// The same with another driver, and what else the server gets.
    pub(crate) fn with(driver: impl Fn(&Path, &mut Command) -> PathBuf) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("bridge")).expect("a folder");
        for (name, library) in
            [("libcuda.so.1", "libvm_bridge_guest.so"), ("libnvidia-ml.so.1", "libvm_bridge_nvml.so")]
        {
            symlink(beside(library), path("bridge").join(name)).expect("a link");
        }
        gcc(&path("program"), &source("tests/nvml.c"), &[]);
        let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
        command.args(["bridge", "serve", "--socket"]).arg(path("socket")).env("VM_CUDA_FAKE_DEVICES", "2");
        let driver = driver(folder.path(), &mut command);
        command.arg("--driver").arg(driver);
        let server = Running(command.stderr(Stdio::null()).spawn().expect("vm-service"));
        until("the server listens", || path("socket").exists());
        Self { folder, server }
    }

    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env("LD_LIBRARY_PATH", self.folder.path().join("bridge"));
        command.env("VM_BRIDGE", format!("unix:{}", self.folder.path().join("socket").display()));
        command.env("VM_BRIDGE_LOG", self.folder.path().join("log"));
        // NVML lists the machine's devices whatever is set here.
        command.env("CUDA_VISIBLE_DEVICES", "1");
        command
    }

    pub(crate) fn program(&self) -> Command {
        self.command(self.folder.path().join("program"))
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn kill(&mut self) {
        self.server.0.kill().expect("killed");
        self.server.0.wait().expect("ended");
    }
}

pub(crate) fn says(command: &mut Command) -> String {
    let output = command.output().expect("the program");
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// The folder of nvidia-ml-py, or why there is none.
fn pynvml() -> Result<PathBuf, String> {
    let fetched = Command::new(source("tests/fetch-nvml")).output().map_err(|error| error.to_string())?;
    match fetched.status.success() {
        true => Ok(String::from_utf8_lossy(&fetched.stdout).trim().into()),
        false => Err(String::from_utf8_lossy(&fetched.stderr).trim().to_owned()),
    }
}

const SAYS: &str = "\
before: NVMLError_Uninitialized
driver: 13.0 13.13.0 13000
device: 0 vm-cuda-fake GPU-766d2d63-7564-612d-6661-6b6500000000 00000000:01:00.0 0000:01:00.0 0 1 0
memory: 1073741824 1073741824 0 0
facts: (9, 0) 9 0 0
peers: [[0, 0, 5], [0, 0, 5]] NVMLError_InvalidArgument
found: [0, 0, 0]
processes: []
nvmlDeviceGetUtilizationRates NVMLError_NotSupported
nvmlDeviceGetPowerUsage NVMLError_NotSupported
nvmlDeviceGetPersistenceMode NVMLError_NotSupported
nvmlDeviceGetMinorNumber NVMLError_NotSupported
device: 1 vm-cuda-fake GPU-766d2d63-7564-612d-6661-6b6500000001 00000000:02:00.0 0000:02:00.0 0 2 0
memory: 1073741824 1073741824 0 0
facts: (9, 0) 9 0 0
peers: [[0, 0, 5], [0, 0, 5]] NVMLError_InvalidArgument
found: [1, 1, 1]
processes: []
nvmlDeviceGetUtilizationRates NVMLError_NotSupported
nvmlDeviceGetPowerUsage NVMLError_NotSupported
nvmlDeviceGetPersistenceMode NVMLError_NotSupported
nvmlDeviceGetMinorNumber NVMLError_NotSupported
none: NVMLError_NotFound NVMLError_InvalidArgument NVMLError_InvalidArgument
after: NVMLError_Uninitialized NVMLError_Uninitialized
";

#[test]
fn a_script_of_nvidias_module_reads_what_the_server_has() {
    let pynvml = match pynvml() {
        Ok(pynvml) => pynvml,
        Err(reason) => return println!("skipped: no nvidia-ml-py: {reason}"),
    };
    let place = Place::new();
    let mut python = place.command("python3");
    let said = says(python.arg(source("tests/nvml.py")).env("PYTHONPATH", pynvml));
    // The fake driver's name depends on whether it is built with what runs kernels.
    assert_eq!(said, SAYS);
    let line = "vm-bridge: nvmlDeviceGetPowerUsage is not supported\n";
    assert_eq!(place.log().matches(line).count(), 1, "{}", place.log());
}

#[test]
fn programs_are_answered_whatever_they_do() {
    let place = Place::new();
    let names = source("names.txt").display().to_string();
    let check = |arguments: &[&str]| {
        let said = says(place.program().env_remove("CUDA_VISIBLE_DEVICES").args(arguments));
        assert_eq!(said, "right\n", "{arguments:?}");
    };
    check(&["arguments", &names]);
    check(&["forks"]);
    check(&["threads"]);
}

#[test]
fn a_server_that_is_gone_is_an_error() {
    for way in ["gone", "lost"] {
        let mut place = Place::new();
        let mut program = place.program();
        program.arg(way).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut program = program.env_remove("CUDA_VISIBLE_DEVICES").spawn().expect("the program");
        let mut output = BufReader::new(program.stdout.take().expect("its output")).lines();
        assert_eq!(output.next().expect("a line").expect("a line"), "ready");
        place.kill();
        program.stdin.take().expect("its input").write_all(b"\n").expect("a line");
        let rest: Vec<_> = output.map(|line| line.expect("a line")).collect();
        assert_eq!(rest, ["right"], "{way}");
        assert!(program.wait().expect("ended").success());
    }
}

#[test]
fn without_the_bridge_there_is_no_nvml() {
    let place = Place::new();
    let check = |name: &str, value: &str, code: u32, says_why: &str| {
        let mut program = place.program();
        program.arg("init").env(name, value);
        assert_eq!(says(&mut program), format!("init: {code}\nright\n"), "{says_why}");
        assert!(place.log().contains(says_why), "{says_why}: {}", place.log());
    };
    check("VM_BRIDGE", "unix:/nowhere", 9, "vm-service bridge serve");
    check("VM_BRIDGE", "nonsense", 9, "it must be unix:PATH");
    let theirs = place.folder.path().join("theirs");
    std::fs::create_dir(&theirs).expect("a folder");
    symlink(beside("libvm_bridge_nvml.so"), theirs.join("libnvidia-ml.so.1")).expect("a link");
    let theirs_text = theirs.to_str().expect("a path");
    check("LD_LIBRARY_PATH", theirs_text, 12, "there is no libcuda.so.1");
    symlink(beside("libvm_cuda_fake.so"), theirs.join("libcuda.so.1")).expect("a link");
    check("LD_LIBRARY_PATH", theirs_text, 12, "is not the bridge's");
}

/// A folder with a driver that is NVIDIA's, by its file's name, and an NVML beside it.
pub(crate) fn theirs(folder: &Path, server: &mut Command, nvml: &str) -> PathBuf {
    let theirs = folder.join("theirs");
    std::fs::create_dir(&theirs).expect("a folder");
    gcc(&theirs.join("libnvidia-ml.so.1"), &source("tests").join(nvml), &["-shared", "-fPIC"]);
    let driver = theirs.join("libcuda.so.580.95.05");
    std::fs::copy(beside("libvm_cuda_fake.so"), &driver).expect("a copy");
    symlink(&driver, theirs.join("libcuda.so.1")).expect("a link");
    server.env("LD_LIBRARY_PATH", &theirs);
    theirs.join("libcuda.so.1")
}

/// NVIDIA's driver is known by its file's name, and what is free of its devices where there is no context is what NVIDIA's NVML says.
#[test]
fn of_nvidias_driver_the_server_asks_nvidias_nvml() {
    let pynvml = match pynvml() {
        Ok(pynvml) => pynvml,
        Err(reason) => return println!("skipped: no nvidia-ml-py: {reason}"),
    };
    let place = Place::with(|folder, server| theirs(folder, server, "theirs.c"));
    let script = "from pynvml import *\nnvmlInit()\nprint(nvmlSystemGetDriverVersion(), nvmlSystemGetNVMLVersion())\n\
                  for at in range(2):\n  try: print(nvmlDeviceGetMemoryInfo(nvmlDeviceGetHandleByIndex(at)).free)\n  \
                  except NVMLError as error: print(error)\n";
    let mut python = place.command("python3");
    let said = says(python.args(["-c", script]).env("PYTHONPATH", pynvml));
    assert_eq!(said, "580.95.05 13.580.95.05\n3145728\nGPU is lost\n");
}
