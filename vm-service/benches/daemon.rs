//! What the daemon answers in a second and how fast, how soon it finds its guests after it was killed, and the memory that it and
//! a guest take. Beside it, where `cloud-hypervisor` is in `PATH`, what that answers of its one guest in the same run.
//!
//! The guests are bare ones on `/dev/kvm`, which have halted.

#[path = "../tests/shared/elf.rs"]
mod elf;

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use elf::elf;
use serde_json::Value;

/// Rounds, of which the median and the range are reported; ours and the peer's take turns.
const ROUNDS: usize = 7;
/// Requests of a round, on each of its connections.
const REQUESTS: usize = 2_000;
const TIMEOUT: Duration = Duration::from_secs(60);
/// cli; hlt; jmp to the halt.
const HALT: &[u8] = &[0xfa, 0xf4, 0xeb, 0xfd];

/// A process that ends with this.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail only when it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(command: &mut Command) -> Running {
    Running(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("a program that starts"))
}

/// Ends the guests that a daemon has started.
struct Guests<'a, F: Fn(&str) -> Command>(&'a F, [&'a str; 2]);

impl<F: Fn(&str) -> Command> Drop for Guests<'_, F> {
    fn drop(&mut self) {
        for guest in self.1 {
            // It fails when the guest has ended, or never started.
            let _ = self.0(&format!("stop {guest} --now")).output();
        }
    }
}

/// Waits until something holds, and answers how long it took.
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) -> Duration {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < TIMEOUT, "{what} takes too long");
        thread::sleep(Duration::from_millis(1));
    }
    begun.elapsed()
}

/// A connection that is kept for many requests.
struct Connection(BufReader<UnixStream>);

impl Connection {
    fn open(socket: &Path) -> Option<Self> {
        let stream = UnixStream::connect(socket).ok()?;
        stream.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
        Some(Self(BufReader::new(stream)))
    }

    fn send(&mut self, method: &str, path: &str, body: &str) {
        let length = body.len();
        let request =
            format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n{body}");
        self.0.get_mut().write_all(request.as_bytes()).expect("sent");
    }

    /// The body of the answer, which must be a good one.
    fn answer(&mut self) -> Vec<u8> {
        let (mut line, mut length) = (String::new(), 0);
        self.0.read_line(&mut line).expect("a status");
        assert!(line.contains(" 200 ") || line.contains(" 204 "), "{line}");
        while line != "\r\n" {
            line.clear();
            assert_ne!(self.0.read_line(&mut line).expect("a header"), 0, "half an answer");
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().expect("a number");
            }
        }
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).expect("a body");
        body
    }

    fn get(&mut self, path: &str) -> Vec<u8> {
        self.send("GET", path, "");
        self.answer()
    }
}

/// Times of requests, from the shortest to the longest, and how many were answered in a second.
struct Load {
    per_second: f64,
    times: Vec<Duration>,
}

impl Load {
    fn of(socket: &Path, path: &str, connections: usize) -> Self {
        let begun = Instant::now();
        let mut times: Vec<_> = thread::scope(|scope| {
            let request = || {
                let mut connection = Connection::open(socket).expect("a connection");
                let timed = |_| {
                    let begun = Instant::now();
                    connection.get(path);
                    begun.elapsed()
                };
                (0..REQUESTS).map(timed).collect::<Vec<_>>()
            };
            let clients: Vec<_> = (0..connections).map(|_| scope.spawn(request)).collect();
            clients.into_iter().flat_map(|client| client.join().expect("answers")).collect()
        });
        let per_second = times.len() as f64 / begun.elapsed().as_secs_f64();
        times.sort_unstable();
        Self { per_second, times }
    }

    fn percentile(&self, percent: usize) -> f64 {
        self.times[(self.times.len() - 1) * percent / 100].as_secs_f64() * 1e6
    }
}

/// The median, and from what to what.
fn spread(mut of: Vec<f64>) -> String {
    of.sort_by(f64::total_cmp);
    format!("{:.0} ({:.0}-{:.0})", of[of.len() / 2], of[0], of[of.len() - 1])
}

fn report(who: &str, connections: usize, loads: &[Load]) {
    let of = |figure: fn(&Load) -> f64| spread(loads.iter().map(figure).collect());
    println!(
        "{who}, {connections} connections: {} requests/s, p50 {} us, p99 {} us",
        of(|load| load.per_second),
        of(|load| load.percentile(50)),
        of(|load| load.percentile(99))
    );
}

