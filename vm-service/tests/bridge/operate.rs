//! Operating `bridge serve` and `bridge replay`: the confinement of workers, recordings, and socket paths.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, lchown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rustix::fs::{CWD, FileType, FlockOperation, flock, mknodat};
use vm_bridge::recording::{MAGIC, Recording};

use crate::process::{Running, beside, until};

/// A directory that all users may search, and a server's log in it.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("permissions");
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn folder(&self, name: &str, mode: u32) -> PathBuf {
        let path = self.path(name);
        fs::create_dir(&path).expect("a folder");
        fs::set_permissions(&path, Permissions::from_mode(mode)).expect("permissions");
        path
    }

    /// The command of a server, whose umask forbids nothing.
    fn command(&self, driver: &Path) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "umask 0; exec \"$@\"", "sh"]).arg(env!("CARGO_BIN_EXE_vm-service"));
        command.args(["--log-dir", "", "bridge", "serve", "--socket"]).arg(self.path("socket"));
        command.arg("--driver").arg(driver);
        command
    }

    fn serve(&self, mut command: Command) -> Running {
        let log = fs::File::create(self.path("log")).expect("a log");
        let mut server = Running(command.stderr(log).spawn().expect("vm-service"));
        until("the server listens", || {
            let ended = server.0.try_wait().expect("its status");
            assert!(ended.is_none(), "the server ended: {}", self.log());
            self.log().contains("CUDA programs are served")
        });
        server
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Runs a program of the bridge's tests through the server.
    fn run(&self, name: &str, argument: &str) -> Output {
        let bridge = self.path("bridge");
        if !bridge.exists() {
            fs::create_dir(&bridge).expect("a folder");
            symlink(beside("libvm_bridge_guest.so"), bridge.join("libcuda.so.1")).expect("a link");
        }
        let source = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join(format!("../features/cuda/bridge/client/tests/{name}.c"));
        let mut gcc = Command::new("gcc");
        gcc.args(["-std=gnu11", "-pthread", "-o"]).arg(self.path(name)).arg(source).arg("-ldl");
        assert!(gcc.status().expect("gcc").success());
        let mut program = Command::new(self.path(name));
        program.arg(argument).env("LD_LIBRARY_PATH", bridge);
        program.env("VM_BRIDGE", format!("unix:{}", self.path("socket").display()));
        program.output().expect("the program")
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[test]
fn workers_are_confined_behind_a_link_to_their_driver_and_the_log_says_so() {
    let place = Place::new();
    let driver = place.folder("driver", 0o755).join("libcuda.so.1");
    symlink(beside("libvm_cuda_cpu.so"), &driver).expect("a link");
    let server = place.serve(place.command(&driver));
    let log = place.log();
    assert!(log.contains("workers of CUDA programs are confined: system calls, files"), "{log}");
    assert_eq!(log.contains("each as a user of its own"), is_root(), "{log}");
    assert_eq!(
        log.contains("without a user of its own (vm-service does not run as root)"),
        !is_root(),
        "{log}"
    );
    // No attempt failed before.
    assert!(!log.contains("WARN") && !log.contains("install"), "{log}");
    let output = place.run("add", "");
    assert!(output.status.success(), "{output:?}");
    drop(server);
}

#[test]
fn a_driver_that_a_confined_worker_cannot_open_is_refused_until_the_operator_waives_that() {
    if !is_root() {
        return println!("skipped: workers have users of their own only for root");
    }
    let place = Place::new();
    let driver = place.folder("private", 0o700).join("driver.so");
    fs::copy(beside("libvm_cuda_fake.so"), &driver).expect("a copy");
    let output = place.command(&driver).output().expect("vm-service");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("in a confined worker") && said.contains("`--unconfined user`"), "{said}");
    assert!(said.contains("see that all users may read it"), "{said}");
    let mut command = place.command(&driver);
    command.args(["--unconfined", "user"]);
    let _server = place.serve(command);
    let log = place.log();
    assert!(log.contains("confined: system calls, files"), "{log}");
    assert!(log.contains("without a user of its own (waived)"), "{log}");
    assert!(place.run("add", "").status.success());
}

#[test]
fn a_driver_that_is_no_regular_file_is_refused_at_once() {
    let place = Place::new();
    let fifo = place.path("fifo");
    mknodat(CWD, &fifo, FileType::Fifo, 0o600.into(), 0).expect("a FIFO");
    for driver in [&*fifo, Path::new("/dev/zero")] {
        let output = place.command(driver).output().expect("vm-service");
        let said = String::from_utf8_lossy(&output.stderr);
        let says = format!("cannot read {}: not a regular file", driver.display());
        assert!(!output.status.success() && said.contains(&says), "{said}");
    }
}

/// As in a container without these capabilities.
#[test]
fn root_that_cannot_give_workers_a_user_serves_only_with_a_waiver() {
    if !is_root() {
        return println!("skipped: workers have users of their own only for root");
    }
    let place = Place::new();
    let command = |options: &[&str]| {
        let serve = place.command(&beside("libvm_cuda_fake.so"));
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set=-setuid,-setgid", "--inh-caps=-setuid,-setgid"]);
        command.arg(serve.get_program()).args(serve.get_args()).args(options);
        command
    };
    let output = command(&[]).output().expect("setpriv");
    let said = String::from_utf8_lossy(&output.stderr);
    let says = "a worker of the bridge cannot be confined: cannot give it a user of its own: ";
    assert!(!output.status.success() && said.contains(says), "{said}");
    assert!(said.contains("`--unconfined user`"), "{said}");
    let _server = place.serve(command(&["--unconfined", "user"]));
    assert!(place.log().contains("without a user of its own (waived)"), "{}", place.log());
}

#[test]
fn each_measure_is_waived_by_its_name() {
    let place = Place::new();
    let mut command = place.command(&beside("libvm_cuda_fake.so"));
    command.args(["--unconfined", "calls,files"]);
    let _server = place.serve(command);
    let log = place.log();
    let missing = "without Landlock's limits on files (waived); ";
    assert!(log.contains(missing) && log.contains("without a list of system calls (waived)"), "{log}");
    assert!(!log.contains("confined: system calls"), "{log}");
    assert!(place.run("add", "").status.success());
    let mut command = place.command(&beside("libvm_cuda_fake.so"));
    let output = command.args(["--unconfined", "all"]).output().expect("vm-service");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("[possible values: user, files, calls]"), "{said}");
}

