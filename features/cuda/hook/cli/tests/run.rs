//! `vmhook run`, as one calls it.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};

// Keeps the hook's library built.
use vm_cuda_fake as _;

fn vmhook(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vmhook")).args(arguments).output().expect("vmhook")
}

#[test]
fn a_program_gets_the_hook_and_its_environment() {
    let library = std::env::current_exe().expect("the test's path").with_file_name("libvmhook.so");
    let library = library.to_str().expect("a name");
    let check = |arguments: &[&str], code: i32, says: &[&str]| {
        let output = vmhook(arguments);
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(says.iter().all(|text| said.contains(text)), "{arguments:?}: {said}");
    };
    let run = |rest: &[&'static str]| [&["run", "--library", library], rest].concat();
    check(&run(&["env"]), 0, &[&format!("LD_PRELOAD={library}\n")]);
    check(&run(&["--quota", "3G", "--monitor", "env"]), 0, &["VMM_QUOTA=3221225472\n", "VMM_MODE=MONITOR\n"]);
    check(&run(&["--log", "a.log", "env"]), 0, &["/a.log\n", "VMM_LOG_LEVEL=INFO\n"]);
    check(&run(&["--level", "debug", "env", "-u", "HOME"]), 0, &["VMM_LOG_LEVEL=DEBUG\n"]);
    check(&run(&["sh", "-c", "exit 7"]), 7, &[]);
    check(&run(&["/no/such/program"]), 1, &["vmhook: can't run /no/such/program: No such file"]);
    check(&["run", "--library", "/no/libvmhook.so", "env"], 1, &["no libvmhook.so at /no/libvmhook.so"]);
    check(&run(&["--quota", "3X", "env"]), 2, &["a number of bytes"]);
    check(&run(&["--reserve", "1G", "env"]), 0, &["VMM_RESERVE=1073741824\n"]);
    check(&run(&[]), 2, &["required"]);
}

#[test]
fn a_program_is_asked_paused_and_resumed() {
    let folder = tempfile::tempdir().expect("a directory");
    let beside = |name: &str| std::env::current_exe().expect("the test's path").with_file_name(name);
    std::os::unix::fs::symlink(beside("libvm_cuda_fake.so"), folder.path().join("libcuda.so.1"))
        .expect("a link");
    let program = folder.path().join("pause");
    let mut gcc = Command::new("gcc");
    gcc.args(["-std=gnu11", "-O0", "-pthread", "-o"]).arg(&program);
    gcc.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../preload/tests/pause.c")).arg("-ldl");
    assert!(gcc.status().expect("gcc").success());
    let mut child = Command::new(env!("CARGO_BIN_EXE_vmhook"))
        .args(["run", "--quota", "1G", "--library"])
        .arg(beside("libvmhook.so"))
        .arg(&program)
        .args(["1", "2"])
        .env("LD_LIBRARY_PATH", folder.path())
        .env("XDG_RUNTIME_DIR", folder.path())
        .env("VMM_STACKS", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("vmhook");
    let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    output.read_line(&mut line).expect("a program that tells");
    assert_eq!(line, "ready\n");
    // It became the program.
    let pid = child.id().to_string();
    let check = |arguments: &[&str], code: i32, says: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_vmhook"))
            .args(arguments)
            .env("XDG_RUNTIME_DIR", folder.path())
            .output()
            .expect("vmhook");
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(says.iter().all(|text| said.contains(text)), "{arguments:?}: {said}");
    };
    check(
        &["status", &pid],
        0,
        &["(VMM): running", "quota 1.0 GiB, 3 allocations", "6.0 MiB virtual", "#1\n"],
    );
    check(
        &["status", &pid, "--stacks"],
        0,
        &["4.0 MiB in 1 allocations", "\n    allocate (", "\n    main ("],
    );
    check(
        &["status", &pid, "--json", "--largest", "1"],
        0,
        &["{\"status\":{\"pid\":", "\"bytes\":4194304,\"number\":1"],
    );
    check(
        &["pause", &pid, "--timeout", "60"],
        0,
        &["paused: 6.0 MiB given back in", "4.0 KiB of the driver's own"],
    );
    check(&["status", &pid], 0, &["paused, ", "6.0 MiB paused"]);
    let told = |to: Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vmhook"));
        command.args(["status", &pid]).env("XDG_RUNTIME_DIR", folder.path()).stdout(to);
        let output = command.stderr(Stdio::piped()).output().expect("vmhook");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let full = std::fs::File::options().write(true).open("/dev/full").expect("a full device");
    let (code, says) = told(full.into());
    assert!(code == Some(1) && says.contains("can't write to standard output"), "{code:?} {says}");
    let (reader, nobody) = std::io::pipe().expect("a pipe");
    drop(reader);
    assert_eq!(told(nobody.into()), (Some(0), String::new()));
    check(&["pause", &pid, "--json"], 0, &["{\"paused\":{\"bytes\":6291456,"]);
    check(&["resume", &pid], 0, &["running: 6.0 MiB taken again in"]);
    drop(child.stdin.take());
    assert!(child.wait().expect("an end").success());
    check(&["pause", &pid], 1, &["has no socket at", "without the hook"]);
    check(&["pause", "no number"], 2, &["invalid"]);
}
