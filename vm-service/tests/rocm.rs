//! `launch` on AMD GPUs of a fake HIP, with LLVM's code objects; and the process that assembles for a guest's worker, confined as it is.
#![cfg(all(feature = "rocm", feature = "cpu"))]

#[path = "shared/rocm.rs"]
mod shared;

use std::fs::File;
use std::io::{IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    recv, sendmsg, socketpair,
};
use vm_passthrough::PciAddress;
use vm_passthrough::accelerator::rocm::assemble::Assembler;
use vm_passthrough::sim::{SimFunction, SimHost};

/// How long what is to end may take.
const DEADLINE: Duration = Duration::from_secs(20);

/// Its kernel @spin never ends.
const TWO: &str = include_str!("two.vir");

#[test]
fn kernels_are_launched() {
    let sim = SimHost::new().expect("a simulated host");
    let at = |text: &str| text.parse::<PciAddress>().expect("an address");
    sim.add_driver("amdgpu").expect("a driver");
    for (address, group) in [("0000:65:00.0", 65), ("0000:c3:00.0", 66)] {
        sim.add(&SimFunction::new(at(address), 0x1002, 0x74a1, 0x03_80_00).group(group).driver("amdgpu"))
            .expect("a GPU");
    }
    let host = sim.plain_host();
    let fakes = [("gfx942", "0000:65:00.0"), ("gfx1100", "0000:c3:00.0")]
        .map(|(chip, address)| shared::gpu(&host.sys, chip, address));
    let fakes = match fakes {
        [Ok(one), Ok(other)] => [one, other],
        [Err(reason), _] | [_, Err(reason)] => return println!("skipped: {reason}"),
    };
    let dir = tempfile::tempdir().expect("a folder");
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vm-ir/filetests/run");
    let run = |line: &str| {
        let words = line.split_whitespace().map(|word| match word {
            "two.vir" => dir.path().join(word).display().to_string(),
            _ if word.ends_with(".vir") => kernels.join(word).display().to_string(),
            _ => word.into(),
        });
        let args = ["vm-service".into()].into_iter().chain(words).map(Into::into);
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let program = Path::new(env!("CARGO_BIN_EXE_vm-service"));
        let exit = vm_service::cli::run(args, Some(host.clone()), program, &mut out, &mut err);
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        (exit, text(out), text(err))
    };
    let check = |line: &str, exit: u8, says: &[&str]| {
        let (got, out, err) = run(line);
        assert_eq!(got, exit, "{line}: {out}{err}");
        let told = if exit == 0 { &out } else { &err };
        assert!(says.iter().all(|part| told.contains(part)), "{line}: {out}{err}");
    };
    std::fs::write(dir.path().join("two.vir"), TWO).expect("written");
    let source = |file: &str| std::fs::read_to_string(kernels.join(file)).expect("a kernel");
    for chip in ["gfx942", "gfx1100"] {
        ["silu.vir", "softmax.vir", "matmul.vir", "histogram.vir"]
            .iter()
            .for_each(|file| shared::know(chip, &source(file)));
        shared::know(chip, TWO);
    }

    let silu = "launch silu.vir --grid 4 --arg x=f32[1000]=random:1 --arg y=f32[1000] --check";
    let softmax = "launch softmax.vir --grid 3 --arg x=f32[3,1000]=random:2 --arg y=f32[3,1000] --check";
    let matmul = "launch matmul.vir --grid 3,2 --arg a=f32[20,37]=random:8 --arg b=f32[37,41]=random:9 \
                  --arg c=f32[20,41] --check --repeat 3";
    let histogram = "launch histogram.vir --grid 3 --arg x=i32[1500]=arange --arg counts=i32[64] --check";
    for (device, chip) in
        [("rocm:0", "gfx942"), ("rocm:1", "gfx1100"), ("0000:65:00.0", "gfx942"), ("0000:c3:00.0", "gfx1100")]
    {
        for line in [silu, softmax, matmul, histogram] {
            let compiled = format!("compiled for amdgcn:{chip}");
            check(&format!("{line} --device {device}"), 0, &[&compiled, "agrees"]);
        }
    }
    // What never ends is stopped, by its time and by its fuel.
    let spin = "launch two.vir --kernel spin --device rocm:0 --grid 1 --arg x=i32[1]";
    check(&format!("{spin} --deadline 0.2"), 1, &["kernel vir_spin was stopped: it took longer than 200ms"]);
    check(&format!("{spin} --fuel 1000"), 1, &["more than 1000 iterations"]);
    check(
        "launch two.vir --kernel shift --device rocm:1 --grid 1 --arg x=i32[4] --arg by=3",
        0,
        &["3 3 3 3"],
    );

    check(&silu.replace("--check", "--device rocm:2"), 1, &["there is no rocm:2", "lists 2 of AMD's GPUs"]);
    check(&silu.replace("--check", "--device rocm:x"), 2, &["`x` is no number of an AMD GPU, as in rocm:0"]);
    for fake in fakes {
        assert_eq!((fake.faults(), fake.left()), (vec![], vec![]));
    }
}

/// Sends the assembler's process a packet.
fn send(socket: &OwnedFd, order: &str, files: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(files.is_empty() || control.push(SendAncillaryMessage::ScmRights(files)));
    sendmsg(socket, &[IoSlice::new(order.as_bytes())], &mut control, SendFlags::NOSIGNAL)
        .expect("it is there");
}