/// KiB that a process alone has, and its share of what it has with others.
fn memory(process: u64) -> (u64, u64) {
    let rollup = fs::read_to_string(format!("/proc/{process}/smaps_rollup")).expect("a process of ours");
    let of = |name: &str| {
        let line = rollup.lines().find_map(|line| line.strip_prefix(name)).expect("a known field");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number")
    };
    (of("Pss_Anon:"), of("Pss:"))
}

/// Processes that a process has started, and those that they have.
fn descendants(process: u64) -> Vec<u64> {
    let children = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let children = children.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let children: Vec<u64> = children
        .flat_map(|list| {
            list.split_whitespace().map(|child| child.parse().expect("a number")).collect::<Vec<_>>()
        })
        .collect();
    children.into_iter().flat_map(|child| [vec![child], descendants(child)].concat()).collect()
}

/// cloud-hypervisor with a guest that was not booted, as it boots none of these, and its socket.
fn peer(folder: &Path) -> Option<(Running, PathBuf)> {
    let socket = folder.join("peer.sock");
    let mut command = Command::new("cloud-hypervisor");
    command.arg("--api-socket").arg(&socket).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = command.spawn().inspect_err(|error| println!("no peer: cloud-hypervisor: {error}"));
    let child = Running(child.ok()?);
    wait_until("cloud-hypervisor", || Connection::open(&socket).is_some());
    let guest = r#"{"payload": {"kernel": "kernel"}, "memory": {"size": 16777216}}"#;
    let mut connection = Connection::open(&socket)?;
    connection.send("PUT", "/api/v1/vm.create", guest);
    connection.answer();
    Some((child, socket))
}

fn main() {
    if let Err(error) = fs::File::options().read(true).write(true).open("/dev/kvm") {
        println!("skipped: /dev/kvm does not open: {error}");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path();
    fs::write(path.join("kernel"), elf(HALT)).expect("written");
    let socket = path.join("state/daemon.sock");
    let command = |args: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
        command.args(["--state", "state"]).args(args.split_whitespace()).current_dir(path);
        command
    };
    let run = |args: &str| {
        let output = command(args).output().expect("vm-service");
        assert!(output.status.success(), "{args}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let answers = || Connection::open(&socket).is_some();
    let mut daemon = start(&mut command("serve"));
    wait_until("the daemon", answers);
    let guests = ["web1", "web2"];
    // Before the daemon, which has to be there for it.
    let _guests = Guests(&command, guests);
    for guest in guests {
        let file = format!("{guest}.toml");
        let text = format!("name = \"{guest}\"\nmemory = \"4M\"\nboot.kernel = \"kernel\"\n");
        fs::write(path.join(&file), text).expect("written");
        run(&format!("start {file}"));
    }

    let list = || {
        let body = Connection::open(&socket).map(|mut connection| connection.get("/v1/guests"));
        serde_json::from_slice::<Value>(&body.unwrap_or_default()).unwrap_or_default()
    };
    let found = || list().as_array().is_some_and(|found| found.len() == guests.len());
    let restarts = (0..ROUNDS).map(|_| {
        daemon.0.kill().and_then(|()| daemon.0.wait()).expect("killed");
        daemon = start(&mut command("serve"));
        wait_until("the guests", found).as_secs_f64() * 1e3
    });
    println!("from the daemon's start until its guests are found: {} ms", spread(restarts.collect()));

    let peer = peer(path);
    for connections in [1, 8] {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            ours.push(Load::of(&socket, "/v1/guests/web1", connections));
            theirs.extend(peer.as_ref().map(|(_, socket)| Load::of(socket, "/api/v1/vm.info", connections)));
        }
        report("GET /v1/guests/web1", connections, &ours);
        if !theirs.is_empty() {
            report("cloud-hypervisor's vm.info", connections, &theirs);
            let ratios = ours
                .iter()
                .zip(&theirs)
                .map(|(ours, theirs)| 100.0 * ours.percentile(50) / theirs.percentile(50));
            println!("ratio of the p50s: {} %", spread(ratios.collect()));
        }
    }

    let tell = |what: &str, processes: &[u64]| {
        let of = processes.iter().map(|&process| memory(process));
        let (own, all) = of.fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
        println!(
            "{what}: {own} KiB of its own, {all} KiB with its share of files; processes: {}",
            processes.len()
        );
    };
    tell("memory of the daemon", &[u64::from(daemon.0.id())]);
    for guest in list().as_array().expect("guests") {
        let process = guest["pid"].as_u64().expect("a process");
        tell("memory of a guest with 4 MiB of RAM", &[vec![process], descendants(process)].concat());
    }
    if let Some((peer, _)) = &peer {
        tell("memory of cloud-hypervisor", &[u64::from(peer.0.id())]);
    }
}
