//! A bare guest under `vm-service run`.

#[path = "bare.rs"]
mod bare;

use std::fs::{self, File};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

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
        let program = match bare::program() {
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
