//! A server on all its transports, and programs.

use std::fmt::Display;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::certificates::{Authority, PROGRAM, SERVER};

// cargo builds the bridge's library and the fake driver. Neither is linked here: they have the same names.

/// How a program reaches a driver.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Way {
    Driver,
    Unix,
    Stream,
    Window,
    Tls,
}

impl Way {
    pub(crate) const BRIDGED: [Self; 4] = [Self::Unix, Self::Stream, Self::Window, Self::Tls];
}

/// A server that is killed when it is dropped.
pub(crate) struct Place {
    folder: tempfile::TempDir,
    server: Child,
    log: Arc<Mutex<String>>,
    pub(crate) authority: Authority,
}

/// What the fake driver has, on all ways.
const MEMORY: (&str, &str) = ("VM_CUDA_FAKE_MEMORY", "4294967296");

fn beside(name: &str) -> PathBuf {
    std::env::current_exe().expect("the test's path").with_file_name(name)
}

impl Place {
    pub(crate) fn new() -> Self {
        Self::with(&[], false)
    }

    /// One that may open so many files.
    pub(crate) fn limited(files: u32) -> Self {
        Self::started(&beside("libvm_cuda_fake.so"), &[], false, Some(files))
    }

    pub(crate) fn before(driver: &Path) -> Self {
        Self::started(driver, &[], false, None)
    }

    /// One with options, whose server's certificate may have expired.
    pub(crate) fn with(options: &[&str], is_expired: bool) -> Self {
        Self::started(&beside("libvm_cuda_fake.so"), options, is_expired, None)
    }

    fn started(driver: &Path, options: &[&str], is_expired: bool, files: Option<u32>) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        for (name, library) in [("driver", driver), ("bridge", &beside("libvm_bridge_guest.so"))] {
            std::fs::create_dir(path(name)).expect("a folder");
            symlink(library, path(name).join("libcuda.so.1")).expect("a link");
        }
        let own = Path::new(env!("CARGO_MANIFEST_DIR"));
        for (name, source) in [
            ("add", "../features/cuda/bridge/client/tests/add.c"),
            ("ways", "../features/cuda/bridge/client/tests/ways.c"),
            ("deadline", "../features/cuda/bridge/client/tests/deadline.c"),
            ("managed", "../features/cuda/bridge/client/tests/managed.c"),
            ("host", "tests/transports/host.c"),
        ] {
            let mut gcc = Command::new("gcc");
            gcc.args(["-std=gnu11", "-O1", "-pthread", "-o"])
                .arg(path(name))
                .arg(own.join(source))
                .arg("-ldl");
            assert!(gcc.status().expect("gcc").success());
        }
        let authority = Authority::new(folder.path(), "authority");
        let [certificate, key] = authority.sign("server", "localhost", SERVER, is_expired);
        authority.sign("program", "", PROGRAM, false);
        let mut command = Command::new("sh");
        let limit = files.map_or_else(String::new, |files| format!("ulimit -n {files}; "));
        command.args(["-c", &format!("{limit}exec \"$@\""), "sh", env!("CARGO_BIN_EXE_vm-service")]);
        command.args(["bridge", "serve", "--window", "64M", "--tls", "127.0.0.1:0"]).args(options);
        for (option, file) in [
            ("--driver", driver.to_owned()),
            ("--socket", path("socket")),
            ("--stream", path("stream")),
            ("--certificate", certificate),
            ("--key", key),
            ("--clients", authority.file()),
        ] {
            command.arg(option).arg(file);
        }
        command.env(MEMORY.0, MEMORY.1).env("RUST_LOG", "info");
        let mut server = command.stderr(Stdio::piped()).spawn().expect("vm-service");
        let log = Arc::new(Mutex::new(String::new()));
        let (lines, to) = (BufReader::new(server.stderr.take().expect("its log")).lines(), log.clone());
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                *to.lock().expect("the log") += &format!("{line}\n");
            }
        });
        let place = Self { folder, server, log, authority };
        place.until("the server listens", || place.log().contains("CUDA programs are served places"));
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// What the server has said.
    pub(crate) fn log(&self) -> String {
        self.log.lock().expect("the log").clone()
    }

    fn logged(&self, after: &str, before: char) -> String {
        let log = self.log();
        let (_, rest) = log.split_once(after).unwrap_or_else(|| panic!("no {after} in {log}"));
        rest.split(before).next().unwrap_or_default().trim_end().to_owned()
    }

    /// Where it listens for TLS.
    pub(crate) fn tls(&self) -> std::net::SocketAddr {
        self.logged("over TLS address=", '\n').parse().expect("an address")
    }

    pub(crate) fn until(&self, what: impl Display, mut is_so: impl FnMut() -> bool) {
        let end = Instant::now() + Duration::from_secs(600);
        while !is_so() {
            assert!(Instant::now() < end, "{what}: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The window, as programs open it.
    pub(crate) fn window(&self) -> std::fs::File {
        let path = self.logged("where path=\"", '"');
        std::fs::OpenOptions::new().read(true).write(true).open(path).expect("the window")
    }

    pub(crate) fn server(&self) -> u32 {
        self.server.id()
    }

    /// The processes of workers, oldest first.
    pub(crate) fn workers(&self) -> Vec<i32> {
        let mut workers = Vec::new();
        for task in std::fs::read_dir(format!("/proc/{}/task", self.server.id())).expect("threads") {
            // A thread may have ended meanwhile.
            let text = std::fs::read_to_string(task.expect("a thread").path().join("children"));
            let text = text.unwrap_or_default();
            workers.extend(text.split_whitespace().map(|id| id.parse::<i32>().expect("a number")));
        }
        workers.sort_unstable();
        workers
    }

    pub(crate) fn command(&self, way: Way, program: &str, argument: &str) -> Command {
        let mut command = Command::new(self.path(program));
        if !argument.is_empty() {
            command.arg(argument);
        }
        self.prepare(&mut command, way);
        command
    }

    /// Has a command use a way.
    pub(crate) fn prepare(&self, command: &mut Command, way: Way) {
        let library = if matches!(way, Way::Driver) { "driver" } else { "bridge" };
        command.env("LD_LIBRARY_PATH", self.path(library)).env(MEMORY.0, MEMORY.1);
        let at = |kind: &str, name: &str| format!("{kind}:{}", self.path(name).display());
        let place = match way {
            Way::Driver => return,
            Way::Unix => at("unix", "socket"),
            Way::Stream => at("stream", "stream"),
            Way::Window => {
                command.env("VM_BRIDGE_WINDOW", self.logged("where path=\"", '"'));
                at("stream", "stream")
            }
            Way::Tls => {
                for (name, file) in
                    [("CERTIFICATE", "program.pem"), ("KEY", "program.key"), ("CA", "authority.pem")]
                {
                    command.env(format!("VM_BRIDGE_{name}"), self.path(file));
                }
                format!("tls:localhost:{}", self.tls().port())
            }
        };
        command.env("VM_BRIDGE", place);
    }

    /// What a program says, and how it ends.
    pub(crate) fn run(&self, way: Way, program: &str, argument: &str) -> String {
        let output = self.command(way, program, argument).output().expect("the program");
        let [said, wrong] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        format!("{said}{wrong}{}", output.status)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.server.kill().expect("killed");
        self.server.wait().expect("ended");
    }
}
