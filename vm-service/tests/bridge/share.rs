//! `bridge serve`: what programs share is found by what the server gave for it, whichever of its confined workers has it, and by nothing else.

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::process::{Running, beside, until};

/// A folder with the program, and a server with these arguments, over a driver that is told to fail when a worker first asks it to open something.
struct Place {
    _server: Running,
    folder: tempfile::TempDir,
}

/// What the driver says then.
const ASKED: &str = "refused: 222 222\n";
/// What the bridge says of what nobody shared.
const UNKNOWN: &str = "refused: 1 1\n";

impl Place {
    fn new(arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("bridge")).expect("a folder");
        symlink(beside("libvm_bridge_guest.so"), path("bridge/libcuda.so.1")).expect("a link");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../features/bridge-guest/tests/share.c");
        let mut gcc = Command::new("gcc");
        gcc.args(["-std=gnu11", "-o"]).arg(path("program")).arg(source).arg("-ldl");
        assert!(gcc.status().expect("gcc").success());
        let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
        command.args(["bridge", "serve", "--socket"]).arg(path("socket")).args(arguments);
        command.env("VM_CUDA_FAKE_FAIL", "cuIpcOpenMemHandle:1=222,cuIpcOpenEventHandle:1=222");
        command.arg("--driver").arg(beside("libvm_cuda_fake.so")).stderr(Stdio::null());
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

    fn says(&self, [memory, event]: [&str; 2]) -> String {
        let output = self.command(&["forge", memory, event]).output().expect("the program");
        String::from_utf8_lossy(&output.stdout).into_owned()
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
