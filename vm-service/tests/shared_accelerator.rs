//! Guests that share the host's CPU as an accelerator, on this machine's own `/dev/kvm`. Where it does not open, or the
//! guests can't be built, these tests say so and pass.

#[path = "shared/guest.rs"]
mod guest;
#[path = "shared/process.rs"]
mod process;

use std::time::Duration;

use guest::Guest;
use process::{descriptors, kill, status, worker_of};

/// What a worker's descriptors may be: its socket, nothing, eventfds and memfds that it was given, and what the CPU's
/// accelerator reads of the host.
const KINDS: [&str; 6] =
    ["socket:", "/dev/null", "/memfd:guest-ram", "/memfd:guest-time", "anon_inode:[event", "/proc/meminfo"];

#[test]
fn a_bare_guest_launches_its_kernels_on_its_own_memory() {
    let Some(guest) = Guest::start("good", "accel", "deadline = \"1s\"") else { return };
    let ended = guest.end();
    ended.passed();
    assert!(ended.console.contains("took longer than 1s"), "the log does not say why: {}", ended.console);
    assert!(ended.messages.contains("the worker of cpu is confined: system calls"), "{}", ended.messages);
}

#[test]
fn a_hostile_guest_gets_errors_and_its_neighbour_right_results() {
    let Some(hostile) = Guest::start("hostile", "accel-hostile seed=7", "deadline = \"500ms\"") else {
        return;
    };
    let Some(steady) = Guest::start("steady", "accel-steady seconds=5", "deadline = \"5s\"") else { return };
    steady.end().passed();
    let ended = hostile.end();
    ended.passed();
    assert!(ended.messages.contains("the guest's driver broke its queue"), "{}", ended.messages);
}

#[test]
fn a_time_slice_leaves_the_rest_to_the_others() {
    // Each kernel takes its 100 ms, of which a tenth of the time is the guest's: one a second.
    let keys = "deadline = \"100ms\"\ntime_slice = \"10ms\"";
    let Some(mut guest) = Guest::start("sliced", "accel-loop seconds=4", keys) else { return };
    guest.wait_for("bare: looping");
    let begin = std::time::Instant::now();
    let ended = guest.end();
    let took = begin.elapsed().as_secs_f64();
    ended.passed();
    let words = ended.console.split_whitespace().collect::<Vec<_>>();
    let at = words.windows(2).position(|pair| pair == ["endless", "kernels"]).expect("a count");
    let stopped: f64 = words[at - 1].parse().expect("a number");
    assert!(stopped <= took + 3.0, "{stopped} kernels in {took} s");
}

#[test]
fn a_worker_that_dies_or_hangs_does_not_take_its_guest_along() {
    for (signal, name) in [(libc::SIGKILL, "killed"), (libc::SIGSTOP, "stopped")] {
        let Some(mut guest) = Guest::start(name, "accel-steady seconds=600", "") else { return };
        guest.wait_for("bare: steady");
        let worker = worker_of(guest.pid());
        kill(worker, signal);
        // The guest learns of it, and powers itself off.
        let ended = guest.end();
        assert!(ended.succeeded, "{}", ended.messages);
        assert!(ended.console.contains("the device needs a reset"), "{}\n{}", ended.console, ended.messages);
        assert!(ended.messages.contains("the worker was ended"), "{}", ended.messages);
        assert!(status(worker).is_none(), "the worker is still there");
    }
}

#[test]
fn a_worker_has_no_more_than_it_needs() {
    let Some(mut guest) = Guest::start("confined", "accel-steady seconds=600", "") else { return };
    guest.wait_for("bare: steady");
    let worker = worker_of(guest.pid());
    let status = status(worker).expect("a worker");
    for wanted in ["NoNewPrivs:\t1", "Seccomp:\t2"] {
        assert!(status.contains(wanted), "{wanted} is not in\n{status}");
    }
    if rustix::process::geteuid().is_root() {
        let user = format!("Uid:\t{0}\t{0}\t{0}\t{0}", 0x7100_0000 + worker);
        for wanted in
            [user.as_str(), "Groups:\t \n", "CapEff:\t0000000000000000", "CapPrm:\t0000000000000000"]
        {
            assert!(status.contains(wanted), "{wanted:?} is not in\n{status}");
        }
    }
    // The session and the terminal are fields 6 and 7 of stat, behind the name in brackets.
    let stat = std::fs::read_to_string(format!("/proc/{worker}/stat")).expect("stat");
    let fields: Vec<&str> = stat.rsplit_once(')').expect("a name").1.split_whitespace().collect();
    assert_eq!((fields[3], fields[4]), (worker.to_string().as_str(), "0"), "{stat}");
    let limits = std::fs::read_to_string(format!("/proc/{worker}/limits")).expect("limits");
    let data = limits.lines().find(|line| line.starts_with("Max data size")).expect("a line");
    assert!(!data.contains("unlimited"), "{data}");
    let mut files = descriptors(worker);
    // Standard error is this test's file for messages.
    files.retain(|(number, _)| *number != 2);
    for (number, file) in &files {
        assert!(KINDS.iter().any(|kind| file.starts_with(kind)), "descriptor {number} is {file}: {files:?}");
    }
    assert!(
        std::fs::read_to_string(format!("/proc/{worker}/environ")).is_ok_and(|all| !all.contains("HOME="))
    );
    // Without its VMM it ends by itself.
    let vmm = guest.pid();
    kill(vmm, libc::SIGKILL);
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    while process::status(worker).is_some() {
        assert!(std::time::Instant::now() < deadline, "the worker outlives its VMM");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_window_takes_the_hosts_vsock_and_leaves_no_queue() {
    let Some(guest) = Guest::start("window", "accel", "window = \"2M\"") else { return };
    let ended = guest.end();
    if std::path::Path::new("/dev/vhost-vsock").exists() {
        assert!(ended.console.contains("programs reach it over vsock"), "{}", ended.console);
    } else {
        assert!(!ended.succeeded && ended.console.is_empty(), "{}", ended.console);
        assert!(ended.messages.contains("load its module (`modprobe vhost_vsock`)"), "{}", ended.messages);
    }
}

#[test]
fn an_accelerator_that_is_not_there_is_said_before_the_guest_starts() {
    let Some(guest) = Guest::start_on("absent", "accel", "ffff:ff:1f.7", "") else { return };
    let ended = guest.end();
    assert!(!ended.succeeded && ended.console.is_empty(), "{}", ended.console);
    assert!(ended.messages.contains("ffff:ff:1f.7"), "{}", ended.messages);
}
