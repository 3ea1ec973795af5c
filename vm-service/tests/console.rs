//! Readers of a guest's console and of the log that are slow, late or never read, with guests on this machine's own
//! `/dev/kvm`. Where it does not open, these tests say so and pass.

#[path = "shared/elf.rs"]
mod elf;

use std::fs::{self, File};
use std::io::{self, PipeReader, Read as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use elf::elf;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

/// Nothing here takes so long, even where KVM guests are emulated and the machine is busy.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Sends for ever and never looks whether the transmitter is ready: mov dx, 0x3f8; mov al, 'x'; out dx, al; jmp -1.
const RUDE: &[u8] = &[0x66, 0xba, 0xf8, 0x03, 0xb0, b'x', 0xee, 0xeb, 0xfd];

/// Reads memory that nothing decodes, for ever: mov ebx, 0xd0000000; mov al, [rbx]; jmp -1.
const STRAYS: &[u8] = &[0xbb, 0x00, 0x00, 0x00, 0xd0, 0x8a, 0x03, 0xeb, 0xfc];

/// Sends the low bytes of `count` down to 1, sixteen whenever the transmitter is ready, and powers off. While the transmitter is
/// not, it reads memory that nothing decodes: with `-vv`, [`STRAY`] in the log is the sign that it waits.
fn polite(count: u32) -> Vec<u8> {
    // mov ebx, 0xd0000000; mov ecx, count
    let mut code = vec![0xbb, 0x00, 0x00, 0x00, 0xd0, 0xb9];
    code.extend(count.to_le_bytes());
    // next: mov dx, 0x3fd; wait: in al, dx; test al, 0x20; jnz send; mov al, [rbx]; jmp wait
    code.extend([0x66, 0xba, 0xfd, 0x03, 0xec, 0xa8, 0x20, 0x75, 0x04, 0x8a, 0x03, 0xeb, 0xf7]);
    // send: mov dx, 0x3f8; mov esi, 16
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xbe, 0x10, 0x00, 0x00, 0x00]);
    // byte: mov al, cl; out dx, al; dec ecx; jz off; dec esi; jnz byte; jmp next
    code.extend([0x88, 0xc8, 0xee, 0xff, 0xc9, 0x74, 0x06, 0xff, 0xce, 0x75, 0xf5, 0xeb, 0xdd]);
    // off: mov dx, 0x600; mov al, 0x34; out dx, al; jmp $
    code.extend([0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee, 0xeb, 0xfe]);
    code
}

/// What the log has of reads of memory that nothing decodes.
const STRAY: &str = "the guest read memory that nothing decodes";

/// What the log has once the queue of the console is full and a guest that does not wait was held.
const UNREAD: &str = "console output is not read";

/// What [`polite`] sends.
fn countdown(count: u32) -> Vec<u8> {
    (1..=count).rev().map(|number| number as u8).collect()
}

/// A guest that runs.
struct Guest {
    process: Child,
    files: tempfile::TempDir,
}

