//! `attach` to a guest that runs on a simulated host, by way of a daemon. The guest needs this machine's `/dev/kvm`; where that does
//! not open, the test says so and passes.

#[path = "../shared/elf.rs"]
mod elf;

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;
use vm_passthrough::Host;
use vm_passthrough::sim::{SimDrivers, SimHost};

use super::host::{address, workstation};
use super::vm_service;

const TIMEOUT: Duration = Duration::from_secs(120);

/// hlt; jmp to it.
const SLEEPS: &[u8] = &[0xf4, 0xeb, 0xfd];

/// A daemon, which is killed when the test ends.
struct Daemon(Child);

impl Daemon {
    /// Starts one that keeps its state where the simulated host does.
    fn start(host: &Host) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
        command.arg("--state").arg(&host.state).args(["--log-dir", "", "serve"]);
        let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Self(quiet.spawn().expect("a daemon"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Both fail only on a process that has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Cuts the guest's power when the test ends, which waits for the guest's thread.
struct Guest<'a>(&'a Host);

impl Drop for Guest<'_> {
    fn drop(&mut self) {
        drop(vm_service(self.0, "stop a --now"));
    }
}

fn wait_until(what: &str, done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < TIMEOUT, "{what} takes too long");
        sleep(Duration::from_millis(5));
    }
}

/// Asks the daemon's API to attach a device.
fn put(host: &Host, device: &str) -> Value {
    let mut stream = UnixStream::connect(host.state.join("daemon.sock")).expect("a connection");
    let request = format!(
        "PUT /v1/guests/a/devices/{device} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).expect("written");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (_, body) = answer.split_once("\r\n\r\n").expect("a body");
    serde_json::from_str(body).expect("JSON")
}

/// Has the host use the disk, the network card and the GPU.
fn use_devices(sim: &SimHost) {
    let disk = address("02:00.0");
    sim.add_child(disk, "block", "nvme/nvme0/nvme0n1", &[("dev", "259:0\n")]).expect("a disk");
    sim.write("proc/self/mountinfo", "29 1 259:0 / / rw,relatime - ext4 /dev/nvme0n1 rw\n").expect("written");
    sim.add_child(address("03:00.0"), "net", "net/eth0", &[]).expect("an interface");
    let route = "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n";
    sim.write("proc/net/route", &format!("Iface Destination\n{route}")).expect("written");
    sim.set(address("01:00.0"), "boot_vga", "1\n").expect("written");
}

/// `attach`, the API, `explain --guest` and `run` report the same blockers of a device.
#[test]
fn attach_reports_every_blocker_as_run_and_explain_do() {
    check_reports(1);
}

#[test]
fn attach_reports_every_blocker_although_no_slot_is_free() {
    check_reports(0);
}

fn check_reports(slots: u8) {
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        println!("skipped: /dev/kvm does not open: {error}");
        return;
    }
    let sim = workstation();
    use_devices(&sim);
    let drivers = SimDrivers::new(&sim);
    let host = drivers.host();
    symlink("/dev/kvm", host.dev.join("kvm")).expect("a link");
    let write = |name: &str, text: &str| std::fs::write(sim.path(name), text).expect("written");
    std::fs::write(sim.path("kernel"), elf::elf(SLEEPS)).expect("written");
    let guest = format!("memory = \"64M\"\nboot.kernel = \"kernel\"\nhot_plug_slots = {slots}\n");
    write("a.toml", &format!("name = \"a\"\n{guest}"));
    let file = |name: &str| sim.path(name).display().to_string();
    let _daemon = Daemon::start(&host);
    wait_until("the daemon", || vm_service(&host, "guests").exit == 0);
    std::thread::scope(|scope| {
        let ran = scope.spawn(|| vm_service(&host, &format!("run {} --console none", file("a.toml"))));
        let guest_runs = Guest(&host);
        let is_up = || vm_service(&host, "--json status a").out.contains("\"running\"");
        wait_until("the guest", || is_up() || ran.is_finished());
        let expected: [(&str, &[&str]); 3] = [
            ("0000:02:00.0", &["mounted-disk"]),
            ("0000:03:00.0", &["default-route"]),
            ("0000:01:00.0", &["boot-display"]),
        ];
        for (device, codes) in expected {
            let attached = vm_service(&host, &format!("attach {device} --guest a"));
            assert_eq!((attached.exit, attached.out.as_str()), (3, ""), "{}", attached.err);
            assert_eq!(attached.err.contains("no hot-plug slot"), slots == 0, "{}", attached.err);
            let explained = vm_service(&host, &format!("explain {device} --guest {}", file("a.toml")));
            write("b.toml", &format!("name = \"b\"\n{guest}\n[[devices]]\naddress = \"{device}\"\n"));
            let run = vm_service(&host, &format!("run {} --console none", file("b.toml")));
            let said = put(&host, device);
            assert_eq!(said["code"], "blocked", "{said}");
            let told = said["blockers"][0]["blockers"].as_array().expect("blockers");
            let told: Vec<_> = told.iter().filter(|found| found["severity"] == "blocker").collect();
            for code in codes {
                assert!(told.iter().any(|found| found["code"] == *code), "{code}: {said}");
            }
            // The report has the VMM's limit as well as the host's use of the device.
            for finding in told.iter().filter(|found| found["code"] != "memlock-too-low") {
                for text in ["evidence", "remedy"].map(|part| finding[part].as_str().expect("a text")) {
                    let reports = [("attach", &attached.err), ("explain", &explained.out), ("run", &run.err)];
                    for (command, report) in reports {
                        assert!(report.contains(text), "{command} of {device} lacks {text}: {report}");
                    }
                }
            }
        }
        assert_eq!(drivers.writes(), []);
        drop(guest_runs);
        let ran = ran.join().expect("no panic");
        assert_eq!(ran.exit, 0, "{}", ran.err);
    });
}
