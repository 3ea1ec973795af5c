//! `bridge serve`: what programs share is found by what the server gave for it, whichever of its confined workers has it, and by nothing else.

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::process::{Running, beside, until};

/// A folder with the program, and a server with these arguments.
struct Place {
    _server: Running,
    folder: tempfile::TempDir,
}

/// What the driver says then.
const ASKED: &str = "refused: 222 222\n";
/// What the bridge says of what nobody shared.
const UNKNOWN: &str = "refused: 1 1\n";

impl Place {
    /// A server whose driver fails when a worker first asks it to open something.
    fn new(arguments: &[&str]) -> Self {
        Self::with(arguments, "libvm_cuda_fake.so", "cuIpcOpenMemHandle:1=222,cuIpcOpenEventHandle:1=222")
    }

    /// A server over a driver with these failures.
    fn with(arguments: &[&str], driver: &str, failures: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("bridge")).expect("a folder");
        symlink(beside("libvm_bridge_guest.so"), path("bridge/libcuda.so.1")).expect("a link");
        let source =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../features/cuda/bridge/client/tests/share.c");
        let mut gcc = Command::new("gcc");
        gcc.args(["-std=gnu11", "-o"]).arg(path("program")).arg(source).arg("-ldl");
        assert!(gcc.status().expect("gcc").success());
        let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
        command.args(["bridge", "serve", "--socket"]).arg(path("socket")).args(arguments);
        command.env("VM_CUDA_FAKE_FAIL", failures);
        command.arg("--driver").arg(beside(driver)).stderr(Stdio::null());
        let server = Running(command.spawn().expect("vm-service"));
        until("the server listens", || path("socket").exists());
        Self { _server: server, folder }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let path = |name: &str| self.folder.path().join(name);
        let mut command = Command::new(path("program"));
        command.args(arguments).env("LD_LIBRARY_PATH", path("bridge"));
        command.env("VM_BRIDGE", format!("unix:{}", path("socket").display()));
        command
    }

    /// A program that shares memory and an event, and the handles of both. It ends when its input is closed.
    fn giver(&self) -> (Running, [String; 2]) {
        let mut command = self.command(&["give"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the program");
        let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let mut line = || lines.next().expect("a line").expect("a text");
        let handles = [line(), line()];
        assert_eq!(line(), "wrong: 1 1");
        (Running(child), handles)
    }

    fn says(&self, handles: [&str; 2]) -> String {
        self.output(handles)[0].clone()
    }

    /// Returns what a program that opens the handles writes to its output and to its errors.
    fn output(&self, [memory, event]: [&str; 2]) -> [String; 2] {
        let output = self.command(&["forge", memory, event]).output().expect("the program");
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned())
    }
}

#[test]
fn what_is_shared_is_found_by_what_its_server_gave_alone() {
    // With and without a quota, which takes the same way to a worker.
    for arguments in [&[][..], &["--memory", "64M"]] {
        let (place, other) = (Place::new(arguments), Place::new(arguments));
        let (giver, [memory, event]) = place.giver();
        assert_eq!(place.says([&memory, &event]), ASKED, "{arguments:?}");
        assert_eq!(other.says([&memory, &event]), UNKNOWN, "{arguments:?}");
        assert_eq!(place.says([&event, &memory]), UNKNOWN, "{arguments:?}");
        assert_eq!(place.says([&"00".repeat(64), &"5a".repeat(64)]), UNKNOWN, "{arguments:?}");
        // It is gone with its worker.
        drop(giver);
        let end = Instant::now() + Duration::from_secs(60);
        while place.says([&memory, &event]) != UNKNOWN {
            assert!(Instant::now() < end, "what a program that has ended shared is still found");
        }
    }
}

#[test]
fn a_driver_that_cannot_open_files_of_other_workers_supports_no_sharing() {
    for driver in ["libvm_cuda_fake.so", "libvm_cuda_cpu.so"] {
        let place = Place::with(&[], driver, "");
        let (_giver, [memory, event]) = place.giver();
        let [said, errors] = place.output([&memory, &event]);
        assert_eq!(said, "refused: 801 801\n", "{driver}");
        for what in ["memory", "an event"] {
            assert!(
                errors.contains(&format!("cannot open {what} of another program: ")),
                "{driver}: {errors}"
            );
        }
    }
}
