//! `bridge serve`: a program with the bridge's `libcuda.so.1` finds what it finds before the driver, and workers end with their server.

use std::fs::Permissions;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use vm_bridge::recording::Recording;

use crate::process::{Running, beside, until};

fn serve(driver: &Path, socket: &Path) -> Running {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
    command.args(["bridge", "serve", "--socket"]).arg(socket).arg("--driver").arg(driver);
    Running(command.stderr(Stdio::null()).spawn().expect("vm-service"))
}

/// Programs, a driver, and a server of it.
struct Place {
    folder: tempfile::TempDir,
    server: Running,
}

impl Place {
    fn new(driver: &str, programs: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        // Where a worker's user may read it.
        let driver = beside(driver);
        for (name, library) in [("driver", &driver), ("bridge", &beside("libvm_bridge_guest.so"))] {
            std::fs::create_dir(path(name)).expect("a folder");
            symlink(library, path(name).join("libcuda.so.1")).expect("a link");
        }
        for name in programs {
            let source = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join(format!("../features/cuda/bridge/client/tests/{name}.c"));
            let mut gcc = Command::new("gcc");
            gcc.args(["-std=gnu11", "-pthread", "-o"]).arg(path(name)).arg(source).arg("-ldl");
            assert!(gcc.status().expect("gcc").success());
        }
        let server = serve(&driver, &path("socket"));
        until("the server listens", || path("socket").exists());
        Self { folder, server }
    }

    fn command(&self, program: &str, way: &str) -> Command {
        let path = |name: &str| self.folder.path().join(name);
        let mut command = Command::new(path(program));
        command.env("LD_LIBRARY_PATH", path(way));
        command.env("VM_BRIDGE", format!("unix:{}", path("socket").display()));
        command
    }

    /// A program says the same directly and by a worker.
    fn check(&self, program: &str, argument: &str, says: &str) {
        let said = |way: &str| {
            let output = self.command(program, way).arg(argument).output().expect("the program");
            (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
        };
        let directly = said("driver");
        assert!(directly.0 && directly.1.contains(says), "{argument}: {directly:?}");
        assert_eq!(said("bridge"), directly, "{argument}");
    }
}

#[test]
fn programs_find_the_same_on_the_processor() {
    let place = Place::new("libvm_cuda_cpu.so", &["graphs"]);
    place.check("graphs", "hostmem", "large: 0 wrong");
    place.check("graphs", "prints", "behind\nsaid 5\ncalled with 6\nsaid 0\n");
    place.check("graphs", "prints", "said 2999\nmany\nasserted: 710\n");
    place.check("graphs", "mapped", "mapped: 1, 0 77, 154 126");
}

#[test]
fn a_program_is_served_by_a_worker_that_ends_with_the_server() {
    let place = Place::new("libvm_cuda_fake.so", &["add", "ways", "graphs"]);
    place.check("add", "", "wrong: 0");
    // What a worker's confinement may be in the way of.
    place.check("graphs", "graphs", "printed: digraph, names a kernel: 1, says more: 1");
    place.check("graphs", "hostmem", "large: 0 wrong");
    place.check("graphs", "conditional", "kind 2, condition 2: type 13, 0 0 102");
    place.check("graphs", "allocs", "attributes: 1 1, refused: 1");
    place.check("graphs", "prints", "said 2999\nmany\nasserted: 710\n");
    place.check("graphs", "copies", "batch: 189 63 63");
    place.check("graphs", "logs", "not linked: 1");
    let mut program =
        place.command("ways", "bridge").arg("endless").stdout(Stdio::piped()).spawn().expect("the program");
    let mut line = String::new();
    let mut output = BufReader::new(program.stdout.take().expect("its output"));
    output.read_line(&mut line).expect("a line");
    assert_eq!(line, "works\n");
    until("a worker serves it", || place.server.workers().len() == 1);
    let [worker] = place.server.workers().try_into().expect("one worker");
    drop(place);
    until("the worker ends", || !Path::new(&format!("/proc/{worker}")).exists());
    // It is told that the server is gone, and ends.
    assert!(program.wait().expect("ended").success());
}

#[test]
fn a_driver_that_does_not_open_is_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
    command.args(["bridge", "serve", "--driver", "libnothing.so.1", "--socket"]);
    let output = command.arg(folder.path().join("socket")).output().expect("vm-service");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("libnothing.so.1"), "{said}");
}

#[test]
fn coverage_is_listed_by_library() {
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
        command.args(["bridge", "coverage"]).args(arguments).output().expect("vm-service")
    };
    let text = |arguments: &[&str]| String::from_utf8(run(arguments).stdout).expect("a text");
    assert!(text(&["--of", "triton"]).ends_with(" of 30 functions that triton names (triton==3.9.0)\n"));
    let numba = text(&["--of", "numba"]);
    assert!(numba.contains("answered in the program  cuMemAllocManaged\n"), "{numba}");
    assert!(numba.contains("by hand                  cuLaunchKernel\n"), "{numba}");
    let json: serde_json::Value =
        serde_json::from_str(&text(&["--of", "nvrtc", "--json"])).expect("a document");
    assert_eq!(json["of"]["names"], 2);
    assert_eq!(json["functions"].as_array().map(Vec::len), Some(2));
    let all: serde_json::Value = serde_json::from_str(&text(&["--json"])).expect("a document");
    assert!(all.get("of").is_none() && all["functions"].as_array().is_some_and(|all| all.len() > 700));
    let wrong = run(&["--of", "nobody"]);
    let said = String::from_utf8_lossy(&wrong.stderr);
    assert!(!wrong.status.success() && said.contains("cudart") && said.contains("pytorch"), "{said}");
}

