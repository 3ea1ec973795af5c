//! `egpu status` and `egpu monitor`: what GPUs tell of themselves, in a table, as lines of JSON and on a terminal.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use serde_json::Value;
use vm_passthrough::Host;
use vm_passthrough::sim::{SimFunction, SimHost};

use super::host::address;
use super::{check, check_error, vm_service};

/// A host with an AMD GPU at 03:00.0 behind a tunnel and one at 01:00.0 of its own.
pub(super) fn two_gpus() -> SimHost {
    let sim = SimHost::new().expect("a host");
    sim.write("proc/sys/kernel/osrelease", "6.13.0\n").expect("a release");
    let add = |function: SimFunction| drop(sim.add(&function).expect("a function"));
    add(SimFunction::root_port(address("00:07.0")));
    add_gpu(&sim, "01:00.0", None);
    add_gpu(&sim, "03:00.0", Some("00:07.0"));
    sim.add_domain(0, None, &[("security", "user\n")]).expect("a domain");
    let router = [
        ("authorized", "1\n"),
        ("vendor_name", "Razer\n"),
        ("device_name", "Core X\n"),
        ("unique_id", "d2030000-00a0-751e-a3f4-c0e5ae7b0d30\n"),
        ("rx_speed", "20.0 Gb/s\n"),
        ("rx_lanes", "2\n"),
        ("tx_speed", "20.0 Gb/s\n"),
        ("tx_lanes", "2\n"),
    ];
    sim.add_router("0-1".parse().expect("a route"), &router).expect("a router");
    sim
}

pub(super) fn add_gpu(sim: &SimHost, at: &str, port: Option<&str>) {
    let gpu = SimFunction::new(address(at), 0x1002, 0x744c, 0x03_0000).express(0).link(2_500, 1);
    let gpu = gpu.group(3).driver("amdgpu");
    let gpu = port.into_iter().fold(gpu, |gpu, port| gpu.below(address(port)));
    sim.add(&gpu).expect("a function");
    sim.add_amdgpu(address(at)).expect("files");
    if port.is_some() {
        sim.set(address(at), "removable", "removable\n").expect("written");
    }
}

#[test]
fn a_row_for_each_gpu() {
    let sim = two_gpus();
    let host = sim.plain_host();
    let row = "0000:03:00.0  Advanced Micro Devices, Inc. [AMD/ATI] Navi 31 [Radeon RX 7900 XT/7900 XTX/7900 GRE/7900M]  \
               Razer Core X (inferred)  yes         amdgpu  tunnel, 40 Gb/s  52 °C        87 of 303 W  41 %\n";
    let heading = |rest: &str| format!("{:<14}{:<92}{rest}\n", "ADDRESS", "NAME");
    let first = heading(
        "ENCLOSURE                AUTHORISED  DRIVER  LINK             TEMPERATURE  POWER        BUSY",
    );
    check(&host, "egpu status", &(first + row));
    let all = vm_service(&host, "egpu s --all").out;
    let addresses: Vec<_> =
        all.lines().skip(1).map(|line| line.split(' ').next().unwrap_or_default()).collect();
    assert_eq!(addresses, ["0000:03:00.0", "0000:01:00.0"], "those behind a tunnel come first");
    assert!(all.contains("2.5 GT/s x1"), "without a tunnel PCI Express is what it says: {all}");
    let one = vm_service(&host, "egpu status 01:00.0").out;
    assert!(one.contains("0000:01:00.0") && !one.contains("0000:03:00.0"), "{one}");
    let json: Value = serde_json::from_str(&vm_service(&host, "egpu status --json").out).expect("JSON");
    let gpu = &json["gpus"][0];
    assert_eq!(
        (&gpu["enclosure"], &gpu["authorized"], &gpu["state"]),
        (&"Razer Core X".into(), &"yes".into(), &"there".into())
    );
    let told = &gpu["telemetry"];
    assert_eq!(
        (&told["source"], &told["hot_spot_celsius"], &told["fan_rpm"]),
        (&"amdgpu".into(), &63.0.into(), &1180.into())
    );
    assert_eq!((&told["link"]["receive_megabits"], &told["link"]["speed"]), (&40_000.into(), &Value::Null));

    // Of one that no driver has it is said why nothing is known, and of one at a guest who has it.
    sim.set_driver(address("03:00.0"), None).expect("unbound");
    let shown = vm_service(&host, "egpu status").out;
    assert!(shown.contains("no driver has it"), "{shown}");
    check_error(
        &host,
        "egpu status 00:07.0",
        2,
        "0000:00:07.0 Intel Corporation 7500/5520/5500/X58 I/O Hub PCI Express Root Port 0 is no GPU; `vm-service egpu status --all` lists those of this host",
    );
    check_error(
        &host,
        "egpu status 07:00.0",
        1,
        "there is no PCI function 0000:07:00.0 on this host; `vm-service list --all` shows those that there are",
    );
    sim.remove(address("03:00.0")).expect("removed");
    check(&host, "egpu status", "no GPU is behind a tunnel; with `--all` every GPU of the host is meant\n");
    sim.remove(address("01:00.0")).expect("removed");
    let none = "this host has no GPUs; `vm-service list --all` lists every PCI function\n";
    check(&host, "egpu status --all", none);
    check_error(&host, "egpu monitor --all --json", 1, none.trim_end());
}

