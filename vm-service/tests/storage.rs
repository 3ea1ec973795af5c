//! A guest's kernel and initrd on storage that is slow or does not answer at all: whoever wants the guest to end does not wait
//! for it. Where reads can't be held up (it takes root) or `/dev/kvm` does not open, these tests say so and pass.

#[path = "shared/elf.rs"]
mod elf;
#[path = "shared/process.rs"]
#[allow(dead_code, reason = "other tests see more")]
mod process;
#[path = "shared/storage.rs"]
mod storage;

use std::fs::{self, File};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use elf::elf;
use process::{VMM, child_of, tasks};
use rustix::process::{Pid, Signal, kill_process};
use storage::Storage;

/// Nothing here takes so long, even where KVM guests are emulated and the machine is busy.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Does nothing: `jmp $`.
const IDLE: &[u8] = &[0xeb, 0xfe];

/// A guest that starts to load its program.
struct Guest {
    process: Child,
    folder: tempfile::TempDir,
}

impl Guest {
    /// Starts a guest once reads of `slow`, which is its `kernel` or its `initrd`, are held up. `None` where that can't be.
    fn start(slow: &str) -> Option<(Self, Storage)> {
        if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
            println!("skipped: /dev/kvm does not open: {error}");
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let file = |name: &str| folder.path().join(name);
        fs::write(file("kernel"), elf(IDLE)).expect("written");
        File::create(file("initrd")).and_then(|initrd| initrd.set_len(256 << 20)).expect("a sparse file");
        let text = "name = \"a\"\nmemory = \"512M\"\n[boot]\nkernel = \"kernel\"\ninitrd = \"initrd\"\n";
        fs::write(file("guest.toml"), text).expect("written");
        let storage = Storage::hold(&file(slow))?;
        let messages = File::create(file("messages")).expect("a file");
        let process = Command::new(env!("CARGO_BIN_EXE_vm-service"))
            .args(["run", "guest.toml", "--state", "state", "--console", "none"])
            .current_dir(folder.path())
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(messages)
            .spawn()
            .expect("vm-service");
        let mut guest = Self { process, folder };
        let begin = Instant::now();
        // The kernel's headers are read before there is a machine.
        while !(storage.is_read(Duration::from_millis(10)) && (slow == "kernel" || guest.has_begun())) {
            assert!(guest.ended().is_none() && begin.elapsed() < TIMEOUT, "{}", guest.messages());
        }
        Some((guest, storage))
    }

    fn messages(&self) -> String {
        fs::read_to_string(self.folder.path().join("messages")).expect("messages")
    }

    /// Whether somebody waits for the program: before that the guest ends without.
    fn has_begun(&self) -> bool {
        let mut names = tasks(child_of(self.process.id(), VMM))
            .filter_map(|task| fs::read_to_string(task.join("comm")).ok());
        names.any(|name| name.trim() == "guest")
    }

    fn ended(&mut self) -> Option<Option<i32>> {
        self.process.try_wait().expect("a process").map(|status| status.code())
    }

    /// Tells it to end, and answers with how long that took, and its exit status. `meanwhile` is done again and again.
    fn stop(&mut self, signal: Signal, meanwhile: impl Fn()) -> (Duration, Option<i32>) {
        kill_process(Pid::from_child(&self.process), signal).expect("sent");
        let begin = Instant::now();
        loop {
            if let Some(status) = self.ended() {
                return (begin.elapsed(), status);
            }
            assert!(begin.elapsed() < TIMEOUT, "it does not end: {}", self.messages());
            meanwhile();
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Both fail only on a process that has ended and was waited for.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn a_guest_that_loads_slowly_ends_when_it_is_told_to() {
    for signal in [Signal::TERM, Signal::INT] {
        let Some((mut guest, storage)) = Guest::start("initrd") else { return };
        // All of it takes minutes at this speed.
        let slowly = || {
            if storage.is_read(Duration::from_millis(500)) {
                std::thread::sleep(Duration::from_millis(500));
                storage.allow();
            }
        };
        slowly();
        let (took, status) = guest.stop(signal, slowly);
        assert_eq!(status, Some(0), "{}", guest.messages());
        assert!(guest.messages().contains("power was cut"), "{}", guest.messages());
        assert!(took < Duration::from_secs(20), "{took:?}");
    }
}

#[test]
fn a_guest_whose_files_are_never_read_ends_and_says_why() {
    for file in ["kernel", "initrd"] {
        let Some((mut guest, storage)) = Guest::start(file) else { return };
        let (_, status) = guest.stop(Signal::TERM, || ());
        assert_eq!(status, Some(1), "{file}: {}", guest.messages());
        let expect = "reading the guest's kernel or initrd did not end within 10s of being asked to";
        assert!(guest.messages().contains(expect), "{file}: {}", guest.messages());
        drop(storage);
    }
}
