//! Programs that are paused and resumed from outside, before a driver of host memory.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Keeps the driver's library built.
use vm_cuda_fake as _;
use vm_hook::client;
use vm_hook::control::{self, ANSWER, Answer, Changed, Request, State, Status};

/// How long anything may take.
const TIMEOUT: Duration = Duration::from_secs(600);

/// What the log has of a reserve.
const RESERVE: &str = "\"event\":\"reserve\"";

fn beside(name: &str) -> PathBuf {
    std::env::current_exe().expect("the test's path").with_file_name(name)
}

/// A directory with the fake driver as `libcuda.so.1`, and the program.
fn folder() -> &'static Path {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    let made = FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a directory");
        std::os::unix::fs::symlink(beside("libvm_cuda_fake.so"), folder.path().join("libcuda.so.1"))
            .expect("a link");
        let mut command = Command::new("gcc");
        command
            .args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-pthread", "-o"])
            .arg(folder.path().join("pause"));
        command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pause.c")).arg("-ldl");
        assert!(command.status().expect("gcc").success());
        folder
    });
    made.path()
}

/// A program with the hook, and its runtime directory.
struct Program {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    runtime: tempfile::TempDir,
}

impl Program {
    fn new(threads: u32, mebibytes: u32, environment: &[(&str, &str)]) -> Self {
        Self::within(tempfile::tempdir().expect("a directory"), threads, mebibytes, environment)
    }