/// `vm-service egpu --root SIM ARGS`.
fn command(sim: &SimHost, args: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
    command.args(["egpu", "--root"]).arg(sim.root()).args(args.split_whitespace()).env_remove("RUST_LOG");
    command
}

#[test]
fn a_line_of_json_for_each_reading() {
    let sim = two_gpus();
    // Each change is made once the line before it was read, and seen in one that comes.
    let child = command(&sim, "monitor --all -i 50 --json").stdout(Stdio::piped()).spawn();
    let mut child = child.expect("vm-service");
    let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
    let mut until = |is: &dyn Fn(&Value) -> bool| -> Value {
        loop {
            let line = lines.next().expect("a line").expect("text");
            let value: Value = serde_json::from_str(&line).expect("JSON");
            assert_eq!(value["command"], "egpu-monitor");
            assert_eq!(value["gpus"].as_array().map(Vec::len), Some(2), "none loses its place: {line}");
            if is(&value) {
                return value;
            }
        }
    };
    let first = until(&|_| true);
    assert_eq!(
        (&first["elapsed_seconds"], &first["gpus"][0]["rates"]["correctable"]),
        (&Value::Null, &Value::Null)
    );
    let rate = until(&|value| value["gpus"][0]["rates"]["correctable"] == 0.0);
    assert!(rate["elapsed_seconds"].as_f64() > Some(0.0), "{rate}");
    let aer = |total: u64| format!("RxErr {total}\nTOTAL_ERR_COR {total}\n");
    sim.set(address("03:00.0"), "aer_dev_correctable", &aer(5)).expect("written");
    let rise = until(&|value| value["gpus"][0]["alarms"][0] == "errors on PCI Express rise: 5 correctable");
    assert!(rise["gpus"][0]["rates"]["correctable"].as_f64() > Some(0.0), "{rise}");
    sim.remove(address("03:00.0")).expect("removed");
    let gone = until(&|value| value["gpus"][0]["state"] == "gone");
    assert_eq!(
        (&gone["gpus"][0]["alarms"][0], &gone["gpus"][1]["state"]),
        (&"the GPU is gone".into(), &"there".into())
    );
    add_gpu(&sim, "03:00.0", Some("00:07.0"));
    let back = until(&|value| value["gpus"][0]["telemetry"]["busy_percent"] == 41);
    assert_eq!(back["gpus"][0]["alarms"], serde_json::json!([]));
    // Who has had enough of it ends it.
    drop(lines);
    assert!(child.wait().expect("its end").success());
    let counted = vm_service(&sim.plain_host(), "egpu m -n 3 -i 50 --json");
    assert_eq!((counted.exit, counted.out.lines().count()), (0, 3));
}

#[test]
fn what_can_not_be_watched() {
    let sim = two_gpus();
    for bad in ["-i 49", "-i 3600001", "-i -1", "-i x", "-n 0", "--interval 1e3", "03:00.0 --all", "gpu0"] {
        assert_eq!(vm_service(&sim.plain_host(), &format!("egpu monitor --json {bad}")).exit, 2, "{bad}");
    }
    // Without a terminal it says what to do instead.
    let output = command(&sim, "monitor").stdin(Stdio::null()).output().expect("vm-service");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("a screen needs a terminal") && error.contains("`--json`"), "{error}");
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0));
}

/// A program on a terminal.
struct OnTerminal {
    controller: Option<File>,
    terminal: OwnedFd,
    child: Child,
    shown: String,
    /// How much of that was waited for.
    seen: usize,
}

const DEADLINE: Duration = Duration::from_secs(60);

