//! `vmhook run`, as one calls it.

use std::process::{Command, Output};

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
    check(&run(&[]), 2, &["required"]);
}