#[test]
fn another_user_than_root_serves_and_reads_what_is_missing() {
    if !is_root() {
        return println!("skipped: only root becomes another user");
    }
    let place = Place::new();
    let run = place.folder("run", 0o777);
    let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
    command.args(["--log-dir", "", "bridge", "serve", "--socket"]).arg(run.join("socket"));
    command.arg("--driver").arg(beside("libvm_cuda_fake.so"));
    std::os::unix::process::CommandExt::uid(&mut command, 65534);
    let _server = place.serve(command);
    let log = place.log();
    let says = "confined: system calls, files";
    assert!(
        log.contains(says) && log.contains("without a user of its own (vm-service does not run"),
        "{log}"
    );
}

#[test]
fn only_a_stale_socket_is_replaced() {
    let place = Place::new();
    let precious = place.path("precious.txt");
    fs::write(&precious, "precious").expect("written");
    let driver = beside("libvm_cuda_fake.so");
    for option in ["--socket", "--stream"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
        command.args(["--log-dir", "", "bridge", "serve", "--driver"]).arg(&driver);
        if option == "--stream" {
            command.arg("--socket").arg(place.path("socket"));
        }
        let output = command.arg(option).arg(&precious).output().expect("vm-service");
        let said = String::from_utf8_lossy(&output.stderr);
        let expect = format!("cannot listen on {}: a regular file is there; ", precious.display());
        assert!(!output.status.success() && said.contains(&expect), "{option}: {said}");
        assert_eq!(fs::read(&precious).expect("the file"), b"precious", "{option}");
    }
    // A server that was killed left its socket.
    let server = place.serve(place.command(&driver));
    drop(server);
    assert!(place.path("socket").exists());
    fs::remove_file(place.path("log")).expect("removed");
    let _server = place.serve(place.command(&driver));
    let output = place.command(&driver).output().expect("vm-service");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("another process listens there; "), "{said}");
    assert!(place.run("add", "").status.success());
}

/// Who may read a directory can lock it by flock(2).
#[test]
fn a_lock_of_the_sockets_directory_holds_up_no_server() {
    let place = Place::new();
    let directory = fs::File::open(place.path("")).expect("the directory");
    flock(&directory, FlockOperation::NonBlockingLockShared).expect("locked");
    let driver = beside("libvm_cuda_fake.so");
    drop(place.serve(place.command(&driver)));
    // The next server replaces a stale socket.
    assert!(place.path("socket").exists());
    let _server = place.serve(place.command(&driver));
    assert!(place.run("add", "").status.success());
}

