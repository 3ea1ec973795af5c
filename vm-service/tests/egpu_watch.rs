//! `egpu watch`, as a process of its own, on a simulated host.

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const SOON: Duration = Duration::from_secs(60);
const GPU: &str = "0000:32:00.0";

/// A simulated host, with an enclosure that is connected.
struct Lab {
    dir: TempDir,
}

impl Lab {
    fn new() -> Self {
        let lab = Self { dir: tempfile::tempdir().expect("a folder") };
        lab.does(&["egpu", "connect"]);
        lab
    }

    fn sim(&self) -> PathBuf {
        self.dir.path().join("lab")
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
        command.args(args).arg("--sim").arg(self.sim()).arg("--log-dir").arg(self.dir.path().join("log"));
        command
    }

    fn output(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("it runs")
    }

    fn does(&self, args: &[&str]) -> String {
        let output = self.output(args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn router(&self, name: &str) -> PathBuf {
        self.sim().join("sys/bus/thunderbolt/devices").join(name)
    }

    fn is_authorised(&self) -> bool {
        std::fs::read_to_string(self.router("0-1").join("authorized")).expect("read") == "1\n"
    }

    fn inject(&self, fault: &str) {
        let words: Vec<&str> = ["egpu", "inject"].into_iter().chain(fault.split(' ')).collect();
        self.does(&words);
    }

    /// What the log has of USB4.
    fn records(&self) -> String {
        let mut log = Command::new(env!("CARGO_BIN_EXE_vm-service"));
        log.args(["egpu", "log", "--json", "--category", "USB4", "--log-dir"])
            .arg(self.dir.path().join("log"));
        let output = log.output().expect("it runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Has a process of the host use the GPU, and returns its directory in procfs.
    fn use_gpu(&self) -> PathBuf {
        let node = self.sim().join("sys/bus/pci/devices").join(GPU).join("drm/card0");
        std::fs::create_dir_all(&node).expect("made");
        std::fs::write(node.join("dev"), "226:0\n").expect("written");
        std::fs::write(node.join("uevent"), "DEVNAME=dri/card0\n").expect("written");
        let process = self.sim().join("proc/4711");
        std::fs::create_dir_all(process.join("fd")).expect("made");
        symlink(self.sim().join("dev/dri/card0"), process.join("fd/3")).expect("linked");
        process
    }

    /// Another enclosure, behind which nothing comes.
    fn add_enclosure(&self, name: &str, id: &str) {
        let dir = std::fs::canonicalize(self.router("0-1")).expect("a router").with_file_name(name);
        std::fs::create_dir(&dir).expect("made");
        for (file, text) in [("authorized", "0"), ("unique_id", id), ("vendor_name", "Other")] {
            std::fs::write(dir.join(file), format!("{text}\n")).expect("written");
        }
        symlink(&dir, self.router(name)).expect("linked");
    }
}

/// `egpu watch` under way.
struct Watch {
    child: Child,
    lines: Receiver<String>,
}

impl Watch {
    fn start(lab: &Lab) -> Self {
        Self::start_with(lab, &[])
    }

    fn start_with(lab: &Lab, options: &[&str]) -> Self {
        let mut command = lab.command(&["egpu", "watch", "--interval", "100"]);
        command.args(options);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started");
        let (send, lines) = channel();
        let read = |from: Box<dyn std::io::Read + Send>| {
            let send = send.clone();
            std::thread::spawn(move || {
                BufReader::new(from).lines().map_while(Result::ok).try_for_each(|line| send.send(line))
            });
        };
        read(Box::new(child.stdout.take().expect("its output")));
        read(Box::new(child.stderr.take().expect("its errors")));
        Self { child, lines }
    }

    /// Waits for a line with this text.
    fn says(&self, text: &str) {
        let until = Instant::now() + SOON;
        let mut said = Vec::new();
        while let Ok(line) = self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            if line.contains(text) {
                return;
            }
            said.push(line);
        }
        panic!("it does not say {text:?}: {said:#?}");
    }

    fn end(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).expect("sent");
        assert_eq!(self.child.wait().expect("its end").code(), Some(0));
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What is connected is watched over, whatever would be connected now.
#[test]
fn what_the_policy_would_refuse_is_stopped_when_it_is_too_hot() {
    let lab = Lab::new();
    lab.does(&["egpu", "policy", "--authorise", "never"]);
    let watch = Watch::start(&lab);
    watch.says("would not be now");
    watch.says(" ready");
    lab.inject("temperature 119");
    watch.says("it is at 119 °C (read from amdgpu of 0000:32:00.0), and the limit is 90 °C (`--hottest`)");
    watch
        .says("failed (overheated): let it cool, check the enclosure's fan and vents, then connect it again");
    assert!(!lab.is_authorised());
    watch.end();
}

/// The policy's refusal is withdrawn when the policy is another, or nothing is left to refuse.
#[test]
fn warnings_of_the_policy_are_withdrawn() {
    let lab = Lab::new();
    lab.does(&["egpu", "policy", "--authorise", "never"]);
    let watch = Watch::start_with(&lab, &["--json"]);
    watch
        .says("\"warning\":\"it is connected, and would not be now: the policy is to authorise no enclosure");
    lab.does(&["egpu", "policy", "--authorise", "ask"]);
    watch.says("\"withdrawn\":true");
    // The same reason is another warning later.
    lab.does(&["egpu", "policy", "--authorise", "never"]);
    watch.says("\"withdrawn\":false");
    lab.does(&["egpu", "disconnect"]);
    watch.says("\"withdrawn\":true");
    watch.end();
    lab.does(&["egpu", "policy", "--authorise", "ask"]);
    let watch = Watch::start(&lab);
    watch.says(" warning: it is not connected: the policy is to ask; run `vm-service egpu connect");
    lab.does(&["egpu", "policy", "--authorise", "always"]);
    watch.says(" warning withdrawn: it is not connected: the policy is to ask");
    watch.says(" ready");
    watch.end();
}

/// An enclosure that the policy now allows stays connected, although the policy did not allow it before.
#[test]
fn what_others_authorised_stays_once_the_policy_allows_it() {
    let lab = Lab::new();
    std::fs::remove_file(lab.sim().join("run/ledger/enclosure-d2030000-00a0-751e-a3f4-c0e5ae7b0d30.built"))
        .expect("it was noted as built");
    lab.does(&["egpu", "policy", "--minimum-rate", "100"]);
    let process = lab.use_gpu();
    let watch = Watch::start(&lab);
    watch.says(" warning: it was authorised by the firmware or another program, and is disconnected once");
    watch.says(" in-use");
    lab.does(&["egpu", "policy", "--minimum-rate", "0"]);
    watch.says(" warning withdrawn: it was authorised by the firmware or another program");
    std::fs::remove_dir_all(process).expect("removed");
    watch.says(" ready");
    // It would be disconnected at the look after that.
    lab.inject("sensor fails");
    watch.says(" warning: its temperature is not watched");
    assert!(lab.is_authorised());
    lab.inject("sensor works");
    watch.says(" warning withdrawn: its temperature is not watched");
    watch.end();
}

/// A tunnel that firmware or another program has built for what the policy refuses is taken down, once nobody uses it.
#[test]
fn what_others_authorised_and_the_policy_refuses_is_disconnected_once_it_is_idle() {
    let lab = Lab::new();
    std::fs::remove_file(lab.sim().join("run/ledger/enclosure-d2030000-00a0-751e-a3f4-c0e5ae7b0d30.built"))
        .expect("it was noted as built");
    lab.does(&["egpu", "policy", "--minimum-rate", "100"]);
    let process = lab.use_gpu();
    let watch = Watch::start(&lab);
    watch.says("was authorised by the firmware or another program, and is disconnected once nobody uses it: its link");
    watch.says(" in-use");
    assert!(lab.is_authorised());
    std::fs::remove_dir_all(process).expect("removed");
    watch.says(" disconnected");
    assert!(!lab.is_authorised());
    watch.end();
}

/// What stays of a cable that was pulled is reported.
#[test]
fn what_stays_of_one_that_was_pulled_is_reported() {
    let lab = Lab::new();
    let watch = Watch::start(&lab);
    watch.says(" ready");
    let router = std::fs::read_link(lab.router("0-1")).expect("a link");
    std::fs::remove_file(lab.router("0-1")).expect("removed");
    let left = "it left something behind, which is tried again: cannot settle the ledger: 0000:32:00.0 is there still";
    watch.says(&format!(" warning: {left}"));
    // It is plugged in again.
    symlink(router, lab.router("0-1")).expect("linked");
    watch.says(&format!(" warning withdrawn: {left}"));
    watch.says(" ready");
    // It cannot be read for a while.
    let (all, aside) = (lab.sim().join("sys/bus/thunderbolt/devices"), lab.dir.path().join("aside"));
    std::fs::rename(&all, &aside).expect("moved");
    symlink(&all, &all).expect("a link to itself");
    watch.says(" warning: cannot read ");
    std::fs::remove_file(&all).expect("removed");
    std::fs::rename(&aside, &all).expect("moved");
    watch.says(" warning withdrawn: cannot read ");
    watch.end();
}

/// A command on another enclosure, which takes its time, keeps nobody from being stopped.
#[test]
fn one_is_watched_over_while_another_is_connected() {
    let lab = Lab::new();
    lab.add_enclosure("0-3", "11111111-2222-3333-4444-555555555555");
    let watch = Watch::start(&lab);
    watch.says(" ready");
    let mut connect =
        lab.command(&["egpu", "connect", "0-3"]).stderr(Stdio::null()).spawn().expect("started");
    // Nothing comes, which is waited for.
    let until = Instant::now() + SOON;
    while std::fs::read_to_string(lab.router("0-3").join("authorized")).expect("read") != "1\n" {
        assert!(
            Instant::now() < until && connect.try_wait().expect("its state").is_none(),
            "it is not connected"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    lab.inject("temperature 119");
    watch.says("failed (overheated)");
    assert!(connect.try_wait().expect("its state").is_none(), "the other ended first");
    kill_process(Pid::from_child(&connect), Signal::TERM).expect("sent");
    connect.wait().expect("its end");
    watch.end();
}

/// What was pulled and plugged in again at once is connected again by the policy.
#[test]
fn one_that_was_replugged_at_once_is_connected_again() {
    let lab = Lab::new();
    lab.does(&["egpu", "policy", "--authorise", "always"]);
    let watch = Watch::start(&lab);
    watch.says(" ready");
    // Somebody takes its tunnel down: that is what they want.
    lab.does(&["egpu", "disconnect"]);
    watch.says(" disconnected");
    assert!(!lab.is_authorised());
    // Its directory is another then, with the same in it.
    let dir = std::fs::canonicalize(lab.router("0-1")).expect("a router");
    let [fresh, old] = ["fresh", "old"].map(|name| lab.dir.path().join(name));
    std::fs::create_dir(&fresh).expect("made");
    for file in std::fs::read_dir(&dir).expect("read").flatten() {
        if file.path().is_file() {
            std::fs::copy(file.path(), fresh.join(file.file_name())).expect("copied");
        }
    }
    std::fs::rename(&dir, &old).expect("moved");
    std::fs::rename(&fresh, &dir).expect("moved");
    watch.says(" absent");
    watch.says(" ready");
    assert!(lab.is_authorised());
    watch.end();
}

/// What one process injects, another meets.
#[test]
fn injected_faults_are_recovered_or_given_up() {
    let lab = Lab::new();
    lab.does(&["egpu", "policy", "--authorise", "always"]);
    let watch = Watch::start(&lab);
    watch.says(" ready");
    lab.inject("reset soft lies 1");
    lab.inject("hang hard");
    for state in [" degraded", " recovering (soft-reset)", " recovering (hard-reset)", " ready"] {
        watch.says(state);
    }
    // Whatever is done about it, it hangs; its cable helps.
    lab.inject("hang unplug");
    watch.says(" recovering (reconnect)");
    watch.says("failed (unrecovered)");
    assert!(!lab.is_authorised());
    lab.inject("unplug");
    watch.says(" absent");
    // Another thread keeps the record of that.
    let until = Instant::now() + SOON;
    while !lab.records().contains("router removed") {
        assert!(Instant::now() < until, "{}", lab.records());
        std::thread::sleep(Duration::from_millis(10));
    }
    lab.inject("plug");
    watch.says(" ready");
    watch.end();
    // What of it is USB4's, and that it is of a simulated host, is in its records.
    let records = lab.records();
    for expect in ["router discovered", "router removed", "write authorized"] {
        let found = records.lines().filter(|line| line.contains(expect)).collect::<Vec<_>>();
        assert!(!found.is_empty(), "{expect}: {records}");
        assert!(found.iter().all(|line| line.contains("\"simulated\":true")), "{found:?}");
    }
}

/// A file that can't be read keeps nobody from taking down what is connected.
#[test]
fn a_damaged_file_keeps_nobody_from_disconnecting() {
    let lab = Lab::new();
    let file = lab.sim().join("var/lib/vm-passthrough/egpu.toml");
    std::fs::create_dir_all(file.parent().unwrap_or(Path::new("/"))).expect("made");
    std::fs::write(&file, "x [").expect("written");
    let diag = lab.output(&["egpu", "diag"]);
    let said = String::from_utf8_lossy(&diag.stdout).into_owned();
    assert!(
        diag.status.code() == Some(1)
            && said.contains("FAILED  system")
            && said.contains("mend or remove it"),
        "{said}"
    );
    lab.does(&["egpu", "reset"]);
    let watch = Watch::start(&lab);
    watch.says(" ready");
    lab.does(&["egpu", "disconnect", "--force"]);
    watch.says(" disconnected");
    assert!(!lab.is_authorised());
    assert_eq!(lab.output(&["egpu", "connect"]).status.code(), Some(1));
    watch.end();
}

/// A new tunnel is for what may be connected, and for what nobody has claimed.
#[test]
fn a_reset_does_not_go_round_the_policy_or_a_claim() {
    let lab = Lab::new();
    let refused = |expect: &str| {
        let output = lab.output(&["egpu", "reset", "--reconnect"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(3) && said.contains(expect), "{:?} {said}", output.status);
        assert!(lab.is_authorised());
    };
    lab.does(&["claim", GPU]);
    refused("is claimed");
    assert!(lab.does(&["claims"]).contains(GPU));
    lab.does(&["release", GPU]);
    lab.does(&["egpu", "policy", "--authorise", "never"]);
    refused("to authorise no enclosure");
    lab.does(&["egpu", "policy", "--authorise", "ask", "--minimum-rate", "100"]);
    refused("asks for 100");
    lab.does(&["egpu", "policy", "--minimum-rate", "0"]);
    lab.does(&["egpu", "reset", "--reconnect"]);
}

/// Who does not read what is printed keeps nothing from being watched over, and the process from nothing.
#[test]
fn standard_output_that_nobody_reads_holds_nothing_up() {
    let lab = Lab::new();
    lab.does(&["egpu", "policy", "--authorise", "always"]);
    let (output, mut filled) = std::io::pipe().expect("a pipe");
    rustix::pipe::fcntl_setpipe_size(&filled, 4096).expect("a small one");
    // What a simulation prints first has room, and not much else.
    std::io::Write::write_all(&mut filled, &[b'\n'; 3900]).expect("written");
    let mut command = lab.command(&["egpu", "watch", "--interval", "100"]);
    let child = command.stdout(filled.try_clone().expect("an end")).stderr(Stdio::piped()).spawn();
    let mut child = child.expect("started");
    let errors = BufReader::new(child.stderr.take().expect("its errors"));
    std::thread::spawn(move || errors.lines().map_while(Result::ok).for_each(drop));
    let waits_until = |what: &str, holds: &dyn Fn() -> bool| {
        let until = Instant::now() + SOON;
        while !holds() {
            assert!(Instant::now() < until, "{what}");
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    // The steps of a stop are longer than what there is room for.
    lab.inject("temperature 119");
    waits_until("it is stopped", &|| !lab.is_authorised());
    lab.inject("unplug");
    lab.inject("heal");
    lab.inject("plug");
    waits_until("it is connected", &|| lab.is_authorised());
    kill_process(Pid::from_child(&child), Signal::TERM).expect("sent");
    let until = Instant::now() + SOON;
    while child.try_wait().expect("asked").is_none() {
        assert!(Instant::now() < until, "it does not end");
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(output);
}