/// What `bridge replay` prints of a recording, and whether it was answered alike.
fn replayed(recording: &Path, driver: &str, variables: &[(&str, &str)]) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
    command.args(["bridge", "replay"]).arg(recording).arg("--driver").arg(beside(driver));
    let output = command.envs(variables.iter().copied()).output().expect("vm-service");
    let text = [output.stderr, output.stdout].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

#[test]
fn a_program_that_was_recorded_is_replayed() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    std::fs::create_dir(path("records")).expect("a folder");
    std::fs::create_dir(path("bridge")).expect("a folder");
    symlink(beside("libvm_bridge_guest.so"), path("bridge").join("libcuda.so.1")).expect("a link");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../features/cuda/bridge/client/tests/add.c");
    let mut gcc = Command::new("gcc");
    gcc.args(["-std=gnu11", "-pthread", "-o"]).arg(path("add")).arg(source).arg("-ldl");
    assert!(gcc.status().expect("gcc").success());
    let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
    command.args(["bridge", "serve", "--socket"]).arg(path("socket")).arg("--record").arg(path("records"));
    command.arg("--driver").arg(beside("libvm_cuda_fake.so"));
    let server = Running(command.stderr(Stdio::null()).spawn().expect("vm-service"));
    until("the server listens", || path("socket").exists());
    let mut program = Command::new(path("add"));
    program.env("LD_LIBRARY_PATH", path("bridge"));
    program.env("VM_BRIDGE", format!("unix:{}", path("socket").display()));
    assert!(program.stdout(Stdio::null()).status().expect("the program").success());
    until("its recording is complete", || server.is_idle());
    drop(server);
    let [record] = std::fs::read_dir(path("records"))
        .expect("records")
        .flatten()
        .collect::<Vec<_>>()
        .try_into()
        .expect("one");
    let fake = "libvm_cuda_fake.so";
    let (is_alike, said) = replayed(&record.path(), fake, &[]);
    assert!(is_alike && said.ends_with(" answers, 0 different\n"), "{said}");
    let (is_alike, said) = replayed(&record.path(), fake, &[("VM_CUDA_FAKE_FAIL", "cuMemAlloc:1=2")]);
    assert!(
        !is_alike && said.contains("cuMemAlloc_v2: 2 with ") && said.contains("not as recorded"),
        "{said}"
    );
    std::fs::write(path("empty"), "").expect("written");
    let (is_alike, said) = replayed(&path("empty"), fake, &[]);
    assert!(!is_alike && said.contains("at byte 0 of the recording"), "{said}");
    let (is_alike, said) = replayed(&path("none"), fake, &[]);
    assert!(!is_alike && said.contains("can't be read"), "{said}");
}

/// A program of nvcc, with the static runtime of CUDA 13, as it was recorded before the driver on the processor.
#[test]
fn a_program_of_nvcc_is_answered_as_when_it_was_recorded() {
    let record =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../features/cuda/bridge/server/tests/recordings/nvcc");
    let (is_alike, said) = replayed(&record, "libvm_cuda_cpu.so", &[]);
    assert!(is_alike && said.ends_with(" answers, 0 different\n"), "{said}");
}

/// A training of PyTorch as it was recorded on an H200, without the code of its kernels: the fake driver has such kernels, and what the bridge answers is the same.
#[test]
fn a_training_of_pytorch_is_answered_as_on_a_gpu() {
    let record =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../features/cuda/bridge/server/tests/recordings/pytorch");
    let recording = Recording::read(&std::fs::read(&record).expect("a recording")).expect("a recording");
    let kernels = recording.kernels();
    assert!(kernels.len() > 20, "{kernels:?}");
    let mut table = String::new();
    for (name, parameters) in kernels {
        table += &name;
        parameters.iter().for_each(|(at, size)| table += &format!(" {at}:{size}"));
        table += "\n";
    }
    // A confined worker reads what is beside the driver.
    let mut file = tempfile::NamedTempFile::new_in(beside("").parent().expect("a folder")).expect("a file");
    file.write_all(table.as_bytes()).expect("written");
    std::fs::set_permissions(file.path(), Permissions::from_mode(0o644)).expect("readable");
    let path = file.path().to_str().expect("a path");
    let variables = [("VM_CUDA_FAKE_KERNELS", path), ("VM_CUDA_FAKE_MEMORY", "150000000000")];
    let (is_alike, said) = replayed(&record, "libvm_cuda_fake.so", &variables);
    assert!(is_alike && said.ends_with(" answers, 0 different\n"), "{said}");
}