/// The recordings of a directory, the smallest first.
fn recordings(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("recordings").flatten();
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    paths.sort_by_key(|path| path.metadata().map_or(0, |data| data.len()));
    paths
}

#[test]
fn recordings_are_private_and_limited() {
    let place = Place::new();
    let folder = place.path("recordings");
    let serve = |options: &[&str]| {
        let mut command = place.command(&beside("libvm_cuda_fake.so"));
        command.arg("--record").arg(&folder).args(options);
        place.serve(command)
    };
    let server = serve(&["--record-limit", "4K", "--record-total", "12K"]);
    assert_eq!(folder.metadata().expect("a directory").mode() & 0o777, 0o700);
    for _ in 0..4 {
        assert!(place.run("ways", "threads").status.success());
        until("its recording is complete", || server.is_idle());
    }
    drop(server);
    let paths = recordings(&folder);
    assert_eq!(paths.len(), 3, "the directory has room for three");
    for path in &paths {
        let (data, bytes) = (path.metadata().expect("a file"), fs::read(path).expect("a recording"));
        assert_eq!(data.mode() & 0o777, 0o600);
        assert!(data.len() <= 4 << 10, "{}", data.len());
        let recording = Recording::read(&bytes).expect("a recording");
        assert!(recording.calls.len() > 2, "it has what came first");
        assert!(recording.to_bytes(usize::MAX).len() <= bytes.len() + 16, "it is whole events");
    }
    let log = place.log();
    assert!(log.contains("the recording of a CUDA program ends: it has its 4096 bytes"), "{log}");
    assert!(log.contains("a CUDA program is not recorded: ") && log.contains("--record-total"), "{log}");
    // Otherwise another user could take the name of the next recording.
    fs::set_permissions(&folder, Permissions::from_mode(0o777)).expect("permissions");
    let mut command = place.command(&beside("libvm_cuda_fake.so"));
    let output = command.arg("--record").arg(&folder).output().expect("vm-service");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("can be written to by others (mode 777)"), "{said}");
}

#[test]
fn a_directory_of_recordings_is_this_users_own_and_no_link() {
    let place = Place::new();
    let folder = place.folder("recordings", 0o700);
    let refused = |path: &Path, says: &str| {
        let mut command = place.command(&beside("libvm_cuda_fake.so"));
        let output = command.arg("--record").arg(path).output().expect("vm-service");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(says), "{said}");
    };
    symlink(&folder, place.path("link")).expect("a link");
    refused(&place.path("link"), "is a symbolic link");
    if !is_root() {
        return println!("skipped in part: only root gives a directory to another user");
    }
    chown(&folder, Some(65534), None).expect("another owner");
    refused(&folder, "belongs to user 65534 and not to 0");
    // Another user's link on the way to the directory, or to the socket.
    lchown(place.path("link"), Some(65534), None).expect("another owner");
    let says = "link is a link that the user 65534 made";
    refused(&place.path("link/new"), says);
    assert!(!folder.join("new").exists());
    let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
    command.args(["bridge", "serve", "--driver"]).arg(beside("libvm_cuda_fake.so"));
    let output = command.arg("--socket").arg(place.path("link/new")).output().expect("vm-service");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains(says), "{said}");
}

#[test]
fn recordings_stay_in_the_directory_that_was_checked() {
    let place = Place::new();
    let (folder, other) = (place.folder("recordings", 0o700), place.folder("other", 0o700));
    let mut command = place.command(&beside("libvm_cuda_fake.so"));
    command.arg("--record").arg(&folder);
    let server = place.serve(command);
    let moved = place.path("moved");
    fs::rename(&folder, &moved).expect("moved");
    symlink(&other, &folder).expect("a link");
    assert!(place.run("add", "").status.success());
    until("its recording is complete", || server.is_idle());
    assert_eq!(recordings(&other).len(), 0);
    let [recording] = recordings(&moved).try_into().expect("one");
    Recording::read(&fs::read(recording).expect("a file")).expect("a recording");
}