impl Guest {
    fn files(code: &[u8]) -> Option<tempfile::TempDir> {
        if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
            println!("skipped: /dev/kvm does not open: {error}");
            return None;
        }
        let files = tempfile::tempdir().expect("a folder");
        let toml = "name = \"a\"\nmemory = \"4M\"\nboot.kernel = \"kernel\"\n";
        fs::write(files.path().join("guest.toml"), toml).expect("written");
        fs::write(files.path().join("kernel"), elf(code)).expect("written");
        Some(files)
    }

    /// Starts the guest of `files`.
    fn start(files: tempfile::TempDir, options: &str, out: Stdio, err: Stdio) -> Self {
        let process = Command::new(env!("CARGO_BIN_EXE_vm-service"))
            // These guests know no power button.
            .args(["run", "guest.toml", "--state", "state", "--shutdown-timeout", "0"])
            .args(options.split_whitespace())
            .current_dir(files.path())
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .spawn()
            .expect("vm-service");
        Self { process, files }
    }

    fn read(&self, file: &str) -> String {
        String::from_utf8_lossy(&fs::read(self.files.path().join(file)).unwrap_or_default()).into_owned()
    }

    fn kill(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).expect("sent");
    }

    fn end(&mut self) -> Option<ExitStatus> {
        self.process.try_wait().expect("a process")
    }

    fn wait_until(&mut self, what: &str, done: impl Fn(&mut Self) -> bool) {
        let deadline = Instant::now() + TIMEOUT;
        while !done(self) {
            assert!(Instant::now() < deadline, "{what}: it takes too long: {}", self.read("messages"));
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits for the end; answers with the exit status.
    fn wait(&mut self) -> Option<i32> {
        self.wait_until("the end", |guest| guest.end().is_some());
        self.end().and_then(|status| status.code())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Both fail only on a process that has ended and was waited for.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A pipe as small as a pipe can be.
fn pipe() -> (PipeReader, io::PipeWriter) {
    let (reader, writer) = io::pipe().expect("a pipe");
    rustix::pipe::fcntl_setpipe_size(&writer, 4096).expect("a small pipe");
    (reader, writer)
}

/// Reads from the pipe until `sign` has come.
fn read_until(pipe: &mut PipeReader, sign: &[u8]) {
    rustix::io::ioctl_fionbio(&*pipe, true).expect("non-blocking");
    let (mut got, mut bytes, deadline) = (Vec::new(), [0; 4096], Instant::now() + TIMEOUT);
    while !got.windows(sign.len()).any(|part| part == sign) {
        match pipe.read(&mut bytes) {
            Ok(0) => panic!("it has ended: {}", String::from_utf8_lossy(&got)),
            Ok(count) => got.extend(&bytes[..count]),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}"),
        }
        assert!(Instant::now() < deadline, "it takes too long: {}", String::from_utf8_lossy(&got));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Fills the pipe to the last byte: whoever writes to it waits from then on.
fn top_up(pipe: &PipeReader) {
    let path = format!("/proc/self/fd/{}", pipe.as_raw_fd());
    let flags = OFlags::WRONLY | OFlags::NONBLOCK;
    let writer = rustix::fs::open(path, flags, Mode::empty()).expect("the pipe");
    let full = loop {
        if let Err(error) = rustix::io::write(&writer, b"#") {
            break error;
        }
    };
    assert_eq!(full, Errno::AGAIN);
}

/// Where a stream goes.
#[derive(Clone, Copy, PartialEq)]
enum To {
    File,
    /// A pipe that is not read once the guest runs; the same one for both streams.
    Pipe,
}

/// A guest is asked to end while its reader does not read: it must end at once, with this exit status and these messages. That
/// it runs is seen by `runs` in the pipe, and that it misses its reader by `misses` in the log.
fn check(
    code: &[u8],
    options: &str,
    (out, err): (To, To),
    (runs, misses): (&[u8], &str),
    signal: Signal,
    exit: i32,
    says: &[&str],
) {
    let Some(files) = Guest::files(code) else { return };
    let (mut reader, writer) = pipe();
    let stream = |to, name| match to {
        To::File => Stdio::from(File::create(files.path().join(name)).expect("a file")),
        To::Pipe => Stdio::from(writer.try_clone().expect("a descriptor")),
    };
    let (to_out, to_err) = (stream(out, "report"), stream(err, "messages"));
    drop(writer);
    let mut guest = Guest::start(files, options, to_out, to_err);
    read_until(&mut reader, runs);
    top_up(&reader);
    guest.wait_until("the guest", |guest| guest.read("messages").contains(misses));
    guest.kill(signal);
    let got = guest.wait();
    let said = guest.read("messages") + &guest.read("report");
    assert_eq!(got, Some(exit), "{options}: {said}");
    for part in says {
        assert!(said.contains(part), "{options}: {part} is not in: {said}");
    }
    // Since the guest runs nobody has read.
    drop(reader);
}

#[test]
fn a_guest_whose_standard_output_is_not_read_is_stopped() {
    let streams = (To::Pipe, To::File);
    let says =
        ["SIGTERM: stopping the guest", "console output are dropped: nobody reads them", "power was cut"];
    check(RUDE, "", streams, (b"x", UNREAD), Signal::TERM, 0, &says);
    let says = ["SIGINT: stopping", "are dropped"];
    check(&polite(u32::MAX), "-vv", streams, (b"\xff\xfe", STRAY), Signal::INT, 0, &says);
}

#[test]
fn a_guest_whose_standard_error_is_not_read_is_stopped() {
    let streams = (To::File, To::Pipe);
    // With --json, the console is there too.
    check(RUDE, "--json", streams, (b"xxxx", ""), Signal::TERM, 0, &["\"how\": \"cut\""]);
    // The log alone, which a guest can make say something at every access.
    check(STRAYS, "-vv --console none", streams, (STRAY.as_bytes(), ""), Signal::HUP, 0, &[]);
}

#[test]
fn a_guest_does_not_fill_the_log() {
    let Some(files) = Guest::files(STRAYS) else { return };
    let messages = File::create(files.path().join("messages")).expect("a file");
    let begin = Instant::now();
    let mut guest = Guest::start(files, "-vv --console none", Stdio::null(), messages.into());
    let told = |guest: &Guest| guest.read("messages").matches(&format!("{STRAY} address=")).count();
    guest.wait_until("the limit", |guest| told(guest) > 240);
    guest.kill(Signal::TERM);
    assert_eq!(guest.wait(), Some(0), "{}", guest.read("messages"));
    // Everything is asked for, so much is told: a burst of 200, and twenty a second.
    let (told, most) = (told(&guest), 200 + begin.elapsed().as_millis() / 50);
    assert!(told as u128 <= most, "{told} messages, at most {most}");
    let count = format!("messages are left out that are like this one: {STRAY}");
    assert!(guest.read("messages").contains(&count), "no count in {}", guest.read("messages"));
}

#[test]
fn a_guest_whose_report_is_not_read_is_stopped() {
    check(RUDE, "--json", (To::Pipe, To::Pipe), (b"xxxx", ""), Signal::TERM, 1, &[]);
}

fn fifo(files: &Path) -> PathBuf {
    let path = files.join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).expect("a FIFO");
    path
}

#[test]
fn a_fifo_that_nobody_opens_holds_nobody_up() {
    let Some(files) = Guest::files(RUDE) else { return };
    fifo(files.path());
    let messages = File::create(files.path().join("messages")).expect("a file");
    let mut guest = Guest::start(files, "--console file=fifo", Stdio::null(), messages.into());
    guest.wait_until("the guest", |guest| guest.read("messages").contains(UNREAD));
    guest.kill(Signal::TERM);
    assert_eq!(guest.wait(), Some(0), "{}", guest.read("messages"));
    for part in ["nobody reads the FIFO fifo yet", "are dropped: nobody reads them"] {
        assert!(guest.read("messages").contains(part), "{part}: {}", guest.read("messages"));
    }
}

/// More than the queue and a pipe hold.
const MANY: u32 = 150_000;

#[test]
fn a_late_reader_of_a_fifo_gets_all_of_it() {
    let Some(files) = Guest::files(&polite(MANY)) else { return };
    let path = fifo(files.path());
    let messages = File::create(files.path().join("messages")).expect("a file");
    let mut guest = Guest::start(files, "-vv --console file=fifo", Stdio::null(), messages.into());
    guest.wait_until("the guest", |guest| guest.read("messages").contains(STRAY));
    let got = fs::read(path).expect("the console");
    assert_eq!(guest.wait(), Some(0), "{}", guest.read("messages"));
    assert!(got == countdown(MANY), "{} bytes, {}", got.len(), guest.read("messages"));
}

#[test]
fn a_guest_that_waits_for_its_transmitter_loses_nothing_to_a_slow_reader() {
    let Some(files) = Guest::files(&polite(MANY)) else { return };
    let (mut reader, writer) = pipe();
    let messages = File::create(files.path().join("messages")).expect("a file");
    let mut guest = Guest::start(files, "-vv", writer.into(), messages.into());
    let mut got = vec![0; 10_000];
    for part in got.chunks_mut(5000) {
        let before = guest.read("messages").matches(STRAY).count();
        guest.wait_until("the guest", |guest| guest.read("messages").matches(STRAY).count() > before);
        reader.read_exact(part).expect("output");
    }
    reader.read_to_end(&mut got).expect("output");
    assert_eq!(guest.wait(), Some(0), "{}", guest.read("messages"));
    assert!(got == countdown(MANY), "{} bytes, {}", got.len(), guest.read("messages"));
}

#[test]
fn a_reader_that_has_gone_costs_only_the_output() {
    let Some(files) = Guest::files(&polite(MANY)) else { return };
    let (reader, writer) = pipe();
    drop(reader);
    let messages = File::create(files.path().join("messages")).expect("a file");
    let mut guest = Guest::start(files, "", writer.into(), messages.into());
    assert_eq!(guest.wait(), Some(0), "{}", guest.read("messages"));
    assert!(guest.read("messages").contains("output is lost from here on"), "{}", guest.read("messages"));
}

/// Sends back what it receives: next: mov dx, 0x3fd; in al, dx; test al, 1; jz next; mov dx, 0x3f8; in al, dx; out dx, al;
/// jmp next.
const ECHO: &[u8] =
    &[0x66, 0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74, 0xf7, 0x66, 0xba, 0xf8, 0x03, 0xec, 0xee, 0xeb, 0xef];

/// Opens the console as a terminal program does.
fn terminal(guest: &mut Guest, path: &Path) -> File {
    guest.wait_until("the start", |guest| guest.read("messages").contains("starts after"));
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NONBLOCK;
    rustix::fs::open(path, flags, Mode::empty()).expect("the terminal").into()
}

/// Types and waits for the answer.
fn talk(guest: &mut Guest, mut terminal: &File, text: &str) {
    use std::io::Write as _;
    terminal.write_all(text.as_bytes()).expect("typed");
    let mut got: Vec<u8> = Vec::new();
    let deadline = Instant::now() + TIMEOUT;
    while got != text.as_bytes() {
        let mut bytes = [0; 64];
        if let Ok(count) = terminal.read(&mut bytes) {
            got.extend(&bytes[..count]);
        }
        assert!(Instant::now() < deadline, "{got:?}: {}", guest.read("messages"));
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_pseudo_terminal_is_opened_and_closed_while_the_guest_runs() {
    let Some(files) = Guest::files(ECHO) else { return };
    let link = files.path().join("console");
    let messages = File::create(files.path().join("messages")).expect("a file");
    let mut guest = Guest::start(files, "--console pty=console", Stdio::null(), messages.into());
    for text in ["hello", "Ctrl-A and x are keys of the guest: \x01x", "once more"] {
        let terminal = terminal(&mut guest, &link);
        talk(&mut guest, &terminal, text);
    }
    let path = fs::read_link(&link).expect("a link");
    let says = format!("the guest's console is {}", path.display());
    assert!(guest.read("messages").contains(&says), "{}", guest.read("messages"));
    guest.kill(Signal::TERM);
    assert_eq!(guest.wait(), Some(0), "{}", guest.read("messages"));
    assert!(link.symlink_metadata().is_err(), "the link is left");
}

#[test]
fn a_pseudo_terminal_that_nobody_opens_holds_nobody_up() {
    // It comes to its end only when nothing waits for a reader.
    let Some(files) = Guest::files(&polite(MANY)) else { return };
    let messages = File::create(files.path().join("messages")).expect("a file");
    let mut guest = Guest::start(files, "--console pty", Stdio::null(), messages.into());
    assert_eq!(guest.wait(), Some(0), "{}", guest.read("messages"));
}

#[test]
fn a_pseudo_terminal_that_is_not_read_does_not_hold_up_the_end() {
    let Some(files) = Guest::files(RUDE) else { return };
    let link = files.path().join("console");
    let messages = File::create(files.path().join("messages")).expect("a file");
    let mut guest = Guest::start(files, "--console pty=console", Stdio::null(), messages.into());
    let terminal = terminal(&mut guest, &link);
    guest.wait_until("the output", |guest| guest.read("messages").contains(UNREAD));
    guest.kill(Signal::TERM);
    assert_eq!(guest.wait(), Some(0), "{}", guest.read("messages"));
    drop(terminal);
}

/// A pseudo-terminal in raw mode: the side to read, and the one for a process.
fn screen() -> (File, File) {
    use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};
    use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};

    let controller =
        openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a terminal");
    unlockpt(&controller).expect("a terminal");
    let name = ptsname(&controller, Vec::new()).expect("its name");
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let terminal = rustix::fs::open(&name, flags, Mode::empty()).expect("the terminal");
    let mut raw = tcgetattr(&terminal).expect("its mode");
    raw.make_raw();
    tcsetattr(&terminal, OptionalActions::Now, &raw).expect("a mode");
    rustix::io::ioctl_fionbio(&controller, true).expect("non-blocking");
    (controller.into(), terminal.into())
}

/// Runs a command on a terminal, types what a hostile guest then echoes, and compares what comes to the terminal.
fn shows(command: &mut Command, is_raw: bool, runs: impl Fn() -> bool) {
    use std::io::Write as _;

    const DROPPED: &[u8] =
        b"\x1b]52;c;Y3VybA==\x07\x1b[21t\x1bP$qm\x1b\\\x05\x1b[6n\x1b[5n\x1b[c\x1b[>c\x1b[18t";
    const SHOWN: &[u8] = b"\x1b[31mred\x1b[0m.";
    let (mut screen, terminal) = screen();
    let mut process = command.stdin(Stdio::piped()).stdout(terminal).spawn().expect("vm-service");
    let typed = [DROPPED, SHOWN].concat();
    let mut keys = process.stdin.take().expect("its input");
    let deadline = Instant::now() + TIMEOUT;
    while !runs() {
        assert!(Instant::now() < deadline, "the guest does not start");
        std::thread::sleep(Duration::from_millis(5));
    }
    keys.write_all(&typed).expect("typed");
    let (mut got, mut bytes, deadline) = (Vec::new(), [0; 256], Instant::now() + TIMEOUT);
    while !got.ends_with(SHOWN) {
        if let Ok(count) = screen.read(&mut bytes) {
            got.extend(&bytes[..count]);
        }
        assert!(Instant::now() < deadline, "it takes too long: {}", String::from_utf8_lossy(&got));
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = process.kill();
    process.wait().expect("ended");
    assert_eq!(String::from_utf8_lossy(&got), String::from_utf8_lossy(if is_raw { &typed } else { SHOWN }));
}

/// A command that reads nothing of this process's environment.
fn vm_service(files: &Path, arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
    command.args(["--log-dir", "", "--state", "state"]).args(arguments.split_whitespace());
    command.current_dir(files).env_remove("RUST_LOG").stderr(Stdio::null());
    command
}

#[test]
fn a_terminal_gets_no_control_sequence_of_the_guest_that_acts_on_the_operator() {
    for (console, is_raw) in [("stdio", false), ("stdio=raw", true)] {
        let Some(files) = Guest::files(ECHO) else { return };
        let path = files.path().join("messages");
        let mut run = vm_service(files.path(), &format!("run guest.toml --console {console}"));
        run.stderr(File::create(&path).expect("a file"));
        // A guest finds no key that came before its machine was reset.
        let runs = || fs::read_to_string(&path).is_ok_and(|said| said.contains("starts after"));
        shows(&mut run, is_raw, runs);
    }
    let Some(files) = Guest::files(ECHO) else { return };
    let daemon = vm_service(files.path(), "serve").stdin(Stdio::null()).spawn().expect("vm-service");
    let socket = files.path().join("state/daemon.sock");
    let mut daemon = Guest { process: daemon, files };
    daemon.wait_until("the daemon", |_| socket.exists());
    let start = vm_service(daemon.files.path(), "start guest.toml").output().expect("vm-service");
    assert!(start.status.success(), "{start:?}");
    for (options, is_raw) in [("", false), ("--raw", true)] {
        shows(&mut vm_service(daemon.files.path(), &format!("console a {options}")), is_raw, || true);
    }
    let stop = vm_service(daemon.files.path(), "stop a --now").status().expect("vm-service");
    assert!(stop.success(), "{stop}");
}

/// As in a container without these capabilities.
#[test]
fn root_that_cannot_give_a_vmm_a_user_runs_guests_only_with_a_waiver() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: VMMs have users of their own only for root");
    }
    let start = |options: &str| {
        let files = Guest::files(ECHO)?;
        let run = vm_service(files.path(), &format!("run guest.toml --console none {options}"));
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set=-setuid,-setgid", "--inh-caps=-setuid,-setgid"]);
        command.arg(run.get_program()).args(run.get_args()).current_dir(files.path());
        let messages = File::create(files.path().join("messages")).expect("a file");
        let process = command.stdin(Stdio::null()).stderr(messages).spawn().expect("setpriv");
        Some(Guest { process, files })
    };
    let Some(mut guest) = start("") else { return };
    assert_eq!(guest.wait(), Some(1), "{}", guest.read("messages"));
    let said = guest.read("messages");
    let says = "the guest's VMM cannot be confined: cannot give it a user of its own: ";
    assert!(said.contains(says) && said.contains("`--unconfined user`"), "{said}");
    let Some(mut guest) = start("--unconfined user") else { return };
    let says = "the guest's VMM is confined: system calls, files";
    guest.wait_until("the guest", |guest| guest.read("messages").contains(says));
    assert!(
        guest.read("messages").contains("without a user of its own (waived)"),
        "{}",
        guest.read("messages")
    );
}