impl OnTerminal {
    fn start(sim: &SimHost, args: &str, columns: u16, rows: u16) -> Self {
        let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)
            .expect("a pseudo-terminal");
        unlockpt(&controller).expect("unlocked");
        let name = ptsname(&controller, Vec::new()).expect("a name");
        let terminal = rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())
            .expect("the terminal");
        resize(&terminal, columns, rows);
        let end = || terminal.try_clone().expect("a descriptor");
        let mut command = command(sim, args);
        let child = command.env("TERM", "xterm").stdin(end()).stdout(end()).stderr(end()).spawn();
        let child = child.expect("vm-service");
        Self { controller: Some(File::from(controller)), terminal, child, shown: String::new(), seen: 0 }
    }

    /// Reads until this was shown, behind what was waited for before. A word, as spaces are passed over.
    fn until(&mut self, part: &str) {
        let mut bytes = [0; 65536];
        let wait = Timespec { tv_sec: DEADLINE.as_secs() as i64, tv_nsec: 0 };
        loop {
            if let Some(at) = self.shown[self.seen..].find(part) {
                self.seen += at + part.len();
                return;
            }
            let controller = self.controller.as_mut().expect("it is there");
            let ready = poll(&mut [PollFd::new(controller, PollFlags::IN)], Some(&wait)).expect("waited for");
            assert!(ready > 0, "it does not show {part:?}: {}", self.shown);
            let read = controller.read(&mut bytes).expect("readable");
            self.shown += &String::from_utf8_lossy(&bytes[..read]);
        }
    }

    fn type_(&mut self, keys: &[u8]) {
        self.controller.as_mut().expect("it is there").write_all(keys).expect("typed");
    }

    fn is_raw(&self) -> bool {
        let modes = tcgetattr(&self.terminal).expect("the mode").local_modes;
        !modes.intersects(LocalModes::ICANON | LocalModes::ECHO)
    }

    fn ended(&mut self) -> ExitStatus {
        let until = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.child.try_wait().expect("its state") {
                return status;
            }
            assert!(Instant::now() < until, "it does not end: {}", self.shown);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for OnTerminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn resize(terminal: &OwnedFd, columns: u16, rows: u16) {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(terminal, size).expect("a size");
}

const BEGIN: &str = "\u{1b}[?1049h";
const END: &str = "\u{1b}[?1049l";

#[test]
fn the_terminal_is_given_back_on_every_way_out() {
    let sim = two_gpus();
    let kill = |monitor: &OnTerminal, signal| {
        let pid = Pid::from_child(&monitor.child);
        kill_process(pid, signal).expect("sent");
    };
    let check = |what: &str, args: &str, end: &dyn Fn(&mut OnTerminal)| {
        let mut monitor = OnTerminal::start(&sim, args, 120, 30);
        monitor.until(BEGIN);
        monitor.until("Razer");
        if what != "it has counted" {
            assert!(monitor.is_raw(), "{what}");
        }
        end(&mut monitor);
        monitor.until(END);
        // The cursor is seen again.
        monitor.until("\u{1b}[?25h");
        let status = monitor.ended();
        assert!(status.success(), "{what}: {status:?} {:?}", status.signal());
        assert!(!monitor.is_raw(), "{what}");
    };
    check("q", "monitor -i 3600000", &|monitor| monitor.type_(b"xq"));
    check("Ctrl-C", "monitor -i 50", &|monitor| monitor.type_(b"\x03"));
    check("SIGTERM", "monitor -i 3600000", &|monitor| kill(monitor, Signal::TERM));
    check("SIGINT", "monitor -i 50", &|monitor| kill(monitor, Signal::INT));
    check("SIGHUP", "monitor -i 50", &|monitor| kill(monitor, Signal::HUP));
    check("it has counted", "monitor -i 50 -n 2", &|_| ());
    check("the GPU is gone", "monitor -i 50", &|monitor| {
        let tunnelled = address("03:00.0");
        sim.remove(tunnelled).expect("removed");
        monitor.until("gone");
        add_gpu(&sim, "03:00.0", Some("00:07.0"));
        monitor.until("GiB");
        monitor.type_(b"q");
    });
    check("resized", "monitor -i 3600000", &|monitor| {
        for (columns, rows) in [(1, 1), (0, 0), (20, 3), (500, 200), (120, 30)] {
            resize(&monitor.terminal, columns, rows);
            kill(monitor, Signal::WINCH);
        }
        monitor.until("quit");
        monitor.type_(b"\x1b[B\x1b[A\x0cq");
    });
}

#[test]
fn a_terminal_that_vanishes_ends_it() {
    let sim = two_gpus();
    for interval in ["50", "3600000"] {
        let mut monitor = OnTerminal::start(&sim, &format!("monitor -i {interval}"), 80, 25);
        monitor.until("Razer");
        drop(monitor.controller.take());
        let status = monitor.ended();
        assert_eq!(status.code(), Some(1), "every {interval} ms: {status:?}");
    }
    // One that nobody reads from does not keep it from ending. Enough frames of it for any buffer are drawn by then.
    let mut monitor = OnTerminal::start(&sim, "monitor -i 50", 500, 200);
    monitor.until(BEGIN);
    for size in 0..100 {
        resize(&monitor.terminal, 400 + size, 200);
        kill_process(Pid::from_child(&monitor.child), Signal::WINCH).expect("sent");
        std::thread::sleep(Duration::from_millis(10));
    }
    kill_process(Pid::from_child(&monitor.child), Signal::TERM).expect("sent");
    monitor.ended();
    assert!(!monitor.is_raw());
}

#[test]
fn a_host_that_is_simulated_is_said_to_be() {
    let folder = tempfile::tempdir().expect("a folder");
    let lab = folder.path().join("lab");
    let got = vm_service(&Host::system(), &format!("egpu status --all --json --sim {}", lab.display()));
    let json: Value = serde_json::from_str(&got.out).expect("JSON");
    assert_eq!((got.exit, &json["simulated"]), (0, &Value::Bool(true)), "{got:?}");
    let gpus = json["gpus"].as_array().expect("GPUs");
    let amd = gpus.iter().find(|gpu| gpu["driver"] == "amdgpu").expect("an AMD GPU");
    assert_eq!(
        (&amd["telemetry"]["source"], &amd["telemetry"]["busy_percent"]),
        (&"amdgpu".into(), &41.into())
    );
}