#[test]
fn the_assemblers_process_is_confined_and_assembles() {
    if let Err(error) = Assembler::find() {
        return println!("skipped: {error}");
    }
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (socket, theirs) = pair.expect("a socket");
    let mut child = Command::new(env!("CARGO_BIN_EXE_vm-service"))
        .arg("accelerator-assembler")
        .env_clear()
        .stdin(theirs)
        .stdout(Stdio::null())
        .spawn()
        .expect("it starts");
    send(&socket, r#"{"Begin":{"user":true,"files":true,"calls":true}}"#, &[]);
    let mut begun = vec![0; 4096];
    let (bytes, _) = recv(&socket, &mut begun[..], RecvFlags::empty()).expect("an answer");
    let begun = String::from_utf8_lossy(&begun[..bytes]).into_owned();
    assert!(begun.starts_with(r#"{"Ok":"llvm O2 "#), "{begun}");
    // As root it is a user that nobody else is.
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).expect("it is there");
    let user = status.lines().find_map(|line| line.strip_prefix("Uid:\t")?.split('\t').next());
    let is_root = rustix::process::geteuid().is_root();
    assert!(!is_root || user.is_some_and(|user| user != "0"), "{status}");
    let ask = |code: &str, chip: &str| {
        let input = rustix::fs::memfd_create("ir", rustix::fs::MemfdFlags::CLOEXEC).expect("a file");
        let mut input = File::from(input);
        input.write_all(code.as_bytes()).expect("written");
        let (answer, end) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).expect("a pipe");
        send(&socket, &format!(r#"{{"Assemble":"{chip}"}}"#), &[input.as_fd(), end.as_fd()]);
        drop(end);
        let mut bytes = Vec::new();
        File::from(answer).read_to_end(&mut bytes).expect("an answer");
        bytes
    };
    let good = ask("define amdgpu_kernel void @k() { ret void }", "gfx942");
    assert!(good.starts_with(b"\x01\x7fELF"), "{}", String::from_utf8_lossy(&good));
    let bad = ask("define", "gfx942");
    assert!(bad.starts_with(b"\0") && String::from_utf8_lossy(&bad).contains("refused the code"), "{bad:?}");
    let none = ask("", "../gfx");
    assert!(String::from_utf8_lossy(&none).contains("names no architecture"), "{none:?}");
    drop(socket);
    assert!(child.wait().expect("it ends").success());
}

/// LLVM that never ends, in a folder of its own: its assembler starts a process more, and tells the numbers of both.
fn endless() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let mode =
        |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("set");
    // Whoever runs it may be another user.
    mode(folder.path(), 0o777);
    let at = folder.path().display();
    let script = format!("#!/bin/sh\nsleep 1000 &\necho $$ $! > {at}/new && mv {at}/new {at}/pids\nwait\n");
    for name in ["llc", "ld.lld"] {
        std::fs::write(folder.path().join(name), &script).expect("written");
        mode(&folder.path().join(name), 0o755);
    }
    folder
}

/// The processes that [`endless`] told of, once they run.
fn processes(folder: &Path) -> Vec<OwnedFd> {
    let until = Instant::now() + DEADLINE;
    loop {
        if let Ok(pids) = std::fs::read_to_string(folder.join("pids")) {
            let open = |pid: &str| process(pid.parse().expect("a number"));
            return pids.split_whitespace().map(open).collect();
        }
        assert!(Instant::now() < until, "LLVM was not started");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn process(pid: i32) -> OwnedFd {
    let pid = rustix::process::Pid::from_raw(pid).expect("a process");
    rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).expect("it runs")
}

fn end(processes: &[OwnedFd]) {
    for process in processes {
        let timeout = Timespec::try_from(DEADLINE).expect("a time");
        let ended = poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&timeout));
        assert_eq!(ended, Ok(1), "one goes on");
    }
}

#[test]
fn llvm_ends_with_a_command_that_is_killed() {
    let folder = endless();
    let silu = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vm-ir/filetests/run/silu.vir");
    let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"))
        .args(["compile", "--target", "amdgcn:gfx942", "--output"])
        .arg(folder.path().join("silu.hsaco"))
        .arg(silu)
        .env("VM_ROCM_LLVM", folder.path())
        .env("XDG_CACHE_HOME", folder.path())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let running = processes(folder.path());
    assert_eq!(running.len(), 2);
    command.kill().expect("it runs");
    command.wait().expect("it ends");
    end(&running);
}

/// Starts the assembler's process as a worker does, and does not end.
#[test]
#[ignore = "it is the process that another test starts"]
fn a_worker() {
    let folder = std::env::var_os("VM_ROCM_LLVM").expect("a folder");
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (socket, theirs) = pair.expect("a socket");
    let mut child = Command::new(env!("CARGO_BIN_EXE_vm-service"))
        .arg("accelerator-assembler")
        .stdin(theirs)
        .spawn()
        .expect("it starts");
    std::fs::write(Path::new(&folder).join("assembler"), child.id().to_string()).expect("written");
    send(&socket, r#"{"Begin":{"user":true,"files":false,"calls":true}}"#, &[]);
    let mut begun = vec![0; 4096];
    recv(&socket, &mut begun[..], RecvFlags::empty()).expect("an answer");
    let input = rustix::fs::memfd_create("ir", rustix::fs::MemfdFlags::CLOEXEC).expect("a file");
    let (_answer, end) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).expect("a pipe");
    send(&socket, r#"{"Assemble":"gfx942"}"#, &[input.as_fd(), end.as_fd()]);
    child.wait().expect("it ends");
}

#[test]
fn llvm_ends_with_a_worker_that_is_killed() {
    let folder = endless();
    let mut worker = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "a_worker", "--ignored"])
        .env("VM_ROCM_LLVM", folder.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let mut running = processes(folder.path());
    let assembler = std::fs::read_to_string(folder.path().join("assembler")).expect("its number");
    running.push(process(assembler.parse().expect("a number")));
    assert_eq!(running.len(), 3);
    worker.kill().expect("it runs");
    worker.wait().expect("it ends");
    end(&running);
}
