//! How CUDA programs, their workers and their server end, and that they leave nothing: work under way at the end, a server that is killed anywhere, a
//! device that is lost.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use crate::process::{Running, beside, until};

/// A folder with a driver, which only this has, and programs.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().expect("a folder"));
        std::fs::create_dir(place.path("bridge")).expect("a folder");
        symlink(beside("libvm_bridge_guest.so"), place.path("bridge/libcuda.so.1")).expect("a link");
        std::fs::copy(beside("libvm_cuda_fake.so"), place.path("driver.so")).expect("a driver");
        // Where a worker's user may read it.
        let readable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(place.0.path(), readable).expect("permissions");
        for name in ["ways", "deadline"] {
            let source = format!("../features/cuda/bridge/client/tests/{name}.c");
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
            let mut gcc = Command::new("gcc");
            gcc.args(["-std=gnu11", "-pthread", "-o"]).arg(place.path(name)).arg(source).arg("-ldl");
            assert!(gcc.status().expect("gcc").success());
        }
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A server, whose driver fails as it is told.
    fn serve(&self, fails: &str) -> Running {
        let socket = self.path("socket");
        // One that was killed leaves its socket.
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
        command.args(["bridge", "serve", "--memory", "64M", "--socket"]).arg(&socket);
        command.arg("--driver").arg(self.path("driver.so")).env("VM_CUDA_FAKE_FAIL", fails);
        let server = Running(command.stderr(Stdio::null()).spawn().expect("vm-service"));
        until("the server listens", || socket.exists());
        server
    }

    fn start(&self, program: &str, argument: &str) -> Running {
        let mut command = Command::new(self.path(program));
        command.arg(argument).env("LD_LIBRARY_PATH", self.path("bridge"));
        command.env("VM_BRIDGE", format!("unix:{}", self.path("socket").display()));
        Running(command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the program"))
    }

    /// What a program says that ends by itself.
    fn run(&self, program: &str, argument: &str) -> String {
        let mut program = self.start(program, argument);
        ends(&mut program);
        let mut said = String::new();
        let output = program.0.stdout.as_mut().expect("its output");
        std::io::Read::read_to_string(output, &mut said).expect("what it says");
        said
    }

    /// Workers of this driver, whoever started them.
    fn workers(&self) -> usize {
        let driver = self.path("driver.so").display().to_string();
        let processes = std::fs::read_dir("/proc").expect("processes").flatten();
        let lines = processes.filter_map(|process| std::fs::read(process.path().join("cmdline")).ok());
        let is_worker = |line: &Vec<u8>| {
            let line = String::from_utf8_lossy(line);
            line.contains("bridge-worker") && line.contains(&driver)
        };
        lines.filter(is_worker).count()
    }
}

fn ends(program: &mut Running) -> ExitStatus {
    until("the program ends", || program.0.try_wait().expect("asked").is_some());
    program.0.wait().expect("ended")
}

#[test]
fn programs_that_end_with_work_under_way_leave_nothing() {
    let place = Place::new();
    let server = place.serve("");
    assert_eq!(place.run("deadline", "honest_many"), "honest_many: 0 0 CUDA_SUCCESS\n");
    until("the first worker has ended", || place.workers() == 0);
    let before = server.has();
    for case in ["exits", "exits_behind_threads", "exits_after_reset"] {
        let said = place.run("deadline", case);
        assert_eq!(said, format!("{case}: 0\n"));
        until("its worker has ended", || place.workers() == 0);
    }
    until("the server has what it had", || server.has().iter().zip(&before).all(|(now, then)| now <= then));
}

#[test]
fn a_server_that_is_killed_anywhere_leaves_no_worker_and_no_program_that_waits() {
    let place = Place::new();
    for number in 0..30u64 {
        let server = place.serve("");
        let mut programs: Vec<_> = (0..3).map(|_| place.start("ways", "endless")).collect();
        // Somewhere between their first connections and their work.
        std::thread::sleep(Duration::from_micros(number * 7919 % 30 * 2000));
        drop(server);
        for program in &mut programs {
            ends(program);
        }
        until("all workers have ended", || place.workers() == 0);
    }
}

#[test]
fn a_device_that_is_lost_is_what_the_driver_says() {
    let place = Place::new();
    for (fails, says) in [
        ("cuLaunchKernel:9=46", "ends: 46 0 "),
        ("cuLaunchKernel:9=719", "ends: 719 0 "),
        ("cuStreamSynchronize:9=802", "ends: 802 0 "),
        ("cuStreamSynchronize:9=999", "ends: 999 0 "),
        ("cuStreamSynchronize:9=700,cuMemAlloc:2=700", "ends: 700 700 "),
    ] {
        let server = place.serve(fails);
        let before = server.has();
        // The next one has a worker of its own, and a driver that begins anew.
        for _ in 0..2 {
            let said = place.run("ways", "endless");
            assert!(said.starts_with(&format!("works\n{says}")), "{fails}: {said}");
        }
        until("all workers have ended", || place.workers() == 0 && server.has()[0] <= before[0]);
    }
}