    fn within(
        runtime: tempfile::TempDir,
        threads: u32,
        mebibytes: u32,
        environment: &[(&str, &str)],
    ) -> Self {
        let mut child = Command::new(folder().join("pause"))
            .args([threads.to_string(), mebibytes.to_string()])
            .env("LD_LIBRARY_PATH", folder())
            .env("LD_PRELOAD", beside("libvmhook.so"))
            .env("XDG_RUNTIME_DIR", runtime.path())
            .env("VMM_LOG_LEVEL", "INFO")
            .env("VMM_LOG_FILE", runtime.path().join("log"))
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program");
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().expect("a pipe")));
        let mut program = Self { child, input, output, runtime };
        assert_eq!(program.line(), "ready");
        program
    }

    fn say(&mut self, line: &str) {
        writeln!(self.input.as_mut().expect("a pipe"), "{line}").expect("a program that listens");
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a program that tells");
        line.trim_end().to_owned()
    }

    fn answer(&mut self, line: &str) -> String {
        self.say(line);
        self.line()
    }

    fn socket(&self) -> PathBuf {
        control::socket(&self.runtime.path().join("vmhook"), self.child.id())
    }

    fn ask(&self, request: &Request) -> Answer {
        let mut stream = client::reach(&self.socket()).expect("a socket");
        let deadline = Instant::now() + TIMEOUT;
        control::write(&mut stream, request, deadline).expect("a request");
        control::read(&mut stream, ANSWER, deadline).expect("an answer")
    }

    fn pause(&self) -> Changed {
        match self.ask(&Request::Pause { timeout: 60 }) {
            Answer::Paused(changed) => changed,
            other => panic!("{other:?}"),
        }
    }

    fn resume(&self) -> Changed {
        match self.ask(&Request::Resume) {
            Answer::Resumed(changed) => changed,
            other => panic!("{other:?}"),
        }
    }

    fn status(&self) -> Status {
        match self.ask(&Request::Status { largest: 3, stacks: false }) {
            Answer::Status(status) => *status,
            other => panic!("{other:?}"),
        }
    }

    /// Has it been told what could be reserved?
    fn is_reserved(&self) -> bool {
        std::fs::read_to_string(self.runtime.path().join("log")).is_ok_and(|log| log.contains(RESERVE))
    }

    fn count(&mut self) -> u64 {
        self.answer("count").parse().expect("a number")
    }

    /// Bytes that the fake's devices have given out and that were used, by its files of memory.
    fn backed(&self) -> u64 {
        let files = std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).expect("a process");
        let paths = files.flatten().map(|file| file.path());
        let of_device = |path: &PathBuf| {
            std::fs::read_link(path)
                .is_ok_and(|name| name.to_string_lossy().starts_with("/memfd:vm-cuda-driver"))
        };
        let bytes = |path: PathBuf| std::fs::metadata(path).map_or(0, |of| of.blocks() * 512);
        paths.filter(of_device).map(bytes).sum()
    }

    /// All that it says from here on; it ended well.
    fn end(mut self) -> (String, String) {
        drop(self.input.take());
        let mut said = String::new();
        self.output.read_to_string(&mut said).expect("the rest");
        let status = self.child.wait().expect("an end");
        let log = std::fs::read_to_string(self.runtime.path().join("log")).unwrap_or_default();
        assert!(status.success(), "{status}: {said}\n{log}");
        assert!(!self.socket().exists(), "the socket is there still");
        (said, log)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

const MIB: u64 = 1 << 20;

#[test]
fn a_paused_program_has_no_device_memory_and_goes_on_as_it_was() {
    // More than the buffers hold that it is copied through.
    let mut program = Program::new(2, 48, &[]);
    let before = program.status();
    assert_eq!((before.state, before.mode.as_str(), before.pid), (State::Running, "VMM", program.child.id()));
    let memory = before.memory.expect("accounts");
    assert_eq!((memory.r#virtual, memory.paused, memory.native, memory.allocations), (100 * MIB, 0, 4096, 4));
    assert_eq!(
        memory.largest.iter().map(|of| (of.bytes, of.number)).collect::<Vec<_>>(),
        [(48 * MIB, 2), (48 * MIB, 3), (4 * MIB, 1)]
    );
    until("it works", || program.count() > 0);
    assert!(program.backed() >= 100 * MIB);

    let changed = program.pause();
    assert_eq!((changed.bytes, changed.native, changed.pinned, changed.failed), (100 * MIB, 4096, 0, 0));
    assert!(program.backed() < 4 * MIB, "{}", program.backed());
    until("its threads wait", || program.status().waiting == 2);
    let (count, status) = (program.count(), program.status());
    assert_eq!(
        (status.state, status.memory.map(|of| (of.r#virtual, of.paused))),
        (State::Paused, Some((0, 100 * MIB)))
    );
    // Again, and it is no other.
    assert_eq!(program.pause().bytes, 100 * MIB);
    assert_eq!(program.count(), count);

    // What the program is asked meanwhile waits, too.
    program.say("read");
    until("it waits", || program.status().waiting == 3);
    assert_eq!(program.resume().bytes, 100 * MIB);
    assert_eq!(program.line(), "99");
    until("it goes on", || program.count() > count);
    assert_eq!(program.resume().bytes, 0);
    program.say("quit");
    let (said, log) = program.end();
    assert!(said.starts_with("whole\nfreed at the end: 0\n"), "{said}");
    for event in ["paused", "resumed"] {
        assert_eq!(log.matches(&format!("\"event\":\"{event}\",\"bytes\":104857600")).count(), 1, "{log}");
    }
}

#[test]
fn what_is_reserved_is_copied_to_straight() {
    let check = |reserve: &str, fails: &str, reserved: u64| {
        let environment = [("VMM_RESERVE", reserve), ("VM_CUDA_FAKE_FAIL", fails)];
        let mut program = Program::new(2, 48, &environment);
        let has = |program: &Program| program.status().memory.expect("accounts").reserved;
        until("it is reserved", || program.is_reserved());
        for _ in 0..3 {
            assert_eq!(has(&program), reserved);
            assert_eq!(program.pause().bytes, 100 * MIB);
            assert_eq!(has(&program), reserved);
            assert_eq!(program.resume().bytes, 100 * MIB);
        }
        assert_eq!(program.answer("fork"), "child: 0");
        program.say("quit");
        let (said, log) = program.end();
        assert!(said.starts_with("whole\n") && log.matches(RESERVE).count() == 1, "{said}{log}");
    };
    // More than there is to copy: no buffer is asked for.
    check("120M", "cuMemHostAlloc:1=2", 120 * MIB);
    // In parts, of which one more can't be had: the rest goes through buffers.
    check("300M", "cuMemHostRegister:2=1", 256 * MIB);
    // Less than there is to copy, and no whole pages.
    check("33000000", "", 32 * MIB);
    check("64M", "cuMemHostRegister:1=1", 0);
}

#[test]
fn many_threads_are_paused_many_times() {
    let mut program = Program::new(8, 2, &[("CHURN", "1"), ("VMM_STACKS", "1")]);
    for _ in 0..50 {
        // And what they have allocated for the moment.
        let paused = program.pause().bytes;
        assert!((20 * MIB..=68 * MIB).contains(&paused), "{paused}");
        assert_eq!(program.resume().bytes, paused);
    }
    program.say("quit");
    let (said, _) = program.end();
    assert!(said.starts_with("whole\n"), "{said}");
}

#[test]
fn what_cannot_be_paused_is_not_and_runs_on() {
    let mut program = Program::new(1, 2, &[]);
    let refused = |program: &Program, timeout: u64, says: &str| match program.ask(&Request::Pause { timeout })
    {
        Answer::Error(text) => assert!(text.contains(says), "{text}"),
        other => panic!("{other:?}"),
    };
    assert_eq!(program.answer("capture"), "capturing");
    refused(&program, 60, "a stream is being captured");
    assert_eq!(program.answer("capture ends"), "captured");
    assert_eq!(program.answer("spin"), "spins");
    refused(&program, 0, "busy: work of a device has not ended");
    refused(&program, 1, "busy: work of a device has not ended");
    // Nobody waits for the answer any more.
    let mut stream = client::reach(&program.socket()).expect("a socket");
    let request = Request::Pause { timeout: control::LONGEST };
    control::write(&mut stream, &request, Instant::now() + TIMEOUT).expect("a request");
    until("it is tried", || program.status().state == State::Changing);
    drop(stream);
    until("it is tried no more", || program.status().state == State::Running);
    let count = program.count();
    until("it runs on", || program.count() > count);
    assert_eq!(program.answer("spin ends"), "spun");
    program.pause();
    program.resume();
    // What a stream calls may call the driver.
    assert_eq!(program.answer("functions"), "functions");
    program.pause();
    program.resume();
    assert_eq!(program.line(), "called 20");
    program.say("quit");
    assert!(program.end().0.starts_with("whole\n"));

    let program = Program::new(1, 2, &[("VMM_MODE", "MONITOR")]);
    assert_eq!(program.status().mode, "MONITOR");
    refused(&program, 1, "MONITOR mode");
}

#[test]
fn a_program_whose_pausing_client_is_gone_runs_on() {
    let mut program = Program::new(1, 2, &[]);
    let request = |program: &Program| {
        let mut stream = client::reach(&program.socket()).expect("a socket");
        control::write(&mut stream, &Request::Pause { timeout: 60 }, Instant::now() + TIMEOUT)
            .expect("a request");
        stream
    };
    let runs_on = |program: &mut Program| {
        let count = program.count();
        until("it runs on", || program.count() > count);
        until("its state is that", || program.status().state == State::Running);
    };
    // The client is gone when the program is paused, and the response is in its socket.
    let stream = request(&program);
    until("it is paused", || program.status().state == State::Paused);
    drop(stream);
    runs_on(&mut program);
    // The client disconnects before the response is sent.
    for _ in 0..20 {
        drop(request(&program));
    }
    // Requests of such clients are still queued.
    program.pause();
    until("it is paused", || program.status().state == State::Paused);
    // A client that is gone does not end the pause of another one.
    drop(request(&program));
    assert_eq!(program.pause().bytes, program.resume().bytes);
    runs_on(&mut program);
    program.say("quit");
    let (said, log) = program.end();
    assert!(said.starts_with("whole\n"), "{said}");
    assert!(log.contains("the client of the pause is gone: the program runs on"), "{log}");
}

#[test]
fn what_fails_is_undone() {
    let check = |reserve: &str, fails: &str, pause: Option<&str>, resume: Option<&str>| {
        // Copies run still when the next call fails.
        let environment =
            [("VMM_RESERVE", reserve), ("VM_CUDA_FAKE_FAIL", fails), ("VM_CUDA_FAKE_DELAY_US", "500")];
        let mut program = Program::new(1, 4, &environment);
        until("it is reserved", || program.is_reserved() != reserve.is_empty());
        let ask = |request: Request, fails: Option<&str>| match (program.ask(&request), fails) {
            (Answer::Error(text), Some(says)) => assert!(text.contains(says), "{fails:?}: {text}"),
            (Answer::Paused(_) | Answer::Resumed(_), None) => {}
            (other, _) => panic!("{fails:?}: {other:?}"),
        };
        ask(Request::Pause { timeout: 60 }, pause);
        if pause.is_some() {
            ask(Request::Pause { timeout: 60 }, None);
        }
        ask(Request::Resume, resume);
        if resume.is_some() {
            ask(Request::Resume, None);
        }
        program.say("quit");
        assert!(program.end().0.starts_with("whole\n"), "{fails}");
    };
    check("", "cuMemHostAlloc:1=2", Some("the host can't hold"), None);
    check("", "cuMemUnmap:1=999", None, None);
    for reserve in ["", "16M"] {
        check(reserve, "cuMemcpyDtoHAsync:2=700", Some("CUDA error 700"), None);
        // Two allocations were made before.
        check(reserve, "cuMemCreate:4=2", None, Some("a device lacks"));
        check(reserve, "cuMemMap:4=999", None, Some("CUDA error 999"));
        check(reserve, "cuMemcpyHtoDAsync:2=719", None, Some("CUDA error 719"));
    }
}

#[test]
fn what_may_be_dropped_is_zero() {
    let mut program = Program::new(1, 2, &[]);
    assert_eq!(program.answer("tag"), "0 1");
    let largest = program.status().memory.expect("accounts").largest;
    assert_eq!((largest[0].tag.as_deref(), largest[0].droppable), (Some("a \"cache\""), true));
    assert_eq!(program.answer("read"), "99");
    let changed = program.pause();
    assert_eq!((changed.bytes, changed.dropped), (6 * MIB, 4 * MIB));
    program.resume();
    assert_eq!(program.answer("read"), "0");
    program.say("quit");
    let (said, log) = program.end();
    assert!(said.starts_with("whole\n") && log.contains(r#""tag":"a \"cache\"""#), "{said}{log}");
}

#[test]
fn accounts_tell_what_has_how_much() {
    let mut program = Program::new(1, 2, &[("VMM_STACKS", "1"), ("VMM_QUOTA", "1G")]);
    assert_eq!(program.answer("others"), "1024");
    let Answer::Status(status) = program.ask(&Request::Status { largest: 9, stacks: true }) else {
        panic!("no status");
    };
    let memory = status.memory.expect("accounts");
    assert_eq!((memory.quota, memory.allocations), (Some(1 << 30), 6));
    assert_eq!(
        (memory.r#virtual, memory.native, memory.managed, memory.pools),
        (6 * MIB, 4096 + 3072, 8192, 16384)
    );
    assert_eq!(
        memory.largest.iter().map(|of| of.bytes).collect::<Vec<_>>(),
        [4 * MIB, 2 * MIB, 16384, 8192, 4096, 3072]
    );
    // Each of six calls, the one with the most first, and none of the hook's own functions.
    let stacks = status.stacks.expect("stacks");
    assert_eq!(
        stacks.iter().map(|of| (of.bytes, of.allocations)).collect::<Vec<_>>()[..2],
        [(4 * MIB, 1), (2 * MIB, 1)]
    );
    for holder in &stacks {
        assert!(holder.frames[0].file.ends_with("/pause") && holder.frames[0].offset != 0, "{holder:?}");
    }
    let changed = program.pause();
    assert_eq!((changed.bytes, changed.native), (6 * MIB, 7168 + 16384));
    program.resume();
    program.say("quit");
    assert!(program.end().0.starts_with("whole\n"));
}

#[test]
fn a_paused_program_forks_and_ends() {
    let mut program = Program::new(2, 2, &[]);
    program.pause();
    assert_eq!(program.answer("fork"), "child: 0");
    assert_eq!(program.answer("exec"), "child: 0");
    // The children have not removed it.
    assert_eq!(program.status().state, State::Paused);
    program.say("leave");
    assert_eq!(program.end().0, "freed at the end: 0\n");
    // One that needs memory at its end gets it again.
    let mut program = Program::new(2, 2, &[]);
    assert_eq!(program.answer("read at the end"), "0");
    program.pause();
    program.say("leave");
    assert_eq!(program.end().0, "read at the end: 99\nfreed at the end: 0\n");
    // One that is killed leaves its socket, which is removed by the next one.
    let mut program = Program::new(2, 2, &[]);
    program.pause();
    let socket = program.socket();
    program.child.kill().expect("a signal");
    program.child.wait().expect("an end");
    assert!(socket.exists());
    let runtime = std::mem::replace(&mut program.runtime, tempfile::tempdir().expect("a directory"));
    let next = Program::within(runtime, 1, 2, &[]);
    assert!(!socket.exists() && next.socket().exists());
}

#[test]
fn what_is_not_understood_harms_nobody() {
    let program = Program::new(1, 2, &[]);
    let check = |bytes: &[u8], says: &str| {
        let mut stream = client::reach(&program.socket()).expect("a socket");
        stream.write_all(bytes).expect("a peer");
        let read = control::read(&mut stream, ANSWER, Instant::now() + TIMEOUT);
        match read {
            Ok(Answer::Error(text)) => assert!(text.contains(says), "{text}"),
            other => panic!("{other:?}"),
        }
    };
    check(b"\n", "not understood");
    check(b"\xff\0\xff\n", "not understood");
    check(b"{\"do\":\"halt\"}\n", "unknown variant");
    check(b"{\"do\":\"pause\",\"timeout\":1e99}\n", "not understood");
    check(b"{\"do\":\"import\",\"nonce\":1,\"number\":1}\n", "the handle is of another process");
    check(&[b'['; 4097], "more than 4096 bytes");
    check(&[[b'['; 4000].as_slice(), b"\n"].concat(), "not understood");
    // Those who say nothing, and those who leave without an answer.
    let silent: Vec<_> = (0..10).map(|_| client::reach(&program.socket()).expect("a socket")).collect();
    for _ in 0..10 {
        let mut stream = client::reach(&program.socket()).expect("a socket");
        control::write(&mut stream, &Request::Pause { timeout: 60 }, Instant::now() + TIMEOUT)
            .expect("a request");
    }
    // None of them has stopped the program.
    program.pause();
    until("it is paused", || program.status().state == State::Paused);
    program.resume();
    until("it runs on", || program.status().state == State::Running);
    drop(silent);
}

#[test]
fn a_directory_that_others_may_enter_is_not_used() {
    let check = |make: &dyn Fn(&Path), says: &str| {
        let runtime = tempfile::tempdir().expect("a directory");
        make(&runtime.path().join("vmhook"));
        // The next best directories are the machine's own, so this looks only at what the first one is refused for.
        let refused = client::prepare(&runtime.path().join("vmhook")).expect_err("a refusal");
        assert!(refused.to_string().contains(says), "{refused}");
        let program = Program::within(runtime, 1, 2, &[]);
        assert!(!program.socket().exists());
        program.end();
    };
    use std::os::unix::fs::DirBuilderExt as _;
    check(
        &|path| std::fs::DirBuilder::new().mode(0o755).create(path).expect("a directory"),
        "its mode is 755",
    );
    check(&|path| std::os::unix::fs::symlink("/tmp", path).expect("a link"), "it is no directory");
    check(&|path| std::fs::write(path, "").expect("a file"), "it is no directory");
}

#[test]
fn a_directory_that_another_user_made_first_is_not_used() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root makes another user's directory");
    }
    let runtime = tempfile::tempdir().expect("a directory");
    let folder = runtime.path().join("vmhook");
    drop(client::prepare(&folder).expect("a directory"));
    std::os::unix::fs::chown(&folder, Some(65534), None).expect("another owner");
    let refused = client::prepare(&folder).expect_err("a refusal").to_string();
    assert!(refused.contains("it belongs to user 65534"), "{refused}");
    let program = Program::within(runtime, 1, 2, &[]);
    assert!(!program.socket().exists());
    program.end();
}

#[test]
fn only_sockets_that_nobody_listens_on_are_removed() {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    let runtime = tempfile::tempdir().expect("a directory");
    let folder = runtime.path().join("vmhook");
    drop(client::prepare(&folder).expect("a directory"));
    let path = |name: &str| folder.join(name);
    std::fs::write(path("file.sock"), "precious").expect("written");
    drop(UnixListener::bind(path("stale.sock")).expect("a socket"));
    drop(UnixListener::bind(path("target")).expect("a socket"));
    symlink(path("target"), path("link.sock")).expect("a link");
    let _live = UnixListener::bind(path("live.sock")).expect("a socket");
    let program = Program::within(runtime, 1, 2, &[]);
    let is_there = |name: &str| path(name).symlink_metadata().is_ok();
    assert!(!is_there("stale.sock"));
    for name in ["file.sock", "live.sock", "link.sock", "target"] {
        assert!(is_there(name), "{name}");
    }
    program.end();
}
