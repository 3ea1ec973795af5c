//! Guests that share the host's CPU as an accelerator, on this machine's own `/dev/kvm`. Where it does not open, or the
//! guests can't be built, these tests say so and pass.

#[path = "shared/guest.rs"]
mod guest;
#[path = "shared/process.rs"]
mod process;

use std::time::Duration;

use guest::Guest;
use process::{VMM, WORKER, child_of, descriptors, kill, status, tasks};

/// What a worker's descriptors may be: its socket, nothing, eventfds and memfds that it was given, and what the CPU's
/// accelerator reads of the host.
const KINDS: [&str; 6] =
    ["socket:", "/dev/null", "/memfd:guest-ram", "/memfd:guest-time", "anon_inode:[event", "/proc/meminfo"];

/// What a VMM's may be beside that: what its guest is made of, and the pipe for the console.
const KINDS_VMM: [&str; 7] =
    ["socket:", "/dev/null", "/memfd:guest-", "anon_inode:[event", "anon_inode:kvm-", "/dev/kvm", "pipe:"];

#[test]
fn a_bare_guest_launches_its_kernels_on_its_own_memory() {
    let Some(guest) = Guest::start("good", "accel", "deadline = \"1s\"") else { return };
    let ended = guest.end();
    ended.passed();
    assert!(ended.console.contains("took longer than 1s"), "the log does not say why: {}", ended.console);
    assert!(ended.messages.contains("the worker of cpu is confined: system calls"), "{}", ended.messages);
}

/// On QNN's emulated Hexagon.
#[cfg(feature = "npu")]
#[test]
fn a_bare_guest_runs_its_models_on_an_npu() {
    let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../features/accelerator/backends/npu/tests/fetch-onnxruntime");
    let fetched = std::process::Command::new(script).output().expect("a shell");
    if !fetched.status.success() {
        println!("skipped: {}", String::from_utf8_lossy(&fetched.stderr).trim());
        return;
    }
    // Those that Linux has come first.
    let number = std::fs::read_dir("/sys/class/accel").map_or(0, Iterator::count);
    let npu = format!("npu:{number}");
    let Some(guest) = Guest::start_on("npu", "accel-model", &npu, "deadline = \"20s\"") else { return };
    let ended = guest.end();
    ended.passed();
    let confined = format!("the worker of {npu} is confined: system calls, files, signals");
    assert!(ended.messages.contains(&confined), "{}", ended.messages);
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
    // Each kernel takes its 300 ms, of which a tenth of the time is the guest's: one in three seconds. On a busy machine one that ends by itself
    // may take long, too.
    let keys = "deadline = \"300ms\"\ntime_slice = \"10ms\"";
    let Some(mut guest) = Guest::start("sliced", "accel-loop seconds=6", keys) else { return };
    guest.wait_for("bare: looping");
    let begin = std::time::Instant::now();
    let ended = guest.end();
    let took = begin.elapsed().as_secs_f64();
    ended.passed();
    let words = ended.console.split_whitespace().collect::<Vec<_>>();
    let at = words.windows(2).position(|pair| pair == ["endless", "kernels"]).expect("a count");
    let stopped: f64 = words[at - 1].parse().expect("a number");
    assert!(stopped <= took / 3.0 + 2.0, "{stopped} kernels in {took} s");
}

#[test]
fn a_worker_that_dies_or_hangs_does_not_take_its_guest_along() {
    for (signal, name) in [(libc::SIGKILL, "killed"), (libc::SIGSTOP, "stopped")] {
        let Some(mut guest) = Guest::start(name, "accel-steady seconds=600", "") else { return };
        guest.wait_for("bare: steady");
        let worker = child_of(guest.pid(), WORKER);
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
    let worker = child_of(guest.pid(), WORKER);
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
    // Without their keeper both end by themselves.
    let both = [worker, child_of(guest.pid(), VMM)];
    kill(guest.pid(), libc::SIGKILL);
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    while both.into_iter().any(|process| process::status(process).is_some()) {
        assert!(std::time::Instant::now() < deadline, "the worker or the VMM outlives its keeper");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_vmm_has_no_more_than_it_needs_on_any_thread() {
    let Some(mut guest) = Guest::start("alone", "accel-steady seconds=600", "") else { return };
    guest.wait_for("bare: steady");
    let vmm = child_of(guest.pid(), VMM);
    let mut wanted = ["NoNewPrivs:\t1", "Seccomp:\t2"].map(str::to_owned).to_vec();
    if rustix::process::geteuid().is_root() {
        wanted.push(format!("Uid:\t{0}\t{0}\t{0}\t{0}", 0x7100_0000 + vmm));
        wanted.push("Groups:\t \n".into());
        wanted.extend(["Eff", "Prm", "Bnd"].map(|set| format!("Cap{set}:\t0000000000000000")));
    }
    let threads: Vec<_> = tasks(vmm).collect();
    for thread in &threads {
        let status = std::fs::read_to_string(thread.join("status")).expect("a thread");
        for wanted in &wanted {
            assert!(status.contains(wanted), "{wanted:?} is not in\n{status}");
        }
    }
    assert!(threads.len() > 5, "{threads:?}");
    let mut files = descriptors(vmm);
    let sockets: std::collections::BTreeSet<_> =
        files.iter().map(|(_, file)| file).filter(|file| file.starts_with("socket:")).collect();
    let count = files.iter().filter(|(_, file)| file.starts_with("socket:")).count();
    assert_eq!(count, sockets.len(), "a socket is there twice: {files:?}");
    // Standard error is a pipe to its keeper.
    files.retain(|(number, file)| *number != 2 && !file.ends_with("/bare"));
    for (number, file) in &files {
        assert!(
            KINDS_VMM.iter().any(|kind| file.starts_with(kind)),
            "descriptor {number} is {file}: {files:?}"
        );
    }
    kill(vmm, libc::SIGKILL);
    let ended = guest.end();
    let expect =
        "the guest's VMM was killed; see its messages in the log, and the Linux kernel's log (dmesg)";
    assert!(!ended.succeeded && ended.messages.contains(expect), "{}", ended.messages);
    assert!(
        ended.messages.contains("the guest's VMM is confined: system calls, files, signals"),
        "{}",
        ended.messages
    );
    assert!(!ended.messages.contains("threads that began before"), "{}", ended.messages);
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
