//! A bare guest under `vm-service run`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// What bare guests are compiled for: it uses no vector registers, which not every KVM knows.
const TARGET: &str = "x86_64-unknown-none";
/// How long a guest may take, where its processor is emulated and the machine is busy.
const TIMEOUT: Duration = Duration::from_secs(240);

/// A guest that runs.
pub(crate) struct Guest {
    process: Child,
    files: tempfile::TempDir,
}

/// A guest that has ended.
pub(crate) struct Ended {
    pub(crate) succeeded: bool,
    pub(crate) console: String,
    pub(crate) messages: String,
}

impl Guest {
    /// Starts a guest that shares the CPU; `keys` are more of its `[[accelerators]]`. `None` where none can run.
    pub(crate) fn start(name: &str, cmdline: &str, keys: &str) -> Option<Self> {
        Self::start_on(name, cmdline, "cpu", keys)
    }

    /// As [`start`](Self::start), on another accelerator.
    pub(crate) fn start_on(name: &str, cmdline: &str, device: &str, keys: &str) -> Option<Self> {
        if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
            println!("skipped: /dev/kvm does not open: {error}");
            return None;
        }
        let program = match program() {
            Ok(program) => program,
            Err(reason) => {
                println!("skipped: {reason}");
                return None;
            }
        };
        let files = tempfile::tempdir().expect("a directory");
        let toml = files.path().join("guest.toml");
        let text = format!(
            "name = \"{name}\"\nmemory = \"32M\"\n[boot]\nkernel = \"{}\"\ncmdline = \"{cmdline}\"\n[[accelerators]]\ndevice \
             = \"{device}\"\nmemory = \"64M\"\n{keys}\n",
            program.display()
        );
        fs::write(&toml, text).expect("written");
        let messages = File::create(files.path().join("messages")).expect("a file");
        let process = Command::new(env!("CARGO_BIN_EXE_vm-service"))
            .args(["run", "--no-reboot", "--state"])
            .arg(files.path().join("state"))
            .arg("--console")
            .arg(format!("file={}", files.path().join("console").display()))
            .arg(&toml)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(messages)
            .spawn()
            .expect("vm-service");
        Some(Self { process, files })
    }

    /// The VMM's process.
    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    fn read(&self, file: &str) -> String {
        let bytes = fs::read(self.files.path().join(file)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits until the guest says something.
    pub(crate) fn wait_for(&mut self, text: &str) {
        let deadline = Instant::now() + TIMEOUT;
        while !self.read("console").contains(text) {
            let ended = self.process.try_wait().expect("a process").is_some();
            assert!(
                !ended && Instant::now() < deadline,
                "{}\n{}",
                self.read("console"),
                self.read("messages")
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until it has ended.
    pub(crate) fn end(mut self) -> Ended {
        let deadline = Instant::now() + TIMEOUT;
        let status = loop {
            if let Some(status) = self.process.try_wait().expect("a process") {
                break status;
            }
            assert!(
                Instant::now() < deadline,
                "it does not end: {}\n{}",
                self.read("console"),
                self.read("messages")
            );
            std::thread::sleep(Duration::from_millis(5));
        };
        Ended { succeeded: status.success(), console: self.read("console"), messages: self.read("messages") }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Both fail only on a process that has ended and was waited for.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Ended {
    /// That the guest saw all that it should have.
    pub(crate) fn passed(&self) {
        let passed = self.succeeded && self.console.lines().any(|line| line.trim() == "bare: PASS");
        assert!(passed, "--- console\n{}\n--- messages\n{}", self.console, self.messages);
        println!("{}", self.console);
    }
}

/// The guests' program, built once.
fn program() -> Result<PathBuf, String> {
    static PROGRAM: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    PROGRAM.get_or_init(build).clone()
}

fn build() -> Result<PathBuf, String> {
    let guests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/testbed/guests/Cargo.toml");
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../guests");
    let run = |what: &str, command: &mut Command| {
        let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{what}: {error}"))?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
            false => Err(format!("{what}: {}", String::from_utf8_lossy(&output.stderr))),
        }
    };
    let libraries =
        run("rustc", Command::new("rustc").args(["--print", "target-libdir", "--target", TARGET]))?;
    if !Path::new(&libraries).exists() {
        run("rustup", Command::new("rustup").args(["target", "add", TARGET])).map_err(|error| {
            format!("the target {TARGET} can't be installed, run `rustup target add {TARGET}`: {error}")
        })?;
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env("CARGO_TARGET_X86_64_UNKNOWN_NONE_RUSTFLAGS", "-C relocation-model=static")
        .args(["build", "--release", "--target", TARGET, "--manifest-path"])
        .arg(guests)
        .arg("--target-dir")
        .arg(&target);
    // A guest that does not compile is a mistake, not a machine that lacks something.
    run("building the guests", &mut build).unwrap_or_else(|error| panic!("{error}"));
    Ok(target.join(TARGET).join("release/bare"))
}
