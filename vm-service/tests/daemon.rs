//! The daemon and its clients as an operator has them: processes of this program, with bare guests on this machine's own `/dev/kvm`.
//! Where that does not open, the tests that need it say so and pass.

#[path = "shared/elf.rs"]
mod elf;
#[allow(dead_code)]
#[path = "shared/process.rs"]
mod process;

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use elf::elf;
use process::{VMM, child_of, find_child, kill};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;
use vm_ir::mutate::Mutator;

/// Nothing here takes so long, even where KVM guests are emulated and the machine is busy.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Sends back what it receives: next: mov dx, 0x3fd; in al, dx; test al, 1; jz next; mov dx, 0x3f8; in al, dx; out dx, al;
/// jmp next.
const ECHO: &[u8] =
    &[0x66, 0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74, 0xf7, 0x66, 0xba, 0xf8, 0x03, 0xec, 0xee, 0xeb, 0xef];

/// A folder with the state of a daemon and files of guests, and the processes that live there.
struct World {
    folder: tempfile::TempDir,
    processes: Vec<Child>,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("kernel"), elf(ECHO)).expect("written");
        for guest in ["web1", "web2"] {
            let text = format!("name = \"{guest}\"\nmemory = \"4M\"\nboot.kernel = \"kernel\"\n");
            fs::write(folder.path().join(format!("{guest}.toml")), text).expect("written");
        }
        Self { folder, processes: Vec::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, args: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
        command.args(["--state", "state"]).args(args.split_whitespace());
        command.current_dir(self.folder.path()).env_remove("RUST_LOG").stdin(Stdio::null());
        command
    }

    /// Starts a process that lives on, and answers its id.
    fn spawn(&mut self, args: &str) -> u32 {
        let log = File::options().create(true).append(true).open(self.path("messages")).expect("a file");
        let process = self.command(args).stdout(Stdio::null()).stderr(log).spawn().expect("vm-service");
        let id = process.id();
        self.processes.push(process);
        id
    }

    /// Starts the daemon, and waits until it answers.
    fn serve(&mut self) -> u32 {
        let daemon = self.spawn("serve");
        self.wait_until("the daemon", |world| world.run("guests").status.success());
        daemon
    }

    fn run(&self, args: &str) -> Output {
        self.command(args).output().expect("vm-service")
    }

    /// Runs a command that has to succeed, and answers its JSON.
    #[track_caller]
    fn json(&self, args: &str) -> Value {
        let output = self.run(&format!("--json {args}"));
        assert!(output.status.success(), "{args}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// Runs a command that has to fail so.
    #[track_caller]
    fn refused(&self, args: &str, exit: i32, says: &str) {
        let output = self.run(args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(exit), "{args}: {error}");
        assert!(error.contains(says), "{args}: {error}");
    }

    fn kill(&mut self, process: u32) {
        let at = self.processes.iter().position(|child| child.id() == process).expect("a process");
        let mut child = self.processes.remove(at);
        child.kill().and_then(|()| child.wait()).expect("killed");
    }

    #[track_caller]
    fn wait_until(&mut self, what: &str, done: impl Fn(&mut Self) -> bool) {
        let deadline = Instant::now() + TIMEOUT;
        while !done(self) {
            let said = fs::read_to_string(self.path("messages")).unwrap_or_default();
            assert!(Instant::now() < deadline, "{what} takes too long: {said}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.path("state/daemon.sock")).expect("a connection");
        stream.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
        stream
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // Guests that are left would live on.
        for guest in ["web1", "web2", "web3"] {
            drop(self.run(&format!("stop {guest} --now")));
        }
        for process in &mut self.processes {
            // Both fail only on a process that has ended and was waited for.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// The lines of an output, each of which comes in time.
fn lines(output: impl std::io::Read + Send + 'static) -> impl Iterator<Item = String> {
    let (sender, lines) = channel();
    // It ends with the output, or when nobody takes lines any more.
    std::thread::spawn(move || {
        BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
    });
    std::iter::from_fn(move || match lines.recv_timeout(TIMEOUT) {
        Err(RecvTimeoutError::Timeout) => panic!("no line comes"),
        line => line.ok(),
    })
}

/// What a command says on standard error until it says `text`, or ends.
fn says(command: &mut Command, text: &str) -> String {
    let mut process = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("vm-service");
    let mut said = String::new();
    for line in lines(process.stderr.take().expect("messages")) {
        said += &line;
        if said.contains(text) {
            break;
        }
    }
    process.kill().and_then(|()| process.wait()).expect("an end");
    said
}

fn has_kvm() -> bool {
    let opened = File::options().read(true).write(true).open("/dev/kvm");
    opened.inspect_err(|error| println!("skipped: /dev/kvm does not open: {error}")).is_ok()
}

/// Types into `console`, and waits for the guest to send it back.
fn echoes(world: &mut World, text: &str) {
    let mut console = world.command("console web1");
    let mut console = console.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("vm-service");
    let (mut keys, mut screen) =
        (console.stdin.take().expect("keys"), console.stdout.take().expect("a screen"));
    keys.write_all(text.as_bytes()).expect("typed");
    let mut got = vec![0; text.len()];
    screen.read_exact(&mut got).expect("what was typed");
    assert_eq!(got, text.as_bytes());
    console.kill().and_then(|()| console.wait()).expect("ended");
}

/// The value of a metric.
fn metric(world: &World, name: &str) -> f64 {
    let mut stream = world.connect();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").expect("written");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("metrics");
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    value.unwrap_or_else(|| panic!("no {name} in {text}"))
}

fn process_of(guest: &Value) -> Pid {
    guest["pid"].as_i64().and_then(|pid| Pid::from_raw(pid as i32)).expect("a process")
}

fn names(guests: &Value) -> Vec<&str> {
    guests["guests"].as_array().expect("guests").iter().filter_map(|guest| guest["name"].as_str()).collect()
}

#[test]
fn a_guest_outlives_a_daemon_that_is_killed() {
    if !has_kvm() {
        return;
    }
    let mut world = World::new();
    world.refused("guests", 1, "`vm-service serve` with the same `--state`");
    let daemon = world.serve();
    let guest = world.json("start web1.toml --vcpus 2 --memory 8M");
    assert_eq!(
        (&guest["state"], &guest["vcpus"], &guest["memory"]),
        (&"running".into(), &2.into(), &(8 << 20).into())
    );
    world.refused("start web1.toml", 1, "a guest named web1 runs already");
    world.refused("start messages", 2, "messages");
    echoes(&mut world, "hello");
    let process = guest["pid"].as_u64().expect("a process");
    world.kill(daemon);
    let pid = Pid::from_raw(process as i32).expect("a process");
    test_kill_process(pid).expect("the guest lives");
    // One that is run in the foreground meanwhile is found as well.
    let run = world.spawn("run web2.toml --console none");
    world.wait_until("web2", |world| world.path("state/guests/web2/control").exists());
    world.serve();
    world.wait_until("both", |world| names(&world.json("guests")) == ["web1", "web2"]);
    assert_eq!(world.json("status web1")["pid"], process);
    echoes(&mut world, "still here");
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("a process");
    let keeper = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
    let keeper: f64 = keeper.and_then(|text| text.trim().parse().ok()).expect("resident memory");
    let all = metric(&world, "vm_service_guest_resident_bytes{guest=\"web1\"}");
    assert!(
        all > 1.2 * 1024.0 * keeper,
        "{all} bytes are those of the keeper, {keeper} KiB, without the VMM"
    );
    world.refused("run web2.toml --console none", 1, "a guest named web2 runs already");

    let mut events = world.command("--json events").stdout(Stdio::piped()).spawn().expect("vm-service");
    world.kill(run);
    let mut told = lines(events.stdout.take().expect("events"));
    // It may have begun to listen before or after; the end of web1 comes behind that.
    world.wait_until("web2's end", |world| names(&world.json("guests")) == ["web1"]);
    let mut logs = world.command("logs web1 --follow").stdout(Stdio::piped()).spawn().expect("vm-service");
    let mut log = lines(logs.stdout.take().expect("the log"));
    let mut follow = |what: &str| log.any(|line| line.contains(what));
    assert!(follow("the guest web1 starts after"), "what was there comes first");
    let reset = world.json("reset web1");
    assert!(follow("the guest restarts reason=the guest was reset"), "what comes is printed as it comes");
    assert_eq!(reset["guest"], "web1");
    echoes(&mut world, "after the reset");
    // This program knows no power button.
    assert_eq!(world.json("stop web1 --deadline 1")["how"], "cut");
    assert!(told.any(|line| line.contains(r#""guest":"web1","event":"gone""#)));
    events.kill().and_then(|()| events.wait()).expect("ended");
    assert!(follow("the guest's power was cut"), "its last words come too");
    assert!(!follow("\0") && logs.wait().expect("ended").success(), "it ends with the guest");
    let log = world.json("logs web1");
    let line =
        log["log"].as_str().and_then(|log| log.lines().find(|line| line.contains("web1 starts after")));
    let time = line.and_then(|line| line.split(' ').next()).expect("a time");
    assert!(time.starts_with("20") && time.contains('T') && time.ends_with('Z'), "{time}");
    for command in ["status", "stop", "reset", "console"] {
        let says = "no guest named web1 that runs: it has ended, and `vm-service logs web1`";
        world.refused(&format!("{command} web1"), 1, says);
    }
}

#[test]
fn stop_tells_how_the_guest_ended_whoever_ended_it() {
    if !has_kvm() {
        return;
    }
    let mut world = World::new();
    world.serve();
    // Waits for a byte, and executes what is undefined: in al, dx; test al, 1; jz; ud2.
    let crasher = [0x66, 0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74, 0xf7, 0x0f, 0x0b];
    fs::write(world.path("kernel"), elf(&crasher)).expect("written");
    let check = |world: &mut World, act: &dyn Fn(&World, &Value), how: &str| {
        let guest = world.json("start web1.toml --no-reboot --shutdown-timeout 0.1");
        let stop = world.command("--json stop web1 --deadline 600").stdout(Stdio::piped()).spawn();
        let stop = stop.expect("vm-service");
        world.wait_until("the button", |world| {
            world.json("logs web1")["log"].as_str().is_some_and(|log| log.contains("power button"))
        });
        act(world, &guest);
        let output = stop.wait_with_output().expect("an end");
        let told: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!((told["how"].as_str(), output.status.code()), (Some(how), Some(0)), "{told}");
    };
    let signal = |guest: &Value, signal| kill_process(process_of(guest), signal).expect("sent");
    check(&mut world, &|_, guest| signal(guest, Signal::KILL), "killed");
    check(&mut world, &|_, guest| signal(guest, Signal::TERM), "cut");
    check(&mut world, &|world, _| assert_eq!(world.json("stop web1 --now")["how"], "cut"), "cut");
    check(&mut world, &|world, _| drop(world.json("reset web1")), "reset");
    let types = |guest: &Value| {
        let console = guest["console"].as_str().expect("a console");
        File::options().write(true).open(console).and_then(|mut file| file.write_all(b"x")).expect("typed");
    };
    check(&mut world, &|_, guest| types(guest), "crashed");
}

/// Enables the local APIC, has the power button's line of the I/O APIC raise vector 0x30, waits for that, and powers off.
const LISTENS: &[u8] = &[
    0xbb, 0x00, 0x00, 0xe0, 0xfe, // mov ebx, 0xfee00000
    0xc7, 0x83, 0xf0, 0x00, 0x00, 0x00, 0xff, 0x01, 0x00, 0x00, // mov dword [rbx + 0xf0], 0x1ff
    0xb9, 0x00, 0x00, 0xc0, 0xfe, // mov ecx, 0xfec00000
    0xc7, 0x01, 0x1a, 0x00, 0x00, 0x00, // mov dword [rcx], 0x1a
    0xc7, 0x41, 0x10, 0x30, 0x00, 0x00, 0x00, // mov dword [rcx + 0x10], 0x30
    0x66, 0xba, 0xf8, 0x03, 0xb0, b'!', 0xee, // mov dx, 0x3f8; mov al, '!'; out dx, al
    0x8b, 0x83, 0x10, 0x02, 0x00, 0x00, // mov eax, [rbx + 0x210]
    0xa9, 0x00, 0x00, 0x01, 0x00, 0x74, 0xf3, // test eax, 0x10000; jz -13
    0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee, 0xeb,
    0xfe, // mov dx, 0x600; mov al, 0x34; out dx, al; jmp $
];

/// Powers off at once: mov dx, 0x600; mov al, 0x34; out dx, al; jmp $.
const ENDS: &[u8] = &[0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee, 0xeb, 0xfe];

#[test]
fn a_guest_has_a_cgroup_of_its_own_while_it_runs() {
    if !has_kvm() {
        return;
    }
    let mut world = World::new();
    let daemon = world.serve();
    let cgroup = |process: u32| {
        let groups = fs::read_to_string(format!("/proc/{process}/cgroup")).expect("its cgroups");
        groups.lines().find_map(|line| line.strip_prefix("0::").map(str::to_owned))
    };
    // Other tests have guests of the usual names.
    for name in ["bounded1", "bounded2"] {
        let file = format!("name = \"{name}\"\nmemory = \"4M\"\nboot.kernel = \"kernel\"\n");
        fs::write(world.path(&format!("{name}.toml")), file).expect("written");
    }
    let guest = world.json("start bounded1.toml");
    let keeper = process_of(&guest).as_raw_pid() as u32;
    let (own, daemons) = (cgroup(keeper), cgroup(daemon));
    if own == daemons || Path::new("/run/systemd/system").exists() {
        return println!("skipped: this user can't make cgroups, or systemd makes them");
    }
    let (own, daemons) = (own.expect("a cgroup"), daemons.expect("a cgroup"));
    assert_eq!(own, format!("{}/vm-guest-bounded1", daemons.trim_end_matches('/')));
    assert_eq!(cgroup(child_of(keeper, VMM)).as_ref(), Some(&own), "its VMM is in it, too");
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mounts");
    let mount = mounts.lines().find(|line| line.contains(" - cgroup2 ")).expect("it is mounted");
    let place = format!("{}{own}", mount.split(' ').nth(4).expect("a mount point"));
    assert!(Path::new(&place).exists());
    // The next daemon does not reap the guest's process, and its next start removes what is left.
    world.kill(daemon);
    world.serve();
    world.json("stop bounded1 --now");
    world.json("start bounded2.toml");
    assert!(!Path::new(&place).exists(), "{place} is left");
    let place = place.replace("bounded1", "bounded2");
    world.json("stop bounded2 --now");
    world.wait_until("the cgroup's end", |_| !Path::new(&place).exists());
}

#[test]
fn a_start_that_waits_says_how_the_guest_ended() {
    if !has_kvm() {
        return;
    }
    let mut world = World::new();
    world.serve();
    let mut check = |end: &dyn Fn(&World), how: &str, exit: i32| {
        let waits = world.command("start web1.toml --wait --json").stdout(Stdio::piped()).spawn();
        world.wait_until("web1", |world| world.json("guests")["guests"][0]["state"] == "running");
        end(&world);
        let output = waits.expect("vm-service").wait_with_output().expect("an end");
        let said: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!((said["how"].as_str(), output.status.code()), (Some(how), Some(exit)), "{said}");
    };
    check(&|world| drop(world.json("stop web1 --now")), "cut", 0);
    let kill = |world: &World| {
        let guest = world.json("status web1");
        rustix::process::kill_process(process_of(&guest), Signal::KILL).expect("killed");
    };
    check(&kill, "killed", 1);
    world.refused("start absent.toml --wait", 2, "absent.toml");
    // It may have ended before the daemon saw it run.
    fs::write(world.path("kernel"), elf(ENDS)).expect("written");
    for _ in 0..5 {
        assert_eq!(world.json("start web1.toml --wait")["how"], "orderly");
    }
}

#[test]
fn a_signal_presses_the_power_button_and_a_second_or_the_deadline_cuts_the_power() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let check = |code: &[u8], timeout: &str, signals: &[Signal], says: &[&str], how: &str| {
        fs::write(world.path("kernel"), elf(code)).expect("written");
        let line = format!("--json run web1.toml --console file=screen --shutdown-timeout {timeout}");
        let mut run = world.command(&line);
        let mut run = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("vm-service");
        let process = Pid::from_child(&run);
        let mut log = lines(run.stderr.take().expect("messages"));
        let mut wait_for = |what: &str| assert!(log.any(|line| line.contains(what)), "{what} is not said");
        wait_for("starts after");
        let deadline = Instant::now() + TIMEOUT;
        while code == LISTENS && fs::read(world.path("screen")).unwrap_or_default() != b"!" {
            assert!(Instant::now() < deadline, "the guest does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        for (signal, says) in signals.iter().zip(says) {
            kill_process(process, *signal).expect("sent");
            wait_for(says);
        }
        says[signals.len()..].iter().for_each(|says| wait_for(says));
        // Nothing waits for a reader.
        std::thread::spawn(move || log.for_each(drop));
        let output = run.wait_with_output().expect("an end");
        let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!((report["how"].as_str(), output.status.code()), (Some(how), Some(0)), "{report}");
    };
    let (first, second) = ("pressing the guest's power button", "stopping the guest");
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        check(LISTENS, "600", &[signal], &[first], "orderly");
    }
    check(ECHO, "600", &[Signal::INT, Signal::TERM], &[first, second], "cut");
    check(ECHO, "0.1", &[Signal::TERM], &[first, "has not powered itself off within 0.1 s"], "cut");
    check(ECHO, "0", &[Signal::TERM], &[second], "cut");
}

#[test]
fn guests_that_do_not_answer_are_listed_and_end() {
    if !has_kvm() {
        return;
    }
    let mut world = World::new();
    fs::write(world.path("web3.toml"), "name = \"web3\"\nmemory = \"4M\"\nboot.kernel = \"kernel\"\n")
        .expect("written");
    world.serve();
    for guest in ["web1.toml", "web2.toml", "web3.toml"] {
        let guest = world.json(&format!("start {guest}"));
        if guest["name"] != "web3" {
            kill_process(process_of(&guest), Signal::STOP).expect("sent");
        }
    }
    let guests = world.json("guests");
    let states: Vec<_> =
        guests["guests"].as_array().expect("guests").iter().map(|guest| &guest["state"]).collect();
    assert_eq!(states, ["unresponsive", "unresponsive", "running"]);
    assert_eq!(world.json("stop web1 --now")["how"], "killed");
    assert_eq!(world.json("stop web2 --deadline 1")["how"], "killed");
    assert_eq!(world.json("start web1.toml")["state"], "running");
    assert_eq!(names(&world.json("guests")), ["web1", "web3"]);
    for guest in ["web1", "web3"] {
        assert_eq!(world.json(&format!("stop {guest} --now"))["how"], "cut");
    }
}

#[test]
fn a_vmm_that_hangs_is_seen_and_answers_nobody_until_it_goes_on() {
    if !has_kvm() {
        return;
    }
    let mut world = World::new();
    world.serve();
    let guest = world.json("start web1.toml");
    let mut events = world.command("--json events").stdout(Stdio::piped()).spawn().expect("vm-service");
    let mut told = lines(events.stdout.take().expect("events"));
    let vmm = child_of(guest["pid"].as_u64().expect("a process") as u32, VMM);
    let responds = |world: &World| metric(world, "vm_service_guest_responsive{guest=\"web1\"}");
    assert_eq!(responds(&world), 1.0);
    let spawn = |world: &World, args: &str| {
        world.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("vm-service")
    };
    let becomes = |world: &mut World, state: &str| {
        world.wait_until(state, |world| world.json("status web1")["state"] == state);
        assert_eq!(world.json("guests")["guests"][0]["vcpus"], 1);
    };
    kill(vmm, libc::SIGSTOP);
    let mut reset = spawn(&world, "reset web1");
    becomes(&mut world, "unresponsive");
    assert_eq!(responds(&world), 0.0);
    assert!(reset.try_wait().expect("a process").is_none(), "nothing was reset");
    kill(vmm, libc::SIGCONT);
    let reset = reset.wait_with_output().expect("an end");
    assert_eq!(
        (reset.status.code(), String::from_utf8_lossy(&reset.stdout).as_ref()),
        (Some(0), "web1 was reset\n")
    );
    becomes(&mut world, "running");
    // The last two in either order.
    let mut left = ["unresponsive", "responsive", "reset"].to_vec();
    while !left.is_empty() {
        let line = told.next().expect("an event");
        left.retain(|event| !line.contains(&format!(r#""guest":"web1","event":"{event}""#)));
    }
    events.kill().and_then(|()| events.wait()).expect("ended");
    kill(vmm, libc::SIGSTOP);
    let stop = spawn(&world, "--json stop web1 --now");
    becomes(&mut world, "stopping");
    kill(vmm, libc::SIGCONT);
    let stopped: Value =
        serde_json::from_slice(&stop.wait_with_output().expect("an end").stdout).expect("JSON");
    assert_eq!(stopped["how"], "cut");
}

#[test]
fn a_vmm_that_hangs_as_it_starts_is_seen_and_ends() {
    if !has_kvm() {
        return;
    }
    let mut world = World::new();
    let daemon = world.serve();
    let mut start = world.command("start web1.toml").stderr(Stdio::piped()).spawn().expect("vm-service");
    // It is stopped within the time that it takes to load this program, and to make a machine.
    kill(child_of(child_of(daemon, "run"), VMM), libc::SIGSTOP);
    world.wait_until("web1", |world| names(&world.json("guests")) == ["web1"]);
    assert_eq!(world.json("guests")["guests"][0]["state"], "starting");
    assert!(start.try_wait().expect("a process").is_none(), "it starts");
    world.refused("start web1.toml", 1, "a guest named web1 runs already");
    assert_eq!(world.json("stop web1 --now")["how"], "cut");
    let start = start.wait_with_output().expect("an end");
    let said = String::from_utf8_lossy(&start.stderr);
    assert!(said.contains("did not make the machine within") && start.status.code() == Some(1), "{said}");
    assert_eq!(names(&world.json("guests")), Vec::<&str>::new());
    assert_eq!(world.json("start web1.toml")["state"], "running");
    world.json("stop web1 --now");

    // Nor does one stay that hangs when its keeper is killed. That of the guest before may end behind the answer.
    world.wait_until("the end of other keepers", |_| find_child(daemon, "run").is_none());
    let mut start = world.command("start web1.toml").stderr(Stdio::null()).spawn().expect("vm-service");
    let keeper = child_of(daemon, "run");
    let vmm = child_of(keeper, VMM);
    kill(vmm, libc::SIGSTOP);
    kill(keeper, libc::SIGKILL);
    let lives = |process| fs::read(format!("/proc/{process}/cmdline")).is_ok_and(|line| !line.is_empty());
    world.wait_until("its end", |_| !lives(vmm));
    assert_eq!(start.wait().expect("an end").code(), Some(1));
}

#[test]
fn a_daemon_whose_state_directory_was_removed_ends_and_says_so() {
    let mut world = World::new();
    let daemon = world.serve();
    fs::rename(world.path("state"), world.path("moved")).expect("moved");
    fs::create_dir(world.path("state")).expect("another");
    let at = world.processes.iter().position(|child| child.id() == daemon).expect("the daemon");
    world.wait_until("its end", |world| world.processes[at].try_wait().expect("a process").is_some());
    let said = fs::read_to_string(world.path("messages")).expect("messages");
    assert!(said.contains("state was removed or replaced under the daemon"), "{said}");
    world.serve();
}

/// As many as the daemon serves at once.
#[test]
fn clients_that_never_read_lock_nobody_out() {
    let mut world = World::new();
    world.serve();
    let requests = "GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n".repeat(200);
    let clients: Vec<_> = std::iter::repeat_with(|| {
        let mut client = UnixStream::connect(world.path("state/daemon.sock")).expect("a connection");
        client.write_all(requests.as_bytes()).expect("sent");
        client
    })
    .take(256)
    .collect();
    world.wait_until("an answer to another client", |world| world.run("guests").status.success());
    for mut client in clients {
        client.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
        // All that was sent before the daemon closed the connection: it answers no more.
        let mut answers = Vec::new();
        match client.read_to_end(&mut answers) {
            Err(error) if error.kind() != std::io::ErrorKind::ConnectionReset => {
                panic!("not closed: {error}")
            }
            _ => assert!(answers.starts_with(b"HTTP/1.1 200")),
        }
    }
}

#[test]
fn who_is_not_answered_learns_why() {
    let mut world = World::new();
    let listener = UnixListener::bind(world.path("ends.sock")).expect("a socket");
    let ends = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        assert!(stream.read(&mut [0; 1024]).expect("a request") > 0);
    });
    world.refused("reset web1 --socket ends.sock", 1, "may have been done all the same");
    ends.join().expect("no panic");
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can be another user");
        return;
    }
    world.serve();
    for (path, mode) in [("", 0o755), ("state", 0o755), ("state/daemon.sock", 0o666)] {
        fs::set_permissions(world.path(path), fs::Permissions::from_mode(mode)).expect("a mode");
    }
    let mut guests = world.command("guests");
    let said = guests.uid(65534).gid(65534).output().expect("vm-service");
    let said = String::from_utf8_lossy(&said.stderr);
    assert!(said.contains("it serves root and its own user, 0, and this is user 65534"), "{said}");
}

#[test]
fn a_guest_has_nothing_of_the_daemon_that_it_was_not_given() {
    if !has_kvm() {
        return;
    }
    let mut world = World::new();
    let daemon = world.command("serve");
    // A descriptor that whoever started the daemon left open.
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec 9<&0 </dev/null; exec \"$0\" \"$@\""]).arg(daemon.get_program());
    shell.args(daemon.get_args()).current_dir(world.folder.path()).env("SECRET", "of the daemon");
    let log = File::create(world.path("messages")).expect("a file");
    fs::write(world.path("secret"), "").expect("written");
    let secret = File::open(world.path("secret")).expect("a file");
    let process = shell.stdin(secret).stdout(Stdio::null()).stderr(log).spawn().expect("the daemon");
    world.processes.push(process);
    world.wait_until("the daemon", |world| world.run("guests").status.success());
    let guest = world.json("start web1.toml");
    let of = |file: &str| PathBuf::from(format!("/proc/{}/{file}", guest["pid"]));
    let files = fs::read_dir(of("fd")).expect("its descriptors").flatten();
    let files: Vec<_> = files.filter_map(|file| fs::read_link(file.path()).ok()).collect();
    assert!(!files.is_empty() && files.iter().all(|file| !file.ends_with("secret")), "{files:?}");
    let environment = fs::read_to_string(of("environ")).expect("its environment");
    assert!(environment.contains("PATH=") && !environment.contains("SECRET"), "{environment}");
    assert_eq!(world.json("stop web1 --now")["how"], "cut");
}

#[test]
fn a_guest_that_does_not_start_says_why() {
    if !has_kvm() {
        return;
    }
    let mut world = World::new();
    world.serve();
    let initrd = "name = \"web4\"\nmemory = \"4M\"\nboot = { kernel = \"kernel\", initrd = \"initrd\" }\n";
    fs::write(world.path("web4.toml"), initrd).expect("written");
    File::create(world.path("initrd")).and_then(|file| file.set_len(4 << 20)).expect("a file");
    for command in ["run web4.toml --console none", "start web4.toml"] {
        world.refused(command, 2, "behind the kernel; raise `memory`");
    }
    world.refused("start web2.toml --net tap=vm-none", 1, "vm-none");
    fs::write(world.path("kernel"), "no kernel").expect("written");
    // As `run` says it, with its exit status.
    for command in ["run web1.toml --console none", "start web1.toml"] {
        world.refused(command, 2, "kernel is not a bzImage or an x86-64 ELF program");
    }
    world.refused("start web2.toml --device 0000:ff:1f.7", 1, "0000:ff:1f.7");
    world.refused("start web2.toml --net tap=a --net tap=a", 2, "has the tap of another");
    assert_eq!(names(&world.json("guests")), Vec::<&str>::new());
}

#[test]
fn a_user_who_may_have_no_directory_runs_guests_all_the_same() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can be another user");
        return;
    }
    let world = World::new();
    fs::set_permissions(world.folder.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
    for guests in [false, true] {
        if guests {
            fs::create_dir_all(world.path("state/guests")).expect("root's directory");
        }
        let mut run = world.command("run web1.toml --console none");
        let expect = "other commands do not see the guest";
        let said = says(run.uid(65534).gid(65534), expect);
        assert!(said.contains(expect), "{said}");
    }
}

#[test]
fn a_socket_that_systemd_passes_is_served() {
    let world = World::new();
    let path = world.path("passed.sock");
    let listener = UnixListener::bind(&path).expect("a socket");
    let mut daemon = Command::new("sh")
        .args(["-c", "exec 3<&0 </dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec \"$0\" --state state serve"])
        .arg(env!("CARGO_BIN_EXE_vm-service"))
        .current_dir(world.folder.path())
        .stdin(std::os::fd::OwnedFd::from(listener))
        .stderr(File::create(world.path("messages")).expect("a file"))
        .spawn()
        .expect("a shell");
    // It waits for whoever serves the socket.
    let guests = world.json("guests --socket passed.sock");
    assert_eq!(names(&guests), Vec::<&str>::new());
    kill_process(Pid::from_child(&daemon), Signal::TERM).expect("sent");
    assert!(daemon.wait().expect("an end").success(), "{:?}", fs::read_to_string(world.path("messages")));
    assert!(path.exists(), "the socket is systemd's");
}

/// Requests that mutants are made of.
const SEEDS: [&str; 8] = [
    "GET /v1/guests HTTP/1.1\r\nhost: x\r\n\r\n",
    "PUT /v1/guests/web1?with_group=true&accept=no-reset&backend=group HTTP/1.1\r\nhost: x\r\ncontent-length: 63\r\n\r\n\
     {\"memory\": \"64M\", \"boot\": {\"kernel\": \"/nowhere\"}, \"vcpus\": 2   }",
    "GET /v1/guests/web1 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "POST /v1/guests/web1/stop?deadline_ms=5 HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "PUT /v1/guests/web1/devices/0000:65:00.0 HTTP/1.1\r\nhost: x\r\ncontent-length: 22\r\n\r\n{\"accept\":[\"no-reset\"]}",
    "DELETE /v1/guests/web1/devices/65:00.0?how=surprise&deadline_ms=0 HTTP/1.1\r\nhost: x\r\n\r\n",
    "GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n",
    "GET /metrics HTTP/1.1\r\nhost: x\r\n\r\nGET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n",
];

#[test]
fn ten_thousand_mutated_requests_neither_end_the_daemon_nor_leave_descriptors() {
    const WORDS: &[&str] =
        &["%00", "%2e%2e/", "\r\n", "\r\n\r\n", "[[[[", "\"", "99999999999999999999", "\u{ff}", "null"];
    let mut world = World::new();
    let daemon = world.serve();
    let descriptors = || fs::read_dir(format!("/proc/{daemon}/fd")).expect("descriptors").count();
    let before = descriptors();
    let mut mutator = Mutator::new(0x9e37_79b9_7f4a_7c15);
    for number in 0..10_000 {
        let mut request = SEEDS[mutator.below(SEEDS.len())].as_bytes().to_vec();
        for _ in 0..=mutator.below(4) {
            let other = SEEDS[mutator.below(SEEDS.len())].as_bytes();
            mutator.bytes(&mut request, other, WORDS);
        }
        let mut stream = world.connect();
        // The daemon may close what it does not like before it has all of it.
        let _ = stream.write_all(&request).and_then(|()| stream.shutdown(Shutdown::Write));
        // Events are answered without an end.
        stream.set_read_timeout(Some(Duration::from_millis(10))).expect("a timeout");
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let text = String::from_utf8_lossy(&answer);
        let is_fault = text.lines().any(|line| line.starts_with("HTTP/1.1 5"));
        assert!(
            !is_fault || ["failed", "busy"].iter().any(|code| text.contains(&format!("\"code\":\"{code}\""))),
            "{number}: {:?}: {text}",
            String::from_utf8_lossy(&request)
        );
    }
    assert_eq!(names(&world.json("guests")), Vec::<&str>::new());
    world.wait_until("its descriptors", |_| descriptors() <= before);
    let messages = fs::read_to_string(world.path("messages")).expect("messages");
    assert!(!messages.contains("panicked"), "{messages}");
}
