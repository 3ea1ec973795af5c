//! `bridge serve` over each of its transports: programs find what they find before the driver, and what is no program's is refused in time.

mod certificates;
mod hostile;
mod place;
mod raw;
mod runtimes;
mod tls;
mod window;

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Command, Stdio};

use place::{Place, Way};
use rustix::fs::{CWD, FileType, mknodat};

#[test]
fn programs_find_the_same_over_each_transport() {
    let place = Place::new();
    let programs = [
        ("add", "", "wrong: 0, time: 1"),
        ("ways", "strided", "two: 0 wrong, 0 outside"),
        ("ways", "callbacks", "called: 12344"),
        ("ways", "registered", "kind 1, flags 1, copied 3000"),
        ("ways", "forks", "child: 3, 3\nparent: 5"),
        ("ways", "faults", "fault: 700 700"),
        ("ways", "threads", "in turn: 1600"),
        ("host", "threads", "threads: 200\nthreads: 400"),
    ];
    for (program, argument, says) in programs {
        let directly = place.run(Way::Driver, program, argument);
        assert!(directly.contains(says), "{program} {argument}: {directly}");
        for way in Way::BRIDGED {
            assert_eq!(place.run(way, program, argument), directly, "{program} {argument} {way:?}");
        }
    }
}

/// Where program and server share memory, managed memory is as natively. Elsewhere, and for variables, the program gets an error.
#[test]
fn managed_memory_is_shared_or_refused() {
    let place = Place::new();
    let directly = place.run(Way::Driver, "managed", "");
    for (way, allocates) in [(Way::Unix, true), (Way::Window, true), (Way::Stream, false), (Way::Tls, false)]
    {
        let says = if allocates { "1 1: 0" } else { "0 0: 801" };
        let said = place.run(way, "managed", "allocate");
        assert!(
            said.starts_with(&format!("{says}\n")) && said.ends_with("exit status: 0"),
            "{way:?}: {said}"
        );
        if allocates {
            assert_eq!(place.run(way, "managed", ""), directly, "{way:?}");
        }
    }
    let processor = std::env::current_exe().expect("the test's path").with_file_name("libvm_cuda_cpu.so");
    let place = Place::before(&processor);
    let variable = |way| {
        let said = place.run(way, "managed", "variable");
        said.lines().find(|line| line.starts_with("plain")).unwrap_or(&said).to_owned()
    };
    assert_eq!(variable(Way::Driver), "plain: 0, managed: 0");
    assert_eq!(variable(Way::Unix), "plain: 0, managed: 801");
}

/// What `host.c` finds: whether devices reach memory of the host, what can be allocated, where it is.
#[test]
fn memory_of_the_host_is_what_the_transport_allows() {
    let place = Place::new();
    let shared =
        "maps: 1\nplain: 0, pointer: 0, same: 1\nmapped: 0\nchanged: 1, copied: 1\nfreed: 0, again: 1\n";
    let copied =
        "maps: 0\nplain: 0, pointer: 801, same: 0\nmapped: 801\nchanged: 1, copied: 1\nfreed: 0, again: 1\n";
    for (way, says) in [(Way::Unix, shared), (Way::Window, shared), (Way::Stream, copied), (Way::Tls, copied)]
    {
        let said = place.run(way, "host", "");
        assert_eq!(said, format!("{says}exit status: 0"), "{way:?}");
    }
    place.until("their workers end", || place.workers().is_empty());
    // All but the ninth of the window that is kept for others, and again what was given back.
    let said = place.run(Way::Window, "host", "fills");
    assert_eq!(said, "had: 12, then 2\nagain: 12, then 2\nexit status: 0", "two of 14 are its lane's");
    place.until("its worker ends", || place.workers().is_empty());
    let mut streams = place.command(Way::Window, "host", "fills");
    let output = streams.env("VM_BRIDGE_STREAM", "1").output().expect("the program");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "had: 14, then 2\nagain: 14, then 2\n");
    place.until("its worker ends", || place.workers().is_empty());
    // What another program held that was killed is free when its worker has ended.
    let mut holds =
        place.command(Way::Window, "host", "holds").stdout(Stdio::piped()).spawn().expect("spawned");
    let mut line = String::new();
    BufReader::new(holds.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
    assert_eq!(line, "had: 12, then 2\n");
    assert_eq!(place.run(Way::Window, "host", "one"), "one: 2\nexit status: 0");
    holds.kill().expect("killed");
    holds.wait().expect("ended");
    place.until("the window is free", || place.run(Way::Window, "host", "one") == "one: 0\nexit status: 0");
    // A window that is not the server's is not used.
    let other = place.path("other");
    std::fs::File::create(&other).and_then(|file| file.set_len(65 << 20)).expect("a file");
    let fifo = place.path("fifo");
    mknodat(CWD, &fifo, FileType::Fifo, 0o600.into(), 0).expect("a FIFO");
    let refused = "not a regular file";
    for (window, says) in
        [(&*other, "it is not the server's"), (Path::new("/dev/zero"), refused), (&fifo, refused)]
    {
        let mut command = place.command(Way::Window, "host", "");
        let output = command.env("VM_BRIDGE_WINDOW", window).output().expect("run");
        assert_eq!(String::from_utf8_lossy(&output.stdout), copied, "{}", window.display());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(says), "{said}");
    }
}

#[test]
fn a_program_reads_certificates_and_keys_from_regular_files_only() {
    let place = Place::new();
    let fifo = place.path("fifo");
    mknodat(CWD, &fifo, FileType::Fifo, 0o600.into(), 0).expect("a FIFO");
    for name in ["VM_BRIDGE_CERTIFICATE", "VM_BRIDGE_KEY", "VM_BRIDGE_CA"] {
        let program = place.command(Way::Tls, "host", "");
        // A program that waits for a FIFO's writer is ended.
        let mut command = Command::new("timeout");
        command.arg("300").arg(program.get_program()).args(program.get_args());
        command.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let output = command.env(name, &fifo).output().expect("run");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(&format!("fifo, which {name} names: not a regular file")), "{output:?}");
    }
}

#[test]
fn who_is_killed_ends_the_other_side_and_nothing_else() {
    let place = Place::new();
    for way in Way::BRIDGED {
        let endless = || {
            let mut child =
                place.command(way, "ways", "endless").stdout(Stdio::piped()).spawn().expect("spawned");
            let mut output = BufReader::new(child.stdout.take().expect("its output"));
            let mut line = String::new();
            output.read_line(&mut line).expect("a line");
            assert_eq!(line, "works\n", "{way:?}");
            (child, output)
        };
        let (mut first, mut said_by_first) = endless();
        let worker = place.workers()[0];
        let (mut second, _second_output) = endless();
        second.kill().expect("killed");
        second.wait().expect("ended");
        place.until("its worker ends", || place.workers() == [worker]);
        assert!(first.try_wait().expect("asked").is_none(), "{way:?}: it works on");
        let worker = rustix::process::Pid::from_raw(worker).expect("a process");
        rustix::process::kill_process(worker, rustix::process::Signal::KILL).expect("killed");
        let mut said = String::new();
        said_by_first.read_to_string(&mut said).expect("what it says");
        assert_eq!(said, "ends: 46 46 CUDA_ERROR_DEVICE_UNAVAILABLE\n", "{way:?}");
        assert!(first.wait().expect("ended").success());
        place.until("no worker is left", || place.workers().is_empty());
    }
}
