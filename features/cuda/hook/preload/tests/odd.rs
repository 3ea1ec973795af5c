//! Programs that do what few programs do: with the hook they find what they find without.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Keeps the driver's library built.
use vm_cuda_fake as _;

fn beside(name: &str) -> PathBuf {
    std::env::current_exe().expect("the test's path").with_file_name(name)
}

fn compiled(folder: &Path) -> PathBuf {
    std::os::unix::fs::symlink(beside("libvm_cuda_fake.so"), folder.join("libcuda.so.1")).expect("a link");
    let program = folder.join("odd");
    let driver = folder.join("libcuda.so.1");
    let compile = |to: &Path, arguments: &[&std::ffi::OsStr]| {
        let mut command = Command::new("gcc");
        command.args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-pthread", "-rdynamic", "-o"]).arg(to);
        command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/odd.c")).arg("-ldl").args(arguments);
        assert!(command.status().expect("gcc").success());
    };
    compile(&program, &[]);
    let plugin = ["-DPLUGIN", "-shared", "-fPIC", "-Wl,--no-as-needed"].map(AsRef::as_ref);
    compile(&folder.join("libplugin.so"), &[&plugin[..], &[driver.as_os_str()]].concat());
    program
}

#[test]
fn odd_programs_find_the_same() {
    let folder = tempfile::tempdir().expect("a directory");
    let program = compiled(folder.path());
    let run = |what: &str, hook: bool, environment: &[(&str, &str)]| {
        let mut command = Command::new(&program);
        command
            .arg(what)
            .current_dir(folder.path())
            .env("LD_LIBRARY_PATH", folder.path())
            .env("XDG_RUNTIME_DIR", folder.path());
        command.env("VM_CUDA_FAKE_MEMORY", (4u64 << 30).to_string()).envs(environment.iter().copied());
        if hook {
            command.env("LD_PRELOAD", beside("libvmhook.so"));
        }
        let output = command.output().expect("the program");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{what}, hook {hook}: {}\n{}", output.status, text(&output.stderr));
        text(&output.stdout)
    };
    let check = |what: &str, expected: &str, environment: &[(&str, &str)]| {
        assert_eq!(run(what, false, environment), expected, "{what}, without");
        assert_eq!(run(what, true, environment), expected, "{what}, with");
    };
    let failed = "too large: 2\n";
    check(
        "asks for its own",
        "own: 5, error: none\nnone: 1, error: 1\na driver: 0\nno name: 1\n",
        &[("LD_LIBRARY_PATH", "")],
    );
    check("has a plugin", "seen: 1\n", &[]);
    for reserve in ["", "8M", "1G"] {
        let environment = [("VMM_QUOTA", "66M"), ("VMM_RESERVE", reserve)];
        check("ends contexts", "reset: 0\ndestroyed: 0\n", &environment);
    }
    check(
        "detaches contexts",
        "held: 41, left: 0\nheld: 41, left: 0\nprimary: 201\n",
        &[("VMM_QUOTA", "66M")],
    );
    check("copies on no stream", "none: 400\nanother's: 0, grown: 6\n", &[]);
    assert_eq!(
        run("has a quota", true, &[("VMM_QUOTA", "4M")]),
        "managed: 0\ncuMemAllocPitch_v2: 2\npitched: 0\ncuMemAlloc_v2: 2\nall: 4\n"
    );
    let moves = folder.path().join("moves");
    let told = [("VMM_LOG_LEVEL", "INFO"), ("VMM_LOG_FILE", moves.to_str().expect("a path"))];
    check("leaves a stream", "grown: 8\n", &told);
    let moves = std::fs::read_to_string(&moves).expect("the log");
    // What an array grows into lacks memory, as no device has work.
    assert!(moves.contains("\"missing\":268435456"), "{moves}");
    let log = folder.path().join("captures");
    let told = [("VMM_LOG_LEVEL", "INFO"), ("VMM_LOG_FILE", log.to_str().expect("a path"))];
    check("captures", "no capture: 1\nended: 0\n", &told);
    let log = std::fs::read_to_string(&log).expect("the log");
    // In a capture memory is the driver's own.
    for (event, mebibytes) in [("native-allocated", 100u64), ("allocated", 200), ("allocated", 300)] {
        let bytes = format!("\"bytes\":{}", mebibytes << 20);
        let event = format!("\"event\":\"{event}\"");
        assert!(
            log.lines().any(|line| line.contains(&event) && line.contains(&bytes)),
            "{event}, {bytes}\n{log}"
        );
    }
    let log = folder.path().join("numbers/log");
    std::fs::create_dir(folder.path().join("numbers")).expect("a directory");
    let own = format!("{}own: nothing\n", failed.repeat(2));
    check("uses numbers", &own, &[("VMM_LOG_FILE", log.to_str().expect("a path"))]);
    assert_eq!(std::fs::read_to_string(&log).expect("the log").matches("\"failed\"").count(), 2);
    let told = [("VMM_QUOTA", "4M"), ("VMM_LOG_FILE", "relative")];
    assert_eq!(run("clears its environment", true, &told), "8 MiB: 2\n");
    assert!(folder.path().join("relative").exists());
    check("asks for attributes", "buffer: 1, other: 0\nblock: 1, other: 0\nshared: 1, handles: 0\n", &[]);
    let log = folder.path().join("busy");
    let told = [("VMM_LOG_LEVEL", "INFO"), ("VMM_LOG_FILE", log.to_str().expect("a path"))];
    check("destroys a busy stream", "", &told);
    let log = std::fs::read_to_string(&log).expect("the log");
    for (bytes, missing) in [(300u64 << 20, 0), (310 << 20, 300u64 << 20)] {
        assert!(log.contains(&format!("\"bytes\":{bytes},\"missing\":{missing},")), "{bytes}\n{log}");
    }
    check("frees behind work", "freed: 0\nthen: 1\n", &[]);
    check("wants all", "2\n2\n2\n2\narray: 3\n", &[]);
    check("destroys what it may not", "destroyed: 201\nstill there: 77\n", &[]);
    check("tells nobody", &failed.repeat(2), &[]);
    let log = folder.path().join("log");
    check("may write nothing", &failed.repeat(2), &[("VMM_LOG_FILE", log.to_str().expect("a path"))]);
    let fifo = folder.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().expect("mkfifo").success());
    check("fails", failed, &[("VMM_LOG_FILE", fifo.to_str().expect("a path"))]);
    if Command::new("id").arg("-u").output().expect("id").stdout == b"0\n" {
        let folder = folder.path();
        std::fs::create_dir(folder.join("aim")).expect("a directory");
        std::os::unix::fs::symlink("aim", folder.join("link")).expect("a link");
        std::os::unix::fs::lchown(folder.join("link"), Some(12345), None).expect("another owner");
        check("fails", failed, &[("VMM_LOG_FILE", folder.join("link/log").to_str().expect("a path"))]);
        assert!(!folder.join("aim/log").exists());
    }
    check("cancels", "cancelled: 1, behind a call: 2\n", &[]);
}