/// Its driver's initializer writes to all that the worker has open.
#[test]
fn a_worker_that_was_taken_over_writes_no_more_than_the_limit_of_its_recording() {
    let place = Place::new();
    let (folder, driver) = (place.path("recordings"), place.path("driver.so"));
    let source = place.path("driver.c");
    fs::write(&source, FILLS).expect("written");
    // Its functions are the fake driver's, under the name that this has.
    fs::copy(beside("libvm_cuda_fake.so"), place.path("libcuda.so.1")).expect("a copy");
    let mut gcc = Command::new("gcc");
    gcc.args(["-shared", "-fPIC", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", "-o"])
        .arg(&driver)
        .arg(&source);
    assert!(gcc.arg(place.path("libcuda.so.1")).status().expect("gcc").success());
    let mut command = place.command(&driver);
    command.arg("--record").arg(&folder).args(["--record-limit", "8K", "--record-total", "1M"]);
    let server = place.serve(command);
    assert!(place.run("add", "").status.success());
    until("its recording is complete", || server.is_idle());
    let [recording] = recordings(&folder).try_into().expect("one");
    assert_eq!(recording.metadata().expect("a file").len(), 8 << 10);
}

/// The source of that initializer.
const FILLS: &str = r#"
#define _GNU_SOURCE
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

__attribute__((constructor)) static void fill(void) {
    static char bytes[1 << 20];
    for (int file = 3; file < 64; file++) {
        struct stat data;
        if (fstat(file, &data)) continue;
        if (S_ISREG(data.st_mode) || S_ISFIFO(data.st_mode)) {
            write(file, bytes, sizeof bytes);
            pwrite(file, bytes, 1, 1l << 30);
        }
        /* Other sockets than the recording's can be read. */
        char byte;
        if (S_ISSOCK(data.st_mode) && recv(file, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0)
            send(file, bytes, sizeof bytes, MSG_NOSIGNAL);
    }
}
"#;

#[test]
fn a_replay_is_confined_and_limited() {
    let place = Place::new();
    let folder = place.path("recordings");
    let mut command = place.command(&beside("libvm_cuda_fake.so"));
    command.arg("--record").arg(&folder);
    let server = place.serve(command);
    assert!(place.run("add", "").status.success());
    until("its recording is complete", || server.is_idle());
    drop(server);
    let [recording] = recordings(&folder).try_into().expect("one");
    let replay = |options: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
        command.args(["--log-dir", "", "bridge", "replay"]).arg(&recording).args(options);
        let output = command.arg("--driver").arg(beside("libvm_cuda_fake.so")).output().expect("vm-service");
        let said = [output.stderr, output.stdout].concat();
        (output.status.success(), String::from_utf8_lossy(&said).into_owned())
    };
    let (is_alike, said) = replay(&[]);
    assert!(is_alike && said.contains("its worker is confined: system calls, files"), "{said}");
    assert_eq!(said.contains(", as user "), is_root(), "{said}");
    // It allocates more than that.
    let (is_alike, said) = replay(&["--memory", "2M"]);
    assert!(!is_alike && said.contains("cuMemAlloc_v2: 2 with "), "{said}");
}

#[test]
fn a_link_in_the_place_of_a_recording_is_not_followed() {
    let place = Place::new();
    let (folder, target) = (place.folder("recordings", 0o700), place.path("target"));
    let mut command = place.command(&beside("libvm_cuda_fake.so"));
    command.arg("--record").arg(&folder);
    let server = place.serve(command);
    symlink(&target, folder.join(format!("{}-0", server.0.id()))).expect("a link");
    assert!(place.run("add", "").status.success());
    until("its recording is complete", || server.is_idle());
    assert!(!target.exists());
    let next = folder.join(format!("{}-1", server.0.id()));
    Recording::read(&fs::read(next).expect("a file")).expect("a recording under the next name");
}

#[test]
fn only_a_regular_file_with_calls_is_replayed() {
    let place = Place::new();
    let replay = |path: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
        command.args(["--log-dir", "", "bridge", "replay"]).arg(path);
        command.args(["--deadline", "1s", "--driver"]).arg(beside("libvm_cuda_fake.so"));
        let output = command.output().expect("vm-service");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{said}");
        said
    };
    let empty = place.path("empty");
    fs::write(&empty, MAGIC).expect("written");
    let said = replay(&empty);
    assert!(said.contains("has no calls"), "{said}");
    let said = replay(Path::new("/dev/zero"));
    assert!(said.contains("not a regular file"), "{said}");
    let fifo = place.path("fifo");
    mknodat(CWD, &fifo, FileType::Fifo, 0o600.into(), 0).expect("a FIFO");
    let said = replay(&fifo);
    assert!(said.contains("not a regular file"), "{said}");
}
