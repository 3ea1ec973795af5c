//! What `egpu monitor` costs: the processor time of its screen, at a pseudo-terminal, and of its JSON, every 500 ms, of a host with two
//! GPUs, one of them in an enclosure. Beside them in the same run `top -d 0.5`, and `nvtop` where it is in `PATH` and finds a GPU.
//!
//! The host is files: a driver that has to ask its GPU takes longer to be read from, and its time is that of the Linux kernel.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use vm_passthrough::PciAddress;
use vm_passthrough::sim::{SimFunction, SimHost};

/// Rounds, of which the median and the range are reported; all programs run beside each other in each.
const ROUNDS: usize = 5;
/// How long each is measured.
const LENGTH: Duration = Duration::from_secs(20);
/// How long each has to start, which is not measured.
const START: Duration = Duration::from_secs(2);
/// Percent of a core that the monitor may take.
const MOST: f64 = 1.0;

/// A program under way.
struct Running {
    child: Child,
    /// Of which nothing is read but by a thread.
    _terminal: Option<OwnedFd>,
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail only when it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a program at a terminal of 120 by 40 characters, whose output a thread takes.
fn on_terminal(mut command: Command) -> Option<Running> {
    let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a pty");
    unlockpt(&controller).expect("unlocked");
    let name = ptsname(&controller, Vec::new()).expect("a name");
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let terminal = rustix::fs::open(name, flags, Mode::empty()).expect("the terminal");
    tcsetwinsize(&terminal, Winsize { ws_row: 40, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 }).expect("a size");
    let end = || terminal.try_clone().expect("a descriptor");
    let child =
        command.env("TERM", "xterm-256color").stdin(end()).stdout(end()).stderr(end()).spawn().ok()?;
    thread::spawn(move || take(File::from(controller)));
    Some(Running { child, _terminal: Some(terminal) })
}

fn on_pipe(mut command: Command) -> Option<Running> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().ok()?;
    let output = child.stdout.take()?;
    thread::spawn(move || take(output));
    Some(Running { child, _terminal: None })
}

fn take(mut from: impl std::io::Read) {
    let mut bytes = [0; 1 << 16];
    while from.read(&mut bytes).is_ok_and(|read| read > 0) {}
}

/// The processor time of a process so far, all its threads together (proc_pid_stat(5), utime and stime).
fn time_of(running: &Running) -> Option<Duration> {
    let mut text = String::new();
    let path = format!("/proc/{}/stat", running.child.id());
    File::open(path).ok()?.read_to_string(&mut text).ok()?;
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    if fields.first() == Some(&"Z") {
        return None;
    }
    let ticks: u64 = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    Some(Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64))
}

/// A host with two GPUs of amdgpu, one of them in an enclosure.
fn host() -> SimHost {
    let at = |text: &str| text.parse::<PciAddress>().expect("an address");
    let sim = SimHost::new().expect("a host");
    let add = |function: SimFunction| drop(sim.add(&function).expect("a function"));
    add(SimFunction::root_port(at("00:07.0")));
    let gpu = |at| SimFunction::new(at, 0x1002, 0x744c, 0x03_0000).express(0).group(7).driver("amdgpu");
    add(gpu(at("01:00.0")).link(16_000, 16));
    add(gpu(at("03:00.0")).below(at("00:07.0")));
    for address in ["01:00.0", "03:00.0"] {
        sim.add_amdgpu(at(address)).expect("files");
    }
    sim.set(at("03:00.0"), "removable", "removable\n").expect("written");
    sim.add_domain(0, None, &[("security", "user\n")]).expect("a domain");
    let router = [
        ("authorized", "1\n"),
        ("vendor_name", "Razer\n"),
        ("device_name", "Core X\n"),
        ("generation", "3\n"),
        ("rx_speed", "20.0 Gb/s\n"),
        ("rx_lanes", "2\n"),
        ("tx_speed", "20.0 Gb/s\n"),
        ("tx_lanes", "2\n"),
    ];
    sim.add_router("0-1".parse().expect("a route"), &router).expect("a router");
    sim
}

fn main() {
    // `cargo test` runs it without this argument, to see that it starts.
    let is_measured = std::env::args().any(|argument| argument == "--bench");
    let (rounds, length) = if is_measured { (ROUNDS, LENGTH) } else { (1, Duration::from_millis(100)) };
    let sim = host();
    let program = Path::new(env!("CARGO_BIN_EXE_vm-service"));
    let monitor = |options: &[&str]| {
        let mut command = Command::new(program);
        command
            .args(["egpu", "--root"])
            .arg(sim.root())
            .args(["monitor", "--all", "-i", "500"])
            .args(options);
        command
    };
    let peer = |name: &str, options: &[&str]| {
        let mut command = Command::new(name);
        command.args(options);
        command
    };
    let mut shares: Vec<(&str, Vec<f64>)> = Vec::new();
    for _ in 0..rounds {
        let started = [
            ("egpu monitor, a screen", on_terminal(monitor(&[]))),
            ("egpu monitor, JSON", on_pipe(monitor(&["--json"]))),
            ("top, a screen", on_terminal(peer("top", &["-d", "0.5"]))),
            ("nvtop, a screen", on_terminal(peer("nvtop", &["-d", "5"]))),
        ];
        thread::sleep(START);
        let before: Vec<_> = started.iter().map(|(_, running)| running.as_ref().and_then(time_of)).collect();
        let begun = Instant::now();
        thread::sleep(length);
        for ((name, running), before) in started.iter().zip(before) {
            let Some(used) = running.as_ref().and_then(time_of).zip(before) else { continue };
            let share = (used.0 - used.1).as_secs_f64() / begun.elapsed().as_secs_f64() * 100.0;
            match shares.iter_mut().find(|(other, _)| other == name) {
                Some((_, all)) => all.push(share),
                None => shares.push((name, vec![share])),
            }
        }
    }
    println!(
        "percent of a core, every 500 ms, over {} s, {rounds} times: median (range)",
        length.as_secs_f64()
    );
    for (name, all) in &mut shares {
        all.sort_by(f64::total_cmp);
        let (first, median, last) = (all[0], all[all.len() / 2], all[all.len() - 1]);
        println!("{name}: {median:.2} ({first:.2}..{last:.2})");
        let is_ours = name.starts_with("egpu monitor");
        assert!(!is_measured || !is_ours || median <= MOST, "{name} takes more than {MOST} %");
    }
    assert!(shares.len() >= 2, "the monitor did not run");
}
